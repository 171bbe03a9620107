"""Check every command of the documentation: run it, compose its configuration, or read its
arguments.

python tools/check_docs.py           # all of them, all three ways; the exit code is 1 if one fails
python tools/check_docs.py --list    # only say what is done with which
python tools/check_docs.py --run     # run every command that needs neither a GPU, the network nor another server
python tools/check_docs.py --run --since HEAD~1    # of these, the commands that are new or have changed

run: at small sizes. compose: runs that need a GPU, a checkpoint or hours. parse: subcommands and
scripts, whose arguments must exist. skip: other programs, such as pip and wandb.

The commands of a page run one after another in a folder of their own, which has a few runs to
report on and the plugin of docs/plugins.md. Predictions run as they are, all else at small
sizes. Each has a limit of time. What is not run is listed with the reason.
"""  # noqa: E501

import argparse
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "README.md",
    "docs/quickstart.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]
FILES = (path for folder in ("conf", "sweeps") for path in (ROOT / folder).rglob("*.yaml"))
PAGES += sorted(str(path.relative_to(ROOT)) for path in FILES)
# Small enough for a test; what a command is about is left alone.
SMALL = [
    "batch.size=2",
    "batch.context_len=320",
    "batch.generate_len=8",
    "scenario.repeats=1",
    "wandb.mode=offline",
]
SMALL_VERIFY = [
    f"scenario.{key}"
    for key in ("batch_sizes=[2]", "context_lens=[320]", "gammas=[2]", "repeats=1")
]
SMALL_PREDICTION = ["wandb.mode=offline"]  # as large as it is asked for
# A reader's own plan stays as it is, and does not stand in the way. A schedule is no option, and
# later commands of its page read it.
SMALL_PLAN = [*SMALL_PREDICTION, "scenario.save_as=of_the_documentation"]
SMALL_PROFILE = ["batch.generate_len=48", "wandb.mode=offline"]
SMALL_SERVE = [*SMALL[:3], "scenario.num_requests=4", "wandb.mode=offline"]
SHORTEST = "scenario.max_minutes=0.5"  # of repeats until they agree
LOCAL_TARGETS = ("tiny", "tiny-draft")  # all others need a checkpoint
PLACEHOLDERS = re.compile(
    r"\b(FOLDER|FILE|NAME|TEAM|ENTITY|RUN_ID|PYTHON|CONFIG)\b|\.\.\.|org/name|/\w+/"
)
ELSEWHERE = re.compile(
    r"experiment=(paper|study|first|llama)|engine=(\S*,)?(vllm|llamacpp|openvino|openai)|hydra/launcher|"
    r"tensor_parallel|plugins=|tracker=|cache=\S*(strided|my_)|quantization=|--config-dir|data=pg19|data=ruler"
)
PROGRAMS = re.compile(
    r"(python|magicdec|pip|bash|wandb|curl|tensorboard|git|pre-commit|OMP_\w+|\w+-venv|MAGICDEC_\w+)\b"
)
# Why a command is not run; the first that fits. Predictions need none of the last four.
NOT_RUN = {
    r"^(?!python|magicdec)|^python -m (venv|pytest)|&&": (
        "another program, or one that the tests run"
    ),
    r"http://|engine=openai": "needs a server",
    r"\bFOLDER|FILE|\bNAME\b|TEAM|\.\.\.|org/name": "names something of the reader's",
    r"RUN_ID|\bID(_[AB])?\b|0a1b|bench-\d|(?<![\w.])(vllm|benchmarks|profile_\w+)\.json": (
        "names the reader's results"
    ),
    r"speedup>1": "selects by what was measured",
    r"experiment=planned": "a search has written it for a GPU, or names something of the reader's",
    r"(question|conversation_trace|outputs|edits)\.jsonl|data=(pg19|ruler)": "needs a corpus",
    r"engine=\S*(vllm|llamacpp|openvino)|sweeps?[= ](peers|study)|data=mooncake": (
        "needs another engine or a corpus"
    ),
    r"magicdec (serve|sync|dashboard)": "needs a client or a server of W&B's",
    r"^python (benchmarks|tools)/": "writes pages, or reads the network",
    r"hydra/launcher=(ray|submitit\w*|joblib)|sweeps=optuna|tracker=tensorboard": "needs an extra",
    r"strided": "needs a file in the package",
}
NEEDS = {
    r"target(@draft\.model)?=(?!tiny|\{)\w|sweeps=acceptance|experiment=(llama|study)": (
        "needs a checkpoint"
    ),
    r"hardware=\d*x?[a-z]+\d": "needs a GPU",
}
PREDICTS = r"scenario=(predict|plan)|experiment=paper|sweeps=hardware"
SEEDS = [
    "-m",
    "experiment=quick",
    "cache.budget=64,128",
    "cache=streaming,window",
    "hydra/launcher=basic",
]


class Command(NamedTuple):
    """A command of a page, what is done with it, and the arguments for that."""

    page: str
    text: str
    kind: str  # run, compose, parse or skip
    arguments: tuple[str, ...] = ()


def commands(pages: list[str] = PAGES) -> list[Command]:
    """Return every command of the pages once, in their order."""
    found = {}
    for page in pages:
        for text in _texts(_content(page, (ROOT / page).read_text(encoding="utf-8"))):
            found.setdefault(text, _classified(page, text))
    return list(found.values())


def _content(page: str, text: str) -> str:
    """Return a page as Markdown: of a YAML file its comments."""
    if not page.endswith(".yaml"):
        return text
    return "\n".join(" " + line[1:] for line in text.splitlines() if line.startswith("#"))


def _texts(markdown: str) -> Iterator[str]:
    """Yield the lines of indented blocks that begin like a command, with their continuations."""
    markdown = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    for block in re.findall(r"^    +((?:[^\n]*\\\n)*[^\n]*)$", markdown, flags=re.MULTILINE):
        text = re.sub(r"\s*\\\n\s*", " ", block).strip()
        text = re.sub(r"\s{2,}#.*$", "", text)
        if PROGRAMS.match(text):
            yield text


def _classified(page: str, text: str) -> Command:
    words = shlex.split(re.sub(r"^(\w+=\S+ )+", "", text))
    launches = words[:2] == ["python", "launch.py"]
    # The first commands, and what an earlier command writes.
    if "&&" in words or "experiment=planned" in words:
        return Command(page, text, "skip")
    if words[:3] == ["python", "-m", "magicdec"]:
        words = words[2:]
    if words[0] == "magicdec" and len(words) > 1 and re.fullmatch("[a-z-]+", words[1]):
        return Command(page, text, "parse", tuple(words[1:]))
    if launches or words[0] == "magicdec":
        arguments = tuple(words[2:] if launches else words[1:])
        return Command(page, text, "compose" if _needs_more(arguments) else "run", arguments)
    if words[0] == "python" and re.match(r"(tools|benchmarks)/\w+\.py", words[1]):
        return Command(page, text, "parse", tuple(words[1:]))
    return Command(page, text, "skip")


def _needs_more(arguments: tuple[str, ...]) -> bool:
    """Return whether a run needs a GPU, a checkpoint, another library or hours. A prediction needs
    none of these.
    """
    text = " ".join(arguments)
    if PLACEHOLDERS.search(text) or ELSEWHERE.search(text) or "+sweeps=" in text:
        return True
    targets = re.findall(r"\btarget(?:@draft\.model)?=(\S+)", text)
    predicts = "scenario=predict" in text or "scenario=plan" in text
    return not predicts and any(target not in LOCAL_TARGETS for target in targets)


def small(arguments: tuple[str, ...], runs: Path) -> list[str]:
    """Return the arguments of a run at small sizes, with flags first."""
    given = {argument.partition("=")[0] for argument in arguments}
    sizes = SMALL
    if "scenario=verify" in arguments:
        sizes = [*SMALL_VERIFY, "wandb.mode=offline"]
    elif "scenario=serve" in arguments:
        sizes = SMALL_SERVE
    elif "scenario=plan" in arguments and "scenario.schedule" not in given:
        sizes = SMALL_PLAN
    elif re.search(PREDICTS, " ".join(arguments)):
        sizes = SMALL_PREDICTION
    elif "scenario.batch_sizes" in given:  # a grid of its own sizes
        sizes = SMALL_PROFILE
    extra = [override for override in sizes if override.partition("=")[0] not in given]
    shortened = [re.sub(r"^scenario\.max_minutes=.*", SHORTEST, argument) for argument in arguments]
    return sorted(
        [*shortened, *extra, f"runs_dir={runs}"], key=lambda argument: not argument.startswith("-")
    )


def jobs(arguments: tuple[str, ...]) -> list[list[str]]:
    """Return the overrides of a run, or those of each job of a multirun. A grid is a file's or the
    command line's.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser, keys = OverridesParser.create(), [*_grids(arguments)]
    for argument in arguments:
        if not re.match(r"-|hydra[/.]|\+hydra|\+sweeps=|plugins=|cache\.every=", argument):
            keys.append(re.sub(r"cache=(strided|my_sinks)", "cache=window", argument))
    parsed = parser.parse_overrides(keys)
    values = [
        (
            [f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()]
            if one.is_sweep_override()
            else [one.input_line or ""]
        )
        for one in parsed
    ]
    return [list(job) for job in itertools.product(*values)]


def _grids(arguments: tuple[str, ...]) -> Iterator[str]:
    """Yield the sweeps that files in sweeps/ and conf/experiment/ describe."""
    folders = {"+sweeps": "sweeps", "experiment": "conf/experiment"}
    for key, _, option in (argument.partition("=") for argument in arguments):
        if "-m" in arguments and key in folders and "," not in option:
            file: Any = yaml.safe_load(
                (ROOT / folders[key] / f"{option}.yaml").read_text(encoding="utf-8")
            )
            for name, values in file.get("hydra", {}).get("sweeper", {}).get("params", {}).items():
                yield f"{name}={values}"


def compose(arguments: tuple[str, ...]) -> None:
    """Compose and check a run's configuration, or that of the first job of a multirun. Raise
    UserError for mistakes.
    """
    from magicdec.config.load import compose as composed

    composed(jobs(arguments)[0])


def parse(arguments: tuple[str, ...]) -> None:
    """Check that a subcommand or a script has these arguments."""
    name, *rest = arguments
    if name.endswith(".py"):
        source = (ROOT / name).read_text(encoding="utf-8")
        missing = [
            flag
            for flag in rest
            if flag.startswith("--") and f'"{flag.partition("=")[0]}"' not in source
        ]
        assert not missing, f"{name} has no {missing}"
        return
    sys.path.insert(0, str(Path(__file__).parent))
    from reference import parser_of

    parser = parser_of(name)
    parser.error = lambda message: (_ for _ in ()).throw(ValueError(message))  # type: ignore[method-assign]
    if "--help" not in rest:
        parser.parse_intermixed_args(rest)


def check(command: Command) -> str:
    """Compose a command, or read its arguments, as its kind says; return what is wrong, or an empty
    text.
    """
    try:
        if command.kind == "compose":
            compose(command.arguments)
        elif command.kind == "parse":
            parse(command.arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def reason_not_to_run(command: Command) -> str:
    """Return why a command is not run here; an empty text if it is."""
    reasons = NOT_RUN if re.search(PREDICTS, command.text) else NOT_RUN | NEEDS
    return next((why for pattern, why in reasons.items() if re.search(pattern, command.text)), "")


def changed_since(commit: str) -> set[str]:
    """Return the texts of the commands that pages of this commit do not have."""
    known = subprocess.run(
        ["git", "rev-parse", "--verify", "-q", f"{commit}^{{commit}}"],
        cwd=ROOT,
        capture_output=True,
    )
    if known.returncode:
        sys.exit(f"--since {commit}: no such commit")
    before = set()
    for page in PAGES:
        shown = subprocess.run(
            ["git", "show", f"{commit}:{page}"], cwd=ROOT, capture_output=True, text=True
        )
        before |= set(_texts(_content(page, shown.stdout)))
    return {command.text for command in commands()} - before


def run_pages(chosen: list[Command], limit: float) -> int:
    """Run commands page by page, and print how each ended. Return how many failed."""
    pages = defaultdict(list)
    for command in chosen:
        if why := reason_not_to_run(command):
            print(f"{'not run':8}{command.page:28}{command.text}\n    {why}")
        else:
            pages[command.page].append(command)
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        start = Path(temporary, "start")
        write_examples(start)
        if pages:
            _launch([*SEEDS, *SMALL], start, 600.0)
        for number, page in enumerate(pages):
            folder = shutil.copytree(start, Path(temporary, str(number)))
            for command in pages[page]:
                wrong = run_here(command, folder, limit)
                failed += bool(wrong)
                print(f"{'FAILED' if wrong else 'ran':8}{page:28}{command.text}", flush=True)
                if wrong:
                    print(f"    {wrong}")
    return failed


def write_examples(folder: Path) -> None:
    """Write the plugin that the documentation shows."""
    page = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(python|yaml)\n(.*?)```", page, re.DOTALL)
    (folder / "conf/cache").mkdir(parents=True)
    (folder / "my_policy.py").write_text(next(text for kind, text in blocks if kind == "python"))
    (folder / "conf/cache/my_sinks.yaml").write_text(
        next(text for _, text in blocks if text.startswith("# My sinks"))
    )


def run_here(command: Command, folder: Path, limit: float) -> str:
    """Run a command in a folder. Return what is wrong, or an empty text."""
    words = shlex.split(
        re.sub(r"^python -m magicdec|^python launch\.py|^magicdec", "", command.text)
    )
    if command.kind != "parse":
        words = small(tuple(words), Path("runs"))
    try:
        done = _launch(words, folder, limit)
    except subprocess.TimeoutExpired:
        return f"it took longer than {limit:g} s"
    return "" if done.returncode == 0 else (done.stderr or done.stdout)[-500:]


def _launch(words: list[str], folder: Path, limit: float) -> subprocess.CompletedProcess[str]:
    """Run our command line in a folder."""
    line = [sys.executable, "-m", "magicdec", *sorted(words, key=lambda word: word == "-m")]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "WANDB_MODE": "offline"}
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=limit)


def main() -> int:
    """Check all commands, or list them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--list", action="store_true", help="only print the commands with what is done with them"
    )
    parser.add_argument("--kind", choices=("compose", "parse"), help="only these")
    parser.add_argument(
        "--run", action="store_true", help="run all that can run here, at small sizes"
    )
    parser.add_argument(
        "--since", metavar="COMMIT", help="with --run: only commands that are new since this commit"
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        default="",
        help="with --run: only commands that contain this text",
    )
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds of each that is run (default: 300)"
    )
    options = parser.parse_args()
    if options.run:
        new = changed_since(options.since) if options.since else None
        chosen = [
            command for command in commands() if options.only in f"{command.page} {command.text}"
        ]
        chosen = [command for command in chosen if new is None or command.text in new]
        return 1 if run_pages(chosen, options.limit) else 0
    failed = 0
    for command in commands():
        if options.kind and command.kind != options.kind:
            continue
        wrong = "" if options.list else check(command)
        failed += bool(wrong)
        print(f"{command.kind:8}{command.page:28}{command.text}", flush=True)
        if wrong:
            print(f"    FAILED: {wrong}")
    if not options.list and not options.kind:
        failed += run_pages(commands(), options.limit)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
