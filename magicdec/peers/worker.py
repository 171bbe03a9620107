"""Another engine behind a pipe: reads a JSON object per line and writes one.

    python -I worker.py FILE

runs the class that a file calls WORKER, in an environment that has the engine and need not have
magicdec: nothing of it is imported here or there. The first line holds the arguments of the class,
which loads the models; the answer is {"version"}. Every later line is a batch, the arguments of
its `generate`; the answer is what it returns, and {"peak_bytes"}. After an error the answer is
{"error"}, and the process ends. It also ends with its input.
"""

import json
import os
import queue
import runpy
import sys
import threading


def status_bytes(field: str) -> int:
    """Return a field of /proc/self/status."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def listen(requests: queue.Queue) -> None:
    """Queue the lines of the input. Exit when it ends, because nobody reads the answers any
    more.
    """
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


def serve(requests: queue.Queue, answer) -> None:
    """Load the worker and answer requests."""
    make = runpy.run_path(sys.argv[1])["WORKER"]
    before = status_bytes("VmRSS") - status_bytes("RssFile")
    worker = make(**requests.get())
    answer({"version": worker.version})
    while True:
        generated = worker.generate(**requests.get())
        # Mapped files do not count.
        peak_bytes = status_bytes("VmHWM") - status_bytes("RssFile") - before
        answer({"peak_bytes": peak_bytes, "unplaced": 0} | generated)


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # engines print
    requests: queue.Queue = queue.Queue()
    threading.Thread(target=listen, args=(requests,), daemon=True).start()

    def answer(content: dict) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        serve(requests, answer)
    except Exception as error:
        kind = "import" if isinstance(error, ImportError) else "other"
        answer({"error": f"{type(error).__name__}: {error}", "kind": kind})
        raise


if __name__ == "__main__":
    main()
