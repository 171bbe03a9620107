"""Draw the pictures of docs/concepts.md and the README, from the cost model and from formulas:
nothing is measured.

python tools/draw_concepts.py           # writes docs/images/concepts-*.png in seconds; needs the extra plots
"""  # noqa: E501

from collections.abc import Callable
from functools import cache
from math import isnan, nan
from pathlib import Path

import pandas
import torch
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

import magicdec
from magicdec.config.omega import omega
from magicdec.costmodel.prediction import Prediction
from magicdec.verification.accept import accept_sampled
from magicdec.verification.sampling import Sampling

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
CONTEXTS = [1000 * 2**i for i in range(8)]  # to 128K
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
LABELS = [f"{context // 1000}K" for context in CONTEXTS]
GAMMAS = range(1, 13)
BARS = {"rot": 0, "width": 0.8, "color": ["#8da0cb", "#e4572e", "#d9d9d9"]}
ALPHA = 0.8  # about what is published for Llama-3.1-8B over a streaming cache of 512 entries
SETTING = (
    f"Llama-3.1-8B on 8 H100s, self-speculation, streaming cache of 512, alpha {ALPHA}; predicted"
)


@cache
def predicted(batch: int, context: int) -> Prediction:
    """Return the cost model's prediction for the setting of all pictures."""
    at = {
        "budget": 512,
        "batch_size": batch,
        "context_len": context,
        "gammas": list(GAMMAS),
        "alpha": ALPHA,
    }
    return magicdec.predict(
        "llama-3.1-8b", "8xh100", **at, overrides=["scenario.critical_batches=[32,256]"]
    )


def decode_step(figure: Figure) -> None:
    """Show what a decode step spends its time on: weights in short contexts, the KV cache in long
    ones.
    """
    for number, batch in enumerate((1, 32), 1):
        axes = figure.add_subplot(1, 2, number)
        times = [predicted(batch, context).best.times.target for context in CONTEXTS]
        parts = {
            "read weights": [t.weights for t in times],
            "read the KV cache": [t.kv for t in times],
        }
        parts["everything else"] = [t.total - t.weights - t.kv for t in times]
        frame = 1e3 * pandas.DataFrame(parts, index=LABELS)
        unit = "ms per decode step (T_T)" if number == 1 else ""
        frame.plot.bar(
            stacked=True, ax=axes, title=f"batch {batch}", xlabel="context", ylabel=unit, **BARS
        )
        axes.set_ylim(0, 1.35 * frame.sum(axis=1).max())
        axes.legend(loc="upper left", frameon=False)


def tokens_per_round(figure: Figure) -> None:
    """Show Omega against gamma, and the speedup that is left of it after paying for the round."""
    left, right = figure.subplots(1, 2)
    tokens = {f"alpha {alpha}": [omega(g, alpha) for g in GAMMAS] for alpha in (0.5, 0.7, 0.8, 0.9)}
    contexts = {f"context {k}K": 1000 * k for k in (1, 4, 16, 64)}
    speedups = {
        name: [at.speedup for at in predicted(64, k).by_gamma] for name, k in contexts.items()
    }
    lines = {"style": "o-", "ms": 3, "colormap": "viridis", "xlabel": "gamma"}
    label = "tokens per round, Omega(gamma, alpha)"
    title = f"what is left of it (batch 64, alpha {ALPHA})"
    pandas.DataFrame(tokens, index=GAMMAS).plot(
        ax=left, ylabel=label, title="what a round yields", **lines
    )
    pandas.DataFrame(speedups, index=GAMMAS).plot(ax=right, ylabel="speedup", title=title, **lines)
    right.axhline(1.0, color="black", lw=0.8)


def where_it_pays(figure: Figure) -> None:
    """Show the speedup at the best gamma over batch and context, with the line of 1x and with
    S*.
    """
    axes = figure.subplots()
    speedups = [
        [speedup_where_it_fits(batch, context) for context in CONTEXTS] for batch in BATCHES
    ]
    image = axes.imshow(speedups, origin="lower", aspect="auto", cmap="RdBu", vmin=0.0, vmax=2.0)
    for row, values in enumerate(speedups):
        for column, value in enumerate(values):
            text, color = f"{value:.2f}", "white" if abs(value - 1) > 0.55 else "black"
            if isnan(value):
                text, color = "no memory", "gray"
            halo = [withStroke(linewidth=3, foreground="white")] if color == "black" else []
            axes.text(
                column,
                row,
                text,
                ha="center",
                va="center",
                fontsize=8,
                color=color,
                path_effects=halo,  # the line of 1x passes behind numbers
            )
    axes.contour(speedups, levels=[1.0], colors="black", linewidths=1.5)
    critical = predicted(64, 32000).critical_context
    axes.set_xticks(range(len(CONTEXTS)), LABELS)
    axes.set_yticks(range(len(BATCHES)), [str(batch) for batch in BATCHES])
    axes.set(xlabel="context", ylabel="batch", title="speedup at the best gamma; the line is 1x")
    if critical:
        at = torch.tensor(critical / CONTEXTS[0]).log2().item()
        axes.axvline(at, color="black", ls=":", lw=1.5)
        axes.text(at + 0.1, 0.45, f"S* = {round(critical, -2):,}", fontsize=9)
    figure.colorbar(image, label="speedup")


def speedup_where_it_fits(batch: int, context: int) -> float:
    """Return the speedup at the best gamma, or NaN where the caches do not fit into the GPUs."""
    found = predicted(batch, context)
    return found.best.speedup if found.fits and found.best.speedup is not None else nan


def rejection(figure: Figure) -> None:
    """Show that rejection sampling keeps the target's distribution."""
    left, right = figure.subplots(1, 2, sharey=True)
    p = torch.tensor([0.42, 0.25, 0.15, 0.1, 0.05, 0.03])
    q = torch.tensor([0.15, 0.45, 0.2, 0.1, 0.08, 0.02])
    said = pandas.DataFrame({"draft q": q, "target p": p})
    said.plot.bar(
        ax=left, title="what each would say", xlabel="token", ylabel="probability", **BARS
    )
    rows = 40_000
    proposed_BG = torch.multinomial(
        q, rows, replacement=True, generator=torch.Generator().manual_seed(0)
    )[:, None]
    by_draft, by_target = q.expand(rows, 1, -1), p.log().expand(rows, 2, -1)
    sampling = Sampling(temperature=1.0, seed=0)
    verdict = accept_sampled(
        proposed_BG, by_draft, by_target, torch.arange(2).expand(rows, 2), sampling
    )
    first_B = verdict.tokens_BT[:, 0]
    parts = {"accepted proposals": 1, "drawn by the target after a rejection": 0}
    counts = {
        name: torch.bincount(first_B[verdict.num_accepted_B == n], minlength=len(p))
        for name, n in parts.items()
    }
    title = f"what is written: {rows:,} rounds of gamma 1"
    (pandas.DataFrame(counts) / rows).plot.bar(
        stacked=True, ax=right, title=title, xlabel="token", **BARS
    )
    right.plot(p, "_", ms=26, mew=2, color="black", label="target p")
    right.legend()


PICTURES: dict[str, tuple[Callable[[Figure], None], tuple[float, float], str]] = {
    "kv-cache": (decode_step, (9, 3.6), SETTING),
    "omega": (tokens_per_round, (9, 3.6), SETTING),
    "where-it-pays": (where_it_pays, (7.5, 4.6), SETTING),
    "lossless": (
        rejection,
        (9, 3.4),
        "accept_sampled of magicdec/verification/accept.py on two made-up distributions",
    ),
}


def main() -> None:
    """Draw all pictures."""
    for name, (draw, size, caption) in PICTURES.items():
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        assert all(axes.has_data() for axes in figure.axes), f"{name} has a blank panel"
        figure.supxlabel(caption, fontsize=7, color="gray")
        figure.savefig(IMAGES / f"concepts-{name}.png", dpi=120)
        print(f"wrote docs/images/concepts-{name}.png")


if __name__ == "__main__":
    main()
