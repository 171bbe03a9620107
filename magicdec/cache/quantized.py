"""The full context in few bits, recent tokens in full precision: the idea of QuantSpec (arXiv
2502.10424).

L layers, B rows, K KV heads, S slots, D head dim, W slots that are encoded at a time.
"""

import math
from typing import Annotated, Any, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor
from typing_extensions import override

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention.base import Attention
from magicdec.attention.codes import FEATURES, TILE, TOKENS, Coded, Codes
from magicdec.cache.full import FullCache
from magicdec.config.choices import CacheConfig, CacheSpec
from magicdec.config.registry import POLICIES
from magicdec.inputs.rules import STRICT, Count, must
from magicdec.models.kv_cache import KVCache
from magicdec.models.row_copies import copy_row

SCALE = 4  # bytes of a group's scale and least value, each in half precision


@dataclass(frozen=True, config=STRICT)
class Quantized(CacheConfig):
    """Every entry in `bits` bits; the latest ones as they are.

    A scale is shared by `group_size` tokens of a feature of the keys, and by `group_size` features
    of a value.
    """

    policy: str = "quantized"
    bits: Annotated[Literal[4, 8], must("must be 8 or 4")] = 4
    group_size: Count = 32
    reads_everything = quantized = needs_target = True

    @property
    @override
    def form(self) -> str:
        return f"{self.policy}, {self.bits} bits"

    @override
    def element_bytes(self, model: ModelConfig, exact: float) -> float:
        """Count a code, and its share of a scale: the mean of keys and values."""
        return self.bits / 8 + SCALE / 2 * (
            1 / self.group_size + 1 / math.gcd(self.group_size, model.head_dim)
        )

    @override
    def extra_bytes(self, spec: CacheSpec, model: ModelConfig, element_bytes: float) -> float:
        """Count the codes of every entry."""
        unit = math.lcm(TILE, self.group_size)
        slots = math.ceil(spec.capacity / unit) * unit
        return model.kv_elements_per_token * slots * self.element_bytes(model, element_bytes)


@POLICIES.register(Quantized)
class QuantizedCache(FullCache):
    """Everything in `bits` bits, but for at least the `budget` latest entries and the proposals:
    the target's own.

    Entries are encoded a unit of slots at a time: whole groups of keys, and whole tiles, which are
    what kernels read. Up to a unit more is therefore read in full precision.
    """

    settings: Quantized

    @override
    def set_up(self) -> None:
        super().set_up()
        c, settings = self.config, self.settings
        device = self.k_LBKSD.device
        shape = (c.num_layers, self.num_rows, c.num_kv_heads, self.spec.capacity, c.head_dim)
        self.k_codes = Codes(shape, settings.bits, settings.group_size, TOKENS, device)
        self.v_codes = Codes(shape, settings.bits, settings.group_size, FEATURES, device)

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
    def plan(self, attention: Attention, num_new: int, dtype: torch.dtype) -> list[Any]:
        unit = self.k_codes.unit  # before it is complete, its slots are not encoded
        self._first_exact_B = (self.length_B - self.spec.kept).clamp(min=0) // unit * unit
        return super().plan(attention, num_new, dtype)

    @override
    def coded(self, layer: int) -> Coded:
        return Coded(self.k_codes, self.v_codes, layer, self._first_exact_B)

    @override
    def load(self, source: KVCache, scores_LBKS: Tensor | None = None) -> None:
        """Encode the context. What an unfinished unit holds behind it is never read."""
        super().load(source, scores_LBKS)
        self.k_codes.load(self.k_LBKSD)
        self.v_codes.load(self.v_LBKSD)

    @override
    def take(self, source: KVCache, first_slot_B: Tensor, count_B: Tensor, width: int) -> None:
        """Encode the units that the new entries complete: before a unit is complete, it is never
        read.

        Where shapes must be static, encode those that they may complete, of every row.
        """
        unit, total = self.k_codes.unit, self.k_codes.num_slots
        count = min(total, -(-width // unit) * unit)
        first_B = (self.length_B.long() // unit * unit).clamp(max=total - count)
        row_B = torch.arange(len(first_B), device=first_B.device)
        if first_B.device.type == "cpu":
            row_B = row_B[(self.length_B + count_B) // unit > self.length_B // unit]
        slot_BW = first_B[row_B, None] + torch.arange(count, device=first_B.device)
        for codes, entries_LBKSD in ((self.k_codes, self.k_LBKSD), (self.v_codes, self.v_LBKSD)):
            if len(row_B):
                codes.update(entries_LBKSD, row_B, slot_BW)
        super().take(source, first_slot_B, count_B, width)
