"""Quantisation-aware training: a model that computes what its int8 form will, with gradients.

`prepare.py` makes it, `runner.py` runs it, `norm.py` and `weights.py` are its layers, `points.py` its ranges;
`phases.py` and `schedule.py` say what happens when; `ranks.py` trains in several processes;
`checks.py` finds what would go wrong in silence.
"""

from quant.qat.checks import check_optimizer
from quant.qat.distill import distill_loss
from quant.qat.phases import freeze_norms, freeze_ranges, observe_only, round_values, sync_ranges
from quant.qat.prepare import prepare_qat
from quant.qat.schedule import QATSchedule

__all__ = [
    "QATSchedule",
    "check_optimizer",
    "distill_loss",
    "freeze_norms",
    "freeze_ranges",
    "observe_only",
    "prepare_qat",
    "round_values",
    "sync_ranges",
]
