"""Generate two pages of the documentation's site, reference/configuration.md and reference/cli.md,
from the schema, the comments of conf/ and the parsers.

MkDocs calls this file as a hook when it builds or serves the site (mkdocs.yml).
"""

import argparse
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints
from unittest.mock import patch

import yaml
from jinja2 import StrictUndefined, Template

from magicdec import cli
from magicdec.config.folders import CONF
from magicdec.config.groups import SweepConfig
from magicdec.config.registry import CORPORA, DRAFTS, ENGINES, POLICIES, keys_of
from magicdec.config.schema import Config
from magicdec.inputs.rules import must

GROUPS = (
    "target",
    "draft",
    "cache",
    "hardware",
    "batch",
    "data",
    "sampling",
    "engine",
    "scenario",
    "wandb",
)


class Key(NamedTuple):
    """A key in a YAML file: its value, and the comment above it or behind it."""

    value: Any
    comment: str


class Option(NamedTuple):
    """A YAML file: the comment at its top, and its keys."""

    name: str
    about: str
    keys: dict[str, Key]


class Setting(NamedTuple):
    """A line of a table of keys."""

    key: str
    default: str
    valid: str
    meaning: str


def read_option(file: Path, prefix: str = "") -> Option:
    """Return a file's top comment and its keys, each with its comment. Keys of nested groups are
    dotted.
    """
    values, about, keys, above = yaml.safe_load(file.read_text()) or {}, "", {}, []
    path: list[str] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            if not stripped.startswith("# @"):
                above.append(stripped.lstrip("# "))
        elif found := re.match(r"( *)([\w.]+):", line):
            depth, key = len(found[1]) // 2, found[2]
            path = [*path[:depth], key]
            if not keys and not about and depth == 0:
                about, above = " ".join(above), []
            behind = line.partition("  # ")[2]
            keys[".".join(path)] = Key(_value_at(values, path), " ".join([*above, behind]).strip())
            above = []
        elif not stripped:
            if not keys and not about:
                about = " ".join(above)
            above = []
    return Option(file.stem, about, {prefix + key: value for key, value in keys.items()})


def _value_at(values: Any, path: list[str]) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def configuration() -> str:
    """Return the page with every configuration key."""
    classes = get_type_hints(Config)
    chosen = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    defaults = {
        group: name for entry in chosen if isinstance(entry, dict) for group, name in entry.items()
    }
    groups = []
    for group in GROUPS:
        options = [read_option(file) for file in sorted((CONF / group).glob("*.yaml"))]
        options.sort(key=lambda option: option.name != defaults[group])
        settings = list(_settings(f"{group}.", options, list(_classes(group, classes[group]))))
        groups.append({"name": group, "options": options, "settings": settings})
    top = read_option(CONF / "config.yaml")
    sweep = {
        key.removeprefix("sweep."): value
        for key, value in top.keys.items()
        if key.startswith("sweep.")
    }
    own = {
        key: value
        for key, value in top.keys.items()
        if key in classes and key not in GROUPS and key != "sweep"
    }
    return _page(
        "configuration.md",
        groups=groups,
        sweep=_settings("sweep.", [Option("", "", sweep)], [SweepConfig]),
        own=_settings("", [Option("", "", own)], [Config]),
    )


def _page(name: str, **content: Any) -> str:
    """Return a page, by its template in tools/pages."""
    text = (Path(__file__).parent / "pages" / name).read_text(encoding="utf-8")
    return Template(
        text, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    ).render(content)


def _classes(group: str, general: type) -> Iterator[type]:
    """Yield the dataclasses that hold a group's keys."""
    yield from get_args(general) or (general,)
    registry: Any = {"cache": POLICIES, "draft": DRAFTS, "engine": ENGINES, "data": CORPORA}.get(
        group, {}
    )
    yield from dict.fromkeys(keys_of(registry, name) for name in sorted(registry))


def _settings(prefix: str, options: list[Option], classes: list[type]) -> Iterator[Setting]:
    """Yield keys with defaults, valid values and meaning; keys without a YAML entry are not
    settings.
    """
    entries = {
        entry.name: (holder, entry) for holder in reversed(classes) for entry in fields(holder)
    }
    for name, (holder, entry) in sorted(entries.items(), key=lambda item: _place(item[0], options)):
        hint = get_type_hints(holder)[name]
        inner = _dataclass_in(hint)
        given = {option.name: option.keys[name] for option in options if name in option.keys}
        if not given:
            continue
        if inner and name != "efficiency":
            given = {option: key._replace(value="…") for option, key in given.items()}
        comments = [key.comment for key in given.values() if key.comment]
        valid = _valid(get_type_hints(holder, include_extras=True)[name])
        yield Setting(
            f"{prefix}{name}",
            _default(given, entry),
            _escape(valid),
            _escape("".join(comments[:1])),
        )
        for one in fields(inner) if inner and name in ("efficiency", "architecture") else ():
            yield _inner(f"{prefix}{name}.", inner, one)


def _inner(prefix: str, holder: type, entry: Any) -> Setting:
    """Return a key whose comment is in the source of its dataclass."""
    line = re.search(
        rf"^ +{entry.name}: .*?(?:  # (.*))?$", inspect.getsource(holder), re.MULTILINE
    )
    valid = _valid(get_type_hints(holder, include_extras=True)[entry.name])
    default = "" if entry.default is MISSING else f"`{_yaml(entry.default)}`"
    return Setting(
        f"{prefix}{entry.name}", default, _escape(valid), _escape((line and line[1]) or "")
    )


def _place(name: str, options: list[Option]) -> tuple[int, int]:
    """Return where a key is first set, so that a table has the order of the files."""
    for number, option in enumerate(options):
        if name in option.keys:
            return number, list(option.keys).index(name)
    return len(options), 0


def _dataclass_in(hint: Any) -> Any:
    return next(
        (kind for kind in (hint, *getattr(hint, "__args__", ())) if is_dataclass(kind)), None
    )


def _default(given: dict[str, Key], entry: Any) -> str:
    """Return the value that options set: one, or each with the options that it belongs to."""
    by_value: dict[str, list[str]] = {}
    for name, key in given.items():
        by_value.setdefault(_yaml(key.value), []).append(name)
    if (entry.name in ("name", "policy", "path") and len(by_value) > 1) or list(by_value) == ["…"]:
        return "by option"
    if len(by_value) == 1:
        return f"`{next(iter(by_value))}`"
    if len(by_value) > 4:
        return "by option"
    return ", ".join(
        f"`{value}` ({', '.join(names)})" for value, names in by_value.items()
    ) or _yaml(entry.default)


def _yaml(value: Any) -> str:
    if value is MISSING:
        return ""
    value = list(value) if isinstance(value, tuple) else value
    if isinstance(value, str):
        return value.replace("\n", "\\n")
    return yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("\n...")


def _valid(hint: Any) -> str:
    """Return the valid values of a field, in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        rules = [rule for part in args[1:] for rule in getattr(part, "metadata", [part])]
        for rule in sorted(rules, key=lambda rule: not isinstance(rule, must)):
            if isinstance(rule, must):
                return re.sub("^must (be|hold) ", "", rule.valid)
            words = {"ge": "at least {ge:g}", "gt": "above {gt:g}"}
            if text := next((words[name] for name in words if hasattr(rule, name)), ""):
                return text.format_map(vars(rule) if hasattr(rule, "__dict__") else asdict(rule))
        return _valid(args[0])
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}" if len(args) > 1 else str(args[0])
    if origin in (list, tuple):
        each = _valid(args[0])
        return f"list, each {each}" if each.startswith("a ") else f"list of {each}"
    if args:
        return " or ".join(map(_valid, args))
    words = {
        str: "text",
        int: "whole number",
        float: "number",
        bool: "true or false",
        type(None): "null",
    }
    return words.get(hint, "the keys below" if is_dataclass(hint) else str(hint))


def _escape(text: str) -> str:
    return re.sub(r"(?<!`)(<\w+>)", r"`\1`", text.replace("|", "\\|"))


class _Asked(Exception):
    """Exception that carries a parser out of a main function."""


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a subcommand: the one that its main function asks for the arguments."""

    def caught(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Asked(parser)

    readers = dict.fromkeys(("parse_args", "parse_intermixed_args"), caught)
    try:
        with patch.multiple(argparse.ArgumentParser, **readers):
            import_module(cli.COMMANDS[command]).main([])
    except _Asked as asked:
        return asked.args[0]
    raise RuntimeError(f"{command} reads no arguments")


def commands() -> str:
    """Return the page with every command and its arguments."""
    found = []
    for command in cli.COMMANDS:
        parser, arguments = parser_of(command), []
        for action in parser._actions[1:]:  # without --help
            name = ", ".join(action.option_strings) or action.metavar or action.dest
            if action.option_strings and action.nargs != 0:
                name += f" {action.metavar or ('|'.join(action.choices) if action.choices else action.dest.upper())}"  # noqa: E501
            arguments.append({"name": _escape(str(name)), "meaning": _escape(action.help or "")})
        about = " ".join((parser.description or "").split())
        found.append({"name": command, "about": about, "arguments": arguments})
    return _page("cli.md", commands=found)


WRITERS = {"configuration.md": configuration, "cli.md": commands}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the files of the site."""
    from mkdocs.structure.files import File

    for name, write in WRITERS.items():
        files.append(File.generated(config, f"reference/{name}", content=write()))
    return files
