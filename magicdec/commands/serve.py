"""`magicdec serve`: the engine behind an API like OpenAI's (completions and chats), for load
generators and others.

Overrides are those of a run, except for sampling and data: batch.size is the number of slots,
batch.context_len + batch.generate_len the largest number of tokens of a request. `/metrics` is for
Prometheus. Needs pip install 'magicdec[serve]'.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from types import ModuleType

from magicdec.config.checks import refuse_group
from magicdec.errors import UserError, exit_code
from magicdec.inputs.rules import at_least
from magicdec.scenarios.serve import served
from magicdec.serving.engine import AsyncEngine
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.slots import Slots
from magicdec.shell import command_line
from magicdec.tracking.progress import progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 2 for a user's mistake, which is printed in one
    line.
    """
    parser = argparse.ArgumentParser("magicdec serve", description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "overrides", nargs="*", help="as for a run: target=tiny draft=self batch.size=8"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="loopback by default: there is no authentication"
    )
    parser.add_argument("--port", type=int, default=8000, help="8000; 0: any that is free")
    parser.add_argument("--model", help="the name that clients ask for (target.name)")
    parser.add_argument(
        "--max-waiting", type=int, default=256, help="requests without a slot; more get 429 (256)"
    )
    grace = "seconds that running answers have after Ctrl-C or SIGTERM (20)"
    parser.add_argument("--grace", type=int, default=20, help=grace)
    options = parser.parse_intermixed_args(arguments)
    return exit_code(lambda: _serve(options))


def _serve(options: argparse.Namespace) -> None:
    if not 0 <= options.port < 1 << 16:
        raise UserError(f"--port={options.port}: must be from 0 to 65,535")
    at_least(0, "--max-waiting", options.max_waiting)
    at_least(0, "--grace", options.grace)
    refuse_group("sampling", options.overrides, "each request names its own sampling")
    app, server = _http()
    with server.bound(options.host, options.port) as listener:  # before weights are loaded
        with progress() as bars:
            plan, slots, tokenizer = served(options.overrides, bars)
        model = options.model or plan.config.target.name
        engine = AsyncEngine(Scheduler(slots))
        routes = app.create_app(engine, tokenizer, model, options.max_waiting)
        greeting = partial(_greeting, model, slots, options.max_waiting)
        place = (options.host, options.port)
        server.Server(routes, engine, *place, options.grace, greeting).run([listener])


def _http() -> tuple[ModuleType, ModuleType]:
    """Return the modules of the app and of the server. Raise UserError where a library is
    missing.
    """
    # Here, because --help needs none of them.
    try:
        from magicdec.http import app, uvicorn_server
    except ImportError as missing:
        remedy = "pip install 'magicdec[serve]'"
        raise UserError(f"serving over HTTP needs {missing.name}: {remedy}") from None
    return app, uvicorn_server


def _greeting(model: str, slots: Slots, max_waiting: int, url: str) -> list[str]:
    """Return the lines that say what is served, and a command to try."""
    room = (
        f"{slots.num_slots:,} slots of {slots.max_len:,} tokens; {max_waiting:,} more requests may"
        " wait"
    )
    body = json.dumps({"model": model, "prompt": "def main(", "max_tokens": 32, "temperature": 0})
    words = ["curl", f"{url}/v1/completions", "-H", "content-type: application/json", "-d", body]
    return [f"{model} at {url}: {room}", command_line(words)]
