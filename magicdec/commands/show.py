"""`magicdec show RUN`: print the end of each prompt and its continuation, round by round.

Accepted proposals are green; the other tokens are the target's own, one at the end of each round.
The table below the text shows the same without colours.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from magicdec.errors import UserError, exit_code, printable
from magicdec.inputs.others import given_path
from magicdec.inputs.rules import at_least
from magicdec.report.terminal import console
from magicdec.tracking.cells import new_table
from magicdec.tracking.console import Console
from magicdec.tracking.descriptions import described_models
from magicdec.tracking.reader import find_run
from magicdec.tracking.run_files import (
    GENERATION,
    SAMPLE,
    GenerationLine,
    Round,
    Sample,
    read_lines,
)
from magicdec.tracking.store import counted
from magicdec.tracking.unit_files import by_round

NUM_ROWS = 4  # shown without stored text, if nobody asks for one row
ACCEPTED = "bold green"
LINES = "\n\t"  # kept as they are in the text, escaped in tables


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser("magicdec show", description=__doc__)
    parser.add_argument("run", help="a run's folder, or the beginning of its id")
    parser.add_argument(
        "--runs-dir",
        type=given_path,
        default=Path("runs"),
        help="the store to look ids up in (runs)",
    )
    parser.add_argument(
        "--row",
        type=int,
        metavar="N",
        help="only this row; rows without stored text show token ids",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", default=20, help="rounds of a row to show (20; 0: all)"
    )
    options = parser.parse_args(arguments)
    return exit_code(lambda: _show(options))


def _show(options: argparse.Namespace) -> None:
    at_least(0, "--rounds", options.rounds)
    show(console(), find_run(options.run, options.runs_dir), options.row, options.rounds)


def show(out: Console, run: Mapping[str, Any], row: int | None = None, max_rounds: int = 0) -> None:
    """Print the samples of a run, or one row. Stop after `max_rounds` rounds of a row, if that is
    not 0.
    """
    samples = samples_of(Path(run["folder"]), row)
    title = Text(f"{run['id']}  {run['config']['scenario']['name']}: ", style="bold")
    out.print(title + Text(described_models(run["config"])), soft_wrap=True)
    for sample in samples:
        for part in _described(sample, max_rounds):
            out.print(part, soft_wrap=isinstance(part, Text), highlight=False)


def samples_of(folder: Path, row: int | None = None) -> list[Sample]:
    """Return the samples of a run, or one row of it. A row without stored text has token ids
    instead.

    Raise UserError if the run has stored no such row.
    """
    stored = {sample["row"]: sample for sample in read_lines(folder / "samples.jsonl", SAMPLE)}
    if row is None and stored:
        return list(stored.values())
    if row in stored:
        return [stored[row]]
    generations = {
        line["row"]: line for line in read_lines(folder / "generations.jsonl", GENERATION)
    }
    if not generations:
        raise UserError(f"{folder}: this run has stored no output")
    if row is None:
        return [_as_ids(line) for line in list(generations.values())[:NUM_ROWS]]
    if row not in generations:
        raise UserError(
            f"--row {row}: {folder} holds rows {min(generations)} to {max(generations)}"
        )
    return [_as_ids(generations[row])]


def _as_ids(line: GenerationLine) -> Sample:
    """Return a line of generations.jsonl as a sample whose text is token ids."""
    ways = (line.get("autoregressive"), line.get("speculative"))
    slow, fast = [[f"{token} " for token in tokens or ()] for tokens in ways]
    sample = Sample(row=line["row"], context_len=line.get("context_len"), prompt_end=None)
    sample |= {"autoregressive": "".join(slow) or None, "speculative": "".join(fast) or None}
    if (rounds := line.get("rounds")) and fast:
        sample["rounds"] = by_round(fast, rounds)
    return sample


def _described(sample: Sample, max_rounds: int) -> Iterator[RenderableType]:
    """Yield a heading, the end of the prompt, the continuation, and the table of its rounds."""
    length = f", the end of {sample['context_len']:,} tokens" if sample.get("context_len") else ""
    yield Text(f"\nrow {sample['row']}{length}", style="bold")
    if prompt_end := sample.get("prompt_end"):
        yield Text(printable(prompt_end, LINES), style="dim")
    rounds = sample.get("rounds")
    text = sample.get("speculative")
    yield Text(f"\ncontinuation, {'speculative' if text else 'autoregressive'}", style="bold")
    if not rounds:
        yield Text(printable(text or sample.get("autoregressive") or "", LINES))
        return
    # The first entry is the prefill's token.
    shown = rounds[: max_rounds + 1] if max_rounds else rounds
    colored = Text()
    for entry in shown:
        colored.append(printable("".join(entry["accepted"]), LINES), style=ACCEPTED)
        colored.append(printable(entry["bonus"] or "", LINES))
    yield colored.append("…" if len(shown) < len(rounds) else "", style="dim")
    yield _table(shown)
    if len(shown) < len(rounds):
        yield Text(
            f"{counted(len(rounds) - len(shown), 'more round')}; --rounds 0 shows all", style="dim"
        )


def _table(rounds: Sequence[Round]) -> RenderableType:
    """Return a line per round: how many proposals were accepted, their text, and the bonus
    token.
    """
    table = new_table("round", "accepted", num_words=0)
    table.add_column("accepted proposals", style=ACCEPTED, overflow="fold")
    table.add_column("bonus token", overflow="fold")
    for number, entry in enumerate(rounds):
        accepted = f"{len(entry['accepted'])} of {entry['proposed']}" if number else ""
        bonus = "" if entry["bonus"] is None else _quoted(entry["bonus"])
        proposals = Text(" ").join(map(_quoted, entry["accepted"]))
        table.add_row(str(number) if number else "prefill", accepted, proposals, bonus)
    return table


def _quoted(token: str) -> Text:
    return Text(f'"{printable(token)}"')
