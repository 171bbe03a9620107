"""Multi-token prediction: modules that a checkpoint ships with propose the tokens behind the next
one (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2; GLM-4.5, arXiv 2508.06471).

Module k reads the hidden states of module k - 1, the first one those that the target returns, and
the token one place further on. Beyond the number of modules, the last one goes on with its own
output and its own proposal, as engines do with a single module.
"""

from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.architectures.model_config import ModelConfig
from magicdec.architectures.modules_config import ModulesConfig, MtpModulesConfig
from magicdec.architectures.mtp_config import MtpConfig
from magicdec.config.choices import DraftConfig
from magicdec.config.registry import DRAFTS
from magicdec.drafts.states import StatesDraft
from magicdec.inputs.rules import STRICT


@dataclass(frozen=True, config=STRICT)
class MultiTokenPrediction(DraftConfig):
    """Modules that the target's checkpoint ships with, or those of `model`; `cache` is selected
    from their entries of all tokens.
    """

    name: str = "mtp"
    needs_model = serves = listens = keeps_entries = ships_with_target = True
    label, title = "{model}", "draft {model}"

    @classmethod
    @override
    def takes(cls, model: ModelConfig) -> bool:
        return isinstance(model, MtpConfig | MtpModulesConfig)

    @override
    def assumed_model(self, target: ModelConfig) -> ModelConfig:
        """Return the modules of the target's checkpoint; for one that we run, one layer."""
        if isinstance(target, ModulesConfig):
            return MtpModulesConfig.of(target)
        return MtpConfig.like(target)

    @override
    def num_modules(self, model: ModelConfig) -> int:
        return model.num_layers

    @override
    def step_model(self, drafter: ModelConfig) -> ModelConfig:
        return drafter.layers(0, 1)

    @override
    def check(self, target: ModelConfig) -> None:
        if isinstance(self.own_model, MtpConfig):
            self.own_model.check(target)


@DRAFTS.register(MultiTokenPrediction)
class MtpDraft(StatesDraft):
    """The modules over their cache."""
