"""The figures of a run, computed from its units: speeds, acceptance, intervals, losslessness."""

from dataclasses import dataclass
from functools import cached_property

from magicdec.data import Prompts
from magicdec.measure import metrics
from magicdec.measure.metrics import Metrics, Rounds, Times
from magicdec.measure.trust import DISTURBED, disturbance
from magicdec.planning.resolved import Plan
from magicdec.scenarios.outputs import Outputs, lossless, speeds
from magicdec.scenarios.repeats import Goal, minutes, precision
from magicdec.scenarios.stored_units import Repeats, Stored
from magicdec.units import WAYS


@dataclass(frozen=True)
class Figures:
    """The figures of a run, computed from its units. There is at least one repeat."""

    plan: Plan
    prompts: Prompts
    stored: Stored
    goal: Goal

    @cached_property
    def repeats(self) -> Repeats:
        """Return the repeats that count."""
        return self.stored.units.repeats(self.goal.wanted)

    @cached_property
    def times(self) -> list[Times]:
        """Return the times of every repeat."""
        return self.repeats.times

    @property
    def gamma(self) -> int:
        """Return the gamma of most rounds; 0 without a draft."""
        speculative = self.repeats.generations("speculative")
        if not speculative:
            return 0
        # There are no whole rounds where all rows ended with their first token.
        return metrics.usual_gamma(speculative) or self.plan.config.gammas[-1]

    @property
    def outputs(self) -> Outputs:
        """Return the new tokens of all batches."""
        plain = self.repeats.tokens("autoregressive")
        fast = self.repeats.tokens("speculative")
        rounds = [row for g in self.repeats.speculative[0] for row in metrics.rounds_by_row(g)]
        return Outputs(self.prompts, plain, fast, rounds, _decode_seconds(self.times))

    def metrics(self) -> Metrics:
        """Return the figures, by the names of result.json."""
        ways = [
            [metrics.speed_metrics(repeat[way]) for repeat in self.times if way in repeat]
            for way in WAYS
        ]
        outputs = self.outputs
        results = self.prompts.facts | {"output/fingerprint": outputs.fingerprint}
        results |= {"device": self.plan.device_name, **self.plan.sources}
        results |= speeds(*ways) | self._counts() | outputs.sizes_by_category
        if (reached := precision(self.times)) is not None:
            results["speedup_precision"] = reached
        return results | self._speculation(outputs) if self.gamma else results

    def _counts(self) -> Metrics:
        """Return how many repeats count, how many do not, and how long decoding took."""
        units = self.stored.units
        results: Metrics = {"repeats": len(self.times)}
        if disturbed := units.num_repeats - len(self.times):
            results["repeats_disturbed"] = disturbed
        if (why := disturbance(self.repeats.disturbed)) is not None:
            results[DISTURBED] = why
        if units.left_out:
            results |= {
                "repeats_left_out": len(units.left_out),
                "repeats_left_out_why": units.left_out[0],
            }
        return results | {"repeats_minutes": minutes(units.by_batch[0], len(units.by_batch))}

    def _speculation(self, outputs: Outputs) -> Metrics:
        """Return acceptance, the intervals, and whether the output is the target's own."""
        rounds = metrics.rounds_of_prompts(self.repeats.speculative)
        results = metrics.acceptance(sum(rounds, Rounds())) | {"gamma": self.gamma}
        results |= metrics.interval_metrics(rounds, self.times)
        results |= metrics.category_acceptance(self.prompts.categories, rounds)
        synthetic = self.plan.config.draft.synthetic_acceptance is not None
        results["acceptance/source"] = "synthetic" if synthetic else "measured"
        return results | lossless(
            self.plan, outputs.autoregressive, outputs.speculative, self.stored.verdict
        )

    def history(self) -> list[dict]:
        """Return a line per round of the first repeat."""
        rounds: list[dict] = []
        for batch, generation in enumerate(self.repeats.speculative[0]):
            for row in metrics.round_history(generation):
                rounds.append(row | {"batch": batch, "round": len(rounds)})
        return rounds


def repeat_line(number: int, times: Times) -> dict[str, float]:
    """Return the line that reports a repeat while a run is being measured."""
    ways = {way: metrics.speed_metrics(batches) for way, batches in times.items()}
    line = {"repeat": number, "repeat/seconds": sum(way["decode_s"] for way in ways.values())}
    for way, speed in ways.items():
        line[f"repeat/{way}/tokens_per_second"] = speed["tokens_per_second"]
    both = speeds(*([ways[way]] if way in ways else [] for way in WAYS))
    return line | {f"repeat/{key}": both[key] for key in ("speedup", "speedup_wall") if key in both}


def _decode_seconds(times: list[Times]) -> list[dict[str, list[float]]]:
    """Return the seconds that each row took in every repeat, by way."""
    rows: list[dict[str, list[float]]] = []
    for way in times[0]:
        by_repeat = [[row.decode for batch in repeat[way] for row in batch] for repeat in times]
        rows = rows or [{} for _ in by_repeat[0]]
        for row, seconds in zip(rows, zip(*by_repeat, strict=True), strict=True):
            row[way] = [*seconds]
    return rows
