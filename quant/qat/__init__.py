"""Quantisation-aware training: a model that computes what its int8 form will, with gradients.

`prepare.py` builds it and `runner.py` runs it. Of its layers, `weights.py` rounds the weights, `batch_norm.py` trains
a norm with the layer before it, `recurrent.py` and `dynamic.py` have layers of other kinds; `fake_quantizers.py` has
the ranges of activations. `schedule.py` says when the `switches.py` are set and tells a logger what `tracked.py`
reads, `ranks.py` trains in several processes, and `checks.py` warns of mistakes that training would hide.
"""

from quant.qat.checks import check_optimizer
from quant.qat.distill import distill_loss
from quant.qat.prepare import prepare_qat
from quant.qat.schedule import QATSchedule
from quant.qat.switches import freeze_norms, freeze_ranges, observe_only, round_values, sync_ranges
from quant.qat.tracked import tracked_ranges

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
    "tracked_ranges",
]
