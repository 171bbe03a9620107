"""A pass of a model's modules without storage, which records what reaches their attention and their
masks.

B rows, T tokens, S slots.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from magicdec.architectures.modules_config import SINKS, SOFTCAP
from magicdec.errors import UserError, in_one_line
from magicdec.models.adapter.counts import EXPERTS_PER_TOKEN, TOKENS, ScalarsAreOne, cache_of
from magicdec.models.adapter.interface import NAME
from magicdec.models.adapter.recurrent import is_recurrent
from magicdec.models.meta_runs import EachOnce

RECORDING, STORELESS = "magicdec_recording", "magicdec_storeless"


@dataclass(frozen=True)
class LayerFacts:
    """The arguments that one layer's attention was given."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    needs: tuple[str, ...]


@dataclass
class Recording:
    """The record of a pass. It travels to attention under the name of a real pass."""

    longest: int
    layers: dict[int, LayerFacts] = field(default_factory=dict)
    cache: Any = None  # that the pass has left


def storeless(whole: Any, dtype: torch.dtype, attention: str) -> Any:
    """Return a causal language model on the meta device, whose experts compute nothing."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                whole, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
        model.set_experts_implementation(STORELESS)
    except Exception as error:  # of the modules' own code
        raise UserError(
            f"transformers makes no modules of model_type={whole.model_type}"
            f" ({in_one_line(error):.160})"
        ) from None
    return model.eval().requires_grad_(False)


def record(model: Any, longest: int) -> Recording:
    """Run the modules once, on the meta device. Raise UserError where they do not take part in the
    attention interface.
    """
    recording = Recording(longest)
    tokens_BT = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    # A mask of padding, because without one transformers looks at the numbers of positions.
    # Modules with recurrent layers look whether there is any padding.
    scalars: Any = ScalarsAreOne() if is_recurrent(model.config) else nullcontext()
    arguments = {"attention_mask": torch.ones_like(tokens_BT), "use_cache": True, NAME: recording}
    try:
        with torch.device("meta"), torch.no_grad(), scalars, EachOnce():
            output = model.get_decoder()(input_ids=tokens_BT, **arguments)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"model_type={model.config.model_type}: its modules cannot run over a cache of ours"
            f" ({in_one_line(error):.160})"
        ) from None
    hidden = getattr(output, "last_hidden_state", None)
    if hidden is None or hidden.dim() != 3:
        raise UserError(
            f"model_type={model.config.model_type}: its decoder does not return one residual stream"
        )
    recording.cache = cache_of(output, model.config)
    return recording


class RecordedWindow:
    """A mask of a pass that is recorded: how far it lets a token see; None: to the beginning."""

    def __init__(self, reach: int | None):
        self.reach = reach


def _record_mask(mask_function: Any, config: Any, **_: Any) -> RecordedWindow:
    """Find the window of a mask from what it lets a late token see; raise UserError for a mask that
    is no window.
    """
    last = int(config.max_position_embeddings) - 1
    slot_S = torch.arange(last + 2, device="cpu")
    seen_S = mask_function(0, 0, torch.tensor(last, device="cpu"), slot_S)
    count = int(seen_S.sum())
    if not bool(seen_S[last + 1 - count : last + 1].all()) or bool(seen_S[last + 1]):
        raise UserError("its attention masks are neither causal nor windows, and not supported")
    return RecordedWindow(None if count > last else count)


def _record_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: RecordedWindow,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Note the facts of a layer, as attention of transformers' interface."""
    recording: Recording = given[NAME]
    needs: tuple[str, ...] = () if s_aux is None else (SINKS,)
    if softcap is not None:
        needs += (SOFTCAP,)
    recording.layers[module.layer_idx] = LayerFacts(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        window=attention_mask.reach,
        needs=needs,
    )
    return query.new_empty(*query.transpose(1, 2).shape[:3], value.shape[3]), None


def _skip_experts(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Allocate what experts allocate, as experts of transformers' interface."""
    chosen = top_k_index.numel()
    setattr(self, EXPERTS_PER_TOKEN, top_k_index.shape[-1])
    widest = max(weight.shape[-1] for weight in self.parameters())
    widest = max(widest, *(weight.shape[-2] for weight in self.parameters() if weight.dim() == 3))
    hidden_states.new_empty(chosen, widest)
    return torch.empty_like(hidden_states)


ALL_ATTENTION_FUNCTIONS.register(RECORDING, _record_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(RECORDING, _record_mask)
ALL_EXPERTS_FUNCTIONS.register(STORELESS, _skip_experts)
