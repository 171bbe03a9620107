"""The registries of drafts, cache policies, engines and corpora: everything chosen by name, without importing PyTorch.

An entry holds a name, facts, and where the class is that does the work; the class is imported when it is asked for.
Something new needs its file, its YAML in conf/, and an entry here. A module outside the package makes its own entry:

    @POLICIES.register(Strided)  # its keys and facts, a subclass of CacheConfig
    class StridedCache(CompactCache): ...

`POLICIES.register(Strided, "module:StridedCache")` does the same without importing the class.
"""

import importlib.util
import pkgutil
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from omegaconf import MISSING

from magicdec import drafting, policies
from magicdec.drafting import DraftConfig
from magicdec.errors import UserError
from magicdec.policies import CacheConfig
from magicdec.rules import above, did_you_mean, one_of

F = TypeVar("F")
PACKAGE = Path(__file__).resolve().parent
PLUGINS: dict[str, Path] = {}  # modules and packages outside this one that have made an entry


@dataclass(frozen=True)
class Entry(Generic[F]):
    """One thing to choose."""

    facts: F
    where: Any  # the class that does the work, or its module:name

    def load(self) -> Any:
        """Return the class, imported now if it has not been."""
        if isinstance(self.where, str):
            return pkgutil.resolve_name(self.where)
        return self.where


class Registry(Generic[F]):
    """The entries of one group by name, in the order in which they were made."""

    def __init__(self, key: str, built_in: Mapping[str, F]):
        """`key` is where the configuration chooses among them; `built_in` maps module:name to facts."""
        self.key, self.attribute = key, key.rpartition(".")[2]
        self._entries = {self._name(facts): Entry(facts, where) for where, facts in built_in.items()}
        self._built_in = tuple(self._entries.values())

    def _name(self, facts: F) -> str:
        return getattr(facts, self.attribute)

    def register(self, facts: F, where: str | None = None) -> Callable[[type], type]:
        """Make an entry: for the class at `where`, or for the class that is decorated."""

        def add(work: Any) -> Any:
            self._entries[self._name(facts)] = Entry(facts, work)
            own = facts if isinstance(facts, type) else type(facts)
            for module in (own.__module__, work.partition(":")[0] if isinstance(work, str) else work.__module__):
                _note_plugin(module)
            return work

        return add if where is None else add(where)

    def __getitem__(self, name: str) -> Entry[F]:
        """Return an entry; raise UserError where there is none of that name."""
        if name not in self._entries:
            raise UserError(f"{self.key}={name}: must be one of {', '.join(self)}{did_you_mean(name, self)}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def own_fields(self, built_in: bool = False) -> dict[str, Field[Any]]:
        """Return the fields of the entries, by name, but for the name itself; of built-in entries alone, or of all."""
        entries: Any = self._built_in if built_in else self._entries.values()
        declared = [field for entry in entries for field in fields(entry.facts)]
        return {field.name: field for field in declared if field.name != self.attribute}


def _note_plugin(module: str) -> None:
    """Note where a module outside this package lies: with its package, where it has one."""
    name = module.partition(".")[0]
    with suppress(ValueError):  # __main__, which has no place of its own
        spec = importlib.util.find_spec(name)
        for place in (spec and (spec.submodule_search_locations or [spec.origin or __file__])) or ():
            if not Path(place).resolve().is_relative_to(PACKAGE):
                PLUGINS[name] = Path(place).resolve()


@dataclass(frozen=True)
class EngineConfig:
    """An engine. A subclass is a peer of ours: it declares its own keys, and says which drafts it has."""

    name: str = MISSING
    drafts: ClassVar[tuple[str, ...]] = ()
    one_row: ClassVar[bool] = False  # it speculates on one row at a time


@dataclass(frozen=True)
class Native(EngineConfig):
    """Our own decoder, which has all drafts."""

    name: str = "native"


@dataclass(frozen=True)
class TransformersEngine(EngineConfig):
    """Hugging Face transformers; `cache` is that of autoregressive decoding."""

    name: str = "transformers"
    cache: str = one_of("static", "dynamic", default="static")
    drafts = ("model", "ngram", "layer_skip")
    one_row = True


@dataclass(frozen=True)
class WorkerEngine(EngineConfig):
    """An engine in an environment of its own, that of another Python."""

    python: str | None = None
    time_limit_s: float = above(0, default=1800)
    drafts = ("model", "ngram")


@dataclass(frozen=True)
class VllmEngine(WorkerEngine):
    """vLLM."""

    name: str = "vllm"
    method: str = one_of("draft_model", "eagle", "eagle3", default="draft_model")


@dataclass(frozen=True)
class LlamacppEngine(WorkerEngine):
    """llama.cpp."""

    name: str = "llamacpp"


@dataclass(frozen=True)
class OpenvinoEngine(WorkerEngine):
    """OpenVINO GenAI; `kv_type` is that of its KV cache."""

    name: str = "openvino"
    kv_type: str = one_of("f32", "u8", default="f32")


@dataclass(frozen=True)
class Corpus:
    """A source of prompts. The work is a function `load`: see magicdec/data."""

    name: str
    needs_path: bool = False
    tasks: tuple[str, ...] = ()
    is_noise: bool = False  # random tokens: nothing to measure acceptance on, and no tokenizer needed
    own_lengths: bool = False  # rows are as long as the user wrote them
    origin: str = f"Python {platform.python_version()}"  # of a text without a path: the standard library's source
    files_at: str | None = "magicdec.data.text:files_at"  # finds the files at data.path, if the corpus reads any


POLICIES: Registry[type[CacheConfig]] = Registry(
    "cache.policy",
    {
        "magicdec.cache.full:FullCache": policies.Full,
        "magicdec.cache.streaming:StreamingCache": policies.Streaming,
        "magicdec.cache.window:WindowCache": policies.Window,
        "magicdec.cache.snapkv:SnapKVCache": policies.SnapKV,
        "magicdec.cache.pyramidkv:PyramidKVCache": policies.PyramidKV,
        "magicdec.cache.h2o:H2OCache": policies.H2O,
        "magicdec.cache.quest:QuestCache": policies.Quest,
        "magicdec.cache.topk:TopKCache": policies.TopK,
        "magicdec.cache.verify_guided:VerifyGuidedCache": policies.VerifyGuided,
        "magicdec.cache.quantized:QuantizedCache": policies.Quantized,
    },
)
DRAFTS: Registry[type[DraftConfig]] = Registry(
    "draft.name",
    {
        "magicdec.drafts.model:SelfDraft": drafting.SelfSpeculation,
        "magicdec.drafts.model:IndependentDraft": drafting.IndependentModel,
        "magicdec.drafts.ngram:NgramDraft": drafting.PromptLookup,
        "magicdec.drafts.layer_skip:LayerSkipDraft": drafting.LayerSkip,
        "magicdec.drafts.hierarchical:HierarchicalDraft": drafting.Hierarchical,
    },
)
ENGINES: Registry[type[EngineConfig]] = Registry(
    "engine.name",
    {
        "magicdec.engine.native:NativeEngine": Native,
        "magicdec.peers.transformers:TransformersPeer": TransformersEngine,
        "magicdec.peers.vllm:VllmPeer": VllmEngine,
        "magicdec.peers.llamacpp:LlamacppPeer": LlamacppEngine,
        "magicdec.peers.openvino:OpenvinoPeer": OpenvinoEngine,
    },
)
CORPORA: Registry[Corpus] = Registry(
    "data.name",
    {
        "magicdec.data.stdlib:load": Corpus("stdlib", files_at=None),
        "magicdec.data.text:load": Corpus("text", needs_path=True),
        "magicdec.data.prompts:load": Corpus("prompts", needs_path=True, own_lengths=True),
        "magicdec.data.pg19:load": Corpus("pg19", origin="hub", files_at="magicdec.data.pg19:books_at"),
        "magicdec.data.repeat:load": Corpus("repeat"),
        "magicdec.data.ruler:load": Corpus("ruler", tasks=("niah_single", "niah_multikey", "cwe", "vt", "qa")),
        "magicdec.data.random:load": Corpus("random", is_noise=True, origin="random", files_at=None),
    },
)
