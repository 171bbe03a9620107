"""The repeats of an earlier attempt, which another attempt at the same run counts too (resume=noisy)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from magicdec.measure.metrics import RowTimes, Times
from magicdec.scenarios.outputs import Outputs
from magicdec.tracking.files import GENERATION, Generation, read_lines
from magicdec.tracking.reader import read_result
from magicdec.units import WAYS


@dataclass(frozen=True)
class Earlier:
    """Times of every repeat, and the tokens that were decoded."""

    times: Sequence[Times] = ()
    tokens: Mapping[str, list[list[int]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, batch_size: int) -> "Earlier":
        """Read an attempt, which includes the repeats that it pooled itself."""
        lines, result = read_lines(folder / "generations.jsonl", GENERATION), read_result(folder)
        tokens = {"autoregressive": [line.get("autoregressive") or [] for line in lines]}
        tokens["speculative"] = [line.get("speculative") or [] for line in lines]
        ways = [way for way in WAYS if any(tokens[way])]
        numbers = {len(_seconds(line, way)) for line in lines for way in ways}
        if len(numbers) != 1:  # none, or a damaged file
            return cls()
        times = []
        for repeat in range(numbers.pop()):
            one = {}
            for way in ways:
                first = float(result.get(f"{way}/time_to_first_token_ms") or 0.0) / 1e3
                rows = [
                    RowTimes(first, _seconds(line, way)[repeat], len(written) - 1)
                    for line, written in zip(lines, tokens[way], strict=True)
                ]
                one[way] = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
            times.append(one)
        return cls(times, tokens)

    def of_the_same(self, outputs: Outputs) -> Sequence[Times]:
        """Return the times if the tokens are these; () for other tokens, whose times do not compare."""
        rows = {"autoregressive": outputs.autoregressive, "speculative": outputs.speculative}
        return self.times if all(self.tokens.get(way) == own for way, own in rows.items() if own) else ()


def _seconds(line: Generation, way: str) -> list[float]:
    return (line.get("decode_s") or {}).get(way, [])
