"""Recurrent layers with int8 weights as the model computes them: products of integers, and the steps around them.

The products are those of `kernels/reference_rnn.py`: of the input for all time steps at once, and of the state at each
step, in the body of a Scan. Static layers round both by their calibrated ranges, dynamic ones each row by its own.

A kind of one's own is one function, of what `RecurrentKind.step` takes:

    @writes_step("minimal_gru")
    def minimal_gru(writer: GraphWriter, step: Step) -> tuple[str, str | None]:
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quant.onnx.dynamic_linear import FLOAT, DynamicProduct
from quant.onnx.file import Body
from quant.onnx.graph_writer import Dimension, GraphWriter, NotWritten
from quant.onnx.integer_weights import dequantized_weight, integer_weight
from quant.onnx.registries import registering
from quant.onnx.sizes import vector
from quant.runtime.layers.narrow_bytes import weight_in_bytes
from quant.runtime.layers.recurrent import StaticCell, StaticRecurrent
from quant.runtime.layers.recurrent_module import Int8Cell, Int8Direction


@dataclass(frozen=True)
class Step:
    """What one time step of a layer computes with, as names of float32 tensors of the file.

    Attributes:
        a, r: (batch, gates * hidden), the products of the input, with its bias, and of the state before.
        bias: (gates * hidden,), the bias of r where the kind keeps it apart; or None.
        h, c: (batch, state) and (batch, hidden), the states before; c where the kind has one.
        hidden: the size of a gate.
    """

    a: str
    r: str
    bias: Tensor | None
    h: str
    c: str | None
    hidden: int


WriteStep: TypeAlias = Callable[[GraphWriter, Step], tuple[str, str | None]]
"""Gives h, before a projection, and c."""

STEPS: dict[str, WriteStep] = {}


def writes_step(*kinds: str) -> Callable[[WriteStep], WriteStep]:
    """A decorator for the function that writes the steps of recurrent layers of some kinds.

    Raises:
        ValueError: another function writes one of them already.
    """
    return registering(STEPS, *kinds)


@writes_step("lstm")
def _lstm(writer: GraphWriter, step: Step) -> tuple[str, str | None]:
    assert step.c is not None
    total = writer.node("Add", step.a, step.r)
    ins, forget, cell, outs = writer.several("Split", total, outputs=4, axis=1)
    kept = writer.node("Mul", writer.node("Sigmoid", forget), step.c)
    new = writer.node("Mul", writer.node("Sigmoid", ins), writer.node("Tanh", cell))
    c = writer.node("Add", kept, new)
    return writer.node("Mul", writer.node("Sigmoid", outs), writer.node("Tanh", c)), c


@writes_step("gru")
def _gru(writer: GraphWriter, step: Step) -> tuple[str, str | None]:
    sizes = [2 * step.hidden, step.hidden]
    a, a_new = writer.several("Split", step.a, writer.numbers(sizes, "sizes"), outputs=2, axis=1)
    r = step.r if step.bias is None else writer.node("Add", step.r, writer.constant(step.bias, "bias_hh"))
    r, r_new = writer.several("Split", r, writer.numbers(sizes, "sizes"), outputs=2, axis=1)
    reset, update = writer.several("Split", writer.node("Sigmoid", writer.node("Add", a, r)), outputs=2, axis=1)
    new = writer.node("Tanh", writer.node("Add", a_new, writer.node("Mul", reset, r_new)))
    one = writer.constant(torch.tensor(1.0), "one")
    fresh = writer.node("Mul", writer.node("Sub", one, update), new)
    return writer.node("Add", fresh, writer.node("Mul", update, step.h)), None


@writes_step("rnn_tanh")
def _rnn_tanh(writer: GraphWriter, step: Step) -> tuple[str, str | None]:
    return writer.node("Tanh", writer.node("Add", step.a, step.r)), None


@writes_step("rnn_relu")
def _rnn_relu(writer: GraphWriter, step: Step) -> tuple[str, str | None]:
    return writer.node("Relu", writer.node("Add", step.a, step.r)), None


@dataclass(frozen=True)
class ExactDirection:
    """One direction of one int8 layer, or a cell.

    Attributes:
        direction: its integers.
        is_cell: whether its products have two dimensions.
        inputs, states, products: scale and zero point of the input, of the state and of what a projection reads; None
            in dynamic layers.
        is_rounded: whether the input comes as integers.
    """

    direction: Any
    is_cell: bool
    inputs: tuple[float, int] | None = None
    states: tuple[float, int] | None = None
    products: tuple[float, int] | None = None
    is_rounded: bool = False

    @staticmethod
    def of(module: Any, direction: Int8Direction, layer: int) -> ExactDirection:
        """The direction of a layer of a module."""
        is_cell = isinstance(module, Int8Cell)
        if not has_ranges(module):
            return ExactDirection(direction, is_cell)
        known = module.numbers()
        before = known.states[layer - 1] if layer else known.input
        products = known.products[layer] if known.products else None
        return ExactDirection(direction, is_cell, before, known.states[layer], products, is_rounded=not layer)

    @property
    def hidden(self) -> int:
        """The size of a gate."""
        return int(self._weight("hh").shape[0] // self.direction._kind.gates)

    @property
    def state(self) -> int:
        """The size of h."""
        return self._weight("hh").shape[1]

    def gates(self, writer: GraphWriter, x: str) -> str:
        """The product of the input with its biases."""
        one = self.direction
        if self.inputs is not None:
            done = self._of_integers(
                writer, x if self.is_rounded else writer.rounded(x, self.inputs), self.inputs, "ih"
            )
        else:
            x = writer.node("Concat", x, x, axis=-1) if one.terms == 2 else x
            product = DynamicProduct(self._weight("ih"), one.scale_ih, one.columns_ih, one.activation_bits, one.per_row)
            done = product.written(writer, x)[0]
        bias = one._kind.input_bias(one.bias_ih, one.bias_hh)
        return done if bias is None else writer.node("Add", done, writer.constant(bias.float(), "bias_ih"))

    def step(self, writer: GraphWriter, a: str, h: str, c: str | None) -> list[str]:
        """h, and c where the kind has one, behind a time step."""
        kind = self.direction._kind
        write = STEPS.get(kind.name)
        if write is None:
            raise NotWritten(
                f"is a recurrent layer of the kind '{kind.name}', whose step has no form in ONNX: give it one with "
                "@quant.onnx.recurrent_steps.writes_step(...)"
            )
        bias = None if kind.sums_biases else self.direction.bias_hh
        r = self._of_state(writer, h, "hh", self.states)
        after, cell = write(writer, Step(a, r, None if bias is None else bias.float(), h, c, self.hidden))
        if self.direction.q_weight_hr is not None:
            after = self._of_state(writer, after, "hr", self.products)
        return [after] if cell is None else [after, cell]

    def _of_state(self, writer: GraphWriter, h: str, which: str, known: tuple[float, int] | None) -> str:
        if known is not None:
            return self._of_integers(writer, writer.rounded(h, known), known, which)
        scale = self.direction.get_buffer(f"scale_{which}")
        return DynamicProduct(self._weight(which), scale).written(writer, h)[0]

    def _weight(self, which: str) -> Tensor:
        return weight_in_bytes(self.direction, f"q_weight_{which}")

    def _of_integers(self, writer: GraphWriter, q: str, known: tuple[float, int], which: str) -> str:
        """A product of integers as float32.

        Of two dimensions with the DequantizeLinear of both sides, ONNX Runtime would make a Gemm of reals of it and of
        the sum behind it.
        """
        q_weight, scale = self._weight(which).t(), self.direction.get_buffer(f"scale_{which}")
        if not self.is_cell:
            x = writer.read_again(q, known)
            return writer.node("MatMul", x, dequantized_weight(writer, q_weight, scale, 1, f"weight_{which}"))
        weight, weight_zero = integer_weight(writer, q_weight, f"weight_{which}")
        zeros = [writer.range_of(known)[1], writer.constant(weight_zero, "weight_zero_point")]
        sums = writer.node("Cast", writer.node("MatMulInteger", q, weight, *zeros), to=FLOAT)
        return writer.node("Mul", sums, writer.constant(torch.tensor(known[0]) * scale, "scale"))


def has_ranges(module: Any) -> bool:
    """Whether a layer or cell has calibrated ranges; it takes integers then."""
    return isinstance(module, (StaticRecurrent, StaticCell))


def exact_layer(
    writer: GraphWriter, module: Any, directions: Sequence[Int8Direction], layer: int, x: str, states: Sequence[str]
) -> list[str]:
    """One layer over a sequence in the module's order of dimensions.

    Args:
        x: float32, or uint8 of a layer with ranges; (time, batch, input), or batch first as the module has it.
        states: h and c, (directions, batch, size); none for zeros.

    Returns:
        y, and the last states, (directions, batch, size).
    """
    axis = 1 if module.batch_first else 0
    found = []
    for place, one in enumerate(directions):
        exact = ExactDirection.of(module, one, layer)
        index = writer.constant(torch.tensor(place), "direction")
        own = [writer.node("Gather", state, index, axis=0) for state in states]
        found.append(_over_time(writer, exact, exact.gates(writer, x), own or _zeros(writer, exact, x, axis), axis))
    axes = writer.numbers([0], "axes")
    ends = [
        [writer.node("Unsqueeze", one, axes) for one in each] for each in zip(*(last for _, last in found), strict=True)
    ]
    joined = [one[0] if len(one) == 1 else writer.node("Concat", *one, axis=0) for one in ends]
    outputs = [y for y, _ in found]
    return [outputs[0] if len(outputs) == 1 else writer.node("Concat", *outputs, axis=-1), *joined]


def exact_cell(writer: GraphWriter, module: Any, x: str, states: Sequence[str]) -> list[str]:
    """h, and c where the kind has one, of a cell on (batch, input)."""
    exact = ExactDirection.of(module, module.direction, 0)
    h, *c = states or _zeros(writer, exact, x, -1)
    return exact.step(writer, exact.gates(writer, x), h, c[0] if c else None)


def _zeros(writer: GraphWriter, exact: ExactDirection, x: str, axis: int) -> list[str]:
    """The states that a call without any begins with, (batch, size)."""
    batch = Dimension(x, 1 - axis if axis >= 0 else 0)
    sizes = [exact.state, *[exact.hidden] * exact.direction._kind.has_cell]
    return [writer.node("Expand", writer.constant(torch.tensor(0.0), "zero"), vector(writer, (batch, one)))
            for one in sizes]  # fmt: skip


def _over_time(
    writer: GraphWriter, exact: ExactDirection, gates: str, states: Sequence[str], axis: int
) -> tuple[str, list[str]]:
    """All steps: y, and the last states."""
    with writer.apart() as (nodes, constants):
        before = [writer.unique(f"{writer.step}/state") for _ in states]
        a = writer.unique(f"{writer.step}/gates")
        after = exact.step(writer, a, before[0], before[1] if len(before) > 1 else None)
        outputs = [*after, writer.node("Identity", after[0])]
        body = Body(tuple(nodes), dict(constants), (*before, a), tuple(outputs))
    way = int(exact.direction.reverse)
    done = writer.several(
        "Scan", *states, gates, outputs=len(outputs), body=body, num_scan_inputs=1,
        scan_input_axes=[axis], scan_output_axes=[axis], scan_input_directions=[way], scan_output_directions=[way],
    )  # fmt: skip
    return done[-1], done[:-1]
