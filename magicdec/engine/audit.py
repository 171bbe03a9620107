"""The losslessness audit: is the speculative output what the target alone would have written?

Both outputs of a batch are fed through the target again (teacher forcing); the autoregressive one is the control.
Greedy output must be equal token for token, and a first difference is excused only where the target's two best logits
nearly tie; in any precision, each token's logit is compared with the largest. Sampled output differs between the two,
because speculation uses other random numbers. It must lie within the target's truncated distribution, and the sum of
log p + entropy over its tokens, whose mean is 0 for samples of the target, must be as small as its variance says.

B rows, N new tokens, T tokens of a chunk, V vocabulary, K scores of a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.engine.decoder import Decoder
from magicdec.errors import NonFinite
from magicdec.verification.sampling import RowSampling, Sampling, probabilities

NEAR_TIE = 1e-5  # of the largest logit
MAX_Z = 4.0  # of 30,000 runs that sample as they should, two lie beyond
CHUNK_LOGITS = 1 << 26  # fp32 logits held at a time
SAMPLED_COPIES = 8  # of the logits, where the vocabulary is sorted


@dataclass(frozen=True)
class LogitGaps:
    """The agreement of an output with the target. The scores of several batches add up."""

    max_logit_gap: float = 0.0  # greedy: largest logit less the logit of the token that was written
    outside: int = 0  # sampled: tokens that the target would never draw
    excess: float = 0.0  # sampled: the sum of log p + entropy over the other tokens, and its variance
    variance: float = 0.0

    @property
    def z(self) -> float:
        """The excess in standard deviations."""
        return self.excess / self.variance**0.5 if self.variance > 0 else 0.0

    def __add__(self, other: "LogitGaps") -> "LogitGaps":
        return LogitGaps(
            max(self.max_logit_gap, other.max_logit_gap),
            self.outside + other.outside,
            self.excess + other.excess,
            self.variance + other.variance,
        )


@dataclass(frozen=True)
class Audit:
    """The outcome for one batch, or for several together."""

    greedy: bool
    different: int = 0  # greedy: rows whose tokens are not those of the baseline
    excused: int = 0  # of these, rows whose first difference is a near-tie of the target
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
        """True if the output is the target's own, as fp32 can tell."""
        if self.greedy:
            return self.different == self.excused
        return self.speculative.outside == 0 and abs(self.speculative.z) <= MAX_Z

    def metrics(self) -> dict[str, float]:
        """Return the evidence, by the names of result.json."""
        outputs = {"lossless/": self.speculative, "lossless/baseline_": self.baseline}
        if self.greedy:
            rows = {"lossless/different_rows": self.different, "lossless/excused_rows": self.excused}
            return rows | {f"{name}max_logit_gap": score.max_logit_gap for name, score in outputs.items()}
        outside = {f"{name}outside_tokens": score.outside for name, score in outputs.items()}
        return outside | {f"{name}z_score": score.z for name, score in outputs.items()}


def audit(decoder: Decoder, autoregressive: list[list[int]], speculative: list[list[int]]) -> Audit:
    """Audit the two outputs of one prefilled batch. Raise NonFinite where the target's logits are not finite."""
    control, forced = teacher_force(decoder, autoregressive), teacher_force(decoder, speculative)
    if not decoder.sampling.greedy:
        return Audit(False, 0, 0, _sampled_score(forced), _sampled_score(control))
    different = excused = 0
    for row, (expected, got) in enumerate(zip(autoregressive, speculative, strict=True)):
        if expected == got:
            continue
        different += 1
        at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
        excused += at is not None and float(forced[1, row, at]) < NEAR_TIE
    return Audit(True, different, excused, LogitGaps(float(forced[0].max())), LogitGaps(float(control[0].max())))


def _sampled_score(forced_KBN: Tensor) -> LogitGaps:
    outside, excess, variance = forced_KBN.double().sum((1, 2)).tolist()
    return LogitGaps(outside=int(outside), excess=excess, variance=variance)


@torch.inference_mode()
def teacher_force(decoder: Decoder, outputs: list[list[int]]) -> Tensor:
    """Feed each row's output through the target behind its prompt. Return the scores (K, B, N) of every token after
    the first, on the host; those behind a row's last token are 0.

    The first token was decided by the prefill, which both outputs share.
    """
    rows, longest = len(outputs), max(len(row) for row in outputs)
    tokens_BN = torch.zeros(rows, longest, dtype=torch.int64)
    for index, row in enumerate(outputs):
        tokens_BN[index, : len(row)] = torch.tensor(row)
    valid_BN = torch.arange(longest) < torch.tensor([len(row) for row in outputs])[:, None]
    scores_KBN = score_tokens(decoder, tokens_BN.to(decoder.device)).cpu().masked_fill(~valid_BN, 0.0)
    if not scores_KBN.isfinite().all():
        row, token = (~scores_KBN.isfinite()).any(0).nonzero()[0].tolist()
        raise NonFinite(f"target: its logits are NaN or infinite for new token {token} of row {row}, in the audit")
    return scores_KBN


def chunk_len(decoder: Decoder) -> int:
    """Return how many tokens of a row are scored at a time."""
    copies = 1 if decoder.sampling.greedy else SAMPLED_COPIES
    return max(1, CHUNK_LOGITS // copies // (decoder.cache.num_rows * decoder.target.config.vocab_size))


def score_tokens(decoder: Decoder, tokens_BN: Tensor) -> Tensor:
    """Score all tokens (K, B, N) behind the prompts, on the device; in chunks, because all logits would be too many."""
    longest, chunk = tokens_BN.shape[1], chunk_len(decoder)
    parts = [torch.zeros(2 if decoder.sampling.greedy else 3, len(tokens_BN), 1, device=decoder.device)]
    decoder.cache.rollback(decoder.state.prompt_len_B)
    for start in range(0, longest - 1, chunk):
        end = min(start + chunk, longest - 1)
        logits_BTV = decoder.target.logits(decoder.target(tokens_BN[:, start:end], decoder.cache)).float()
        written_BT1 = tokens_BN[:, start + 1 : end + 1, None]
        if decoder.sampling.greedy:
            parts.append(greedy_scores(logits_BTV, written_BT1))
        else:
            parts.append(sampled_scores(logits_BTV, written_BT1, decoder.sampling))
    return torch.cat(parts, dim=2)


def greedy_scores(logits_BTV: Tensor, written_BT1: Tensor) -> Tensor:
    """Return for each token (2, B, T) the largest logit less that of the token that was written, and the difference
    of the two largest relative to the largest.
    """
    best_BT2 = logits_BTV.topk(2, dim=-1).values
    best_BT = best_BT2[..., 0]
    gap_BT = best_BT - logits_BTV.gather(-1, written_BT1)[..., 0]
    return torch.stack((gap_BT, (best_BT - best_BT2[..., 1]) / best_BT.abs()))


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
