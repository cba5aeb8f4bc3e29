"""From the steps of a plan to the calls of integer operators: which, with which numbers.

Registers: value v of the graph in float is register 2 * v, in uint8 register 2 * v + 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quant.ops.lowering import Context
from quant.ops.step import Step


@dataclass
class Instruction:
    """One operator call of a converted graph.

    Attributes:
        op: a name in the table of operators; "layer" calls an int8 layer; "recurrent" one with states, and "first"
            takes the sequence of what it gave; "call" evaluates a captured call in float, "move" one that only moves
            values, on integers.
        target: of a layer its key, of "call" and "move" the node's index.
        args: Ref to registers, or constants.
        kwargs: likewise; of a "move" that joins values of several ranges, by register how each becomes one of the
            result's (`_cat`).
        out: the register it fills.
        step: name of the step it belongs to, for errors and comparisons.
    """

    op: str
    args: tuple[Any, ...]
    out: int
    target: Any = None
    kwargs: dict[Any, Any] = field(default_factory=dict)
    step: str = ""


def lower(step: Step, context: Context) -> Instruction:
    """The operator call of an integer step that has no weight."""
    made = step.operator.lower(step, context)
    out = 2 * step.output + (step.output in context.emitted)
    return Instruction(made.name, made.args, out, step.output, made.kwargs, step.name)
