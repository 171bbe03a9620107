"""tools/compare_commits.py: two commits of a small repository, and intervals that mean what they
say.
"""

import random
import subprocess

import pytest

from tools.compare_commits import arguments, compare, interval, report

LAUNCH = """
import json, pathlib, sys
runs = next(a.partition("=")[2] for a in sys.argv if a.startswith("runs_dir="))
folder = pathlib.Path(runs, "id")
folder.mkdir()
with open(LOG, "a") as log:
    log.write("NAME ")
metrics = {"speedup": SPEEDUP, "speculative/time_per_output_token_ms": 10 / SPEEDUP, "output/fingerprint": "f"}
(folder / "result.json").write_text(json.dumps(metrics))
"""  # noqa: E501


def git(folder, *arguments):
    command = [
        "git",
        "-C",
        folder,
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@example.org",
        *arguments,
    ]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path):
    """A repository whose commits a and b differ in what their launch.py measures."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    for name, speedup in (("a", 1.0), ("b", 1.25)):
        source = LAUNCH.replace("SPEEDUP", str(speedup)).replace("NAME", name)
        (folder / "launch.py").write_text(source.replace("LOG", repr(str(tmp_path / "log"))))
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", name)
        git(folder, "tag", name)
    return folder


def test_two_commits_run_in_turns(repository, tmp_path):
    found = compare(repository, ("a", "b"), 3, ["experiment=quick"])
    assert (tmp_path / "log").read_text().split() == ["a", "b", "b", "a", "a", "b"]
    lines = list(report(found, ["speedup", "speculative/time_per_output_token_ms", "missing"]))
    assert lines[1].split() == [
        "speedup",
        "1",
        "1.25",
        "1.250",
        "1.250",
        "to",
        "1.250:",
        "different",
    ]
    assert lines[2].split()[1:4] == ["10", "8", "0.800"]
    assert lines[3:] == ["output: the same tokens"]
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_run_that_fails_is_an_error(repository):
    (repository / "launch.py").write_text("raise SystemExit('no memory')")
    git(repository, "commit", "-qam", "c")
    with pytest.raises(RuntimeError, match="no memory"):
        compare(repository, ("a", "HEAD"), 1, [])


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    generator, covered = random.Random(1), 0
    for trial in range(60):
        _, low, high = interval([1.1 * generator.lognormvariate(0, 0.05) for _ in range(12)], trial)
        covered += low <= 1.1 <= high
    assert 50 <= covered < 60
    assert interval([1.0, 1.0, 1.0]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "typed", ["a b --pairs 9 -- experiment=quick x=1", "a b experiment=quick x=1 --pairs 9"]
)
def test_overrides_may_be_on_either_side_of_the_options(typed):
    found = arguments(typed.split())
    assert (found.a, found.b, found.pairs, found.overrides) == (
        "a",
        "b",
        9,
        ["experiment=quick", "x=1"],
    )
