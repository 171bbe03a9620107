"""What this project claims of a GPU, measured on one: eight minutes, resumable, every figure stored once it is known.

    python benchmarks/gpu.py                  # all parts; repeat the command to go on where the time ended
    python benchmarks/gpu.py --parts bc       # some of them
    python benchmarks/gpu.py --rehearse       # the same on a CPU with tiny shapes, to know that it works

a correctness (the gpu tests; the bundled pair audited), b ceilings of this card, c attention, d the steps T_T, T_D and
T_V of Llama-3.1-8B, e rounds at a synthetic acceptance against the formula, f the bundled pair's real acceptance,
g transformers on the same prompts. Parts c to e fill the KV cache with noise instead of prefilling it.
Figures go to benchmarks/gpu/<card>/<part>.json, the page to docs/results/<card>.md (--rehearse: only to --out FOLDER).
"""

import argparse
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra import compose, initialize_config_dir

from magicdec import build
from magicdec.attention import choice
from magicdec.attention.base import Attention, Shape
from magicdec.config import load
from magicdec.costmodel.speedup import omega
from magicdec.decoding.graphs import Captures, Step
from magicdec.engines.native import Batch, NativeEngine, warm_up
from magicdec.errors import UserError
from magicdec.measure import memory, metrics
from magicdec.measure.ceilings import copy_bandwidth, matmul_rate
from magicdec.measure.profile import profile_round
from magicdec.measure.timers import Stopwatch
from magicdec.scenarios import OUT_OF_MEMORY
from magicdec.scenarios.compare import compare
from magicdec.tracking.progress import progress
from magicdec.verification.sampling import Sampling

ROOT = Path(__file__).resolve().parents[1]
PARTS = "abcdefg"
KERNELS = {"llama-3.1-8b": (32, 8, 128), "llama-2-7b": (32, 32, 128)}  # query heads, KV heads, head dim
EXPECTED = ((0.80, 512), (0.89, 2049))  # alpha, budget: what the MagicDec paper reports for StreamingLLM and SnapKV
PEERS = ("vllm", "sglang", "flash_attn", "flashinfer")

Record = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    target: tuple[str, ...] = ("target=llama-3.1-8b",)
    cells: tuple[tuple[int, int], ...] = ((24, 32768), (192, 4096), (96, 8192), (48, 16384), (8, 100_000))
    budgets: tuple[int, ...] = (256, 512, 2049)
    gammas: tuple[int, ...] = (2, 3, 4, 6)
    kernel_contexts: tuple[int, ...] = (4096, 16384, 32768, 100_000)
    kernel_tokens: tuple[int, ...] = (1, 2, 4, 8)
    kernel_bytes: int = 4 << 30  # keys and values of the layer that is timed
    ceiling_bytes: int = 4 << 30
    matmul: int = 8192
    pair_context: int = 8320
    pair_batches: tuple[int, ...] = (1, 8, 32, 128)
    new_tokens: int = 96
    repeats: int = 10
    tests: str = "tests"


TINY = [
    "vocab_size=128",
    "hidden_size=32",
    "intermediate_size=64",
    "num_layers=2",
    "num_heads=4",
    "num_kv_heads=2",
    "head_dim=8",
]
REHEARSAL = Sizes(
    device="cpu",
    dtype="float32",
    target=("target=llama-3.1-8b", *(f"target.architecture.{size}" for size in TINY)),
    cells=((2, 256),),
    budgets=(32, 64),
    gammas=(2, 3),
    kernel_contexts=(256,),
    kernel_tokens=(1, 4),
    kernel_bytes=1 << 20,
    ceiling_bytes=1 << 20,
    matmul=128,
    pair_context=256,
    pair_batches=(1, 2),
    new_tokens=8,
    repeats=1,
    tests="tests/decoding/test_gpu.py",
)


class OutOfTime(Exception):
    """The rest is left to the next call."""


@dataclass
class Bench:
    """The folder of results, and what several parts need."""

    folder: Path
    sizes: Sizes
    deadline: float = float("inf")

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return torch.device(self.sizes.device)

    @property
    def dtype(self) -> torch.dtype:
        """What models compute in."""
        return build.DTYPES[self.sizes.dtype]

    def points(self, part: str) -> dict[str, Record]:
        """What is known of a part."""
        path = self.folder / f"{part}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def point(self, part: str, key: str, measure: Callable[[], Record]) -> Record:
        """A stored figure, or a new one, stored at once. What does not fit says so, and the rest goes on."""
        known = self.points(part)
        if key not in known:
            if time.monotonic() > self.deadline:
                raise OutOfTime
            try:
                known[key] = measure()
            except UserError as error:
                known[key] = {"skipped": str(error)}
            except Exception as error:
                if not any(words in str(error) for words in OUT_OF_MEMORY):
                    raise
                known[key] = {"skipped": f"out of memory ({str(error).splitlines()[0]})"}
            gc.collect()  # captured graphs hold caches in a circle
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            temporary = self.folder / f".{part}.json"
            temporary.write_text(json.dumps(known, indent=1) + "\n")
            temporary.replace(self.folder / f"{part}.json")
            print(f"{part} {key}: {_short(known[key])}", flush=True)
        return known[key]

    def plan(self, *overrides: str) -> build.Plan:
        """A plan as `launch.py` would make it."""
        settings = [f"hardware.device={self.sizes.device}", f"hardware.dtype={self.sizes.dtype}"]
        settings += [f"batch.generate_len={self.sizes.new_tokens}", f"scenario.profile_repeats={self.sizes.repeats}"]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            return build.plan(load(compose("config", [*settings, *overrides])))

    def large(self, batch: int, context: int, budget: int, gamma: int, alpha: float = 0.8) -> build.Plan:
        """The large target with random weights, drafting for itself."""
        sizes = [f"batch.size={batch}", f"batch.context_len={context}", f"cache.budget={budget}"]
        draft = ["draft=self", f"draft.gamma={gamma}", f"draft.synthetic_acceptance={alpha}"]
        return self.plan(*self.sizes.target, "target.weights=random", "data=random", *sizes, *draft)

    @cached_property
    def engine(self) -> NativeEngine:
        """Of the large target; loaded once."""
        batch, context = self.sizes.cells[0]
        with progress() as bars:
            return build.engine(self.large(batch, context, self.sizes.budgets[0], self.sizes.gammas[0]), bars)

    def open(self, batch: int, context: int, budget: int, gamma: int, alpha: float) -> Batch:
        """A batch over caches of noise; raises UserError where it does not fit beside the weights."""
        foreseen = build.estimate(self.large(batch, context, budget, gamma), batch, context)
        needed = foreseen.total - foreseen.weights
        engine, available = self.engine, memory.available_bytes(self.device)
        if needed > available:
            raise UserError(f"needs {needed / memory.GIB:.1f} GiB beside the weights, of {available / memory.GIB:.1f}")
        options = {**engine.cache_options, "budget": budget}
        opened = replace(engine, gamma=gamma, synthetic_acceptance=alpha, cache_options=options).open(
            [[0] * context] * batch
        )
        opened.simulate_prefill()
        warm_up(opened)
        return opened

    @property
    def bandwidth(self) -> float:
        """Bytes per second that this card copies at: part b's, measured now if it is not known."""
        return ceilings(self)["copy_gbs"] * 1e9


def correctness(bench: Bench) -> None:
    """Part a."""

    def tests() -> Record:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", bench.sizes.tests]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        return {"exit_code": done.returncode, "said": done.stdout.strip().splitlines()[-1:]}

    def audited(draft: str) -> Record:
        sizes = [f"batch.size={bench.sizes.pair_batches[-1]}", f"batch.context_len={bench.sizes.pair_context // 2}"]
        plan = bench.plan(f"draft={draft}", "scenario.repeats=1", *sizes)
        with progress() as bars:
            found = compare(plan, bars).metrics
        return {key: value for key, value in found.items() if key.startswith("lossless/")}

    bench.point("a", "gpu tests", tests)
    for draft in ("self", "model"):
        bench.point("a", f"lossless, draft={draft}", lambda draft=draft: audited(draft))


def ceilings(bench: Bench) -> Record:
    """Part b."""

    def measured() -> Record:
        copied = copy_bandwidth(bench.device, bench.sizes.ceiling_bytes)
        return {
            "copy_gbs": copied / 1e9,
            "matmul_tflops": matmul_rate(bench.device, bench.dtype, bench.sizes.matmul) / 1e12,
        }

    return bench.point("b", "ceilings", measured)


def kernels(bench: Bench) -> None:
    """Part c: one layer's attention, K and V read once, over the time and the copy bandwidth."""
    name, _ = choice.choose("auto", bench.device, bench.dtype, [128])
    attention = choice.backend(name)()
    for model, (H, K, D) in KERNELS.items():
        for context in bench.sizes.kernel_contexts:
            for tokens in bench.sizes.kernel_tokens:
                key = f"{model} {context} T={tokens} {name}"
                bench.point(
                    "c", key, lambda H=H, K=K, D=D, S=context, T=tokens: _attention(bench, attention, H, K, D, S, T)
                )


def _attention(bench: Bench, attention: Attention, H: int, K: int, D: int, S: int, T: int) -> Record:
    element = bench.dtype.itemsize
    rows = max(1, bench.sizes.kernel_bytes // (2 * K * S * D * element))
    k, v = (torch.randn(rows, K, S, D, dtype=bench.dtype, device=bench.device) for _ in range(2))
    q = torch.randn(rows, T, H, D, dtype=bench.dtype, device=bench.device)
    seqlens = torch.full((rows,), S, dtype=torch.int32, device=bench.device)
    plan = attention.plan(seqlens, Shape(T, S, H // K, bench.dtype), None)
    step = Step(lambda: _discard(attention.attend(q, k, v, plan)), _captures(bench))
    seconds = _seconds(step, bench)
    num_bytes = 2 * k.numel() * element
    return {"rows": rows, "ms": 1e3 * seconds, "of_copy": num_bytes / seconds / bench.bandwidth}


def steps(bench: Bench) -> None:
    """Part d: at every budget with one gamma, at one budget with all."""
    middle = bench.sizes.budgets[len(bench.sizes.budgets) // 2]
    for batch, context in bench.sizes.cells:
        for budget in bench.sizes.budgets:
            for gamma in bench.sizes.gammas if budget == middle else (4 if 4 in bench.sizes.gammas else 2,):
                key = _key(batch, context, budget, gamma)
                bench.point("d", key, lambda b=batch, c=context, w=budget, g=gamma: _steps(bench, b, c, w, g))


def _steps(bench: Bench, batch: int, context: int, budget: int, gamma: int) -> Record:
    engine = bench.engine  # before the peak is forgotten: loading is not what is measured
    peak = memory.Peak(bench.device)
    opened = bench.open(batch, context, budget, gamma, 0.8)
    times = profile_round(opened, bench.sizes.repeats)
    target = engine.target
    unread = target.embed.weight.nbytes if target.head is not None else 0  # a step looks a few rows up
    weights = sum(weight.nbytes for weight in target.parameters()) - unread
    kv = memory.kv_bytes(target.config, batch * context, bench.dtype)
    draft_kv = memory.kv_bytes(target.config, batch * min(budget, context), bench.dtype)
    moved = {"target_decode": weights + kv, "verify": weights + kv, "draft": weights + draft_kv}
    ratios = {f"{part}_of_copy": size / (times[f"{part}_ms"] / 1e3) / bench.bandwidth for part, size in moved.items()}
    foreseen = build.estimate(bench.large(batch, context, budget, gamma), batch, context)
    sizes = {"peak_gib": peak.num_bytes / memory.GIB, "estimated_gib": foreseen.total / memory.GIB}
    opened.close()
    return times | ratios | sizes


def rounds(bench: Bench) -> None:
    """Part e: measured speedup at a synthetic acceptance, against the formula over part d's times."""
    for batch, context in bench.sizes.cells:
        for alpha, budget in EXPECTED:
            budget = budget if budget in bench.sizes.budgets else bench.sizes.budgets[-1]
            key = f"{batch} x {context}, alpha {alpha}, budget {budget}"
            bench.point("e", key, lambda b=batch, c=context, a=alpha, w=budget: _rounds(bench, b, c, a, w))


def _rounds(bench: Bench, batch: int, context: int, alpha: float, budget: int) -> Record:
    formula = {g: found for g in bench.sizes.gammas if (found := _formula(bench, batch, context, alpha, budget, g))}
    if not formula:
        raise UserError("part d has no times of this cell")
    gamma = max(formula, key=formula.__getitem__)
    opened = bench.open(batch, context, budget, gamma, alpha)
    pairs = [(opened.decoder.generate(), opened.decoder.generate(opened.draft)) for _ in range(2)]
    tpots = [[metrics.time_per_output_token_ms(metrics.row_times(g, 0.0)) for g in pair] for pair in pairs]
    speedup = median(plain / fast for plain, fast in tpots)
    got = metrics.acceptance_metrics([fast for _, fast in pairs])["alpha"]
    drawn = _formula(bench, batch, context, float(got or 0.0), budget, gamma)  # what was drawn is not quite alpha
    opened.close()
    return {"gamma": gamma, "speedup": speedup, "formula": formula[gamma], "alpha": got, "of_formula": speedup / drawn}


def _formula(bench: Bench, batch: int, context: int, alpha: float, budget: int, gamma: int) -> float:
    """Of part d: T_D at this budget, T_T and T_V at any."""
    known = {key: point for key, point in bench.points("d").items() if "verify_ms" in point}
    cell = f"{batch} x {context}, "
    drafts = [p["draft_ms"] for key, p in known.items() if key.startswith(f"{cell}budget {budget},")]
    others = [p for key, p in known.items() if key.startswith(cell) and key.endswith(f"gamma {gamma}")]
    if not drafts or not others:
        return 0.0
    decode, verify = (median(p[name] for p in others) for name in ("target_decode_ms", "verify_ms"))
    return decode / ((gamma * median(drafts) + verify) / omega(gamma, alpha))


def real(bench: Bench) -> None:
    """Part f: the bundled pair, prefilled and measured as by `launch.py`."""
    names = ("speedup", "speedup_wall", "acceptance_length", "alpha", "lossless/identical", "lossless/max_logit_gap")
    names += ("autoregressive/time_per_output_token_ms", "memory/peak_gib", "memory/estimated_gib")

    def measured(batch: int) -> Record:
        sizes = [f"batch.size={batch}", f"batch.context_len={bench.sizes.pair_context}"]
        with progress() as bars:
            found = compare(bench.plan("scenario.repeats=2", *sizes), bars).metrics
        return {name: found.get(name) for name in names}

    for batch in bench.sizes.pair_batches:
        bench.point("f", f"{batch} x {bench.sizes.pair_context}", lambda batch=batch: measured(batch))


def peers(bench: Bench) -> None:
    """Part g: the same checkpoint and prompts, autoregressively."""
    from magicdec.engines.peer import PeerSpec
    from magicdec.engines.transformers import TransformersPeer  # here: transformers takes seconds to import

    batch, context, new = bench.sizes.pair_batches[-2], bench.sizes.pair_context // 2, bench.sizes.new_tokens
    plan = bench.plan(f"batch.size={batch}", f"batch.context_len={context}", "draft=none")

    def prompts() -> list[list[int]]:
        return build.prompts(plan, build.tokenizer(plan)).tokens

    def ours() -> Record:
        with progress() as bars:
            found = compare(plan, bars).metrics
        return {"ms": found["autoregressive/time_per_output_token_ms"]}

    def transformers(compiled: bool) -> Record:
        dtype, device = plan.config.hardware.dtype, bench.device.type
        spec = PeerSpec(str(plan.target.folder), dtype, device, batch, context + new, Sampling(), compile=compiled)
        peer = TransformersPeer(spec)
        peer.generate(prompts(), new, speculative=False)  # compiles and warms up
        times = peer.generate(prompts(), new, speculative=False).times
        return {"ms": metrics.time_per_output_token_ms(times)}

    where = f"{batch} x {context}"
    bench.point("g", f"ours, {where}", ours)
    bench.point("g", f"transformers, static cache, {where}", lambda: transformers(False))
    bench.point("g", f"transformers, static cache, compiled, {where}", lambda: transformers(True))
    bench.point("g", "importable", lambda: {name: importlib.util.find_spec(name) is not None for name in PEERS})


def _captures(bench: Bench) -> Captures | None:
    return Captures(bench.device) if bench.device.type == "cuda" else None


def _seconds(step: Step, bench: Bench) -> float:
    """Median of a few."""
    samples = []
    for _ in range(2 + bench.sizes.repeats):
        with Stopwatch(bench.device) as watch:
            step()
        samples.append(watch.seconds)
    return median(samples[2:])


def _discard(_: object) -> None:
    """Steps return nothing."""


def _key(batch: int, context: int, budget: int, gamma: int) -> str:
    return f"{batch} x {context}, budget {budget}, gamma {gamma}"


def _short(record: Record) -> str:
    return ", ".join(f"{name} {_cell(value)}" for name, value in record.items())


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


RUN = dict(zip(PARTS, (correctness, ceilings, kernels, steps, rounds, real, peers), strict=True))
TITLES = {
    "a": "Correctness",
    "b": "Ceilings of this card",
    "c": "Attention of one layer; reading K and V once at the copy bandwidth, as a part of its time",
    "d": "Steps of Llama-3.1-8B, random weights; moving what they must at the copy bandwidth, as a part of their time",
    "e": "Speedup at a SYNTHETIC acceptance, and the formula's value from the steps",
    "f": "The bundled pair, real acceptance",
    "g": "Peers: the bundled target autoregressively, ms per token",
}


def page(bench: Bench, where: str) -> str:
    """The results as Markdown; what has not been measured says so."""
    lines = [f"# {where}", "", "`python benchmarks/gpu.py`", ""]
    facts = bench.points("machine")
    lines += [f"{facts['device']}, commit {facts['commit']}, PyTorch {facts['torch']}.", ""] if facts else []
    for part, title in TITLES.items():
        lines += [f"## {title}", ""]
        points = bench.points(part)
        lines += [*_table(points), ""] if points else ["Not yet measured.", ""]
    return "\n".join(lines)


def _table(points: dict[str, Record]) -> list[str]:
    columns = list(dict.fromkeys(name for point in points.values() for name in point))
    rows = [[key, *(_cell(point.get(name, "")) for name in columns)] for key, point in points.items()]
    return ["| " + " | ".join(row) + " |" for row in (["", *columns], ["---"] * (len(columns) + 1), *rows)]


def machine(bench: Bench) -> None:
    """What it was measured on."""
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else build.cpu_name()
    facts = {"device": name, "commit": commit, "torch": torch.__version__}
    (bench.folder / "machine.json").write_text(json.dumps(facts) + "\n")


def main() -> int:
    """Run the parts, as far as the time goes, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=PARTS, help="some of abcdefg")
    parser.add_argument("--seconds", type=float, default=460, help="no point is begun after so many")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU; no page in docs/")
    parser.add_argument("--out", type=Path, help="where figures (and a rehearsal's page) go")
    options = parser.parse_args()
    os.environ["MAGICDEC_ROOT"] = str(ROOT)
    if not options.rehearse and not torch.cuda.is_available():
        print("error: PyTorch sees no CUDA device here; --rehearse runs it on the CPU", file=sys.stderr)
        return 2
    sizes = REHEARSAL if options.rehearse else Sizes()
    card = "cpu" if options.rehearse else re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or (Path(scratch) if options.rehearse else ROOT / "benchmarks" / "gpu" / card)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, sizes, time.monotonic() + options.seconds)
        machine(bench)
        try:
            with torch.inference_mode():
                for part in options.parts:
                    RUN[part](bench)
        except OutOfTime:
            print("the time is over; the same command goes on from here")
        text = page(bench, "A rehearsal: these figures mean nothing" if options.rehearse else "Measured on a GPU")
        (folder / "page.md" if options.rehearse else ROOT / "docs" / "results" / f"{card}.md").write_text(text)
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
