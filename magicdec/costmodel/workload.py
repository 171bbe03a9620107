"""Requests instead of steps: what the prefill leaves of a speedup, for a mix of prompt and output lengths.

The machine prefills each request by itself and decodes all of a batch together. In the time that it takes to decode
one batch, it prefills as many requests as leave it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from magicdec.costmodel.round import Setup, prefill_s


@dataclass(frozen=True)
class Workload:
    """Requests of several prompt and output lengths, all equally frequent."""

    lengths: Sequence[Sequence[int]]  # pairs of prompt and output tokens

    @property
    def context_len(self) -> int:
        """Return the mean context of a decoding step, which is linear in the context."""
        tokens = sum(output for _, output in self.lengths)
        return round(sum(output * (prompt + output / 2) for prompt, output in self.lengths) / tokens)

    @property
    def generate_len(self) -> int:
        """Return the mean output."""
        return round(sum(output for _, output in self.lengths) / len(self.lengths))

    def requests_per_second(self, setup: Setup, time_per_token_s: float, drafts: bool) -> float:
        """Return the throughput at `setup.batch` requests at a time, their prefills included.

        `drafts`: an independent draft prefills, too.
        """
        batch, number = setup.batch, len(self.lengths)
        outputs_s = sum(output - 1 for _, output in self.lengths) * time_per_token_s / number
        models = [(setup.target, setup.ranks)]
        if drafts and setup.draft.own_model is not None:
            models.append((setup.draft_model, setup.draft_ranks))
        prompts_s = sum(prefill_s(setup, model, ranks, prompt) for model, ranks in models for prompt, _ in self.lengths)
        return batch / (outputs_s + batch * prompts_s / number)
