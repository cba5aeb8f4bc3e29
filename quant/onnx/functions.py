"""Functions of one value as ONNX writes them, each with what torch computes for it.

Between integers such a function is a table of 256 integers. Reading makes the table of a file's nodes; writing looks
for the nodes that give a table.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

ElementByElement: TypeAlias = Callable[..., Tensor]
"""Of float32 tensors."""

IN_TORCH: dict[str, Callable[[Mapping[str, Any]], ElementByElement]] = {
    "Abs": lambda at: torch.abs,
    "Elu": lambda at: functools.partial(F.elu, alpha=at.get("alpha", 1.0)),
    "Erf": lambda at: torch.erf,
    "Exp": lambda at: torch.exp,
    "HardSigmoid": lambda at: lambda x: (x * at.get("alpha", 0.2) + at.get("beta", 0.5)).clamp(0, 1),
    "HardSwish": lambda at: F.hardswish,
    "LeakyRelu": lambda at: functools.partial(F.leaky_relu, negative_slope=at.get("alpha", 0.01)),
    "Log": lambda at: torch.log,
    "Neg": lambda at: torch.neg,
    "Reciprocal": lambda at: torch.reciprocal,
    "Relu": lambda at: torch.relu,
    "Sigmoid": lambda at: torch.sigmoid,
    "Softplus": lambda at: F.softplus,
    "Sqrt": lambda at: torch.sqrt,
    "Tanh": lambda at: torch.tanh,
}
"""Operators of one value: of the attributes of a node, its function in torch."""

OF_TWO: dict[str, ElementByElement] = {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div}
"""Operators of two values, which may both be functions of one."""


@dataclass(frozen=True)
class Applied:
    """A node of a function: its inputs are "x" (the argument), "y" (the result of the node before) and numbers."""

    op: str
    inputs: tuple[str | float, ...] = ("x",)
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def value(self, x: Tensor, y: Tensor) -> Tensor:
        """What torch computes for it."""
        known = {"x": x, "y": y}
        inputs = [known[one] if isinstance(one, str) else torch.tensor(one) for one in self.inputs]
        return (OF_TWO[self.op] if self.op in OF_TWO else IN_TORCH[self.op](self.attributes))(*inputs)


@dataclass(frozen=True)
class Written:
    """A function as nodes.

    Attributes:
        name: for people.
        nodes: in order; none for the identity, which only changes the range.
        integer: whether runtimes have an integer kernel for it.
    """

    name: str
    nodes: tuple[Applied, ...]
    integer: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        y = x
        for node in self.nodes:
            y = node.value(x, y)
        return y


GELU = (
    Applied("Div", ("x", math.sqrt(2.0))), Applied("Erf", ("y",)), Applied("Add", ("y", 1.0)),
    Applied("Mul", ("x", "y")), Applied("Mul", ("y", 0.5)),
)  # fmt: skip
"""x (1 + erf(x / sqrt(2))) / 2, in the order in which ONNX Runtime recognises it."""

SILU = (Applied("Sigmoid"), Applied("Mul", ("x", "y")))
MISH = (Applied("Softplus"), Applied("Tanh", ("y",)), Applied("Mul", ("x", "y")))
HARDSIGMOID = (Applied("HardSigmoid", attributes={"alpha": 1 / 6, "beta": 0.5}),)

FUNCTIONS = (
    Written("a change of range", (), integer=True),
    Written("QLinearSigmoid", (Applied("Sigmoid"),), integer=True),
    Written("Relu", (Applied("Relu"),)),
    Written("HardSwish", (Applied("HardSwish"),)),
    Written("HardSigmoid", HARDSIGMOID),
    Written("Tanh", (Applied("Tanh"),)),
    Written("SiLU", SILU),
    Written("GELU", GELU),
    Written("Mish", MISH),
    Written("Softplus", (Applied("Softplus"),)),
    Written("Elu", (Applied("Elu"),)),
    *(Written("LeakyRelu", (Applied("LeakyRelu", attributes={"alpha": one}),)) for one in (0.01, 0.1, 0.2)),
    Written("Abs", (Applied("Abs"),)),
    Written("Neg", (Applied("Neg"),)),
    Written("Exp", (Applied("Exp"),)),
)
"""What a table is compared with, in this order."""


def function_of_table(table: Tensor, before: tuple[float, int], after: tuple[float, int]) -> Written | None:
    """The function whose nodes give each of a table's 256 integers; None where there is none.

    Args:
        table: uint8, (256,).
        before, after: scale and zero point of the argument and of the result.
    """
    x = (torch.arange(256, dtype=torch.float32) - before[1]) * torch.tensor(before[0])
    for one in FUNCTIONS:
        if torch.equal(integers_of(one(x), after), table):
            return one
    return None


def integers_of(reals: Tensor, qparams: tuple[float, int]) -> Tensor:
    """uint8: what QuantizeLinear makes of float32."""
    scale, zero_point = qparams
    return torch.round(reals / torch.tensor(scale)).add(zero_point).clamp(0, 255).to(torch.uint8)
