"""Converted models for other programs.

`whole_plan.py` reads a model as one native call, or says which step is none, and `planned_model.py` runs that. `qdq.py`
writes it in torch's own operators, and `executorch.py` lowers that; loading a file needs neither, so they are imported
by their own names.
"""

from quant.export.planned_model import PlannedModel, to_plan
from quant.export.whole_plan import ExportError, WholePlan, whole_plan

__all__ = ["ExportError", "PlannedModel", "WholePlan", "to_plan", "whole_plan"]
