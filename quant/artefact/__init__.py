"""Quantised models as files: `saving.py` writes them and `loading.py` reads them; `file.py` is the file.

Static conversions are built from their programs (`load_programs.py`), or made again by `rebuild.py`.
"""

from quant.artefact.file import ArtefactError
from quant.artefact.loading import load, read_report
from quant.artefact.saving import save

__all__ = ["ArtefactError", "load", "read_report", "save"]
