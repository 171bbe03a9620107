"""Every Triton kernel in Triton's interpreter: the files interpreted_*.py next to the tests of each
folder.
"""

import os
import subprocess
import sys

import pytest

from tests.programs import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1200)  # minutes of one core, and more on a busy machine
def test_kernels_in_the_interpreter():
    """All in one new process: Triton reads when it is imported whether to interpret or to
    compile.
    """
    pytest.importorskip("triton", reason="needs Triton (Linux only)")
    files = sorted(ROOT.glob("tests/*/interpreted_*.py"))
    assert len(files) >= 4
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider"]
    command += ["-p", "tests.interpreter", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
