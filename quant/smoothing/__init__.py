"""Outliers of activations: scaled into the weights, or given 16 bits, where the calibration data shows a gain.

`inputs.py` looks at what layers get, `choice.py` decides for the layers of one input, `smooth.py` is the verb. The
layers that it puts in place are `runtime/layers/scaled_linear.py`.
"""

from quant.smoothing.smooth import smooth

__all__ = ["smooth"]
