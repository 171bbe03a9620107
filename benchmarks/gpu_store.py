"""The stored points of benchmarks/gpu.py, and the two processes that fill them: one measures, the
other watches it.

A point is noted before it starts and stored once it is measured. Whatever ends the process that
measures, a crash, a hang, the system or a lost device, costs that one point: it is stored as
failed, and a new process goes on behind it.
"""

import ctypes
import json
import signal
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.errors import UserError, is_out_of_memory
from magicdec.processes import end_program, start_program

Record = dict[str, Any]

BETWEEN_S = 300  # that a process may take for its imports, and between two points
TEARDOWN_S = 30  # that it may take to end, behind its last point
POLL_S = 0.2
# Exit codes of the process that measures; AFRESH: a new one goes on.
DONE, AFRESH, OUT_OF_TIME = 0, 3, 4
ENDED = "the time is over"
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Point:
    """One measurement, and the seconds after which it counts as hung."""

    part: str
    key: str
    measure: Callable[[], Record]
    limit_s: float = 300


@dataclass(frozen=True)
class Store:
    """A folder of points: a file for each part, and the note of the point that is being measured.

    `tar`, if any, is one file of all points, written again with each of them.
    """

    folder: Path
    commit: str = ""
    tar: Path | None = None

    def resume(self, tar: Path) -> None:
        """Take the points of a tar file, beyond those of this folder."""
        with tarfile.open(tar) as file:
            for member in file.getmembers():
                part, content = Path(member.name), file.extractfile(member)
                if content and part.suffix == ".json" and part.name == member.name:
                    self._write(part.stem, json.load(content) | self.points(part.stem))

    def pack(self) -> None:
        """Write the tar file."""
        if self.tar is None:
            return
        self.tar.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.tar.with_name(f".{self.tar.name}")
        with tarfile.open(temporary, "w") as file:
            for path in sorted(
                {*self.folder.glob("*.json"), *self.folder.glob("*.md")} - {self._note}
            ):
                file.add(path, path.name)
        temporary.replace(self.tar)

    @property
    def _note(self) -> Path:
        return self.folder / "under_way.json"

    def points(self, part: str) -> dict[str, Record]:
        """Return the stored points of a part."""
        return _read(self.folder / f"{part}.json")

    def put(self, part: str, key: str, record: Record) -> None:
        """Store a point."""
        self._write(part, self.points(part) | {key: record | {"commit": self.commit}})
        self.pack()

    def retry(self, parts: Iterable[str]) -> None:
        """Delete the points of these parts that were skipped or have failed."""
        for part in parts:
            self._write(
                part,
                {
                    k: v
                    for k, v in self.points(part).items()
                    if not {"skipped", "failed"} & v.keys()
                },
            )

    def note(self, **content: Any) -> None:
        """Note what the process that measures is about to do."""
        self._write("under_way", content)

    def noted(self) -> Record:
        """Return the last note; {} if there is none."""
        return _read(self._note)

    def drop_note(self) -> None:
        """Leave the point that is under way to another time."""
        self._note.unlink(missing_ok=True)

    def settle(self, reason: str) -> bool:
        """Store the point that was under way, if any, as failed. Return whether there was one."""
        note = self.noted()
        self.drop_note()
        if "key" not in note:
            return False
        if note["key"] not in self.points(note["part"]):
            self.put(note["part"], note["key"], {"failed": reason})
            print(f"{note['part']} {note['key']}: failed: {reason}", flush=True)
        return True

    def _write(self, name: str, content: Record) -> None:
        temporary = self.folder / f".{name}.json"
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(self.folder / f"{name}.json")


def _read(path: Path) -> Record:
    return json.loads(path.read_text()) if path.exists() else {}


def work(
    points: Iterable[Point], store: Store, until: float, device_answers: Callable[[], bool]
) -> int:
    """Measure and store what is not stored yet. Return the exit code of the process."""
    # Without its watchdog, a hang would last.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    code = DONE
    for point in points:
        if point.key in store.points(point.part):
            continue
        if time.time() > until:
            code = OUT_OF_TIME
            break
        store.note(part=point.part, key=point.key, limit_s=point.limit_s, since=time.time())
        found = outcome(point.measure)
        store.put(point.part, point.key, found)
        store.note(since=time.time())
        said = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
        print(f"{point.part} {point.key}: {', '.join(said)}", flush=True)
        # What has failed may hold memory, or its library's locks.
        if "failed" in found or not device_answers():
            code = AFRESH
            break
    store.note(code=code, since=time.time())
    return code


def outcome(measure: Callable[[], Record]) -> Record:
    """Return what was measured, or why it was not."""
    try:
        return measure()
    except (UserError, ModuleNotFoundError) as error:  # what does not fit, or is not installed
        return {"skipped": str(error)}
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        if is_out_of_memory(error):
            return {"skipped": f"out of memory ({message})"}
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {message}"}


def supervise(command: list[str], store: Store, ends: float = float("inf")) -> int:
    """Run processes that measure, one after another, until one has no more to do. Return its exit
    code.

    At `ends` nothing runs any more; what is then under way is measured another time.
    """
    store.settle("the machine or this program ended while it was measured")
    while True:
        worker = start_program([sys.executable, *command], {})
        try:
            reason = watch(worker, store, ends)
        except KeyboardInterrupt:
            store.drop_note()
            raise
        finally:
            end_program(worker)
        if reason == ENDED:
            store.drop_note()
            return OUT_OF_TIME
        code = store.noted().get("code", worker.returncode)
        if not store.settle(reason) and code != AFRESH:
            return code


def watch(worker: subprocess.Popen, store: Store, ends: float) -> str:
    """Wait until the process ends, or has taken too long for what it has noted. Return what
    happened to it.
    """
    started = time.time()
    while worker.poll() is None:
        time.sleep(POLL_S)
        if time.time() > ends:
            return ENDED
        note = store.noted()
        limit = TEARDOWN_S if "code" in note else note.get("limit_s", BETWEEN_S)
        if time.time() - note.get("since", started) > limit:
            return f"no end within {limit:g} s"
    code = worker.returncode
    return (
        f"the process ended by {signal.Signals(-code).name}"
        if code < 0
        else f"the process ended with code {code}"
    )
