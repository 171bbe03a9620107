"""The losslessness audit: is the speculative output what the target alone would have written?

First the prompts: the entries that both outputs were written from must be the target's own
(prompt_audit.py).

Then both outputs of a batch are fed through the target again (teacher forcing); the autoregressive
one is the control. Every token must be one that the target may write behind the tokens before it:

- greedy: its logit is the largest, or nearly ties with it. Rows must be equal token for token; a
  difference is excused only if each token of both rows passes.
- sampled: it lies within the target's truncated distribution. The two outputs differ, because
  speculation uses other random numbers. The sum of log p + entropy over the tokens, whose mean is 0
  for samples of the target, must be as small as its variance says.

An output is undecided where the control says that the audit itself is not exact: if a sampled
control fails, too, or in reduced precision. It fails nevertheless if it is far worse than the
control.

B rows, N new tokens, T tokens of a chunk, V vocabulary, K scores of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import torch
from torch import Tensor

from magicdec.engine.decoder import Decoder
from magicdec.engine.prompt_audit import PromptCheck, check_prompts
from magicdec.errors import NonFinite
from magicdec.verification.sampling import RowSampling, Sampling, probabilities

NEAR_TIE = 1e-5  # of the largest logit, in fp32
# The same in reduced precision, in units of its resolution (`torch.finfo(dtype).eps`).
REDUCED_TIE = 8
# Times the control's gap, or a near-tie if that is larger: too far in reduced precision, too.
FAR = 4.0
MAX_Z = 4.0  # of 30,000 runs that sample as they should, two lie beyond
CHUNK_LOGITS = 1 << 26  # fp32 logits held at a time
SAMPLED_COPIES = 8  # of the logits, where the vocabulary is sorted


@dataclass(frozen=True)
class LogitGaps:
    """The agreement of an output with the target. The scores of several batches add up."""

    outside: int = 0  # tokens that the target would not write
    max_logit_gap: float = 0.0  # greedy: largest logit less the logit of the token that was written
    # Greedy: the same in units of the largest near-tie; more than 1 is outside.
    max_ties: float = 0.0
    # Sampled: the sum of log p + entropy over the tokens within, and its variance.
    excess: float = 0.0
    variance: float = 0.0
    # Sampled: the part of the excess that comes from accepted proposals.
    accepted_excess: float | None = None

    @property
    def z(self) -> float:
        """The excess in standard deviations."""
        return self.excess / self.variance**0.5 if self.variance > 0 else 0.0

    @property
    def is_sampled(self) -> bool:
        """True if the tokens may be samples of the target."""
        return self.outside == 0 and abs(self.z) <= MAX_Z

    @property
    def power(self) -> float | None:
        """The probability that the sampled test finds a sampler that replaces rejected proposals by
        samples of the target's whole distribution instead of the residual.

        Those are unbiased by themselves, so that nothing makes up for the excess of the accepted
        proposals.
        """
        if self.accepted_excess is None or not self.variance:
            return None
        return NormalDist().cdf(abs(self.accepted_excess) / self.variance**0.5 - MAX_Z)

    def is_apart(self, control: "LogitGaps") -> bool:
        """Return whether chance does not explain how much worse these samples are than the
        control's.
        """
        fewer, more = sorted((self.outside, control.outside))
        is_outside = more == self.outside and more - fewer > MAX_Z * (more + fewer) ** 0.5
        return is_outside or abs(self.z - control.z) > MAX_Z * 2**0.5

    def __add__(self, other: "LogitGaps") -> "LogitGaps":
        accepted = (self.accepted_excess, other.accepted_excess)
        return LogitGaps(
            self.outside + other.outside,
            max(self.max_logit_gap, other.max_logit_gap),
            max(self.max_ties, other.max_ties),
            self.excess + other.excess,
            self.variance + other.variance,
            None if None in accepted else sum(filter(None, accepted)),
        )


@dataclass(frozen=True)
class Audit:
    """The outcome for one batch, or for several together."""

    greedy: bool
    different: int = 0  # greedy: rows whose tokens are not those of the baseline
    excused: int = 0  # of these, rows in which near-ties of the target explain the difference
    speculative: LogitGaps = LogitGaps()
    baseline: LogitGaps = LogitGaps()
    cut: int = 0  # greedy: rows that differ by a missing end alone
    prompts: PromptCheck = field(default_factory=PromptCheck)
    is_exact: bool = True  # in fp32

    def __add__(self, other: "Audit") -> "Audit":
        return Audit(
            self.greedy,
            self.different + other.different,
            self.excused + other.excused,
            self.speculative + other.speculative,
            self.baseline + other.baseline,
            self.cut + other.cut,
            self.prompts + other.prompts,
            self.is_exact and other.is_exact,
        )

    @property
    def passed(self) -> bool | None:
        """True if the output is the target's own, False if it is not, None if that is undecided."""
        return self.verdict[0]

    @property
    def verdict(self) -> tuple[bool | None, str]:
        """The verdict, and its reason; without one if passed."""
        if self.prompts.wrong:
            return (
                False,
                f"{self.prompts.wrong} prompt tokens have entries that are not the target's",
            )
        return self._of_greedy() if self.greedy else self._of_sampled()

    def _of_greedy(self) -> tuple[bool | None, str]:
        fast, control = self.speculative, self.baseline
        if self.cut:
            return False, f"{self.cut} rows end where the target does not end them"
        if fast.outside == 0 and self.different == self.excused:
            return True, ""
        if self.is_exact or fast.max_ties > FAR * max(1.0, control.max_ties):
            return False, "tokens that the target would not write"
        return None, "reduced precision, and gaps hardly larger than those of the control"

    def _of_sampled(self) -> tuple[bool | None, str]:
        fast, control = self.speculative, self.baseline
        if fast.is_sampled and control.is_sampled:
            return True, ""
        is_apart = fast.is_apart(control)
        if not fast.is_sampled and (is_apart or (control.is_sampled and self.is_exact)):
            return False, "not samples of the target"
        if not control.is_sampled:
            return None, "the control, sampled without speculation, does not pass"
        return None, "reduced precision, and hardly worse than the control"

    def metrics(self) -> dict[str, float | str]:
        """Return the evidence, by the names of result.json."""
        outputs = {"lossless/": self.speculative, "lossless/baseline_": self.baseline}
        figures: dict[str, float | str] = {
            f"{name}outside_tokens": score.outside for name, score in outputs.items()
        }
        if reason := self.verdict[1]:
            figures["lossless/reason"] = reason
        figures |= {
            f"lossless/prompt_{name}": getattr(self.prompts, name)
            for name in ("checked", "wrong", "max_error")
        }
        figures["time/audit_prompts_s"] = self.prompts.seconds
        if self.greedy:
            figures |= {
                "lossless/different_rows": self.different,
                "lossless/excused_rows": self.excused,
            }
            return figures | {
                f"{name}max_logit_gap": score.max_logit_gap for name, score in outputs.items()
            }
        if (power := self.speculative.power) is not None:
            figures["lossless/power"] = power
        return figures | {f"{name}z_score": score.z for name, score in outputs.items()}


def audit(
    decoder: Decoder,
    autoregressive: list[list[int]],
    speculative: list[list[int]],
    accepted: list[list[bool]] | None = None,
) -> Audit:
    """Audit the two outputs of one prefilled batch, and the entries of its prompts. Raise NonFinite
    where the target's logits are not finite.

    `accepted` tells which speculative tokens are accepted proposals, for the power of the sampled
    test.
    """
    is_exact = decoder.target.dtype == torch.float32
    prompts = check_prompts(decoder)
    control = teacher_force(decoder, autoregressive)
    forced = teacher_force(decoder, speculative)
    if not decoder.sampling.greedy:
        scores = _sampled_score(forced, accepted), _sampled_score(control)
        return Audit(False, 0, 0, *scores, prompts=prompts, is_exact=is_exact)
    different = excused = cut = 0
    outside_B = control[0].any(1) | forced[0].any(1)
    for expected, got, is_outside in zip(
        autoregressive, speculative, outside_B.tolist(), strict=True
    ):
        # No near-tie explains a missing end.
        is_prefix = all(a == b for a, b in zip(expected, got, strict=False))
        different += expected != got
        cut += expected != got and is_prefix
        excused += not is_prefix and not is_outside
    scores = _greedy_score(forced), _greedy_score(control)
    return Audit(True, different, excused, *scores, cut, prompts, is_exact)


def _greedy_score(forced_KBN: Tensor) -> LogitGaps:
    outside_BN, gap_BN, ties_BN = forced_KBN
    return LogitGaps(int(outside_BN.sum()), float(gap_BN.max()), float(ties_BN.max()))


def _sampled_score(
    forced_KBN: Tensor, accepted: Sequence[Sequence[bool]] | None = None
) -> LogitGaps:
    outside, excess, variance = forced_KBN.double().sum((1, 2)).tolist()
    of_accepted = None
    if accepted is not None:
        rows = zip(forced_KBN[1].tolist(), accepted, strict=True)
        of_accepted = sum(
            score for row, flags in rows for score, flag in zip(row, flags, strict=False) if flag
        )
    return LogitGaps(int(outside), excess=excess, variance=variance, accepted_excess=of_accepted)


@torch.inference_mode()
def teacher_force(decoder: Decoder, outputs: list[list[int]], tie: float | None = None) -> Tensor:
    """Feed each row's output through the target behind its prompt. Return the scores (K, B, N) of
    every token, on the host; those behind a row's last token are 0. `tie` is by default that of the
    target's type.
    """
    rows = len(outputs)
    longest = max(len(row) for row in outputs)
    tokens_BN = torch.zeros(rows, longest, dtype=torch.int64)
    for index, row in enumerate(outputs):
        tokens_BN[index, : len(row)] = torch.tensor(row)
    valid_BN = torch.arange(longest) < torch.tensor([len(row) for row in outputs])[:, None]
    scores_KBN = (
        score_tokens(decoder, tokens_BN.to(decoder.device), tie).cpu().masked_fill(~valid_BN, 0.0)
    )
    if not scores_KBN.isfinite().all():
        row, token = (~scores_KBN.isfinite()).any(0).nonzero()[0].tolist()
        raise NonFinite(
            f"target: its logits are NaN or infinite for new token {token} of row {row}, in the"
            " audit"
        )
    return scores_KBN


def chunk_len(decoder: Decoder) -> int:
    """Return how many tokens of a row are scored at a time."""
    copies = 1 if decoder.sampling.greedy else SAMPLED_COPIES
    return max(
        1, CHUNK_LOGITS // copies // (decoder.cache.num_rows * decoder.target.config.vocab_size)
    )


def score_tokens(decoder: Decoder, tokens_BN: Tensor, tie: float | None = None) -> Tensor:
    """Score all tokens (K, B, N) behind the prompts, on the device; in chunks, because all logits
    would be too many.

    The logits of the first token come from the prefill's last hidden state. Feeding the last prompt
    token again would overwrite its entries, which other jobs share.
    """
    sampling, chunk = decoder.sampling, chunk_len(decoder)
    tie = near_tie(decoder.target.dtype) if tie is None else tie

    def scores(hidden_BTE: Tensor, written_BT: Tensor) -> Tensor:
        logits_BTV = decoder.target.logits(hidden_BTE).float()
        if sampling.greedy:
            return greedy_scores(logits_BTV, written_BT[..., None], tie)
        return sampled_scores(logits_BTV, written_BT[..., None], sampling)

    parts = [scores(decoder.last_BE[:, None], tokens_BN[:, :1])]
    decoder.cache.rollback(decoder.state.prompt_len_B)
    fed_BN = tokens_BN[:, :-1]
    written_BN = tokens_BN[:, 1:]
    for fed_BT, written_BT in zip(
        fed_BN.split(chunk, dim=1), written_BN.split(chunk, dim=1), strict=True
    ):
        if fed_BT.shape[1]:
            parts.append(scores(decoder.target(fed_BT, decoder.cache), written_BT))
    return torch.cat(parts, dim=2)


def near_tie(dtype: torch.dtype) -> float:
    """Return the gap to the largest logit, as a share of it, within which a target of this type may
    write a token.
    """
    return NEAR_TIE if dtype == torch.float32 else REDUCED_TIE * torch.finfo(dtype).eps


def greedy_scores(logits_BTV: Tensor, written_BT1: Tensor, tie: float) -> Tensor:
    """Return for each token (3, B, T) whether its logit is further below the largest than a share
    `tie` of that (1.0), how far, and how many such shares that is.
    """
    best_BT = logits_BTV.amax(-1)
    gap_BT = best_BT - logits_BTV.gather(-1, written_BT1)[..., 0]
    tie_BT = tie * best_BT.abs()
    return torch.stack(
        (
            (gap_BT > tie_BT).float(),
            gap_BT,
            gap_BT / tie_BT.clamp(min=torch.finfo(torch.float32).tiny),
        )
    )


def sampled_scores(
    logits_BTV: Tensor, written_BT1: Tensor, sampling: Sampling | RowSampling
) -> Tensor:
    """Return for each token (3, B, T) whether the distribution that is sampled from excludes it
    (1.0), and else its log p + entropy, and the variance of that.
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
