"""Layer skipping: the target's own first layers draft for all of them (Draft & Verify, Zhang et al.
2023, 2309.08168).

From committed tokens, these layers compute exactly what they compute in the target. So their cache
is a part of the target's, and every cache policy composes with it.
"""

from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.architectures.model_config import ModelConfig
from magicdec.config.choices import DraftConfig
from magicdec.config.registry import DRAFTS
from magicdec.drafts.base import DraftSpec
from magicdec.drafts.self import SelfDraft
from magicdec.errors import UserError
from magicdec.inputs.rules import STRICT, Size


@dataclass(frozen=True, config=STRICT)
class LayerSkip(DraftConfig):
    """The target's first `num_layers` layers."""

    name: str = "layer_skip"
    num_layers: Size = 0
    shares_target = serves = True
    label = "{name}-{num_layers}"

    @override
    def drafter(self, target: ModelConfig) -> ModelConfig:
        return target.layers(0, self.num_layers)

    @override
    def check(self, target: ModelConfig) -> None:
        if not 1 <= self.num_layers < target.num_layers:
            valid = (
                f"must be from 1 to {target.num_layers - 1}, less than the target's"
                f" {target.num_layers} layers"
            )
            raise UserError(f"draft.num_layers={self.num_layers}: {valid}")
        if not any(target.has_entries(layer) for layer in range(self.num_layers)):
            raise UserError(
                f"draft.num_layers={self.num_layers}: the target's first layers are recurrent, and"
                " one of the draft's must have attention; choose more"
            )


@DRAFTS.register(LayerSkip)
class LayerSkipDraft(SelfDraft):
    """The first `num_layers` layers of the target, and its head."""

    @classmethod
    @override
    def build(cls, spec: DraftSpec) -> "LayerSkipDraft":
        """Share weights and entries with the target."""
        assert isinstance(spec.draft, LayerSkip)
        model = spec.model or spec.target.first_layers(spec.draft.num_layers)
        entries = spec.target_cache.view(0, model.config.of_entries().num_layers)
        return cls(model, spec.new_cache(model, entries), entries, spec)
