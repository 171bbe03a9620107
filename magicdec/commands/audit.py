"""`magicdec audit`: does an engine write with speculation what it writes without?

    magicdec audit runs/RUN_ID                                    # a run with data.save_prompts=true
    magicdec audit outputs.jsonl target=llama-3.1-8b hardware=h100 --engine-dtype bfloat16

A line of the file is one row of greedy outputs: {"prompt": TEXT or [ids], "autoregressive": [ids],
"speculative": [ids]} and, as a control, "again": [ids], which the engine has written a second time
without speculation. Every row is fed through the target again. The first token that differs is a
near-tie, which the order of floating-point sums may decide, or a defect: the target would not write
it. So is such a token behind a near-tie.
"""  # noqa: E501

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from magicdec.config.load import compose, override
from magicdec.data.tokenizer import encode_prompt
from magicdec.engine.native import NativeEngine
from magicdec.engine.output_audit import near_tie, teacher_force
from magicdec.errors import UserError, exit_code
from magicdec.inputs.others import given_path
from magicdec.inputs.rules import JSON, at_least
from magicdec.planning import build, fits
from magicdec.planning.resolve import resolve
from magicdec.planning.resolved import Plan
from magicdec.tracking.cells import new_table
from magicdec.tracking.console import Console
from magicdec.tracking.progress import Progress, progress
from magicdec.tracking.reader import load_run
from magicdec.tracking.run_files import read_lines
from magicdec.tracking.store import counted

Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
DEFECT, NEAR_TIE, UNKNOWN = "defect", "near-tie", "unknown"
BASELINE = "autoregressive"
WAYS = (BASELINE, "speculative", "again")


@dataclass(frozen=True, config=JSON)
class Line:
    """A row of recorded outputs."""

    autoregressive: Tokens
    speculative: Tokens
    prompt: str | Tokens | None = None
    again: Tokens | None = None


class Judged(NamedTuple):
    """The target's judgement of each token of an output: whether it rejects the token, and the gap
    in logits.
    """

    outside: list[float]
    gaps: list[float]


class FirstDifference(NamedTuple):
    """The first difference of an output from the baseline."""

    at: int
    # Of the baseline's token and the output's to the largest logit; of an end: None.
    gaps: tuple[float, float] | None
    why: str
    verdict: str


class AuditedRow(NamedTuple):
    """A row's outputs against its baseline."""

    number: int
    is_foreign: bool  # the target would not write the baseline
    differences: dict[str, FirstDifference | None]  # by way; None: equal


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if there is a defect."""
    parser = argparse.ArgumentParser(
        "magicdec audit", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("outputs", type=given_path, help="folder of a run, or a JSONL file")
    parser.add_argument(
        "override", nargs="*", help="KEY=VALUE: the target, and the machine that decodes again"
    )
    types = ("float32", "bfloat16", "float16")
    of_engine = "what the engine computed in; default: that of the run, or hardware.dtype"
    parser.add_argument("--engine-dtype", choices=types, help=of_engine)
    parser.add_argument(
        "--rows", type=int, default=8, metavar="N", help="rows to decode again at a time (8)"
    )
    arguments = parser.parse_args(argv)
    return exit_code(lambda: _audit(arguments))


def _audit(arguments: argparse.Namespace) -> int:
    at_least(1, "--rows", arguments.rows)
    path: Path = arguments.outputs
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; name a run's folder, or a JSONL file")
    run = load_run(path) if path.is_dir() else {}
    if path.is_dir() and not run:
        raise UserError(f"{path}: neither a run's folder nor a JSONL file")
    lines = read_lines(path / "generations.jsonl" if run else path, TypeAdapter(Line))
    if not lines:
        raise UserError(f'{path}: holds no row with "autoregressive" and "speculative" token ids')
    if any(line.prompt is None for line in lines):
        raise UserError(f"{path}: has no prompts; a run stores them with data.save_prompts=true")
    if run and run["config"].get("sampling", {}).get("temperature"):
        raise UserError(f"{path}: was sampled; only greedy outputs can be compared token by token")
    typed: list[str] = arguments.override
    models = (
        _overrides_of(run["config"], any(text.startswith("target=") for text in typed))
        if run
        else []
    )
    run_dtype = run["config"]["hardware"]["dtype"] if run else "auto"
    engine_dtype = arguments.engine_dtype or (None if run_dtype == "auto" else run_dtype)
    with progress() as bars:
        rows = list(judged(lines, [*models, *typed], engine_dtype, arguments.rows, bars))
    return _show(rows)


def _overrides_of(config: dict[str, Any], has_target: bool) -> list[str]:
    """Return the overrides that choose the type of a run, its lengths, which rotary embeddings may
    depend on, and its whole target, unless another one is chosen.
    """
    target = {} if has_target else dict(config["target"])
    if target.get("weights") == "checkpoint" and target.get("path"):
        # The checkpoint describes itself, and an architecture of modules cannot be typed.
        for key in ("architecture", "config_file"):
            target.pop(key, None)
    keys = {
        "hardware.dtype": config["hardware"]["dtype"],
        "batch.context_len": config["batch"]["context_len"],
        "batch.generate_len": config["batch"]["generate_len"],
    }
    keys |= {f"target.{key}": value for key, value in target.items()}
    return [
        *([] if has_target else ["target=custom"]),
        *(override(key, value) for key, value in keys.items()),
    ]


def judged(
    lines: Sequence[Line],
    overrides: Sequence[str],
    engine_dtype: str | None,
    num_rows: int,
    progress: Progress,
) -> Iterator[AuditedRow]:
    """Feed all rows through the target, a few at a time, and compare their outputs."""
    longest = max(2, *(len(tokens) for line in lines for tokens in outputs(line).values()))
    sizes = [
        f"batch.size={min(num_rows, len(lines))}",
        "batch.context_len=1",
        f"batch.generate_len={longest}",
        "draft=none",
    ]
    config = compose([*sizes, *overrides])
    plan = resolve(config)
    texts = any(isinstance(line.prompt, str) for line in lines)
    tokenizer: Any = build.tokenizer(plan) if texts else None
    prompts = [
        encode_prompt(tokenizer, line.prompt) if isinstance(line.prompt, str) else line.prompt or []
        for line in lines
    ]
    context_len = max(config.batch.context_len, *map(len, prompts))
    plan = resolve(replace(config, batch=replace(config.batch, context_len=context_len)))
    _check(plan, lines, prompts)
    engine = build.engine(plan, progress)
    tie = near_tie(getattr(torch, engine_dtype) if engine_dtype else plan.dtype)
    with progress.task("decoding again", total=len(lines)) as task:
        for start in range(0, len(lines), num_rows):
            part = slice(start, start + num_rows)
            yield from _of_batch(engine, lines[part], prompts[part], start, tie)
            task.advance(len(lines[part]))


def outputs(line: Line) -> dict[str, list[int]]:
    """Return the outputs of a row by the way they were written."""
    tokens = {way: getattr(line, way) for way in WAYS}
    return {way: row for way, row in tokens.items() if row}


def _check(plan: Plan, lines: Sequence[Line], prompts: Sequence[Sequence[int]]) -> None:
    """Raise UserError for rows that the target cannot read, or that need too much memory."""
    size = plan.target.config.vocab_size
    for row, (line, prompt) in enumerate(zip(lines, prompts, strict=True)):
        if not prompt:
            raise UserError(f"row {row}: its prompt has no tokens")
        if max(map(max, (prompt, *outputs(line).values()))) >= size:
            raise UserError(
                f"row {row}: holds a token outside of the target's vocabulary of {size:,}"
            )
    fits.check(plan, int(plan.config.batch.size), max(map(len, prompts)))


def _of_batch(
    engine: NativeEngine, lines: Sequence[Line], prompts: list[list[int]], first: int, tie: float
) -> Iterator[AuditedRow]:
    batch = engine.open(prompts)
    batch.decoder.prefill(engine.prefill_chunk)
    scores = {}
    for way in WAYS:
        written = [outputs(line).get(way) or line.autoregressive for line in lines]
        scores[way] = teacher_force(batch.decoder, written, tie)[:2].transpose(0, 1).tolist()
    batch.close()
    for row, line in enumerate(lines):
        tokens = outputs(line)
        judged = {way: Judged(*scores[way][row]) for way in WAYS}
        base = judged[BASELINE]
        differences = {
            way: compared(line.autoregressive, tokens[way], base, judged[way])
            for way in WAYS[1:]
            if way in tokens
        }
        yield AuditedRow(first + row, any(base.outside), differences)


def compared(
    baseline: list[int], tokens: list[int], before: Judged, after: Judged
) -> FirstDifference | None:
    """Return where an output leaves the baseline, and what that is; None if they are equal."""
    pairs = enumerate(zip_longest(baseline, tokens))
    at = next((at for at, (expected, token) in pairs if expected != token), None)
    if at is None:
        return None
    if at >= min(len(baseline), len(tokens)):
        return FirstDifference(at, None, "missing end", DEFECT)
    gaps = before.gaps[at], after.gaps[at]
    if after.outside[at] and not before.outside[at]:
        return FirstDifference(at, gaps, "", DEFECT)
    if not any(before.outside):
        late = next((n for n, is_outside in enumerate(after.outside) if is_outside), None)
        return (
            FirstDifference(at, gaps, "", NEAR_TIE)
            if late is None
            else FirstDifference(at, gaps, f"at token {late}", DEFECT)
        )
    return FirstDifference(at, gaps, "foreign baseline", UNKNOWN)


def _show(rows: Sequence[AuditedRow]) -> int:
    """Print the rows that differ, and what they amount to; return the exit code."""
    console = Console(file=sys.stdout)
    table = new_table("row", "output", "token", "gap before", "gap", "verdict", num_words=2)
    verdicts: dict[str, Counter[str]] = {way: Counter() for way in WAYS[1:]}
    for row in rows:
        for way, difference in row.differences.items():
            verdicts[way]["equal" if difference is None else difference.verdict] += 1
            if difference:
                gaps = [f"{gap:.3g}" for gap in difference.gaps or ()] or ["", ""]
                table.add_row(
                    str(row.number),
                    way,
                    str(difference.at),
                    *gaps,
                    difference.verdict + (f": {difference.why}" if difference.why else ""),
                )
    if table.row_count:
        console.print(table)
    for way, counts in verdicts.items():
        if counts:
            said = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
            title = "control, without speculation again" if way == "again" else way
            console.print(f"{title}, {counted(counts.total(), 'row')}: {said}", soft_wrap=True)
    if strange := sum(row.is_foreign for row in rows):
        console.print(
            f"in {strange} of {counted(len(rows), 'row')} the target would not write the baseline"
            " itself: check target, its weights, and --engine-dtype",
            soft_wrap=True,
        )
    return int(verdicts["speculative"][DEFECT] > 0)
