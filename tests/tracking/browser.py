"""A browser that the tests of a module share: it shows one page after the other."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--no-startup-window",
    "--disable-background-networking",
]
FLAGS += ["--disable-component-update", "--disable-sync", "--remote-debugging-pipe"]
# It takes commands on descriptor 3 and answers on 4.
PIPED = 'exec "$@" 3<&0 4>&1 0</dev/null 1>&2'


class Browser:
    """A browser that has been started, by the DevTools protocol. What hangs ends by the timeout of
    its test.
    """

    def __init__(self, process: subprocess.Popen[bytes]):
        """Open its only tab."""
        self._process, self._unread, self._number = process, b"", 0
        self._events: list[str] = []
        self._session: str | None = None
        tab = self.ask("Target.createTarget", url="about:blank")
        self._session = self.ask("Target.attachToTarget", **tab, flatten=True)["sessionId"]
        self.ask("Page.enable")
        # Its clock goes on at once where nothing is left to do.
        self.ask("Emulation.setVirtualTimePolicy", policy="advance")

    def look(self, path: Path, fragment: str, expression: str) -> Any:
        """Return the value of an expression, a promise, in a page that no other look has shown: a
        browser does not load again what only differs in its fragment.
        """
        self._events.clear()
        self.ask("Page.navigate", url=f"file://{path}{fragment and '#' + fragment}")
        while "Page.loadEventFired" not in self._events:
            self._next()
        asked = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = self.ask("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer
        return answer["result"]["value"]

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the answer to a command, of the tab once there is one."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        """Return the next message, and note it if it is an event."""
        assert self._process.stdout is not None
        while b"\0" not in self._unread:
            more = self._process.stdout.read1()
            assert more, "the browser has ended"
            self._unread += more
        first, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(first)
        self._events += [message["method"]] if "method" in message else []
        return message


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Start a browser with a profile of its own, and end it."""
    command = ["sh", "-c", PIPED, "sh", CHROMIUM, *FLAGS, f"--user-data-dir={folder}"]
    with (
        (folder / "errors").open("wb") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        try:
            browser = Browser(process)
            yield browser
            browser.ask("Browser.close")
        finally:
            process.terminate()
