"""Writes a file that `load_onnx` read for the runner: `octet-run` and `quant run` need neither ONNX nor its package."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from quant.artefact.file import write
from quant.export.naming import listed
from quant.export.output_text import form_of_names
from quant.export.whole_plan import DTYPES, ExportError, PlanValue, WholePlan
from quant.onnx.file import TensorKind
from quant.onnx.load import OnnxModule
from quant.onnx.load_stages import PlanStage
from quant.report import Report, ReportEntry

WEIGHTED = ("conv_u8s8_u8", "conv_u8s8_f32", "linear_u8s8_u8", "linear_u8s8_f32")
"""Operations of plans that have an int8 weight."""


def save_for_runner(module: OnnxModule, path: str | PathLike[str]) -> Report:
    """Write a loaded ONNX file for the torch-free runner.

    Args:
        path: the file to write; it appears only when it is whole.

    Returns:
        the layers in it, which also stand in the file.

    Raises:
        ExportError: the file is not one plan; the message names the nodes that torch computes, or the input.
    """
    plan = whole_plan_of(module)
    report = _report(module, plan)
    manifest = {
        "imported": "onnx",
        "static": {},
        "programs": {},
        "modules": {},
        "report": report.to_dict()["modules"],
        "float_bytes": report.float_bytes,
    }
    write(Path(path), {}, manifest, plan)
    return report


def whole_plan_of(module: OnnxModule) -> WholePlan:
    """A loaded file as one plan."""
    stages = [one for one in module.stages if isinstance(one, PlanStage)]
    if module.in_torch or len(stages) != 1:
        names = [name.split("'")[1] if "'" in name else name for name in module.in_torch]
        raise ExportError(
            f"{module.path} is {len(stages)} native calls and {len(names)} steps of torch, expected one native call of "
            f"everything; torch computes {listed([repr(name) for name in names])}"
        )
    [stage] = stages
    inputs = [_value(name, kind) for name, kind in zip(module.input_names, module.kinds, strict=True)]
    given = dict(zip(module.inputs, inputs, strict=True))
    unread = [one.name for register, one in given.items() if register not in stage.inputs]
    if unread:
        raise ExportError(f"{module.path}: nothing reads its input {unread[0]!r}, which the runner would be given")
    if stage.outputs != module.outputs:
        raise ExportError(f"{module.path}: gives an input, or one value twice, as its outputs")
    outputs = tuple(PlanValue(name, "float32", None) for name in module.output_names)
    return WholePlan(
        stage.text,
        stage.steps,
        tuple(module.constants()),
        tuple(given[one] for one in stage.inputs),
        outputs,
        form_of_names(module.output_names),
    )


def _value(name: str, kind: TensorKind) -> PlanValue:
    shape = kind.shape
    if kind.dtype not in DTYPES:
        raise ExportError(f"input {name!r} is {kind.dtype}, expected one of {', '.join(map(str, DTYPES))}")
    sizes = None if shape is None else tuple(size or f"{name}_{axis}" for axis, size in enumerate(shape))
    return PlanValue(name, DTYPES[kind.dtype], sizes, fixed_rank=shape is not None)


def _report(module: OnnxModule, plan: WholePlan) -> Report:
    """The layers with int8 weights; the other constants are counted together."""
    constants, entries = plan.constants, []
    layers = 0
    for row, step in zip(plan.text.split("\n")[2:-1], plan.steps, strict=True):
        operation, *settings = row.split(" ")[2:]
        if operation not in WEIGHTED:
            continue
        named = dict(one.split("=", 1) for one in settings)
        held = [constants[int(named[name][1:])] for name in ("q_weight", "q_bias") if named[name] != "-"]
        size = sum(one.numel() * one.element_size() for one in held)
        layers += size
        kind = "Conv" if operation.startswith("conv") else "Linear"
        detail = f"imported from ONNX, weight {tuple(held[0].shape)}"
        entries.append(ReportEntry(step, kind, "int8", detail, 4 * sum(one.numel() for one in held), size))
    whole = sum(one.numel() * one.element_size() for one in constants)
    return Report(tuple(entries), whole - layers)
