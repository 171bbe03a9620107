"""The files of a run as they are read back: a schema for each, checked in one place.

Readers rely on the keys below, which every version has written in this form. Other keys may hold
any JSON.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeVar

import yaml
from pydantic import (
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType, TypedDict

from magicdec.errors import UserError
from magicdec.tracking.unit_files import Round, StoredCount, reason, typed, warn

T = TypeVar("T")
DEPTH = 8  # of nested lists and objects in config.yaml: no run has more
# libyaml where PyYAML was built with it: ten times as fast.
Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Text = Annotated[str, Strict()]
Whole = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Value = TypeAliasType(
    "Value",
    "Annotated[bool, Strict()] | Whole | Number | Text | list[Value] | dict[Text, Value] | None",
)


@typed
class StoredResult(TypedDict):
    """The keys of result.json that describe a run. All other keys are metrics."""

    status: Literal["running", "done", "failed"]
    kind: NotRequired[str | None]
    reason: NotRequired[str | None]
    overrides: NotRequired[list[str]]


@typed
class Named(TypedDict):
    """An option of a group, and the folder of a model."""

    name: str
    path: NotRequired[str | None]


@typed
class StoredDraft(Named):
    """The group draft."""

    gamma: NotRequired[StoredCount | Literal["auto"]]
    quantization: NotRequired[str]
    model: NotRequired[Named | None]


@typed
class Cache(TypedDict):
    """The group cache."""

    policy: str
    budget: NotRequired[StoredCount]
    num_sink: NotRequired[StoredCount]


@typed
class Wandb(TypedDict):
    """The group wandb."""

    mode: str
    project: str
    entity: str | None
    group: str | None
    tags: list[str]


@typed
class StoredConfig(TypedDict):
    """A run's configuration, from config.yaml."""

    target: Named
    draft: StoredDraft
    cache: Cache
    scenario: Named
    wandb: NotRequired[Wandb]


@typed
class Sample(TypedDict):
    """A line of samples.jsonl."""

    row: StoredCount
    context_len: NotRequired[StoredCount | None]
    prompt_end: NotRequired[str | None]
    autoregressive: NotRequired[str | None]
    speculative: NotRequired[str | None]
    rounds: NotRequired[list[Round]]


@typed
class GenerationLine(TypedDict):
    """A line of generations.jsonl."""

    row: StoredCount
    context_len: NotRequired[StoredCount | None]
    autoregressive: NotRequired[list[int] | None]
    speculative: NotRequired[list[int] | None]
    # Proposed and accepted tokens.
    rounds: NotRequired[list[tuple[StoredCount, StoredCount]] | None]
    # By way: seconds from the first to the last token, of every repeat.
    decode_s: NotRequired[dict[str, list[float]]]


@typed
class RoutingLine(TypedDict):
    """The choices of a layer with experts, as magicdec/measure/expert_choices.py describes them."""

    experts: StoredCount
    experts_per_token: StoredCount
    popularity: list[Number]
    distinct: list[Number]


@typed
class JobLine(TypedDict):
    """A line of a sweep's jobs.jsonl."""

    job: int
    id: str | None
    # Repeats that the run had, where as many as asked for are added.
    before: NotRequired[StoredCount]


def _in_short(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Replace the errors of a value, one for each type that it does not have, by one."""
    try:
        return validate(value)
    except ValidationError:
        raise PydanticCustomError(
            "value", "holds what JSON has no type for, or is nested too deeply"
        ) from None


ROW: TypeAdapter[dict[str, Any]] = TypeAdapter(
    dict[Text, Annotated[Value, WrapValidator(_in_short)]]
)
FACTS, CONFIG = TypeAdapter(StoredResult), TypeAdapter(StoredConfig)
SAMPLE, GENERATION = TypeAdapter(Sample), TypeAdapter(GenerationLine)
ROUTING = TypeAdapter(RoutingLine)
JOB_LINE = TypeAdapter(JobLine)


class Damaged(UserError):
    """A file of a run that cannot be read, or that holds what no version has written."""


def read_result(path: Path) -> dict[str, Any]:
    """Return the contents of result.json; {} if there is no such file. Raise Damaged."""
    with _damage(path):
        if not path.is_file():
            return {}
        # The run's id: text, or else there is no place for it in tables.
        path.absolute().parent.name.encode()
        content = ROW.validate_json(path.read_bytes())
        FACTS.validate_python(content)
        return content


def read_config(path: Path) -> dict[str, Any]:
    """Return the contents of config.yaml, whose parts several runs may share: do not change them.
    Raise Damaged.
    """
    with _damage(path):
        # Group by group, with a cache: the runs of a sweep share most groups, and parsing takes
        # long.
        blocks = re.split(r"\n(?=[^\s#-])", path.read_text(encoding="utf-8"))
        content = {key: value for block in blocks for key, value in _parse_group(block).items()}
        CONFIG.validate_python(content)
        if isinstance(former := content.get("attention"), dict):
            content["attention"] = former.get("name")
        return content


def read_lines(path: Path, schema: TypeAdapter[T]) -> list[T]:
    """Return the objects of a file with one per line; [] if there is no such file. Leave out lines
    that are torn or break the schema, and log the first.
    """
    contents, left_out = [], []
    try:
        lines = path.read_bytes().splitlines() if path.is_file() else []
    except OSError as error:
        lines, left_out = [], [reason(error)]
    for number, line in enumerate(lines, 1):
        try:
            contents.append(schema.validate_json(line))
        except ValueError as error:
            left_out.append(f"line {number}: {reason(error)}")
    if left_out:
        warn(f"{path}, {left_out[0]}; {len(left_out)} of {len(lines)} lines are left out")
    return contents


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn the errors of reading a file into Damaged."""
    try:
        yield
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise Damaged(f"{path}: {reason(error)}") from None


@lru_cache(maxsize=4096)
def _parse_group(block: str) -> dict[str, Any]:
    """Parse a group. Raise ValueError or YAMLError for what no run writes: deep nesting, which
    would overflow libyaml's stack, anchors, whose aliases can stand for more than memory holds, and
    values that JSON has no type for.
    """
    depth = 0
    for event in yaml.parse(block, Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > DEPTH or getattr(event, "anchor", None):
            raise ValueError(
                "nested too deeply" if depth > DEPTH else f"an anchor or alias, {event.anchor}"
            )
    return ROW.validate_python(yaml.load(block, Loader) or {})
