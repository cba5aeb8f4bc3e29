"""The nodes and constants of an ONNX file while a program is written into it, value by value.

Every uint8 value is the output of a QuantizeLinear, and each of its readers has a DequantizeLinear of its own: that is
the pattern which runtimes join into integer kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quant.onnx.file import Node
from quant.onnx.runtimes import Runtime
from quant.runtime.names import attribute
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.trees import Attr, Ref

OPSET = 17
"""The version of ONNX's operators that files are written in: the first with LayerNormalization."""


MOST_DIMENSIONS = 8
"""Dimensions whose sizes are followed."""


class NotWritten(ValueError):
    """A step has no form in an ONNX file; the message says why."""


@dataclass(frozen=True)
class Dimension:
    """The size of a dimension of a value of the file, which may differ between calls."""

    tensor: str
    axis: int


@dataclass(frozen=True)
class Count:
    """A whole number that the file computes: the name of an int64 value of shape (1,)."""

    name: str


LEFT_OUT = frozenset({"Clip", "Flatten", "Relu", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
"""Nodes between two roundings that a runtime leaves out, or moves behind or before them."""


@dataclass(frozen=True)
class StepForm:
    """What a step became.

    Attributes:
        step: its name in the user's model.
        kind: of the instruction, as in the program's text.
        integer: whether the runtime computes it in integers.
        why: what it is computed by; for a float step the reason.
        moves: whether it only moves values.
        exact: whether float nodes compute the model's own integers of integers, to the last one.
    """

    step: str
    kind: str
    integer: bool
    why: str
    moves: bool = False
    exact: bool = False


@dataclass(frozen=True)
class DynamicInput:
    """The integers of a layer whose input is quantised at each call.

    Attributes:
        name: of the uint8 tensor in the file.
        source: the register that is quantised.
        columns: float32 (K,), by which it is multiplied first, or None.
        per_row: whether each row has a range of its own.
    """

    name: str
    source: int
    columns: Tensor | None
    per_row: bool


@dataclass
class GraphWriter:
    """Collects the nodes and constants of a file.

    Attributes:
        runner: what is exported.
        runtime, target: which runtime and processors the file is for.
        recurrent, sums: how recurrent layers and sums of integers are written: "exact" or "fast".
        nodes, constants: so far.
        names: register of a tensor -> its name in the file.
        held: register of what is no tensor -> nested numbers, `Dimension`, `Count`, names of tensors, and others.
        held_sizes: size of a tensor -> the int64 value of the file that it is.
        quantized_rows: float tensor -> integers, scales and zero points of its rows, by their bits and whether
            each has a range of its own.
        dynamic_inputs: the integers of dynamic layers, by the step that wrote them first.
        overflowing: steps whose weights may overflow 16 bits on processors without VNNI.
        unsigned: steps whose weights are uint8, so that they do not.
        step: the step that is written now; a prefix of names.
        varying: register and axis of sizes that differ between calls, beside the program's symbols.
    """

    runner: ProgramRunner
    runtime: Runtime
    target: str = "vnni"
    recurrent: str = "exact"
    sums: str = "exact"
    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    held: dict[int, Any] = field(default_factory=dict)
    held_sizes: dict[tuple[str, int], str] = field(default_factory=dict)
    forms: list[StepForm] = field(default_factory=list)
    quantized_rows: dict[tuple[str, int, bool], tuple[tuple[str, ...], str, tuple[str, ...]]] = field(
        default_factory=dict
    )
    dynamic_inputs: dict[str, DynamicInput] = field(default_factory=dict)
    overflowing: list[str] = field(default_factory=list)
    unsigned: list[str] = field(default_factory=list)
    step: str = ""
    varying: Set[tuple[int, int]] = frozenset()
    _taken: set[str] = field(default_factory=set)
    _ranges: dict[tuple[float, int], tuple[str, str]] = field(default_factory=dict)
    _parameters: dict[str, str] = field(default_factory=dict)
    _sizes_of: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    _dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    @property
    def program(self) -> Program:
        """The program that is written."""
        return self.runner.program

    @property
    def root(self) -> nn.Module:
        """The module that the program stands for."""
        return self.runner.root

    # Names, nodes and constants.

    def unique(self, name: str) -> str:
        """A name that nothing in the file has yet."""
        name = name or "value"
        chosen, count = name, 1
        while chosen in self._taken:
            count += 1
            chosen = f"{name}_{count}"
        self._taken.add(chosen)
        return chosen

    def node(self, op: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node with one output; gives the output's name."""
        return self.several(op, *inputs, outputs=1, domain=domain, **attributes)[0]

    def several(self, op: str, *inputs: str, outputs: int, domain: str = "", **attributes: Any) -> list[str]:
        """Add a node with several outputs; gives their names."""
        label = self.unique(f"{self.step}/{op}" if self.step else op)
        names = [label if place == 0 else self.unique(f"{label}.{place}") for place in range(outputs)]
        given = {key: _attribute(value) for key, value in attributes.items() if value is not None}
        self.nodes.append(Node(label, op, inputs, tuple(names), given, domain))
        return names

    def constant(self, value: Any, name: str = "constant", dtype: torch.dtype | None = None) -> str:
        """Add a constant; gives its name."""
        tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)
        label = self.unique(f"{self.step}.{name}" if self.step else name)
        kept = tensor.detach().cpu().contiguous()
        self.constants[label] = kept if dtype is None else kept.to(dtype)
        self._dtypes[label] = self.constants[label].dtype
        return label

    def numbers(self, values: Sequence[int], name: str = "numbers") -> str:
        """Add an int64 constant of one dimension."""
        return self.constant(torch.tensor(list(values), dtype=torch.int64), name)

    def parameter(self, path: str) -> str:
        """A parameter or buffer of the model, under its own name."""
        if path not in self._parameters:
            tensor = attribute(self.root, path)
            if not isinstance(tensor, Tensor):
                raise NotWritten(f"reads '{path}', which is a {type(tensor).__name__} and no tensor")
            name = self.unique(path)
            self.constants[name] = tensor.detach().cpu().contiguous()
            self._dtypes[name] = tensor.dtype
            self._parameters[path] = name
        return self._parameters[path]

    @contextmanager
    def apart(self) -> Iterator[tuple[list[Node], dict[str, Tensor]]]:
        """Collect the nodes and constants of a node's body, which sees none of the file's.

        Gives the lists that they are collected in.
        """
        kept = self.nodes, self.constants, self._ranges, self._parameters, self.held_sizes, self.quantized_rows
        self.nodes, self.constants, self._ranges, self._parameters, self.held_sizes = [], {}, {}, {}, {}
        self.quantized_rows = {}
        try:
            yield self.nodes, self.constants
        finally:
            self.nodes, self.constants, self._ranges, self._parameters, self.held_sizes, self.quantized_rows = kept

    # Values of the program.

    def take(self, value: Any, *, reals: bool = False) -> Any:
        """An argument: the name of a tensor, or what is held instead of one; constants as they are.

        Args:
            reals: read integers as reals.
        """
        if isinstance(value, Ref):
            if value.index not in self.names:
                return self.held[value.index]
            return self.dequantized(value.index) if reals else self.names[value.index]
        if isinstance(value, Attr):
            return self.parameter(value.path)
        if isinstance(value, Tensor):
            return self.constant(value)
        if isinstance(value, (tuple, list)):
            return tuple(self.take(one, reals=reals) for one in value)
        if isinstance(value, slice):
            return slice(*(self.take(one) for one in (value.start, value.stop, value.step)))
        return value

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor of the file."""
        return self._dtypes.get(name, torch.float32)

    def is_dtype(self, name: str, dtype: torch.dtype) -> str:
        """Note the dtype of a tensor that is not float32; gives its name."""
        self._dtypes[name] = dtype
        return name

    def shape(self, register: int) -> tuple[int | None, ...]:
        """The shape of a value, with None for sizes that may differ between calls."""
        shape = self.program.values[register].shape
        if shape is None:
            raise NotWritten("reads the shape of what is no tensor")
        return tuple(
            one if isinstance(one, int) and (register, axis) not in self.varying else None
            for axis, one in enumerate(shape)
        )

    def rank(self, register: int) -> int:
        """Dimensions of a value."""
        return len(self.shape(register))

    def dequantized(self, register: int) -> str:
        """A value as float32, for one reader."""
        value = self.program.values[register]
        if value.qparams is None:
            return self.names[register]
        return self.read_again(self.names[register], value.qparams)

    def read_again(self, name: str, qparams: tuple[float, int]) -> str:
        """The reals of an integer tensor."""
        return self.same_sizes(self.node("DequantizeLinear", name, *self.range_of(qparams)), name)

    def rounded(self, name: str, qparams: tuple[float, int], *, by_inverse: bool = False) -> str:
        """A float32 tensor as integers.

        Sizes that nothing before has are those of the integers: who asks for the shape of the reals keeps the runtime
        from joining their operator with the QuantizeLinear.

        Args:
            by_inverse: multiply by the inverse of the scale, as the model does it, where QuantizeLinear divides.
        """
        scale, zero_point = self.range_of(qparams)
        if by_inverse:
            inverse = self.constant(1.0 / torch.tensor(qparams[0], dtype=torch.float32), "inverse_scale")
            scaled, one = self.node("Mul", name, inverse), self.constant(torch.tensor(1.0), "one")
            done = self.node("QuantizeLinear", scaled, one, zero_point)
        else:
            done = self.node("QuantizeLinear", self._kept_apart(name, (scale, zero_point)), scale, zero_point)
        for axis in range(MOST_DIMENSIONS):
            first = self.origin(Dimension(name, axis))
            if first == (name, axis):
                self._sizes_of[name, axis] = done, axis
            else:
                self._sizes_of[done, axis] = first
        return self.is_dtype(done, torch.int8 if self.runtime.signed else torch.uint8)

    def _kept_apart(self, name: str, after: tuple[str, str]) -> str:
        """What is rounded; behind a node that computes nothing where it comes rounded to another range.

        ONNX Runtime (1.32, DoubleQDQPairsRemover) makes one rounding of two in a row, to a range of its own, also once
        it has left out a clamp between them. It leaves a Sum of one alone.
        """
        if not self.runtime.joins_roundings:
            return name
        node = self._giver(name)
        while node is not None and node.op in LEFT_OUT:
            node = self._giver(node.inputs[0])
        if node is None or node.op != "DequantizeLinear" or node.inputs[1:] == after:
            return name
        return self.same_sizes(self.node("Sum", name), name)

    def _giver(self, name: str) -> Node | None:
        """The node that gives a value; None of inputs and constants."""
        return next((node for node in reversed(self.nodes) if name in node.outputs), None)

    def range_of(self, qparams: tuple[float, int]) -> tuple[str, str]:
        """The constants of a scale and zero point."""
        if qparams not in self._ranges:
            scale, zero_point = qparams
            signed = self.runtime.signed
            dtype = torch.int8 if signed else torch.uint8
            integer = torch.tensor(zero_point - 128 if signed else zero_point, dtype=dtype)
            self._ranges[qparams] = (
                self.constant(torch.tensor(scale, dtype=torch.float32), "scale"),
                self.constant(integer, "zero_point"),
            )
        return self._ranges[qparams]

    def leave(self, name: str, register: int) -> None:
        """Let a float32 tensor be the value of a register, rounded where that is uint8."""
        value = self.program.values[register]
        if value.qparams is not None:
            name = self.rounded(name, value.qparams)
        elif value.dtype is not None and value.dtype != torch.float32:
            self.is_dtype(name, value.dtype)
        self.names[register] = name

    def clamped(self, name: str, register: int, low: int, high: int, *, in_steps: bool = False) -> None:
        """As `leave`, of a uint8 value that is clamped to [low, high].

        Where QuantizeLinear itself does not saturate there, ONNX Runtime computes the operator before in integers only
        if it is rounded first and clamped afterwards, as integers.

        Args:
            in_steps: the tensor holds reals over the scale of the value.
        """
        value = self.program.values[register]
        assert value.qparams is not None
        if (low, high) == (0, 255) or in_steps or self.runtime.clamps_integers:
            scale, zero_point = value.qparams
            rounded = self.rounded(name, (1.0 if in_steps else scale, zero_point))
            self.names[register] = rounded
            if (low, high) == (0, 255):
                return
            ends = [self.constant(torch.tensor(end, dtype=torch.uint8), "limit") for end in (low, high)]
            clamped = self.same_sizes(self.node("Clip", rounded, *ends), rounded)
            self.names[register] = self.is_dtype(clamped, torch.uint8)
        else:
            self.leave(self._clip(name, value.qparams, low, high), register)

    def _clip(self, name: str, qparams: tuple[float, int], low: int, high: int) -> str:
        """Reals clamped at points of the grid, which are rounded to the limits themselves."""
        scale, zero_point = qparams
        if (low, high) == (zero_point, 255):
            return self.same_sizes(self.node("Relu", name), name)
        limits = [self.constant((end - zero_point) * torch.tensor(scale), "limit") for end in (low, high)]
        return self.same_sizes(self.node("Clip", name, *limits), name)

    # Sizes.

    def same_sizes(self, name: str, source: str, count: int = MOST_DIMENSIONS) -> str:
        """Note that a tensor's first sizes are those of another; gives its name."""
        for axis in range(count):
            self.note_size(name, axis, Dimension(source, axis))
        return name

    def note_size(self, name: str, axis: int, size: Dimension) -> None:
        """Note that a tensor has a known size."""
        first = self.origin(size)
        if first != (name, axis):
            self._sizes_of[name, axis] = first

    def origin(self, size: Dimension) -> tuple[str, int]:
        """The first tensor that is known to have this size, and its axis."""
        first = size.tensor, size.axis
        while first in self._sizes_of:
            first = self._sizes_of[first]
        return first

    def tell(self, integer: bool, why: str, kind: str, *, moves: bool = False, exact: bool = False) -> None:
        """Say what the step became."""
        self.forms.append(StepForm(self.step, kind, integer, why, moves, exact))


def _attribute(value: Any) -> Any:
    """An attribute as files give it back: texts are bytes, and numbers stand in lists."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (tuple, list)):
        return [_attribute(one) for one in value]
    return value
