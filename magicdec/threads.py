"""Set how OpenMP's threads wait, how many there are, and the pages of memory, before PyTorch is
imported, which reads it once. Torch-free.

libgomp's threads spin for a long time while they wait for work. On an idle machine that is fast.
With another busy process, a spinning thread takes the processor from the one that it waits for, and
a decode step takes 10 to 30 times as long. A short spin is as fast on an idle machine, and leaves a
busy one its fair share.

Where Linux gives huge pages to those who ask (the usual `madvise`), PyTorch asks only when
`THP_MEM_ALLOC_ENABLE` is set. A KV cache of half a gigabyte is 140,000 small pages, whose addresses
take a part of the time in which the cache is read.
"""

import os
import sys
from pathlib import Path

SPIN_COUNT = "20000"  # of libgomp's waiting loop, a fraction of a millisecond
# Any of them is the user's own choice.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
NUM_THREADS, HUGE_PAGES = "OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE"
CGROUPS, CPUS = Path("/sys/fs/cgroup"), Path("/sys/devices/system/cpu")


def set_defaults() -> None:
    """Let this process and those that it starts spin briefly, have no more threads than its cgroup
    pays for, and take huge pages.

    Do nothing where the user has decided, or where PyTorch is loaded already.
    """
    if "torch" in sys.modules:
        return
    if not any(name in os.environ for name in WAITING):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    if NUM_THREADS not in os.environ and usual() < num_cores():
        os.environ[NUM_THREADS] = str(usual())
    os.environ.setdefault(HUGE_PAGES, "1")


def usual() -> int:
    """Return the threads of a process whose user has set nothing: one per core that its cgroup pays
    for.
    """
    limit = cpu_limit()
    return num_cores() if limit is None else min(num_cores(), max(1, int(limit)))


def settings() -> str:
    """Return the variables that decide how threads wait and how many there are, as one would type
    them.
    """
    return " ".join(
        f"{name}={os.environ[name]}" for name in (NUM_THREADS, *WAITING) if name in os.environ
    )


def num_cores() -> int:
    """Return the number of cores that this process may run on; PyTorch takes a thread for each."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    files = {
        cpu: CPUS / f"cpu{cpu}" / "topology/thread_siblings_list" for cpu in os.sched_getaffinity(0)
    }
    return len({file.read_text() if file.exists() else cpu for cpu, file in files.items()})


def cpu_limit() -> float | None:
    """Return the processors that the quotas of this process's cgroup, and of those around it,
    amount to; None: all.
    """
    limits = []
    for folder in cgroups("cpu"):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            try:  # cgroup v1
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            except OSError:
                continue
        if quota.strip().isdecimal():  # "max" and -1 are no limit
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def cgroups(controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and of all those around it, in which a controller
    such as `cpu` has its files.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controllers if controllers else CGROUPS
        folder = root / path.lstrip("/")
        folders += [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]
    return folders
