"""The text that a run has generated, round by round: how it is stored in samples.jsonl, and read again."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from magicdec.errors import UserError
from magicdec.tracking.reader import read_lines

NUM_ROWS = 4  # shown, if nobody asks for one row

Sample = dict[str, Any]  # a line of samples.jsonl


def by_round(tokens: Sequence[str], rounds: Iterable[Sequence[int]]) -> list[dict[str, Any]]:
    """Return the tokens of a row by round; `rounds` are pairs of proposed and accepted tokens.

    `accepted` holds the accepted proposals of a round and `bonus` the target's own token that ends it, or None if the
    token limit or an end of sequence has cut the round. The first entry is the token of the prefill.
    """
    found: list[dict[str, Any]] = [{"proposed": 0, "accepted": [], "bonus": tokens[0]}]
    start = 1
    for proposed, accepted in rounds:
        part = tokens[start : start + accepted + 1]
        bonus = part[accepted] if len(part) > accepted else None
        found.append({"proposed": proposed, "accepted": list(part[:accepted]), "bonus": bonus})
        start += len(part)
    return found


def samples_of(folder: Path, row: int | None = None) -> list[Sample]:
    """Return the samples of a run, or one row of it. A row without stored text has token ids instead.

    Raise UserError if the run has stored no such row.
    """
    stored = {sample["row"]: sample for sample in read_lines(folder / "samples.jsonl") if "row" in sample}
    if row is None and stored:
        return list(stored.values())
    if row in stored:
        return [stored[row]]
    generations = {line["row"]: line for line in read_lines(folder / "generations.jsonl") if "row" in line}
    if not generations:
        raise UserError(f"{folder}: this run has stored no output")
    if row is None:
        return [_as_ids(line) for line in list(generations.values())[:NUM_ROWS]]
    if row not in generations:
        raise UserError(f"--row {row}: {folder} holds rows {min(generations)} to {max(generations)}")
    return [_as_ids(generations[row])]


def _as_ids(line: dict[str, Any]) -> Sample:
    """Return a line of generations.jsonl as a sample whose text is token ids."""
    texts = {name: [f"{token} " for token in line.get(name) or ()] for name in ("autoregressive", "speculative")}
    sample = {"row": line["row"], "context_len": line.get("context_len"), "prompt_end": None}
    sample |= {name: "".join(tokens) or None for name, tokens in texts.items()}
    if line.get("rounds") is not None and texts["speculative"]:
        sample["rounds"] = by_round(texts["speculative"], line["rounds"])
    return sample


def printable(text: str, keep: str = "") -> str:
    """Return text with control characters, line ends and invisible characters escaped, except for those in `keep`."""
    return "".join(c if c in keep or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
