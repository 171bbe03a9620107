"""The parts of benchmarks/gpu.py: each yields its points, in the order of what matters most."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import gpu_kernels
import torch
from gpu_bench import Bench, cell_name
from gpu_checks import LARGE_S, correct, doctor, ranks, serving, tests
from gpu_drafts import authors, checks, kernels, policies, profile, variants
from gpu_kernels import Layer
from gpu_store import Point, Record

from magicdec.attention import backends
from magicdec.config.registry import BACKENDS
from magicdec.costmodel.roofline import step_time
from magicdec.costmodel.speedup import speedup
from magicdec.costmodel.targets import architecture
from magicdec.errors import UserError
from magicdec.measure import memory_use, metrics
from magicdec.measure.ceilings import fastest_s, matmul_rate
from magicdec.measure.round_profile import profile_round
from magicdec.planning import fits
from magicdec.units import GIB
from magicdec.verification.sampling import probabilities

MODELS = ("llama-3.1-8b", "llama-2-7b-32k")  # with 8 and with 32 KV heads
# Alpha, budget: what the MagicDec paper reports for StreamingLLM and SnapKV.
EXPECTED = ((0.80, 512), (0.89, 2049))
COPIED = "at the copy bandwidth, as a part of the time"
PEERS = ("vllm", "sglang", "flash_attn", "flash_attn_interface", "flashinfer")


def ceilings(bench: Bench) -> Iterator[Point]:
    """Measure the copy bandwidth and the matmul rate."""

    def measured() -> Record:
        source = torch.ones(bench.sizes.ceiling_bytes // 4, device=bench.device)
        copy = torch.empty_like(source)
        seconds = fastest_s(lambda: copy.copy_(source), bench.device)
        rate = matmul_rate(bench.device, bench.dtype, bench.sizes.matmul)
        return {"copy_gbs": 2 * source.nbytes / seconds / 1e9, "matmul_tflops": rate / 1e12}

    yield Point("ceilings", "ceilings", measured)


def of_copy(bench: Bench, num_bytes: float, seconds: float) -> float | None:
    """Return the time to move so many bytes at the measured copy bandwidth, as a share of
    `seconds`.
    """
    copied = bench.store.points("ceilings").get("ceilings", {}).get("copy_gbs")
    return copied and num_bytes / seconds / (copied * 1e9)


def cells(bench: Bench) -> Iterator[Point]:
    """Find how many rows this card holds."""
    yield Point("cells", "rows", lambda: {"cells": bench.fitted()})


def steps(bench: Bench) -> Iterator[Point]:
    """Time the steps of the large model, next to their prediction: every cell, then every budget
    and gamma.
    """
    (budget, *budgets), (gamma, *gammas) = bench.sizes.budgets, bench.sizes.gammas
    settings = [
        (budget, gamma),
        *((other, gamma) for other in budgets),
        *((budget, other) for other in gammas),
    ]
    for one in settings:
        for cell in bench.cells:
            yield Point(
                "steps", cell_name(*cell, *one), partial(_steps, bench, *cell, *one), LARGE_S
            )


def _steps(bench: Bench, batch: int, context: int, budget: int, gamma: int) -> Record:
    engine = bench.engine  # load it before the peak is reset: the peak is that of the steps
    peak = memory_use.Peak(bench.device)
    opened = bench.open(batch, context, budget, gamma, 0.8)
    times = profile_round(opened, bench.sizes.repeats)
    opened.close()
    plan = bench.large(batch, context, budget, gamma)
    weights = engine.target.step_weight_bytes(batch)
    kv = memory_use.kv_bytes(engine.target.config, batch * context, bench.dtype)
    draft_kv = memory_use.kv_bytes(engine.target.config, batch * min(budget, context), bench.dtype)
    moved = {"target_decode": weights + kv, "verify": weights + kv, "draft": weights + draft_kv}
    ratios = {
        f"{part}_of_copy": of_copy(bench, size, times[f"{part}_ms"] / 1e3)
        for part, size in moved.items()
    }
    predicted = bench.predicted(plan, gamma)
    names = [
        name for name in ("target_decode_ms", "draft_ms", "verify_ms", "round_ms") if predicted
    ]
    # The prefill is simulated here: the estimate has its activations, which the peak has not.
    estimated = fits.estimate(plan, batch, context).total / GIB
    sizes = {"peak_gib": peak.num_bytes / GIB, "estimated_with_prefill_gib": estimated}
    cell = {"batch": batch, "context": context, "budget": budget, "gamma": gamma}
    return (
        cell
        | times
        | {f"predicted_{name}": predicted[f"predicted/{name}"] for name in names}
        | ratios
        | sizes
    )


def prefill(bench: Bench) -> Iterator[Point]:
    """Prefill the large model in long and in short passes, by the usual attention and by
    PyTorch's.
    """
    batch, context = bench.sizes.prefill
    for attention in ("", "varlen") if bench.device.type == "cuda" else ("",):
        for tokens in bench.sizes.pass_tokens:
            name = f"{batch} x {context}, passes of {tokens}"
            name += f", {attention}" if attention else ""
            yield Point("prefill", name, partial(_prefilled, bench, tokens, attention), LARGE_S)


def _prefilled(bench: Bench, tokens: int, attention: str) -> Record:
    """Prefill once. Raise UserError where this attention cannot be used."""
    (batch, context), target = bench.sizes.prefill, bench.engine.target
    c, usual, chunk = target.config, target.attention, min(context, max(1, tokens // batch))
    if attention:
        backends.choose(attention, bench.device, bench.dtype, [c.head_dim])
        target.attention = BACKENDS[attention].work()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, c.vocab_size, (batch, context), generator=generator).tolist()
    opened = bench.engine.open(prompts)
    try:
        opened.decoder.rehearse_prefill(chunk)
        seconds = opened.decoder.prefill(chunk)
    finally:
        target.attention = usual
    opened.decoder.state.check_finite("in the prefill")
    opened.close()
    layers = sum(weight.numel() for weight in target.layers.parameters())
    flops = (
        2 * layers * batch * context
        + 2 * c.num_layers * c.num_heads * c.head_dim * batch * context**2
    )
    rate = bench.store.points("ceilings").get("ceilings", {}).get("matmul_tflops")
    achieved = flops / seconds / 1e12
    setup = bench.setup(bench.large(batch, context, bench.sizes.budgets[0], bench.sizes.gammas[0]))
    step = setup and setup.target_pass._replace(
        query_tokens=chunk, cached_tokens=context / 2, chooses=False
    )
    predicted = step and step_time(step, setup.hardware).total * context / chunk
    return {
        "pass_tokens": chunk * batch,
        "attention": attention or "usual",
        "s": seconds,
        "predicted_s": predicted,
        "tokens_per_s": batch * context / seconds,
        "tflops": achieved,
        "of_matmul": rate and achieved / rate,
    }


def rounds(bench: Bench) -> Iterator[Point]:
    """Measure the speedup at a synthetic acceptance, next to the formula's over the measured
    steps.
    """
    for alpha, budget in EXPECTED:
        budget = budget if budget in bench.sizes.budgets else bench.sizes.budgets[-1]
        for cell in bench.cells:
            key = f"{cell_name(*cell, budget)}, alpha {alpha}"
            yield Point("rounds", key, partial(_rounds, bench, *cell, budget, alpha), LARGE_S)


def _rounds(bench: Bench, batch: int, context: int, budget: int, alpha: float) -> Record:
    formula = {
        g: found
        for g in bench.sizes.gammas
        if (found := _formula(bench, batch, context, budget, alpha, g))
    }
    if not formula:
        raise UserError("there are no times of this cell's steps")
    gamma = max(formula, key=formula.__getitem__)
    opened = bench.open(batch, context, budget, gamma, alpha)
    pairs = [(opened.decoder.generate(), opened.decoder.generate(opened.draft)) for _ in range(2)]
    opened.close()
    tpots = [
        [metrics.time_per_output_token_ms(metrics.row_times(g, 0.0)) for g in pair]
        for pair in pairs
    ]
    measured = median(plain / fast for plain, fast in tpots)
    got = metrics.acceptance_metrics([fast for _, fast in pairs])["alpha"]
    # What was drawn is not quite alpha.
    drawn = _formula(bench, batch, context, budget, float(got or 0.0), gamma)
    predicted = bench.predicted(bench.large(batch, context, budget, gamma), gamma, alpha)
    return {
        "batch": batch,
        "context": context,
        "budget": budget,
        "expected_alpha": alpha,
        "gamma": gamma,
        "speedup": measured,
        "formula": formula[gamma],
        "predicted_speedup": predicted.get("predicted/speedup"),
        "alpha": got,
        "of_formula": measured / drawn,
    }


def _formula(
    bench: Bench, batch: int, context: int, budget: int, alpha: float, gamma: int
) -> float:
    """Return the formula's speedup from the measured steps: T_D at this budget, T_T and T_V at any;
    0 without them.
    """
    known = {
        key: point for key, point in bench.store.points("steps").items() if "verify_ms" in point
    }
    drafts = [
        p["draft_ms"]
        for key, p in known.items()
        if key.startswith(f"{cell_name(batch, context, budget)},")
    ]
    cell = [(key, p) for key, p in known.items() if key.startswith(f"{cell_name(batch, context)},")]
    others = [p for key, p in cell if key.endswith(f"gamma {gamma}")]
    if not drafts or not others:
        return 0.0
    decode, verify = (median(p[name] for p in others) for name in ("target_decode_ms", "verify_ms"))
    return speedup(gamma, alpha, decode, median(drafts), verify)


def sampling(bench: Bench) -> Iterator[Point]:
    """Time rounds that sample next to greedy ones, and one truncation."""
    cell = (*bench.cells[0], bench.sizes.budgets[0], bench.sizes.gammas[0])

    def measured() -> Record:
        times = {}
        for name, chosen in (("greedy", None), ("sampled", bench.sizes.sampling)):
            opened = bench.open(*cell, None, chosen)
            times[f"{name}_round_ms"] = profile_round(opened, bench.sizes.repeats)["round_ms"]
            opened.close()
        logits = torch.randn(
            cell[0],
            1,
            bench.engine.target.config.vocab_size,
            dtype=bench.dtype,
            device=bench.device,
        )
        truncation = partial(probabilities, logits, bench.sizes.sampling)
        seconds = gpu_kernels.seconds(truncation, bench.device, bench.sizes.repeats)
        return times | {"truncation_ms": 1e3 * seconds}

    yield Point("sampling", cell_name(*cell), measured, LARGE_S)


def attention(bench: Bench) -> Iterator[Point]:
    """Time one layer's attention by each usable backend, next to copying as many bytes."""
    names = backends.usable(bench.device, bench.dtype, [128])
    for model in MODELS:
        for context in bench.sizes.kernel_contexts:
            for tokens in bench.sizes.kernel_tokens:
                for name in names:
                    attend = partial(_attention, bench, name, model, context, tokens)
                    yield Point("attention", f"{model} {context} T={tokens} {name}", attend)


def _attention(bench: Bench, name: str, model: str, context: int, tokens: int) -> Record:
    one = Layer(
        bench.device, bench.dtype, 1, context, model=replace(architecture(model), num_layers=1)
    )
    sizes = replace(one, rows=max(1, bench.sizes.kernel_bytes // one.kv_bytes))
    attend = gpu_kernels.attending(sizes, sizes.target(), sizes.queries(tokens), name)
    captured = BACKENDS[name].facts.captured
    seconds = gpu_kernels.seconds(attend, bench.device, bench.sizes.repeats, captured)
    cell = {
        "model": model,
        "context": context,
        "tokens": tokens,
        "backend": name,
        "rows": sizes.rows,
    }
    return cell | {"ms": 1e3 * seconds, "of_copy": of_copy(bench, sizes.kv_bytes, seconds)}


def pair(bench: Bench) -> Iterator[Point]:
    """Run the bundled pair, prefilled and measured as by `launch.py`, with its real acceptance."""
    names = (
        "speedup",
        "predicted/speedup",
        "speedup_wall",
        "acceptance_length",
        "alpha",
        "lossless/identical",
    )
    names += (
        "lossless/max_logit_gap",
        "autoregressive/time_per_output_token_ms",
        "memory/peak_gib",
    )
    names += ("memory/estimated_gib",)

    def measured(batch: int) -> Record:
        sizes = [f"batch.size={batch}", f"batch.context_len={bench.sizes.pair_context}"]
        found = bench.run("scenario.repeats=2", *sizes)
        return {"batch": batch, "context": bench.sizes.pair_context} | {
            name: found.get(name) for name in names
        }

    for batch in bench.sizes.pair_batches:
        yield Point("pair", f"{batch} x {bench.sizes.pair_context}", partial(measured, batch))


def peers(bench: Bench) -> Iterator[Point]:
    """Decode the same prompts with the same checkpoint in transformers, autoregressively."""
    batch, context = bench.sizes.pair_batches[-2], bench.sizes.pair_context // 2
    sizes = [
        f"batch.size={batch}",
        f"batch.context_len={context}",
        "draft=none",
        "scenario.repeats=3",
    ]
    compiled = f"hardware.compile={bench.device.type == 'cuda'}"
    engines = {
        "ours": [],
        "transformers, static cache": ["engine=transformers", "hardware.compile=false"],
        "transformers, static cache, compiled": ["engine=transformers", compiled],
    }

    def measured(own: list[str]) -> Record:
        return {"ms": bench.run(*sizes, *own)["autoregressive/time_per_output_token_ms"]}

    for engine, own in engines.items():
        yield Point("peers", f"{engine}, {batch} x {context}", partial(measured, own))
    yield Point(
        "peers",
        "importable",
        lambda: {name: importlib.util.find_spec(name) is not None for name in PEERS},
    )


@dataclass(frozen=True)
class Part:
    """A part of the benchmark: its title on the page, the minutes that it takes on an H200, and its
    points.
    """

    title: str
    minutes: float
    points: Callable[[Bench], Iterator[Point]]


STATIC = "A round, kernel by kernel, next to [its prediction](../predictions/gpu.md)"
# In the order of what is worth most. The minutes of those that have not yet run are estimates.
PARTS = {
    "doctor": Part("The machine", 1, doctor),
    "checks": Part("Each kernel against its reference", 2, checks),
    "ceilings": Part("Ceilings of this card", 0.2, ceilings),
    "cells": Part("Rows that fit", 0.1, cells),
    "kernels": Part("Each kernel next to its rivals, microseconds", 2, kernels),
    "policies": Part("Rounds of each cache policy and of quantized drafts", 4, policies),
    "profile": Part(STATIC, 2, profile),
    "variants": Part("The same steps, compiled in other ways", 4, variants),
    "authors": Part("Steps of the MagicDec authors' own software", 2, authors),
    "steps": Part(
        f"Steps of Llama-3.1-8B, random weights; moving what they must {COPIED}", 4, steps
    ),
    "sampling": Part("Rounds that sample", 0.5, sampling),
    "serving": Part("The bundled pair served: a smoke run", 1, serving),
    "correct": Part("Correctness, on a reduced matrix", 3, correct),
    "rounds": Part(
        "Speedup at a SYNTHETIC acceptance, the formula's value from the steps, and the"
        " predicted one",
        2,
        rounds,
    ),
    "prefill": Part("Prefill of Llama-3.1-8B, random weights", 1, prefill),
    "attention": Part(f"Attention of one layer; reading K and V once {COPIED}", 2, attention),
    "ranks": Part("All GPUs together", 2, ranks),
    "pair": Part("The bundled pair, real acceptance", 2, pair),
    "peers": Part("Peers: the bundled target autoregressively, ms per token", 2, peers),
    "tests": Part("All tests that need a GPU", 10, tests),
}
