"""Exporters of one file each: a form for every class of operator, or an error that names the layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.fusion.fused_graph import FusedGraph
from quant.ops.conv import Conv
from quant.ops.exporting import Exporter, NotExportable
from quant.ops.linear import Linear
from quant.ops.operator import ShapeOnly
from quant.ops.pool import MaxPool
from quant.ops.step import Step
from quant.ops.views import Flatten
from quant.static.runner import runners

text: Exporter[list[str]] = Exporter("text")
"""All of an exporter that writes down what is computed."""


@text.writes(ShapeOnly)
def given(operator: ShapeOnly, step: Step, lines: list[str]) -> None:
    lines.append(f"%{step.output} = {step.name}")


@text.writes(Conv)
def conv(operator: Conv, step: Step, lines: list[str]) -> None:
    clamp = "" if operator.clamp is None else f" clamp={operator.clamp}"
    lines.append(f"%{step.output} = conv %{step.inputs[0]} '{step.name}' stride={operator.stride}{clamp}")


@text.writes(MaxPool)
def max_pool(operator: MaxPool, step: Step, lines: list[str]) -> None:
    lines.append(f"%{step.output} = max_pool %{step.inputs[0]} kernel={operator.kernel}")


@text.writes(Flatten)
def flatten(operator: Flatten, step: Step, lines: list[str]) -> None:
    lines.append(f"%{step.output} = flatten %{step.inputs[0]} {operator.start}..{operator.end}")


@text.writes(Linear)
def linear(operator: Linear, step: Step, lines: list[str]) -> None:
    lines.append(f"%{step.output} = linear %{step.inputs[0]} '{step.name}'")


def network(*more: nn.Module) -> nn.Sequential:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(stem, nn.MaxPool2d(2), *more, nn.Flatten(), nn.Linear(8 * 3 * 3, 5))


def fused_graph_of(model: nn.Module) -> FusedGraph:
    x: Tensor = torch.randn(2, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    [runner] = runners(quant.prepare(model.eval(), x)).values()
    return runner.fused


def test_a_network_is_written_step_by_step() -> None:
    lines: list[str] = []
    text.write(fused_graph_of(network()).steps, lines)
    assert lines == [
        "%0 = input_0",
        "%3 = conv %0 '0.0' stride=(2, 2) clamp=(0.0, inf)",
        "%4 = max_pool %3 kernel=(2, 2)",
        "%5 = flatten %4 1..-1",
        "%6 = linear %5 '3'",
    ]


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.ConvTranspose2d(8, 8, 1), r"layer '2' \(ConvTranspose\)"),
        (nn.Softmax(1), r"layer '2' \(Float: Softmax has no int8 kernel\)"),
    ],
    ids=["a subclass of what has a form", "a float step"],
)
def test_a_layer_without_a_form_is_named_and_nothing_is_written(layer: nn.Module, said: str) -> None:
    lines: list[str] = []
    with pytest.raises(NotExportable, match=said + ".*among Conv, Flatten, Linear, MaxPool, ShapeOnly"):
        text.write(fused_graph_of(network(layer)).steps, lines)
    assert not lines


def test_a_class_has_one_form() -> None:
    with pytest.raises(ValueError, match=r"text: expected one function to write Conv, .*test_exporting\.conv does"):
        text.writes(Conv)(linear)
