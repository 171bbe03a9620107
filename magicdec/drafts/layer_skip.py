"""Layer skipping: the target's own first layers draft for all of them (Draft & Verify, Zhang et al. 2023, 2309.08168).

Whatever these layers compute from committed tokens is exactly what the target computes, so that their cache is a part
of the target's, and every cache policy composes with it.
"""

from magicdec.architectures import ModelConfig
from magicdec.drafts.base import DRAFTS, DraftSpec
from magicdec.drafts.model import SelfDraft
from magicdec.errors import UserError


@DRAFTS.register("layer_skip")
class LayerSkipDraft(SelfDraft):
    """The first `num_layers` layers of the target, and its head."""

    @classmethod
    def build(cls, spec: DraftSpec) -> "LayerSkipDraft":
        """See Draft.build: shares weights and entries with the target."""
        model = (spec.model or spec.target).first_layers(spec.draft.num_layers)
        entries = spec.target_cache.view(0, spec.draft.num_layers)
        return cls(model, spec.new_cache(model, entries), entries, spec)

    @classmethod
    def check(cls, target: ModelConfig, num_layers: int) -> None:
        """See Draft.check."""
        if not 1 <= num_layers < target.num_layers:
            valid = f"must be from 1 to {target.num_layers - 1}, less than the target's {target.num_layers} layers"
            raise UserError(f"draft.num_layers={num_layers}: {valid}")
