"""The modules of a checkpoint that predict further tokens, as transformers' own `MtpModel` runs
them, over our caches and attention.

B rows, T tokens, E hidden size, V vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel
from typing_extensions import override

from magicdec.architectures.modules_config import MtpModulesConfig
from magicdec.attention.base import Attention
from magicdec.errors import UserError, in_one_line
from magicdec.models.adapter.interface import (
    NAME,
    EntriesPass,
    ModulesPass,
    compile_forward,
    writing,
)
from magicdec.models.adapter.linears import by_operators, by_pytorch
from magicdec.models.adapter.modules_transformer import ModulesTransformer
from magicdec.models.adapter.transformers_library import check_version, config_from, quiet
from magicdec.models.kv_cache import KVCache
from magicdec.models.operators import PYTORCH, operators_for
from magicdec.models.random_weights import draw_matrices
from magicdec.models.states_model import StatesModel
from magicdec.models.transformer import Transformer


class ModulesMtp(StatesModel):
    """transformers' `MtpModel`. Embedding, rotations and logits are the target's."""

    config: MtpModulesConfig

    def __init__(self, config: MtpModulesConfig, predictor: Any, attention: Attention):
        super().__init__(config, attention)
        self.predictor = predictor
        self.layers = predictor.layers

    @property
    @override
    def num_modules(self) -> int:
        return len(self.layers)

    @override
    def on(self, target: Transformer) -> "ModulesMtp":
        assert isinstance(target, ModulesTransformer)
        other = super().on(target)
        other.predictor.embed_tokens = target.embed
        other.predictor.rotary_emb = getattr(target.decoder, "rotary_emb", None)
        vars(other)["logits"] = target.logits
        return other

    @override
    def fused(self, hidden_BTN: Tensor) -> Tensor:
        return hidden_BTN

    @override
    def forward(  # type: ignore[override]
        self, tokens_BT: Tensor, cache: KVCache, hidden_BTE: Tensor, module: int = 0
    ) -> Tensor:
        forward = ModulesPass(cache, self.attention, tokens_BT.shape[1], self.dtype)
        output_BTE = self._run(tokens_BT, hidden_BTE, module, forward)
        if module == self.num_modules - 1:
            cache.advance(tokens_BT.shape[1])
        return output_BTE

    @override
    def enter(self, tokens_BT: Tensor, cache: KVCache, hidden_BTE: Tensor, module: int = 0) -> None:
        with writing():
            forward = EntriesPass(cache, tokens_BT.shape[1])
            self._run(tokens_BT, hidden_BTE, module, forward)

    def _run(
        self, tokens_BT: Tensor, hidden_BTE: Tensor, module: int, forward: ModulesPass
    ) -> Tensor:
        """Return a module's output (B, T, E); 0 for tokens that are left out."""
        positions_BT = forward.cache.positions_BT(tokens_BT.shape[1])
        output = self.predictor.forward_layer(
            module,
            forward.packed(hidden_BTE),
            forward.packed(positions_BT),
            None,
            input_ids=forward.packed(tokens_BT),
            **{NAME: forward},
        )
        return forward.unpacked(output)

    @property
    @override
    def dtype(self) -> torch.dtype:
        return next(self.layers.parameters()).dtype

    @override
    def compile_layers(self) -> None:
        """Compile each module; attention stays as it is, and linear layers become PyTorch's."""
        self.is_compiled = True
        self.predictor = by_pytorch(self.predictor)
        self.layers = self.predictor.layers
        compile_forward(self.layers)


def load_mtp(
    folder: Path | None,
    config: MtpModulesConfig,
    dtype: torch.dtype,
    device: torch.device,
    attention: Attention,
) -> ModulesMtp:
    """Return the modules of a checkpoint; random ones without a folder, or on the meta device.

    Only safetensors are read. Raise UserError for weights that are missing.
    """
    quiet()
    check_version()
    whole = config_from(config.config_json)
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(whole, dtype=dtype, attn_implementation=NAME)
    if folder is not None:
        predictor = _read(folder, causal, config.num_layers, device)
    else:
        modules: Any = MtpModel
        with device:
            predictor = modules(causal, config.num_layers).to(dtype)
        if device.type != "meta":
            generator = torch.Generator(device).manual_seed(0)
            draw_matrices(predictor.layers.parameters(), generator)
    predictor.embed_tokens = predictor.shared_head = None  # the target's: see `on`
    operators = operators_for(type(attention))
    if operators is not PYTORCH:
        predictor = by_operators(predictor, operators)
    return ModulesMtp(config, predictor, attention).eval().requires_grad_(False)


def _read(folder: Path, causal: Any, count: int, device: torch.device) -> Any:
    """Return transformers' modules with the weights of a folder."""
    first = causal.config.get_text_config().num_hidden_layers
    # transformers knows the layers by the numbers that published checkpoints give them.
    numbered = [rf"\.layers\.{first + module}\." for module in range(count)]
    causal._keys_to_ignore_on_load_unexpected = [
        *(causal._keys_to_ignore_on_load_unexpected or ()),
        *numbered,
    ]
    causal.config.name_or_path = str(folder)
    try:
        return MtpModel.from_pretrained(causal, device_map={"": device})
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{folder}: the modules that predict further tokens cannot be loaded"
            f" ({in_one_line(error):.200})"
        ) from None
