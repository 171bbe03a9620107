"""The way that threads wait, and their number."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from magicdec import threads
from tests.inputs.test_plugins import written


@pytest.fixture
def environment(monkeypatch):
    """A process that has not imported PyTorch, whose user has set nothing."""
    monkeypatch.delitem(sys.modules, "torch")
    environment: dict[str, str] = {}
    monkeypatch.setattr(threads.os, "environ", environment)
    monkeypatch.setattr(threads, "cpu_limit", lambda: None)
    monkeypatch.setattr(threads, "num_cores", lambda: 8)
    yield environment
    monkeypatch.undo()  # before pytest writes to it


def test_threads_spin_briefly(environment):
    threads.set_defaults()
    assert threads.settings() == "GOMP_SPINCOUNT=20000"


@pytest.mark.parametrize("name", threads.WAITING)
def test_what_the_user_has_set_stays(environment, monkeypatch, name):
    environment |= {name: "5", "OMP_NUM_THREADS": "7"}
    monkeypatch.setattr(threads, "cpu_limit", lambda: 2.0)
    threads.set_defaults()
    assert threads.settings() == f"OMP_NUM_THREADS=7 {name}=5"


@pytest.mark.parametrize(("own", "expected"), [({}, "1"), ({threads.HUGE_PAGES: "0"}, "0")])
def test_huge_pages_are_asked_for(environment, own, expected):
    environment |= own
    threads.set_defaults()
    assert environment[threads.HUGE_PAGES] == expected


ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not ENABLED.exists() or "[madvise]" not in ENABLED.read_text(),
    reason="all get huge pages, or none",
)
@pytest.mark.parametrize("asked", ["0", "1"])
def test_tensors_lie_in_huge_pages(asked):
    code = (
        "import magicdec, torch; x = torch.zeros(1 << 24);"
        " print(open('/proc/self/smaps_rollup').read())"
    )
    environment = os.environ | {threads.HUGE_PAGES: asked}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("AnonHugePages"))
    assert (int(line.split()[1]) > 0) == (asked == "1")


@pytest.mark.parametrize(("limit", "expected"), [(None, None), (8.0, None), (2.5, "2"), (0.4, "1")])
def test_a_quota_limits_the_threads(environment, monkeypatch, limit, expected):
    monkeypatch.setattr(threads, "cpu_limit", lambda: limit)
    threads.set_defaults()
    assert environment.get("OMP_NUM_THREADS") == expected


def test_nothing_is_set_once_pytorch_has_read_it(environment, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", object())
    threads.set_defaults()
    assert threads.settings() == ""


def test_the_package_sets_them_before_pytorch_is_imported():
    code = (
        "import magicdec, sys, os; assert 'torch' not in sys.modules;"
        " print(os.environ['GOMP_SPINCOUNT'])"
    )
    clean = {name: value for name, value in os.environ.items() if name not in threads.WAITING}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True
    )
    assert done.stdout == "20000\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"job/inner/cpu.max": "max 100000\n"}, None),
        (
            {
                "job/inner/cpu.max": "max 100000\n",
                "job/cpu.max": "150000 100000\n",
                "cpu.max": "400000 100000\n",
            },
            1.5,
        ),
        ({"job/inner/cpu.cfs_quota_us": "-1\n", "job/inner/cpu.cfs_period_us": "100000\n"}, None),
        ({"job/cpu.cfs_quota_us": "50000\n", "job/cpu.cfs_period_us": "100000\n"}, 0.5),
    ],
)
def test_the_tightest_quota_counts(tmp_path, monkeypatch, files, expected):
    written(tmp_path, files)
    monkeypatch.setattr(
        threads, "cgroups", lambda _: [tmp_path / "job/inner", tmp_path / "job", tmp_path]
    )
    assert threads.cpu_limit() == expected


def test_hyperthreads_of_one_core_count_once(tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 9}, raising=False)
    siblings = {0: "0-1", 1: "0-1", 2: "2-3"}  # nothing is known of 9
    written(
        tmp_path,
        {f"cpu{cpu}/topology/thread_siblings_list": text for cpu, text in siblings.items()},
    )
    assert threads.num_cores() == 3
