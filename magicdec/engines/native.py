"""Our own engine: a target and, with speculation, a draft, opened on one batch of prompts after another."""

from dataclasses import dataclass
from typing import Any

import torch

from magicdec.cache.draft_cache import CACHES, CacheSpec
from magicdec.cache.kv_cache import KVCache
from magicdec.decoding.decoder import Decoder, silent
from magicdec.decoding.state import State
from magicdec.drafts.base import DRAFTS, Draft
from magicdec.drafts.model import IndependentDraft, SelfDraft
from magicdec.models.transformer import Transformer
from magicdec.verification.sampling import Sampling


@dataclass
class Batch:
    """One batch of prompts, ready to be prefilled and decoded, with and without the draft."""

    decoder: Decoder
    draft: Draft | None
    simulated: bool = False

    def simulate_prefill(self) -> None:
        """Stand where the prefill would leave it, for timing alone."""
        self.decoder.simulate_prefill()
        self.simulated = True

    def restart(self) -> None:
        """Go back to the first round."""
        self.decoder.restart()
        if self.draft is not None and self.simulated:
            self.draft.simulate_prefill(self.decoder.state)
        elif self.draft is not None:
            self.draft.prefill(self.decoder.state, silent)


@dataclass
class NativeEngine:
    """What does not change from batch to batch."""

    target: Transformer
    sampling: Sampling
    generate_len: int
    prefill_chunk: int
    draft_name: str = "none"
    draft_model: Transformer | None = None
    gamma: int = 0
    policy: str = "full"
    budget: int = 0
    num_sink: int = 0
    ignore_eos: bool = True
    graphs: bool = False
    synthetic_acceptance: float | None = None

    def open(self, prompts: list[list[int]]) -> Batch:
        """Allocate state and caches for these prompts (token ids; their lengths may differ)."""
        weight = self.target.embed.weight
        eos = () if self.ignore_eos else self.target.config.eos_token_ids
        state = State(prompts, self.generate_len, self.gamma + 1, eos, weight.device)
        cache = KVCache(self.target.config, len(prompts), state.max_len + self.gamma + 1, weight.dtype, weight.device)
        decoder = Decoder(self.target, cache, state, self.sampling, self.graphs, self.synthetic_acceptance)
        return Batch(decoder, self._draft(decoder) if self.draft_name != "none" else None)

    def _draft(self, decoder: Decoder) -> Draft:
        model = self.draft_model or self.target
        config, state = model.config, decoder.state
        spec = CacheSpec(
            self.budget,
            self.num_sink,
            self.gamma,
            state.max_len,
            in_cache_positions=state.max_len > config.max_position_embeddings,
        )
        weight = model.embed.weight
        own = None if self.draft_model else decoder.cache
        cache = CACHES[self.policy].build(spec, config, len(state.tokens_BS), weight.dtype, weight.device, own)
        vocab_size = self.target.config.vocab_size
        shared: dict[str, Any] = {"gamma": self.gamma, "vocab_size": vocab_size, "sampling": self.sampling}
        kind = DRAFTS[self.draft_name]
        if issubclass(kind, SelfDraft):
            return kind(model, cache, target_cache=decoder.cache, **shared)
        assert issubclass(kind, IndependentDraft)
        room = config.max_position_embeddings - self.budget - self.gamma - 1
        chunk = min(self.prefill_chunk, room) if cache.bounds_positions else self.prefill_chunk
        return kind(model, cache, chunk=chunk, **shared)


@torch.inference_mode()
def warm_up(batch: Batch) -> None:
    """One step of each kind, before anything is timed: thread pools, kernels, graphs."""
    batch.restart()
    batch.decoder.step(None)()
    if batch.draft is not None:
        batch.decoder.step(batch.draft)()
