"""Results of decoding the same prompts in two ways, on any engine: speeds, outputs, texts."""

from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch

from magicdec.data.base import Prompts, rows_fingerprint
from magicdec.data.tokenizer import Detokenizer
from magicdec.engine.output_audit import Audit
from magicdec.measure import metrics
from magicdec.measure.metrics import Metrics
from magicdec.planning.resolved import Plan
from magicdec.tracking.unit_files import by_round

NUM_SAMPLES = 4  # rows whose text is logged
SAMPLE_PROMPT_TOKENS = 64  # the end of their prompts


def speeds(autoregressive: list[dict[str, float]], speculative: list[dict[str, float]]) -> Metrics:
    """Return medians over the repeats, each a `metrics.speed_metrics`; `speculative` is empty
    without a draft.

    A speedup is the ratio within a repeat, so that a slow period affects both sides. There is no
    speedup if every row ended at its first token.
    """
    result: Metrics = {}
    for name, repeats in (("autoregressive", autoregressive), ("speculative", speculative)):
        for key in repeats[0] if repeats else ():
            result[f"{name}/{key}"] = median(r[key] for r in repeats)
    for name, key in (("speedup", "time_per_output_token_ms"), ("speedup_wall", "decode_s")):
        pairs = [(a[key], s[key]) for a, s in zip(autoregressive, speculative, strict=False)]
        ratios = [a / s for a, s in pairs if a > 0 and s > 0]
        if ratios:
            result[name] = median(ratios)
            if len(ratios) > 1:
                result |= {f"{name}_min": min(ratios), f"{name}_max": max(ratios)}
                result[f"{name}_spread"] = metrics.spread(ratios)
    return result


def lossless(
    plan: Plan,
    autoregressive: list[list[int]],
    speculative: list[list[int]],
    audit: Audit | None = None,
) -> Metrics:
    """Return `lossless/*`, which mean the same in every scenario and for every engine.

    `identical`: all rows have the same tokens both ways; None where they may differ (sampled or
    synthetic). `passed`: the verdict of the audit, which excuses near-ties and judges samples. If
    there is no audit it is `identical`, but in reduced precision None instead of False.
    """
    greedy = plan.config.sampling.greedy
    same = autoregressive == speculative if plan.is_audited and greedy else None
    if audit is not None:
        return {"lossless/identical": same, "lossless/passed": audit.passed, **audit.metrics()}
    return {
        "lossless/identical": same,
        "lossless/passed": same or (None if plan.dtype != torch.float32 else same),
    }


@dataclass(frozen=True)
class Outputs:
    """The new tokens of every row, of all batches in turn."""

    prompts: Prompts
    autoregressive: list[list[int]]
    speculative: list[list[int]] = field(default_factory=list)  # empty without a draft
    # Proposed and accepted; empty if not known.
    rounds: list[list[tuple[int, int]]] = field(default_factory=list)
    # By way, of every repeat; empty if not known.
    decode_s: list[dict[str, list[float]]] = field(default_factory=list)

    @property
    def sizes_by_category(self) -> Metrics:
        """Return the rows and the new tokens of each category."""
        return metrics.by_category(
            self.prompts.categories,
            lambda rows: {
                "rows": len(rows),
                "tokens": sum(len(self.autoregressive[row]) for row in rows),
            },
        )

    @property
    def fingerprint(self) -> str:
        """Return a hash of the autoregressive tokens: equal if two runs, on any engines, have the
        same output.
        """
        return rows_fingerprint(self.autoregressive)

    def rows(self, save_prompts: bool) -> list[dict]:
        """Return the lines of generations.jsonl, one per row."""
        rows = []
        for index, (prompt, tokens) in enumerate(
            zip(self.prompts.tokens, self.autoregressive, strict=True)
        ):
            speculative = self.speculative[index] if self.speculative else None
            row = {
                "row": index,
                "context_len": len(prompt),
                "autoregressive": tokens,
                "speculative": speculative,
            }
            row |= {"rounds": self.rounds[index]} if self.rounds else {}
            row |= {"decode_s": self.decode_s[index]} if self.decode_s else {}
            row |= {"category": self.prompts.categories[index]} if self.prompts.categories else {}
            row |= {"answers": self.prompts.answers[index]} if self.prompts.answers else {}
            rows.append(row | {"prompt": prompt} if save_prompts else row)
        return rows

    def samples(self, tokenizer: Any) -> list[dict]:
        """Return the lines of samples.jsonl: the text of a few rows, both ways, and the speculative
        one by round.
        """
        return (
            []
            if tokenizer is None
            else [self._sample(row, tokenizer) for row in self.rows(True)[:NUM_SAMPLES]]
        )

    def _sample(self, row: dict, tokenizer: Any) -> dict:
        fast = row["speculative"]
        sample = {
            "row": row["row"],
            "context_len": row["context_len"],
            "prompt_end": tokenizer.decode(row["prompt"][-SAMPLE_PROMPT_TOKENS:]),
            "autoregressive": tokenizer.decode(row["autoregressive"]),
            "speculative": tokenizer.decode(fast) if fast else None,
        }
        if fast and "rounds" in row:
            # A character of several tokens belongs to the last of them.
            text = Detokenizer(tokenizer)
            pieces = [
                text.add([token], last=index == len(fast) - 1) for index, token in enumerate(fast)
            ]
            sample["rounds"] = by_round(pieces, row["rounds"])
        return sample

    def accuracy(self, tokenizer: Any) -> Metrics:
        """Return the mean share of a task's answers that the outputs contain; {} if the prompts
        have no answers.
        """
        if not self.prompts.answers:
            return {}
        from magicdec.data.ruler import accuracy

        ways = {"autoregressive": self.autoregressive, "speculative": self.speculative}
        return {
            f"{name}/accuracy": fmean(
                map(accuracy, map(tokenizer.decode, rows), self.prompts.answers)
            )
            for name, rows in ways.items()
            if rows
        }
