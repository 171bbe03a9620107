"""How often a real model accepts its own drafts: slices through one centre, by policy, budget, context and text.

    python tools/get_smollm2.py --out models/smollm2-135m-q4
    python benchmarks/acceptance_study.py --books FOLDER    # hours; every cell is a line, repeat the command to resume
    python benchmarks/acceptance_study.py --page            # makes docs/results/smollm2.md of the lines

Acceptance does not depend on the hardware, so that a busy machine will do. All cells of a text and context share one
prefill of the target and one autoregressive pass, to whose tokens theirs are compared. A cell decodes what
`python launch.py` decodes with the overrides of `Cell.overrides`.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
import torch
from page import RESULTS, setting

from magicdec.config.load import compose
from magicdec.data.ruler import accuracy
from magicdec.engine.audit import Audit, audit
from magicdec.engine.decoder import Decoder, Generation
from magicdec.engine.native import NativeEngine
from magicdec.measure.metrics import rounds_of
from magicdec.models.quantize import quantized
from magicdec.models.transformer import Transformer
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.tracking.progress import progress
from magicdec.verification.sampling import Sampling, Use, choose

LINES = RESULTS / "smollm2.jsonl"
TARGET = "smollm2-135m-q4"
ROWS, GENERATED, LONG = 8, 160, 1024
MAX_GAMMA = 8
OPEN = 3  # prefilled batches kept in memory: 1.5 GB each at 4,096 tokens
MAIN, OTHERS = ("streaming", "snapkv", "quest", "topk"), ("verify_guided", "pyramidkv", "window")
TASKS = ("niah_single", "niah_multikey")


@dataclass(frozen=True)
class Cell:
    """One measurement. `batch` counts batches of documents: rows 8 to 15 of a text are batch 1."""

    text: str = "books"
    context: int = 4096
    batch: int = 0
    temperature: float = 0.0
    draft: str = "self"
    policy: str = "snapkv"  # `full` has no budget: 0
    budget: int = 256
    gamma: int = 3
    quantization: str = "none"
    num_layers: int = 0  # of layer_skip

    @property
    def prefilled(self) -> "Cell":
        """Return the cell whose prefill this one shares."""
        return Cell(self.text, self.context, self.batch)

    @property
    def overrides(self) -> list[str]:
        """Return the draft's part of the command line."""
        chosen = [f"draft={self.draft}", f"draft.gamma={self.gamma}", f"sampling.temperature={self.temperature}"]
        chosen += [f"cache={self.policy}"] if self.draft != "ngram" else []
        chosen += [f"cache.budget={self.budget}"] if self.budget and self.draft != "ngram" else []
        chosen += [f"draft.quantization={self.quantization}"] if self.quantization != "none" else []
        return chosen + ([f"draft.num_layers={self.num_layers}"] if self.num_layers else [])


def cells() -> Iterator[Cell]:
    """Yield all cells, the most telling ones first; some come twice.

    Greedy output of a small model soon repeats itself, which is easy to draft, so that much is sampled too.
    """
    greedy, sampled, pair = Cell(), Cell(temperature=0.7), MAIN[:2]
    everything: dict[str, Any] = {"policy": "full", "budget": 0}
    yield from by_policy(greedy, MAIN, (256, 64, 1024))
    yield replace(greedy, draft="ngram", **everything)
    yield from by_policy(sampled, MAIN, (256,))
    yield from (replace(greedy, text=TASKS[0], policy=policy) for policy in pair)
    yield from by_policy(sampled, MAIN[:3], (64, 1024))
    for context in (2048, 1024, 8000):
        yield from by_policy(replace(sampled, context=context), MAIN, (256,))
        yield from by_policy(replace(greedy, context=context), MAIN, (256,))
        yield from by_policy(replace(sampled, context=context), pair, (512, 64, 1024))
    yield from (replace(greedy, text=task, policy=policy) for task in TASKS for policy in pair)
    yield from (replace(sampled, policy=policy, gamma=gamma) for policy in pair[::-1] for gamma in (1, 2, 5, 8))
    yield replace(sampled, draft="ngram", **everything)
    yield from (replace(sampled, **everything, quantization=bits) for bits in ("int4", "int8"))
    yield from (replace(sampled, **everything, draft="layer_skip", num_layers=layers) for layers in (27, 24, 15))
    for centre in (sampled, greedy):
        yield from by_policy(replace(centre, text="code"), MAIN, (256,))
        yield replace(centre, text="code", draft="ngram", **everything)
    yield from (replace(greedy, text=task, context=8000, policy=policy) for task in TASKS for policy in pair)
    yield from by_policy(sampled, OTHERS, (256,))
    yield from (Cell("long", 1024, temperature=0.7, policy=policy) for policy in MAIN)
    yield from by_policy(sampled, MAIN, (512, 128, 2048))
    yield from by_policy(greedy, MAIN, (512, 128, 2048))
    yield from (replace(sampled, quantization=bits) for bits in ("int4", "int8"))
    yield from by_policy(sampled, OTHERS, (64, 1024, 512))
    yield from by_policy(replace(sampled, batch=1), MAIN, (256, 64, 1024))
    yield from by_policy(replace(greedy, batch=1), MAIN, (256, 64, 1024))
    yield from (replace(greedy, text=task, batch=1, policy=policy) for task in TASKS for policy in pair)
    for context in (1024, 2048, 8000):
        yield from by_policy(replace(sampled, context=context, batch=1), MAIN, (256, 512))


def by_policy(cell: Cell, policies: Sequence[str], budgets: Sequence[int]) -> Iterator[Cell]:
    """Yield the cell with each budget and policy."""
    yield from (replace(cell, policy=policy, budget=budget) for budget in budgets for policy in policies)


class Prefilled:
    """A batch of documents after the target's prefill."""

    def __init__(self, engine: NativeEngine, prompts: Any, tokenizer: Any):
        self.engine, self.prompts, self.tokenizer = engine, prompts, tokenizer
        self.decoder = engine.open(prompts.tokens).decoder
        self.decoder.prefill(engine.prefill_chunk)

    @cached_property
    def expected(self) -> list[list[int]]:
        """Return the target's own greedy output."""
        return self.decoder.generate().tokens

    @torch.inference_mode()
    def sampled(self, sampling: Sampling) -> Decoder:
        """Return a decoder over the same entries whose first tokens are sampled too."""
        decoder = Decoder(self.decoder.target, self.decoder.cache, self.decoder.state, sampling)
        last_B = decoder.state.prompt_len_B - 1
        decoder.cache.rollback(last_B)
        last_B1 = decoder.state.tokens_BS.gather(1, last_B.long()[:, None])
        logits_B1V = decoder.target.logits(decoder.target(last_B1, decoder.cache))
        first_B1, _ = choose(logits_B1V, last_B.long()[:, None] + 1, Use.DECIDE, sampling)
        decoder.first_tokens_B = first_B1[:, 0]
        return decoder

    def accuracy(self, outputs: list[list[int]]) -> float | None:
        """Return the share of the answers that the outputs contain; None where the text asks nothing."""
        texts = map(self.tokenizer.decode, outputs)
        return fmean(map(accuracy, texts, self.prompts.answers)) if self.prompts.answers else None


class Study:
    """The target, loaded once, and the texts."""

    def __init__(self, target: Sequence[str], books: Path | None, rows: int = ROWS, generated: int = GENERATED):
        """Take the overrides that choose the target."""
        self.target, self.books, self.rows, self.generated = list(target), books, rows, generated
        self.prefilled = lru_cache(maxsize=OPEN)(self._prefilled)
        self.narrowed = cache(lambda model, bits: quantized(model, bits, "cpu"))
        self._model: Transformer | None = None

    def overrides(self, cell: Cell) -> list[str]:
        """Return the target's and the text's part of the command line, for all batches up to the cell's."""
        path = [f"data.path={self.books}"] if self.books else []
        data = {"code": ["data=stdlib"]}.get(cell.text, ["data=text", *path])
        if cell.text in TASKS:
            data = ["data=ruler", f"data.task={cell.text}", *path]
        sizes = [f"batch.context_len={cell.context}", f"batch.size={self.rows}", f"batch.num_batches={cell.batch + 1}"]
        sizes += [f"batch.generate_len={LONG if cell.text == 'long' else self.generated}"]
        return [*self.target, "hardware=cpu", *data, *sizes]

    def _prefilled(self, cell: Cell) -> Prefilled:
        plan = resolve(compose([*self.overrides(cell), f"draft.gamma={MAX_GAMMA}"]))
        tokenizer: Any = build.tokenizer(plan)
        prompts = build.prompts(plan, tokenizer)
        own = slice(-self.rows, None)
        prompts = replace(
            prompts, tokens=prompts.tokens[own], sources=prompts.sources[own], answers=prompts.answers[own]
        )
        with progress() as bars:
            engine = build.engine(plan, bars)
        self._model = self._model or engine.target
        return Prefilled(replace(engine, target=self._model), prompts, tokenizer)

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Decode one cell. Return its line: of each document, the number of rounds by accepted proposals."""
        batch, started = self.prefilled(cell.prefilled), time.monotonic()
        chosen = compose([*self.overrides(cell), *cell.overrides])
        sampling = Sampling(cell.temperature, seed=chosen.sampling.seed, sequence=cell.batch * self.rows)
        decoder = batch.sampled(sampling) if cell.temperature else batch.decoder
        model = None if cell.quantization == "none" else self.narrowed(batch.engine.target, cell.quantization)
        draft = replace(chosen.draft, gamma=cell.gamma)
        engine = replace(batch.engine, draft=draft, cache=chosen.cache, draft_model=model)
        fast = decoder.generate(engine.draft_for(decoder))
        decoder.forget_cycles()
        line = asdict(cell) | {
            "documents": batch.prompts.sources,
            "rounds": [rounds_by_accepted(fast, row) for row in range(self.rows)],
            "repeated": fmean(map(repeated, fast.tokens)),
            "accuracy": batch.accuracy(fast.tokens),
            "accuracy_autoregressive": batch.accuracy(batch.expected) if batch.prompts.answers else None,
            "seconds": round(time.monotonic() - started, 1),
            "measured_by": setting(),
        }
        if cell.temperature:
            return line
        same = fast.tokens == batch.expected
        compared = Audit(True) if same else audit(decoder, batch.expected, fast.tokens)
        return line | {"different_rows": compared.different, "excused_rows": compared.excused}


def rounds_by_accepted(generation: Generation, row: int) -> list[int]:
    """Return how many of a row's rounds accepted 0, 1, ..., gamma proposals."""
    accepted_RB, committed_RB = generation.accepted_RB[:, [row]], generation.committed_RB[:, [row]]
    own = replace(generation, tokens=[generation.tokens[row]], accepted_RB=accepted_RB, committed_RB=committed_RB)
    counted, gamma = rounds_of(own), generation.gammas[0]
    return [counted[gamma, accepted] for accepted in range(gamma + 1)]


def repeated(tokens: list[int], length: int = 8) -> float:
    """Return the share of runs of `length` tokens that an output has had before: loops, which are easy to draft."""
    runs = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return 1 - len(set(runs)) / max(1, len(runs))


def known(path: Path) -> dict[Cell, dict[str, Any]]:
    """Return the lines of a study by cell."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {Cell(**{key: line[key] for key in Cell.__dataclass_fields__}): line for line in lines}


def main() -> None:
    """Measure what is not yet known, or make the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FOLDER", default=os.environ.get("MAGICDEC_SMOLLM2"), help="the target's")
    parser.add_argument("--books", type=Path, metavar="FOLDER", help="text files: novels, as in PG-19")
    parser.add_argument("--lines", type=Path, default=LINES, metavar="FILE", help="the results, a line per cell")
    parser.add_argument(
        "--contexts", type=int, nargs="*", metavar="N", help="measure these alone, in a process of theirs"
    )
    parser.add_argument("--page", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    if arguments.page:
        from acceptance_page import write

        write(arguments.lines)
        return
    if arguments.books is None:
        parser.error("--books FOLDER: the study needs a folder of text files")
    model = [f"target.path={Path(arguments.model).resolve()}"] if arguments.model else []
    study = Study([f"target={TARGET}", *model], arguments.books.resolve())
    for cell in cells():
        if cell not in known(arguments.lines) and (not arguments.contexts or cell.context in arguments.contexts):
            line = study.measure(cell)
            with arguments.lines.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(*cell.overrides, line["rounds"], line["seconds"], flush=True)


if __name__ == "__main__":
    main()
