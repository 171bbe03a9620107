"""Layers of transformers' modules with a gated delta rule, over states of ours.

They are given a cache for their convolution, and another function in place of the two by which they
apply the rule: transformers' own hand over the state behind the last token of a pass alone. Nothing
is replaced in transformers' modules for others: each model has classes of its own.

R rows that are computed, T new tokens, F features of the convolution, N of its columns.
"""

import inspect
from copy import copy
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from magicdec.models.adapter.interface import NAME, ModulesPass
from magicdec.models.adapter.linears import changed
from magicdec.models.recurrent_states import RuleInputs

# Of configurations: families whose layers differ in their projections alone.
FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LAYER_TYPE = "linear_attention"  # of layer_types
CHUNKED, STEPWISE = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
CHUNK = 64  # tokens of a long pass that are taken at a time


def is_recurrent(config: Any) -> bool:
    """Return whether a model of this configuration has such layers."""
    return config.get_text_config().model_type in FAMILIES


class LayerStates:
    """The states of one layer in one pass, as its forward method sees a cache."""

    def __init__(self, forward: ModulesPass, layer: int):
        assert forward.cache.states is not None
        self.states, self.layer = forward.cache.states, layer
        self.computed = forward.computed

    def get_conv_state(self, layer: int, state_idx: int = 0) -> None:
        """Return None: `update_conv_state` prepends the columns of earlier tokens."""

    def get_recurrent_state(self, layer: int, state_idx: int = 0) -> None:
        """Return None: `apply` knows the state."""

    def update_conv_state(self, new_RFT: Tensor, layer: int, **_: Any) -> Tensor:
        """Return the columns of new tokens behind those of earlier ones (R, F, N)."""
        return self.states.extended(layer, new_RFT, self.computed)

    def update_recurrent_state(self, state: object, layer: int) -> None:
        """Do nothing: `apply` has changed the state."""


@cache
def with_states(original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a layer whose states are those of the pass that comes with its
    arguments.
    """
    forward = inspect.unwrap(original.forward)
    functions: dict[str, Any] = forward.__globals__
    chunked, stepwise = functions[CHUNKED], functions[STEPWISE]

    def rule(inputs: RuleInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        num_new = inputs.k_RTGK.shape[1]
        settings: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        if num_new > 1:
            settings["chunk_size"] = min(CHUNK, 1 << (num_new - 1).bit_length())
        q, k, v, decay, rate = inputs
        apply = chunked if num_new > 1 else stepwise
        out_RTHV, behind = apply(q, k, v, g=decay, beta=rate, initial_state=state, **settings)
        return out_RTHV, behind

    def apply(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, None]:
        of_layer: LayerStates = given[NAME]
        inputs = RuleInputs(q, k, v, given["g"], given["beta"])
        out_RTHV = of_layer.states.apply(of_layer.layer, rule, inputs, of_layer.computed)
        return out_RTHV, None

    replaced = {**functions, CHUNKED: apply}
    run_original: Any = FunctionType(
        forward.__code__, replaced, forward.__name__, forward.__defaults__, forward.__closure__
    )

    def run(self: Any, hidden_states: Tensor, **given: Any) -> Tensor:
        of_layer = LayerStates(given[NAME], self.layer_idx)
        output: Tensor = run_original(self, hidden_states, cache=of_layer, **{NAME: of_layer})
        return output

    subclass: type[nn.Module] = type(original.__name__, (original,), {"forward": run})
    return subclass


def keep_uncompiled(root: nn.Module) -> None:
    """Leave recurrent layers as they are when what surrounds them is compiled: they write to
    states.
    """
    for module in root.modules():
        if hasattr(module, "conv1d"):
            vars(module)["forward"] = torch.compiler.disable(module.forward)


def over_states(root: nn.Module) -> Any:
    """Return the same modules, whose recurrent layers use the states of a pass."""

    def change(module: nn.Module) -> nn.Module | None:
        if not hasattr(module, "conv1d"):
            return None
        twin = copy(module)
        kind: Any = type(module)
        twin.__class__ = with_states(kind)
        return twin

    return changed(root, change)
