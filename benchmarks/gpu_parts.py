"""The parts of benchmarks/gpu.py, a to g: each measures its points and stores them."""

import importlib.util
import subprocess
import sys
from functools import partial
from statistics import median

import torch
from gpu_bench import Bench
from gpu_page import Record
from page import ROOT

from magicdec.attention import choice
from magicdec.attention.base import Attention, Shape
from magicdec.costmodel.speedup import speedup
from magicdec.decoding.timers import Stopwatch
from magicdec.engine.graphs import Captures, Step
from magicdec.errors import UserError
from magicdec.measure import memory, metrics
from magicdec.measure.ceilings import fastest_s, matmul_rate
from magicdec.measure.profile import profile_round
from magicdec.planning import build
from magicdec.scenarios import compare
from magicdec.tracking.progress import progress
from magicdec.units import GIB
from magicdec.verification.sampling import Sampling

KERNELS = {"llama-3.1-8b": (32, 8, 128), "llama-2-7b": (32, 32, 128)}  # query heads, KV heads, head dim
EXPECTED = ((0.80, 512), (0.89, 2049))  # alpha, budget: what the MagicDec paper reports for StreamingLLM and SnapKV
TESTS_S, SAID = 300, 5  # seconds that a file of tests may take; lines of its output that are kept
PASSED = (0, 5)  # exit codes of pytest; 5: nothing to run, because a module was skipped for a missing library
PEERS = ("vllm", "sglang", "flash_attn", "flashinfer")


def correctness(bench: Bench) -> None:
    """Part a: run the gpu tests, and audit the bundled pair."""

    def tests(file: str) -> Record:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", file]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=TESTS_S
        )
        said = " / ".join((done.stdout + done.stderr).strip().splitlines()[-SAID:])
        return {"said" if done.returncode in PASSED else "failed": said}

    def audited(draft: str, dtype: str) -> Record:
        sizes = [f"batch.size={bench.sizes.pair_batches[-1]}", f"batch.context_len={bench.sizes.pair_context // 2}"]
        plan = bench.plan(f"draft={draft}", "scenario.repeats=1", f"hardware.dtype={dtype}", *sizes)
        with progress() as bars:
            found = compare.run(plan, bars).metrics
        return {key: value for key, value in found.items() if key.startswith("lossless/")}

    for draft in ("self", "model"):
        for dtype in dict.fromkeys(("float32", bench.sizes.dtype)):  # in fp32 tokens must be equal
            key = f"lossless, draft={draft}, {dtype}"
            bench.point("a", key, lambda draft=draft, dtype=dtype: audited(draft, dtype))
    for file in bench.sizes.tests:
        bench.point("a", file, lambda file=file: tests(file))


def ceilings(bench: Bench) -> Record:
    """Part b: measure the copy bandwidth and the matmul rate."""

    def measured() -> Record:
        source = torch.ones(bench.sizes.ceiling_bytes // 4, device=bench.device)
        copy = torch.empty_like(source)
        seconds = fastest_s(lambda: copy.copy_(source), bench.device)
        return {
            "copy_gbs": 2 * source.nbytes / seconds / 1e9,
            "matmul_tflops": matmul_rate(bench.device, bench.dtype, bench.sizes.matmul) / 1e12,
        }

    return bench.point("b", "ceilings", measured)


def of_copy(bench: Bench, num_bytes: float, seconds: float) -> float | None:
    """Return the time to move so many bytes at the copy bandwidth of part b, as a share of `seconds`."""
    copied = ceilings(bench).get("copy_gbs")
    return copied and num_bytes / seconds / (copied * 1e9)


def kernels(bench: Bench) -> None:
    """Part c: time one layer's attention by each usable backend, next to copying as many bytes."""
    backends = [(name, choice.backend(name)()) for name in choice.usable(bench.device, bench.dtype, [128])]
    for model, shape in KERNELS.items():
        for context in bench.sizes.kernel_contexts:
            for tokens in bench.sizes.kernel_tokens:
                for name, attention in backends:
                    attend = partial(_attention, bench, attention, *shape, context, tokens)
                    bench.point("c", f"{model} {context} T={tokens} {name}", attend)


def _attention(bench: Bench, attention: Attention, H: int, K: int, D: int, S: int, T: int) -> Record:
    element = bench.dtype.itemsize
    rows = max(1, bench.sizes.kernel_bytes // (2 * K * S * D * element))
    k, v = (torch.randn(rows, K, S, D, dtype=bench.dtype, device=bench.device) for _ in range(2))
    q = torch.randn(rows, T, H, D, dtype=bench.dtype, device=bench.device)
    seqlens = torch.full((rows,), S, dtype=torch.int32, device=bench.device)
    plan = attention.plan(seqlens, Shape(T, S, H // K, bench.dtype), None)
    captures = _captures(bench) if attention.captured else None
    step = Step(lambda: _discard(attention.attend(q, k, v, plan)), captures)
    seconds = _seconds(step, bench)
    num_bytes = 2 * k.numel() * element
    return {"rows": rows, "ms": 1e3 * seconds, "of_copy": of_copy(bench, num_bytes, seconds)}


def steps(bench: Bench) -> None:
    """Part d: time the steps at every budget with one gamma, and at one budget with every gamma."""
    middle = bench.sizes.budgets[len(bench.sizes.budgets) // 2]
    for batch, context in bench.sizes.cells:
        for budget in bench.sizes.budgets:
            for gamma in bench.sizes.gammas if budget == middle else (4 if 4 in bench.sizes.gammas else 2,):
                key = _key(batch, context, budget, gamma)
                bench.point("d", key, lambda b=batch, c=context, w=budget, g=gamma: _steps(bench, b, c, w, g))


def _steps(bench: Bench, batch: int, context: int, budget: int, gamma: int) -> Record:
    engine = bench.engine  # load it before the peak is reset: the peak is that of the steps
    peak = memory.Peak(bench.device)
    opened = bench.open(batch, context, budget, gamma, 0.8)
    times = profile_round(opened, bench.sizes.repeats)
    target = engine.target
    weights = target.step_weight_bytes
    kv = memory.kv_bytes(target.config, batch * context, bench.dtype)
    draft_kv = memory.kv_bytes(target.config, batch * min(budget, context), bench.dtype)
    moved = {"target_decode": weights + kv, "verify": weights + kv, "draft": weights + draft_kv}
    ratios = {f"{part}_of_copy": of_copy(bench, size, times[f"{part}_ms"] / 1e3) for part, size in moved.items()}
    predicted = build.estimate(bench.large(batch, context, budget, gamma), batch, context)
    # The prefill is simulated here: the estimate has its activations, which the peak has not.
    sizes = {"peak_gib": peak.num_bytes / GIB, "estimated_with_prefill_gib": predicted.total / GIB}
    opened.close()
    return times | ratios | sizes


def rounds(bench: Bench) -> None:
    """Part e: measure the speedup at a synthetic acceptance, next to the formula's over the times of part d."""
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
    measured = median(plain / fast for plain, fast in tpots)
    got = metrics.acceptance_metrics([fast for _, fast in pairs])["alpha"]
    drawn = _formula(bench, batch, context, float(got or 0.0), budget, gamma)  # what was drawn is not quite alpha
    opened.close()
    return {
        "gamma": gamma,
        "speedup": measured,
        "formula": formula[gamma],
        "alpha": got,
        "of_formula": measured / drawn,
    }


def _formula(bench: Bench, batch: int, context: int, alpha: float, budget: int, gamma: int) -> float:
    """Return the formula's speedup from part d's times: T_D at this budget, T_T and T_V at any; 0 without times."""
    known = {key: point for key, point in bench.points("d").items() if "verify_ms" in point}
    cell = f"{batch} x {context}, "
    drafts = [p["draft_ms"] for key, p in known.items() if key.startswith(f"{cell}budget {budget},")]
    others = [p for key, p in known.items() if key.startswith(cell) and key.endswith(f"gamma {gamma}")]
    if not drafts or not others:
        return 0.0
    decode, verify = (median(p[name] for p in others) for name in ("target_decode_ms", "verify_ms"))
    return speedup(gamma, alpha, decode, median(drafts), verify)


def real(bench: Bench) -> None:
    """Part f: run the bundled pair, prefilled and measured as by `launch.py`."""
    names = ("speedup", "speedup_wall", "acceptance_length", "alpha", "lossless/identical", "lossless/max_logit_gap")
    names += ("autoregressive/time_per_output_token_ms", "memory/peak_gib", "memory/estimated_gib")

    def measured(batch: int) -> Record:
        sizes = [f"batch.size={batch}", f"batch.context_len={bench.sizes.pair_context}"]
        with progress() as bars:
            found = compare.run(bench.plan("scenario.repeats=2", *sizes), bars).metrics
        return {name: found.get(name) for name in names}

    for batch in bench.sizes.pair_batches:
        bench.point("f", f"{batch} x {bench.sizes.pair_context}", lambda batch=batch: measured(batch))


def peers(bench: Bench) -> None:
    """Part g: decode the same prompts with the same checkpoint in transformers, autoregressively."""
    from magicdec.peers.base import PeerSpec
    from magicdec.peers.transformers import TransformersPeer  # here: transformers takes seconds to import
    from magicdec.registry import TransformersEngine

    batch, context, new = bench.sizes.pair_batches[-2], bench.sizes.pair_context // 2, bench.sizes.new_tokens
    plan = bench.plan(f"batch.size={batch}", f"batch.context_len={context}", "draft=none")

    def prompts() -> list[list[int]]:
        return build.prompts(plan, build.tokenizer(plan)).tokens

    def ours() -> Record:
        with progress() as bars:
            found = compare.run(plan, bars).metrics
        return {"ms": found["autoregressive/time_per_output_token_ms"]}

    def transformers(compiled: bool) -> Record:
        dtype, device = plan.config.hardware.dtype, bench.device.type
        sizes, keys = (batch, context + new), {"engine": TransformersEngine(), "compile": compiled}
        spec = PeerSpec(str(plan.target.folder), dtype, device, *sizes, Sampling(), **keys)
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
    """Return the median time of a few runs of the step."""
    samples = []
    for _ in range(2 + bench.sizes.repeats):
        with Stopwatch(bench.device) as watch:
            step()
        samples.append(watch.seconds)
    return median(samples[2:])


def _discard(_: object) -> None:
    """Drop a step's result: steps return nothing."""


def _key(batch: int, context: int, budget: int, gamma: int) -> str:
    return f"{batch} x {context}, budget {budget}, gamma {gamma}"


RUN = {"a": correctness, "b": ceilings, "c": kernels, "d": steps, "e": rounds, "f": real, "g": peers}
