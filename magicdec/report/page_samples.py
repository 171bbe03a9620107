"""The generated text of runs on the page, with the accepted proposals marked."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from unicodedata import category

from markupsafe import escape

from magicdec.tracking.columns import Row
from magicdec.tracking.run_files import SAMPLE, read_lines
from magicdec.tracking.store import counted

MAX_SAMPLES, MAX_ROUNDS = 200, 60  # runs whose generated text is part of the page; rounds of each


def samples_of(rows: Sequence[Row]) -> dict[str, str]:
    """Return the first sample of runs as HTML by their ids, the newest runs first."""
    return dict(islice(_samples(rows), MAX_SAMPLES))


def _samples(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Yield the id of each run with the first of its samples as HTML, the newest run first."""
    folders = {row["id"]: row["folder"] for row in reversed(rows) if "folder" in row}
    for run, folder in folders.items():
        for sample in read_lines(Path(folder, "samples.jsonl"), SAMPLE)[:1]:
            yield run, _text(sample)


def _text(sample: Any) -> str:
    """Return a row's text: the end of its prompt, and its continuation with the accepted proposals
    marked.
    """

    def span(kind: str, text: str | None) -> str:
        return f'<span class="{kind}">{escape(_visible(text or ""))}</span>'

    rounds = sample.get("rounds", [])
    parts = [
        span("accepted", "".join(entry["accepted"])) + span("bonus", entry["bonus"])
        for entry in rounds[:MAX_ROUNDS]
    ]
    written = "".join(parts) or span(
        "bonus", sample.get("speculative") or sample.get("autoregressive")
    )
    more = (
        f"\n... and {counted(len(rounds) - MAX_ROUNDS, 'round')}: magicdec show"
        if len(rounds) > MAX_ROUNDS
        else ""
    )
    return span("prompt", sample.get("prompt_end")) + written + more


def _visible(text: str) -> str:
    """Return a text whose control and other invisible characters are escaped: they could hide or
    reorder something.
    """
    hidden = {
        character
        for character in text
        if category(character).startswith("C") and character not in "\n\t"
    }
    return text.translate({ord(character): f"\\u{{{ord(character):x}}}" for character in hidden})
