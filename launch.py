"""The command line of this checkout: the same as the command `magicdec`, without an
installation.
"""

import os
import sys
from pathlib import Path

# Workers of other launchers are processes of their own, which must import this checkout too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])
)

from magicdec.cli import main

if __name__ == "__main__":
    sys.exit(main())
