"""Weights rounded by what they do to the output: pure functions of a weight and of second moments of its input.

A layer's error on data is quadratic in its weight, so second moments of its inputs are all that a choice of integers
needs:

    (R1)  E |W x - V x'|**2 = sum over rows of  (v - t) H (v - t)' + const,    t = w C inv(H)
          with H = E[x' x''] and C = E[x x'']

for a float weight W (out, in) on inputs x of the float model, and the rounded V on the inputs x' that the layer gets
behind rounded ones. With x' = x the target t is w itself, as in the papers. `scales.py` chooses scales by the
diagonal of H, `gptq.py` and `adaround.py` integers by all of it, and `descent.py` moves integers until none alone can
do better; `methods.py` has them by their names, and `checkpoint.py` the file of interrupted runs. Models and layers
are not known here: `quant/reconstruction/` brings them, and `quant/dynamic_rounding.py`.
"""

from quant.rounding.adaround import adaround
from quant.rounding.descent import descend, output_error
from quant.rounding.gptq import gptq
from quant.rounding.scales import least_error_scale

__all__ = ["adaround", "descend", "gptq", "least_error_scale", "output_error"]
