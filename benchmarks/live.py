"""The cost of live points: the share of a pass's time that is spent on counting rounds, reading and
writing points.

    python benchmarks/live.py            # the bundled pair, some seconds of decoding, without a tracker
    python benchmarks/live.py KEY=VALUE  # with other settings, such as tracker=tensorboard

Every call is timed within the passes whose time it is divided by, so that a slow minute falls on
both.
"""  # noqa: E501

import sys
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import magicdec
from magicdec.scenarios import compare
from magicdec.scenarios.points import Points

SETTINGS = [
    "batch.size=4",
    "batch.context_len=512",
    "batch.generate_len=128",
    "scenario.repeats=3",
    "tracker=[]",
]


class Timed(Points):
    """Points that add up the seconds of their calls and count them."""

    seconds, calls = 0.0, 0

    def __call__(self, rounds: int) -> None:
        """Count rounds, and the time that it takes."""
        start = perf_counter()
        super().__call__(rounds)
        Timed.seconds += perf_counter() - start
        Timed.calls += 1


def main() -> int:
    """Measure a run; print the share, and fail from 1% on."""
    passes: list[float] = []
    generate = compare._generate

    def timed(*arguments: Any) -> Any:
        start = perf_counter()
        found = generate(*arguments)
        passes.append(perf_counter() - start)
        return found

    vars(compare).update(_generate=timed, Points=Timed)
    with TemporaryDirectory() as store:
        result = magicdec.run([*SETTINGS, f"runs_dir={store}", *sys.argv[1:]])
        lines = len((result.folder / "live.jsonl").read_text().splitlines())
    share = Timed.seconds / sum(passes)
    each = Timed.seconds / Timed.calls * 1e6
    print(
        f"{share:.3%} of {sum(passes):.1f} s: {Timed.calls} calls of {each:.0f} us, {lines} lines"
    )
    return int(share >= 0.01)


if __name__ == "__main__":
    sys.exit(main())
