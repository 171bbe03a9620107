"""The registries of what is chosen by name: cache policies, drafts, engines, attention backends,
corpora.

A choice is one module, named like its option: cache=streaming is magicdec/cache/streaming.py, which
is imported when the policy is first asked for, and registers itself:

    @POLICIES.register(Streaming)  # its keys and facts, a subclass of CacheConfig
    class StreamingCache(CompactCache): ...

A plugin does the same in a module of its own. There is no other list of the choices.
"""

import importlib.util
import json
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import PlainValidator, TypeAdapter
from pydantic_core import PydanticCustomError

from magicdec.config.choices import (
    Backend,
    CacheConfig,
    Corpus,
    DataConfig,
    DraftConfig,
    EngineConfig,
)
from magicdec.errors import UserError
from magicdec.inputs.rules import did_you_mean

F = TypeVar("F")
W = TypeVar("W")
PACKAGE = Path(__file__).resolve().parents[1]
# Modules and packages outside this one that have registered something.
PLUGINS: dict[str, Path] = {}


@dataclass(frozen=True)
class Registered(Generic[F]):
    """One thing to choose: its keys and facts, and the class or function that does the work."""

    facts: F
    work: Any


class Registry(Generic[F]):
    """The choices of one group by name."""

    def __init__(self, key: str, *packages: str, attribute: str = "name", keyword: str = ""):
        """`key` is where the configuration chooses, by the facts' `attribute`; `packages` hold the
        built-in choices.

        `keyword` is a value of the key that names no choice, such as auto.
        """
        self.key, self.attribute = key, attribute
        self.packages, self.keyword = packages, keyword
        self._entries: dict[str, Registered[F]] = {}

    def register(self, facts: F) -> Callable[[W], W]:
        """Register the class, or the function, that is decorated."""

        def add(work: W) -> W:
            self._entries[getattr(facts, self.attribute)] = Registered(facts, work)
            _note_plugin(work.__module__)
            return work

        return add

    def __getitem__(self, name: str) -> Registered[F]:
        """Return a choice. Raise UserError if there is none of that name, ImportError for a library
        that it lacks.
        """
        if name not in self:
            hint = did_you_mean(name, self) or "; plugins=[MODULE] adds those of a module"
            names = [*filter(None, [self.keyword]), *self]
            raise UserError(f"{self.key}={name}: must be one of {', '.join(names)}{hint}")
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        if name not in self._entries and name.isidentifier():
            for package in self.packages:
                if importlib.util.find_spec(f"{package}.{name}"):
                    import_module(f"{package}.{name}")
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all choices in order, but those whose library is not installed; import
        all of them.
        """
        return iter(self.within(*self.packages))

    def imported(self) -> list[F]:
        """Return the facts of the choices whose modules were imported so far: plugins', and what
        was asked for.
        """
        return [entry.facts for entry in self._entries.values()]

    def within(self, *packages: str) -> list[str]:
        """Import the choices of these packages. Return the names of all that are known by now, in
        order.
        """
        for package in map(import_module, packages):
            for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
                with suppress(ImportError):
                    import_module(module.name)
        return sorted(self._entries)


def _note_plugin(module: str) -> None:
    """Note the place of a module outside this package: that of its own package, if it has one."""
    name = module.partition(".")[0]
    with suppress(ValueError):  # __main__, which has no place of its own
        spec = importlib.util.find_spec(name)
        for place in (
            spec and (spec.submodule_search_locations or [spec.origin or __file__])
        ) or ():
            if not Path(place).resolve().is_relative_to(PACKAGE):
                PLUGINS[name] = Path(place).resolve()


POLICIES: Registry[type[CacheConfig]] = Registry(
    "cache.policy", "magicdec.cache", attribute="policy"
)
DRAFTS: Registry[type[DraftConfig]] = Registry("draft.name", "magicdec.drafts", keyword="none")
ENGINES: Registry[type[EngineConfig]] = Registry("engine.name", "magicdec.engine", "magicdec.peers")
BACKENDS: Registry[Backend] = Registry(
    "attention", "magicdec.attention", "magicdec.attention.cuda", keyword="auto"
)
CORPORA: Registry[Corpus] = Registry("data.name", "magicdec.data")

# The groups of the configuration whose keys depend on the choice, and the classes of the keys that
# all choices have.
GROUPS: dict[str, Registry[Any]] = {
    "cache": POLICIES,
    "draft": DRAFTS,
    "engine": ENGINES,
    "data": CORPORA,
}
COMMON: dict[str, type] = {
    "cache": CacheConfig,
    "draft": DraftConfig,
    "engine": EngineConfig,
    "data": DataConfig,
}


def keys_of(registry: Registry[Any], name: str) -> type:
    """Return the class with the keys of a choice."""
    return class_of_keys(registry[name].facts)


def class_of_keys(facts: Any) -> type:
    """Return the class with the keys of a choice that has these facts."""
    return facts.keys if isinstance(facts, Corpus) else facts


def facts_of_draft(name: str) -> type[DraftConfig]:
    """Return the facts of a draft; the general facts for `none`, and for a draft of a plugin that
    is not imported.
    """
    return DRAFTS[name].facts if name in DRAFTS else DraftConfig


def has_cache(draft: str) -> bool:
    """Return whether a draft of this name reads `cache`. One of a plugin that is not imported
    might.
    """
    return draft != DRAFTS.keyword and (draft not in DRAFTS or DRAFTS[draft].facts.is_model)


def check_served(draft: DraftConfig) -> None:
    """Raise UserError for a draft that cannot be served."""
    if draft.name != DRAFTS.keyword and not draft.serves:
        served = ", ".join(name for name in DRAFTS if DRAFTS[name].facts.serves)
        raise UserError(
            f"draft.name={draft.name} cannot be served; one of: {DRAFTS.keyword}, {served}"
        )


def read_keys(group: str, name: str) -> set[str]:
    """Return the keys of a group that have an effect with a choice. Raise UserError if there is
    none of that name.
    """
    registry = GROUPS[group]
    facts = DraftConfig if registry is DRAFTS and name == DRAFTS.keyword else registry[name].facts
    return {entry.name for entry in fields(class_of_keys(facts))} - facts.unread()


def _chosen(registry: Registry[Any], base: type) -> PlainValidator:
    """Return the validator of a group whose class depends on what the group chooses."""

    def typed(given: Any) -> Any:
        if isinstance(given, base):
            return given
        if not isinstance(given, dict):
            raise PydanticCustomError("dataclass_type", "no group")
        if (name := given.get(registry.attribute)) is None:
            raise PydanticCustomError(
                "missing_choice", "missing", {"attribute": registry.attribute}
            )
        kind = (
            DraftConfig
            if registry is DRAFTS and name == DRAFTS.keyword
            else keys_of(registry, str(name))
        )
        return TypeAdapter(kind).validate_json(json.dumps(given))

    return PlainValidator(typed)


# The groups of the configuration, each an object of the class that its name or policy chooses.
Cache = Annotated[CacheConfig, _chosen(POLICIES, CacheConfig)]
Draft = Annotated[DraftConfig, _chosen(DRAFTS, DraftConfig)]
Engine = Annotated[EngineConfig, _chosen(ENGINES, EngineConfig)]
Data = Annotated[DataConfig, _chosen(CORPORA, DataConfig)]


def _backend(name: Any) -> str:
    return name if name == BACKENDS.keyword else BACKENDS[str(name)].facts.name


AttentionName = Annotated[str, PlainValidator(_backend)]
