"""The full context in few bits, recent tokens in full precision: the idea of QuantSpec (arXiv 2502.10424).

L layers, B rows, K KV heads, S slots, D head dim, C bytes of codes per entry, N groups of features, W tokens committed
at a time, R recent tokens and proposals.
"""

import math
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.architectures import ModelConfig
from magicdec.attention.base import Attention
from magicdec.cache.full import FullCache
from magicdec.config.choices import CacheConfig, CacheSpec
from magicdec.config.registry import POLICIES
from magicdec.models.kv_cache import KVCache, copy_row
from magicdec.rules import STRICT, Count, must

SCALE = 4  # bytes of a group's scale and least value, each in half precision


class Codes:
    """One tensor of entries in 8 or 4 bits: whole numbers between the least and the largest value of each group."""

    per_row: ClassVar[dict[str, int]] = {"codes_LBKSC": 1, "scales_LBKSN2": 1}

    def __init__(self, shape: tuple[int, ...], bits: int, group_size: int, device: torch.device | str):
        """Allocate codes for entries of this shape (L, B, K, S, D); groups divide D."""
        self.bits, self.group_size = bits, math.gcd(group_size, shape[-1])
        self.codes_LBKSC = torch.zeros(*shape[:-1], shape[-1] * bits // 8, dtype=torch.uint8, device=device)
        # Scale and least value in half precision, side by side.
        self.scales_LBKSN2 = torch.zeros(
            *shape[:-1], shape[-1] // self.group_size, 2, dtype=torch.float16, device=device
        )

    @property
    def num_bytes(self) -> int:
        """Return the bytes of codes and scales."""
        return self.codes_LBKSC.numel() + 2 * self.scales_LBKSN2.numel()

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes (..., C) and scales (..., N, 2) of entries (..., D)."""
        groups = x.float().unflatten(-1, (-1, self.group_size))
        least, largest = groups.aminmax(dim=-1, keepdim=True)
        scales = torch.cat(((largest - least) / (2**self.bits - 1), least), dim=-1).half()
        scale, least = scales.float()[..., :1], scales.float()[..., 1:]
        codes = ((groups - least) / scale.clamp(min=1e-12)).round().clamp(0, 2**self.bits - 1).byte().flatten(-2)
        if self.bits == 4:
            high, low = codes.chunk(2, dim=-1)
            codes = high << 4 | low
        return codes, scales

    def decode(self, layer: int, dtype: torch.dtype) -> Tensor:
        """Return one layer's entries (B, K, S, D)."""
        codes = self.codes_LBKSC[layer]
        if self.bits == 4:
            codes = torch.cat((codes >> 4, codes & 15), dim=-1)
        scale, least = self.scales_LBKSN2[layer].float().split(1, dim=-1)
        return (codes.unflatten(-1, (-1, self.group_size)) * scale + least).flatten(-2).to(dtype)


@dataclass(frozen=True, config=STRICT)
class Quantized(CacheConfig):
    """Every entry in `bits` bits, with a scale for each `group_size` features; the latest ones as they are."""

    policy: str = "quantized"
    bits: Annotated[Literal[4, 8], must("must be 8 or 4")] = 4
    group_size: Count = 32
    reads_everything = quantized = needs_target = True

    @override
    def element_bytes(self, model: ModelConfig, exact: float) -> float:
        """Count a code, and its share of the group's scale."""
        return self.bits / 8 + SCALE / math.gcd(self.group_size, model.head_dim)

    @override
    def extra_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Count the codes of every entry."""
        return model.kv_elements_per_token * spec.capacity * self.element_bytes(model, element_bytes)


@POLICIES.register(Quantized)
class QuantizedCache(FullCache):
    """Everything in `bits` bits, but for the `budget` latest entries and the proposals, which are the target's own.

    Codes are decoded before attention, layer by layer: this shows the acceptance and the memory, and the speed only
    once a backend reads codes itself.
    """

    settings: Quantized

    @override
    def set_up(self) -> None:
        super().set_up()
        c, spec = self.config, self.spec
        shape = (c.num_layers, self.num_rows, c.num_kv_heads, spec.capacity, c.head_dim)
        self.k_codes, self.v_codes = (
            Codes(shape, self.settings.bits, self.settings.group_size, self.k_LBKSD.device) for _ in range(2)
        )

    @override
    def copy_row(self, row: int, source: KVCache) -> None:
        """Copy the codes, too."""
        assert isinstance(source, QuantizedCache)
        super().copy_row(row, source)
        copy_row(self.k_codes, source.k_codes, row)
        copy_row(self.v_codes, source.v_codes, row)

    @property
    @override
    def num_bytes(self) -> int:
        """Return the bytes of the codes, beyond the target's entries."""
        return super().num_bytes + self.k_codes.num_bytes + self.v_codes.num_bytes

    @override
    def attend(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        recent = self.spec.kept
        first_B1 = (self.length_B.long()[:, None] - recent).clamp(min=0)
        slot_BR = first_B1 + torch.arange(recent + self.spec.gamma + 1, device=q_BTHD.device)
        slot_BR = slot_BR.clamp(max=self.capacity - 1)
        mixed: list[Tensor] = []
        for codes, entries_LBKSD in ((self.k_codes, self.k_LBKSD), (self.v_codes, self.v_LBKSD)):
            exact_BKSD = entries_LBKSD[layer]
            decoded_BKSD = codes.decode(layer, exact_BKSD.dtype)
            decoded_BKSD[self._rows_B1, :, slot_BR] = exact_BKSD[self._rows_B1, :, slot_BR]
            mixed.append(decoded_BKSD)
        return attention.attend(q_BTHD, mixed[0], mixed[1], plan)

    @override
    def load(self, source: KVCache, scores_LBKS: Tensor | None = None) -> None:
        """Encode the context, a layer at a time."""
        super().load(source, scores_LBKS)
        for codes, entries_LBKSD in ((self.k_codes, self.k_LBKSD), (self.v_codes, self.v_LBKSD)):
            size = codes.codes_LBKSC.shape[3]
            for layer in range(self.config.num_layers):
                codes.codes_LBKSC[layer], codes.scales_LBKSN2[layer] = codes.encode(entries_LBKSD[layer][:, :, :size])

    @override
    def take(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        """Encode the new entries. Those behind the committed ones are never read."""
        slot_BW = self.length_B.long()[:, None] + torch.arange(width, device=count_B.device)
        for codes, entries_LBKSD in ((self.k_codes, self.k_LBKSD), (self.v_codes, self.v_LBKSD)):
            new, scales = codes.encode(entries_LBKSD[:, self._rows_B1, :, slot_BW])
            codes.codes_LBKSC[:, self._rows_B1, :, slot_BW] = new
            codes.scales_LBKSN2[:, self._rows_B1, :, slot_BW] = scales
        super().take(source, first_slot_B, count_B, width)
