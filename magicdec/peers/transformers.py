"""Hugging Face transformers as a peer: the same checkpoint and prompts through `generate`.

Its speculation (assisted generation with a model, prompt lookup, early exit) takes one row at a
time and a dynamic cache. B rows, S tokens of the longest prompt.
"""

from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from pydantic.dataclasses import dataclass
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import CausalLMOutputWithPast
from typing_extensions import override

from magicdec.config.choices import EngineConfig
from magicdec.config.registry import ENGINES
from magicdec.config.schema import Config
from magicdec.decoding.timers import Clock
from magicdec.drafts.layer_skip import LayerSkip
from magicdec.drafts.ngram import PromptLookup
from magicdec.errors import UserError
from magicdec.inputs.rules import STRICT
from magicdec.measure import memory_use
from magicdec.measure.metrics import RowTimes
from magicdec.models.adapter.transformers_library import config_of, quiet, read_causal
from magicdec.models.checkpoint import CONFIG, OBJECT
from magicdec.models.metadata import read_json
from magicdec.peers.base import AcceptanceCounts, Peer, PeerGeneration, PeerSpec

# What `generate` calls a cache that it is given: it was renamed within version 5.
CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"


class TokenBursts(StoppingCriteria):
    """The times at which `generate` emits tokens: one a row or, speculating, several. It is never
    stopped.
    """

    def __init__(self, device: torch.device):
        self._clock, self._width = Clock(device), 0
        self.lengths: list[int] = []  # of the sequences, after each burst
        self.widths: list[int] = []  # of the target's pass that led to it, in tokens

    def start(self) -> None:
        """Start the clock."""
        self._clock.mark()

    @override
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Record a burst; `generate` calls this after each one."""
        self._clock.mark()
        self.lengths.append(input_ids.shape[1])
        self.widths.append(self._width)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def watch(self, _module: Any, _args: Any, inputs: dict[str, Any]) -> None:
        """Record the width of a pass. With early exit the target drafts too; its verification is
        the last pass.
        """
        self._width = inputs["input_ids"].shape[1]

    @property
    def seconds(self) -> list[float]:
        """Return the seconds from the start to each burst."""
        return self._clock.seconds()


@dataclass(frozen=True, config=STRICT)
class TransformersEngine(EngineConfig):
    """Hugging Face transformers; `kv_cache` is that of autoregressive decoding."""

    name: str = "transformers"
    kv_cache: Literal["static", "dynamic"] = "static"
    drafts = ("model", "ngram", "layer_skip")
    one_row = True


@ENGINES.register(TransformersEngine)
class TransformersPeer(Peer):
    """A target and, where one is named, an assistant."""

    @classmethod
    @override
    def check(cls, config: Config) -> None:
        if config.hardware.compile and config.hardware.device == "cpu":
            raise UserError(
                "hardware.compile=true: engine=transformers compiles on GPUs only; set it to false"
            )

    @classmethod
    @override
    def installed(cls, engine: EngineConfig) -> str:
        return f"transformers {transformers.__version__}"

    def __init__(self, spec: PeerSpec):
        assert isinstance(spec.engine, TransformersEngine)
        quiet()  # assisted generation warns of what it does itself
        torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32
        self.spec, self._kv_cache = spec, spec.engine.kv_cache
        self._device = torch.device(spec.hardware.device)
        self._peak = memory_use.Peak(self._device)
        self.target = self._load(spec.target)
        self.assistant = self._load(spec.draft_folder) if spec.draft_folder else None

    def _load(self, folder: str) -> Any:
        """Load a model that proposes gamma tokens in every round, in place of the checkpoint's own
        settings.
        """
        whole = config_of(read_json(Path(folder, CONFIG), OBJECT))
        model = read_causal(Path(folder), whole, getattr(torch, self.spec.hardware.dtype))
        model.generation_config = GenerationConfig(
            num_assistant_tokens=self.spec.gamma or None,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        return model.to(self._device).eval()

    @torch.inference_mode()
    @override
    def generate(
        self, prompts: list[list[int]], generate_len: int, speculative: bool, first: int = 0
    ) -> PeerGeneration:
        # Shorter prompts are padded on the left.
        width = max(map(len, prompts))
        tokens_BS = torch.tensor(
            [[0] * (width - len(row)) + row for row in prompts], device=self._device
        )
        mask_BS = torch.tensor(
            [[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=self._device
        )
        bursts = TokenBursts(self._device)
        watched = (
            self.target.register_forward_pre_hook(bursts.watch, with_kwargs=True)
            if speculative
            else None
        )
        torch.manual_seed(self.spec.sampling.seed + first)
        bursts.start()
        out_BS = self.target.generate(
            tokens_BS,
            attention_mask=mask_BS,
            generation_config=self._settings(generate_len, speculative),
            assistant_model=self.assistant if speculative else None,
            stopping_criteria=StoppingCriteriaList([bursts]),
            **{CACHE: self._new_cache(width + generate_len, speculative)},
        )
        if watched is not None:
            watched.remove()
        rows = [self._ended(row) for row in out_BS[:, width:].tolist()]
        counts = self._counts(bursts, width, generate_len) if speculative else AcceptanceCounts()
        return PeerGeneration(rows, _times(bursts, width, rows), counts)

    def _new_cache(self, length: int, speculative: bool) -> StaticCache | DynamicCache:
        if self._kv_cache == "static" and not speculative:  # assisted generation takes none
            return StaticCache(config=self.target.config, max_cache_len=length)
        return DynamicCache(config=self.target.config)

    def _settings(self, generate_len: int, speculative: bool) -> GenerationConfig:
        spec, sampling = self.spec, self.spec.sampling
        options: dict[str, Any] = {}
        if not sampling.greedy:
            options |= {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k or 0,
                "top_p": sampling.top_p or 1,
            }
        if speculative and isinstance(spec.draft, PromptLookup):
            options |= {
                "prompt_lookup_num_tokens": spec.gamma,
                "max_matching_ngram_size": spec.draft.max_ngram,
            }
        if speculative and isinstance(spec.draft, LayerSkip):
            options["assistant_early_exit"] = spec.draft.num_layers
        return GenerationConfig(
            max_new_tokens=generate_len,
            do_sample=not sampling.greedy,
            eos_token_id=list(spec.eos_token_ids) or None,
            # An assistant masks what looks like padding, even where the mask keeps it: no prompt
            # may hold this token.
            pad_token_id=self.target.config.vocab_size if speculative else 0,
            disable_compile=not spec.hardware.compile,
            **options,
        )

    def _ended(self, row: list[int]) -> list[int]:
        """Return a row up to its end of sequence, without the padding."""
        ends = (i + 1 for i, token in enumerate(row) if token in self.spec.eos_token_ids)
        return row[: next(ends, len(row))]

    def _counts(self, bursts: TokenBursts, width: int, generate_len: int) -> AcceptanceCounts:
        """Count the proposals of the only row. Rounds near the limit, which propose fewer tokens,
        are left out.
        """
        counts, length = AcceptanceCounts(), width
        for after, passed in zip(bursts.lengths, bursts.widths, strict=True):
            proposed = passed - (width if length == width else 1)
            if proposed and width + generate_len - length > self.spec.gamma:
                accepted = tuple(int(after - length - 1 > i) for i in range(self.spec.gamma))
                counts += AcceptanceCounts(1, proposed, accepted)
            length = after
        return counts

    @property
    @override
    def version(self) -> str:
        return self.installed(self.spec.engine)

    @property
    @override
    def peak_bytes(self) -> int:
        return self._peak.num_bytes


def _times(bursts: TokenBursts, width: int, rows: list[list[int]]) -> list[RowTimes]:
    """Time each row to the burst with its last token. The tokens of the first burst belong to the
    prefill.
    """
    emitted = [length - width for length in bursts.lengths]
    seconds = bursts.seconds
    times = []
    for row in rows:
        last = next(i for i, count in enumerate(emitted) if count >= len(row))
        times.append(
            RowTimes(seconds[0], seconds[last] - seconds[0], max(0, len(row) - emitted[0]))
        )
    return times
