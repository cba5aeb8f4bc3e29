"""Converted models for other programs: `whole_plan.py` reads a model as one native call, or says which step is none."""

from quant.export.whole_plan import ExportError, WholePlan, whole_plan

__all__ = ["ExportError", "WholePlan", "whole_plan"]
