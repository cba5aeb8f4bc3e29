"""An int8 model of the zoo as an ONNX file: what ONNX Runtime computes of it, or a refusal that names the step.

A file is wrong where ONNX Runtime's outputs have another shape than the model's, or are further from the float model
than the model itself by more than rounding decides. The table says how far they are from the model.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quant
from quant.export.naming import named_leaves
from quant.export.whole_plan import ExportError, runner_of
from quant.onnx.returned import returned
from quant.runtime.binding import bound_values

from .entry import Batch, Entry

SLACK_DB = 3.0
"""By which ONNX Runtime's outputs may be further from float than the model's: a step that floats in another order
decide moves those behind it, as far as another rounding would."""

CLOSE = 1e-3
"""The relative error against the model's outputs from which on nothing is asked of the distance from float."""


def verdict(entry: Entry, model: nn.Module, q: nn.Module, batches: Sequence[Batch]) -> dict[str, Any]:
    """What becomes of a converted model: the row's verdict, with `apart`, the largest error against the model, and
    `integer`, how many computing steps are integers; or how it was refused."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "model.onnx")
        try:
            report = quant.export_onnx(q, path, target="avx2")  # exact on every processor
        except ExportError as error:
            return {"verdict": "ok", "reason": f"refused {error}"}
        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, 1
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        row = {"apart": 0.0, "integer": report.share, "verdict": "ok"}
        held = ""
        for batch in batches:
            fed, ours = call_of(entry, q, batch)
            if other := other_size(q, fed):
                held = f"; {other}"
                continue
            results = session.run(None, {name: tensor.numpy() for name, tensor in fed.items()})
            # In their order: a name that an input has, too, is another in the file.
            theirs = dict(zip(_outputs_of_the_file(q), results, strict=True))
            wanted = outputs_of(entry.run(model, batch))
            for output, one in ours.items():
                problem, apart = difference(torch.as_tensor(theirs[output]), one, wanted.get(output))
                row["apart"] = max(float(row["apart"]), apart)
                if problem:
                    return {**row, "verdict": f"wrong: {output}: {problem}"}
        said = "the model's bits" if not row["apart"] else f"{row['apart']:.1g} from the model"
        return {**row, "reason": said + held}


def other_size(q: nn.Module, fed: Mapping[str, Tensor]) -> str:
    """How a call differs in a size that decides the model's forward, so that its program, and so the file, holds that
    size alone; '' where it does not."""
    runner = runner_of(q)
    assert runner.expected is not None
    for register in runner.program.inputs:
        name, shape = runner.expected.inputs[register].name, runner.program.values[register].shape
        for axis, (size, own) in enumerate(zip(shape or (), fed[name].shape, strict=False)):
            if isinstance(size, int) and size != own:
                return f"its forward decides by size {axis} of '{name}', {size} for the file and {own} in a call"
    return ""


def difference(theirs: Tensor, ours: Tensor, wanted: Tensor | None) -> tuple[str, float]:
    """What is wrong with an output of ONNX Runtime, and its relative error against the model's."""
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return f"{theirs.dtype} {tuple(theirs.shape)}, expected {ours.dtype} {tuple(ours.shape)}", math.inf
    if torch.equal(theirs, ours) or not ours.numel():
        return "", 0.0
    if not ours.is_floating_point() or wanted is None or not ours.isfinite().all():
        share = float((theirs != ours).double().mean())
        return "" if ours.isfinite().all() or torch.equal(theirs.isfinite(), ours.isfinite()) else "not finite", share
    apart = error(theirs, ours)
    if apart <= CLOSE:
        return "", apart
    short = 20 * math.log10(max(error(theirs, wanted), 1e-9) / max(error(ours, wanted), 1e-9))
    return f"{short:.1f} dB further from float than the model" if short > SLACK_DB else "", apart


def error(one: Tensor, wanted: Tensor) -> float:
    """Relative, L2."""
    return float((one.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def outputs_of(output: Any) -> dict[str, Tensor]:
    """The tensors of an output by their names in the file."""
    return {name: one for name, one in named_leaves(output, "output_") if isinstance(one, Tensor)}


def _outputs_of_the_file(q: nn.Module) -> list[str]:
    """The tensors that a file gives; those of objects (a cache) too, which are no outputs by name of the model."""
    return [name for name, _ in returned(runner_of(q).program)]


def call_of(entry: Entry, q: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What goes in and comes out of the model where a batch is run, by the names in the file."""
    runner = runner_of(q)
    expected, given, made = runner.expected, {}, {}
    assert expected is not None

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        values = bound_values(expected, module, args, kwargs)
        for register in runner.program.inputs:
            given[expected.inputs[register].name] = copy.deepcopy(values[register])
        made.update(outputs_of(copy.deepcopy(output)))

    hook = q.register_forward_hook(note, with_kwargs=True)
    try:
        entry.run(q, batch)
    finally:
        hook.remove()
    return given, made
