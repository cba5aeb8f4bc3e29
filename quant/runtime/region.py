"""A region of a program: instructions that one native call computes, and the text that says what they are.

The text is made from the layers' numbers at the end of the conversion, and again where a module or buffer is replaced.
"""

from __future__ import annotations

import functools
import re
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from quant.kernels.reference_plan import CHECKS_OF_SIZES, HEADER, READS_OF_BYTES, Constant, operation_of
from quant.runtime import nonfinite
from quant.runtime.instructions import FloatCall, Guard, Instruction, LayerCall, Quantize, said_of
from quant.runtime.int8_layer import Int8Layer
from quant.runtime.keys import LayerKey
from quant.runtime.layer_lines import layer_lines
from quant.runtime.module_call import ModuleCall
from quant.runtime.names import submodule
from quant.runtime.origin import Origin

RUN_AS_THEY_ARE = (torch.bfloat16, torch.float16, torch.int32)
"""Dtypes that steps take and plans do not; int32 of indices."""


FIRST_LINE = 2
"""Of a text's lines, the first that is an operation, below the header and the inputs; the last names the outputs."""


class LineTime(NamedTuple):
    """An operation of a native call: its instruction, its name, its seconds, and whether it ends the instruction."""

    instruction: Instruction
    operation: str
    seconds: float
    ends: bool


class Home(Protocol):
    """What a region's modules are found in: a `ProgramRunner`."""

    root: nn.Module

    @property
    def origin(self) -> Origin | None:
        """The modules that its program was made of."""

    def layer(self, key: LayerKey) -> Int8Layer:
        """An int8 layer of the program."""


@dataclass
class Region:
    """Instructions that are computed in one call.

    Attributes:
        pieces: lines as text, and calls of layers and modules, whose numbers are read when the region runs.
        constants: tensors that the lines name as $0, $1, ...; those of layers follow.
        inputs, outputs: registers.
        tail: instructions that look at an output's shape or cut it into a tuple, for what comes after the region.
        drops: registers that nobody reads after it.
        steps: how many instructions it stands for.
        instructions: these.
        ranks: dimensions of the inputs as captured, where a check of dimensions is among the instructions; else None.
        booleans: whether each input was of booleans as captured.
    """

    pieces: list[str | LayerCall | ModuleCall]
    constants: list[Tensor]
    inputs: list[int]
    outputs: list[int]
    tail: list[Instruction]
    drops: list[int]
    steps: int
    instructions: list[Instruction]
    ranks: list[int] | None = None
    booleans: list[bool] = field(default_factory=list)
    _checks_sizes: bool = field(init=False, repr=False, compare=False)
    _members: _Members | None = field(default=None, repr=False, compare=False)
    _text: _Text | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        # In a graph the guards that are these checks have to run by themselves.
        self._checks_sizes = any(isinstance(one, str) and operation_of(one) in CHECKS_OF_SIZES for one in self.pieces)

    def run(self, registers: dict[int, Any], home: Home, backend: str) -> bool:
        """Fill the registers that others read; False, and nothing done, where the instructions have to run as they are.

        They have to where a float module is hooked or training, a module was replaced, an input has other dimensions
        than what is checked, a guard fails, a mask is of booleans and was not when captured, or the other way round, or
        where a value that is quantised is NaN or inf.
        """
        inputs = [registers[index] for index in self.inputs]
        if self.ranks is not None and [one.dim() for one in inputs] != self.ranks:
            return False
        boolean = torch.bool
        if [one.dtype is boolean for one in inputs] != self.booleans:
            return False
        compiling = torch.compiler.is_compiling()
        text = self.text(home, compiling=compiling)
        if text is None:
            return False
        inputs = self._bytes(inputs)
        if compiling or torch._C._is_tracing():  # nonfinite.in_a_graph, less a call of 0.1 us
            if self._checks_sizes:
                return False
            nonfinite.note_inputs(inputs, self._quantized(), registers)
            outputs = torch.ops.octet.run_plan(inputs, text.constants or [_NOTHING], text.program, backend)
        else:
            try:
                outputs = _run_text()(inputs, text.number(backend))
            except (TypeError, ValueError, IndexError) as error:
                if any(one.dtype in RUN_AS_THEY_ARE for one in inputs):
                    return False  # as under autocast, whose float layers give a half type
                blamed, why = self._blamed(str(error), text, inputs)
                # A guard says by itself that the program does not stand for the call; float() takes any type.
                if isinstance(blamed, Guard) or self._makes_floats_of_bytes(blamed):
                    return False
                raise type(error)(f"{said_of(blamed)}: {why}") from error
            if not outputs and self.outputs:
                return False
        for index, value in zip(self.outputs, outputs, strict=True):
            registers[index] = value
        return True

    def run_timed(self, registers: dict[int, Any], home: Home, backend: str) -> list[LineTime] | None:
        """As `run`, with the time of each operation; None where the instructions have to run as they are.

        The first call of a shape builds the plan, whose time is not counted.
        """
        inputs = [registers[index] for index in self.inputs]
        if self.ranks is not None and [one.dim() for one in inputs] != self.ranks:
            return None
        text = self.text(home)
        if text is None or [one.dtype is torch.bool for one in inputs] != self.booleans:
            return None
        outputs, nanoseconds = torch.ops.octet_native.time_text(self._bytes(inputs), text.number(backend))
        if not outputs and self.outputs:
            return None
        registers.update(zip(self.outputs, outputs, strict=True))
        lines = text.program.split("\n")[FIRST_LINE:-1]
        owners = self._owners(lines)
        return [
            LineTime(owner, operation_of(line), taken * 1e-9, owner is not follower)
            for owner, follower, line, taken in zip(owners, [*owners[1:], None], lines, nanoseconds, strict=True)
        ]

    def _bytes(self, inputs: list[Tensor]) -> list[Tensor]:
        """The inputs with masks of booleans as bytes, which plans read."""
        if True not in self.booleans:
            return inputs
        return [one.view(torch.uint8) if one.dtype is torch.bool else one for one in inputs]

    def _owners(self, lines: list[str]) -> list[Instruction]:
        """The instruction of each line. Lines of one have registers of their own; the last of them gives its value."""
        instructions = {one.out: one for one in self.instructions}
        owners = []
        owner = self.instructions[-1]
        for line in reversed(lines):
            owner = instructions.get(int(line[1 : line.index(" ")]), owner)
            owners.append(owner)
        return owners[::-1]

    def text(self, home: Home, *, compiling: bool = False) -> _Text | None:
        """The text as of now; None where the instructions have to run as they are.

        Where a graph is made, writes to tensors are not looked for.
        """
        members = self._members
        if members is None or not members.stand():
            members = self._members = _Members(self, home)
        if not members.whole or not members.hold():
            return None
        text = self._text
        if text is None or text.members is not members or not text.current() or not (compiling or text.unwritten()):
            text = self._text = _Text(self, members)
        return text

    def _quantized(self) -> set[int]:
        """The places of the inputs that are made integers as they come."""
        # A layer that reads float32 makes two bytes of it.
        read = {one.source for one in self.instructions if isinstance(one, (Quantize, LayerCall))}
        return {place for place, index in enumerate(self.inputs) if index in read}

    def _blamed(self, error: str, text: _Text, inputs: list[Tensor]) -> tuple[Instruction, str]:
        """The instruction that an error of the native call is of, and what it says: a line of the text, or an input."""
        matched = re.search(r"plan line '%(\d+) = [^']*': (.*)", error, re.DOTALL)
        if matched is None:
            tensors = zip(self.inputs, inputs, strict=True)
            wrong = {place for place, one in tensors if one.dtype not in (torch.float32, torch.uint8)}
            return next((one for one in self.instructions if one.reads & wrong), self.instructions[0]), error
        lines = text.program.split("\n")[FIRST_LINE:-1]
        place = next(place for place, line in enumerate(lines) if line.startswith(f"%{matched[1]} = "))
        return self._owners(lines)[place], matched[2]

    def _makes_floats_of_bytes(self, blamed: Instruction) -> bool:
        lines = (piece for piece in self.pieces if isinstance(piece, str) and piece.startswith(f"%{blamed.out} = "))
        return isinstance(blamed, FloatCall) and any(operation_of(line) in READS_OF_BYTES for line in lines)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_members": None, "_text": None}


class _Members:
    """The modules of a region, as its paths led to them.

    Attributes:
        layers: by key. calls: of float modules, each with its module.
        edges: of all paths, in which parent's dictionary which name was which module. To compare them costs a tenth of
            following the paths anew.
        whole: whether they are all those that the region was made of.
    """

    def __init__(self, region: Region, home: Home) -> None:
        self.layers: dict[LayerKey, Int8Layer] = {}
        self.calls: list[tuple[ModuleCall, nn.Module]] = []
        self.edges: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []
        made_of = [] if home.origin is None else home.origin.standing(region.instructions)
        self.whole = made_of is not None
        if made_of is None:
            return
        self.edges += [(edge.children, edge.name, edge.module) for edge in made_of]
        found = {"": home.root}
        for piece in region.pieces:
            if isinstance(piece, LayerCall):
                self.layers[piece.layer] = home.layer(piece.layer)
            elif isinstance(piece, ModuleCall):
                self.calls.append((piece, self._follow(piece.path, found)))

    def _follow(self, path: str, found: dict[str, nn.Module]) -> nn.Module:
        """The module at a path; every one on the way there that `found` does not have yet is put into it and noted."""
        if path not in found:
            above, _, name = path.rpartition(".")
            parent = self._follow(above, found)
            found[path] = submodule(parent, name)
            children: Any = parent._modules
            self.edges.append((children, name, found[path]))
        return found[path]

    def stand(self) -> bool:
        """Whether the paths lead to them still."""
        if not self.whole:
            return False
        try:
            for children, name, module in self.edges:
                if children[name] is not module:
                    return False
        except KeyError:
            return False
        return True

    def hold(self) -> bool:
        """Whether the float modules may be computed natively in this call."""
        return not self.calls or all(call.holds(module) for call, module in self.calls)


class _Text:
    """A region's text as of now, with what it was made from."""

    def __init__(self, region: Region, members: _Members) -> None:
        self.members = members
        self.constants = list(region.constants)
        self.numbers: list[tuple[dict[Any, Any], Any, Any]] = []
        self.versions: list[tuple[Tensor, int]] = []
        modules = iter(module for _, module in members.calls)
        lines = [HEADER, " ".join(["inputs", *(f"%{index}" for index in region.inputs)])]
        for piece in region.pieces:
            if isinstance(piece, LayerCall):
                lines += self._layer(piece, members.layers[piece.layer], LAYERED + len(lines))
            else:
                lines.append(piece if isinstance(piece, str) else self._module(piece, next(modules)))
        lines.append(" ".join(["outputs", *(f"%{index}" for index in region.outputs)]))
        self.program = "\n".join(lines)
        self._kept: dict[str, int] = {}

    def number(self, backend: str) -> int:
        """The number by which `run` knows this text for a backend."""
        number = self._kept.get(backend)
        if number is None:
            number = _unseen(torch.ops.octet_native.keep_text, self.constants, self.program, backend)
            weakref.finalize(self, _unseen, torch.ops.octet_native.drop_text, number).atexit = False
            number = self._kept.setdefault(backend, number)  # of two threads that came at once, the first one's
        return number

    def _layer(self, call: LayerCall, layer: Int8Layer, spare: int) -> list[str]:
        """The lines that do what `Int8Layer.compute` does."""
        known = layer.site(call.site)
        self.numbers += layer.places(call.site)
        self.versions += known.versions
        return [str(line) for line in layer_lines(call, layer, known, spare, self._constant)]

    def _module(self, call: ModuleCall, module: Any) -> str:
        """The line that does what a float module does."""
        self.numbers += [(store, name, store[name]) for store, name in call.numbers(module)]
        return str(call.line(module, self._constant))

    def _constant(self, tensor: Tensor) -> Constant:
        self.constants.append(tensor)
        return Constant(len(self.constants) - 1)

    def current(self) -> bool:
        """Whether the numbers of the modules are still those that the text was made from."""
        try:
            for store, name, value in self.numbers:
                if store[name] is not value:
                    return False
        except KeyError:
            return False
        return True

    def unwritten(self) -> bool:
        """Whether nobody wrote to the tensors that numbers of layers are derived from."""
        for tensor, version in self.versions:  # noqa: SIM110  # a generator for `all` costs more
            if tensor._version != version:
                return False
        return True


@functools.cache
def _run_text() -> Any:
    """The operator that runs a text by its number; to find it by its name takes 0.3 microseconds."""
    return torch.ops.octet_native.run_text.default


def _unseen(operator: Any, *args: Any) -> Any:
    """Call an operator that is no part of what a mode of torch records; a text may be dropped at any time."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return operator(*args)


_NOTHING = torch.zeros(1)
"""The constant of a text in a graph that names none: AOTInductor takes an empty list for no list, and refuses it."""

LAYERED = 1 << 20
"""Registers from here on hold what is between the operations of one layer."""
