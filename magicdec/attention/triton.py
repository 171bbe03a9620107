"""Split-KV attention in Triton, for NVIDIA GPUs: decoding and verification read K and V once.

B rows, T new tokens, H query heads over K KV heads, G = H / K, R = G x T query rows that share a KV head, S slots, D
head dim, N selected slots.

A program takes one KV head of one row, one split of its slots, and all R query rows as one tile. In a prefill there
are many tiles, their K and V mostly from the L2 cache; each ends where its last token does, and nothing is split. The
lengths are read on the device, so that shapes are static and a pass can be captured. Where there are several splits, a
second kernel merges them by their log-sum-exp (in powers of two). Where the scores of slots are asked for, they are
written out, 4 R bytes a slot beside K's and V's 4 D in half precision, and a third kernel sums what they stand for.
"""

from functools import cache
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from magicdec.attention.kernel import KernelAttention, KernelPlan

HEAD_DIMS = (64, 80, 96, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_TILE, MAX_TILE = 16, 64  # query rows of a program: tensor cores take 16, registers hold 64
BLOCK = 64  # slots at a time
MAX_SPLITS = 64
PROGRAMS_PER_SM = 4
SUMMED = 512  # slots of a program that sums scores
MERGED_NUMBERS = 8192  # in the registers of a merging program
INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def out_row(head, r, T, K: tl.constexpr, G: tl.constexpr):
    """Where query row r of a KV head of a row lies among the rows of (B, T, H, D)."""
    token, query_head = (head // K).to(tl.int64) * T + r % T, (head % K) * G + r // T
    return token * K * G + query_head


@triton.jit
def fold(most, total, sums, scores, v_tile):
    """A block's scores and values taken into a running softmax: each row's highest score, and sums relative to it."""
    highest = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    p = tl.exp2(scores - base[:, None])
    decay = tl.exp2(most - base)
    total = total * decay + tl.sum(p, 1)
    sums = sums * decay[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
    return highest, total, sums


@triton.jit
def attend_split(
    q,
    k,
    v,
    seqlens,
    indices,
    out,  # (B, T, H, D), contiguous: of the only split
    partial,  # (B x K, splits, R, D), fp32: of several
    lse,  # (B x K, splits, R), fp32: of several, or beside scores
    raw,  # (B x K, R, S), fp32: scores in powers of two, of the slots that a query row sees
    T,
    S,
    num_splits,
    num_indices,
    reach,
    scale,  # of the scores, for powers of two
    q_row,
    q_token,
    q_head,
    k_row,
    k_head,
    k_slot,
    v_row,
    v_head,
    v_slot,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SELECTED: tl.constexpr,
    SPLIT: tl.constexpr,
    SCORED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One split of one KV head of one row."""
    head, split = tl.program_id(0), tl.program_id(1)
    b, kv = (head // K).to(tl.int64), (head % K).to(tl.int64)
    r = tl.program_id(2) * TILE + tl.arange(0, TILE)
    d = tl.arange(0, PADDED_D)
    seqlen = tl.load(seqlens + b)
    own = seqlen - T + r % T

    at_q = q + b * q_row + (r % T)[:, None] * q_token + (kv * G + r // T)[:, None] * q_head + d[None, :]
    q_tile = tl.load(at_q, mask=(r < G * T)[:, None] & (d < D)[None, :], other=0.0)
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    k += b * k_row + kv * k_head
    v += b * v_row + kv * v_head

    # A tile divides what its tokens can see, in whole blocks.
    first, last = tl.maximum(tl.min(own, 0) + 1 - reach, 0), tl.max(own, 0) + 1
    if SELECTED:
        indices += head.to(tl.int64) * num_indices
        first, last = first * 0, num_indices
    length = tl.cdiv(tl.cdiv(last - first, num_splits), BLOCK) * BLOCK
    start = first + split * length
    end = tl.minimum(start + length, last)

    most = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, PADDED_D], tl.float32)
    for at in range(start, end, BLOCK):
        slot = at + tl.arange(0, BLOCK)
        valid = slot < end
        if SELECTED:
            slot = tl.load(indices + slot, mask=valid, other=-1).to(tl.int32)
            valid = (slot >= 0) & (slot < seqlen)
        inside = valid[:, None] & (d < D)[None, :]
        wide = slot.to(tl.int64)[:, None]
        k_tile = tl.load(k + wide * k_slot + d[None, :], mask=inside, other=0.0)
        v_tile = tl.load(v + wide * v_slot + d[None, :], mask=inside, other=0.0)
        if UPCAST:
            k_tile, v_tile = k_tile.to(tl.float32), v_tile.to(tl.float32)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        seen = valid[None, :] & (slot[None, :] <= own[:, None]) & (slot[None, :] > own[:, None] - reach)
        if SCORED:
            at_raw = raw + head.to(tl.int64) * (G * T) * S + (r[:, None] * S + slot[None, :])
            tl.store(at_raw, scores, mask=seen & (r < G * T)[:, None])
        most, total, sums = fold(most, total, sums, tl.where(seen, scores, float("-inf")), v_tile)

    total = tl.where(total > 0, total, 1.0)
    mean = sums / total[:, None]
    inside = (r < G * T)[:, None] & (d < D)[None, :]
    at = (head * num_splits + split).to(tl.int64) * (G * T) + r
    if SPLIT or SCORED:
        tl.store(lse + at, most + tl.log2(total), mask=r < G * T)
    if SPLIT:
        tl.store(partial + at[:, None] * D + d[None, :], mean, mask=inside)
    else:
        at = out_row(head, r, T, K, G)
        tl.store(out + at[:, None] * D + d[None, :], mean.to(out.dtype.element_ty), mask=inside)


@triton.jit
def merge_splits(
    partial,
    lse,
    out,
    T,
    num_splits,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS query rows of one KV head of one row."""
    head = tl.program_id(0)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split, d = tl.arange(0, PADDED_SPLITS), tl.arange(0, PADDED_D)
    at = (head * num_splits + split[None, :]).to(tl.int64) * (G * T) + r[:, None]
    there = (split < num_splits)[None, :] & (r < G * T)[:, None]
    lses = tl.load(lse + at, mask=there, other=float("-inf"))
    most = tl.max(lses, 1)
    weights = tl.exp2(lses - tl.where(most == float("-inf"), 0.0, most)[:, None])
    inside = there[:, :, None] & (d < D)[None, None, :]
    parts = tl.load(partial + at[:, :, None] * D + d[None, None, :], mask=inside, other=0.0)
    total = tl.sum(weights, 1)
    merged = tl.sum(parts * weights[:, :, None], 1) / tl.where(total > 0, total, 1.0)[:, None]
    at_out = out + out_row(head, r, T, K, G)[:, None] * D + d[None, :]
    tl.store(at_out, merged.to(out.dtype.element_ty), mask=(r < G * T)[:, None] & (d < D)[None, :])


@triton.jit
def sum_scores(
    raw,
    lse,
    seqlens,
    counted,  # (B, T), contiguous: whose attention is summed; None: every token's
    out,  # (B, K, S), fp32, contiguous
    T,
    S,
    num_splits,
    reach,
    K: tl.constexpr,
    G: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The attention that BLOCK slots of one KV head of one row received from its query rows."""
    head, split = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED_SPLITS)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seqlen = tl.load(seqlens + head // K)
    sums = tl.zeros([BLOCK], tl.float32)
    for r in range(G * T):
        own = seqlen - T + r % T
        seen = (slot < S) & (slot <= own) & (slot > own - reach)
        lses = tl.load(lse + (head * num_splits + split) * (G * T) + r, mask=split < num_splits, other=float("-inf"))
        most = tl.max(lses, 0)
        scores = tl.load(raw + (head * (G * T) + r) * S + slot, mask=seen, other=float("-inf"))
        weights = tl.exp2(scores - most) / tl.sum(tl.exp2(lses - most), 0)
        weights = tl.where(seen, weights, 0.0)  # a row that sees nothing has no maximum to take away
        if counted is not None:
            weights *= tl.load(counted + head // K * T + r % T)
        sums += weights
    tl.store(out + head * S + slot, sums, mask=slot < S)


class TritonAttention(KernelAttention):
    """The default on GPUs where flash-attn is not installed."""

    name = "triton"
    scores_at_once: ClassVar[int] = 1 << 29  # 2 GiB: with long contexts each pass reads a cache of many times that

    @classmethod
    def obstacle(cls, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """See Attention.obstacle."""
        if device.type != "cuda":
            return f"is for NVIDIA GPUs, not for {device.type}"
        if dtype not in DTYPES:
            return f"does not compute in {str(dtype).removeprefix('torch.')}"
        if head_dim not in HEAD_DIMS:
            return f"knows the head dims {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
        return None

    def decode(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, indices_BKN: Tensor | None
    ) -> Tensor:
        """See KernelAttention.decode."""
        return self._attend(q_BTHD, k_BKSD, v_BKSD, plan, indices_BKN, None)[0]

    def decode_scored(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: KernelPlan, counted_BT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See KernelAttention.decode_scored."""
        (B, T, H, _), (K, S) = q_BTHD.shape, k_BKSD.shape[1:3]
        raw = torch.empty((B * K, H // K * T, S), dtype=torch.float32, device=q_BTHD.device)
        scores_BKS = torch.empty((B, K, S), dtype=torch.float32, device=q_BTHD.device)
        out_BTHD, lse = self._attend(q_BTHD, k_BKSD, v_BKSD, plan, None, raw)
        if not q_BTHD.is_meta:
            splits = lse.shape[1]
            sum_scores[(B * K, triton.cdiv(S, SUMMED))](
                raw,
                lse,
                plan.seqlens_B,
                None if counted_BT is None else counted_BT.view(torch.uint8),
                scores_BKS,
                T,
                S,
                splits,
                plan.reach,
                K=K,
                G=H // K,
                PADDED_SPLITS=triton.next_power_of_2(splits),
                BLOCK=SUMMED,
                enable_fp_fusion=True,
            )
        return out_BTHD, scores_BKS

    def _attend(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: KernelPlan,
        indices_BKN: Tensor | None,
        raw: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The output, and the log-sum-exp of each split; with `raw`, that is written, too."""
        (B, T, H, D), (K, S) = q_BTHD.shape, k_BKSD.shape[1:3]
        G, selected = H // K, indices_BKN is not None
        num_indices = indices_BKN.shape[-1] if indices_BKN is not None else 0
        tile = tile_size(G * T)
        tiles = triton.cdiv(G * T, tile)
        splits = split_count(B * K * tiles, num_indices if selected else min(S, plan.reach + T))
        out_BTHD = torch.empty((B, T, H, D), dtype=q_BTHD.dtype, device=q_BTHD.device)
        partial = None
        if splits > 1:
            partial = torch.empty((B * K, splits, G * T, D), dtype=torch.float32, device=q_BTHD.device)
        lse = torch.empty((B * K, splits, G * T), dtype=torch.float32, device=q_BTHD.device)
        if q_BTHD.is_meta:  # memory is foreseen, and this is all that is allocated
            return out_BTHD, lse
        shape = {"K": K, "G": G, "D": D, "PADDED_D": triton.next_power_of_2(D)}
        attend_split[(B * K, splits, tiles)](
            q_BTHD,
            k_BKSD,
            v_BKSD,
            plan.seqlens_B,
            indices_BKN,
            out_BTHD,
            partial,
            lse,
            raw,
            T,
            S,
            splits,
            num_indices,
            plan.reach,
            D**-0.5 * 1.4426950408889634,
            *q_BTHD.stride()[:3],
            *k_BKSD.stride()[:3],
            *v_BKSD.stride()[:3],
            **shape,
            TILE=tile,
            BLOCK=BLOCK,
            SELECTED=selected,
            SPLIT=splits > 1,
            SCORED=raw is not None,
            UPCAST=INTERPRETED,  # whose bf16 matmuls are wrong
            **launch_options(q_BTHD.dtype, tile, D),
        )
        if splits > 1:
            padded = triton.next_power_of_2(splits)
            rows = merge_rows(G * T, padded * shape["PADDED_D"])
            merge_splits[(B * K, triton.cdiv(G * T, rows))](
                partial, lse, out_BTHD, T, splits, **shape, PADDED_SPLITS=padded, ROWS=rows, enable_fp_fusion=True
            )
        return out_BTHD, lse


def tile_size(query_rows: int) -> int:
    """Query rows of a program."""
    return min(MAX_TILE, max(MIN_TILE, triton.next_power_of_2(query_rows)))


def merge_rows(query_rows: int, numbers_per_row: int) -> int:
    """Query rows that a merging program takes: as many as its registers hold."""
    return min(triton.next_power_of_2(query_rows), max(1, MERGED_NUMBERS // numbers_per_row))


def split_count(programs: int, num_slots: int) -> int:
    """Enough splits to fill the current GPU, of at least a few blocks each."""
    wanted = triton.cdiv(PROGRAMS_PER_SM * multiprocessors(), programs)
    return max(1, min(wanted, num_slots // (2 * BLOCK), MAX_SPLITS))


@cache
def multiprocessors() -> int:
    """Of the current GPU; without one, for kernels that are interpreted, a few."""
    return torch.cuda.get_device_properties(None).multi_processor_count if torch.cuda.is_available() else 2


def launch_options(dtype: torch.dtype, tile: int, dim: int) -> dict[str, int | bool]:
    """A large tile's registers need more warps; in flight are as many blocks as the least shared memory holds (L40)."""
    return {
        "num_warps": 4 if tile * triton.next_power_of_2(dim) <= 4096 else 8,
        "num_stages": 2 if dtype == torch.float32 else 3,
        "enable_fp_fusion": True,
    }
