"""DFlash: a draft fills a block of masks in one pass (Chen et al. 2026, arXiv 2602.06036).

Its context is the target's hidden states, of which its layers make entries: `cache` selects those
that a block reads. A round takes one pass, whatever gamma is: T_D is a cost per block. The places
of a block are filled independently of each other, so that the distribution of a proposal is the
product of those of its places, and rejection sampling accepts place after place as for any draft:
it asks only what each token was drawn from.

B rows, G = gamma, V vocabulary.
"""

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.architectures.block_config import BlockConfig
from magicdec.architectures.model_config import ModelConfig
from magicdec.config.choices import CacheConfig, DraftConfig
from magicdec.config.registry import DRAFTS
from magicdec.decoding.state import DRAFT, State
from magicdec.drafts.base import Proposal
from magicdec.drafts.states import StatesDraft
from magicdec.errors import UserError
from magicdec.inputs.rules import STRICT
from magicdec.models.block import BlockHead
from magicdec.models.kv_cache import KVCache
from magicdec.verification.sampling import Use, choose


@dataclass(frozen=True, config=STRICT)
class Dflash(DraftConfig):
    """A draft that fills a block in one pass; `cache` is selected from the context's entries."""

    name: str = "dflash"
    needs_model = serves = listens = keeps_entries = proposes_blocks = True
    label, title = "{model}", "block draft {model}"

    @override
    def num_modules(self, model: ModelConfig) -> int:
        """Return 0: no entry waits for the next token."""
        return 0

    @classmethod
    @override
    def takes(cls, model: ModelConfig) -> bool:
        return isinstance(model, BlockConfig)

    @override
    def assumed_model(self, target: ModelConfig) -> ModelConfig:
        return BlockConfig.like(target)

    @override
    def gammas(self, cache: CacheConfig) -> tuple[int, ...]:
        gammas, model = super().gammas(cache), self.own_model
        if self.gamma != "auto" or not isinstance(model, BlockConfig):
            return gammas
        return tuple(gamma for gamma in gammas if gamma < model.block_size)

    @override
    def check(self, target: ModelConfig) -> None:
        model = self.own_model
        if not isinstance(model, BlockConfig):
            return
        model.check(target)
        most = model.block_size - 1
        if self.gamma != "auto" and self.gamma > most:
            raise UserError(
                f"draft.gamma={self.gamma}: the draft fills blocks of {model.block_size} tokens,"
                f" the last committed one among them; choose {most} or less"
            )


@DRAFTS.register(Dflash)
class DflashDraft(StatesDraft):
    """The layers over their cache, which has the entries of all committed tokens but the last."""

    model: BlockHead  # type: ignore[assignment]

    @override
    def enter(self, tokens_BT: Tensor, hidden_BTE: Tensor) -> None:
        self.model.enter(tokens_BT, self.entries, hidden_BTE)

    @override
    def replay(self, index_BT: Tensor, view: KVCache, state: State) -> None:
        """Score by the prompt's last tokens, each of which sees those before it."""
        self.model(state.tokens_BS.gather(1, index_BT), view, is_block=False)

    @override
    def propose(self, state: State, gamma: int) -> Proposal:
        last_B1 = state.recent_BT(1)
        masks_BG = last_B1.new_full((len(last_B1), gamma), self.model.config.mask_token_id)
        block_BT = torch.cat((last_B1, masks_BG), dim=1)
        logits_BGV = self.model.logits(self.model(block_BT, self.cache)[:, 1:])
        logits_BGV = logits_BGV[..., : self.vocab_size]
        state.inspect(logits_BGV, DRAFT)
        places_BG = state.places_in_round_BT(gamma)
        tokens_BG, q_BGV = choose(logits_BGV, places_BG, Use.PROPOSE, self.sampling)
        self.verified_BT = tokens_BG
        return Proposal(tokens_BG, q_BGV)
