"""Measured times as rows: the published tables, and any CSV file with their columns."""

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from magicdec.architectures.model_config import ModelConfig
from magicdec.config.choices import CacheConfig, DraftConfig, ModelChoice
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.costmodel.hardware import Hardware, hardware_named
from magicdec.costmodel.roofline import BF16
from magicdec.costmodel.round import Setup
from magicdec.errors import UserError

# Tables 2, 3 and 6 of MagicDec (arXiv 2408.11049, the ICLR version): published measurements. Times
# in ms, the budget per sequence, tensor parallel over all GPUs named; draft_ms is that of all gamma
# draft steps.
PUBLISHED = Path(__file__).parent / "published" / "magicdec_paper_tables.csv"
# Speedups of the paper's first version (August 2024), as its authors' pages give them: each at its
# best gamma, without times, acceptance or budget. Every row names its source.
FIRST_VERSION = PUBLISHED.with_name("magicdec_first_version.csv")
# Assumed: that of the ICLR version's tables of the same models and contexts.
FIRST_VERSION_BUDGET = 512


@dataclass(frozen=True)
class Row:
    """One measured configuration; times are in milliseconds, and None if they are not given."""

    target: str
    draft: str  # self, or a model's name
    policy: str
    hardware: str
    context_len: int
    batch_size: int
    gamma: int
    table: str = ""
    version: str = ""  # of the paper, and the text that gives the row; empty: the ICLR version
    source: str = ""
    task: str = ""
    kv_budget: int | None = None
    draft_ms: float | None = None  # gamma draft steps
    verify_ms: float | None = None
    omega: float | None = None
    autoregressive_ms: float | None = None
    speculative_ms: float | None = None  # per token
    speedup: float | None = None
    element_bytes: float = BF16  # of weights, keys, values and activations
    weight_bytes: float | None = None  # of weights that are kept in fewer
    cache: CacheConfig | None = None  # with keys of its own; None: the policy's usual ones
    prompt_len: int = 0  # of the prompts that a server prefills
    prefill_ms: float | None = None  # one prompt alone
    prefills: float = 0.0  # of others' prompts in the time of an autoregressive step

    @property
    def round_ms(self) -> float | None:
        """Return the milliseconds per round: the time per token, times the tokens of a round."""
        return (
            None
            if self.speculative_ms is None or self.omega is None
            else self.speculative_ms * self.omega
        )

    def setup(self, model: Callable[[str], ModelConfig], machine: Hardware | None = None) -> Setup:
        """Return the setup to predict; `model` maps names to architectures. `machine` replaces the
        hardware named.
        """
        draft: DraftConfig = DRAFTS["self"].facts()
        if self.draft != draft.name:
            draft = DRAFTS["model"].facts(
                model=ModelChoice(self.draft, architecture=model(self.draft))
            )
        unlimited = self.kv_budget is None or self.kv_budget < 0  # the reference's -1
        cache: CacheConfig = POLICIES["full"].facts(budget=self.context_len)
        if self.cache is not None:
            cache = self.cache
        elif not unlimited:
            cache = POLICIES[self.policy].facts(budget=int(self.kv_budget or 0))
        return Setup(
            target=model(self.target),
            hardware=machine or hardware_named(self.hardware),
            batch=self.batch_size,
            context=self.context_len,
            draft=draft,
            cache=cache,
            target_name=self.target,
            element_bytes=self.element_bytes,
            stored_weight_bytes=self.weight_bytes,
        )


_ROW = TypeAdapter(Row)
_REQUIRED = ("target", "draft", "policy", "hardware", "context_len", "batch_size", "gamma")


def read_table(path: Path | str = PUBLISHED) -> list[Row]:
    """Return the rows of a CSV file. Raise UserError with file, line and column of what cannot be
    read.
    """
    try:
        with open(path, newline="") as lines:
            reader = csv.DictReader(lines)
            missing = [column for column in _REQUIRED if column not in (reader.fieldnames or ())]
            if missing:
                raise UserError(f"{path}: the column {missing[0]} is missing")
            rows = [_row(path, reader.line_num, fields) for fields in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    if not rows:
        raise UserError(f"{path}: has no rows")
    return rows


def first_version() -> list[Row]:
    """Return the rows of the paper's first version, with the budget that is assumed of them."""
    return [replace(row, kv_budget=FIRST_VERSION_BUDGET) for row in read_table(FIRST_VERSION)]


def _row(path: Path | str, line: int, fields: dict[str, str]) -> Row:
    given = {name: text.strip() for name, text in fields.items() if name and text and text.strip()}
    try:
        return _ROW.validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
        wrong = " is empty" if first["type"] == "missing" else f"={first['input']} is not a number"
        raise UserError(f"{path}, line {line}: {first['loc'][0]}{wrong}") from None
