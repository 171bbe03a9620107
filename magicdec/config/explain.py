"""Turn the errors of Hydra and OmegaConf into one line that says what is wrong and what would be
right.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from traceback import walk_tb
from typing import TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from yaml import YAMLError

from magicdec.config.folders import CONF, option_file
from magicdec.config.options import known_keys, unreadable, values_in
from magicdec.errors import UserError, in_one_line, is_out_of_memory
from magicdec.inputs.rules import SHORT, BadValue

E = TypeVar("E", bound=BaseException)

# OmegaConf's messages for a value that does not fit a key of Hydra's own (ours are plain), and what
# would fit.
MISFITS = {
    "converted to Integer": "must be a whole number",
    "not a valid bool|converted to Boolean": "must be true or false",
    "not Optional": "must have a value",
    "not a subclass": "cannot be set as a whole, only its keys can",
    "ListConfig": "must be a list, as in [a,b]",
}

# OmegaConf's internal errors where an override sets a key within a null, or merges a dictionary
# into one.
WITHIN_NULL = re.compile(r"Unexpected type: None|'NoneType' object has no attribute 'get'")

# A defaults list that overrides a key as if it were a group, in the words of Hydra 1.3 and of 1.4.
NOT_A_GROUP = re.compile(
    r"In '(.*)': (?:Could not override|Invalid Defaults List override) '/?(\w+)\b"
)

# Options that a Hydra plugin brings, and the extra that installs it.
EXTRAS = {
    "hydra/sweeper=optuna": "optuna",
    "hydra/launcher=joblib": "joblib",
    "hydra/launcher=submitit_local": "submitit",
    "hydra/launcher=submitit_slurm": "submitit",
    "hydra/launcher=ray": "ray",
}


def explain(error: Exception, overrides: list[str]) -> str | None:  # noqa: C901
    """Return one line about a mistake in the configuration; None for any other error."""
    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        return f"out of memory ({in_one_line(error)}): free some, or raise the limit (ulimit -v)"
    file_read = _file_being_read(error)
    if file_read and isinstance(error, RecursionError | ValueError | YAMLError):
        return unreadable(file_read, error)
    if isinstance(error, RecursionError):
        return f"{SHORT.repr(max(overrides, key=len, default=''))[1:-1]}: nested too deeply"
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override}: not of the form key=value; a value with spaces, commas or brackets"
            " needs quotes"
        )
    if (
        isinstance(error, MissingConfigException)
        and error.missing_cfg_file
        and error.options is not None
    ):
        return _explain_option(error.missing_cfg_file, error.options, overrides)
    origin = _within(error, OmegaConfBaseException)
    if origin is not None:
        if mistake := _within(origin, UserError):  # of a resolver
            return str(mistake)
        file = re.match(r"In '(.*?)'", str(error))
        if file and file[1].partition("/")[0] == origin.full_key in ("experiment", "local"):
            return f"{file[1]}.yaml: must begin with the line `# @package _global_`"
        return (f"{file[1]}.yaml: " if file else "") + _explain_key(origin)
    if isinstance(error, HydraException | ValueError | AssertionError | AttributeError):
        return _explain_text(error, overrides)
    return None


def _file_being_read(error: BaseException) -> str | None:
    """Return the file that Hydra was reading when an error was raised, if any."""
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_qualname == "FileConfigSource.load_config":
            return frame.f_locals.get("full_path")
    return None


def _explain_key(error: OmegaConfBaseException) -> str:
    """Explain an error of OmegaConf, which has the key and usually the value."""
    key = error.full_key or ""
    text = str(error).partition("\n")[0]
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return unknown_key(key)
    if isinstance(error, MissingMandatoryValue):
        return located(BadValue(f"{key} is missing a value", key, "missing"))
    for pattern, valid in MISFITS.items():
        if re.search(pattern, text):
            return f"{key}={'null' if error.value is None else error.value}: {valid}"
    return f"{key}: {text}" if key else text


def located(error: BadValue, hydra_cfg: DictConfig | None = None) -> str:
    """Return the line about a value, with the file that it comes from, where that is the user's
    own.

    `hydra_cfg` is Hydra's own part of the configuration; None: that of the job that is running, if
    any.
    """
    if hydra_cfg is None and HydraConfig.initialized():
        hydra_cfg = HydraConfig.get()  # type: ignore[assignment]
    choices = hydra_cfg.runtime.choices if hydra_cfg is not None else {}
    overrides = hydra_cfg.overrides.task if hydra_cfg is not None else []
    typed = {text.lstrip("+").partition("=")[0] for text in overrides}
    if error.key in ("experiment", "local"):
        return (
            f"{error.key}/{choices.get(error.key)}.yaml: must begin with the line `# @package"
            " _global_`"
        )
    if error.type == "unknown":
        return unknown_key(error.key)
    parent, _, name = error.key.rpartition(".")
    for choice, option in choices.items():
        group, _, package = choice.partition("@")
        if not option or parent != (package or group):
            continue
        if error.type == "missing":
            return f"{error}; {group}/{option}.yaml must set it"
        file = option_file(group, option)
        is_own = file is not None and not file.is_relative_to(CONF)
        if file and is_own and error.key not in typed and name in values_in(file):
            return f"{group}/{option}.yaml: {error}"
    return str(error)


def unknown_key(key: str) -> str:
    """Return the line about an unknown key, and suggest a sibling, or its namesake in another
    group.
    """
    keys, (parent, _, name) = list(known_keys()), key.rpartition(".")
    siblings = [
        full_key.rpartition(".")[2] for full_key in keys if full_key.rpartition(".")[0] == parent
    ]
    if parent in keys and not siblings:
        return f"unknown key {key}; {parent} has no keys: write {parent}=VALUE"
    namesakes = [full_key for full_key in keys if full_key.endswith(f".{name}")]
    close = difflib.get_close_matches(name, siblings, n=1)
    if close or namesakes:
        meant = f"{parent}.{close[0]}".lstrip(".") if close else namesakes[0]
        return f"unknown key {key}; did you mean {meant}?"
    if not siblings:
        return f"unknown key {key}; see --help"
    return (
        f"unknown key {key}; {parent or 'there'} {'has' if parent else 'are'}:"
        f" {', '.join(siblings)}"
    )


def _explain_text(error: Exception, overrides: Sequence[str]) -> str | None:
    """Explain an error of Hydra, or an internal one of OmegaConf, by its text."""
    text = str(error)
    if "root: NoneType" in text or WITHIN_NULL.match(text):
        return next(_within_null(overrides), None)
    if "Could not override 'target@draft.model'" in text:
        return "target@draft.model: this draft has no model of its own; use draft=model"
    if (match := NOT_A_GROUP.match(text)) and match[2] in known_keys():
        return (
            f"{match[1]}.yaml: {match[2]} is a key and no group: write {match[2]}: VALUE below the"
            " defaults"
        )
    if "must be a string or a list" in text:
        return next(_not_an_option(overrides), text)
    if match := re.match(
        r"Ambiguous value for argument '(.*)'|Sweep parameters '(.*)' requires", text
    ):
        return (
            f"{match[1] or match[2]}: several values need -m; a list is written [a,b], a text"
            " \"key='a,b'\""
        )
    match = re.match(r"Multiple values for (\S+)\. To override a value use 'override (.*)'", text)
    if match and not any(typed.startswith("+") and match[1] in typed for typed in overrides):
        file = next((typed for typed in overrides if typed.startswith("experiment=")), "an option")
        return f"{file}: {match[1]} is chosen already; write `override /{match[2]}` in its defaults"
    if match := re.match(
        r"Multiple values for (\S+)\.|Could not append to config. An item is already at '(.*)'",
        text,
    ):
        return f"{match[1] or match[2]} is there already: leave out the +"
    if match := re.search(r"use (\+\S+=\S+)", text):
        flag = "-m " if match[1].startswith("+sweeps=") else ""
        return f"{match[1][1:]}: write {flag}{match[1]}"
    if isinstance(error, AssertionError | AttributeError):
        return None
    return re.split(r"(?:Config s|S)earch path:|See http", text)[0]


def _explain_option(missing: str, options: Sequence[str], overrides: list[str]) -> str:
    """Explain a missing option GROUP/OPTION: name the options of its group and its folders, or what
    installs it.

    It is called as on the command line, which may say more than group and name:
    target@draft.model=NAME.
    """
    group, _, option = missing.rpartition("/")
    typed = f"{group}={option}"
    for override in overrides:
        key, _, value = override.partition("=")
        name = key.lstrip("+").partition("@")[0]
        within = missing.removeprefix(f"{name}/")  # experiment=paper/table9
        if within != missing and within in value.split(","):
            group, option = name, within
            typed = f"{key}={within}"
    if extra := EXTRAS.get(f"{group}={option}"):
        return f"{typed}: needs pip install 'magicdec[{extra}]'"
    within_group = (
        path.relative_to(CONF / group).with_suffix("")
        for path in (CONF / group).glob("*/**/*.yaml")
    )
    return (
        f"{typed}:"
        f" {_no_such_option(option, [*options, *sorted(path.as_posix() for path in within_group)])}"
    )


def _no_such_option(option: str, options: Sequence[str]) -> str:
    """Return the end of an error: all options and the closest one, compared by its last part
    too.
    """
    names = {name.rpartition("/")[2]: name for name in options} | {name: name for name in options}
    close = difflib.get_close_matches(option, names, n=1, cutoff=0.7)
    return (
        "no such option; one of:"
        f" {', '.join(options)}{f'; did you mean {names[close[0]]}?' if close else ''}"
    )


def _within(error: BaseException | None, kind: type[E]) -> E | None:
    """Return the error of a kind that another one has wrapped, or is, if any."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _within_null(overrides: Sequence[str]) -> Iterator[str]:
    """Explain the overrides that may have set a key within a null: those of groups that need not be
    there.
    """
    groups = {key.rpartition(".")[0] for key in known_keys()}
    nothing = "nothing can be set in it from the command line"
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        parent = key.rpartition(".")[0]
        if key.startswith("draft.model."):
            yield f"{override}: draft.model is null; use draft=model"
        elif value[:1] == "{" and key in groups:
            yield f"{override}: {key} is null; set it as a whole in a YAML file; {nothing}"
        elif "." in parent and parent in groups:
            yield f"{override}: {parent} is null; {nothing}"


def _not_an_option(overrides: Sequence[str]) -> Iterator[str]:
    """Explain the overrides whose key is a group, but whose value is no name."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if (CONF / key).is_dir() and not re.match(r"[A-Za-z]", value.replace("null", "")):
            yield (
                f"{override}:"
                f" {_no_such_option(value, sorted(path.stem for path in (CONF / key).glob('*.yaml')))}"  # noqa: E501
            )
