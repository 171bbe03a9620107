"""Test the tests: change one operator of the code at a time, and count the changes that the tests
next to it notice.

    pip install -e '.[test,mutation]'
    python tools/mutation_test.py --sample 200 --minutes 60 --out mutants.jsonl
    python tools/mutation_test.py cache drafts --sample 40

Mutants are drawn at random from the folders named, or from all of TESTS, in a copy of the checkout.
A mutant that survives is code that no test looks at, or a change that makes no difference. One
whose tests do not end in time counts as noticed, and is shown.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.work_item import MutationSpec

ROOT = Path(__file__).resolve().parents[1]
# Folders of the package, and the tests that should notice a change there, the quickest first. A
# file with an entry of its own is no part of its folder's.
ENGINE = "tests/engine/test_distribution.py tests/engine/test_lossless.py"
TESTS = {
    "verification": "tests/verification tests/engine/test_distribution.py",
    "kernels/triton_sampling.py": "tests/test_interpreted.py tests/verification/test_truncation.py",
    "decoding": f"tests/decoding tests/cache/test_scored.py {ENGINE}",
    "drafts": f"tests/drafts {ENGINE} tests/serving/test_lossless.py",
    "cache": "tests/cache tests/engine/test_lossless.py tests/serving/test_lossless.py",
    "engine": (
        "tests/engine/test_audit.py tests/engine/test_adaptive.py tests/engine/test_graphs.py"
        f" {ENGINE}"
    ),
    "serving": "tests/serving",
    "tracking/store.py": "tests/tracking/test_store.py tests/tracking/test_store_trouble.py",
}
TIMEOUT_S = 600
# Type hints are not run, and | between types is not arithmetic.
SKIPPED_OPERATORS = ("BinaryOperator_BitOr", "VariableReplacer", "VariableInserter")


def places(checkout: Path, folder: str) -> list[list[MutationSpec]]:
    """Return the places in a folder's modules where code can be changed, each with the changes that
    fit there.
    """
    place = checkout / "magicdec" / folder
    found: dict[tuple, list[MutationSpec]] = defaultdict(list)
    for path in sorted(place.glob("*.py")) if place.is_dir() else [place]:
        if place.is_dir() and f"{folder}/{path.name}" in TESTS:
            continue
        module = path.relative_to(checkout)
        nodes, lines = list(ast_nodes(get_ast_from_path(path))), path.read_text().splitlines()
        for name in operator_names():
            operator = get_operator(name)
            if operator.arguments() or any(word in name for word in SKIPPED_OPERATORS):
                continue
            positions = (
                position for node in nodes for position in operator().mutation_positions(node)
            )
            for occurrence, (start, end) in enumerate(positions):
                if name.endswith("RemoveDecorator") and lines[start[0] - 1].strip() == "@override":
                    continue  # does nothing when it is run
                found[module, start, end].append(MutationSpec(module, name, occurrence, start, end))
    return list(found.values())


def tested(
    checkout: Path, folders: list[str], sample: int, seed: int, end: float
) -> Iterator[dict]:
    """Test a random sample of the folders' mutants until the time is over; yields a row for
    each.
    """
    every = [(folder, changes) for folder in folders for changes in places(checkout, folder)]
    print(
        f"{len(every)} places; {min(sample, len(every))} are drawn, with one change each",
        flush=True,
    )
    draw = random.Random(seed)
    for folder, changes in draw.sample(every, min(sample, len(every))):
        mutation = draw.choice(changes)
        if time.monotonic() > end:
            print("out of time", flush=True)
            return
        command = f"{sys.executable} -m pytest -q -x -n 0 -p no:cacheprovider {TESTS[folder]}"
        begin = time.monotonic()
        result = mutate_and_test([mutation], command, TIMEOUT_S)
        outcome = result.test_outcome.value if result.test_outcome else result.worker_outcome.value
        row = {"module": str(mutation.module_path), "line": mutation.start_pos[0]}
        row |= {"operator": mutation.operator_name.removeprefix("core/")}
        row |= {"outcome": "timed out" if result.output == "timeout" else outcome}
        yield row | {"seconds": round(time.monotonic() - begin, 1), "diff": result.diff}


def main() -> None:
    """Test a sample and print the share that was noticed, by folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "folders", nargs="*", metavar="FOLDER", help=f"default: all of {', '.join(TESTS)}"
    )
    parser.add_argument("--sample", type=int, default=200, help="mutants to draw (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    parser.add_argument(
        "--minutes", type=float, default=60, help="start no mutant after this time (default 60)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("mutants.jsonl"), help="a line for each mutant"
    )
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder, options.out.open("w") as out:
        checkout = Path(folder, "checkout")
        subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
        os.environ["PYTHONPATH"] = str(checkout)
        with chdir(checkout):
            folders, end = options.folders or list(TESTS), time.monotonic() + 60 * options.minutes
            for row in tested(checkout, folders, options.sample, options.seed, end):
                counts.setdefault(str(Path(row["module"]).parent), Counter())[row["outcome"]] += 1
                print(json.dumps(row), file=out, flush=True)
                if row["outcome"] != "killed":
                    print(
                        f"{row['outcome']}: {row['module']}:{row['line']} {row['operator']}",
                        flush=True,
                    )
    for name, outcomes in sorted(counts.items()):
        total = sum(outcomes.values())
        print(f"{name:24} {total - outcomes['survived']:4} of {total:4} noticed")


if __name__ == "__main__":
    main()
