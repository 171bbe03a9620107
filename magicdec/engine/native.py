"""Our own engine: a target and, with speculation, a draft, opened on one batch of prompts after
another.
"""

from dataclasses import dataclass

import torch
from pydantic.dataclasses import dataclass as pydantic_dataclass

from magicdec.config.choices import CacheConfig, DraftConfig, EngineConfig
from magicdec.config.groups import BatchConfig, HardwareConfig, SamplingConfig
from magicdec.config.registry import DRAFTS, ENGINES
from magicdec.decoding.state import State
from magicdec.drafts.base import Draft, DraftSpec
from magicdec.engine.decoder import Decoder
from magicdec.inputs.rules import STRICT
from magicdec.models.kv_cache import KVCache
from magicdec.models.transformer import Transformer
from magicdec.verification.sampling import RowSampling, Sampling


@dataclass
class Batch:
    """One batch of prompts, ready to be prefilled and decoded, with and without the draft."""

    decoder: Decoder
    draft: Draft | None
    prefill_s: float = 0.0  # that the target's prefill took

    def simulate_prefill(self) -> None:
        """Put the batch where the prefill would leave it, for timing only."""
        self.decoder.simulate_prefill()

    def restart(self) -> None:
        """Go back to the first round."""
        self.decoder.restart(self.draft)

    def close(self) -> None:
        """Free the memory at once, even while the caller still refers to this batch."""
        self.decoder.forget_cycles()  # they refer to the decoder, and the decoder to them
        del self.decoder, self.draft


@pydantic_dataclass(frozen=True, config=STRICT)
class Native(EngineConfig):
    """Our own decoder, which has all drafts."""

    name: str = "native"
    has_our_drafts = True


@ENGINES.register(Native)
@dataclass
class NativeEngine:
    """Loaded models, and the groups of the configuration that decoding reads. `auto` values are
    resolved.
    """

    batch: BatchConfig
    sampling: SamplingConfig
    draft: DraftConfig
    cache: CacheConfig
    hardware: HardwareConfig
    target: Transformer
    draft_model: Transformer | None = None  # None: the target itself, where the draft is a model

    @property
    def gamma(self) -> int:
        """Return the most tokens that a round proposes."""
        return max(self.draft.gammas(self.cache))

    @property
    def slack(self) -> int:
        """Return the number of tokens that a round may write behind the longest sequence."""
        return self.gamma + self.draft.extra_tokens + 1

    @property
    def prefill_chunk(self) -> int:
        """Return how many tokens of each row a pass of the prefill takes."""
        return int(self.batch.prefill_chunk)

    def capacity(self, context_len: int) -> int:
        """Return the slots of a row of the target's cache for prompts of up to `context_len`
        tokens.
        """
        return context_len + self.batch.generate_len + self.slack

    def open(self, prompts: list[list[int]], first: int = 0, cache: KVCache | None = None) -> Batch:
        """Allocate state and caches for these prompts (token ids; their lengths may differ).

        `first` counts the prompts of the run before these: no two sequences of a run share random
        numbers. `cache` is the target's, where these prompts were prefilled before.
        """
        eos = () if self.sampling.ignore_eos else self.target.config.eos_token_ids
        state = State(
            prompts, self.batch.generate_len, self.slack, eos, self.target.embed.weight.device
        )
        return self.open_on(state, Sampling.of(self.sampling, first), cache)

    def open_on(
        self, state: State, sampling: Sampling | RowSampling, cache: KVCache | None = None
    ) -> Batch:
        """Allocate caches for the rows of a state; the target's only if there is none."""
        rows = len(state.tokens_BS)
        device = state.tokens_BS.device
        if cache is None:
            cache = KVCache(
                self.target.config, rows, state.max_len + self.slack, self.target.dtype, device
            )
        drawn = self.draft.drawn(self.gamma)
        gammas = self.draft.gammas(self.cache) if self.draft.gamma == "auto" else ()
        decoder = Decoder(
            self.target, cache, state, sampling, self.hardware.captures, drawn, gammas
        )
        draft = self.draft_for(decoder) if self.draft.name != "none" else None
        decoder.listener = draft if self.draft.listens else None
        return Batch(decoder, draft)

    def draft_for(self, decoder: Decoder) -> Draft:
        """Return a new draft for an opened batch, whose prefill several drafts may share."""
        spec = DraftSpec(
            self.draft,
            self.cache,
            self.target,
            decoder.cache,
            decoder.state,
            decoder.sampling,
            self.gamma,
            self.prefill_chunk,
            self.draft_model,
        )
        return DRAFTS[self.draft.name].work.build(spec)


@torch.inference_mode()
def warm_up(batch: Batch) -> None:
    """Run the first step of each way to decode before anything is timed, so that thread pools,
    kernels and graphs are ready.
    """
    batch.decoder.restart()
    batch.decoder.cycle_for(None)()
    if batch.draft is not None:
        batch.restart()
        batch.decoder.cycle_for(batch.draft)()
