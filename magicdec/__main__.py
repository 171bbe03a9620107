"""The command line as python -m magicdec."""

import sys

from magicdec.cli import main

if __name__ == "__main__":
    sys.exit(main())
