"""Predict what a run allocates beyond its weights, by running it on tensors without storage.

One chunk of every loop, and one round of every phase and of every gamma that draft.gamma allows,
run on PyTorch's meta device. Every allocation is counted: caches of any policy, activations, masks,
logits, scores. Shapes are static, so that a short prompt in a cache of full capacity allocates what
the last chunk of a long one does.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention.base import Shape
from magicdec.attention.sdpa import SdpaAttention, SdpaPlan
from magicdec.engine.native import NativeEngine
from magicdec.engine.output_audit import chunk_len, score_tokens
from magicdec.engine.prompt_audit import rehearse
from magicdec.models.meta_runs import EachOnce
from magicdec.models.taps import Taps

LAYERS = 2  # run: each layer frees what the one before has left
MOST_ROWS = 4096  # of a batch that runs: the memory of a larger one is extrapolated


class Footprint(NamedTuple):
    """Bytes of a batch, without the weights: the most that is held at any time, and the most that a
    round adds.
    """

    peak: int
    of_rounds: int

    def scaled(self, factor: float) -> "Footprint":
        """Return the same for a multiple of the rows."""
        return Footprint(*(round(factor * part) for part in self))


@torch.inference_mode()
def footprint(
    engine: NativeEngine, num_rows: int, context_len: int, audited: bool, prefills: bool = True
) -> Footprint:
    """Return the memory of a batch, with the audit if `audited`; without `prefills`, of its rounds
    alone.

    The engine's weights must be on the meta device. It cannot be used afterwards: its models keep
    only their first layers.
    """
    if num_rows > MOST_ROWS:
        return footprint(engine, MOST_ROWS, context_len, audited, prefills).scaled(
            num_rows / MOST_ROWS
        )
    models = [engine.target, engine.draft_model] if engine.draft_model else [engine.target]
    weights = [
        tensor
        for model in models
        for parameter in model.parameters()
        for tensor in stored(parameter)
    ]
    layers = _layers_run(engine.target.config)
    for model in models:
        model.keep_layers(layers)
    scored = [
        model.attention.scored_tokens(1, model.dtype, model.config.head_dim) for model in models
    ]
    prompt = [0] * min(context_len, max(engine.prefill_chunk, *scored))
    new_tokens = engine.batch.generate_len
    group = replace(engine.batch, generate_len=new_tokens + context_len - len(prompt))
    with _FusedAttention(), Allocations(weights) as allocations:
        batch = replace(engine, batch=group).open([prompt] * num_rows)
        decoder, draft = batch.decoder, batch.draft
        if draft is not None and draft.taps is not None:
            behind = engine.target.config.num_layers + 1  # the tap of what the last norm returns
            kept = [min(layer, layers + (layer == behind)) for layer in draft.taps.layers]
            draft.taps = Taps(tuple(kept))
        if prefills:
            decoder.prefill(engine.prefill_chunk)
        else:
            decoder.simulate_prefill()
        decoder.restart()
        with allocations.of_rounds():
            decoder.decode_token()
        if draft is not None:
            if prefills:
                decoder.restart(draft)
            else:
                decoder.restart()
                decoder.prefilled = draft
            with allocations.of_rounds():
                gammas, phases = decoder.gammas or (draft.gamma,), range(len(draft.phases))
                for gamma, phase in product(gammas, phases):
                    decoder.round(draft, gamma, phase)
        if audited:
            rehearse(decoder, context_len)
            score_tokens(decoder, decoder.state.tokens_BS[:, : min(new_tokens, chunk_len(decoder))])
    return Footprint(allocations.peak, allocations.most_of_rounds)


def _layers_run(config: ModelConfig) -> int:
    """Return how many layers run, of which one at least has attention."""
    return max(LAYERS, next(n for n in range(config.num_layers) if config.has_entries(n)) + 1)


def stored(parameter: Tensor) -> list[Tensor]:
    """Return the tensors of a parameter: itself, or codes and scales if it is quantized."""
    if not hasattr(parameter, "__tensor_flatten__"):
        return [parameter]
    names, _ = parameter.__tensor_flatten__()
    return [inner for name in names for inner in stored(getattr(parameter, name))]


def largest_batch(total: Callable[[int], float], num_rows: int, available: float) -> int:
    """Return the most rows, fewer than `num_rows`, whose `total` bytes are `available`. Bytes are
    nearly linear in rows.
    """
    single, many = total(1), total(num_rows)
    if single > available:
        return 0
    rows = 1 + int((available - single) * (num_rows - 1) / max(1, many - single))
    rows = max(1, min(num_rows - 1, rows))
    while total(rows) > available:
        rows -= 1
    while rows + 1 < num_rows and total(rows + 1) <= available:
        rows += 1
    return rows


class Allocations(EachOnce):
    """A counter of the storage of tensors made within on the meta device: `live` bytes now, `peak`
    so far.
    """

    def __init__(self, ignored: Iterable[Tensor] = ()):
        super().__init__()
        self.live = self.peak = self.most_of_rounds = 0
        self._known: dict[int, object] = {
            tensor.untyped_storage()._cdata: tensor for tensor in ignored
        }

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count what it has allocated."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._count(tensor.untyped_storage())
        return out

    @contextmanager
    def of_rounds(self) -> Iterator[None]:
        """Count what is held within, beyond what was held before, into `most_of_rounds`."""
        before, peak = self.live, self.peak
        self.peak = self.live
        yield
        self.most_of_rounds = max(self.most_of_rounds, self.peak - before)
        self.peak = max(peak, self.peak)

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._known:
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            self._known[storage._cdata] = weakref.finalize(
                storage, self._forget, storage._cdata, storage.nbytes()
            )

    def _forget(self, key: int, num_bytes: int) -> None:
        del self._known[key]
        self.live -= num_bytes


class _FusedAttention(TorchFunctionMode):
    """Attention that does not write the probabilities out, as on devices; the meta device would."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return torch.empty_like(args[0])
        return func(*args, **(kwargs or {}))


class UniformAttention(SdpaAttention):
    """A stand-in for any backend on a CPU, where lengths are read: rows of one length share the
    mask of a chunk.
    """

    @override
    def plan(
        self,
        seqlens_B: Tensor,
        shape: Shape,
        window: int | None,
        positions_BKS: Tensor | None = None,
    ) -> SdpaPlan:
        return super().plan(
            seqlens_B if positions_BKS is not None else seqlens_B[:1], shape, window, positions_BKS
        )
