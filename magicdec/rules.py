"""Schemas made of nested dataclasses: rules declared with a field, their check, and the keys there are."""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, fields, is_dataclass
from typing import Any, NamedTuple, get_args, get_type_hints

from magicdec.errors import UserError


class Rule(NamedTuple):
    """What a value must satisfy, and how an error puts it."""

    holds: Callable[[Any], bool]
    valid: str
    options: tuple[str, ...] = ()


# Metadata of a field with a list of positive numbers.
SIZES = {"rule": Rule(lambda values: all(value >= 1 for value in values), "must hold numbers of at least 1")}
# The same for other numbers.
POSITIVE = {"rule": Rule(lambda values: all(0 < value < math.inf for value in values), "must hold numbers above 0")}
SHARES = {"rule": Rule(lambda values: all(0 < v <= 1 for v in values), "must hold numbers above 0 and at most 1")}


def ruled(default: Any, holds: Callable[[Any], bool], valid: str, options: tuple[str, ...] = ()) -> Any:
    """A field with a rule. None, where the field's type allows it, needs no rule's consent."""
    return field(default=default, metadata={"rule": Rule(holds, valid, options)})


def one_of(*options: str, default: Any) -> Any:
    """A field with a fixed set of values."""
    return ruled(default, lambda value: value in options, f"must be one of {', '.join(options)}", options)


def at_least(low: float, default: Any, why: str = "") -> Any:
    """A finite number with a lower bound, and perhaps the reason for it."""
    return ruled(default, lambda value: low <= value < math.inf, f"must be at least {low}{why and f' ({why})'}")


def above(low: float, default: Any) -> Any:
    """A finite number with a lower bound that it must not touch."""
    return ruled(default, lambda value: low < value < math.inf, f"must be above {low}")


def check(node: Any, prefix: str = "") -> None:
    """Raise UserError for the first value that breaks its field's rule."""
    for entry in fields(node):
        key, value, rule = prefix + entry.name, getattr(node, entry.name), entry.metadata.get("rule")
        if is_dataclass(value):
            check(value, key + ".")
        elif rule and value is not None and not rule.holds(value):
            raise UserError(f"{key}={value}: {rule.valid}{did_you_mean(value, rule.options)}")


def has_unknown_keys(node: Any) -> bool:
    """Whether a dataclass, or one nested in it, was given attributes that are not its fields."""
    given = vars(node)
    nested = filter(is_dataclass, given.values())
    return given.keys() != {entry.name for entry in fields(node)} or any(map(has_unknown_keys, nested))


def known_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Every key of a dataclass and of those nested in it, dotted."""
    for name, hint in get_type_hints(schema).items():
        yield prefix + name
        for kind in (hint, *get_args(hint)):
            if is_dataclass(kind) and isinstance(kind, type):
                yield from known_keys(kind, f"{prefix}{name}.")


def did_you_mean(word: object, options: Iterable[str]) -> str:
    """The end of an error: the option that was probably meant, if any is close."""
    close = difflib.get_close_matches(str(word), list(options), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""
