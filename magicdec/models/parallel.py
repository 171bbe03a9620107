"""Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053): a rank's part of a model, and how
ranks are joined.

B rows, T tokens, E hidden size, V vocabulary, H query heads, K KV heads. Heads and MLP features are
divided over the ranks that share a layer, so that attention and its cache need no communication;
two sums per layer join the ranks. The vocabulary is divided over all ranks of the run, also where a
draft divides its layers over fewer. Every rank gathers the same logits and decides by them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.architectures.model_config import ModelConfig
from magicdec.models.operators import Operators
from magicdec.models.torch_names import all_gather_single

if TYPE_CHECKING:
    from magicdec.models.symmetric import SymmetricSums


@dataclass(frozen=True)
class Share:
    """One rank's share of a model: one of `size` in layers, one of `world_size` in the vocabulary.

    Where there are fewer KV heads than ranks, several ranks hold the same one and divide its query
    heads.
    """

    rank: int = 0
    size: int = 1
    world_rank: int = 0
    world_size: int = 1
    layer_ranks: dist.ProcessGroup | None = None  # None: all ranks
    sums: "SymmetricSums | None" = None  # of the layer ranks; None: NCCL sums, or gloo

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Return the sizes of this rank's share of the layers; the vocabulary stays whole."""
        return whole.shared_by(self.size)

    def part(self, count: int) -> slice:
        """Return which of `count` query heads or MLP features are this rank's."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def kv_heads(self, count: int) -> slice:
        """Return which of `count` KV heads this rank's query heads share."""
        first = self.rank * count // self.size
        return slice(first, first + max(1, count // self.size))

    def vocabulary(self, count: int) -> slice:
        """Return which of `count` tokens are this rank's: fewer than `vocabulary_rows`, or none, on
        the last ranks.
        """
        each = self.vocabulary_rows(count)
        return slice(min(self.world_rank * each, count), min((self.world_rank + 1) * each, count))

    def vocabulary_rows(self, count: int) -> int:
        """Return the rows of embedding and head, the same on every rank. Rows beyond the vocabulary
        are unused.
        """
        return -(-count // self.world_size)

    def summed(self, ops: Operators, layer: nn.Module, x: Tensor) -> Tensor:
        """Return the sum over the layer ranks of a linear layer's output. The next sum may
        overwrite it.
        """
        if self.size == 1:
            return ops.linear(layer, x)
        if self.sums and isinstance(layer, nn.Linear) and self.sums.takes(x, layer.weight.shape[0]):
            return self.sums.linear(layer, x)
        return self.sum(ops.linear(layer, x))

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the layer ranks, perhaps in place. The next sum may overwrite it."""
        if self.sums and self.sums.takes(x, x.shape[-1]):
            return self.sums.sum(x)
        return _sum(x, self.layer_ranks)

    def largest(self, x: Tensor) -> Tensor:
        """Return the largest over all ranks, perhaps in place."""
        if self.world_size > 1 and not x.is_meta:
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def embed(self, tokens_BT: Tensor, weight_VE: Tensor) -> Tensor:
        """Return embeddings (B, T, E), each exactly as the rank has it that holds it: the others
        add zeros.
        """
        if self.world_size == 1:
            return F.embedding(tokens_BT, weight_VE)
        rows = weight_VE.shape[0]
        local_BT = tokens_BT - self.world_rank * rows
        elsewhere_BT = (local_BT < 0) | (local_BT >= rows)
        x_BTE = F.embedding(local_BT.masked_fill(elsewhere_BT, 0), weight_VE).masked_fill(
            elsewhere_BT[..., None], 0
        )
        return _sum(x_BTE) if self.layer_ranks else self.sum(x_BTE)

    def logits(self, local_BTV: Tensor, vocab_size: int) -> Tensor:
        """Return the logits (B, T, V) of the whole vocabulary, on every rank, from each rank's own
        part.
        """
        if self.world_size == 1:
            return local_BTV
        all_NBTV = local_BTV.new_empty((self.world_size, *local_BTV.shape))
        if not local_BTV.is_meta:
            all_gather_single(all_NBTV.flatten(0, 1), local_BTV)
        return all_NBTV.movedim(0, 2).flatten(2)[..., :vocab_size]


ALONE = Share()


def share(size: int, all_reduce: str = "nccl", device: str | torch.device = "cpu") -> Share:
    """Return this process's share of a model whose layers are divided over `size` ranks. Every rank
    must call it.

    `all_reduce` is hardware.all_reduce, and `device` where the model runs.

    If `size` is less than the ranks of the run, each group of `size` neighbours has a copy of the
    layers, and all copies do the same work.
    """
    if not dist.is_available() or not dist.is_initialized():
        return ALONE
    world_size, rank = dist.get_world_size(), dist.get_rank()
    group = None
    if size < world_size:
        copies = [list(range(first, first + size)) for first in range(0, world_size, size)]
        group, _ = dist.new_subgroups_by_enumeration(copies)
    summing = None
    if size > 1:
        from magicdec.models.symmetric import sums

        summing = sums(all_reduce, group or dist.group.WORLD, torch.device(device))
    return Share(rank % size, size, rank, world_size, group, summing)


def _sum(x: Tensor, ranks: dist.ProcessGroup | None = None) -> Tensor:
    """Sum over ranks, in place. Tensors without storage, on which memory is estimated, are left as
    they are.
    """
    if not x.is_meta:
        dist.all_reduce(x, group=ranks)
    return x
