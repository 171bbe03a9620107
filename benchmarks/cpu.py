"""The bundled pair on a CPU: times, speedups, and transformers on the same prompts. Writes docs/results/cpu.md.

    python benchmarks/cpu.py                   # about 15 minutes on two cores; needs an otherwise idle machine
    python benchmarks/cpu.py --quick           # a small corner of the grid, for trying it out; writes nothing

Comparisons are ratios within one run: a shared machine's absolute times drift.
"""

import argparse
import platform
import subprocess
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from peers import MODES, Peer

from magicdec import build
from magicdec.config import compose
from magicdec.decoding.audit import audit
from magicdec.engines.native import NativeEngine, warm_up
from magicdec.measure import memory, metrics
from magicdec.measure.profile import profile_round
from magicdec.tracking.progress import progress

ROOT = Path(__file__).parents[1]
CONTEXTS, BATCHES, GAMMAS = (1024, 2048, 4096, 8192), (1, 4, 8, 16), (2, 4, 6)
NEW_TOKENS, REPEATS = 48, 3
DRAFTS = {"self": ("self", 128), "tiny-draft": ("model", 128)}


def resident_bytes() -> int:
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def engines() -> tuple[build.Plan, dict[str, NativeEngine]]:
    """The bundled target with each of its drafts."""
    plan = build.plan(compose(["draft=model", "cache=streaming", "hardware=cpu", f"batch.generate_len={NEW_TOKENS}"]))
    with progress() as bars:
        engine = build.engine(plan, bars)
    made = {}
    for name, (draft, budget) in DRAFTS.items():
        model = engine.draft_model if draft == "model" else None
        made[name] = replace(engine, draft_name=draft, draft_model=model, budget=budget)
    return plan, made


def prompts_for(plan: build.Plan, batch: int, context: int) -> list[list[int]]:
    """Held-out text, as `launch.py` would cut it."""
    sizes = replace(plan.config.batch, size=batch, context_len=context)
    resolved = replace(plan, config=replace(plan.config, batch=sizes))
    return build.prompts(resolved, build.tokenizer(resolved)).tokens


def measure(engine: NativeEngine, prompts: list[list[int]], gammas: tuple[int, ...]) -> list[dict]:
    """One prefill per gamma; pairs of autoregressive and speculative passes on it."""
    rows = []
    for gamma in gammas:
        batch = replace(engine, gamma=gamma).open(prompts)
        batch.decoder.prefill(engine.prefill_chunk)
        warm_up(batch)
        pairs = [(batch.decoder.generate(), batch.decoder.generate(batch.draft)) for _ in range(REPEATS)]
        speeds = [[metrics.speed_metrics([g], [0.0])["time_per_output_token_ms"] for g in pair] for pair in pairs]
        outcome = audit(batch.decoder, pairs[0][0].tokens, pairs[0][1].tokens)
        rows.append(
            {
                "gamma": gamma,
                "identical": outcome.identical,
                "autoregressive_ms": median(a for a, _ in speeds),
                "speedup": median(a / s for a, s in speeds),
                "tokens": pairs[0][0].tokens,
            }
            | metrics.acceptance_metrics([fast for _, fast in pairs])
            | profile_round(batch, 15)
        )
    return rows


def transformers_rows(peer: Peer, prompts: list[list[int]], ours: dict) -> dict[str, float]:
    """Seconds per token of each cache mode, and whether the tokens agree with ours."""
    result = {}
    for mode in MODES:
        runs = [peer.generate(prompts, NEW_TOKENS, mode) for _ in range(2)]
        result[mode] = min(seconds for _, seconds in runs) * 1e3
        result[f"{mode} agrees"] = runs[0][0] == ours["tokens"]
    return result


def assisted_rows(peer: Peer, draft: Peer, prompts: list[list[int]]) -> dict[str, float]:
    """Transformers' own speculation, batch 1: with the draft model, and prompt lookup."""
    modes = {"assisted": {"assistant_model": draft.model}, "prompt lookup": {"prompt_lookup_num_tokens": 5}}
    return {
        name: min(peer.generate(prompts, NEW_TOKENS, mode="none", **options)[1] for _ in range(2)) * 1e3
        for name, options in modes.items()
    }


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> None:
    """Run the grid and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one context, two batches, one gamma; write nothing")
    quick = parser.parse_args().quick
    contexts, batches, gammas = ((2048,), (1, 4), (4,)) if quick else (CONTEXTS, BATCHES, GAMMAS)
    before = resident_bytes()
    plan, drafts = engines()
    ours_rows, times, against, memories = [], [], [], []
    peer, draft_peer = Peer(str(plan.target.folder)), Peer(str(plan.draft.folder))
    for context in contexts:
        for batch in batches:
            prompts = prompts_for(plan, batch, context)
            base = None
            for name, engine in drafts.items():
                for row in measure(engine, prompts, gammas):
                    base = base or row
                    ours_rows.append([str(context), str(batch), name, str(row["gamma"]), *_speed_cells(row)])
                    times.append(_time_cells(context, batch, name, row))
                    print(*ours_rows[-1], flush=True)
            theirs = transformers_rows(peer, prompts, base)
            assisted = assisted_rows(peer, draft_peer, prompts) if batch == 1 else {}
            against.append(_peer_cells(context, batch, base["autoregressive_ms"], theirs, assisted))
            print(*against[-1], flush=True)
    memories.append(_memory_line(plan, before))
    if not quick:
        _write(ours_rows, times, against)


def _speed_cells(row: dict) -> list[str]:
    return [
        f"{row['autoregressive_ms']:.1f}",
        f"{row['acceptance_rate']:.2f}",
        f"{row['acceptance_length']:.2f}",
        f"**{row['speedup']:.2f}**",
        "yes" if row["identical"] else "NO",
    ]


def _time_cells(context: int, batch: int, name: str, row: dict) -> list[str]:
    keys = ("target_decode_ms", "draft_ms", "verify_ms", "round_ms", "overhead_ms")
    ratio = row["target_decode_ms"] / row["verify_ms"]
    return [str(context), str(batch), name, str(row["gamma"]), *(f"{row[k]:.1f}" for k in keys), f"{ratio:.2f}"]


def _peer_cells(context: int, batch: int, ours: float, theirs: dict, assisted: dict) -> list[str]:
    cells = [str(context), str(batch), f"{ours:.1f}"]
    cells += [f"{theirs[m]:.1f} ({theirs[m] / ours:.1f}x)" for m in MODES]
    cells.append("yes" if all(theirs[f"{m} agrees"] for m in MODES) else "no")
    return cells + [f"{assisted[m]:.1f}" if assisted else "" for m in ("assisted", "prompt lookup")]


def _memory_line(plan: build.Plan, before: int) -> str:
    return f"{(memory.peak_bytes(plan.device) - before) / memory.GIB:.2f}"


def _write(ours: list[list[str]], times: list[list[str]], against: list[list[str]]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    page = f"""# The bundled pair on a CPU

Command: `python benchmarks/cpu.py`, commit {commit.strip()}, {platform.machine()}, {torch.get_num_threads()} threads,
PyTorch {torch.__version__}, fp32, greedy, {NEW_TOKENS} new tokens, medians of {REPEATS} pairs on the same prefill.

## Speedup over our own autoregressive decoding

{table(["context", "batch", "draft", "gamma", "AR ms/token", "rate", "length", "speedup", "lossless"], ours)}
## The parts of a round, in ms

{
        table(
            ["context", "batch", "draft", "gamma", "T_T", "T_D", "T_V", "round", "overhead", "T_T / T_V"],
            times,
        )
    }
## transformers, autoregressive ms per token (and times ours); its own speculation at batch 1

{table(["context", "batch", "ours", *MODES, "same tokens", "assisted", "prompt lookup"], against)}"""
    path = ROOT / "docs" / "results" / "cpu.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
