"""Work of a draft that takes longer on a GPU than moving its bytes: selecting entries, reading
codes, scoring.

How much longer is a matter of kernels, so that it is measured on a card or not known. A calibrated
machine (magicdec/costmodel/calibrated/) has what was measured there. Other predictions count bytes
alone, and say so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from magicdec.config.choices import CacheConfig, DraftConfig

SELECTING, CODES, SCORES, WEIGHTS = "selecting", "codes", "scores", "weights"
IN_WORDS = {
    SELECTING: "selecting entries ({})",
    CODES: "reading codes of keys and values ({})",
    SCORES: "scoring entries ({})",
    WEIGHTS: "reading codes of weights ({})",
}


@dataclass(frozen=True)
class KernelCosts:
    """Measured factors: how many times as long as its bytes a kind of work takes."""

    times: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # by kind and by name
    measured_at: str = ""  # the card, the cell and the commit

    def factor(self, work: Mapping[str, str], kind: str) -> float:
        """Return the factor of a kind of `work_of`; 1 where none was measured."""
        return self.times.get(kind, {}).get(work.get(kind, ""), 1.0)

    def knows(self, work: Mapping[str, str]) -> bool:
        """Return whether all of a draft's work was measured."""
        return all(name in self.times.get(kind, {}) for kind, name in work.items())

    def remark(self, work: Mapping[str, str]) -> str | None:
        """Return what was measured of a draft's work and what was not; None where nothing needs
        it.
        """
        measured = [kind for kind, name in work.items() if name in self.times.get(kind, {})]
        others = [kind for kind in work if kind not in measured]
        parts = []
        if measured:
            parts.append(f"{_listed(measured, work)}: as measured on {self.measured_at}")
        if others:
            parts.append(f"{_listed(others, work)}: not measured on this GPU, counted by bytes")
        return "; ".join(parts) or None


def work_of(draft: DraftConfig, cache: CacheConfig) -> dict[str, str]:
    """Return the kinds of work whose time does not follow from bytes, each with the name under
    which it is measured.
    """
    work = {}
    if draft.is_model and cache.selects in ("step", "round"):
        work[SELECTING] = cache.policy
    if draft.is_model and cache.quantized:
        work[CODES] = cache.form
    if draft.is_model and cache.scores != "never":
        work[SCORES] = cache.policy
    if draft.quantization != "none":
        work[WEIGHTS] = draft.quantization
    return work


def _listed(kinds: list[str], work: Mapping[str, str]) -> str:
    return " and ".join(IN_WORDS[kind].format(work[kind]) for kind in kinds)
