"""Settings for all tests."""

import gc
import getpass
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import register_random, settings

from magicdec import threads
from magicdec.threads import num_cores
from tests import ceilings, composing, worker  # noqa: F401
from tests.programs import SERVER, start_server

gc.disable()  # until all is imported, which stays: it would visit a million objects again and again
# A folder of temporary files for this process and the programs it starts, and in it the locks by
# which sweeps take turns: no test waits for the sweep of another worker, nor for a user's.
# `tmp_path` and what PyTorch has compiled stay in the system's folder.
SYSTEM = os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
COMPILED = Path(SYSTEM, f"torchinductor_{getpass.getuser()}")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(COMPILED))
TEMPORARY = tempfile.mkdtemp(prefix="magicdec-", dir=SYSTEM)
tempfile.tempdir = os.environ["TMPDIR"] = TEMPORARY
# After multiprocessing has removed what it keeps there, at -100.
Finalize(None, shutil.rmtree, (TEMPORARY, True), exitpriority=-200)
# The models here are so small that a second thread only waits; on a busy machine the threads wait
# for each other.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the programs that tests start
os.environ.setdefault("GOMP_SPINCOUNT", threads.SPIN_COUNT)  # which they would set themselves
composing.remember()
# Another one gives every test other random numbers, and the tests another order (CONTRIBUTING.md).
SEED = int(os.environ.get("MAGICDEC_TEST_SEED", "0"))
# On a busy machine an example may take any time; what hangs ends by the timeout of its test.
# Examples are the same in each run, unless another seed is asked for.
settings.register_profile("suite", deadline=None, derandomize=not SEED)
settings.load_profile("suite")


def seed_torch(number):
    """Seed PyTorch's generators. `torch.manual_seed` would format a stack for each kind of device
    that is not here.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


class TorchNumbers:
    """PyTorch's generator as Hypothesis asks for it, so that each example begins with the same
    numbers.
    """

    seed = staticmethod(seed_torch)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


TORCH = TorchNumbers()  # Hypothesis keeps a weak reference
register_random(TORCH)
# Whoever is started in the background of a script ignores Ctrl-C, and so would the programs that
# tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Tests that need a GPU are marked `gpu`; they skip visibly without one."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Return one more than there are cores: many tests wait for programs that they have started."""
    return num_cores() + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    """Fork the workers from the server of programs.py, which has imported what they need."""
    local = [spec for spec in specs if spec.popen and sys.platform == "linux"]
    if local:
        start_server()
    for spec in local:
        spec.python = worker.interpreter()


def pytest_collection_modifyitems(items):
    """Begin with the longest test, which would otherwise end long after all others. Skip tests that
    need a GPU.
    """
    if SEED:
        items.sort(key=lambda item: [seed_of(item.nodeid.split("::")[0]), seed_of(item.nodeid)])
    items.sort(key=lambda item: item.path.name != "test_interpreted.py")
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    """Take what is imported out of the garbage collector's sight: it stays, and each visit takes a
    second.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000)  # composing a configuration makes many objects that all stay in use


def pytest_runtest_teardown(item, nextitem):
    """Take what the tests of a module leave in use out of its sight, too: runs collect garbage."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def seed_of(name):
    """Return the seed of a test or a fixture: its own, whatever runs before it and in whatever
    process.
    """
    return crc32(f"{SEED} {name}".encode())


def seed_all(name):
    """Seed every generator that no test holds itself."""
    random.seed(seed_of(name))
    np.random.seed(seed_of(name))
    seed_torch(seed_of(name))


def pytest_fixture_setup(fixturedef, request):
    """Seed what tests share, too: the first of them sets it up."""
    if fixturedef.scope != "function":
        seed_all(f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param', None)}")


@pytest.fixture(autouse=True)
def seeded(request):
    """Random numbers that depend on the test alone. Fixtures that tests share are set up before."""
    seed_all(request.node.nodeid)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def no_home(monkeypatch):
    """A user without a home directory, as in a container whose /etc/passwd does not list the
    user.
    """

    def getpwuid(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", getpwuid)


@pytest.fixture
def hydra_logging():
    """Undo what Hydra does to the root logger: its handlers write to what pytest has closed by the
    next test.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def forked_ranks(monkeypatch):
    """Ranks that begin with everything imported; test_doctor.py starts some as a user's are."""
    start_server()
    monkeypatch.setattr("magicdec.scenarios.ranks.START", SERVER.get_start_method())
