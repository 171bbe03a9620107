"""A run or a prediction with every `auto` resolved, for those who build, measure and predict it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from magicdec import data
from magicdec.architectures.model_config import ModelConfig
from magicdec.config.registry import ENGINES
from magicdec.config.schema import Config
from magicdec.inputs.fingerprint import of_files
from magicdec.measure.system import driver_version
from magicdec.models import checkpoint


@dataclass(frozen=True)
class PlannedModel:
    """One model of a run before its weights are loaded: its folder and its architecture."""

    key: str  # the configuration's key, for messages
    folder: Path | None  # None: random weights of a known architecture
    config: ModelConfig
    num_ranks: int = 1  # that divide its layers
    reads_weights: bool = True  # False: a server has them, and its tokenizer alone is read

    @cached_property
    def fingerprint(self) -> str:
        """Return the hash of what is read of it, for a run's id."""
        return checkpoint.fingerprint(self.folder, self.reads_weights) if self.folder else "random"


@dataclass(frozen=True)
class Plan:
    """A run or a prediction with every `auto` resolved and every mistake found. Nothing large is
    allocated.

    A prediction has no device: `device` is PyTorch's meta device, and `device_name` the machine to
    predict for.
    """

    config: Config
    device: torch.device
    dtype: torch.dtype
    target: PlannedModel
    draft: PlannedModel | None
    device_name: str
    attention: str = ""  # the backend of our engine, or of our server; empty for others
    # For config.attention, and for what is slower than it could be; empty for other engines.
    reasons: str = ""
    fills: bool = False  # a search for plans, each with as many rows as fit (batch.size=auto)

    @property
    def predicts(self) -> bool:
        """Return whether the work is a prediction."""
        return self.device.type == "meta"

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Return the hashes of the checkpoints, the text and the files that the run reads, and the
        version of another engine.

        A profile reads no text, a prediction nothing.
        """
        if self.predicts:
            return {}
        remote = self.config.engine.is_remote
        hashes = {
            m.key: m.fingerprint for m in (self.target, self.draft) if m is not None and not remote
        }
        if remote and self.target.folder is not None:
            hashes["tokenizer"] = self.target.fingerprint
        if self.config.engine.name != "native":
            hashes["engine"] = ENGINES[self.config.engine.name].work.installed(self.config.engine)
        if self.config.reads_text:
            hashes |= {
                key: data.text_fingerprint(*source)
                for key, source in self.config.data.sources.items()
            }
        for key in self.config.scenario.files:
            if path := getattr(self.config.scenario, key):
                hashes[f"scenario.{key}"] = of_files({key: Path(path)}, f"scenario.{key}={path}")
        return hashes

    @property
    def sources(self) -> dict[str, str]:
        """Return the metric that says whether the weights are trained or random; nothing for those
        of a server, which does not tell.
        """
        if self.config.engine.is_remote:
            return {}
        models = (self.target, self.draft)
        return {
            "weights/source": (
                "random"
                if any(m is not None and m.folder is None for m in models)
                else "checkpoint"
            )
        }

    @property
    def num_ranks(self) -> int:
        """Return the processes that the work takes."""
        return self.target.num_ranks

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sequence of the run."""
        _, context_len = self.config.scenario.largest(self.config.batch)
        return context_len + self.config.batch.generate_len

    @property
    def is_audited(self) -> bool:
        """Return whether the output is audited: with synthetic acceptance it means nothing."""
        return self.config.speculates and self.config.draft.synthetic_acceptance is None

    def in_bfloat16(self, model: PlannedModel) -> set[str]:
        """Return the matrices that a float32 run keeps in bfloat16, as stored. The kernels widen
        them.
        """
        has_kernels = self.attention == "cpp" and not self.config.hardware.compile
        is_native = model.config.implementation == "native"
        if model.folder is None or self.dtype != torch.float32 or not (has_kernels and is_native):
            return set()
        return checkpoint.stored_in_bfloat16(model.folder, model.config)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of a weight in the target's matrices."""
        kept = torch.bfloat16 if self.in_bfloat16(self.target) else self.dtype
        return kept.itemsize

    def warnings(self) -> list[str]:
        """Return a line for each remark on a model, and about a GPU that PyTorch cannot use."""
        models = (self.target, self.draft) if self.config.engine.name == "native" else ()
        lines = [
            f"{model.key}: {remark}"
            for model in models
            if model is not None
            for remark in model.config.remarks_on(self.longest)
        ]
        is_left_to_us = self.config.hardware.name == "auto" and not self.config.engine.is_remote
        has_gpu = self.device.type != "cpu" or torch.cuda.is_available()
        if is_left_to_us and not has_gpu and (unused := driver_version()):
            why = f"driver {unused} is loaded, but PyTorch sees no GPU: this run uses the CPU"
            lines.append(
                f"hardware=auto: {why}; magicdec doctor says why, and hardware=cpu silences this"
            )
        return lines
