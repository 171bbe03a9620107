"""Check every command of the documentation: run it, compose its configuration, or read its arguments.

python tools/check_docs.py           # all of them, in minutes; the exit code is 1 if one fails
python tools/check_docs.py --list    # only say what is done with which

run: at small sizes. compose: runs that need a GPU, a checkpoint or hours. parse: subcommands and scripts, whose
arguments must exist. skip: other programs, such as pip and wandb.
"""

import argparse
import itertools
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "docs/quickstart.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
FILES = (path for folder in ("conf", "sweeps") for path in (ROOT / folder).rglob("*.yaml"))
PAGES += sorted(str(path.relative_to(ROOT)) for path in FILES)
# Small enough for a test; what a command is about is left alone.
SMALL = ["batch.size=2", "batch.context_len=320", "batch.generate_len=8", "scenario.repeats=1", "wandb.mode=offline"]
LOCAL_TARGETS = ("tiny", "tiny-draft")  # all others need a checkpoint
PLACEHOLDERS = re.compile(r"\b(FOLDER|FILE|NAME|TEAM|ENTITY|RUN_ID|PYTHON|CONFIG)\b|\.\.\.|org/name|/\w+/")
ELSEWHERE = re.compile(
    r"experiment=(paper|study|first|llama)|engine=(\S*,)?(vllm|llamacpp|openvino|openai)|hydra/launcher|"
    r"tensor_parallel|plugins=|tracker=|cache=\S*(strided|my_)|quantization=|--config-dir|data=pg19|data=ruler"
)
PROGRAMS = re.compile(
    r"(python|magicdec|pip|bash|wandb|curl|tensorboard|git|pre-commit|OMP_\w+|\w+-venv|MAGICDEC_\w+)\b"
)
SUBCOMMANDS = {"magicdec.tracking.report": "report", "magicdec.http.serve": "serve", "magicdec.doctor": "doctor"}


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
        content = (ROOT / page).read_text(encoding="utf-8")
        if page.endswith(".yaml"):  # its comments are a page
            content = "\n".join(" " + line[1:] for line in content.splitlines() if line.startswith("#"))
        for text in _texts(content):
            found.setdefault(text, _classified(page, text))
    return list(found.values())


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
    if "&&" in words or "experiment=planned" in words:  # the first commands, and what an earlier command writes
        return Command(page, text, "skip")
    if words[:2] == ["python", "-m"] and words[2].startswith("magicdec."):
        words = ["magicdec", SUBCOMMANDS[words[2]], *words[3:]]
    if words[0] == "magicdec" and len(words) > 1 and re.fullmatch("[a-z]+", words[1]):
        if words[1:3] == ["report", "compare"]:
            words = ["magicdec", *words[2:]]
        return Command(page, text, "parse", tuple(words[1:]))
    if launches or words[0] == "magicdec":
        arguments = tuple(words[2:] if launches else words[1:])
        return Command(page, text, "compose" if _needs_more(arguments) else "run", arguments)
    if words[0] == "python" and re.match(r"(tools|benchmarks)/\w+\.py", words[1]):
        return Command(page, text, "parse", tuple(words[1:]))
    return Command(page, text, "skip")


def _needs_more(arguments: tuple[str, ...]) -> bool:
    """Return whether a run needs a GPU, a checkpoint, another library or hours. A prediction needs none of these."""
    text = " ".join(arguments)
    if PLACEHOLDERS.search(text) or ELSEWHERE.search(text) or "+sweeps=" in text:
        return True
    targets = re.findall(r"\btarget(?:@draft\.model)?=(\S+)", text)
    predicts = "scenario=predict" in text or "scenario=plan" in text
    return not predicts and any(target not in LOCAL_TARGETS for target in targets)


def small(arguments: tuple[str, ...], runs: Path) -> list[str]:
    """Return the arguments of a run at small sizes, with flags first."""
    given = {argument.partition("=")[0] for argument in arguments}
    extra = [override for override in SMALL if override.partition("=")[0] not in given]
    return sorted([*arguments, *extra, f"runs_dir={runs}"], key=lambda argument: not argument.startswith("-"))


def jobs(arguments: tuple[str, ...]) -> list[list[str]]:
    """Return the overrides of a run, or those of each job of a multirun. A grid is a file's or the command line's."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser, keys = OverridesParser.create(), [*_grids(arguments)]
    for argument in arguments:
        if not re.match(r"-|hydra[/.]|\+hydra|\+sweeps=|plugins=|cache\.every=", argument):
            keys.append(re.sub(r"cache=(strided|my_sinks)", "cache=window", argument))
    parsed = parser.parse_overrides(keys)
    values = [
        [f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()]
        if one.is_sweep_override()
        else [one.input_line or ""]
        for one in parsed
    ]
    return [list(job) for job in itertools.product(*values)]


def _grids(arguments: tuple[str, ...]) -> Iterator[str]:
    """Yield the sweeps that files in sweeps/ and conf/experiment/ describe."""
    folders = {"+sweeps": "sweeps", "experiment": "conf/experiment"}
    for key, _, option in (argument.partition("=") for argument in arguments):
        if "-m" in arguments and key in folders and "," not in option:
            file: Any = yaml.safe_load((ROOT / folders[key] / f"{option}.yaml").read_text(encoding="utf-8"))
            for name, values in file.get("hydra", {}).get("sweeper", {}).get("params", {}).items():
                yield f"{name}={values}"


def compose(arguments: tuple[str, ...]) -> None:
    """Compose and check a run's configuration, or that of the first job of a multirun. Raise UserError for mistakes."""
    from magicdec.config.load import compose as composed

    composed(jobs(arguments)[0])


def parse(arguments: tuple[str, ...]) -> None:
    """Check that a subcommand or a script has these arguments."""
    name, *rest = arguments
    if name.endswith(".py"):
        source = (ROOT / name).read_text(encoding="utf-8")
        missing = [flag for flag in rest if flag.startswith("--") and f'"{flag.partition("=")[0]}"' not in source]
        assert not missing, f"{name} has no {missing}"
        return
    sys.path.insert(0, str(Path(__file__).parent))
    from reference import parser_of

    parser = parser_of(name)
    parser.error = lambda message: (_ for _ in ()).throw(ValueError(message))  # type: ignore[method-assign]
    if "--help" not in rest:
        parser.parse_intermixed_args(rest)


def check(command: Command) -> str:
    """Do what the command's kind says; return what is wrong, or an empty text."""
    try:
        if command.kind == "compose":
            compose(command.arguments)
        elif command.kind == "parse":
            parse(command.arguments)
        elif command.kind == "run":
            with tempfile.TemporaryDirectory() as folder:
                line = [sys.executable, str(ROOT / "launch.py"), *small(command.arguments, Path(folder, "runs"))]
                done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
                return "" if done.returncode == 0 else done.stderr[-500:]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> int:
    """Check all commands, or list them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="only print the commands with what is done with them")
    parser.add_argument("--kind", choices=("run", "compose", "parse"), help="only these")
    options = parser.parse_args()
    failed = 0
    for command in commands():
        if options.kind and command.kind != options.kind:
            continue
        wrong = "" if options.list else check(command)
        failed += bool(wrong)
        print(f"{command.kind:8}{command.page:28}{command.text}", flush=True)
        if wrong:
            print(f"    FAILED: {wrong}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
