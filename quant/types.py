"""The types of what the verbs return and raise, for annotations and `except`; users construct none of them.

from quant.types import Comparison, Report

def worst(comparison: Comparison) -> str: ...
"""

from quant.artefact import ArtefactError
from quant.autoquant import Autoquantized, Trial
from quant.benchmark import Benchmark, Latency, Memory, StepTime, Threads
from quant.calibrate import Calibration, CalibrationError, CalibrationWarning, CheckpointError, DataError, Row
from quant.compare import Comparison
from quant.convert import NotCalibrated
from quant.dynamic_decisions import NothingQuantized
from quant.error_parts import Histogram, StepError
from quant.kernels import BackendUnavailable
from quant.kernels.tuning import Tuned, Tuning
from quant.metric import MetricError, MetricWarning
from quant.observers import NoDataSeen, ScaleCollapsed
from quant.parity import Parity
from quant.recipe import RecipeError
from quant.report import Report, ReportEntry
from quant.runtime.matching import CaptureMismatch
from quant.runtime.uncaptured import UncapturedCall
from quant.sensitivity import LayerSensitivity, Sensitivity
from quant.step_parity import StepParity

__all__ = [
    "ArtefactError",
    "Autoquantized",
    "BackendUnavailable",
    "Benchmark",
    "Calibration",
    "CalibrationError",
    "CalibrationWarning",
    "CaptureMismatch",
    "CheckpointError",
    "Comparison",
    "DataError",
    "Histogram",
    "Latency",
    "LayerSensitivity",
    "Memory",
    "MetricError",
    "MetricWarning",
    "NoDataSeen",
    "NotCalibrated",
    "NothingQuantized",
    "Parity",
    "RecipeError",
    "Report",
    "ReportEntry",
    "Row",
    "ScaleCollapsed",
    "Sensitivity",
    "StepError",
    "StepParity",
    "StepTime",
    "Threads",
    "Trial",
    "Tuned",
    "Tuning",
    "UncapturedCall",
]
