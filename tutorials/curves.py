"""Accuracy by epoch as a picture, by matplotlib (`pip install 'octet-quant[tutorials]'`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

try:
    # Not pyplot, which asks for a display and keeps every figure.
    from matplotlib.figure import Figure
except ImportError as error:  # said before hours of training, not after
    raise ImportError("the plots need matplotlib: pip install 'octet-quant[tutorials]'") from error

SPAN = 2.0
"""Points that the picture shows at least: a tenth of a point, ten images, is chance and is not to look like a cliff."""

COLOURS = ("#c1440e", "#e0a030", "#1f6f8b", "#3a9d5d")


def draw(
    path: Path, title: str, before: float, levels: Mapping[str, float], curves: Mapping[str, Sequence[float]]
) -> None:
    """Write a PNG: float and what was not trained as lines across, what was trained as curves.

    Args:
        before: accuracy of the float model, in [0, 1].
        levels: accuracies by label.
        curves: accuracies after each epoch, by label.
    """
    figure = Figure(figsize=(7.2, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(100 * before, color="#444444", linewidth=1.5, label=f"float, {100 * before:.2f} %")
    colours = iter(COLOURS)
    for label, level in levels.items():
        axes.axhline(100 * level, color=next(colours), linestyle="--", label=f"{label}, {100 * level:.2f} %")
    epochs = max(len(curve) for curve in curves.values())
    for label, curve in curves.items():
        points = [100 * value for value in curve]
        text = f"{label}, {points[-1]:.2f} %"
        axes.plot(range(1, len(points) + 1), points, color=next(colours), marker="o", linewidth=2, label=text)
    axes.set(title=title, xlabel="epoch of QAT", ylabel="test images right, %", xlim=(0.8, epochs + 0.2))
    low, high = axes.get_ylim()
    spare = max(0.0, SPAN - (high - low)) / 2
    axes.set_ylim(low - spare, high + spare)
    axes.set_xticks(range(1, epochs + 1))
    axes.grid(axis="y", alpha=0.3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
