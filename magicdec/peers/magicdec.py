"""Our own HTTP server, started by a run and measured from outside as others are."""

import sys
from dataclasses import asdict
from typing import Any

import torch
from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.config.choices import EngineConfig, ModelChoice
from magicdec.config.load import override as typed
from magicdec.config.registry import ENGINES, check_served, read_keys
from magicdec.config.schema import Config
from magicdec.inputs.rules import STRICT
from magicdec.peers.process import StartedEngine
from magicdec.peers.started_server import StartedServer, as_arguments
from magicdec.version import VERSION

MODEL = "served"  # the name under which the server has the model
HARDWARE = ("device", "dtype", "all_reduce", "cuda_graphs", "compile")


@dataclass(frozen=True, config=STRICT)
class MagicdecEngine(StartedEngine):
    """Our server."""

    name: str = "magicdec"
    scenarios = ("serve", "profile")
    has_our_drafts = True


@ENGINES.register(MagicdecEngine)
class MagicdecServer(StartedServer):
    """`magicdec serve`, with a slot for each row."""

    name = "magicdec"
    empty_slots_cost = True

    @classmethod
    @override
    def check(cls, config: Config) -> None:
        check_served(config.draft)

    @property
    @override
    def draws_acceptance(self) -> bool:
        return True

    @classmethod
    @override
    def installed(cls, engine: EngineConfig) -> str:
        return f"magicdec {VERSION}"

    @override
    def server(self, speculative: bool, port: int) -> list[str]:
        options = as_arguments({"port": port, "model": MODEL, "grace": 0})
        return [sys.executable, "-m", "magicdec", "serve", *self.overrides(speculative), *options]

    def overrides(self, speculative: bool) -> list[str]:
        """Return the overrides of the server's command line."""
        spec = self.spec
        chosen = ["target=custom", typed("target.path", spec.target)]
        chosen += _how_it_runs("target", spec.target_choice)
        chosen += [typed("plugins", spec.plugins)] if spec.plugins else []
        chosen += [typed(f"hardware.{key}", getattr(spec.hardware, key)) for key in HARDWARE]
        # The server divides its room into a prompt and a continuation, which have at least 2
        # tokens.
        chosen += [f"batch.size={spec.num_rows}", f"batch.context_len={spec.max_len - 2}"]
        chosen += ["batch.generate_len=2", f"batch.prefill_chunk={spec.prefill_chunk}"]
        if not speculative:
            return [*chosen, "draft=none"]
        chosen.append(f"draft={spec.draft.name}")
        chosen += self._draft_model()
        chosen += _leaves("draft", spec.draft.name, asdict(spec.draft))
        if spec.draft.is_model:
            chosen.append(f"cache={spec.cache.policy}")
            chosen += _leaves("cache", spec.cache.policy, asdict(spec.cache))
        return chosen

    def _draft_model(self) -> list[str]:
        """Return the overrides that choose the draft's own model, if it has one."""
        spec = self.spec
        if spec.draft_folder is None:
            return []
        if spec.draft.ships_with_target and spec.draft_folder == spec.target:
            return []
        folder = typed("draft.model.path", spec.draft_folder)
        if spec.draft.listens:
            return [folder]
        how = _how_it_runs("draft.model", spec.draft.model)
        return ["target@draft.model=custom", folder, *how]

    @override
    def environment(self) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(torch.get_num_threads())}


def _how_it_runs(key: str, model: ModelChoice | None) -> list[str]:
    """Return overrides of how a model runs, where it is known."""
    names = ("implementation", "rollback")
    return [typed(f"{key}.{name}", getattr(model, name)) for name in names] if model else []


def _leaves(group: str, option: str, values: dict[str, Any]) -> list[str]:
    """Return overrides of the keys of an option that have an effect, apart from its name."""
    keys = sorted(read_keys(group, option) - {"name", "policy", "model"})
    return [typed(f"{group}.{key}", values[key]) for key in keys if values[key] is not None]
