"""Values that stay float32 because some reader wants them in float; they are rounded for their integer readers alone.

First, the sums of a residual stream that layer norms read: they would be rounded to 8 bits at every block for the few
integer layers that read them too. Sums in convolutional networks, which integer layers and other sums read, are not
among them. Second, values that the caller or a float step reads beside integer steps, where this is free: layers and
matrix products have kernels with float32 results, and rounding these for the integer readers takes as long as
dequantising for the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quant.ops.arithmetic import Add, Mul
from quant.ops.lookup import Lookup
from quant.ops.operator import Float, ShapeOnly
from quant.ops.step import Step
from quant.ops.views import View


def float_streams(
    steps: Sequence[Step], users: dict[int, list[int]], computing: Collection[int], moving: Collection[int]
) -> list[Step]:
    """The integer steps that should be float: sums that float computations read, sums of these, and views of them.

    Args:
        steps: of a graph, in order; all other decisions about their domains are taken.
        users: as from `Graph.users`.
        computing: outputs of steps without an integer form, such as layer norms. Steps that are float because of
            their neighbours, and layers that the recipe leaves float, do not count: they could read integers.
        moving: outputs of views, float or not.
    """
    makers = {index: step for step in steps for index in step.nodes}

    def read_as_reals(value: int) -> bool:
        outputs = {makers[user].output for user in users[value] if user in makers}
        return any(one in computing or (one in moving and read_as_reals(one)) for one in outputs)

    demoted: list[Step] = []
    stream: set[int] = set()
    for step in steps:
        of_stream = not stream.isdisjoint(step.inputs)
        adds, moves = isinstance(step.operator, Add), isinstance(step.operator, View)
        if (adds and (of_stream or read_as_reals(step.output))) or (moves and of_stream):
            demoted.append(step)
            stream.add(step.output)
    return demoted


def gives_reals(step: Step) -> bool:
    """Whether a step can give float32 without rounding to 8 bits first."""
    return step.operator.gives_reals


def wanted_as_reals(steps: Sequence[Step], users: dict[int, list[int]]) -> set[int]:
    """The values that float steps, layers with 16-bit activations or the caller read unrounded."""
    makers = {index: step for step in steps for index in step.nodes}

    def reads(value: int, user: int) -> bool:
        reader = makers.get(user)  # None: the graph's output
        if reader is None or reader.reads_two_bytes:
            return True
        return not isinstance(reader.operator, ShapeOnly) and value not in reader.inputs

    return {step.output for step in steps if any(reads(step.output, user) for user in users[step.output])}


def wanted_unrounded(steps: Sequence[Step], users: dict[int, list[int]]) -> list[Step]:
    """The integer steps, besides those of `float_streams`, that should be float because their readers or operands are.

    These are views of a kernel's float32 result, functions of it that the caller gets, sums and products with an
    operand that is computed in float and would be rounded for them, and whatever would give 8 bits to a layer with
    16-bit activations.

    Args:
        steps, users: as for `float_streams`.
    """
    makers = {index: step for step in steps for index in step.nodes}
    wanted = wanted_as_reals(steps, users)
    returned = {step.output for step in steps if any(user not in makers for user in users[step.output])}
    finely = {value for step in steps if step.reads_two_bytes for value in step.inputs}
    demoted: list[Step] = []
    for step in reversed(steps):
        if not step.integer or not step.inputs:
            continue
        coarse = step.output in finely and not step.operator.anchor and not gives_reals(step)
        if coarse and len(step.inputs) == 1:  # of a sum, each operand is rounded once, and the sum no more
            finely.update(step.inputs)
        moves = isinstance(step.operator, View) and step.output in wanted and gives_reals(_origin(step, makers))
        shown = isinstance(step.operator, Lookup) and step.output in returned and gives_reals(makers[step.inputs[0]])
        mixed = isinstance(step.operator, (Add, Mul)) and any(computes_reals(makers[value]) for value in step.inputs)
        if moves or shown or mixed or coarse:
            demoted.append(step)
            wanted.update(step.inputs)
    return demoted


def computes_reals(step: Step) -> bool:
    """Whether a step is float arithmetic, and not an input or a layer that is left float."""
    return isinstance(step.operator, Float) and not step.operator.has_integer_form


def _origin(step: Step, makers: dict[int, Step]) -> Step:
    """The step that computed the value of `step`: itself, or the source of a chain of integer views."""
    while isinstance(step.operator, View) and step.inputs:
        step = makers[step.inputs[0]]
    return step
