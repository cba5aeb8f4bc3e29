"""Driving data through an observed model, and saying what its observers found. README.md is the manual."""

from __future__ import annotations

from quant.calibrate.distributed import sync
from quant.calibrate.driver import Calibration, run
from quant.calibrate.errors import CalibrationError, CalibrationWarning, CheckpointError, DataError
from quant.calibrate.readers import read
from quant.calibrate.report import Row, ranges

__all__ = [
    "Calibration",
    "CalibrationError",
    "CalibrationWarning",
    "CheckpointError",
    "DataError",
    "Row",
    "ranges",
    "read",
    "run",
    "sync",
]
