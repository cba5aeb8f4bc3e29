"""Modules that the user replaces in a converted model: which steps they affect, and how these steps then run.

A program refers to the modules that the model had when it was converted. Where a path leads to another module now, its
step runs in float with that module and is rounded to its range; a batch norm that was folded into the old layer is gone
with it. A step that cannot run so is an error. The float calls of all integer steps are a program of their own,
`floats`, of which single values are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn

from quant.kernels.reference_ops import OpTable
from quant.runtime.callee import Submodule
from quant.runtime.instructions import FloatCall, Guard, Instruction, RecurrentCall
from quant.runtime.matching import check_guard
from quant.runtime.names import attribute
from quant.runtime.origin import Origin
from quant.runtime.program import Program
from quant.runtime.single_steps import call
from quant.runtime.trees import Attr, Ref, map_leaves, settle
from quant.runtime.values import Held, Value


class ProgramOrigin(Origin):
    """The modules that a program was converted from, and how its steps are computed by others in their places.

    Args:
        program: whose instructions name them.
        floats: a program of the float calls that its integer steps stand for, for values of the same graph.
        int8: paths of those that are int8 layers, in which only their class is compared with another module's.
    """

    def __init__(self, root: nn.Module, program: Program, floats: Program, int8: Collection[str]) -> None:
        super().__init__(root, program.instructions, floats.instructions, int8)
        self.floats = floats
        self._calls = {floats.values[one.out].node: one for one in floats.instructions}

    def run(
        self,
        instruction: Instruction,
        values: Sequence[Value],
        registers: dict[int, Any],
        ranges: dict[int, tuple[float, int]],
        table: OpTable,
    ) -> Any:
        """Run a step whose modules were replaced: in float with the new modules, then rounded to its range.

        Raises:
            RuntimeError: the replaced module is not a layer of its own in the program.
        """
        self._check(instruction)
        held, out = Held(), values[instruction.out]
        for one in instruction.reads:
            held.keep(values[one], registers[one])

        def real(node: int) -> Any:
            if node in held.reals:
                return held.reals[node]
            if node in held.integers:
                return map_leaves(lambda q: _dequantized(q, *ranges[node], table), held.integers[node])
            return self._computed(node, real)

        result = self._computed(out.node, real)
        if out.qparams is None:
            return result
        return map_leaves(lambda x: table["quantize"](x, *ranges[out.node]) if isinstance(x, Tensor) else x, result)

    def _computed(self, node: int, real: Callable[[int], Any]) -> Any:
        """The float value of a node; `real` returns those that its call reads."""
        own, values = self._calls[node], self.floats.values

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return real(values[leaf.index].node)
            return attribute(self.root, leaf.path) if isinstance(leaf, Attr) else leaf

        args, kwargs = map_leaves(filled, own.arguments)
        if isinstance(own, Guard):
            return check_guard(args[0], args[1], own.owner, self.root, node)
        assert isinstance(own, FloatCall)
        if isinstance(own.callee, Submodule):
            args, kwargs = settle(args, {}), settle(kwargs, {})
        return call(own, self.root, args, kwargs)

    def _check(self, instruction: Instruction) -> None:
        changed = [edge.path for edge in self.changed(instruction)]
        around = [path for path in changed if path not in self.layers]
        kept = [edge.path for edge in self.edges(instruction) if edge.path not in changed and edge.path in self.int8]
        rounded = isinstance(instruction, RecurrentCall) and instruction.integers
        if around or kept or rounded or instruction.own:
            why = (
                f"was computed together with {kept[0]!r}"
                if kept and not around
                else "is no single float layer of the program"
            )
            raise RuntimeError(
                f"layer {(around or changed)[0]!r}: it was replaced after quant.convert, and {why}; replace it in the "
                "float model and prepare that, or leave it float by the recipe and replace it then"
            )


def _dequantized(q: Any, scale: float, zero_point: int, table: OpTable) -> Any:
    return table["dequantize"](q, scale, zero_point).contiguous() if isinstance(q, Tensor) else q
