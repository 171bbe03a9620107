"""The state of a batch, on the device: tokens, lengths, finished rows, and the counters of every
round.

B rows, T candidate tokens of a round, R rounds. Everything is updated in place and without host
synchronisation.
"""

import torch
from torch import Tensor

from magicdec.errors import NonFinite
from magicdec.verification.accept import Verdict

INACTIVE = -1  # in the counters: the row had finished before the round
TARGET, DRAFT = 0, 1  # whose logits `inspect` was given
NEVER = torch.iinfo(torch.int32).max
SPARE_ROUNDS = 8  # surplus rounds of a late reader, and those of a warm-up
# Between the places of two rounds: more than a round has tokens, and more than a round has places.
INNER_STRIDE, ROUND_STRIDE = 1 << 16, 1 << 32


class State:
    """Rows of committed tokens. A row's last token is committed, but its keys and values are not in
    any cache yet.
    """

    def __init__(
        self,
        prompts: list[list[int]],
        generate_len: int,
        slack: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device | str,
    ):
        """Allocate. `slack` is the number of tokens that a round may write beyond the longest
        sequence (gamma + 1).
        """
        lengths = [len(p) for p in prompts]
        self.max_prompt_len = max(lengths)
        self.max_len = self.max_prompt_len + generate_len
        tokens = torch.zeros(len(prompts), self.max_len + slack, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        self.tokens_BS = tokens.to(device)
        self._rows_B1 = torch.arange(len(prompts), device=device)[:, None]
        self.prompt_len_B = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.limit_B = self.prompt_len_B + generate_len
        self.num_tokens_B = self.prompt_len_B.clone()
        # Where the round began; the same tensor, unless a draft writes tokens behind it.
        self.round_begin_B = self.num_tokens_B
        self.finished_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        self.eos = torch.tensor(eos_token_ids, dtype=torch.int64, device=device)
        self.round_1 = torch.zeros(1, dtype=torch.int64, device=device)
        # Every round commits a token to every unfinished row.
        max_rounds = generate_len + SPARE_ROUNDS
        self.accepted_RB = torch.full(
            (max_rounds, len(prompts)), INACTIVE, dtype=torch.int32, device=device
        )
        self.committed_RB = torch.zeros_like(self.accepted_RB)
        # Position of the first token whose logits were not finite, of the target and of the draft.
        self.bad_WB = torch.full((2, len(prompts)), NEVER, dtype=torch.int32, device=device)
        self.has_failed = False  # `check_finite` has raised since the last prefill

    def inspect(self, logits_BTV: Tensor, whose: int, num_accepted_B: Tensor | None = None) -> None:
        """Note for every unfinished row whether all logits are finite; `check_finite` reads the
        notes later. Of a verification only those count that follow accepted tokens, which the model
        would have computed by itself, too.
        """
        bad_BT = ~logits_BTV.sum(2, dtype=torch.float32).isfinite()
        if bad_BT.device.type == "cpu" and not bool(bad_BT.any()):
            return  # nothing to note; a GPU would have to be waited for to know that
        if num_accepted_B is not None:
            place_T = torch.arange(bad_BT.shape[1], device=bad_BT.device)
            bad_BT = bad_BT & (place_T <= num_accepted_B[:, None])
        bad_B = bad_BT.any(1) & ~self.finished_B
        position_B = torch.where(bad_B, self.num_tokens_B, NEVER)
        first_B = self.bad_WB[whose]
        torch.minimum(first_B, position_B, out=first_B)

    def check_finite(self, during: str) -> None:
        """Raise NonFinite with the first place where logits were not finite. Waits for the
        device.
        """
        for key, first_B in zip(("target", "draft.model"), self.bad_WB.cpu(), strict=True):
            if bool((first_B < NEVER).any()):
                row = int((first_B - self.prompt_len_B.cpu()).argmin())
                where = f"token {int(first_B[row])} of row {row}, {during}"
                self.has_failed = True
                raise NonFinite(
                    f"{key}: its logits are NaN or infinite, first for {where}; check its weights,"
                    " or set hardware.dtype=float32"
                )

    def begin(self) -> None:
        """Go back to the end of the prompts, and forget what was noted about earlier logits."""
        self.num_tokens_B.copy_(self.prompt_len_B)
        self.finished_B.zero_()
        self.bad_WB.fill_(NEVER)
        self.has_failed = False

    def start(self, first_tokens_B: Tensor) -> None:
        """Start, or start again, right behind the prompts, with the first tokens from the prefill.

        Clear the tokens of an earlier pass, so that no draft can read the output in advance. Keep
        what was noted about the target's logits in the prefill alone.
        """
        position_S = torch.arange(self.tokens_BS.shape[1], device=self.tokens_BS.device)
        self.tokens_BS.masked_fill_(position_S >= self.prompt_len_B[:, None], 0)
        self.num_tokens_B.copy_(self.prompt_len_B)
        self.finished_B.zero_()
        in_prefill_B = self.bad_WB[TARGET] <= self.prompt_len_B
        self.bad_WB[TARGET].copy_(torch.where(in_prefill_B, self.bad_WB[TARGET], NEVER))
        self.bad_WB[DRAFT].fill_(NEVER)
        self.extend(first_tokens_B[:, None], torch.ones_like(self.num_tokens_B))
        self.forget_rounds()

    def forget_rounds(self) -> None:
        """Count rounds from 0 again."""
        self.round_1.zero_()
        self.accepted_RB.fill_(INACTIVE)
        self.committed_RB.zero_()

    def wake(self) -> None:
        """Let every row take part in the next round, which is timed. A row at its limit commits
        nothing more.

        The tokens are no continuation from here on: call `start` before decoding.
        """
        self.finished_B.zero_()

    def recent_BT(self, count: int) -> Tensor:
        """Return the last `count` committed tokens of every row (B, count)."""
        index = self.num_tokens_B[:, None] + torch.arange(-count, 0, device=self.tokens_BS.device)
        return self.tokens_BS.gather(1, index.clamp(min=0))

    def next_positions_BT(self, count: int) -> Tensor:
        """Return the positions that the next `count` tokens of every row will take (int64)."""
        return self.num_tokens_B[:, None] + torch.arange(count, device=self.tokens_BS.device)

    def places_in_round_BT(self, count: int) -> Tensor:
        """Return the places (int64) that name the random numbers of a draft's next `count` tokens:
        by where the round began, where in the round these tokens begin, and their order.

        No place occurs in two rounds, unlike a position. A draft may depend on proposals that were
        rejected, as a selection of entries by their attention does. The next proposal at that
        position must not be drawn with the same number again.
        """
        begin_B1 = self.round_begin_B.long()[:, None]
        inner_B1 = self.num_tokens_B.long()[:, None] - begin_B1
        index_T = torch.arange(count, device=self.tokens_BS.device)
        return begin_B1 * ROUND_STRIDE + inner_B1 * INNER_STRIDE + index_T

    def commit(self, verdict: Verdict) -> Tensor:
        """Append the accepted proposals and the bonus token to unfinished rows, cut at their end of
        sequence and at their limit. Return how many tokens each row took (int32).
        """
        active_B = ~self.finished_B
        count_B = self.extend(verdict.tokens_BT, (verdict.num_accepted_B + 1) * active_B)
        accepted_B = torch.where(active_B, verdict.num_accepted_B, INACTIVE)
        self.accepted_RB.index_copy_(0, self.round_1, accepted_B[None])
        self.committed_RB.index_copy_(0, self.round_1, count_B[None])
        self.round_1 += 1
        return count_B

    def extend(self, tokens_BT: Tensor, count_B: Tensor) -> Tensor:
        """Write candidates behind the committed tokens and count the first `count_B` of them, or
        fewer at an end.
        """
        room_B = self.limit_B - self.num_tokens_B
        if len(self.eos):
            room_B = torch.minimum(room_B, self._through_end_B(tokens_BT))
        count_B = torch.minimum(count_B, room_B).int()
        self.tokens_BS[self._rows_B1, self.next_positions_BT(tokens_BT.shape[1])] = tokens_BT
        self.num_tokens_B += count_B
        self.finished_B |= count_B >= room_B
        return count_B

    def _through_end_B(self, tokens_BT: Tensor) -> Tensor:
        """Return how many tokens there are up to the first end of sequence, with it (int32)."""
        ends_BT = (tokens_BT[..., None] == self.eos).any(-1)
        through_T = torch.arange(
            1, tokens_BT.shape[1] + 1, dtype=torch.int32, device=tokens_BT.device
        )
        return torch.where(ends_BT, through_T, NEVER).amin(1)
