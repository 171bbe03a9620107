"""Identify the model of a configuration: its name and its architecture, from the checkpoint if that
is read.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from magicdec.architectures.model_config import ModelConfig
from magicdec.architectures.modules_config import ModulesConfig
from magicdec.config.choices import ModelChoice
from magicdec.costmodel.targets import folder_name, from_values, is_own_path, option, options
from magicdec.errors import UserError


def identify(key: str, choice: ModelChoice, loads: bool) -> tuple[ModelChoice, Path | None]:
    """Return a choice with the name and the architecture of the model that runs, and the
    checkpoint's folder.

    The checkpoint is read if its weights are loaded (`loads`), or if the path is not that of the
    named option. In the second case the model keeps the option's name if the architecture is the
    same, and is named after the folder otherwise. Without a checkpoint the choice is returned
    unchanged, without a folder. `key` is the model's key in the configuration. Raise UserError for
    a missing path, and for values that the checkpoint contradicts.
    """
    origin = _origin(choice)
    is_own = is_own_path(origin.get("name", ""), choice.path)
    given = choice.architecture
    is_wanted = given is not None and choice.implementation in ("auto", given.implementation)
    if not loads and is_own and is_wanted and given is not None:
        return replace(choice, implementation=given.implementation, config_file=None), None
    if not loads and is_own and choice.config_file is not None:
        return _of_file(choice, choice.config_file), None
    if choice.path is None:
        raise UserError(
            f"{key}.path=null: give a local Hugging Face folder or a hub id such as org/name"
        )
    # Here, because it imports PyTorch, which named targets do not need.
    from magicdec.models import description

    folder = description.locate(choice.path, f"{key}.path", weights=loads)
    config = description.read_config(folder, choice.implementation, runs=loads)
    if choice.architecture is not None:
        written = from_values(origin["architecture"]) if origin.get("architecture") else None
        for name in ModelConfig.__dataclass_fields__:
            given = getattr(choice.architecture, name)
            read = getattr(config, name)
            if given != read and (written is None or given != getattr(written, name)):
                ours, theirs = _shown(given), _shown(read)
                raise UserError(
                    f"{key}.architecture.{name}={ours}: the checkpoint {folder} has {theirs}; leave"
                    " it out"
                )
    is_named = choice.name != origin.get("name")  # by the user
    name = choice.name if is_own or is_named else _name_of(folder.resolve(), choice.name, config)
    return _described(choice, name, config), folder


def _of_file(choice: ModelChoice, file: str) -> ModelChoice:
    """Return a choice with the architecture in a config.json that only transformers covers."""
    from magicdec.models import description
    from magicdec.models.metadata import read_json

    plain = read_json(Path(file), dict[str, Any])
    config = description.describe(plain, file, choice.implementation, runs=False)
    # Which tokens end a sequence is for the checkpoint to say.
    return _described(choice, choice.name, replace(config, eos_token_ids=()))


def _described(choice: ModelChoice, name: str, config: ModelConfig) -> ModelChoice:
    """Return a choice with the name, architecture and implementation of the model that runs."""
    return replace(
        choice,
        name=name,
        architecture=config,
        implementation=config.implementation,
        config_file=None,
    )


def taking_back(key: str, choice: ModelChoice) -> ModelChoice:
    """Return a choice whose recurrent layers take back tokens in the way that it names.

    Raise UserError where it names one and the model has no such layers.
    """
    config = choice.architecture
    if choice.rollback == "auto" or config is None:
        return choice
    if not isinstance(config, ModulesConfig) or config.recurrence is None:
        raise UserError(
            f"{key}.rollback={choice.rollback}: {choice.name} has no recurrent layers; leave it out"
        )
    recurrence = replace(config.recurrence, rollback=choice.rollback)
    return replace(choice, architecture=replace(config, recurrence=recurrence))


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _origin(choice: ModelChoice) -> dict[str, Any]:
    """Return the option that a choice was made from, by name, path or architecture; {} if there is
    none.
    """
    if named := option(choice.name):
        return named
    given = choice.architecture
    for candidate in options():
        path, architecture = candidate.get("path"), candidate.get("architecture")
        if (path and choice.path == path) or (architecture and from_values(architecture) == given):
            return candidate
    return {}


def _name_of(folder: Path, chosen: str, config: ModelConfig) -> str:
    """Return a model's name: the option of this architecture that the folder is named after, or
    that was chosen, or else a name made from the folder's.
    """
    name = folder_name(folder)
    for candidate in (name.lower(), chosen):
        written = option(candidate).get("architecture")
        if written and from_values(written) == replace(config, eos_token_ids=()):
            return candidate
    return f"{folder.parent.name}/{name}" if option(name.lower()).get("architecture") else name
