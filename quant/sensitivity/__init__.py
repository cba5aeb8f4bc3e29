"""Which layers int8 harms, measured at the model's output: each layer alone in int8, and each alone in float.

`quant.compare` says what each step adds where it stands; here is what becomes of it at the end, in dB, in nats, and by
the user's own metric.
"""

from __future__ import annotations

from quant.sensitivity.measure import sensitivity
from quant.sensitivity.result import LayerSensitivity, Sensitivity

__all__ = ["LayerSensitivity", "Sensitivity", "sensitivity"]
