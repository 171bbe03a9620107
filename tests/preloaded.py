"""The last import of the server in programs.py.

Processes that are forked from it do not visit what it has imported, a million objects, whenever
they collect garbage, and have a folder of temporary files of their own.
"""

import gc
import tempfile

from tests import ceilings  # noqa: F401

gc.freeze()
tempfile.tempdir = None  # as their environment names it
