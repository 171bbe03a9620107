"""Compare two commits by runs in turns: is B faster than A, and how sure is that?

python tools/compare_commits.py main HEAD                                    # the default run, five pairs
python tools/compare_commits.py v0.1.0 HEAD --pairs 9 -- experiment=quick    # another run

Both commits are checked out into a temporary folder. Each pair runs both, in alternating order, so
that a drift of the machine hits both alike. The ratio is the geometric mean over pairs of B / A,
its interval a bootstrap over pairs.
"""  # noqa: E501

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median, quantiles

ROOT = Path(__file__).resolve().parents[1]
METRICS = (
    "autoregressive/time_per_output_token_ms",
    "speculative/time_per_output_token_ms",
    "speedup",
)
FINGERPRINT = "output/fingerprint"
RESAMPLES = 2_000


def interval(ratios: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Return the geometric mean of ratios and the 95% interval of a bootstrap over them."""
    logs, generator = [math.log(ratio) for ratio in ratios], random.Random(seed)
    means = [fmean(generator.choices(logs, k=len(logs))) for _ in range(RESAMPLES)]
    cuts = quantiles(means, n=40, method="inclusive")
    return math.exp(fmean(logs)), math.exp(cuts[0]), math.exp(cuts[-1])


@contextmanager
def checkouts(repository: Path, commits: Sequence[str]) -> Iterator[list[Path]]:
    """Check commits out into a temporary folder, and remove them at the end."""

    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-C", str(repository), *arguments], check=True, stdout=subprocess.DEVNULL
        )

    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place, f"{number}") for number in range(len(commits))]
        try:
            for folder, commit in zip(folders, commits, strict=True):
                git("worktree", "add", "--quiet", "--detach", str(folder), commit)
            yield folders
        finally:
            for folder in filter(Path.exists, folders):
                git("worktree", "remove", "--force", str(folder))


def measured(folder: Path, overrides: Sequence[str]) -> dict:
    """Run launch.py of a checkout once, and return its result.json. Raise RuntimeError if it
    fails.
    """
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "launch.py", *overrides, f"runs_dir={runs}", "tracker=[]"]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        results = list(Path(runs).glob("*/result.json"))
        if done.returncode or not results:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        return json.loads(results[0].read_text(encoding="utf-8"))


def compare(
    repository: Path, commits: Sequence[str], pairs: int, overrides: Sequence[str]
) -> list[list[dict]]:
    """Return the results of both commits, pair by pair."""
    found: list[list[dict]] = [[], []]
    with checkouts(repository, commits) as folders:
        for number in range(pairs):
            for index in (0, 1) if number % 2 == 0 else (1, 0):
                found[index].append(measured(folders[index], overrides))
            print(f"pair {number + 1} of {pairs}", file=sys.stderr)
    return found


def report(found: Sequence[Sequence[dict]], metrics: Sequence[str]) -> Iterator[str]:
    """Yield a line per metric that all runs have: both medians, the ratio B / A, its interval, and
    what that shows.
    """
    yield f"{'metric':45}{'A':>10}{'B':>10}{'B / A':>9}   95% interval"
    for metric in metrics:
        before, after = ([result.get(metric) for result in results] for results in found)
        if not all(isinstance(value, float | int) and value > 0 for value in (*before, *after)):
            continue
        ratio, low, high = interval([b / a for a, b in zip(before, after, strict=True)])
        shows = "no difference shown" if low <= 1 <= high else "different"
        yield (
            f"{metric:45}{median(before):10.4g}{median(after):10.4g}{ratio:9.3f}   {low:.3f} to"
            f" {high:.3f}: {shows}"
        )
    outputs = [{result.get(FINGERPRINT) for result in results} for results in found]
    yield (
        "output:"
        f" {'the same tokens' if outputs[0] == outputs[1] else 'OTHER TOKENS: acceptance may differ, too'}"  # noqa: E501
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what was typed, with the overrides in front of the options or behind them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", help="a commit, a branch or a tag")
    parser.add_argument("b")
    parser.add_argument("--pairs", type=int, default=5, help="runs of each commit (5)")
    parser.add_argument(
        "--metrics", nargs="+", default=METRICS, metavar="KEY", help="of result.json"
    )
    parser.add_argument("overrides", nargs="*", help="of launch.py, after --")
    return parser.parse_intermixed_args(words)


def main() -> None:
    """Compare two commits and print the table."""
    options = arguments()
    found = compare(ROOT, (options.a, options.b), options.pairs, options.overrides)
    print("\n".join(report(found, options.metrics)))


if __name__ == "__main__":
    main()
