"""Measure how much of the attention each policy retains, layer by layer: why some are accepted more
often.

    python benchmarks/strategies_retained.py            # minutes; writes docs/results/strategies_retained.csv

The first decoding step of every row attends to everything; each choice of entries is held against
that attention. Mean over rows and KV heads. `pages` is the best that pages of the same size could
do.
"""  # noqa: E501

from dataclasses import replace
from statistics import fmean
from typing import Any

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
import render
import torch
from page import RESULTS, setting
from render import write_csv
from torch import Tensor

from magicdec.attention.base import Attention
from magicdec.cache.observed import ReplayedCache
from magicdec.config.load import compose
from magicdec.engine.decoder import Decoder
from magicdec.engine.native import NativeEngine
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.tracking.progress import progress

SIZES = ["batch.size=8", "batch.context_len=8192", "hardware=cpu"]
BUDGETS = (64, 128, 256, 512)
# With their page sizes.
POLICIES = (("topk", 0), ("quest", 4), ("quest", 8), ("quest", 16), ("verify_guided", 0))
NUM_SINK = 4


class Queries(ReplayedCache):
    """A cache that records the queries of a forward pass and the attention (B, K, S) that they pay,
    layer by layer.
    """

    def attend(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        """See KVCache.attend."""
        out_BTHD = super().attend(layer, q_BTHD, attention, plan)
        self.queries = [*getattr(self, "queries", []), q_BTHD]
        return out_BTHD


@torch.inference_mode()
def retained(engine: NativeEngine, decoder: Decoder, budget: int) -> dict[str, list[float]]:
    """Return the share of the attention in each layer, for every policy."""
    decoder.restart()
    seen = Queries(decoder.cache)
    decoder.target(decoder.state.recent_BT(1), seen)
    context = decoder.state.max_prompt_len
    scores_LBKS = seen.scores_LBKS[..., :context]
    heads = scores_LBKS.shape[1:3]
    window = torch.cat((torch.arange(NUM_SINK), torch.arange(context - budget + NUM_SINK, context)))
    slots = {"streaming": [window.expand(*heads, -1)] * len(scores_LBKS)}
    for policy, size in POLICIES:
        pages = [f"cache.page_size={size}"] if size else []
        cache = compose([f"cache={policy}", f"cache.budget={budget}", *pages]).cache
        draft = replace(engine, cache=cache).draft_for(decoder)
        draft.prefill(decoder.state, lambda _: None)
        plans = draft.cache.plan(decoder.target.attention, 1, torch.float32)
        name = f"{policy}, pages of {size}" if size else policy
        slots[name] = [
            draft.cache.select(layer, q_BTHD, decoder.target.attention, plan)
            for layer, (q_BTHD, plan) in enumerate(zip(seen.queries, plans, strict=True))
        ]
        if size:
            pages_LBKP = scores_LBKS.unflatten(-1, (-1, size)).sum(-1)
            first = pages_LBKP.topk(budget // size, dim=-1).indices[..., None] * size
            slots[f"best pages of {size}"] = list((first + torch.arange(size)).flatten(-2))
    return {
        name: [share(*pair) for pair in zip(scores_LBKS, chosen, strict=True)]
        for name, chosen in slots.items()
    }


def share(scores_BKS: Tensor, slots_BKN: Tensor) -> float:
    """Return the share of the attention that these slots receive."""
    read = scores_BKS.gather(-1, slots_BKN.clamp(min=0)).masked_fill(slots_BKN < 0, 0.0)
    return float((read.sum(-1) / scores_BKS.sum(-1)).mean())


def main() -> None:
    """Measure and write."""
    plan, rows = resolve(compose(["cache=quest", f"cache.budget={max(BUDGETS)}", *SIZES])), []
    with progress() as bars:
        engine = build.engine(plan, bars)
    decoder = engine.open(build.prompts(plan, build.tokenizer(plan)).tokens).decoder
    decoder.prefill(engine.prefill_chunk)
    for budget in BUDGETS:
        for name, layers in retained(engine, decoder, budget).items():
            shares = {f"layer_{i}": round(value, 4) for i, value in enumerate(layers)}
            row = {
                "data": "stdlib",
                "choice": name,
                "budget": budget,
                "mean": round(fmean(layers), 4),
            } | shares
            rows.append(row | {"measured_by": f"{setting()}, attention={plan.config.attention}"})
            print(*rows[-1].values(), flush=True)
    write_csv(RESULTS / "strategies_retained.csv", rows)
    render.write("strategies")


if __name__ == "__main__":
    main()
