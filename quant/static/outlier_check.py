"""Layers whose calibrated ranges do not fit 8 bits with one scale: they stay float, and convert says so.

Three ways in which a range of many decades is lost silently:

1. The weights compensate for it. Of y = sum_i w_i x_i with rows of W rounded in steps s_w and x in steps s_x, and m_i
   the largest |x_i| observed,

       signal  S = sum_i |w_i|^2 m_i^2 / C                      C = 9, peak over mean square of a normal distribution
       noise   N = sum_i |w_i|^2 min(s_x^2 / 12, m_i^2 / C)     an input that rounds to zero loses itself, no more
                 + sum_n s_wn^2 / 12 * sum_i m_i^2 / C

   and the cosine between y and its int8 form is about 1 / sqrt(1 + N / S). Where all inputs are alike this is above
   0.999. It is computed only for weights that allow a lower one, from an observer per channel that `prepare` adds:
   those with a column that int8 rows round away (`column_is_lost`), which matters only if its input is far larger;
   and, without the last term of N, those with a column of little power (`column_is_small`), as behind a layer norm
   with a few large gains.
   If p_k is the power of the column whose input has the largest peak M, then s_x <= 2 M / 255 and S >= p_k M^2 / C, so

       sum_i |w_i|^2 s_x^2 / 12  <=  S * (sum_i p_i / p_k) * 4 C / (12 * 255^2),

   and activations alone cannot bring the cosine below the limit unless some column has less than SMALL of the power.
2. A logarithm follows. Small values matter to it as much as large ones, and those under half a step become one value.
3. A batch norm that is not folded, as in the identity branch of RepVGG's blocks, normalises each channel: one that is
   almost always zero is scaled up like the others, and its rounding with it. For y_c = g_c x_c + b_c, with the norm's
   running statistics (mean m_c and variance v_c of x_c, weight w_c, bias b_c),

       signal  S = mean_c (w_c^2 + b_c^2)
       noise   N = mean_c g_c^2 min(s_x^2 / 12, m_c^2 + v_c) + s_y^2 / 12

   and the cosine is 1 / sqrt(1 + N / S) again. Then the norm is float, and so are the sums beside it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quant.calibrate.report import lost_share
from quant.folding import gain_and_shift, is_norm, norm_of
from quant.fusion.fuse import fuse_again
from quant.fusion.fused_graph import FusedGraph
from quant.graph import Kind, Node
from quant.kernels import ACTIVATION_U8, two_bytes
from quant.nn.base import loses_columns
from quant.observers import MinMaxObserver, NoDataSeen, Observer
from quant.observers._histogram_store import HistogramStore, RowView
from quant.ops.call import is_call_of
from quant.ops.conv import Conv
from quant.ops.lookup import Lookup
from quant.ops.operator import Weighted
from quant.ops.step import Step, is_recurrent
from quant.recipe import Recipe
from quant.recurrent_layers import sizes_of, tensors_of
from quant.runtime.names import attribute
from quant.static.runner import GraphRunner
from quant.static.weights import folded

LOWEST_COSINE = 0.98
"""The lowest cosine between a layer's output and its int8 form: an error of a fifth of the signal. Usual is 0.999."""

LOWEST_NORM_COSINE = 0.999
"""The same for a batch norm that is not folded. Leaving it float costs no int8 product, and errors of identity branches
reach all later blocks. Usual ones (DenseNet's, RepGhost's, FastViT's) have 0.9995."""

CREST = 9.0
"""Largest value squared over mean square, of a normal distribution cut at three standard deviations."""

SMALL = 4 * CREST / (12 * 255**2) / (1 / LOWEST_COSINE**2 - 1)
"""The share of a weight's power in a column, 1/893, below which its input may make the scale too coarse for others."""

VANISHED = 0.25
"""The share of values under half a step from which their logarithm is lost."""

LOGARITHMS = frozenset({
    torch.log, torch.log2, torch.log10, torch.log_, torch.log2_, torch.log10_, torch.logit, "log", "log2", "log10",
    "log_", "log2_", "log10_", "logit",
})  # fmt: skip


def column_is_lost(rows: Tensor) -> bool:
    """Whether int8 rows would round a whole input channel of a weight (out, in, ...) to noise."""
    if rows.numel() == 0:
        return False
    flat = rows.detach().flatten(2) if rows.dim() > 2 else rows.detach().unsqueeze(2)
    noise = (flat.abs().amax(dim=(1, 2)) / 127).square().sum() / 12 * flat.shape[2]
    power = flat.square().sum(dim=(0, 2))
    return bool(((power > 0) & (power < noise)).any())


def column_is_small(rows: Tensor) -> bool:
    """Whether an input channel of a weight (out, in, ...) has so little power that a large input may hide in it."""
    if rows.numel() == 0:
        return False
    power = rows.detach().flatten(2).square().sum(dim=(0, 2)) if rows.dim() > 2 else rows.detach().square().sum(dim=0)
    return bool((power < SMALL * power.sum()).any())


def suspects(runner: GraphRunner) -> Iterator[tuple[Step, Observer]]:
    """The steps whose weights allow input channels of very different magnitudes, each with an observer per channel."""
    for step in runner.fused.steps:
        if not isinstance(step.operator, Weighted) or (isinstance(step.operator, Conv) and step.operator.groups != 1):
            continue
        rows = step.weighted.output_first(folded(step, runner.graph, runner.root)[0])
        if column_is_lost(rows) or column_is_small(rows):
            axis = step.operator.input_channel_axis
            yield step, MinMaxObserver(dataclasses.replace(ACTIVATION_U8, axis=axis))


def leave_float(programs: list[GraphRunner], recipe: Recipe) -> tuple[dict[str, str], dict[str, str]]:
    """Fuse a module's programs again, with the layers in float that 8 bits or one range cannot hold.

    One layer is int8 in all programs or in none.

    Returns:
        all layers that become float, and the recurrent ones among them: their names within the module, and why.
    """
    recurrent = {name: why for one in programs for name, why in beyond_one_range(one).items()}
    norms = {name: why for one in programs for name, why in coarse_norms(one).items()}
    floats = {name: why for one in programs for name, why in beyond_eight_bits(one).items()} | norms | recurrent
    for runner in programs if floats else ():
        fused = fuse_again(runner.fused, runner.root, recipe, floats)
        observers = {name: runner.observer(runner.fused.slot_like(slot)) for name, slot in fused.slots.items()}
        runner.use(fused, observers)
    return floats, recurrent


def beyond_eight_bits(runner: GraphRunner) -> dict[str, str]:
    """The layers to leave float: their names within the captured module, and why."""
    reasons: dict[str, str] = {}
    has_logarithms = any(is_call_of(node, LOGARITHMS) for node in runner.graph.nodes)
    for step in runner.fused.steps:
        if not (step.operator.anchor) or is_recurrent(step):
            continue
        node = runner.graph.nodes[step.nodes[0]]
        reason = _compensated(step, runner) or (has_logarithms and _under_a_logarithm(step, runner))
        if reason:
            reasons[node.target if node.kind is Kind.MODULE else node.owner] = reason
    return reasons


def beyond_one_range(runner: GraphRunner) -> dict[str, str]:
    """The recurrent layers that should be dynamic, with a range per row: their names, and why."""
    reasons: dict[str, str] = {}
    for step in filter(is_recurrent, runner.fused.steps):
        target = runner.graph.nodes[step.nodes[0]].target
        observer = runner.observer(runner.fused.slot_of[step.inputs[0]])
        reason = _lost_inputs(attribute(runner.root, target), observer)
        if reason:
            reasons[target] = reason
    return reasons


def coarse_norms(runner: GraphRunner) -> dict[str, str]:
    """The batch norms that are not folded and whose channels differ too much: their steps' names, and why."""
    reasons: dict[str, str] = {}
    for step in runner.fused.steps:
        if not isinstance(step.operator, Lookup) or not is_norm(step.nodes[0], runner.graph, runner.root):
            continue
        slots = [runner.fused.slot_of[value] for value in (step.inputs[0], step.output)]
        if not all(isinstance(runner.observer(slot), Observer) for slot in slots):
            continue  # trained, or loaded: the decision was taken before
        x, y = (float(runner.qparams(slot).scale) for slot in slots)
        cosine = norm_cosine(norm_of(step.nodes[0], runner.graph, runner.root), x, y)
        if cosine < LOWEST_NORM_COSINE:
            reasons[step.name] = (
                f"8 bits would leave its output a cosine of {cosine:.3f} to float: it makes channels of its input "
                "large that are small beside the others"
            )
    return reasons


def float_norms(runner: GraphRunner) -> dict[str, str]:
    """The batch norms that `coarse_norms` has left float, for a saved description."""
    floats = runner.fused.floats
    names = (step.name for step in runner.fused.steps if is_norm(step.nodes[0], runner.graph, runner.root))
    return {name: floats[name] for name in names if name in floats}


def norm_cosine(norm: Any, x: float, y: float) -> float:
    """The cosine between a batch norm's output and its int8 form, from the scales of input and output (equation 3)."""
    gain = gain_and_shift(norm)[0].detach().double()
    power = norm.running_mean.double().square() + norm.running_var.double()
    noise = float((gain.square() * power.clamp(max=x**2 / 12)).mean()) + y**2 / 12
    signal = _mean_square(norm.weight, 1.0) + _mean_square(norm.bias, 0.0)
    return 1 / math.sqrt(1 + noise / signal) if signal else 1.0


def _mean_square(parameter: Tensor | None, missing: float) -> float:
    return missing if parameter is None else float(parameter.detach().double().square().mean())


def _lost_inputs(module: nn.Module, observer: nn.Module) -> str:
    first = [tensors_of(module, 0, reverse).weight_ih for reverse in sizes_of(module).directions]
    if any(loses_columns(weight.detach().to(torch.float32)) for weight in first):
        return "its input weights differ so much by column that one range for all features would lose some"
    share = lost_share(observer) if isinstance(observer, Observer) else 0.0
    return f"{share:.0%} of its input would round to zero in one fixed range" if share else ""


def _compensated(step: Step, runner: GraphRunner) -> str:
    peaks = runner.input_peaks(step)
    if peaks is None or not bool((peaks > 0).any()):
        return ""
    rows = step.weighted.output_first(folded(step, runner.graph, runner.root)[0]).detach()
    lost, scale = column_is_lost(rows), float(runner.qparams(runner.fused.slot_of[step.inputs[0]]).scale)
    scale = two_bytes.low_scale(scale) if step.reads_two_bytes else scale
    cosine = expected_cosine(rows.double(), peaks.double(), scale, rounded_weights=lost)
    if cosine >= LOWEST_COSINE:
        return ""
    decades = math.log10(float(peaks.max() / peaks[peaks > 0].min()))
    why = "its weights make up for them" if lost else "one scale is too coarse for the smaller ones"
    return (
        f"8 bits would leave its output a cosine of {cosine:.3f} to float: its input's channels span {decades:.1f} "
        f"decades, and {why}"
    )


def expected_cosine(rows: Tensor, peaks: Tensor, scale: float, *, rounded_weights: bool = True) -> float:
    """The cosine between a layer's output and its int8 form (equation 1 of this file).

    Args:
        rows: the weight, float64 (out, in, ...).
        peaks: m, float64 (in,).
        scale: s_x.
        rounded_weights: whether the rounding of the weights counts; where no column is lost, it does not depend on the
            input's range.
    """
    taps = rows[0, 0].numel()
    power = rows.square().flatten(2).sum(dim=(0, 2)) if rows.dim() > 2 else rows.square().sum(dim=0)
    squares = peaks.square() / CREST
    steps = (rows.flatten(1).abs().amax(dim=1) / 127).square().sum() / 12
    signal = float(power @ squares)
    noise = float(power @ squares.clamp(max=scale**2 / 12))
    noise += float(steps * taps * squares.sum()) if rounded_weights else 0.0
    return 1 / math.sqrt(1 + noise / signal) if signal else 1.0


def _under_a_logarithm(step: Step, runner: GraphRunner) -> str:
    if not any(is_call_of(node, LOGARITHMS) for node in _followers(step, runner.fused)):
        return ""
    shares = [vanishing(runner, runner.fused.slot_of[value]) for value in step.inputs]
    share = max(shares)
    if share <= VANISHED:
        return ""
    return (
        f"{share:.0%} of its input's values would round to zero in 8 bits, and what follows takes a logarithm, which "
        "hears small values as well as large ones"
    )


def _followers(step: Step, fused: FusedGraph) -> Iterator[Node]:
    """The nodes that read a step's output, directly or through steps without weights."""
    makers = {index: other for other in fused.steps for index in other.nodes}
    users = fused.graph.users()
    waiting, seen = [step.output], {step.output}
    while waiting:
        for user in users[waiting.pop()]:
            if user >= len(fused.graph.nodes) or user in seen:
                continue
            seen.add(user)
            yield fused.graph.nodes[user]
            reader = makers[user]
            if not (reader.operator.anchor):
                waiting.append(user)


def vanishing(runner: GraphRunner, slot: str) -> float:
    """The share of observed values under half a step of the chosen range.

    An observer without a histogram knows only the extremes: 1.0 where the smallest value is that small, else 0.0.
    """
    observer = runner.observer(slot)
    if not isinstance(observer, Observer) or observer.scheme.axis is not None:
        return 0.0
    try:
        half = float(observer.qparams().scale) / 2
    except NoDataSeen:
        return 0.0
    if not isinstance(observer, HistogramStore):
        return float(bool((observer.low > 0) & (observer.low < half)))
    [exponent] = observer.exponents()
    if exponent is None:
        return 0.0
    row = RowView(observer.counts[0].cpu(), 2.0**exponent, float(observer.low[0]), float(observer.high[0]))
    small = (row.lower_edges > -half) & (row.upper_edges < half)
    return float(row.counts[small].sum() / row.counts.sum().clamp(min=1))
