"""The queries of a prefill's last tokens, by which policies score the context without running the
model over these tokens again.

L layers, B rows, T new tokens of a pass, W kept tokens, H query heads, D head dim.
"""

import torch
from torch import Tensor

from magicdec.attention.base import Attention

MOST_KEPT = 256  # tokens of a row: with more, queries take as much memory as entries
USUALLY_KEPT = 32  # that policies observe, unless told otherwise


class LastQueries:
    """The queries of the last W tokens of each row, or of all tokens of a shorter one. The chunks
    of a prefill may divide them in any way.
    """

    def __init__(self, like_LBKSD: Tensor, num_heads: int, num_tokens: int, attention: Attention):
        """Allocate them for entries such as these, whose layers attend by `attention`, unless a
        pass says otherwise.
        """
        L, B, _, _, D = like_LBKSD.shape
        self.num_tokens = num_tokens
        self.q_LBWHD = like_LBKSD.new_zeros(L, B, num_tokens, num_heads, D)
        self.attention = [attention] * L  # of each layer, with its weighting
        self.first_B1 = torch.zeros(B, 1, dtype=torch.int64, device=like_LBKSD.device)
        self._taken: tuple[Tensor, Tensor] | None = None  # of a pass that is under way

    def begin(self, lengths_B: Tensor) -> None:
        """Begin with a prefill of so many tokens a row."""
        self.first_B1 = (lengths_B.long()[:, None] - self.num_tokens).clamp(min=0)

    def open(self, start: int, num_new: int) -> None:
        """Keep the queries of the next pass, over the tokens from `start` on."""
        place_W = torch.arange(self.num_tokens, device=self.first_B1.device)
        index_BW11 = (self.first_B1 + place_W - start)[..., None, None]
        is_new_BW11 = (index_BW11 >= 0) & (index_BW11 < num_new)
        self._taken = index_BW11.clamp(0, num_new - 1), is_new_BW11

    def close(self) -> None:
        """Keep no more queries: other passes follow."""
        self._taken = None

    @property
    def is_open(self) -> bool:
        """Return whether the queries of the pass that is under way are kept."""
        return self._taken is not None

    def keep(self, layer: int, q_BTHD: Tensor, attention: Attention) -> None:
        """Keep what a layer attends with in this pass, as far as it belongs to the last tokens."""
        if self._taken is None:
            return
        index_BW11, is_new_BW11 = self._taken
        new_BWHD = q_BTHD.take_along_dim(index_BW11, dim=1)
        kept_BWHD = self.q_LBWHD[layer]
        kept_BWHD.copy_(torch.where(is_new_BW11, new_BWHD, kept_BWHD))
        self.attention[layer] = attention

    def of(self, layer: int, index_BT: Tensor) -> Tensor:
        """Return a layer's queries (B, T, H, D) of tokens by their indices: of those that are
        kept.
        """
        place_BT = (index_BT - self.first_B1).clamp(0, self.num_tokens - 1)
        return self.q_LBWHD[layer].take_along_dim(place_BT[..., None, None], dim=1)

    def simulate(self) -> None:
        """Fill them with noise, for timing only."""
        self.q_LBWHD.normal_()
