"""The losslessness audit: is the speculative output what the target alone would have written?

fp32 greedy must be equal token for token; a first difference is excused only where the target's two best logits nearly
tie. In any precision the output is fed through the target again (teacher forcing) and each token's logit compared with
the largest; the autoregressive output, audited the same way, is the control.

B rows, N new tokens, T tokens of a chunk, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.decoding.decoder import Decoder

NEAR_TIE = 1e-5  # of the largest logit
CHUNK_LOGITS = 1 << 26  # fp32 logits held at a time


@dataclass(frozen=True)
class Forced:
    """Teacher-forced scores of one output; entries behind a row's last token are 0."""

    gap_BN: Tensor  # largest logit less the logit of the token that was written
    tie_BN: Tensor  # the largest two logits' difference, relative to the largest


@dataclass(frozen=True)
class Audit:
    """The outcome for one batch."""

    identical: bool  # equal, but for excused near-ties
    excused: int  # rows whose first difference was such a tie
    max_logit_gap: float  # of the speculative output
    baseline_max_logit_gap: float  # of the autoregressive one: the control


def audit(decoder: Decoder, autoregressive: list[list[int]], speculative: list[list[int]]) -> Audit:
    """Compare two greedy outputs of one prefilled batch."""
    control, forced = teacher_force(decoder, autoregressive), teacher_force(decoder, speculative)
    different = excused = 0
    for row, (expected, got) in enumerate(zip(autoregressive, speculative, strict=True)):
        if expected == got:
            continue
        different += 1
        at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
        excused += at is not None and float(forced.tie_BN[row, at]) < NEAR_TIE
    return Audit(different == excused, excused, float(forced.gap_BN.max()), float(control.gap_BN.max()))


@torch.inference_mode()
def teacher_force(decoder: Decoder, outputs: list[list[int]]) -> Forced:
    """Feed each row's output through the target behind its prompt, and score every token after the first.

    The first token was decided by the prefill, which both outputs share.
    """
    rows, longest = len(outputs), max(len(row) for row in outputs)
    tokens_BN = torch.zeros(rows, longest, dtype=torch.int64)
    for index, row in enumerate(outputs):
        tokens_BN[index, : len(row)] = torch.tensor(row)
    forced = score_tokens(decoder, tokens_BN.to(decoder.device))
    valid_BN = torch.arange(longest) < torch.tensor([len(row) for row in outputs])[:, None]
    return Forced(forced.gap_BN.cpu() * valid_BN, forced.tie_BN.cpu() * valid_BN)


def chunk_len(decoder: Decoder) -> int:
    """Tokens of a row that are scored at a time."""
    return max(1, CHUNK_LOGITS // (decoder.cache.num_rows * decoder.target.config.vocab_size))


def score_tokens(decoder: Decoder, tokens_BN: Tensor) -> Forced:
    """The scores of all tokens behind the prompts, on the device; in chunks, because all logits would be too many."""
    rows, longest = tokens_BN.shape
    gap_BN = torch.zeros(rows, longest, device=decoder.device)
    tie_BN = torch.zeros_like(gap_BN)
    chunk = chunk_len(decoder)
    decoder.cache.rollback(decoder.state.prompt_len_B)
    for start in range(0, longest - 1, chunk):
        end = min(start + chunk, longest - 1)
        logits_BTV = decoder.target.logits(decoder.target(tokens_BN[:, start:end], decoder.cache)).float()
        written_BT = logits_BTV.gather(-1, tokens_BN[:, start + 1 : end + 1, None])[..., 0]
        best_BT2 = logits_BTV.topk(2, dim=-1).values
        gap_BN[:, start + 1 : end + 1] = best_BT2[..., 0] - written_BT
        tie_BN[:, start + 1 : end + 1] = (best_BT2[..., 0] - best_BT2[..., 1]) / best_BT2[..., 0].abs()
    return Forced(gap_BN, tie_BN)
