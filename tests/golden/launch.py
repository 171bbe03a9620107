"""launch.py on a device of a fixed name, which is a part of a run's id; the process launcher's jobs
are this, too.
"""

import sys

from magicdec.cli import main
from magicdec.planning import resolve

if __name__ in ("__main__", "__mp_main__"):
    resolve._device_name = lambda device: "a CPU"

if __name__ == "__main__":
    sys.exit(main())
