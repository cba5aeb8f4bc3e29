"""Sums that stay float32 because something reads them as reals, as the layer norms of a residual stream do.

Such a sum would be rounded to 8 bits at every block for the sake of the few integer layers that read it too. Kept in
float32 it is rounded for those alone. Sums of convolutional networks, which integer layers and other sums read, are
none of these.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quant.ops.arithmetic import Add
from quant.ops.moves import Move
from quant.ops.step import Step


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

    found: list[Step] = []
    stream: set[int] = set()
    for step in steps:
        of_stream = not stream.isdisjoint(step.inputs)
        adds, moves = isinstance(step.operator, Add), isinstance(step.operator, Move)
        if (adds and (of_stream or read_as_reals(step.output))) or (moves and of_stream):
            found.append(step)
            stream.add(step.output)
    return found
