"""Accuracy by epoch as a picture, by matplotlib (`pip install 'octet-quant[tutorials]'`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

try:
    # Not pyplot, which asks for a display and keeps every figure.
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:  # said before hours of training, not after
    raise ImportError("the plots need matplotlib: pip install 'octet-quant[tutorials]'") from error

SPAN = 2.0
"""Points that the picture shows at least: a tenth of a point, ten images, is chance and is not to look like a cliff."""

FAR = 10.0
"""Points below float from which a level has a strip of its own at the foot: beside it all else would be one line."""

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
    shown = [*levels.values(), *(value for curve in curves.values() for value in curve)]
    fallen = [100 * value for value in shown if 100 * value < 100 * before - FAR]
    if fallen:
        axes, foot = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        panels = [axes, foot]
    else:
        axes = foot = figure.subplots()
        panels = [axes]
    for panel in panels:
        _lines(panel, before, levels, curves)
        panel.grid(axis="y", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    near = [100 * value for value in (before, *shown) if 100 * value >= 100 * before - FAR]
    _limits(axes, near)
    if fallen:
        _limits(foot, fallen)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(bottom=False)
    epochs = max(len(curve) for curve in curves.values())
    axes.set(title=title, ylabel="test images right, %")
    foot.set(xlabel="epoch of QAT", xlim=(0.8, epochs + 0.2), xticks=range(1, epochs + 1))
    axes.legend(frameon=False, loc="best")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _lines(axes: Axes, before: float, levels: Mapping[str, float], curves: Mapping[str, Sequence[float]]) -> None:
    axes.axhline(100 * before, color="#444444", linewidth=1.5, label=f"float, {100 * before:.2f} %")
    colours = iter(COLOURS)
    for label, level in levels.items():
        axes.axhline(100 * level, color=next(colours), linestyle="--", label=f"{label}, {100 * level:.2f} %")
    for label, curve in curves.items():
        points = [100 * value for value in curve]
        text = f"{label}, {points[-1]:.2f} %"
        axes.plot(range(1, len(points) + 1), points, color=next(colours), marker="o", linewidth=2, label=text)


def _limits(axes: Axes, values: Sequence[float]) -> None:
    """Show these values and some air, SPAN at least."""
    middle, height = (min(values) + max(values)) / 2, 1.2 * max(max(values) - min(values), SPAN)
    axes.set_ylim(middle - height / 2, middle + height / 2)
