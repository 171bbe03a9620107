"""What Weights & Biases is told of a run, after the run store has it all. The only module that imports wandb.

Nothing that happens here loses a run: whatever goes wrong becomes a line of warning in the outcome.
"""

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from magicdec.errors import UserError
from magicdec.tracking.store import Run, shown

INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 120.0  # for uploading what is left; it stays on disk, too
MAX_TAG_LENGTH = 64
COMPLAINT = re.compile(r"^wandb: (?:WARNING|ERROR) (.*)", re.MULTILINE)
# In the words of W&B's server: a key that it does not know, a team that is not the user's, or none of that name.
REFUSED = re.compile(r"^(?:Comm|Authentication)Error: .*(?:logged in|api.?key|permission|not found)", re.IGNORECASE)
# In the words of its client, for whatever else is the answer to a login.
UNANSWERED = re.compile(r"^AuthenticationError: Failed to (?:authenticate|verify credentials) with ")


class Results(Protocol):
    """The part of a scenario's outcome that is told beyond the metrics."""

    @property
    def history(self) -> list[dict]:
        """A dict per round."""

    @property
    def samples(self) -> list[dict]:
        """Text of a few rows."""

    @property
    def system(self) -> list[dict]:
        """What the machine did meanwhile."""


@dataclass(frozen=True)
class WandbOutcome:
    """How the telling went."""

    folder: Path | None = None  # what W&B keeps of the run on disk
    url: str | None = None  # online: where to look
    sync_command: str | None = None  # offline: how to send it
    warning: str | None = None  # what went wrong, in a line


def check(settings: Mapping[str, Any]) -> None:
    """Before the work starts: raise UserError for mode=online where there is no one to log in as."""
    if settings["mode"] == "online" and (trouble := _login_trouble()):
        raise UserError(f"wandb.mode=online: {trouble}, or set wandb.mode=offline and send the run later")


def log_run(run: Run, config: Mapping[str, Any], results: Results) -> WandbOutcome:
    """Tell W&B of a run that has just ended; what it does not take is kept in the run's folder, to be sent later."""
    outcome = send(run, config, results)
    if outcome.warning is None or config["wandb"]["mode"] != "online":
        return outcome
    _forget()
    kept = send(run, {**config, "wandb": config["wandb"] | {"mode": "offline"}}, results)
    return replace(kept, warning="; nor offline: ".join(filter(None, [outcome.warning, kept.warning])))


def send(run: Run, config: Mapping[str, Any], results: Results) -> WandbOutcome:
    """Tell W&B of a stored run, in its own folder."""
    if config["wandb"]["mode"] == "disabled":
        return WandbOutcome()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            outcome = _send(run, config, results)
    except Exception as error:
        return WandbOutcome(warning=_warning(_line(error)))
    complaint = COMPLAINT.search(said.getvalue())  # for what it has given up to upload, it raises nothing
    return replace(outcome, warning=_warning(complaint[1])) if complaint else outcome


def connect() -> Any:
    """W&B's API, to look up runs; UserError where it does not answer, or not to this user."""
    if trouble := _login_trouble():
        raise UserError(trouble)
    import wandb

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return wandb.Api()
    except Exception as error:
        raise UserError(_warning(_line(error))) from error


def arrived(api: Any, run: Run, config: Mapping[str, Any]) -> str | None:
    """Where W&B shows the run, if it has all of it: what was sent once more would be added to what is there."""
    path = "/".join(filter(None, [config["wandb"]["entity"], config["wandb"]["project"], _id(run, config)]))
    with contextlib.suppress(Exception):  # raised for a run that is not there, too
        there = api.run(path)
        if there.state == "finished" and there.summary.get("finished") == run.result["finished"]:
            return there.url
    return None


def given_id() -> str | None:
    """The id under which `wandb agent` awaits this run: under another, its sweep would wait for it in vain."""
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None


def sync_command(folder: Path) -> str:
    """The command that sends an offline run."""
    return f"wandb sync {shlex.quote(shown(folder))}"


def make_chart(entity: str, name: str, spec: Mapping[str, Any]) -> str | None:
    """Give a team or user a kind of chart, drawn by Vega-Lite; returns what W&B has against it, if it has."""
    import wandb

    try:
        wandb.Api().create_custom_chart(entity, name, name, "vega2", "private", dict(spec))
    except Exception as error:
        return _line(error)
    return None


def _login_trouble() -> str | None:
    """Why one cannot log in, and what to do; None also where the server has not answered in time, as it may later."""
    try:
        import wandb

        with contextlib.redirect_stderr(io.StringIO()):  # it announces where it looks
            if wandb.login(prompt=False):  # asks the server who that is, for ten seconds at most
                return None
        return "no credentials for Weights & Biases found; run `wandb login`"
    except ImportError:
        return "the package wandb is missing: pip install wandb"
    except Exception as error:
        line = _line(error)
        return None if UNANSWERED.match(line) and not REFUSED.match(line) else f"{line}; run `wandb login --relogin`"


def _send(run: Run, config: Mapping[str, Any], results: Results) -> WandbOutcome:
    mode = config["wandb"]["mode"]
    with _tables_stay_in(run.folder):
        import wandb

        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
            disable_git=True,  # a remote's address and code may hold secrets
            disable_code=True,
            # The work is over, perhaps long ago and elsewhere: what W&B would sample or list now is not what it used.
            x_disable_stats=True,
            x_save_requirements=False,
        )
        with wandb.init(
            mode=mode,
            dir=str(run.folder),
            id=_id(run, config),
            name=_name(config, run.result),
            project=config["wandb"]["project"],
            entity=config["wandb"]["entity"],
            group=config["wandb"]["group"],
            job_type=config["scenario"]["name"],
            tags=_tags(config, run.result),
            config=dict(config),
            settings=settings,
        ) as told:
            _log_history(told, results.history)
            _log_history(told, results.system)
            _log_tables(told, run.result, results.samples)
            told.summary.update(run.result)
            folder = Path(told.settings.sync_dir)
            if mode == "online":
                return WandbOutcome(folder, url=told.url)
            return WandbOutcome(folder, sync_command=sync_command(folder))


def _id(run: Run, config: Mapping[str, Any]) -> str:
    return config["wandb"].get("id") or run.id


def _forget() -> None:
    """End W&B's service process, for which an id that it failed to start is in use; it may be dead already."""
    with contextlib.suppress(Exception, SystemExit):
        import wandb

        wandb.teardown()


def _log_history(told: Any, history: list[dict]) -> None:
    """A line per round, level of load, or moment; the last one is no summary of the run, so none of it goes there."""
    keys = {key: None for row in history for key in row}
    along = next((key for key in ("round", "concurrency", "rate", "system/seconds") if key in keys), None)
    if along:
        told.define_metric(along, summary="none")
    for key in keys:
        if key != along:
            told.define_metric(key, step_metric=along, summary="none")
    for row in history:
        told.log(row)


def _log_tables(told: Any, result: Mapping[str, Any], samples: list[dict]) -> None:
    """Generations to read, and a chart of how often a proposal is accepted at each position."""
    import wandb

    if samples:
        columns = list(samples[0])
        rows = [[_cell(row.get(column)) for column in columns] for row in samples]
        told.log({"generations": wandb.Table(columns=columns, data=rows)})
    prefix = "acceptance_rate/position_"
    positions = {int(key.removeprefix(prefix)): rate for key, rate in result.items() if key.startswith(prefix)}
    if positions:
        data = [[str(position), rate] for position, rate in sorted(positions.items())]
        table = wandb.Table(columns=["position", "acceptance_rate"], data=data)
        title = "Acceptance by position"
        told.log({"acceptance_by_position": wandb.plot.bar(table, "position", "acceptance_rate", title=title)})


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float) else str(value)


def _tags(config: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """The user's, and what runs are told apart by."""
    draft = config["draft"]
    model = draft["model"]["name"] if draft["name"] == "model" else draft["name"]
    hardware = config["hardware"]["name"]
    machine = result.get("device") if hardware == "auto" else hardware
    own = [config["target"]["name"], model, config["cache"]["policy"], machine]
    weights = "random weights" if result.get("weights/source") == "random" else None
    tags = [*config["wandb"]["tags"], *own, result.get("acceptance/source"), weights]
    return [tag[:MAX_TAG_LENGTH] for tag in dict.fromkeys(tags) if tag]


def _name(config: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return a name short enough for a legend; the id says the rest."""
    draft, cache, batch = config["draft"], config["cache"], config["batch"]
    context_len = result.get("data/context_len_mean") or batch["context_len"]
    parts = [config["target"]["name"]]
    if draft["name"] != "none":
        parts += [draft["name"], f"{cache['policy']}-{cache['budget']}", f"gamma{draft['gamma']}"]
    return " ".join([*parts, f"{batch['size']}x{context_len:.0f}"])


@contextlib.contextmanager
def _tables_stay_in(folder: Path) -> Iterator[None]:
    """Stage tables in the run's folder: an offline run keeps them until it is sent, and home may be cleaned by then."""
    name, before = "WANDB_DATA_DIR", os.environ.get("WANDB_DATA_DIR")
    os.environ[name] = str(folder.absolute() / "wandb")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _line(error: Exception) -> str:
    """An exception in a line; W&B's own may be long."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _warning(said: str) -> str:
    """What went wrong, in a line, and what to do about it where that is known."""
    hint = "; `wandb login --relogin` changes the key, wandb.entity the team" if REFUSED.search(said) else ""
    return f"W&B failed, {said}{hint}"
