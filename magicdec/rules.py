"""Rules for single values, declared with the field of a dataclass or the key of a JSON object, and their checks."""

import difflib
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any, NamedTuple

from magicdec.errors import UserError, printable

SHORT = reprlib.Repr()  # how errors show a value: its first level, a line of it
SHORT.maxlevel = 1


class Rule(NamedTuple):
    """A condition on a value, and the words in which an error states it."""

    holds: Callable[[Any], bool]
    valid: str
    options: tuple[str, ...] = ()


# Metadata of a field with a list of positive numbers.
SIZES = {"rule": Rule(lambda values: all(value >= 1 for value in values), "must hold numbers of at least 1")}
# The same for other numbers.
POSITIVE = {"rule": Rule(lambda values: all(0 < value < math.inf for value in values), "must hold numbers above 0")}
SHARES = {"rule": Rule(lambda values: all(0 < v <= 1 for v in values), "must hold numbers above 0 and at most 1")}


def ruled(default: Any, holds: Callable[[Any], bool], valid: str, options: tuple[str, ...] = ()) -> Any:
    """Return a field with a rule. None, where the field's type allows it, needs no rule's consent."""
    return field(default=default, metadata={"rule": Rule(holds, valid, options)})


def one_of(*options: str, default: Any) -> Any:
    """Return a field with a fixed set of values."""
    return ruled(default, lambda value: value in options, f"must be one of {', '.join(options)}", options)


def at_least(low: float, default: Any, why: str = "") -> Any:
    """Return a finite number with a lower bound, and perhaps the reason for it."""
    return ruled(default, lambda value: low <= value < math.inf, f"must be at least {low}{why and f' ({why})'}")


def above(low: float, default: Any) -> Any:
    """Return a finite number with a lower bound that it must not touch."""
    return ruled(default, lambda value: low < value < math.inf, f"must be above {low}")


# Rules that check the type too, for values that no schema has typed before: those of JSON files.
TEXT = Rule(lambda value: isinstance(value, str), "must be a text")
FLAG = Rule(lambda value: isinstance(value, bool), "must be true or false")


# Of a file or folder within another. No file system takes more than 255 bytes, and a date may be added.
FILE_NAME = Rule(
    lambda value: bool(re.fullmatch(r"\w[^/\\]*", value)) and value.isprintable() and len(value.encode()) <= 200,
    "must be the name of a file: without separators, at most 200 bytes, and a letter or digit first",
)


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


# Metadata of a field with a name, or a list of them.
NAMES = {"rule": either(TEXT, list_of(TEXT))._replace(valid="must be a name or a list of names, as in [a,b]")}


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


def did_you_mean(word: object, options: Iterable[str]) -> str:
    """Return the end of an error: the option that was probably meant, if any is close."""
    close = difflib.get_close_matches(str(word), list(options), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""
