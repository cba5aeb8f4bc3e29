"""What the report says of integers that were taken over: where they come from, and what could not be carried over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from statistics import median

from torch import nn

from quant.migrate.recorded_run import Range
from quant.report import Report, ReportEntry, attach_report, summary

REDUCED_STEPS = 127
"""The highest integer of a range that was chosen with `reduce_range`."""

REDUCED_SHARE = 140
"""Steps that the middle one of a model's values fills at most, where its ranges were chosen with `reduce_range`."""


@dataclass
class Remarks:
    """What is to be said.

    Attributes:
        layers: by the name of a layer in the float model, or of a step.
        model: of the whole.
    """

    layers: dict[str, list[str]] = field(default_factory=dict)
    model: list[str] = field(default_factory=list)

    def add(self, name: str, text: str) -> None:
        """Say something of a layer or a step, once; '' is nothing."""
        texts = self.layers.setdefault(name, [])
        if text and text not in texts:
            texts.append(text)

    def attach(self, model: nn.Module, source: str) -> None:
        """Add everything to the report of a converted model; `source` is the class of the model that it came from."""
        report = summary(model)
        entries = [self._with_remarks(one) for one in report]
        named = {one.name for one in entries}
        entries += [
            ReportEntry(name, "function", "int8", "; ".join(texts), 0, 0)
            for name, texts in self.layers.items()
            if texts and name not in named
        ]
        for number, text in enumerate(self.model, 1):
            entries.append(ReportEntry(f"(torch.ao {number})", source, "int8", text, 0, 0))
        attach_report(model, Report(tuple(entries), report.float_bytes))

    def _with_remarks(self, entry: ReportEntry) -> ReportEntry:
        return replace(entry, detail="; ".join([entry.detail, *self.layers.get(entry.name, [])]))


def resolution_remark(ranges: Iterable[Range]) -> str:
    """What `reduce_range` cost, where a model's ranges look like it; else ''.

    torch.ao's default settings for x86 choose ranges for 0 to 127, so that products of pairs fit 16 bits
    (`get_default_qconfig` in torch/ao/quantization/qconfig.py, torch 2.13). A model does not keep the setting. It shows
    in zero points, of which none is above 127, and in the values of the run, which fill about half of the 256 steps.
    """
    known = list(ranges)
    if not known or max(one.zero_point for one in known) > REDUCED_STEPS:
        return ""
    filled = int(median(one.high - one.low for one in known))
    if filled > REDUCED_SHARE:
        return ""
    return (
        "ranges as of reduce_range: no zero point is above 127, and the example fills "
        f"{filled} of 255 steps in the median; half of the resolution is lost here as it was in torch.ao, and "
        "quant.quantize_static on the float model has it back"
    )
