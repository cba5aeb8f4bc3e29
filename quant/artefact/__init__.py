"""Quantised models as files: `file.py` is the file, `models.py` what is in it; `rebuild.py` converts without data."""

from quant.artefact.file import ArtefactError
from quant.artefact.models import load, read_report, save

__all__ = ["ArtefactError", "load", "read_report", "save"]
