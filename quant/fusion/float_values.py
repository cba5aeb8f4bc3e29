"""Values that stay float32 because something reads them as reals, and are rounded for their integer readers alone.

First the sums of a residual stream, which its layer norms read: they would be rounded to 8 bits at every block for the
sake of the few integer layers that read them too. Sums of convolutional networks, which integer layers and other sums
read, are none of these. Then whatever the caller gets, or a float step reads, beside integer steps, where it costs
nothing: layers and matrix products have kernels that give float32, and to round that for the integer readers takes as
long as to turn integers back for the others.
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
    """The integer steps that are better float: sums that float computations read, sums of these, and moves of them.

    Args:
        steps: of a graph, in order, their domains chosen but for this.
        users: of `Graph.users`.
        computing: outputs of steps without an integer form, such as layer norms. A step that is float because of its
            neighbours, and a layer that the recipe leaves float, are none: they would read integers as well.
        moving: outputs of steps that move values, float or not.
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
    """Whether a step can give float32 without a rounding to 8 bits before."""
    return step.operator.gives_reals


def wanted_as_reals(steps: Sequence[Step], users: dict[int, list[int]]) -> set[int]:
    """The values that float steps or the caller read as they are."""
    makers = {index: step for step in steps for index in step.nodes}

    def reads(value: int, user: int) -> bool:
        reader = makers.get(user)  # None: the graph's output
        return reader is None or (not isinstance(reader.operator, ShapeOnly) and value not in reader.inputs)

    return {step.output for step in steps if any(reads(step.output, user) for user in users[step.output])}


def wanted_unrounded(steps: Sequence[Step], users: dict[int, list[int]]) -> list[Step]:
    """The integer steps besides those of `float_streams` that are better float, as their readers or operands are.

    They are moves of what a kernel gives in float32, functions of that whose values the caller gets, and sums and
    products that take in what is computed in float, which would be rounded for them.

    Args:
        steps, users: as for `float_streams`.
    """
    makers = {index: step for step in steps for index in step.nodes}
    wanted = wanted_as_reals(steps, users)
    returned = {step.output for step in steps if any(user not in makers for user in users[step.output])}
    demoted: list[Step] = []
    for step in reversed(steps):
        if not step.integer or not step.inputs:
            continue
        moves = isinstance(step.operator, View) and step.output in wanted and gives_reals(_origin(step, makers))
        shown = isinstance(step.operator, Lookup) and step.output in returned and gives_reals(makers[step.inputs[0]])
        mixed = isinstance(step.operator, (Add, Mul)) and any(computes_reals(makers[value]) for value in step.inputs)
        if moves or shown or mixed:
            demoted.append(step)
            wanted.update(step.inputs)
    return demoted


def computes_reals(step: Step) -> bool:
    """Whether a step is float arithmetic; a layer that is left float, or given inputs, may stand beside integers."""
    return isinstance(step.operator, Float) and not step.operator.has_integer_form


def _origin(step: Step, makers: dict[int, Step]) -> Step:
    """The step that computed what `step` gives: itself, or what integer moves take it from."""
    while isinstance(step.operator, View) and step.inputs:
        step = makers[step.inputs[0]]
    return step
