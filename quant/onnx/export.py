"""`export_onnx`: a converted model as an ONNX file with quantised values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.export.naming import MOST_NAMED, listed
from quant.export.whole_plan import ExportError, runner_of
from quant.onnx import (  # noqa: F401  # they register the calls that they write
    arithmetic_calls,
    dynamic_linear,
    embedding_calls,
    layer_calls,
    places_calls,
    sorting_calls,
    window_calls,
)
from quant.onnx import file as onnx_file
from quant.onnx.call import CALLS, call_of
from quant.onnx.export_report import ExportReport
from quant.onnx.file import Node, OnnxFile, TensorKind, write_onnx
from quant.onnx.folded_pads import with_folded_pads
from quant.onnx.graph_writer import OPSET, GraphWriter, NotWritten
from quant.onnx.int8_layers import write_layer
from quant.onnx.integer_steps import KERNELS, KernelStep
from quant.onnx.moves import MOVES
from quant.onnx.recurrent_layers import DOMAINS, FORMS, first_output, write_recurrent
from quant.onnx.returned import not_returned, returned
from quant.onnx.runtimes import RUNTIMES, TARGETS, Runtime
from quant.onnx.varying_sizes import varying_sizes
from quant.onnx.verify import verified
from quant.runtime.instructions import (
    Conversion,
    FloatCall,
    Guard,
    Instruction,
    IntegerMove,
    KernelCall,
    LayerCall,
    RecurrentCall,
    TakeSequence,
)
from quant.runtime.layers.products import ConvProduct
from quant.runtime.program import Program
from quant.runtime.trees import Ref

SYMMETRIC = 128
"""The zero point of symmetric activations."""


def export_onnx(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    runtime: str = "ort",
    target: str = "vnni",
    recurrent: str = "exact",
    sums: str = "exact",
    example_inputs: Any = None,
    verify: bool | Tensor | Sequence[Any] | Mapping[str, Any] = False,
) -> ExportReport:
    """Write a converted model as an ONNX file that runtimes compute in integers.

    The file holds the model's own integers: int8 weights with a scale per channel, int32 biases, and a QuantizeLinear
    for every uint8 value (QDQ, opset 17). ONNX Runtime gives the model's bits for convolutional networks; float parts
    (norms, softmax, attention) are computed in another order. Sizes that differ between calls, as the batch, stay
    free. Inputs and constants keep the names that they have in the model.

    Args:
        model: from `quant.convert` or `quant.quantize_static`, of one program (`quant.summary` lists islands); or from
            `quant.quantize_dynamic`.
        path: where to write.
        runtime: which runtime the file is for, where no form serves all: "ort" (ONNX Runtime), "openvino" or
            "tensorrt". The last wants symmetric activations, from `QConfig(activation_symmetric=True)`.
        target: "vnni" for processors that add four products of 8 bits at once (AVX-512 VNNI, AVX-VNNI, AMX, ARM).
            "avx2" for older ones, where a runtime's sums of two products overflow 16 bits with int8 weights: those that
            can are written as uint8, whose products are exact there, and slower than those of
            `QConfig(weight_bits=7)`, which cannot overflow. Other runtimes have no kernels for them, and they are
            refused.
        recurrent: how int8 recurrent layers are written: "exact", as the products of integers and the steps that the
            model computes, in a Scan; or "fast", as the operators of recurrent layers that runtimes have: for an LSTM
            ONNX Runtime's DynamicQuantizeLSTM with the model's int8 weights and ranges of each call, for others
            ONNX's with float weights.
        sums: how sums of integers are written for ONNX Runtime: "exact", as floats that are rounded, which gives the
            model's bits; or "fast", as its QLinearAdd, which rounds a few of 100,000 sums to the next integer.
        example_inputs: a call with which a model from `quant.quantize_dynamic` is captured, as of `quant.prepare`.
        verify: run the file where its runtime is installed, and compare outputs and every uint8 value with the
            model's: on random inputs for True, or on a call of the model, given as `quant.prepare` takes it (a tensor,
            arguments by place, or by name). TensorRT's files run in ONNX Runtime.

    Returns:
        a report that prints as text: for each step whether it is integers or floats, and why; which layers overflow
        without VNNI; and what `verify` found.

    Raises:
        ImportError: onnx, or with `verify` the runtime, is not installed.
        ValueError: an argument is none of those above; or (`ExportError`) the model is not one program, a step has no
            form in ONNX, or it breaks a rule of the runtime or target. The message names the steps and the way out.

    Source: https://onnx.ai/onnx/operators/ (QuantizeLinear, DequantizeLinear).
    """
    onnx_file.package("quant.export_onnx: writing ONNX files")
    file, writer = file_of(model, runtime, target, example_inputs, recurrent, sums)
    further = {node.domain for node in file.nodes} - {""}
    write_onnx(file, path, {"": OPSET, **{domain: DOMAINS[domain] for domain in further}})
    report = ExportReport(
        path=str(path), runtime=writer.runtime.title, target=target, opset=OPSET, bytes=Path(path).stat().st_size,
        steps=tuple(writer.forms), overflowing=_once(writer.overflowing), unsigned=_once(writer.unsigned),
        notes=_notes(writer.program),
    )  # fmt: skip
    if verify is False:
        return report
    return dataclasses.replace(report, verification=verified(path, writer, file, None if verify is True else verify))


def file_of(
    model: nn.Module,
    runtime: str = "ort",
    target: str = "vnni",
    example_inputs: Any = None,
    recurrent: str = "exact",
    sums: str = "exact",
) -> tuple[OnnxFile, GraphWriter]:
    """The file that `export_onnx` writes, and the writer that knows its values by those of the program."""
    for name, chosen, known in (("runtime", runtime, RUNTIMES), ("target", target, TARGETS),
                                ("recurrent", recurrent, FORMS), ("sums", sums, FORMS)):  # fmt: skip
        if chosen not in known:
            raise ValueError(f"quant.export_onnx: {name} is {chosen!r}, expected one of {', '.join(map(repr, known))}")
    runner = runner_of(model, example_inputs)
    _check_ranges(RUNTIMES[runtime], runner.program)
    writer = GraphWriter(runner, RUNTIMES[runtime], target, recurrent, sums, varying=varying_sizes(runner))
    file = _written(writer)
    _check_target(writer)
    return dataclasses.replace(file, metadata=_metadata(writer)), writer


def _once(steps: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(steps))


def _check_target(writer: GraphWriter) -> None:
    if writer.target == "avx2" and writer.overflowing:
        raise ExportError(
            f"quant.export_onnx: target='avx2': the weights of {_quoted(writer.overflowing)} can overflow the 16 bits "
            f"in which such processors add two products, and {writer.runtime.title} has no other kernel for them: "
            "quantise the float model with quant.Recipe(default=quant.QConfig(weight_bits=7)); int8 weights rounded "
            "afterwards would err twice as much"
        )


def _check_ranges(runtime: Runtime, program: Program) -> None:
    """The rules of a runtime with symmetric activations."""
    if not runtime.signed:
        return
    broken = [one.name for one in program.values if one.qparams is not None and one.qparams[1] != SYMMETRIC]
    if broken:
        raise ExportError(
            f"quant.export_onnx: runtime='{runtime.name}': {runtime.title} takes symmetric activations (zero point 0), "
            f"and {_quoted(broken)} {'have' if len(broken) > 1 else 'has'} another: quantise the float model with "
            "quant.Recipe(default=quant.QConfig(activation_symmetric=True))"
        )
    states = [one.step for one in program.instructions if isinstance(one, RecurrentCall)]
    if states:
        raise ExportError(
            f"quant.export_onnx: runtime='{runtime.name}': {_quoted(states)} is recurrent, which has no quantised form "
            "there; leave it out of the exported part"
        )


def _quoted(names: Sequence[str]) -> str:
    return listed(dict.fromkeys(f"'{name}'" for name in names))


def _metadata(writer: GraphWriter) -> dict[str, str]:
    known = {
        "octet.runtime": writer.runtime.name,
        "octet.target": writer.target,
        "octet.recurrent": writer.recurrent,
        "octet.sums": writer.sums,
    }
    if writer.overflowing:
        known["octet.saturates_without_vnni"] = ", ".join(_once(writer.overflowing))
    return known


def _notes(program: Program) -> tuple[str, ...]:
    """What the model checks or returns, and the file does not."""
    plain = not_returned(program)
    notes = [f"the model also returns what is no tensor: {listed(plain)}"] if plain else []
    guarded = [one.step or program.values[one.out].name for one in program.instructions if isinstance(one, Guard)]
    if guarded:
        notes.append(f"the model branches on {_quoted(guarded)}; the file goes the way of the captured call, unchecked")
    return tuple(notes)


def _written(writer: GraphWriter) -> OnnxFile:
    """The file of a program.

    Raises:
        ExportError: steps have no form; with their names.
    """
    program, kinds = writer.program, dict[str, TensorKind]()
    inputs = [_input(writer, register, kinds) for register in program.inputs]
    outputs = returned(program)
    labels = [writer.unique(name) for name, _ in outputs]
    _write_instructions(writer)
    writer.step = ""
    for label, (_, leaf) in zip(labels, outputs, strict=True):
        held = writer.take(leaf)
        if not isinstance(held, str):
            raise ExportError(f"quant.export_onnx: the model returns {held!r} at '{label}', expected tensors")
        writer.nodes.append(Node(f"{label}/Identity", "Identity", (held,), (label,), {}))
        kinds[label] = _kind(writer, leaf, held, label)
    nodes = with_folded_pads(_live(writer.nodes, labels), writer.constants, labels)
    read = {name for node in nodes for name in node.inputs}
    constants = {name: tensor for name, tensor in writer.constants.items() if name in read}
    return OnnxFile(tuple(nodes), constants, tuple(inputs), tuple(labels), kinds)


def _kind(writer: GraphWriter, leaf: Any, held: str, label: str) -> TensorKind:
    """Dtype and shape of an output."""
    if not isinstance(leaf, Ref):
        return TensorKind(writer.constants[held].dtype, tuple(writer.constants[held].shape))
    value = writer.program.values[leaf.index]
    assert value.dtype is not None
    return TensorKind(value.dtype, _described(writer.shape(value.id), label))


def _input(writer: GraphWriter, register: int, kinds: dict[str, TensorKind]) -> str:
    expected, value = writer.runner.expected.inputs[register], writer.program.values[register]
    if value.dtype is None:
        raise ExportError(
            f"quant.export_onnx: argument '{expected.name}' is {expected.kind.__name__}, expected tensors: fix it in a "
            "wrapper module, and convert that"
        )
    name = writer.unique(expected.name)
    writer.names[register] = writer.is_dtype(name, value.dtype)
    kinds[name] = TensorKind(value.dtype, _described(writer.shape(register), name))
    return name


def _described(shape: tuple[int | None, ...], name: str) -> tuple[int | str, ...]:
    """A shape for the file, with a name of its own for each free size: sizes that were alike at capture may differ."""
    return tuple(f"{name}_{axis}" if one is None else one for axis, one in enumerate(shape))


def _live(nodes: Sequence[Node], outputs: Sequence[str]) -> list[Node]:
    """The nodes whose values are read."""
    needed, kept = set(outputs), []
    for node in reversed(nodes):
        if needed.intersection(node.outputs):
            kept.append(node)
            needed.update(node.inputs)
    return kept[::-1]


def _write_instructions(writer: GraphWriter) -> None:
    """Write all instructions; those without a form are named together."""
    missing: dict[str, str] = {}
    lost: set[int] = set()
    for instruction in writer.program.instructions:
        if instruction.reads & lost:
            lost.add(instruction.out)
            continue
        writer.step = instruction.step or writer.program.values[instruction.out].name
        try:
            _write(writer, instruction)
        except NotWritten as error:
            missing.setdefault(writer.step, str(error))
            lost.add(instruction.out)
    if missing:
        named = "; ".join(f"layer '{step}' {why}" for step, why in list(missing.items())[:MOST_NAMED])
        more = f"; and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        raise ExportError(
            f"quant.export_onnx: {named}{more}. Give such a call a form with @quant.onnx.writes_call(...), a kernel "
            "one with @quant.onnx.writes_kernel(...), or export a part of the model without it"
        )


def _write(writer: GraphWriter, instruction: Instruction) -> None:
    if isinstance(instruction, LayerCall):
        write_layer(writer, instruction)
    elif isinstance(instruction, (KernelCall, Conversion)):
        write = KERNELS.get(instruction.kernel)
        if write is None:
            raise NotWritten(f"calls the kernel '{instruction.kernel}', which has no form in ONNX")
        write(writer, KernelStep.of(instruction))
    elif isinstance(instruction, IntegerMove):
        _write_move(writer, instruction)
    elif isinstance(instruction, FloatCall):
        _write_call(writer, instruction)
    elif isinstance(instruction, Guard):
        writer.held[instruction.out] = instruction.expected
    elif isinstance(instruction, RecurrentCall):
        write_recurrent(writer, instruction)
    elif isinstance(instruction, TakeSequence):
        first_output(writer, instruction)
    else:
        raise NotWritten(f"is of the kind '{instruction.kind}', which has no form in ONNX")


def _write_move(writer: GraphWriter, instruction: IntegerMove) -> None:
    """A move of integers."""
    call = call_of(writer, instruction)
    source = instruction.args[0] if instruction.args else None
    out = instruction.out
    if call.name not in MOVES:
        raise NotWritten(f"calls '{call.name}', which has no form in ONNX")
    _check_channels(writer, instruction)
    is_part = isinstance(source, Ref) and source.index in writer.held  # of a split
    if instruction.callee is None or is_part or (writer.runtime.moves_integers and not instruction.rescaled):
        _keep(writer, out, MOVES[call.name](call))
    else:
        _round_again(writer, out, MOVES[call.name](dataclasses.replace(call, reals=True)))
    writer.tell(True, f"{call.name} of integers", instruction.kind, moves=not instruction.rescaled)


def _check_channels(writer: GraphWriter, instruction: IntegerMove) -> None:
    """Raise NotWritten where a runtime takes the channels of a convolution's integers apart, and does it wrongly."""
    if writer.runtime.splits_channels or not _reshapes(writer, instruction) or _keeps_channels(writer, instruction):
        return
    makers = {one.out: one for one in writer.program.instructions}
    maker = makers.get(_source(instruction))
    while isinstance(maker, IntegerMove) and _reshapes(writer, maker) and _keeps_channels(writer, maker):
        maker = makers.get(_source(maker))
    layer: Any = writer.runner.layer(maker.layer) if isinstance(maker, LayerCall) else None
    computes = isinstance(maker, KernelCall) and maker.kernel not in ("max_pool", "adaptive_max_pool")
    if computes or isinstance(getattr(layer, "product", None), ConvProduct):
        raise NotWritten(
            f"takes the channels of a convolution apart, which {writer.runtime.title} computes wrongly; export for "
            "runtime='ort', or a part of the model without that step"
        )


RESHAPES = ("reshape", "reshape_as", "flatten", "unflatten")


def _source(move: IntegerMove) -> int:
    """The register that a move reads; -1 for none."""
    first = move.args[0] if move.args else None
    return first.index if isinstance(first, Ref) else -1


def _reshapes(writer: GraphWriter, move: IntegerMove) -> bool:
    return move.callee is not None and _source(move) >= 0 and call_of(writer, move).name in RESHAPES


def _keeps_channels(writer: GraphWriter, move: IntegerMove) -> bool:
    """Whether a reshape leaves dimension 1 alone, or joins all behind the batch."""
    before, after = (writer.program.values[one].shape for one in (_source(move), move.out))
    if before is None or after is None or len(before) < 3 or len(after) == 2:
        return True
    return len(after) > 1 and after[1] == before[1]


def _round_again(writer: GraphWriter, out: int, done: Any) -> None:
    """Reals that were moved, as integers of the same range."""
    qparams = writer.program.values[out].qparams
    assert qparams is not None
    if isinstance(done, str):
        writer.leave(done, out)
    else:
        writer.held[out] = tuple(writer.rounded(one, qparams) for one in done)


def _write_call(writer: GraphWriter, instruction: FloatCall) -> None:
    call = call_of(writer, instruction)
    if instruction.writes:
        raise NotWritten(f"writes to a buffer or an argument ('{call.name}'), which a file cannot")
    first, told = len(writer.nodes), len(writer.forms)
    write = MOVES.get(call.name) or CALLS.get(call.name)
    if write is None:
        raise NotWritten(f"calls '{call.name}', which has no form in ONNX")
    _keep(writer, instruction.out, write(call))
    used = list(dict.fromkeys(node.op for node in writer.nodes[first:] if node.op not in ("Shape", "Cast")))
    if writer.program.values[instruction.out].dtype is torch.float32 and used and len(writer.forms) == told:
        writer.tell(False, ", ".join(used), instruction.kind, moves=call.name in MOVES)


def _keep(writer: GraphWriter, out: int, done: Any) -> None:
    """Let a result be the value of a register."""
    value = writer.program.values[out]
    if not isinstance(done, str):
        writer.held[out] = done
        return
    if value.dtype is not None and value.qparams is None:
        writer.is_dtype(done, value.dtype)
    writer.names[out] = done
