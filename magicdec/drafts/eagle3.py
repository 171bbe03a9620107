"""EAGLE-3: a trained head drafts from the target's own hidden states (Li et al. 2025, arXiv
2503.01840).

The head is one decoder layer. It reads hidden states of three of the target's layers and the
embedding of the token behind them, then its own output and the token that it has proposed.
"""

from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.architectures.head_config import HeadConfig
from magicdec.architectures.model_config import ModelConfig
from magicdec.config.choices import DraftConfig
from magicdec.config.registry import DRAFTS
from magicdec.drafts.states import StatesDraft
from magicdec.inputs.rules import STRICT


@dataclass(frozen=True, config=STRICT)
class Eagle3(DraftConfig):
    """A trained head over the target's hidden states; `cache` is selected from the entries of all
    tokens.
    """

    name: str = "eagle3"
    needs_model = serves = listens = keeps_entries = True
    label, title = "{model}", "draft head {model}"

    @classmethod
    @override
    def takes(cls, model: ModelConfig) -> bool:
        return isinstance(model, HeadConfig)

    @override
    def assumed_model(self, target: ModelConfig) -> ModelConfig:
        return HeadConfig.like(target)

    @override
    def check(self, target: ModelConfig) -> None:
        if isinstance(self.own_model, HeadConfig):
            self.own_model.check(target)


@DRAFTS.register(Eagle3)
class Eagle3Draft(StatesDraft):
    """The head over its cache."""
