"""Rules of single values, and the one line that a broken rule becomes.

A group of the configuration is a frozen pydantic dataclass with `config=STRICT`: a text is no number, true is no 1, and
an unknown key is an error. Rules that pydantic words well are its own, as in `Field(8, ge=1)`; others are `must`.
"""

import difflib
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, ValidationError, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_wrap_validator_function

from magicdec.errors import UserError, printable

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class BadValue(UserError):
    """A value that breaks a rule: `key` is its own in the configuration, `type` pydantic's name of the rule."""

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
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be above {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "less_than": "must be below {lt:g}",
    "too_short": "must hold at least one",
    "must": "{valid}",
}


@dataclass(frozen=True)
class must:
    """An annotation with the words for any rule that is broken: its own, `holds`, or those annotated before."""

    valid: str
    holds: Callable[[Any], bool] = lambda value: True

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Wrap the schema of what is annotated."""

        def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
            with suppress(ValidationError):
                if self.holds(typed := inner(value)):
                    return typed
            raise PydanticCustomError("must", "{valid}", {"valid": self.valid})

        return no_info_wrap_validator_function(check, handler(source))


Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, le=1), must("must be above 0 and at most 1")]
Share = Annotated[float, Field(ge=0, le=1), must("must be between 0 and 1")]
Counts = Annotated[list[Count], must("must hold numbers of at least 1")]


def is_file_name(value: str) -> bool:
    """Return whether a text is safe as the name of a file: no file system takes more than 255 bytes."""
    return bool(re.fullmatch(r"\w[^/\\]*", value)) and value.isprintable() and len(value.encode()) <= 200


FileName = Annotated[
    str | None,
    must(
        "must be the name of a file: without separators, at most 200 bytes, and a letter or digit first",
        lambda value: value is None or is_file_name(value),
    ),
]


def parse(kind: type[T], plain: Any, key: str = "") -> T:
    """Return plain data, as JSON has it, as a typed object. Raise UserError for the first value that breaks a rule.

    `key` is the data's own key in the configuration, or empty.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(plain))
    except ValidationError as error:
        wrong = sorted(error.errors(), key=lambda one: one["type"].startswith("missing"))
        raise bad_value(wrong[0], key) from None


def bad_value(error: ErrorDetails, parent: str = "") -> BadValue:
    """Return the error of a value: the line has its key below `parent`, the value, and what would be valid."""
    *path, name = [str(part) for part in error["loc"]] or [""]
    if path[:1] == ["scenario"]:
        del path[1:]  # which of the union's classes was meant
    group = ".".join(filter(None, [parent, *path]))
    key = f"{group}.{name}".strip(".")
    if error["type"] == "missing_choice":
        key = f"{key}.{error['ctx']['attribute']}"
    if error["type"].startswith("missing"):
        return BadValue(f"{key} is missing a value", key, "missing")
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return BadValue(f"unknown key {key}", key, "unknown")
    if error["type"] == "value_error":  # a UserError that a class has raised about its values together
        said = str(error["ctx"]["error"])
        return BadValue(said if said.startswith(key) else f"{key}: {said}", key, error["type"])
    context, value = error.get("ctx", {}), error["input"]
    if error["type"] in ("literal_error", "enum"):
        options = [option.strip("' ") for option in context["expected"].replace(" or ", ", ").split(", ")]
        valid = f"must be one of {', '.join(options)}{did_you_mean(value, options)}"
    elif value is None:
        valid = "must have a value"
    else:
        valid = VALID.get(error["type"], error["msg"]).format_map(context)
    return BadValue(f"{key}={in_yaml(value)}: {valid}", key, error["type"])


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


class Rule(NamedTuple):
    """A condition on a value, and the words in which an error states it."""

    holds: Callable[[Any], bool]
    valid: str
    options: tuple[str, ...] = ()


def at_least(low: float, default: Any) -> Any:
    """Return a field of a dataclass: a finite number with a lower bound."""
    return has_rule(Rule(lambda value: low <= value < math.inf, f"must be at least {low}"), default)


# Rules that check the type too, for values that no schema has typed before: those of JSON files.
TEXT = Rule(lambda value: isinstance(value, str), "must be a text")
FLAG = Rule(lambda value: isinstance(value, bool), "must be true or false")


def whole(low: int, high: int) -> Rule:
    """Return the rule of a whole number within bounds."""
    return Rule(lambda value: type(value) is int and low <= value <= high, f"must be a whole number, {low} to {high:,}")


def number(above: float, high: float) -> Rule:
    """Return the rule of a finite number above one bound, and at most another."""
    return Rule(
        lambda value: type(value) in (int, float) and above < value <= high,
        f"must be a number above {above:g}, at most {high:g}",
    )


def list_of(rule: Rule) -> Rule:
    """Return the rule of a list (or tuple) whose items satisfy `rule`."""
    return Rule(
        lambda value: isinstance(value, list | tuple) and all(map(rule.holds, value)),
        f"must be a list, and each item {rule.valid}",
    )


def either(*rules: Rule) -> Rule:
    """Return the rule of a value that satisfies one of `rules`."""
    return Rule(lambda value: any(rule.holds(value) for rule in rules), " or ".join(rule.valid for rule in rules))


def or_null(rule: Rule) -> Rule:
    """Return the rule of a value that may be null."""
    return Rule(lambda value: value is None or rule.holds(value), rule.valid)


def has_rule(rule: Rule, default: Any = MISSING) -> Any:
    """Return a field of a dataclass with a rule; without a default the field is required."""
    return field(default=default, metadata={"rule": rule})


def rules_of(schema: type) -> dict[str, Rule]:
    """Return the rules of a dataclass by field."""
    return {entry.name: entry.metadata["rule"] for entry in fields(schema) if "rule" in entry.metadata}


class Values(NamedTuple):
    """A schema of JSON objects with any keys, and values that satisfy one schema."""

    schema: "Rule | Mapping[str, Any]"


def check_json(value: Any, schema: Rule | Values | Mapping[str, Any], where: str, key: str = "") -> None:
    """Raise UserError for the first value that breaks its rule. `where` is the file.

    A mapping names keys with their own schemas: keys that are missing or not named are not checked.
    """
    if isinstance(schema, Rule):
        if not schema.holds(value):
            raise UserError(f"{where}: {key}={SHORT.repr(value)}: {schema.valid}")
    elif not isinstance(value, dict):
        raise UserError(f"{where}: {f'{key}={SHORT.repr(value)}: ' if key else ''}must be a JSON object")
    else:
        parts = dict.fromkeys(value, schema.schema) if isinstance(schema, Values) else schema
        for name in filter(value.__contains__, parts):
            shown = printable(name[:100])
            check_json(value[name], parts[name], where, f"{key}.{shown}" if key else shown)


def check(node: Any, prefix: str = "") -> None:
    """Raise UserError for the first value that breaks its field's rule."""
    for entry in fields(node):
        key, value, rule = prefix + entry.name, getattr(node, entry.name), entry.metadata.get("rule")
        if is_dataclass(value):
            check(value, key + ".")
        elif rule and value is not None and not rule.holds(value):
            raise UserError(f"{key}={value}: {rule.valid}{did_you_mean(value, rule.options)}")
