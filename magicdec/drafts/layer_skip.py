"""Layer skipping: the target's own first layers draft for all of them (Draft & Verify, Zhang et al. 2023, 2309.08168).

From committed tokens, these layers compute exactly what they compute in the target. So their cache is a part of the
target's, and every cache policy composes with it.
"""

from magicdec import drafting
from magicdec.drafts.base import DraftSpec
from magicdec.drafts.model import SelfDraft


class LayerSkipDraft(SelfDraft):
    """The first `num_layers` layers of the target, and its head."""

    @classmethod
    def build(cls, spec: DraftSpec) -> "LayerSkipDraft":
        """See Draft.build: shares weights and entries with the target."""
        assert isinstance(spec.draft, drafting.LayerSkip)
        model = (spec.model or spec.target).first_layers(spec.draft.num_layers)
        entries = spec.target_cache.view(0, spec.draft.num_layers)
        return cls(model, spec.new_cache(model, entries), entries, spec)
