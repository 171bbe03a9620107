"""The command line as python -m magicdec."""

import sys

if __name__ == "__main__":
    # Python puts the working directory first: a random.py in it would replace the module of that
    # name everywhere.
    sys.path.append(sys.path.pop(0))
    from magicdec.cli import main

    sys.exit(main())
