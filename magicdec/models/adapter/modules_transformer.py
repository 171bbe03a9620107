"""A causal language model of transformers with the interface of our own transformer.

B rows, T tokens, E hidden size, V vocabulary, N tokens that are computed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast
from typing_extensions import override

from magicdec.architectures.modules_config import ModulesConfig
from magicdec.attention.base import Attention
from magicdec.attention.sdpa import SdpaAttention
from magicdec.models.adapter.experts import experts_in
from magicdec.models.adapter.interface import (
    NAME,
    EntriesPass,
    ModulesPass,
    compile_forward,
    layers_of,
    writing,
)
from magicdec.models.adapter.linears import by_operators, by_pytorch
from magicdec.models.adapter.recurrent import keep_uncompiled, over_states
from magicdec.models.kv_cache import KVCache
from magicdec.models.operators import PYTORCH, operators_for
from magicdec.models.parallel import ALONE
from magicdec.models.taps import Taps
from magicdec.models.transformer import Transformer


class GivenStates(nn.Module):
    """A module in place of a decoder: it returns the hidden states that it is given, so that a
    causal language model makes logits of them in its own way.
    """

    @override
    def forward(self, inputs_embeds: Tensor, **_: Any) -> MoeModelOutputWithPast:
        """Return the hidden states, which come under the name of embeddings."""
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


class ModulesTransformer(Transformer):
    """transformers' modules: `decoder` makes hidden states, `top` makes logits of them."""

    config: ModulesConfig

    def __init__(self, config: ModulesConfig, decoder: Any, top: Any, attention: Attention):
        nn.Module.__init__(self)
        self.config, self.attention = config, attention
        self.share, self.is_compiled = ALONE, False
        self.decoder, self.top = decoder, top
        self.embed = decoder.get_input_embeddings()
        self.head = top.get_output_embeddings()
        self.layers = layers_of(decoder)

    @classmethod
    def of(cls, config: ModulesConfig, causal: Any, attention: Attention) -> "ModulesTransformer":
        """Return a causal language model of transformers as a target or a draft. On a CPU its
        linear layers run by the operators that go with the backend.
        """
        operators = operators_for(type(attention))
        if operators is not PYTORCH:
            causal = by_operators(causal, operators)
        if config.recurrence is not None:
            causal = over_states(causal)
        top = copy(causal)
        top._modules = {**causal._modules, causal.base_model_prefix: GivenStates()}
        return cls(config, causal.get_decoder(), top, attention).eval().requires_grad_(False)

    @override
    def forward(self, tokens_BT: Tensor, cache: KVCache, taps: Taps | None = None) -> Tensor:
        forward = ModulesPass(cache, self.attention, tokens_BT.shape[1], self.dtype)
        hidden_BTE = self._run(tokens_BT, forward, taps)
        cache.advance(tokens_BT.shape[1])
        return hidden_BTE

    @override
    def first_entries(self, tokens_BT: Tensor, cache: KVCache) -> None:
        forward = EntriesPass(cache, tokens_BT.shape[1])
        with writing():
            self.first_layers(1)._run(tokens_BT, forward, None)

    def _run(self, tokens_BT: Tensor, forward: ModulesPass, taps: Taps | None) -> Tensor:
        """Return the normalised hidden states (B, T, E); 0 for tokens that are left out."""
        positions_BT = forward.cache.positions_BT(tokens_BT.shape[1])
        with tapped(self.layers, taps, forward):
            states = self.decoder(
                input_ids=forward.packed(tokens_BT),
                position_ids=forward.packed(positions_BT),
                use_cache=False,
                **{NAME: forward},
            )
        hidden_BTE = forward.unpacked(states.last_hidden_state)
        if taps is not None:
            taps.take(len(self.layers) + 1, hidden_BTE)
        return hidden_BTE

    @override
    def logits(self, hidden_BTE: Tensor) -> Tensor:
        """Return next-token logits (B, T, V), with the model's own scaling and soft cap."""
        logits_BTV: Tensor = self.top(inputs_embeds=hidden_BTE, use_cache=False).logits
        return logits_BTV

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @override
    def step_weight_bytes(self, num_tokens: int) -> float:
        """Return the expected bytes of weights that a step of so many tokens reads."""
        stored = super().step_weight_bytes(num_tokens)
        unread = self.config.parameters - self.config.parameters_read(num_tokens)
        return stored - unread * self.dtype.itemsize

    @override
    def experts(self) -> list[nn.Module]:
        return [*experts_in(self.decoder)]

    @override
    def first_layers(self, num_layers: int) -> "ModulesTransformer":
        decoder = copy(self.decoder)
        [name] = [name for name, child in decoder._modules.items() if child is self.layers]
        decoder._modules = {**decoder._modules, name: self.layers[:num_layers]}
        decoder.config = copy(decoder.config)
        decoder.config.num_hidden_layers = num_layers
        part = self.config.layers(0, num_layers)
        assert isinstance(part, ModulesConfig)
        other = ModulesTransformer(part, decoder, self.top, self.attention)
        other.is_compiled = self.is_compiled
        return other.eval()

    @override
    def keep_layers(self, num_layers: int) -> None:
        vars(self).update(vars(self.first_layers(num_layers)) | {"config": self.config})

    @override
    def plain(self) -> "ModulesTransformer":
        parts = by_pytorch(self.decoder), by_pytorch(self.top)
        twin = ModulesTransformer(self.config, *parts, SdpaAttention())
        return twin.eval()

    @override
    def compile_layers(self) -> None:
        """Compile each layer; attention stays as it is, and linear layers become PyTorch's."""
        vars(self).update(vars(self.plain()) | {"attention": self.attention, "is_compiled": True})
        keep_uncompiled(self.decoder)
        compile_forward(self.layers)


@contextmanager
def tapped(layers: nn.ModuleList, taps: Taps | None, forward: ModulesPass) -> Iterator[None]:
    """Let taps take the hidden states in front of the layers that they list, and behind the last
    one.
    """
    if taps is None:
        yield
        return

    def before(layer: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            x_1NE = args[0] if args else given["hidden_states"]
            taps.take(layer, forward.unpacked(x_1NE))

        return hook

    def behind(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
        x_1NE = output[0] if isinstance(output, tuple) else output
        taps.take(len(layers), forward.unpacked(x_1NE))

    listed = [index for index in taps.layers if index < len(layers)]
    handles = [
        layers[index].register_forward_pre_hook(before(index), with_kwargs=True) for index in listed
    ]
    handles.append(layers[-1].register_forward_hook(behind, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
