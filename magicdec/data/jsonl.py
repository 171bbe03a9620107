"""Prompts and traces in files of any field names, JSON or CSV; keys say which field is what.

A field is a dotted path, as in `turns.0`. conf/data/ has the field names of well-known data sets.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.config.choices import Corpus, DataConfig
from magicdec.config.registry import CORPORA
from magicdec.data import text
from magicdec.data.base import PromptRequest, Prompts
from magicdec.data.prompts import check_length, encode, is_chat, too_few
from magicdec.data.records import Place, Unfit, check_text, field, number_in, records
from magicdec.errors import UserError, to_stderr
from magicdec.inputs.rules import STRICT
from magicdec.units import is_number

LATEST = 1e18  # in the unit of times of arrival
USERS = ("user", "human")  # how data sets name the speaker of a prompt


@dataclass(frozen=True, config=STRICT)
class Fields(DataConfig):
    """The fields of a row; None: there is none."""

    prompt: str | None = None
    prompt_len: str | None = None
    speaker: str | None = None
    category: str | None = None
    reference: str | None = None
    output_len: str | None = None
    arrival: str | None = None
    arrival_unit_s: Annotated[float, Field(gt=0)] = 1.0
    chat: bool = False
    filler: str | None = None
    placeholder: str | None = None
    unfit: Literal["error", "skip"] = "error"

    @override
    def mistakes(self) -> Iterator[str]:
        if (self.prompt is None) == (self.prompt_len is None):
            given = f"data.prompt={self.prompt}, data.prompt_len={self.prompt_len}"
            yield (
                f"{given.replace('None', 'null')}: name one of them, the field of the prompt or of"
                " its length"
            )

    @property
    @override
    def sources(self) -> dict[str, tuple[str, str | None]]:
        return super().sources | ({} if self.prompt else {"data.filler": ("text", self.filler)})


class CorpusRow(NamedTuple):
    """Fields of a row that a run uses."""

    source: str
    tokens: list[int]  # empty where only the length is known
    length: int
    category: str
    answers: list[str]
    output_len: int
    arrival_s: float


@CORPORA.register(
    Corpus(
        "jsonl", keys=Fields, needs_path=True, tasks=None, own_lengths=True, files_at=text.files_at
    )
)
def load(request: PromptRequest) -> Prompts:
    """Return the file's first `num_rows` prompts that fit: in order of arrival, or else the
    categories in turns.

    Raise UserError, with the line, for a row that lacks a field or does not fit, and for too few
    rows. With `unfit: skip`, leave rows that lack a field or do not fit out, with a warning.
    """
    keys = request.keys
    assert isinstance(keys, Fields), "the configuration of this corpus"
    corpus = f"data=jsonl data.path={request.path}"
    rows: list[CorpusRow] = []
    reasons: list[str] = []
    places: Iterable[Place] = records(str(request.path), corpus)
    for place in _in_turns(places, keys.category) if keys.category and not keys.arrival else places:
        if len(rows) == request.num_rows:
            break
        try:
            rows.append(_row(place, keys, request))
        except Unfit as reason:
            if keys.unfit == "error":
                raise UserError(f"{reason}; data.unfit=skip leaves out such rows") from None
            reasons.append(str(reason))
    left_out = f" and {len(reasons)} that do not fit, the first: {reasons[0]}" if reasons else ""
    if len(rows) < request.num_rows:
        raise too_few(corpus, request.num_rows, len(rows), left_out)
    if reasons:
        to_stderr(
            f"warning: {corpus}: took {len(rows)} rows{left_out.replace(' and', ', left out', 1)}"
        )
    rows.sort(key=lambda row: row.arrival_s)
    prompts = Prompts(
        (
            [row.tokens for row in rows]
            if keys.prompt
            else _filled([row.length for row in rows], keys, request)
        ),
        [row.source for row in rows],
        answers=[row.answers for row in rows] if keys.reference else (),
        categories=[row.category for row in rows] if keys.category else (),
        output_lens=(
            [row.output_len for row in rows] if request.most_new_tokens and keys.output_len else ()
        ),
        arrivals_s=[row.arrival_s - rows[0].arrival_s for row in rows] if keys.arrival else (),
    )
    return replace(prompts, num_left_out=len(reasons))


def _in_turns(places: Iterable[Place], category: str) -> Iterator[Place]:
    """Yield a row of each category in turns, so that a few rows are of all of them."""
    groups: dict[str, list[Place]] = {}
    for place in places:
        name = ""
        with suppress(Unfit):  # `_row` raises it again
            name = str(field(place[2], category, "data.category", place[1]))
        groups.setdefault(name, []).append(place)
    for turn in zip_longest(*groups.values()):
        yield from (place for place in turn if place is not None)


def _row(place: Place, keys: Fields, request: PromptRequest) -> CorpusRow:
    """Return a row. Raise Unfit where a value is missing, too large or of another kind."""
    number, where, content = place
    check_text(content, where)

    def value(key: str) -> Any:
        path = getattr(keys, key)
        value = None if path is None else field(content, path, f"data.{key}", where)
        if path is not None and value is None:
            raise Unfit(f"{where}: data.{key}={path}: there is no value")
        return value

    def count(key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Unfit(
                f"{where}: data.{key}={getattr(keys, key)}: {value!r} is not a number of tokens"
            )
        return value

    if keys.speaker and (speaker := value("speaker")) not in USERS:
        raise Unfit(f"{where}: data.speaker={keys.speaker}: {speaker!r} begins, not the user")
    output = number_in(value("output_len"))
    most = request.most_new_tokens
    reference = value("reference") or []
    if isinstance(output, str):
        output = len(request.encode(output)) if most else 1
    if most and keys.output_len and count("output_len", output) > most:
        raise Unfit(f"{where}: {output:,} new tokens, more than batch.generate_len={most}")
    answers = [reference] if isinstance(reference, str) else reference
    is_list = isinstance(answers, list) and all(isinstance(answer, str) for answer in answers)
    if not is_list or (keys.reference and not answers):
        raise Unfit(f"{where}: data.reference={keys.reference} must be a text, or a list of texts")
    tokens = encode(request, _prompt(content, keys, where), where) if keys.prompt else []
    length = len(tokens) if keys.prompt else count("prompt_len", number_in(value("prompt_len")))
    check_length(length, request, where)
    at = _seconds(number_in(value("arrival")), keys, where) if keys.arrival else 0.0
    source = f"{Path(str(request.path)).name}:{number}"
    return CorpusRow(source, tokens, length, str(value("category")), answers, output or 0, at)


def _prompt(content: Any, keys: Fields, where: str) -> str | list[dict[str, Any]]:
    """Return the prompt's text, filled into the template if there is one, or its messages."""
    path = keys.prompt or ""
    if "{" in path:
        path = path.replace("\\n", "\n").replace("\\t", "\t")  # as a shell leaves them
        parts = re.split(r"\{(.+?)\}", path)
        values = [field(content, name, "data.prompt", where) for name in parts[1::2]]
        if any(value is None or isinstance(value, list | dict) for value in values):
            raise Unfit(f"{where}: data.prompt={keys.prompt} must be filled with texts and numbers")
        parts[1::2] = map(str, values)
        value: Any = "".join(parts)
    else:
        value = field(content, path, "data.prompt", where)
    if is_chat(value):
        return value
    if not isinstance(value, str):
        raise Unfit(f"{where}: data.prompt={path} must be a text or messages")
    if keys.placeholder and value.startswith(keys.placeholder):
        raise Unfit(f"{where}: the prompt is a placeholder")
    return [{"role": "user", "content": value}] if keys.chat else value


def _seconds(value: Any, keys: Fields, where: str) -> float:
    if isinstance(value, str):
        try:
            at = datetime.fromisoformat(value)
            return at.replace(tzinfo=at.tzinfo or UTC).timestamp()
        except ValueError:
            pass
    elif is_number(value) and abs(value) < LATEST:
        return value * keys.arrival_unit_s
    raise Unfit(
        f"{where}: data.arrival={keys.arrival}: {value!r} is neither a number nor a date and time"
    )


def _filled(lengths: list[int], keys: Fields, request: PromptRequest) -> list[list[int]]:
    """Return prompts of these lengths, all of them different parts of the filler's text."""
    prefix = list(request.prefix)
    bodies = [max(0, length - len(prefix)) for length in lengths]
    size = max(1, *bodies)
    places: list[tuple[int, int]] = []
    used: list[int] = []  # tokens of each window
    for length in bodies:  # into the first window that has room
        number = next(
            (number for number, taken in enumerate(used) if taken + length <= size), len(used)
        )
        if number == len(used):
            used.append(0)
        places.append((number, used[number]))
        used[number] += length
    wanted = replace(request, num_rows=len(used), context_len=len(prefix) + size, path=keys.filler)
    try:
        windows = [window[len(prefix) :] for window in text.load_or_stdlib(wanted).tokens]
    except UserError as error:
        raise UserError(str(error).replace("data.path", "data.filler")) from None
    return [
        [*prefix[:whole], *windows[number][start : start + length]]
        for (number, start), length, whole in zip(places, bodies, lengths, strict=True)
    ]
