"""The last import of the server in programs.py: processes that are forked from it do not visit what
it has imported, a million objects, whenever they collect garbage.
"""

import gc

from tests import ceilings  # noqa: F401

gc.freeze()
