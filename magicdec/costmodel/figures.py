"""The MagicDec paper's figures for any target and machine, predicted: needs matplotlib (the extra `plots`).

Speedup against batch for several contexts; T_D / T_T and T_V / T_T against batch; arithmetic intensity against
context, with each GPU's ridge.
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicdec.costmodel.acceptance import Curves
from magicdec.costmodel.hardware import DEVICES
from magicdec.costmodel.predict import GAMMAS, predict
from magicdec.costmodel.roofline import Pass, arithmetic_intensity
from magicdec.costmodel.round import Setup, round_times
from magicdec.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (1000, 4000, 8000, 16000, 32000, 64000, 100000)
INTENSITY_BATCHES = (1, 8, 64, 256)


def draw(
    setup: Setup, folder: Path, gamma: int = 3, alpha: float | None = None, curves: Curves | None = None
) -> list[Path]:
    """Write the three figures as PNG files into `folder`; returns their paths.

    Raises UserError without matplotlib. Contexts of which no acceptance is known are left out of the first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{setup.target_name}, {_draft(setup)}, {setup.policy} {setup.budget:,}, {setup.hardware.name}"
    # The jobs of a multirun, which share the folder, differ in name where they differ in what they draw.
    of = f"{setup.target_name}_{setup.draft.name}_{setup.policy}-{setup.budget}_{setup.hardware.name}"
    ratios, intensity = folder / f"ratios_{of}_gamma-{gamma}.png", folder / f"intensity_{setup.target_name}.png"
    return [
        _save(folder / f"speedup_{of}.png", title, 1, lambda axes: _speedup(axes[0], setup, alpha, curves)),
        _save(ratios, f"{title}, gamma {gamma}", 2, lambda axes: _ratios(axes, setup, gamma)),
        _save(intensity, f"{setup.target_name}, decoding", 1, lambda axes: _intensity(axes[0], setup)),
    ]


def _speedup(axes: "Axes", setup: Setup, alpha: float | None, curves: Curves | None) -> None:
    """Speedup at the best gamma."""
    contexts = _contexts(setup)
    for color, context in zip(_colors(len(contexts)), contexts, strict=True):
        found = [predict(setup.at(batch=b, context=context), GAMMAS, alpha, curves) for b in BATCHES]
        if found[0].best.speedup is not None:
            axes.plot(BATCHES, [p.best.speedup or 0.0 for p in found], marker="o", ms=3, color=color, label=_k(context))
    axes.axhline(1.0, color="black", lw=0.8)
    axes.set_ylabel("predicted speedup, best gamma")
    _batch_axis(axes)
    if axes.has_data() and axes.get_legend_handles_labels()[0]:
        axes.legend(title="context", fontsize=8)
    else:
        axes.text(0.5, 0.5, "no acceptance is known", ha="center", transform=axes.transAxes)


def _ratios(axes: Sequence["Axes"], setup: Setup, gamma: int) -> None:
    """T_D / T_T and T_V / T_T."""
    contexts = _contexts(setup)
    for color, context in zip(_colors(len(contexts)), contexts, strict=True):
        times = [round_times(setup.at(batch=b, context=context), gamma) for b in BATCHES]
        for ax, step in zip(axes, ("draft", "verify"), strict=True):
            ratios = [getattr(t, step).total / t.target.total for t in times]
            ax.plot(BATCHES, ratios, marker="o", ms=3, color=color, label=_k(context))
    for ax, name in zip(axes, ("T_D / T_T", "T_V / T_T"), strict=True):
        ax.set_ylabel(name)
        ax.axhline(1.0, color="black", lw=0.8)
        _batch_axis(ax)
    axes[0].legend(title="context", fontsize=8)


def _intensity(axes: "Axes", setup: Setup) -> None:
    """FLOPs per byte of a decoding step; below a GPU's ridge it is bound by memory."""
    contexts = [250 * 2**i for i in range(10) if 250 * 2**i <= setup.target.max_position_embeddings]
    for color, batch in zip(_colors(len(INTENSITY_BATCHES)), INTENSITY_BATCHES, strict=True):
        passes = [Pass(setup.target, batch, 1, context) for context in contexts]
        intensities = [arithmetic_intensity(one, setup.hardware) for one in passes]
        axes.plot(contexts, intensities, marker="o", ms=3, color=color, label=f"batch {batch}")
    for style, device in zip(cycle(("-", "--", "-.", ":", (0, (1, 4)))), DEVICES.values(), strict=False):
        axes.axhline(device.ridge, color="gray", lw=0.9, ls=style, label=f"ridge of {device.name}: {device.ridge:.0f}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [_k(c) for c in contexts])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("arithmetic intensity, FLOPs per byte")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))


def _contexts(setup: Setup) -> list[int]:
    return [c for c in CONTEXTS if c <= setup.target.max_position_embeddings]


def _batch_axis(axes: "Axes") -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(BATCHES, [str(b) for b in BATCHES])
    axes.set_xlabel("batch")
    axes.grid(alpha=0.3)


def _save(path: Path, title: str, columns: int, plot: Callable[[list["Axes"]], Any]) -> Path:
    """Draw one figure of so many panels."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("figures need matplotlib: pip install 'magicdec[plots]'") from None
    figure = Figure(figsize=(5.5 * columns, 4.2), layout="constrained")
    plot([figure.add_subplot(1, columns, i + 1) for i in range(columns)])
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
    return path


def _colors(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](0.95 * i / max(1, count - 1)) for i in range(count)]


def _draft(setup: Setup) -> str:
    return "self-speculation" if setup.draft.kind == "self" else f"draft {setup.draft.name}"


def _k(tokens: int) -> str:
    return f"{tokens / 1000:.0f}k" if tokens >= 1000 else str(tokens)
