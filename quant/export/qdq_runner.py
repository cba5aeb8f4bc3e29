"""Runs a program as float calls between roundings: the same steps, without an operator of this library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.export.qdq_layers import QDQLayer, limited
from quant.export.rounding import Rounding
from quant.export.table_functions import functions_of_tables
from quant.export.whole_plan import ExportError
from quant.kernels.backend import Backend
from quant.kernels.reference_ops import OPS, OpTable
from quant.runtime.instructions import (
    Dequantize,
    FloatCall,
    Instruction,
    IntegerMove,
    KernelCall,
    LayerCall,
    Quantize,
    RecurrentCall,
    TakeSequence,
    said_of,
)
from quant.runtime.layers.weighted import StaticLayer
from quant.runtime.matching import CaptureMismatch
from quant.runtime.program import Program
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.region import Region
from quant.runtime.schedule import Schedule
from quant.runtime.single_steps import SingleStep, move
from quant.runtime.trees import map_leaves

MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVG_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
ADAPTIVE_AVG_POOLS: dict[int, Any] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
ADAPTIVE_MAX_POOLS = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}


@dataclass(frozen=True)
class RealForm:
    """A kernel in real values.

    Attributes:
        compute: takes the kernel's arguments, real values for integers; scales and zero points do not matter to it.
        has_limits: whether the kernel's last two arguments are the least and the largest uint8 of its output.
    """

    compute: Callable[..., Tensor]
    has_limits: bool = False


def _add(a: Tensor, _za: int, _ma: float, b: Tensor, _zb: int, b_multiplier: float, *_: int) -> Tensor:
    return a + b if b_multiplier > 0 else a - b


REALS = {
    "add": RealForm(_add, has_limits=True),
    "mul": RealForm(lambda a, _za, b, *_: a * b, has_limits=True),
    "matmul": RealForm(lambda a, _za, b, *_: torch.matmul(a, b), has_limits=True),
    "matmul_f32": RealForm(lambda a, _za, b, *_: torch.matmul(a, b)),
    "max_pool": RealForm(lambda x, kernel, **options: MAX_POOLS[len(kernel)](x, kernel, **options)),
    "avg_pool": RealForm(lambda x, _z, kernel, *_, **options: AVG_POOLS[len(kernel)](x, kernel, **options)),
    "adaptive_avg_pool": RealForm(lambda x, _z, size, *_: ADAPTIVE_AVG_POOLS[len(size)](x, list(size))),
    "adaptive_max_pool": RealForm(lambda x, size: ADAPTIVE_MAX_POOLS[len(size)](x, list(size))),
    "mean": RealForm(lambda x, _z, dim, keepdim, *_: x.mean(list(dim), keepdim=keepdim)),
    "interpolate": RealForm(lambda x, *_, **options: F.interpolate(x, **options)),
    "pad": RealForm(lambda x, widths, mode, *_: F.pad(x, list(widths), mode)),
}
"""By the kernel's name."""

NO_FORM = (
    "which has no form of float calls between roundings; leave it float by the recipe, or export the model by "
    "torch.export as it is"
)
TWO_BYTES = "a layer with 16-bit activations (quantize_static(..., smooth=False) chooses none)"


class QDQRunner(ProgramRunner):
    """Runs a program by float calls between roundings.

    Attributes:
        calls: id of a layer's value -> the layer. functions: of a table's value -> what the table stands for.

    Args:
        of: the runner of the converted model.

    Raises:
        ExportError: a step has no such form; the message names it.
    """

    def __init__(self, of: ProgramRunner, rounding: Rounding) -> None:
        super().__init__(of.root, of.program, of.ranges, of.backend)
        self.layers, self.half_type, self.own_forward = of.layers, of.half_type, of.own_forward
        self.rounding = rounding
        self.calls = nn.ModuleDict()
        self.functions = functions_of_tables(of)
        for instruction in self.program.instructions:
            self._check(instruction)
            if isinstance(instruction, LayerCall):
                layer: Any = of.layer(instruction.layer)
                self.calls[str(instruction.out)] = QDQLayer(layer, instruction.site, rounding)
        self.others.extend(QDQRunner(other, rounding) for other in of.programs()[1:] if of.others)
        self.eval()

    def _check(self, instruction: Instruction) -> None:
        if isinstance(instruction, (RecurrentCall, TakeSequence)):
            kind = "a recurrent layer"
        elif isinstance(instruction, LayerCall) and not isinstance(self.layer(instruction.layer), StaticLayer):
            kind = f"a {type(self.layer(instruction.layer)).__name__}"
        elif isinstance(instruction, LayerCall) and self.program.values[instruction.source].qparams is None:
            kind = TWO_BYTES
        else:
            return
        raise ExportError(f"{said_of(instruction)} is {kind}, {NO_FORM}")

    def run_unlike(self, mismatch: CaptureMismatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """There is no other way: the user's own forward would call int8 layers."""
        raise mismatch

    @staticmethod
    def _schedule(program: Program, backend: Backend) -> Schedule | None:
        return None

    def _native(self, program: Program, instruction: FloatCall) -> Region | None:
        return None

    def _integers(self, instruction: Instruction, step: SingleStep, registers: dict[int, Any], table: OpTable) -> Any:
        if isinstance(instruction, KernelCall) and not self._has_form(instruction):
            return self._as_integers(instruction, step, registers)
        result = self._reals(instruction, step, registers)
        qparams = self.program.values[instruction.out].qparams
        if qparams is None:
            return result
        return map_leaves(lambda x: self.rounding.quantize(x, *qparams) if isinstance(x, Tensor) else x, result)

    def _reals(self, instruction: Instruction, step: SingleStep, registers: dict[int, Any]) -> Any:
        """What a step gives before its output is rounded."""
        reals = {**registers, **{one: self._real(one, registers) for one in instruction.reads}}
        if isinstance(instruction, Quantize):
            return reals[instruction.source].float()
        if isinstance(instruction, Dequantize):
            return reals[instruction.source]
        if isinstance(instruction, LayerCall):
            layer: Any = self.calls[str(instruction.out)]
            return self._limited(layer(reals[instruction.source]), instruction.out, layer.limits)
        args, kwargs = step.args(reals), step.kwargs(reals)
        if isinstance(instruction, IntegerMove):
            return move(instruction, self.root, args, kwargs)
        assert isinstance(instruction, KernelCall)
        if instruction.out in self.functions:
            return self.functions[instruction.out](args[0], self.root)
        form = REALS[instruction.kernel]
        return self._limited(form.compute(*args, **kwargs), instruction.out, args[-2:] if form.has_limits else None)

    def _has_form(self, instruction: KernelCall) -> bool:
        return instruction.out in self.functions or REALS.get(instruction.kernel) is not None

    def _real(self, register: int, registers: dict[int, Any]) -> Any:
        qparams, held = self.program.values[register].qparams, registers[register]
        if qparams is None:
            return held
        return map_leaves(lambda q: self.rounding.dequantize(q, *qparams) if isinstance(q, Tensor) else q, held)

    def _limited(self, y: Tensor, out: int, limits: tuple[int, int] | None) -> Tensor:
        qparams = self.program.values[out].qparams
        return y if limits is None or qparams is None else limited(y, limits, *qparams)

    def _as_integers(self, instruction: KernelCall, step: SingleStep, registers: dict[int, Any]) -> Tensor:
        """A step without a form of real values, as a table or a kernel of others: the reference's arithmetic."""
        shift = self.rounding.shift

        def bytes_of(register: int) -> Any:
            held = registers[register]
            if not shift or self.program.values[register].qparams is None:
                return held
            return (held.to(torch.int16) + shift).to(torch.uint8)

        read = {**registers, **{one: bytes_of(one) for one in instruction.reads}}
        q = OPS[instruction.kernel](*step.args(read), **step.kwargs(read))
        return (q.to(torch.int16) - shift).to(torch.int8) if shift and q.dtype == torch.uint8 else q
