"""Measure what a model costs that runs as transformers' modules.

    python benchmarks/modules.py            # an hour on two idle cores; resumable; writes docs/results/modules-*.csv and the page
    python benchmarks/modules.py --quick    # minutes: small sizes; prints the tables
    python benchmarks/modules.py --smollm2 FOLDER   # the weights of the first part; random ones of its sizes otherwise

The cost: SmolLM2-135M by our own transformer and by transformers' modules, in pairs that alternate,
one step and one prefill of each. The experts: T_T, T_V(gamma) and T_D of a Qwen3-MoE and a gpt-oss
of that size with random weights, over batch and context, and how many experts a pass touches.
Random routers choose nearly uniformly, which touches most.
"""  # noqa: E501

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from page import RESULTS, Cells, setting
from render import PAGES, Row, table, write, write_csv
from transformers import GptOssConfig, LlamaConfig, Qwen3MoeConfig

from magicdec.attention.cpp import CppAttention
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.config.schema import BatchConfig, HardwareConfig, SamplingConfig
from magicdec.costmodel.speedup import omega
from magicdec.engine.native import NativeEngine
from magicdec.models.adapter.load_modules import load, random
from magicdec.models.checkpoint import load as load_native
from magicdec.models.description import describe, read_config
from magicdec.models.kv_cache import KVCache
from magicdec.models.transformer import Transformer
from magicdec.scenarios.profile import time_points

CPU, FP32 = torch.device("cpu"), torch.float32
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "qwen3-moe": Qwen3MoeConfig(
        **SMOLLM2,
        head_dim=64,
        intermediate_size=1536,
        moe_intermediate_size=192,
        num_experts=64,
        num_experts_per_tok=8,
    ),
    "gpt-oss": GptOssConfig(
        **SMOLLM2 | {"num_hidden_layers": 24},
        head_dim=64,
        intermediate_size=576,
        num_local_experts=16,
        num_experts_per_tok=4,
        sliding_window=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
GAMMAS, BUDGET, ALPHA = (1, 2, 3, 5, 8), 256, 0.8


def pairs_of(folder: Path, batches: list[int], contexts: list[int], repeats: int) -> Iterator[Row]:
    """Yield the times of a step, of a verification and of a prefill, of both implementations."""
    models = {"native": native(folder), "modules": as_modules(folder, max(contexts) + 64)}
    for batch in batches:
        for context in contexts:
            for kind, num_new in (("step", 1), ("verification of 4", 4), ("prefill", 128)):
                runs = {
                    name: pass_of(model, batch, context, num_new) for name, model in models.items()
                }
                times = alternating(runs, repeats)
                ratio = median(b / a for a, b in zip(*times.values(), strict=True))
                yield {
                    "pass": kind,
                    "batch": batch,
                    "context": context,
                    **{f"{name}_ms": median(seen) for name, seen in times.items()},
                    "ratio": ratio,
                }


def native(folder: Path) -> Transformer:
    """Return a checkpoint in our own transformer."""
    config = read_config(folder, "native")
    with torch.device("meta"):
        model = Transformer(config, CppAttention())
    model.load_state_dict(load_native(folder, config, FP32, CPU), assign=True)
    return model.eval().requires_grad_(False)


def as_modules(folder: Path, longest: int) -> Transformer:
    """Return a checkpoint as transformers' modules."""
    config: Any = read_config(folder, "transformers")
    return load(folder, config, FP32, CPU, CppAttention(), longest)


def pass_of(model: Transformer, batch: int, context: int, num_new: int) -> Callable[[], None]:
    """Return a pass of so many new tokens behind a context, with the logits of a decoding."""
    cache = KVCache(model.config, batch, context + num_new, FP32, "cpu")
    cache.k_LBKSD.normal_()
    cache.v_LBKSD.normal_()
    tokens_BT = torch.randint(0, model.config.vocab_size, (batch, num_new))

    @torch.inference_mode()
    def run() -> None:
        cache.seqlens_B.fill_(context)
        hidden_BTE = model(tokens_BT, cache)
        model.logits(hidden_BTE[:, -4:])

    return run


def alternating(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of each repeat, in turns that begin with another one each time."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name in list(runs)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            runs[name]()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: seen[1:] for name, seen in times.items()}


def experts_of(name: str, batches: list[int], contexts: list[int], repeats: int) -> Iterator[Row]:
    """Yield T_T, T_D and T_V(gamma), the experts that each touches, and the speedup that follows
    from an alpha of 0.8.
    """
    config: Any = describe(EXPERTS[name].to_dict(), name, "transformers")
    target = random(config, FP32, CPU, CppAttention(), max(contexts) + 64)
    touched = counting(target)
    for batch in batches:
        for context in contexts:
            for gamma in GAMMAS:
                touched.clear()
                [point] = time_points(engine(target, gamma), [(batch, context, gamma)], repeats)
                by_tokens = dict(touched)
                decode, draft, verify, rest = (
                    point[f"time/{part}_ms"]
                    for part in ("target_decode", "draft", "verify", "overhead")
                )
                per_token = (gamma * draft + verify + rest) / omega(gamma, ALPHA)
                yield {
                    "model": name,
                    "batch": batch,
                    "context": context,
                    "gamma": gamma,
                    "target_ms": decode,
                    "draft_ms": draft,
                    "verify_ms": verify,
                    "experts_of_step": by_tokens.get(batch),
                    "experts_of_verification": by_tokens.get(batch * (gamma + 1)),
                    "speedup": decode / per_token,
                }


def counting(target: Any) -> list[tuple[int, float]]:
    """Return a list to which every call of a layer's experts adds its tokens and the share of the
    experts that they choose.
    """
    seen: list[tuple[int, float]] = []

    def note(module: Any, args: tuple[Any, ...]) -> None:
        tokens, chosen = args[0].shape[0], args[1]
        seen.append((tokens, chosen.unique().numel() / module.num_experts))

    modules = target.decoder.modules()
    first = next(m for m in modules if hasattr(m, "num_experts") and hasattr(m, "down_proj"))
    first.register_forward_pre_hook(note)
    return seen


def engine(target: Transformer, gamma: int) -> NativeEngine:
    """Return an engine that speculates over a streaming cache."""
    draft = DRAFTS["self"].facts(gamma=gamma, synthetic_acceptance=ALPHA)
    cache = POLICIES["streaming"].facts(budget=BUDGET, num_sink=4)
    hardware = HardwareConfig("cpu", "cpu", "float32", 1, "auto", False, False)
    batch = BatchConfig(1, 1, 32, 1, 128)
    return NativeEngine(batch, SamplingConfig(ignore_eos=True), draft, cache, hardware, target)


def random_checkpoint(folder: Path) -> Path:
    """Write a Llama with random weights of SmolLM2's sizes."""
    from transformers import AutoModelForCausalLM

    config = LlamaConfig(**SMOLLM2, intermediate_size=1536)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def main() -> None:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; print the tables")
    parser.add_argument("--restart", action="store_true", help="forget the cells measured so far")
    parser.add_argument("--smollm2", type=Path, metavar="FOLDER", help="its checkpoint")
    options = parser.parse_args()
    batches, contexts, repeats = ([1, 8], [1024, 4096], 15)
    if options.quick:
        batches, contexts, repeats = [2], [256], 3
    cells = Cells("modules-quick" if options.quick else "modules", options.restart)
    with tempfile.TemporaryDirectory() as scratch:
        parts: dict[str, Callable[[], Iterator[Row]]] = {
            "cost": lambda: pairs_of(
                options.smollm2 or random_checkpoint(Path(scratch)), batches, contexts, repeats
            )
        }
        for name in EXPERTS:
            parts[name] = lambda name=name: experts_of(name, batches, contexts, repeats)  # type: ignore[misc]
        for name, measure in parts.items():
            if name not in cells:
                cells[name] = [row | {"measured_by": setting()} for row in measure()]
                cells.save()
    experts = [row for name in EXPERTS for row in cells[name]]
    if options.quick:
        print(table(cells["cost"], "pass", "batch", "context", "native_ms:.1f", "ratio:.2f"))
        print(table(experts, "model", "batch", "gamma", "target_ms:.1f", "verify_ms:.1f"))
        return
    write_csv(RESULTS / "modules-cost.csv", cells["cost"])
    write_csv(RESULTS / "modules-experts.csv", experts)
    with suppress(FileNotFoundError):  # a page has figures: its template becomes one with the first
        (PAGES / "modules.jinja").rename(PAGES / "modules.md")
    write("modules")


if __name__ == "__main__":
    main()
