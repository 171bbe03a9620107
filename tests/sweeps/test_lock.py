"""A run belongs to one process at a time."""

import os

import pytest

from magicdec.tracking import lock
from magicdec.tracking.lock import Busy, is_locked, locked
from magicdec.tracking.store import Run
from tests.tracking.sample import CONFIG, finished_run, result_of


def test_a_lock_is_one_process_alone_and_goes_with_it(tmp_path):
    assert not is_locked(tmp_path / "abc")
    with locked(tmp_path / "abc"):
        assert is_locked(tmp_path / "abc")
        with (
            pytest.raises(Busy, match=rf"run abc is being run by process {os.getpid()} on "),
            locked(tmp_path / "abc"),
        ):
            pass
    assert not (tmp_path / "abc").exists()


@pytest.mark.parametrize("taken_over", [True, False])
def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path, monkeypatch, taken_over):
    """Its holder removes the file after another process has opened it; a third may have made the
    next one by then.
    """
    path, take = tmp_path / ".lock", lock._flock

    def removed_meanwhile(descriptor):
        path.unlink()
        if taken_over:
            path.touch()
        take(descriptor)

    monkeypatch.setattr(lock, "_flock", removed_meanwhile)
    assert lock._try(path) is None
    monkeypatch.undo()
    descriptor = lock._try(path)
    assert descriptor is not None
    os.close(descriptor)


def test_what_a_dead_process_left_running_is_buried_by_another(tmp_path):
    before = finished_run(tmp_path)
    again = Run.open(tmp_path, "abc", CONFIG)
    pid = again.result["pid"]
    Run.mark_crashed(tmp_path, again.id, pid + 1, "not this one")
    assert result_of(again)["status"] == "running"
    with locked(tmp_path / "abc"):
        Run.mark_crashed(tmp_path, again.id, pid, "somebody else is at the next attempt")
    assert result_of(again)["status"] == "running"
    Run.mark_crashed(tmp_path, again.id, pid, "killed by SIGKILL")
    assert (result_of(before)["status"], result_of(again)["kind"]) == ("done", "crashed")
