"""Run a program until our input ends, which it does when the process that started us ends, even if
it is killed.

    python -I supervisor.py PROGRAM ARGUMENTS...

The program and its children are in our process group: they get SIGTERM, and then SIGKILL.
"""

import os
import select
import signal
import subprocess
import sys
import time

GRACE_S, POLL_S = 5.0, 0.1


def end(program: subprocess.Popen) -> None:
    """End the group, and with it this process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while program.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    """Run the program; return its exit code if it ends by itself."""
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    while program.poll() is None:
        told, _, _ = select.select([0], [], [], POLL_S)
        if told and not os.read(0, 1 << 16):
            end(program)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # children that it has left
    return program.returncode if program.returncode >= 0 else 128 - program.returncode


if __name__ == "__main__":
    sys.exit(main())
