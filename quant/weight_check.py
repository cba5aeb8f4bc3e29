"""Checks that weights and the statistics of norms are numbers that integers can stand for, before data is asked for.

A layer that gives NaN hands it on, and the layers behind it would be said to have seen no data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from quant.folding import parameter
from quant.kernels.row_slices import all_finite
from quant.ops.operator import Weighted
from quant.ops.step import Step
from quant.runtime.names import full_name
from quant.static.runner import GraphRunner, runners
from quant.static.weights import folded

LAYERS = (
    nn.Linear,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RNNBase,
    nn.MultiheadAttention,
)
"""Layers of which one value that is not finite spoils every call; of a table it spoils those that read its row."""


def check_weights(prepared: nn.Module, called: Collection[str], verb: str, *, training: bool) -> None:
    """Refuse layers whose weights, or statistics, are no finite numbers.

    Args:
        called: dotted names of the modules that ran; the values of others do not matter.
        verb: how errors call what the user called.
        training: whether statistics will follow the data, so that a variance may begin below 0.

    Raises:
        ValueError: there is one; with the layer's name.
    """
    for name, module in prepared.named_modules():
        if name in called and isinstance(module, LAYERS):
            for tensor_name, tensor in _tensors(module):
                if not all_finite(tensor):
                    raise _refused(verb, name, f"{tensor_name} holds NaN or inf, expected finite values")
            if not training and isinstance(module, nn.modules.batchnorm._NormBase):
                _check_variance(module, name, verb)
    for path, runner in runners(prepared).items():
        for step in runner.fused.steps:
            if step.integer and isinstance(step.operator, Weighted):
                with torch.no_grad():
                    _check_step(step, runner, full_name(path, step.name), verb, training=training)


def _check_step(step: Step, runner: GraphRunner, name: str, verb: str, *, training: bool) -> None:
    """Of a layer that is no module, or whose weight is computed; statistics that are folded in follow the data too."""
    if training:
        tensors = [parameter(one, runner.graph, runner.root) for one in (step.weighted.weight, step.weighted.bias)]
    else:
        tensors = [*folded(step, runner.graph, runner.root)]
    more = ", with what is folded into it," if step.weighted.is_folded and not training else ""
    for what, tensor in zip(("weight", "bias"), tensors, strict=True):
        if tensor is not None and not all_finite(tensor):
            raise _refused(verb, name, f"{what}{more} holds NaN or inf, expected finite values")


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a layer, and the statistics that it keeps."""
    yield from module.named_parameters(recurse=False)
    for name in ("running_mean", "running_var"):
        statistics = getattr(module, name, None)
        if isinstance(statistics, Tensor):
            yield name, statistics


def _check_variance(norm: nn.modules.batchnorm._NormBase, name: str, verb: str) -> None:
    variance = norm.running_var
    if variance is None or not variance.numel():
        return
    least = float(variance.min())
    if least + norm.eps <= 0:
        raise _refused(verb, name, f"running_var is {least:.4g} at its smallest, expected no negative variance")


def _refused(verb: str, name: str, what: str) -> ValueError:
    return ValueError(f"{verb}: layer '{name or '(root)'}': its {what}; check the training")
