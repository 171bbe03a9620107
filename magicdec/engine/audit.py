"""The losslessness audit: is the speculative output what the target alone would have written?

Both outputs of a batch are fed through the target again (teacher forcing); the autoregressive one is the control. Every
token must be one that the target may write behind the tokens before it:

- greedy: its logit is the largest, or nearly ties with it. Rows must be equal token for token; a difference is excused
  only if each token of both rows passes.
- sampled: it lies within the target's truncated distribution. The two outputs differ, because speculation uses other
  random numbers. The sum of log p + entropy over the tokens, whose mean is 0 for samples of the target, must be as
  small as its variance says.

B rows, N new tokens, T tokens of a chunk, V vocabulary, K scores of a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.engine.decoder import Decoder
from magicdec.errors import NonFinite
from magicdec.verification.sampling import RowSampling, Sampling, probabilities

NEAR_TIE = 1e-5  # of the largest logit, in fp32
REDUCED_TIE = 8  # the same in reduced precision, in units of its resolution (`torch.finfo(dtype).eps`)
MAX_Z = 4.0  # of 30,000 runs that sample as they should, two lie beyond
CHUNK_LOGITS = 1 << 26  # fp32 logits held at a time
SAMPLED_COPIES = 8  # of the logits, where the vocabulary is sorted


@dataclass(frozen=True)
class LogitGaps:
    """The agreement of an output with the target. The scores of several batches add up."""

    outside: int = 0  # tokens that the target would not write
    max_logit_gap: float = 0.0  # greedy: largest logit less the logit of the token that was written
    excess: float = 0.0  # sampled: the sum of log p + entropy over the tokens within, and its variance
    variance: float = 0.0

    @property
    def z(self) -> float:
        """The excess in standard deviations."""
        return self.excess / self.variance**0.5 if self.variance > 0 else 0.0

    def __add__(self, other: "LogitGaps") -> "LogitGaps":
        return LogitGaps(
            self.outside + other.outside,
            max(self.max_logit_gap, other.max_logit_gap),
            self.excess + other.excess,
            self.variance + other.variance,
        )


@dataclass(frozen=True)
class Audit:
    """The outcome for one batch, or for several together."""

    greedy: bool
    different: int = 0  # greedy: rows whose tokens are not those of the baseline
    excused: int = 0  # of these, rows in which near-ties of the target explain the difference
    speculative: LogitGaps = LogitGaps()
    baseline: LogitGaps = LogitGaps()

    def __add__(self, other: "Audit") -> "Audit":
        return Audit(
            self.greedy,
            self.different + other.different,
            self.excused + other.excused,
            self.speculative + other.speculative,
            self.baseline + other.baseline,
        )

    @property
    def passed(self) -> bool:
        """True if the output is the target's own."""
        is_within = self.speculative.outside == 0 and abs(self.speculative.z) <= MAX_Z
        return is_within and self.different == self.excused

    def metrics(self) -> dict[str, float]:
        """Return the evidence, by the names of result.json."""
        outputs = {"lossless/": self.speculative, "lossless/baseline_": self.baseline}
        found: dict[str, float] = {f"{name}outside_tokens": score.outside for name, score in outputs.items()}
        if self.greedy:
            found |= {"lossless/different_rows": self.different, "lossless/excused_rows": self.excused}
            return found | {f"{name}max_logit_gap": score.max_logit_gap for name, score in outputs.items()}
        return found | {f"{name}z_score": score.z for name, score in outputs.items()}


def audit(decoder: Decoder, autoregressive: list[list[int]], speculative: list[list[int]]) -> Audit:
    """Audit the two outputs of one prefilled batch. Raise NonFinite where the target's logits are not finite."""
    control, forced = teacher_force(decoder, autoregressive), teacher_force(decoder, speculative)
    if not decoder.sampling.greedy:
        return Audit(False, 0, 0, _sampled_score(forced), _sampled_score(control))
    different = excused = 0
    outside_B = control[0].any(1) | forced[0].any(1)
    for expected, got, is_outside in zip(autoregressive, speculative, outside_B.tolist(), strict=True):
        is_prefix = all(a == b for a, b in zip(expected, got, strict=False))  # no near-tie explains a missing end
        different += expected != got
        excused += not is_prefix and not is_outside
    return Audit(True, different, excused, _greedy_score(forced), _greedy_score(control))


def _greedy_score(forced_KBN: Tensor) -> LogitGaps:
    return LogitGaps(outside=int(forced_KBN[0].sum()), max_logit_gap=float(forced_KBN[1].max()))


def _sampled_score(forced_KBN: Tensor) -> LogitGaps:
    outside, excess, variance = forced_KBN.double().sum((1, 2)).tolist()
    return LogitGaps(outside=int(outside), excess=excess, variance=variance)


@torch.inference_mode()
def teacher_force(decoder: Decoder, outputs: list[list[int]], tie: float | None = None) -> Tensor:
    """Feed each row's output through the target behind its prompt. Return the scores (K, B, N) of every token, on the
    host; those behind a row's last token are 0. `tie` is by default that of the target's type.
    """
    rows, longest = len(outputs), max(len(row) for row in outputs)
    tokens_BN = torch.zeros(rows, longest, dtype=torch.int64)
    for index, row in enumerate(outputs):
        tokens_BN[index, : len(row)] = torch.tensor(row)
    valid_BN = torch.arange(longest) < torch.tensor([len(row) for row in outputs])[:, None]
    scores_KBN = score_tokens(decoder, tokens_BN.to(decoder.device), tie).cpu().masked_fill(~valid_BN, 0.0)
    if not scores_KBN.isfinite().all():
        row, token = (~scores_KBN.isfinite()).any(0).nonzero()[0].tolist()
        raise NonFinite(f"target: its logits are NaN or infinite for new token {token} of row {row}, in the audit")
    return scores_KBN


def chunk_len(decoder: Decoder) -> int:
    """Return how many tokens of a row are scored at a time."""
    copies = 1 if decoder.sampling.greedy else SAMPLED_COPIES
    return max(1, CHUNK_LOGITS // copies // (decoder.cache.num_rows * decoder.target.config.vocab_size))


def score_tokens(decoder: Decoder, tokens_BN: Tensor, tie: float | None = None) -> Tensor:
    """Score all tokens (K, B, N) behind the prompts, on the device; in chunks, because all logits would be too many.

    The last prompt token, whose logits decide the first new one, is fed again.
    """
    sampling, parts, chunk = decoder.sampling, [], chunk_len(decoder)
    tie = near_tie(decoder.target.dtype) if tie is None else tie
    before_B = decoder.state.prompt_len_B - 1
    last_B1 = decoder.state.tokens_BS.gather(1, before_B.long()[:, None])
    fed_BN = torch.cat((last_B1, tokens_BN[:, :-1]), dim=1)
    decoder.cache.rollback(before_B)
    for fed_BT, written_BT in zip(fed_BN.split(chunk, dim=1), tokens_BN.split(chunk, dim=1), strict=True):
        logits_BTV = decoder.target.logits(decoder.target(fed_BT, decoder.cache)).float()
        if sampling.greedy:
            parts.append(greedy_scores(logits_BTV, written_BT[..., None], tie))
        else:
            parts.append(sampled_scores(logits_BTV, written_BT[..., None], sampling))
    return torch.cat(parts, dim=2)


def near_tie(dtype: torch.dtype) -> float:
    """Return the gap to the largest logit, as a share of it, within which a target of this type may write a token."""
    return NEAR_TIE if dtype == torch.float32 else REDUCED_TIE * torch.finfo(dtype).eps


def greedy_scores(logits_BTV: Tensor, written_BT1: Tensor, tie: float) -> Tensor:
    """Return for each token (2, B, T) whether its logit is further below the largest than a share `tie` of that (1.0),
    and how far.
    """
    best_BT = logits_BTV.amax(-1)
    gap_BT = best_BT - logits_BTV.gather(-1, written_BT1)[..., 0]
    return torch.stack(((gap_BT > tie * best_BT.abs()).float(), gap_BT))


def sampled_scores(logits_BTV: Tensor, written_BT1: Tensor, sampling: Sampling | RowSampling) -> Tensor:
    """Return for each token (3, B, T) whether the distribution that is sampled from excludes it (1.0), and else its
    log p + entropy, and the variance of that.
    """
    p_BTV = probabilities(logits_BTV, sampling)
    written_BT = p_BTV.gather(-1, written_BT1)[..., 0]
    information_BTV = torch.where(p_BTV > 0, -p_BTV.log(), 0.0)
    entropy_BT = (p_BTV * information_BTV).sum(-1)
    variance_BT = (p_BTV * (information_BTV - entropy_BT[..., None]).square()).sum(-1)
    outside_BT = written_BT == 0
    scores = torch.stack((outside_BT.float(), written_BT.log() + entropy_BT, variance_BT))
    scores[1:].masked_fill_(outside_BT, 0.0)
    return scores
