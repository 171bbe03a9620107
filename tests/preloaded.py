"""The last import of the server in programs.py.

Processes that are forked from it do not visit what it has imported, a million objects, whenever
they collect garbage. Their temporary files go where their own environment says.
"""

import gc
import tempfile

from tests import ceilings  # noqa: F401

gc.freeze()
tempfile.tempdir = None  # what this process has found
