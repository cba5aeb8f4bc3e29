"""Quantised models as files: `saving.py` writes them, `loading.py` reads them, `file.py` has the format.

A static conversion is built from the programs in its file (`load_programs.py`), or else by converting the float model
again with the ranges in it (`rebuild.py`).
"""

from quant.artefact.file import ArtefactError
from quant.artefact.loading import load, read_report
from quant.artefact.saving import save

__all__ = ["ArtefactError", "load", "read_report", "save"]
