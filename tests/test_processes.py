"""Processes are noticed when they die, and end with all their children."""

import os
import signal
import subprocess
import sys
import time

import pytest

from magicdec.processes import PipedProcess, end_all, end_program, start_program

# Writes the id of a child, which ignores that its parent ends.
WITH_A_CHILD = """
import subprocess
print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
input()
"""


def program(text):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return start_program([sys.executable, "-c", text], {"ADDED": "yes"}, **pipes)


def is_running(pid):
    with open(f"/proc/{pid}/stat") as status:
        return status.read().rpartition(")")[2].split()[0] != "Z"


def has_ended(pid):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if not is_running(pid):
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_a_program_is_killed_with_its_children():
    started = program(WITH_A_CHILD)
    child = int(started.stdout.readline())
    assert is_running(child)
    end_program(started)
    assert started.returncode == -signal.SIGKILL
    assert has_ended(child)


def test_a_program_may_end_by_itself_when_its_input_is_closed():
    started = program("import os, sys; sys.stdin.read(); sys.exit(os.environ['ADDED'] == 'yes')")
    end_program(started, patience_s=30)
    assert started.returncode == 1
    started = program("import time; time.sleep(60)")
    end_program(started, patience_s=0.1)
    assert started.returncode == -signal.SIGKILL


def answer(pipe, number):
    pipe.send(number + pipe.recv())
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_the_pipe_of_a_process_that_dies_is_closed(start):
    process = PipedProcess(start, answer, 40)
    assert process.exit_code() is None
    process.pipe.send(2)
    assert process.pipe.recv() == 42
    with pytest.raises(EOFError):
        process.pipe.recv()
    assert process.exit_code(5) == -signal.SIGKILL
    end_all([process], 0)


def wait_for_the_end(pipe):
    time.sleep(60)


def start_a_worker(pipe):
    worker = PipedProcess("fork", wait_for_the_end)
    pipe.send(worker.pid)
    time.sleep(60)


def test_a_process_ends_with_the_one_that_started_it():
    first = PipedProcess("fork", start_a_worker)
    second = first.pipe.recv()
    assert is_running(second)
    end_all([first], 5)
    assert has_ended(second)
