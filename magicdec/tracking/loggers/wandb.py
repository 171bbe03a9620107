"""The tracker for Weights & Biases: the only module that imports wandb."""

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from magicdec.config.registry import facts_of_draft, has_cache
from magicdec.errors import UserError, in_one_line
from magicdec.shell import command_line
from magicdec.tracking.columns import ENDS, INTERVAL
from magicdec.tracking.store import shown
from magicdec.tracking.trackers import STEP_KEYS, FinishedRun, Logged, Settings

NAME = "W&B"
IMPORTS = ("wandb.sdk.launch",)  # by wandb.init, and takes longer than wandb itself
INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 120.0  # to upload the rest, which stays on disk too
MAX_TAG_LENGTH, MAX_ID_LENGTH = 64, 128
FILES = ("config.yaml", "generations.jsonl")  # of a run, as an artifact
LIVE_KEYS = ("live/seconds", "live/*", "repeat", "repeat/*")
_opened: dict[Path, Any] = {}  # the runs that are shown while they run, by folder
COMPLAINT = re.compile(r"^wandb: (?:WARNING|ERROR) (.*)", re.MULTILINE)
# The server's answers to an unknown key, and to a team that does not exist or is not the user's.
REFUSED = re.compile(
    r"^(?:Comm|Authentication)Error: .*(?:logged in|api.?key|permission|not found)", re.IGNORECASE
)
# Any other answer to a login, as the client puts it.
UNANSWERED = re.compile(
    r"^AuthenticationError: Failed to (?:authenticate|verify credentials) with "
)


def check(config: Settings) -> None:
    """Raise UserError for mode=online without a valid login."""
    if config["wandb"]["mode"] == "online" and (trouble := _login_trouble()):
        raise UserError(
            f"wandb.mode=online: {trouble}, or set wandb.mode=offline and send the run later"
        )


def settings(config: Settings, sweep: str | None) -> dict[str, Any]:
    """Add the group, which is the sweep by default, and the id that `wandb agent` has given."""
    group = dict(config["wandb"])
    if given := _given_id():
        group["id"] = given
    if sweep is not None:
        group["group"] = group["group"] or sweep
    return {**config, "wandb": group}


def in_sweep() -> bool:
    """Return True under `wandb agent`."""
    return _given_id() is not None


def follow(run: FinishedRun) -> Callable[[Mapping[str, Any]], None] | None:
    """Return a function that sends a line at once; None unless wandb.mode=online."""
    if run.config["wandb"]["mode"] != "online":
        return None
    with contextlib.redirect_stderr(io.StringIO()):
        opened = _open(run)
    _define(opened, LIVE_KEYS)
    _opened[run.folder] = opened
    return lambda line: opened.log(dict(line))


def log_run(run: FinishedRun) -> Logged | None:
    """Log a run. If it cannot be sent, keep it in its folder, to be sent later."""
    logged = send(run)
    if logged is None or logged.warning is None or run.config["wandb"]["mode"] != "online":
        return logged
    _stop_service()
    offline = {**run.config, "wandb": run.config["wandb"] | {"mode": "offline"}}
    kept = send(replace(run, config=offline)) or logged
    return replace(
        kept, warning="; nor offline: ".join(filter(None, [logged.warning, kept.warning]))
    )


def send(run: FinishedRun) -> Logged | None:
    """Log a run in its mode, without a fallback."""
    if run.config["wandb"]["mode"] == "disabled":
        return None
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            logged = _send(run)
    except Exception as error:
        return Logged(NAME, warning=_warning(in_one_line(error)))
    # An upload that wandb gives up is a line on stderr, not an exception.
    complaint = COMPLAINT.search(said.getvalue())
    return replace(logged, warning=_warning(complaint[1])) if complaint else logged


def log_sweep(folder: Path, config: Settings, files: Iterable[Path]) -> Logged | None:
    """Log the files of a sweep that has ended as an artifact of a run of its own, in the group of
    its runs, and its figures as media. `config` is that of one of them. What cannot be sent is kept
    in the sweep's folder.
    """
    group = config["wandb"]
    if group["mode"] == "disabled" or in_sweep():
        return None
    logged = _reported(folder, group, list(files))
    if logged.warning is None or group["mode"] != "online":
        return logged
    _stop_service()
    return replace(
        _reported(folder, {**group, "mode": "offline"}, list(files)), warning=logged.warning
    )


def _reported(folder: Path, group: Mapping[str, Any], files: list[Path]) -> Logged:
    name = f"sweep-{folder.name}"
    try:
        import wandb

        with contextlib.redirect_stderr(io.StringIO()), _tables_stay_in(folder):
            opened = _begin(
                group, folder, id=name[:MAX_ID_LENGTH], name=folder.name, job_type="sweep"
            )
            _log_files(opened, name, "sweep", files)
            # A workspace shows them by their names.
            figures = [path for path in files if path.suffix == ".png"]
            if figures:
                opened.log({f"figures/{path.stem}": wandb.Image(str(path)) for path in figures})
            return _finished(opened, group["mode"])
    except Exception as error:
        return Logged(NAME, warning=_warning(in_one_line(error)))


def connect() -> Any:
    """Return W&B's API, to look up runs. Raise UserError if it does not answer, or refuses this
    user.
    """
    if trouble := _login_trouble():
        raise UserError(trouble)
    import wandb

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return wandb.Api()
    except Exception as error:
        raise UserError(_warning(in_one_line(error))) from error


def url_of(api: Any, run: FinishedRun) -> str | None:
    """Return the address of a run that W&B has completely, else None: sending a run twice would
    duplicate its rows.
    """
    group = run.config["wandb"]
    path = "/".join(filter(None, [group["entity"], group["project"], _id(run)]))
    with contextlib.suppress(Exception):  # also raised for an unknown run
        there = api.run(path)
        if (
            there.state in ("finished", "failed")
            and there.summary.get("finished") == run.result["finished"]
        ):
            return there.url
    return None


def sync_command(folder: Path) -> str:
    """Return the command that sends an offline run."""
    return command_line(["wandb", "sync", shown(folder)])


def make_chart(entity: str, name: str, spec: Mapping[str, Any]) -> str | None:
    """Define a custom chart, drawn by Vega-Lite, for a team or user. Return the error, if any."""
    import wandb

    try:
        wandb.Api().create_custom_chart(entity, name, name, "vega2", "private", dict(spec))
    except Exception as error:
        return in_one_line(error)
    return None


def _given_id() -> str | None:
    """Return the id under which `wandb agent` waits for this run, if it has started this
    process.
    """
    return os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None


def _login_trouble() -> str | None:
    """Return why a login fails and the remedy, or None. A server that does not answer in time is no
    failure: it may answer when the run is sent.
    """
    try:
        import wandb

        # Wandb announces where it looks for credentials.
        with contextlib.redirect_stderr(io.StringIO()):
            if wandb.login(prompt=False):  # asks the server, for ten seconds at most
                return None
        return "no credentials for Weights & Biases found; run `wandb login`"
    except ImportError:
        return "the package wandb is missing: pip install wandb"
    except Exception as error:
        line = in_one_line(error)
        return (
            None
            if UNANSWERED.match(line) and not REFUSED.match(line)
            else f"{line}; run `wandb login --relogin`"
        )


def _open(run: FinishedRun) -> Any:
    """Open a run at W&B. One of the same id that is there already is replaced, points and all."""
    named = {"id": _id(run), "name": run.name, "job_type": run.config["scenario"]["name"]}
    return _begin(
        run.config["wandb"],
        run.folder,
        tags=_tags(run.config, run.result),
        config=dict(run.config),
        **named,
    )


def _begin(group: Mapping[str, Any], folder: Path, **named: Any) -> Any:
    import wandb

    options = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=INIT_TIMEOUT_S,
        finish_timeout=FINISH_TIMEOUT_S,
        finish_timeout_raises=True,
        disable_git=True,  # a remote's address and code may hold secrets
        disable_code=True,
        # The run samples its machine itself; what W&B would list is not what the run used.
        x_disable_stats=True,
        x_save_requirements=False,
    )
    return wandb.init(
        mode=group["mode"],
        dir=str(folder),
        project=group["project"],
        entity=group["entity"],
        group=group["group"],
        settings=options,
        **named,
    )


def _send(run: FinishedRun) -> Logged:
    group = run.config["wandb"]
    shown_live = _opened.pop(run.folder, None)
    with _tables_stay_in(run.folder), shown_live or _open(run) as opened:
        if shown_live is None:
            _log_history(opened, run.rows("live"))
        else:  # what is known only at the end
            opened.name = run.name
            opened.tags = tuple(_tags(run.config, run.result))
        _log_history(opened, run.rows("history"))
        _log_history(opened, run.rows("system"))
        _log_tables(opened, run.result, run.rows("samples"))
        _log_files(opened, f"run-{run.id}-files", "run", [run.folder / name for name in FILES])
        opened.summary.update(dict(run.result) | _ends(run.result))
        return _finished(opened, group["mode"], exit_code=int(run.result["status"] != "done"))


def _finished(opened: Any, mode: str, exit_code: int | None = None) -> Logged:
    """End a run, and say where it is and how one sees it."""
    folder = Path(opened.settings.sync_dir)
    opened.finish(exit_code=exit_code)
    seen = {"url": opened.url} if mode == "online" else {"command": sync_command(folder)}
    return Logged(NAME, folder, **seen)


def _ends(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the ends of every interval as numbers, which W&B's charts can draw."""
    intervals = {key: value for key, value in result.items() if key.endswith(INTERVAL) and value}
    return {
        f"{key}{end}": value
        for key, pair in intervals.items()
        for end, value in zip(ENDS, pair, strict=True)
    }


def _id(run: FinishedRun) -> str:
    return run.config["wandb"].get("id") or run.id


def _stop_service() -> None:
    """Stop W&B's service process, which would refuse the id that it has failed to start. It may be
    dead already.
    """
    with contextlib.suppress(Exception, SystemExit):
        import wandb

        wandb.teardown()


def _log_history(opened: Any, history: list[dict]) -> None:
    """Log a row per round, level of load or moment. Keep the last one out of the summary, which is
    about the run.
    """
    _define(opened, {key: None for row in history for key in row})
    for row in history:
        opened.log(row)


def _define(opened: Any, keys: Iterable[str]) -> None:
    """Keep the last value of these out of the summary, and draw them along the step key among
    them.
    """
    keys = list(keys)
    along = next((key for key in STEP_KEYS if key in keys), None)
    if along:
        opened.define_metric(along, summary="none")
    for key in keys:
        if key != along:
            opened.define_metric(key, step_metric=along, summary="none")


def _log_tables(opened: Any, result: Mapping[str, Any], samples: list[dict]) -> None:
    """Log the generated text, and a chart of the acceptance rate by position."""
    import wandb

    if samples:
        columns = [key for key, value in samples[0].items() if not isinstance(value, list)]
        rows = [[_plain(row.get(column)) for column in columns] for row in samples]
        opened.log({"generations": wandb.Table(columns=columns, data=rows)})
    prefix = "acceptance_rate/position_"
    positions = {
        int(key.removeprefix(prefix)): rate
        for key, rate in result.items()
        if key.startswith(prefix)
    }
    if positions:
        data = [[str(position), rate] for position, rate in sorted(positions.items())]
        table = wandb.Table(columns=["position", "acceptance_rate"], data=data)
        title = "Acceptance by position"
        opened.log(
            {
                "acceptance_by_position": wandb.plot.bar(
                    table, "position", "acceptance_rate", title=title
                )
            }
        )


def _log_files(opened: Any, name: str, kind: str, paths: Iterable[Path]) -> None:
    """Log the files that exist as an artifact."""
    import wandb

    artifact = wandb.Artifact(name, type=kind)
    for path in paths:
        if path.is_file():
            # A copy: repeats may be added before an offline run is sent.
            artifact.add_file(str(path))
    opened.log_artifact(artifact)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float) else str(value)


def _tags(config: Settings, result: Mapping[str, Any]) -> list[str]:
    """Return the user's tags, and the names of target, draft, policy and machine."""
    draft = config["draft"]
    kind = facts_of_draft(draft["name"])
    model = draft["model"]["name"] if kind.needs_model and not kind.shares_target else draft["name"]
    hardware = config["hardware"]["name"]
    machine = result.get("device") if hardware == "auto" else hardware
    policy = config["cache"]["policy"] if has_cache(draft["name"]) else None
    names = [config["target"]["name"], model, policy, machine]
    weights = "random weights" if result.get("weights/source") == "random" else None
    tags = [*config["wandb"]["tags"], *names, result.get("acceptance/source"), weights]
    return [tag[:MAX_TAG_LENGTH] for tag in dict.fromkeys(tags) if tag]


@contextlib.contextmanager
def _tables_stay_in(folder: Path) -> Iterator[None]:
    """Stage tables in the run's folder: an offline run needs them when it is sent, and home may be
    cleaned by then.
    """
    name, before = "WANDB_DATA_DIR", os.environ.get("WANDB_DATA_DIR")
    os.environ[name] = str(folder.absolute() / "wandb")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _warning(said: str) -> str:
    """Return the warning for an error, with a remedy if one is known."""
    hint = (
        "; `wandb login --relogin` changes the key, wandb.entity the team"
        if REFUSED.search(said)
        else ""
    )
    return f"W&B failed, {said}{hint}"
