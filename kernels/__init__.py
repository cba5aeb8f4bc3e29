"""Int8 arithmetic on plain tensors: schemes, reference operators, and the dispatch over the available backends."""

from quant.kernels.autotune import autotune
from quant.kernels.backend import Backend
from quant.kernels.dispatch import (
    BackendUnavailable,
    available,
    channel_sums,
    current,
    dequantize,
    histogram,
    observe_activation,
    observe_histogram,
    quantize,
    register_backend,
    requantize,
    use,
)
from quant.kernels.scheme import (
    ACTIVATION_U8,
    WEIGHT_S8,
    QParams,
    QScheme,
    choose_qparams,
    quantize_weight,
    weight_scheme,
)

__all__ = [
    "ACTIVATION_U8",
    "WEIGHT_S8",
    "Backend",
    "BackendUnavailable",
    "QParams",
    "QScheme",
    "autotune",
    "available",
    "channel_sums",
    "choose_qparams",
    "current",
    "dequantize",
    "histogram",
    "observe_activation",
    "observe_histogram",
    "quantize",
    "quantize_weight",
    "register_backend",
    "requantize",
    "use",
    "weight_scheme",
]
