"""SiLU between reals, as behind a norm; its kernel rounds otherwise than torch's in the last bits.

Between integers it is a table (`lookup.py`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from quant.ops.planning import Lines, PlanCall, Unplanned
from quant.ops.registry import plans_reals
from quant.runtime.module_calls import SiluCall


@plans_reals(F.silu, exact=False)
def silu_function(call: PlanCall) -> Lines:
    """`F.silu` that leaves its input as it is."""
    if call.setting(1, "inplace", False):
        raise Unplanned("it writes to its input")
    return [("silu", {"x": call.tensor()})]


@plans_reals(nn.SiLU, exact=False)
def silu(call: PlanCall) -> SiluCall:
    """`nn.SiLU` that leaves its input as it is."""
    planned = SiluCall(call.out, (call.tensor().index,), call.node.target)
    if call.module is None or not planned.holds(call.module):
        raise Unplanned("it writes to its input, or is hooked")
    return planned
