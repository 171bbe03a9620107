"""The parts of benchmarks/gpu.py: each yields its points, in the order of what matters most."""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from gpu_bench import Bench, cell_name
from gpu_checks import LARGE_S, correct, doctor, ranks, tests
from gpu_profile import profiled, static_cell
from gpu_store import Point, Record

from magicdec.attention import backends
from magicdec.attention.base import Attention, Shape
from magicdec.config.registry import BACKENDS, POLICIES
from magicdec.costmodel.roofline import step_time
from magicdec.costmodel.speedup import speedup
from magicdec.decoding.timers import Stopwatch
from magicdec.engine.graphs import Captures, Step
from magicdec.errors import UserError
from magicdec.measure import memory, metrics
from magicdec.measure.ceilings import fastest_s, matmul_rate
from magicdec.measure.profile import profile_round
from magicdec.planning import fits
from magicdec.units import GIB
from magicdec.verification.sampling import probabilities

KERNELS = {"llama-3.1-8b": (32, 8, 128), "llama-2-7b": (32, 32, 128)}  # query heads, KV heads, head dim
EXPECTED = ((0.80, 512), (0.89, 2049))  # alpha, budget: what the MagicDec paper reports for StreamingLLM and SnapKV
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
    """Return the time to move so many bytes at the measured copy bandwidth, as a share of `seconds`."""
    copied = bench.store.points("ceilings").get("ceilings", {}).get("copy_gbs")
    return copied and num_bytes / seconds / (copied * 1e9)


def cells(bench: Bench) -> Iterator[Point]:
    """Find how many rows this card holds."""
    yield Point("cells", "rows", lambda: {"cells": bench.fitted()})


def steps(bench: Bench) -> Iterator[Point]:
    """Time the steps of the large model, next to their prediction: every cell, then every budget and gamma."""
    (budget, *budgets), (gamma, *gammas) = bench.sizes.budgets, bench.sizes.gammas
    settings = [(budget, gamma), *((other, gamma) for other in budgets), *((budget, other) for other in gammas)]
    for one in settings:
        for cell in bench.cells:
            yield Point("steps", cell_name(*cell, *one), partial(_steps, bench, *cell, *one), LARGE_S)


def _steps(bench: Bench, batch: int, context: int, budget: int, gamma: int) -> Record:
    engine = bench.engine  # load it before the peak is reset: the peak is that of the steps
    peak = memory.Peak(bench.device)
    opened = bench.open(batch, context, budget, gamma, 0.8)
    times = profile_round(opened, bench.sizes.repeats)
    opened.close()
    plan, weights = bench.large(batch, context, budget, gamma), engine.target.step_weight_bytes
    kv = memory.kv_bytes(engine.target.config, batch * context, bench.dtype)
    draft_kv = memory.kv_bytes(engine.target.config, batch * min(budget, context), bench.dtype)
    moved = {"target_decode": weights + kv, "verify": weights + kv, "draft": weights + draft_kv}
    ratios = {f"{part}_of_copy": of_copy(bench, size, times[f"{part}_ms"] / 1e3) for part, size in moved.items()}
    predicted = bench.predicted(plan, gamma)
    names = [name for name in ("target_decode_ms", "draft_ms", "verify_ms", "round_ms") if predicted]
    # The prefill is simulated here: the estimate has its activations, which the peak has not.
    estimated = fits.estimate(plan, batch, context).total / GIB
    sizes = {"peak_gib": peak.num_bytes / GIB, "estimated_with_prefill_gib": estimated}
    cell = {"batch": batch, "context": context, "budget": budget, "gamma": gamma}
    return cell | times | {f"predicted_{name}": predicted[f"predicted/{name}"] for name in names} | ratios | sizes


def profile(bench: Bench) -> Iterator[Point]:
    """Profile a round of the predicted cell, kernel by kernel."""
    cell, _ = static_cell(bench)
    yield Point("profile", cell_name(*cell), partial(profiled, bench), LARGE_S)


def prefill(bench: Bench) -> Iterator[Point]:
    """Prefill the large model, once."""
    (batch, context), budget, gamma = bench.sizes.prefill, bench.sizes.budgets[0], bench.sizes.gammas[0]

    def measured() -> Record:
        engine, generator = bench.engine, torch.Generator().manual_seed(0)
        prompts = torch.randint(0, engine.target.config.vocab_size, (batch, context), generator=generator).tolist()
        opened = engine.open(prompts)
        opened.decoder.rehearse_prefill(engine.prefill_chunk)
        seconds = opened.decoder.prefill(engine.prefill_chunk)
        opened.decoder.state.check_finite("in the prefill")
        opened.close()
        c = engine.target.config
        layers = sum(weight.numel() for weight in engine.target.layers.parameters())
        flops = 2 * layers * batch * context + 2 * c.num_layers * c.num_heads * c.head_dim * batch * context**2
        rate = bench.store.points("ceilings").get("ceilings", {}).get("matmul_tflops")
        achieved = flops / seconds / 1e12
        setup, chunk = bench.setup(bench.large(batch, context, budget, gamma)), engine.prefill_chunk
        step = setup and setup.target_pass._replace(query_tokens=chunk, cached_tokens=context / 2, chooses=False)
        predicted = step and step_time(step, setup.hardware).total * context / chunk
        ratios = {"tflops": achieved, "of_matmul": rate and achieved / rate}
        return {"s": seconds, "predicted_s": predicted, "tokens_per_s": batch * context / seconds} | ratios

    yield Point("prefill", f"{batch} x {context}", measured, LARGE_S)


def rounds(bench: Bench) -> Iterator[Point]:
    """Measure the speedup at a synthetic acceptance, next to the formula's over the measured steps."""
    for alpha, budget in EXPECTED:
        budget = budget if budget in bench.sizes.budgets else bench.sizes.budgets[-1]
        for cell in bench.cells:
            key = f"{cell_name(*cell, budget)}, alpha {alpha}"
            yield Point("rounds", key, partial(_rounds, bench, *cell, budget, alpha), LARGE_S)


def _rounds(bench: Bench, batch: int, context: int, budget: int, alpha: float) -> Record:
    formula = {g: found for g in bench.sizes.gammas if (found := _formula(bench, batch, context, budget, alpha, g))}
    if not formula:
        raise UserError("there are no times of this cell's steps")
    gamma = max(formula, key=formula.__getitem__)
    opened = bench.open(batch, context, budget, gamma, alpha)
    pairs = [(opened.decoder.generate(), opened.decoder.generate(opened.draft)) for _ in range(2)]
    opened.close()
    tpots = [[metrics.time_per_output_token_ms(metrics.row_times(g, 0.0)) for g in pair] for pair in pairs]
    measured = median(plain / fast for plain, fast in tpots)
    got = metrics.acceptance_metrics([fast for _, fast in pairs])["alpha"]
    drawn = _formula(bench, batch, context, budget, float(got or 0.0), gamma)  # what was drawn is not quite alpha
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


def _formula(bench: Bench, batch: int, context: int, budget: int, alpha: float, gamma: int) -> float:
    """Return the formula's speedup from the measured steps: T_D at this budget, T_T and T_V at any; 0 without them."""
    known = {key: point for key, point in bench.store.points("steps").items() if "verify_ms" in point}
    drafts = [p["draft_ms"] for key, p in known.items() if key.startswith(f"{cell_name(batch, context, budget)},")]
    cell = [(key, p) for key, p in known.items() if key.startswith(f"{cell_name(batch, context)},")]
    others = [p for key, p in cell if key.endswith(f"gamma {gamma}")]
    if not drafts or not others:
        return 0.0
    decode, verify = (median(p[name] for p in others) for name in ("target_decode_ms", "verify_ms"))
    return speedup(gamma, alpha, decode, median(drafts), verify)


def policies(bench: Bench) -> Iterator[Point]:
    """Time the rounds of every policy at the same budget, next to their prediction."""
    (batch, context), budget, gamma = bench.cells[0], bench.sizes.budgets[0], bench.sizes.gammas[0]
    batch = max(1, int(bench.sizes.policy_rows * batch))

    def measured(policy: str) -> Record:
        opened = bench.open(batch, context, budget, gamma, 0.8, policy=policy)
        times = profile_round(opened, bench.sizes.repeats)
        opened.close()
        predicted = bench.predicted(bench.large(batch, context, budget, gamma, policy), gamma)
        names = [name for name in ("draft_ms", "verify_ms", "round_ms") if predicted]
        cell = {"policy": policy, "batch": batch, "context": context, "budget": budget, "gamma": gamma}
        return cell | times | {f"predicted_{name}": predicted[f"predicted/{name}"] for name in names}

    for policy in sorted(POLICIES, key="h2o".__eq__):  # it selects for seconds
        yield Point("policies", f"{policy}, {cell_name(batch, context, budget, gamma)}", partial(measured, policy))


def sampling(bench: Bench) -> Iterator[Point]:
    """Time rounds that sample next to greedy ones, and one truncation."""
    cell = (*bench.cells[0], bench.sizes.budgets[0], bench.sizes.gammas[0])

    def measured() -> Record:
        times = {}
        for name, chosen in (("greedy", None), ("sampled", bench.sizes.sampling)):
            opened = bench.open(*cell, None, chosen)
            times[f"{name}_round_ms"] = profile_round(opened, bench.sizes.repeats)["round_ms"]
            opened.close()
        logits = torch.randn(cell[0], 1, bench.engine.target.config.vocab_size, dtype=bench.dtype, device=bench.device)
        truncation = Step(lambda: _discard(probabilities(logits, bench.sizes.sampling)), _captures(bench))
        return times | {"truncation_ms": 1e3 * _seconds(truncation, bench)}

    yield Point("sampling", cell_name(*cell), measured, LARGE_S)


def kernels(bench: Bench) -> Iterator[Point]:
    """Time one layer's attention by each usable backend, next to copying as many bytes."""
    names = backends.usable(bench.device, bench.dtype, [128])
    for model in KERNELS:
        for context in bench.sizes.kernel_contexts:
            for tokens in bench.sizes.kernel_tokens:
                for name in names:
                    attend = partial(_attention, bench, name, model, context, tokens)
                    yield Point("attention", f"{model} {context} T={tokens} {name}", attend)


def _attention(bench: Bench, name: str, model: str, S: int, T: int) -> Record:
    H, K, D = KERNELS[model]
    attention: Attention = BACKENDS[name].work()
    element = bench.dtype.itemsize
    rows = max(1, bench.sizes.kernel_bytes // (2 * K * S * D * element))
    k, v = (torch.randn(rows, K, S, D, dtype=bench.dtype, device=bench.device) for _ in range(2))
    q = torch.randn(rows, T, H, D, dtype=bench.dtype, device=bench.device)
    seqlens = torch.full((rows,), S, dtype=torch.int32, device=bench.device)
    plan = attention.plan(seqlens, Shape(T, S, H // K, bench.dtype), None)
    captures = _captures(bench) if BACKENDS[name].facts.captured else None
    seconds = _seconds(Step(lambda: _discard(attention.attend(q, k, v, plan)), captures), bench)
    cell = {"model": model, "context": S, "tokens": T, "backend": name, "rows": rows}
    return cell | {"ms": 1e3 * seconds, "of_copy": of_copy(bench, 2 * k.numel() * element, seconds)}


def pair(bench: Bench) -> Iterator[Point]:
    """Run the bundled pair, prefilled and measured as by `launch.py`, with its real acceptance."""
    names = ("speedup", "predicted/speedup", "speedup_wall", "acceptance_length", "alpha", "lossless/identical")
    names += ("lossless/max_logit_gap", "autoregressive/time_per_output_token_ms", "memory/peak_gib")
    names += ("memory/estimated_gib",)

    def measured(batch: int) -> Record:
        sizes = [f"batch.size={batch}", f"batch.context_len={bench.sizes.pair_context}"]
        found = bench.run("scenario.repeats=2", *sizes)
        return {"batch": batch, "context": bench.sizes.pair_context} | {name: found.get(name) for name in names}

    for batch in bench.sizes.pair_batches:
        yield Point("pair", f"{batch} x {bench.sizes.pair_context}", partial(measured, batch))


def peers(bench: Bench) -> Iterator[Point]:
    """Decode the same prompts with the same checkpoint in transformers, autoregressively."""
    batch, context = bench.sizes.pair_batches[-2], bench.sizes.pair_context // 2
    sizes = [f"batch.size={batch}", f"batch.context_len={context}", "draft=none", "scenario.repeats=3"]
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
    yield Point("peers", "importable", lambda: {name: importlib.util.find_spec(name) is not None for name in PEERS})


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


# What matters most comes first: each part with its title on the page.
PARTS: dict[str, tuple[str, Callable[[Bench], Iterator[Point]]]] = {
    "doctor": ("The machine", doctor),
    "correct": ("Correctness, on a reduced matrix", correct),
    "ceilings": ("Ceilings of this card", ceilings),
    "cells": ("Rows that fit", cells),
    "profile": ("A round, kernel by kernel, next to [its prediction](../predictions/gpu.md)", profile),
    "prefill": ("Prefill of Llama-3.1-8B, random weights", prefill),
    "steps": (f"Steps of Llama-3.1-8B, random weights; moving what they must {COPIED}", steps),
    "rounds": ("Speedup at a SYNTHETIC acceptance, the formula's value from the steps, and the predicted one", rounds),
    "sampling": ("Rounds that sample", sampling),
    "policies": ("Rounds of each cache policy", policies),
    "ranks": ("All GPUs together", ranks),
    "attention": (f"Attention of one layer; reading K and V once {COPIED}", kernels),
    "pair": ("The bundled pair, real acceptance", pair),
    "peers": ("Peers: the bundled target autoregressively, ms per token", peers),
    "tests": ("All tests that need a GPU", tests),
}
