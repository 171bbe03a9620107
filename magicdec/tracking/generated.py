"""The text that a run has generated, round by round: how it is stored in samples.jsonl, and read again."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from magicdec.errors import UserError
from magicdec.tracking.files import GENERATION, SAMPLE, Generation, Round, Sample, read_lines

NUM_ROWS = 4  # shown, if nobody asks for one row


def by_round(tokens: Sequence[str], rounds: Iterable[Sequence[int]]) -> list[Round]:
    """Return the tokens of a row by round; `rounds` are pairs of proposed and accepted tokens.

    `accepted` holds the accepted proposals of a round and `bonus` the target's own token that ends it, or None if the
    token limit or an end of sequence has cut the round. The first entry is the token of the prefill.
    """
    found: list[Round] = [{"proposed": 0, "accepted": [], "bonus": tokens[0]}]
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
    stored = {sample["row"]: sample for sample in read_lines(folder / "samples.jsonl", SAMPLE)}
    if row is None and stored:
        return list(stored.values())
    if row in stored:
        return [stored[row]]
    generations = {line["row"]: line for line in read_lines(folder / "generations.jsonl", GENERATION)}
    if not generations:
        raise UserError(f"{folder}: this run has stored no output")
    if row is None:
        return [_as_ids(line) for line in list(generations.values())[:NUM_ROWS]]
    if row not in generations:
        raise UserError(f"--row {row}: {folder} holds rows {min(generations)} to {max(generations)}")
    return [_as_ids(generations[row])]


def _as_ids(line: Generation) -> Sample:
    """Return a line of generations.jsonl as a sample whose text is token ids."""
    ways = (line.get("autoregressive"), line.get("speculative"))
    slow, fast = ([f"{token} " for token in tokens or ()] for tokens in ways)
    sample = Sample(row=line["row"], context_len=line.get("context_len"), prompt_end=None)
    sample |= {"autoregressive": "".join(slow) or None, "speculative": "".join(fast) or None}
    if (rounds := line.get("rounds")) and fast:
        sample["rounds"] = by_round(fast, rounds)
    return sample
