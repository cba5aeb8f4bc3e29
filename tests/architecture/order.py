"""The order of the units: each imports from those above it in this list, and from no other.

`CLIMBING` is the whole list of imports that do not keep to it yet. It is to shrink: test_architecture.py fails when an
arrow is added to the code, and when one of the list is gone from the code.
"""

from __future__ import annotations

from collections.abc import Iterable

from .sources import Arrow

ORDER = (
    "kernels",
    "observers",
    "calibrate",
    # What a converted model runs by, then what every part of `quant` speaks of.
    "quant.runtime",
    "quant.graph",
    "quant.devices",
    "quant.recurrent_layers",
    "quant.int8_classes",
    "quant.leaves",
    "quant.folding",
    "quant.dead_calls",
    "quant.recipe",
    "quant.rounding",
    "quant.error_parts",
    "quant.diagnosis",
    "quant.rebinding",
    "quant.uncompiled",
    "quant.graph_modules",
    "quant.copying",
    "quant.derived_buffers",
    # Dynamic quantisation: int8 layers, and the report.
    "quant.nn",
    "quant.report",
    "quant.half_precision",
    "quant.pretrained",
    "quant.dynamic_decisions",
    "quant.dynamic_rounding",
    "quant.dynamic",
    "quant.shards",
    # A model becomes a graph, a fused graph, a prepared model, a converted one.
    "quant.capture",
    "quant.heard_calls",
    "quant.widening",
    "quant.ops",
    "quant.fusion",
    "quant.shared",
    "quant.waiting_forwards",
    "quant.static",
    "quant.called_alone",
    "quant.forward_state",
    "quant.unprepared",
    "quant.further_programs",
    "quant.called_later",
    "quant.recipe_check",
    "quant.weight_check",
    "quant.prepare",
    "quant.qat",
    "quant.convert",
    # What is asked of the results.
    "quant.reconstruction",
    "quant.smoothing",
    "quant.post_training",
    "quant.equalize",
    "quant.submodule_calls",
    "quant.variants",
    "quant.metric",
    "quant.compare",
    "quant.time_steps",
    "quant.step_parity",
    "quant.parity",
    "quant.page",
    "quant.sensitivity",
    "quant.benchmark",
    "quant.export",
    "quant.autoquant",
    "quant.artefact",
    "quant.migrate",
    "quant.onnx",
    "quant.types",
    # Doors.
    "quant",
    "quant.integrations",
    "quant.cli",
    "quant.__main__",
)

CLIMBING: dict[str, tuple[str, ...]] = {
    # A model of transformers, quantised, has to be saved by the quantizer of its library, which stands on all the rest.
    "quant/pretrained.py": ("quant.integrations.transformers_quantizer",),
}
"""File -> the modules that it imports although they belong further down in ORDER."""


def climbing(found: Iterable[Arrow]) -> list[Arrow]:
    """The arrows from a unit to one that comes later in ORDER."""
    place = {unit: index for index, unit in enumerate(ORDER)}
    return [one for one in found if place.get(one.target, len(ORDER)) > place.get(one.source, -1)]
