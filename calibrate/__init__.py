"""Runs data through a prepared model and reports what its observers saw. README.md is the manual."""

from __future__ import annotations

from quant.calibrate.batch_norm import BatchNormEstimate, reestimate_batch_norm
from quant.calibrate.distributed import sync
from quant.calibrate.driver import Calibration, run
from quant.calibrate.errors import CalibrationError, CalibrationWarning, CheckpointError, DataError
from quant.calibrate.ranges_file import load_ranges, save_ranges, set_ranges
from quant.calibrate.readers import read
from quant.calibrate.report import Row, ranges

__all__ = [
    "BatchNormEstimate",
    "Calibration",
    "CalibrationError",
    "CalibrationWarning",
    "CheckpointError",
    "DataError",
    "Row",
    "load_ranges",
    "ranges",
    "read",
    "reestimate_batch_norm",
    "run",
    "save_ranges",
    "set_ranges",
    "sync",
]
