"""Rules of single values, and the one line that a broken rule becomes.

A group of the configuration is a frozen pydantic dataclass with `config=STRICT`: a text is no
number, true is no 1, and an unknown key is an error. Rules that pydantic words well are its own, as
in `Field(8, ge=1)`; others are `must`.
"""

import difflib
import json
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_wrap_validator_function

from magicdec.errors import UserError, printable

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
JSON = ConfigDict(strict=True, allow_inf_nan=False)  # of others' JSON, whose other keys are ignored


class BadValue(UserError):
    """A value that breaks a rule: `key` is its own in the configuration, `type` pydantic's name of
    the rule.
    """

    def __init__(self, line: str, key: str, type: str):
        super().__init__(line)
        self.key, self.type = key, type


SHORT = reprlib.Repr()  # how errors show a value: its first level, a line of it
SHORT.maxlevel = 1
T = TypeVar("T")

# What would be valid, by pydantic's type of error; names in braces are those of its context.
VALID = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a smaller number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "list_type": "must be a list, as in [a,b]",
    "tuple_type": "must be a list, as in [a,b]",
    "dict_type": "must hold keys and values",
    "dataclass_type": "cannot be set as a whole, only its keys can",
    "greater_than_equal": "must be at least {ge:,.16g}",
    "greater_than": "must be above {gt:,.16g}",
    "less_than_equal": "must be at most {le:,.16g}",
    "less_than": "must be below {lt:,.16g}",
    "too_short": "must hold at least one",
    "must": "{valid}",
}

# Rules that a number in quotes breaks.
NOT_FOR_TEXTS = ("int_type", "float_type", "bool_type", "must")


@dataclass(frozen=True)
class must:
    """An annotation with the words for any rule that is broken: its own, `holds`, or those
    annotated before.
    """

    valid: str
    holds: Callable[[Any], bool] = lambda value: True

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Wrap the schema of what is annotated."""

        def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
            with suppress(ValidationError):
                if self.holds(typed := inner(value)):
                    return typed
            raise PydanticCustomError("must", "{valid}", {"valid": self.valid})

        return no_info_wrap_validator_function(check, handler(source))


LARGEST = (1 << 31) - 1  # of what tensors are made of: lengths and places are 32 bits
MOST_GAMMA = 1024  # what predictions and engines loop over
Size = Annotated[int, Field(ge=0, le=LARGEST)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Gamma = Annotated[int, Field(ge=1, le=MOST_GAMMA)]
GammaOr0 = Annotated[int, Field(ge=0, le=MOST_GAMMA)]
Natural = Annotated[int, Field(ge=0, lt=1 << 53)]  # that a number of JSON holds exactly
Fraction = Annotated[float, Field(gt=0, le=1), must("must be above 0 and at most 1")]
Share = Annotated[float, Field(ge=0, le=1), must("must be between 0 and 1")]
# A probability, a mean number of tokens a round, or probabilities by position.
Drawn = Annotated[
    Annotated[float, Field(ge=0)] | Annotated[list[Share], Field(min_length=1)],
    must("must be a probability, a mean length above 1, or a list of probabilities by position"),
]
Counts = Annotated[list[Count], must(f"must hold whole numbers from 1 to {LARGEST:,}")]
Gammas = Annotated[
    Annotated[list[Gamma], must(f"must hold whole numbers from 1 to {MOST_GAMMA:,}")],
    Field(min_length=1),
]


def _share(value: Any) -> Any:
    """Return a percentage such as 2% as a share of 1."""
    is_percentage = isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value)
    return float(value[:-1]) / 100 if is_percentage else value


Percentage = Annotated[
    float, Field(gt=0, lt=1), BeforeValidator(_share), must("must be a percentage, as in 2%")
]


def within(low: float, high: float) -> AfterValidator:
    """Return the annotation of a number within bounds, beyond which nothing is measured, and
    predictions would not stay finite.
    """

    def check(value: float) -> float:
        if low <= value <= high:
            return value
        raise PydanticCustomError("must", "{valid}", {"valid": f"must be from {low:g} to {high:g}"})

    return AfterValidator(check)


def whole(low: int, high: int) -> must:
    """Return the annotation of a whole number within bounds."""
    return must(f"must be a whole number, {low} to {high:,}", lambda value: low <= value <= high)


def number(above: float, high: float) -> must:
    """Return the annotation of a number above one bound, and at most another."""
    return must(
        f"must be a number above {above:g}, at most {high:g}", lambda value: above < value <= high
    )


def is_file_name(value: str) -> bool:
    """Return whether a text is safe as the name of a file: no file system takes more than 255
    bytes.
    """
    return (
        bool(re.fullmatch(r"\w[^/\\]*", value))
        and value.isprintable()
        and len(value.encode()) <= 200
    )


FileName = Annotated[
    str | None,
    must(
        "must be the name of a file: without separators, at most 200 bytes, and a letter or digit"
        " first",
        lambda value: value is None or is_file_name(value),
    ),
]


def _is_project(value: str) -> bool:
    """Return whether W&B takes a text as the name of a project. It refuses others after the run has
    been measured.
    """
    return 0 < len(value) <= 128 and not set(value) & set("/\\#?%:")


ProjectName = Annotated[
    str,
    must(
        "must be the name of a project: at most 128 characters, none of them / \\ # ? % :",
        _is_project,
    ),
]


def parse(kind: type[T], plain: Any, key: str = "", where: str = "") -> T:
    """Return plain data, as JSON has it, as a typed object. See `parse_json`."""
    return parse_json(kind, json.dumps(plain), key, where)


def parse_json(kind: type[T], text: str | bytes, key: str = "", where: str = "") -> T:
    """Return JSON as a typed object. Raise UserError for the first value that breaks a rule.

    `key` is the data's own key, or empty; `where` is the file that it comes from, if it is not the
    configuration.
    """
    try:
        return _adapter(kind).validate_json(text)  # type: ignore[arg-type]
    except ValidationError as error:
        raise refusal(error, key, where) from None


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:  # a type is hashable, which mypy does not see
    """Return what validates a kind of data: to build it takes longer than to validate an event of a
    stream.
    """
    return TypeAdapter(kind)


def parse_values(kind: type[T], plain: Any, where: str, key: str = "") -> dict[str, T]:
    """Return an object of any keys with values of one kind. Raise UserError for the first value
    that breaks a rule.

    Stops there, because anyone may have written the file, and it may hold millions of them.
    """
    if not isinstance(plain, dict):
        begin = f"{key}=" if key else ""
        raise UserError(f"{where}: {begin}{SHORT.repr(plain)}: must be a JSON object")
    adapter, typed = _adapter(kind), {}  # type: ignore[arg-type]
    for name, value in plain.items():
        try:
            typed[name] = adapter.validate_python(value, strict=True)
        except ValidationError as error:
            raise refusal(error, f"{key}.{printable(name[:100])}".strip("."), where) from None
    return typed


def at_least(smallest: int, option: str, value: int) -> None:
    """Raise UserError where an option of a command is below `smallest`."""
    if value < smallest:
        raise UserError(f"{option}={value}: must be at least {smallest}")


def refusal(error: ValidationError, key: str = "", where: str = "") -> BadValue:
    """Return the error of the first value that breaks a rule; missing ones come last."""
    return bad_value(
        min(error.errors(), key=lambda detail: detail["type"].startswith("missing")), key, where
    )


def bad_value(error: ErrorDetails, parent: str = "", where: str = "") -> BadValue:  # noqa: C901
    """Return the error of a value: the line has its file and its key below `parent`, the value, and
    what is valid.
    """
    *path, name = [str(part) for part in error["loc"]] or [""]
    if path[:1] == ["scenario"]:
        del path[1:2]  # which of the union's classes was meant
    group = ".".join(filter(None, [parent, *path]))
    key = f"{group}.{name}".strip(".")
    if error["type"] == "missing_choice":
        key = f"{key}.{error['ctx']['attribute']}"
    begin = f"{where}: " if where else ""
    if error["type"].startswith("missing"):
        return BadValue(f"{begin}{key} is missing a value", key, "missing")
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return BadValue(f"{begin}unknown key {key}", key, "unknown")
    # A UserError that a class has raised about its values together.
    if error["type"] == "value_error":
        said = str(error["ctx"]["error"])
        return BadValue(
            begin + (said if said.startswith(key) else f"{key}: {said}"), key, error["type"]
        )
    if error["type"] == "json_invalid":
        return BadValue(f"{begin}{error['msg']}", key, error["type"])
    context = error.get("ctx", {})
    value = error["input"]
    if error["type"] in ("literal_error", "enum"):
        options = [
            option.strip("' ") for option in context["expected"].replace(" or ", ", ").split(", ")
        ]
        valid = f"must be one of {', '.join(options)}{did_you_mean(value, options)}"
    elif where and error["type"] in ("dataclass_type", "dict_type"):
        valid = "must be a JSON object"
    elif value is None:
        valid = "must have a value"
    else:
        valid = VALID.get(error["type"], error["msg"]).format_map(context)
    shown = SHORT.repr(value) if where else in_yaml(value)
    if (
        not where
        and isinstance(value, str)
        and error["type"] in NOT_FOR_TEXTS
        and _is_plain_number(value)
    ):
        shown = f'"{value}"'
        valid += (
            "; this is a text: write it without quotes, and a variable as"
            " '${oc.decode:${oc.env:NAME}}'"
        )
    return BadValue(
        f"{begin}{key}={shown}: {valid}" if key else f"{begin}{valid}", key, error["type"]
    )


def _is_plain_number(text: str) -> bool:
    """Return whether a text would be a number, true or false if it were written without quotes."""
    return bool(re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|true|false", text, re.IGNORECASE))


def in_yaml(value: Any) -> str:
    """Return a value as it is written in YAML, in a short line."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping | list | tuple):
        return SHORT.repr(value)
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def did_you_mean(word: object, options: Iterable[str]) -> str:
    """Return the end of an error: the option that was probably meant, if any is close."""
    close = difflib.get_close_matches(str(word), list(options), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""
