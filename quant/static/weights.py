"""The weight of a step for its integer layer: the batch norm folded in, then quantised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quant.folding import gain_and_shift, norm_of, parameter
from quant.graph import Graph, Kind
from quant.kernels import QParams, weight_scheme
from quant.nn.base import chosen_scale, quantized_rows
from quant.ops.step import Step
from quant.recipe import QConfig
from quant.runtime.layers.requantizing import BIAS_LIMIT
from quant.runtime.layers.weighted import QWeight


def folded(step: Step, graph: Graph, root: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Float weight and bias, batch norm (by its running statistics) and affine steps folded in; differentiable."""
    layer = step.weighted
    weight, bias = parameter(layer.weight, graph, root), parameter(layer.bias, graph, root)
    assert weight is not None
    if not layer.is_folded:
        return weight, bias
    rows = layer.output_first(weight)
    if layer.batch_norm is not None:
        rows, bias = _with_norm(rows, bias, norm_of(layer.batch_norm, graph, root))
    for one in layer.affine:
        constant = parameter(one.constant, graph, root)
        assert constant is not None
        rows, bias = one.fold(rows, bias, constant)
    return layer.as_layer(rows), bias


def _with_norm(rows: Tensor, bias: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    gain = _gain(norm)
    return rows * gain.reshape(-1, *[1] * (rows.dim() - 1)), _shifted(bias, gain, norm)


def _gain(norm: Any) -> Tensor:
    gain: Tensor = torch.rsqrt(norm.running_var + norm.eps)
    return gain if norm.weight is None else gain * norm.weight


def _shifted(bias: Tensor | None, gain: Tensor, norm: Any) -> Tensor:
    shift: Tensor = -norm.running_mean if bias is None else bias - norm.running_mean
    return shift * gain if norm.bias is None else shift * gain + norm.bias


def folded_bias(step: Step, graph: Graph, root: nn.Module) -> Tensor | None:
    """The bias of `folded`, without its weight where that is possible."""
    layer = step.weighted
    if layer.affine:
        return folded(step, graph, root)[1]
    bias = parameter(layer.bias, graph, root)
    if layer.batch_norm is None:
        return bias
    norm = norm_of(layer.batch_norm, graph, root)
    return _shifted(bias, _gain(norm), norm)


def folded_numbers(step: Step, graph: Graph, root: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Gain and shift, float32 (out,), of everything folded into a step's weight; None where nothing is.

    A bias added after a functional product, as in x @ weight + bias, does not change the weight and gives None. Where
    the gain is 0, the weight is lost and cannot be restored from them.
    """
    layer = step.weighted
    only_added = all(one.keeps_weight for one in layer.affine)
    plain = only_added and layer.bias is None and graph.nodes[step.nodes[0]].kind is not Kind.MODULE
    if layer.batch_norm is None and (not layer.affine or plain):
        return None
    if layer.batch_norm is not None:
        gain, shift = gain_and_shift(norm_of(layer.batch_norm, graph, root))
    else:
        weight = parameter(layer.weight, graph, root)
        assert weight is not None
        width = layer.output_first(weight).shape[0]
        gain, shift = torch.ones(width), torch.zeros(width)
    for one in layer.affine:
        constant = parameter(one.constant, graph, root)
        assert constant is not None
        gain, shift = one.after(gain, shift, constant)
    return gain.detach().to(torch.float32).clone(), shift.detach().to(torch.float32).clone()


def quantized(
    step: Step,
    graph: Graph,
    root: nn.Module,
    input_scale: Tensor | None,
    learned: Tensor | None = None,
    mean: Tensor | None = None,
) -> QWeight:
    """The int8 weight of a step, by its QConfig.

    Args:
        input_scale: float32 (), the smallest that the layer is called with; None leaves the bias out of account.
        learned: float32 (out,), the scale that training learned; None chooses one for the weight.
        mean: float32 (channels,), of the layer's input; None corrects no bias.
    """
    assert step.qconfig is not None
    weight, bias = folded(step, graph, root)
    bias = None if bias is None else bias.detach().to(torch.float32)
    rows = step.weighted.output_first(weight.detach().to(torch.float32))
    scale = row_scale(rows, bias, input_scale, step, learned)
    q_rows = QParams(scale, torch.zeros_like(scale, dtype=torch.int32), weight_scheme(step.qconfig.weight_bits))
    q_weight = step.weighted.as_layer(q_rows.quantize(rows)).contiguous()
    q = QWeight(q_weight, scale, None if bias is None else bias.clone())
    if step.qconfig.bias_correction:
        # A bias also without correction: a layer that saw no data then has the same tensors as a saved one.
        shift = torch.zeros_like(scale) if mean is None else _mean_error(step, graph, weight.detach(), q, mean)
        q.bias = shift if q.bias is None else q.bias + shift
    return q


def row_scale(
    rows: Tensor, bias: Tensor | None, input_scale: Tensor | None, step: Step, learned: Tensor | None = None
) -> Tensor:
    """The scale of each output channel, float32 (out,), for training and conversion alike.

    Args:
        rows: float32 (out, ...), the folded weight.
        bias: float32 (out,), folded.
        input_scale, learned: as for `quantized`.

    Raises:
        ValueError: the weight or bias holds NaN or inf; with the layer's name.
    """
    assert step.qconfig is not None
    scale = chosen_scale(rows, step.qconfig) if learned is None else learned
    # Under torch.compile a branch on values would break the graph.
    checked = not torch.compiler.is_compiling()
    if checked and (
        not bool(torch.isfinite(scale).all()) or (learned is not None and not bool(torch.isfinite(rows).all()))
    ):
        raise not_finite(step)
    if bias is None or input_scale is None:
        return scale
    if checked and not bool(torch.isfinite(bias).all()):
        raise not_finite(step, "bias")
    return _room_for_bias(scale, bias, input_scale, step)


def not_finite(step: Step, what: str = "weight") -> ValueError:
    """The error for a weight or bias from which no scale follows."""
    return ValueError(f"layer '{step.name}': its {what} holds NaN or inf, expected finite values; check the training")


def _mean_error(step: Step, graph: Graph, weight: Tensor, q: QWeight, mean: Tensor) -> Tensor:
    """The mean error of each output by the weight's rounding, float32 (out,): E[(w - q(w)) x] = (w - q(w)) E[x].

    Nagel et al. 2019 (arXiv:1906.04721), section 4.2, with E[x] observed instead of derived from batch norms. The layer
    is run with the rounding error for its weight, on an input that is the mean at every place, so that padding counts
    as it does in the layer itself. Taking away the mean of an error never makes its square larger; that is exact on the
    data that calibration saw, for its true mean: on other data, or where the layers before round their outputs and the
    mean at places near the border is another one, the estimate may be off by more than it corrects.
    """
    error = weight - dequantized(q, step)
    dims = weight.dim() - 2
    meta = graph.nodes[step.inputs[0]].meta
    places = [1] * dims if meta is None else list(meta.shape[-dims:]) if dims else []
    x = mean.reshape(1, -1, *[1] * dims).expand(1, -1, *places)
    return step.weighted.product(x, error, None).movedim(1, 0).flatten(1).mean(1)


def dequantized_rows(rows: Tensor, qconfig: QConfig) -> Tensor:
    """float32 `rows` (out, ...), rounded to int8 and dequantised."""
    q_rows, scale = quantized_rows(rows, qconfig)
    return q_rows.to(torch.float32) * scale.reshape(-1, *[1] * (rows.dim() - 1))


def _room_for_bias(scale: Tensor, bias: Tensor, input_scale: Tensor, step: Step) -> Tensor:
    """A coarser weight scale for channels whose bias would not fit int32 at scale s_x * s_w.

    Such a channel has weights that hardly matter beside its bias (a batch norm that training switched off, an input
    that is always zero); clamping the bias instead would lose the whole channel.
    """
    assert step.qconfig is not None
    least = bias.abs() / BIAS_LIMIT / input_scale
    if not torch.compiler.is_compiling() and not bool((least > scale).any()):
        return scale
    scale = torch.maximum(scale, least)
    return scale if step.qconfig.per_channel else scale.amax().expand_as(scale).clone()


def dequantized(q: QWeight, step: Step) -> Tensor:
    """The dequantised int8 weight, in the layer's layout."""
    scheme = weight_scheme(8)
    qparams = QParams(q.scale, torch.zeros_like(q.scale, dtype=torch.int32), scheme)
    return step.weighted.as_layer(qparams.dequantize(step.weighted.output_first(q.q_weight)))
