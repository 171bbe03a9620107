"""The repeats of a run: how many are measured, and how long the rows of each took.

K repeats, N rows.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from magicdec.config.schema import Compare
from magicdec.data import Prompts
from magicdec.engine.decoder import Generation
from magicdec.measure import metrics
from magicdec.measure.intervals import half_width, speedup_wall
from magicdec.measure.metrics import RowTimes, Times
from magicdec.scenarios.outputs import Outputs
from magicdec.tracking import files
from magicdec.tracking.reader import read_result
from magicdec.units import WAYS

FIRST = 5  # repeats, before an interval decides whether there are more
IN_A_ROW = 2  # repeats after which the interval is narrow: a run that stops at the first is too often lucky


@dataclass
class Repeat:
    """One repeat over all batches: the two generations of each."""

    autoregressive: list[Generation] = field(default_factory=list)
    speculative: list[Generation] = field(default_factory=list)

    def outputs(self, prompts: Prompts) -> Outputs:
        """Return the new tokens of all batches together."""
        plain, fast = ([row for g in way for row in g.tokens] for way in (self.autoregressive, self.speculative))
        return Outputs(prompts, plain, fast, [row for g in self.speculative for row in metrics.rounds_by_row(g)])

    def times(self, prefill_seconds: Sequence[float]) -> Times:
        """Return the times of every row, with those of the prefills; without a draft, of one way."""
        return {
            way: [metrics.row_times(g, s) for g, s in zip(batches, prefill_seconds, strict=False)]
            for way, batches in vars(self).items()
            if batches
        }


@dataclass(frozen=True)
class Earlier:
    """The repeats of an earlier attempt, which this one counts too (resume=noisy): times, and the tokens decoded."""

    times: Sequence[Times] = ()
    tokens: Mapping[str, list[list[int]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, batch_size: int) -> "Earlier":
        """Read an attempt, which includes the repeats that it pooled itself."""
        lines, result = files.read_lines(folder / "generations.jsonl", files.GENERATION), read_result(folder)
        tokens = {"autoregressive": [line.get("autoregressive") or [] for line in lines]}
        tokens["speculative"] = [line.get("speculative") or [] for line in lines]
        ways = [way for way in WAYS if any(tokens[way])]
        numbers = {len(_decode_s(line, way)) for line in lines for way in ways}
        if len(numbers) != 1:  # none, or a damaged file
            return cls()
        times = []
        for repeat in range(numbers.pop()):
            one = {}
            for way in ways:
                first = float(result.get(f"{way}/time_to_first_token_ms") or 0.0) / 1e3
                rows = [
                    RowTimes(first, _decode_s(line, way)[repeat], len(written) - 1)
                    for line, written in zip(lines, tokens[way], strict=True)
                ]
                one[way] = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
            times.append(one)
        return cls(times, tokens)

    def of_the_same(self, outputs: Outputs) -> Sequence[Times]:
        """Return the times if the tokens are these; () for other tokens, whose times do not compare."""
        rows = {"autoregressive": outputs.autoregressive, "speculative": outputs.speculative}
        return self.times if all(self.tokens.get(way) == own for way, own in rows.items() if own) else ()


def _decode_s(line: files.Generation, way: str) -> list[float]:
    return (line.get("decode_s") or {}).get(way, [])


def repeats(
    scenario: Compare, num_batches: int, measured: list[Repeat], earlier: Sequence[Times] = ()
) -> Iterator[Repeat]:
    """Yield the repeats that the next batch takes part in, each before it is measured.

    The first batch adds them to `measured`: `scenario.repeats` or, if that is auto, as many as make the interval of
    the speedup as narrow as `scenario.precision`, within its share of `scenario.max_minutes`. The interval counts
    `earlier` repeats too.
    """
    if measured:
        yield from measured
        return
    deadline, narrow = time.monotonic() + 60 * scenario.max_minutes / num_batches, 0
    before = [{way: batches[:1] for way, batches in one.items()} for one in earlier]
    while len(measured) != scenario.repeats:
        measured.append(Repeat())
        yield measured[-1]
        if scenario.repeats == "auto":
            reached = precision([*before, *(one.times([0.0]) for one in measured)])
            narrow = narrow + 1 if reached is not None and reached <= scenario.precision else 0
            is_enough = len(measured) + len(before) >= FIRST and narrow >= IN_A_ROW
            if is_enough or time.monotonic() >= deadline:
                return


def precision(times_K: Sequence[Times]) -> float | None:
    """Return half the interval of the speedup over these repeats, as a share of it; None for too few repeats."""
    found = speedup_wall(*(_seconds(times_K, way) for way in WAYS))
    return None if found is None else half_width(found.parts)


def _seconds(times_K: Sequence[Times], way: str) -> list[float]:
    """Return the sum of all rows' times per token in each repeat; 1 for a way that is not measured."""
    return [
        sum(row.decode / row.decoded for batch in times[way] for row in batch if row.decoded) if way in times else 1.0
        for times in times_K
    ]
