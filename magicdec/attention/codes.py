"""KV entries in 4 or 8 bits, for a draft that reads codes: how they are encoded, stored and
decoded.

Kernels multiply codes four at a time: of features of a key, of tokens of a value. These lie
together, in tiles of 16 slots.

L layers, B rows, K KV heads, S slots, N tiles of them, D head dim, C bytes of codes per entry, W
slots that are encoded at a time.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

TILE: Final = 16
TOKENS: Final = -2  # axes of (..., S, D)
FEATURES: Final = -1


class Codes:
    """One tensor of entries in 8 or 4 bits: whole numbers between the least and the largest value
    of each group.

    A group has `group_size` tokens of one feature (`along=TOKENS`, for keys, some of whose features
    are much larger than others), or features of one token (`along=FEATURES`, for values).
    """

    per_row: ClassVar[dict[str, int]] = {"codes_LBKNC": 1, "scales": 1}

    def __init__(
        self,
        shape: tuple[int, ...],
        bits: int,
        group_size: int,
        along: Literal[-2, -1],
        device: torch.device | str,
    ):
        """Allocate codes for entries (L, B, K, S, D). S is rounded up to `unit`; groups divide
        D.
        """
        self.bits, self.along = bits, along
        *rows, slots, dim = shape
        self.unit = math.lcm(TILE, group_size)  # slots that are encoded together
        self.num_slots = slots = -(-slots // self.unit) * self.unit
        # Codes of a key's features; kernels read those with 4.
        self.together = math.gcd(4, dim * bits // 8)
        self.group_size = group_size if along == TOKENS else math.gcd(group_size, dim)
        self.codes_LBKNC = torch.zeros(
            *rows, slots // TILE, TILE * dim * bits // 8, dtype=torch.uint8, device=device
        )
        # A group's scale and least value: (L, B, K, S / group_size, 2, D), or (L, B, K, N, D /
        # group_size, 2, TILE).
        groups = (
            (slots // group_size, 2, dim)
            if along == TOKENS
            else (slots // TILE, dim // self.group_size, 2, TILE)
        )
        self.scales = torch.zeros(*rows, *groups, dtype=torch.float16, device=device)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of codes and scales."""
        return self.codes_LBKNC.numel() + 2 * self.scales.numel()

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes (..., N, TILE x C) and scales of entries (..., S, D); S is a multiple of
        `unit`.
        """
        groups = x.float().unflatten(self.along, (-1, self.group_size))
        least, largest = groups.aminmax(dim=self.along, keepdim=True)
        scales = torch.cat(((largest - least) / (2**self.bits - 1), least), dim=self.along).half()
        scale, least = scales.float().split(1, dim=self.along)
        codes = (
            ((groups - least) / scale.clamp(min=1e-12))
            .round()
            .clamp(0, 2**self.bits - 1)
            .byte()
            .view(x.shape)
        )
        if self.bits == 4:
            high, low = codes.chunk(2, dim=-1)
            codes = high << 4 | low
        tiles = codes.unflatten(-2, (-1, TILE))
        if self.along == TOKENS:
            return tiles.unflatten(-1, (-1, self.together)).transpose(-3, -2).flatten(-3), scales
        scales = scales.unflatten(-3, (-1, TILE)).movedim(-3, -1)
        return tiles.unflatten(-2, (-1, 4)).transpose(-2, -1).flatten(-3), scales

    def decode(self, layer: int, dtype: torch.dtype) -> Tensor:
        """Return one layer's entries (B, K, S, D)."""
        tiles = self.codes_LBKNC[layer]
        scales = self.scales[layer].float()
        if self.along == TOKENS:
            codes = tiles.unflatten(-1, (-1, TILE, self.together)).transpose(-3, -2).flatten(-2)
        else:
            groups = tiles.unflatten(-1, (TILE // 4, -1, 4))
            codes = groups.transpose(-2, -1).flatten(-3, -2)
            scales = scales.movedim(-1, -3).flatten(-4, -3)
        codes = codes.flatten(-3, -2)
        if self.bits == 4:
            codes = torch.cat((codes >> 4, codes & 15), dim=-1)
        scale, least = scales.split(1, dim=self.along)
        return (
            (codes.unflatten(self.along, (-1, self.group_size)) * scale + least)
            .view(codes.shape)
            .to(dtype)
        )

    def load(self, entries_LBKSD: Tensor) -> None:
        """Encode every slot, a layer at a time."""
        size = self.num_slots
        for layer, entries_BKSD in enumerate(entries_LBKSD):
            padded_BKSD = F.pad(
                entries_BKSD[:, :, :size], (0, 0, 0, max(0, size - entries_BKSD.shape[2]))
            )
            self.codes_LBKNC[layer], self.scales[layer] = self.encode(padded_BKSD)

    def update(self, entries_LBKSD: Tensor, row_B: Tensor, slot_BW: Tensor) -> None:
        """Encode these slots of these rows: whole units, in their order. They may lie behind the
        last entry.
        """
        rows_B1 = row_B[:, None]
        from_BW = slot_BW.clamp(max=entries_LBKSD.shape[3] - 1)
        codes, scales = self.encode(entries_LBKSD[:, rows_B1, :, from_BW].movedim((0, 1), (1, 3)))
        # Indexing puts rows and slots in front of layers and heads.
        tile_BN = slot_BW[:, ::TILE] // TILE
        self.codes_LBKNC[:, rows_B1, :, tile_BN] = codes.permute(1, 3, 0, 2, 4)
        if self.along == TOKENS:
            slot_BW = slot_BW[:, :: self.group_size] // self.group_size
            self.scales[:, rows_B1, :, slot_BW] = scales.permute(1, 3, 0, 2, 4, 5)
        else:
            self.scales[:, rows_B1, :, tile_BN] = scales.permute(1, 3, 0, 2, 4, 5, 6)


@dataclass(frozen=True)
class Coded:
    """One layer's entries as codes. Slots from `first_exact_B` (int32) on are read in full
    precision.
    """

    k: Codes
    v: Codes
    layer: int
    first_exact_B: Tensor

    def mixed(self, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values in full precision, decoded before the exact ones."""
        size = min(k_BKSD.shape[2], self.k.num_slots, self.v.num_slots)
        is_exact_BS = torch.arange(size, device=k_BKSD.device) >= self.first_exact_B[:, None]
        mixed = []
        for codes, exact_BKSD in ((self.k, k_BKSD), (self.v, v_BKSD)):
            decoded_BKSD = codes.decode(self.layer, exact_BKSD.dtype)[:, :, :size]
            out_BKSD = exact_BKSD.clone()
            out_BKSD[:, :, :size] = decoded_BKSD.where(
                ~is_exact_BS[:, None, :, None], exact_BKSD[:, :, :size]
            )
            mixed.append(out_BKSD)
        return mixed[0], mixed[1]
