"""The programs in benchmarks/ can be imported by name, as they import each other."""

import sys

from tests.programs import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
