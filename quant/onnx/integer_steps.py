"""Kernels without weights as nodes: a function for each, by its name in `quant.kernels.reference_ops.OPS`.

Another kernel, as of an operator of one's own, is one function:

    @writes_kernel("hypot")
    def hypot(writer: GraphWriter, step: KernelStep) -> None:
        ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quant.kernels.reference_ops import OPS
from quant.onnx.adaptive_pools import adaptive_mean
from quant.onnx.functions import Applied, function_of_table
from quant.onnx.graph_writer import GraphWriter, NotWritten
from quant.onnx.registries import registering
from quant.onnx.resizes import resize
from quant.onnx.sizes import vector
from quant.runtime.instructions import Conversion, KernelCall
from quant.runtime.trees import Ref


@dataclass(frozen=True)
class KernelStep:
    """A call of a kernel.

    Attributes:
        kernel: its name.
        out: the register that it writes.
        settings: its arguments by the parameters of its reference, with Ref for registers.
    """

    kernel: str
    out: int
    settings: Mapping[str, Any]

    @staticmethod
    def of(instruction: KernelCall | Conversion) -> KernelStep:
        """The step of an instruction."""
        args, kwargs = instruction.arguments
        bound = inspect.signature(OPS[instruction.kernel]).bind(*args, **kwargs)
        settings = dict(bound.arguments)
        for name, parameter in bound.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                settings.update(settings.pop(name, {}))
        return KernelStep(instruction.kernel, instruction.out, settings)

    def register(self, name: str = "q") -> int:
        """The register of an operand."""
        operand = self.settings[name]
        if not isinstance(operand, Ref):
            raise NotWritten(f"its operand {name} is no activation")
        return operand.index

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]


WriteKernel: TypeAlias = Callable[[GraphWriter, KernelStep], None]

KERNELS: dict[str, WriteKernel] = {}


def writes_kernel(*names: str) -> Callable[[WriteKernel], WriteKernel]:
    """A decorator for the function that writes calls of some kernels.

    Raises:
        ValueError: another function writes one of them already.
    """
    return registering(KERNELS, *names)


@writes_kernel("quantize")
def _quantize(writer: GraphWriter, step: KernelStep) -> None:
    """An input is the same float in both, and rounded alike; computed floats differ in their last bits anyway."""
    source, qparams = step.register("x"), writer.program.values[step.out].qparams
    if writer.runtime.rounds_by_inverse and source in writer.program.inputs and qparams is not None:
        writer.names[step.out] = writer.rounded(writer.names[source], qparams, by_inverse=True)
    else:
        writer.leave(writer.names[source], step.out)


@writes_kernel("dequantize")
def _dequantize(writer: GraphWriter, step: KernelStep) -> None:
    writer.names[step.out] = writer.dequantized(step.register("q"))


@writes_kernel("add")
def _add(writer: GraphWriter, step: KernelStep) -> None:
    op = "Sub" if step["b_multiplier"] < 0 else "Add"
    if writer.runtime.joins_sums and writer.sums == "exact":
        _sum_of_steps(writer, step, "Sum" if op == "Add" else op)
    else:
        _of_two(writer, step, op, f"QLinear{op}" if op == "Add" else "Sub between roundings")


def _sum_of_steps(writer: GraphWriter, step: KernelStep, op: str) -> None:
    """Both operands in steps of the sum's range, added as floats and rounded: the kernel's own numbers.

    An Add between roundings becomes ONNX Runtime's QLinearAdd, which moves the zero points out of the products and so
    rounds a few sums in 100,000 the other way. A Sum is an addition that it leaves alone.
    """
    pairs = [(step.register(f"q_{one}"), (abs(step[f"{one}_multiplier"]), step[f"{one}_zero_point"])) for one in "ab"]
    in_steps = [writer.read_again(writer.names[register], qparams) for register, qparams in pairs]
    done = _sized(writer, step, writer.node(op, *in_steps), [(pairs[i][0], in_steps[i]) for i in (0, 1)])
    writer.clamped(done, step.out, step["quant_min"], step["quant_max"], in_steps=True)
    writer.tell(False, f"{op} of integers by a float node", step.kernel, exact=True)


@writes_kernel("mul")
def _mul(writer: GraphWriter, step: KernelStep) -> None:
    _of_two(writer, step, "Mul", "QLinearMul")


def _of_two(writer: GraphWriter, step: KernelStep, op: str, why: str) -> None:
    reals = [(one, writer.dequantized(one)) for one in (step.register("q_a"), step.register("q_b"))]
    done = _sized(writer, step, writer.node(op, *(name for _, name in reals)), reals)
    writer.clamped(done, step.out, step["quant_min"], step["quant_max"])
    writer.tell(op != "Sub", why, step.kernel)


def _sized(writer: GraphWriter, step: KernelStep, done: str, operands: Sequence[tuple[int, str]]) -> str:
    """Note that a result of two has the sizes of the operand that is as large."""
    for register, name in operands:
        if writer.shape(register) == writer.shape(step.out):
            return writer.same_sizes(done, name)
    return done


@writes_kernel("matmul", "matmul_f32")
def _matmul(writer: GraphWriter, step: KernelStep) -> None:
    a, b = (writer.dequantized(step.register(name)) for name in ("q_a", "q_b"))
    done = writer.same_sizes(writer.node("MatMul", a, b), a, count=writer.rank(step.out) - 1)
    if step.kernel == "matmul":
        writer.clamped(done, step.out, step["quant_min"], step["quant_max"])
    else:
        writer.leave(done, step.out)
    writer.tell(True, "MatMul of integers", step.kernel)


@writes_kernel("max_pool")
def _max_pool(writer: GraphWriter, step: KernelStep) -> None:
    dilations = _each(step.settings.get("dilation", 1), len(step["kernel"]))
    window = _window(writer, step, dilations)
    _from_one(writer, step, "MaxPool", "MaxPool of integers", **window, dilations=dilations)


@writes_kernel("avg_pool")
def _avg_pool(writer: GraphWriter, step: KernelStep) -> None:
    if step.settings.get("divisor_override"):
        raise NotWritten("has a divisor_override, which ONNX has not")
    window, include = _window(writer, step), bool(step.settings.get("count_include_pad", True))
    if any(window["pads"]) and not writer.runtime.padded_means:
        _padded_mean(writer, step, window, include)
        return
    _from_one(writer, step, "AveragePool", "QLinearAveragePool", **window, count_include_pad=include)


def _padded_mean(writer: GraphWriter, step: KernelStep, window: dict[str, Any], include: bool) -> None:
    """A padded input that is rounded, which OpenVINO averages rightly where the zero point is not 0."""
    if not include:
        raise NotWritten(f"averages over padding that does not count, which {writer.runtime.title} computes wrongly")
    source, pads = step.register(), window["pads"]
    qparams = writer.program.values[source].qparams
    assert qparams is not None
    dims = len(pads) // 2
    widths = writer.numbers([0, 0, *pads[:dims], 0, 0, *pads[dims:]], "pads")
    padded = writer.rounded(writer.node("Pad", writer.dequantized(source), widths), qparams)
    done = writer.node("AveragePool", writer.read_again(padded, qparams), **{**window, "pads": [0] * 2 * dims})
    writer.leave(done, step.out)
    writer.tell(True, "AveragePool of a padded input", step.kernel)


@writes_kernel("adaptive_avg_pool")
def _adaptive_avg_pool(writer: GraphWriter, step: KernelStep) -> None:
    size = tuple(step["size"])
    if set(size) == {1}:
        _from_one(writer, step, "GlobalAveragePool", "QLinearGlobalAveragePool")
        return
    source = step.register()
    if not _tiles(writer, source, size):
        _uneven_mean(writer, step, size)
        return
    window = _windows_that_tile(writer, step, size)
    _from_one(writer, step, "AveragePool", "QLinearAveragePool", **window)


def _uneven_mean(writer: GraphWriter, step: KernelStep, size: Sequence[int | None]) -> None:
    """The integers' sums, exact in float32, times the multiplier, as the kernel does it."""
    source, values = step.register(), writer.program.values
    before, after = values[source].qparams, values[step.out].qparams
    assert before is not None
    assert after is not None
    one = torch.tensor(1.0)
    integers = writer.read_again(writer.names[source], (1.0, before[1]))
    mean = adaptive_mean(writer, integers, writer.shape(source)[-len(size) :], size)
    scaled = writer.node("Mul", mean, writer.constant(one * step["multiplier"], "multiplier"))
    done = writer.rounded(scaled, (1.0, after[1]))
    writer.names[step.out] = writer.same_sizes(done, writer.names[source], count=2)
    writer.tell(False, "MatMul of integers with windows of ones, by float nodes", step.kernel, exact=True)


@writes_kernel("adaptive_max_pool")
def _adaptive_max_pool(writer: GraphWriter, step: KernelStep) -> None:
    size = tuple(step["size"])
    if set(size) == {1}:
        _from_one(writer, step, "GlobalMaxPool", "GlobalMaxPool of reals")
        return
    _from_one(writer, step, "MaxPool", "MaxPool of integers", **_windows_that_tile(writer, step, size))


def _tiles(writer: GraphWriter, source: int, size: Sequence[int | None]) -> bool:
    """Whether windows of one size tile the input in all calls."""
    inner = writer.shape(source)[-len(size) :]
    sizes = [(one, one if out is None else out) for one, out in zip(inner, size, strict=True)]
    return not any(one is None or not out or one % out for one, out in sizes)


def _windows_that_tile(writer: GraphWriter, step: KernelStep, size: Sequence[int | None]) -> dict[str, Any]:
    inner = writer.shape(step.register())[-len(size) :]
    sizes = [(one, one if out is None else out) for one, out in zip(inner, size, strict=True)]
    if not _tiles(writer, step.register(), size):
        raise NotWritten(
            f"pools {list(inner)} to {list(size)}, expected sizes that are the same in all calls and multiples: "
            "other windows have unlike sizes, which ONNX has not"
        )
    kernel = [one // out for one, out in sizes if one and out]
    return {"kernel_shape": kernel, "strides": kernel}


@writes_kernel("mean")
def _mean(writer: GraphWriter, step: KernelStep) -> None:
    rank, keep = writer.rank(step.register()), bool(step["keepdim"])
    dims = sorted(one % rank for one in step["dim"])
    if dims == list(range(2, rank)) and rank > 2:
        reals = writer.dequantized(step.register())
        pooled = writer.same_sizes(writer.node("GlobalAveragePool", reals), reals, count=1)
        if keep:
            writer.leave(pooled, step.out)
        else:
            _without_ones(writer, step, pooled, rank)
        writer.tell(True, "QLinearGlobalAveragePool", step.kernel)
        return
    _from_one(writer, step, "ReduceMean", "ReduceMean of reals", integer=False, axes=dims, keepdims=keep)


def _without_ones(writer: GraphWriter, step: KernelStep, pooled: str, rank: int) -> None:
    """The mean is rounded before it loses its dimensions, so that the runtime computes it in integers."""
    qparams = writer.program.values[step.out].qparams
    assert qparams is not None
    reals = writer.read_again(writer.rounded(pooled, qparams), qparams)
    writer.leave(writer.node("Flatten", reals, axis=1), step.out)
    assert rank > 2


@writes_kernel("pad")
def _pad(writer: GraphWriter, step: KernelStep) -> None:
    source = step.register()
    qparams = writer.program.values[source].qparams
    assert qparams is not None
    fill = (step["fill"] - qparams[1]) * qparams[0] if step["mode"] == "constant" else 0.0
    widths = writer.take(step["widths"])
    padded = padding(writer, writer.dequantized(source), writer.rank(source), widths, step["mode"], fill)
    writer.leave(padded, step.out)
    writer.tell(True, "Pad", step.kernel, moves=True)


PAD_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}
"""The modes of torch that ONNX has in this version."""


def padding(writer: GraphWriter, name: str, rank: int, widths: Sequence[Any], mode: str, fill: float = 0.0) -> str:
    """A float32 tensor padded as torch does; `widths` begin with the last dimension."""
    if mode not in PAD_MODES:
        raise NotWritten(f"pads in the mode '{mode}', which ONNX has not; expected one of {', '.join(PAD_MODES)}")
    before, after = list[Any]([0] * rank), list[Any]([0] * rank)
    for place in range(len(widths) // 2):
        before[rank - 1 - place], after[rank - 1 - place] = widths[2 * place], widths[2 * place + 1]
    ends = [vector(writer, [*before, *after])]
    if mode == "constant" and fill:
        ends.append(writer.constant(torch.tensor(fill, dtype=torch.float32), "fill"))
    return writer.node("Pad", name, *ends, mode=PAD_MODES[mode])


@writes_kernel("interpolate")
def _interpolate(writer: GraphWriter, step: KernelStep) -> None:
    options = {**step.settings, "size": writer.take(step.settings.get("size"))}
    resized = resize(writer, writer.dequantized(step.register()), step.register(), step.out, options)
    writer.leave(resized, step.out)
    mode = step.settings.get("mode", "nearest")
    writer.tell(mode == "nearest", f"Resize, {mode}", step.kernel, moves=mode == "nearest")


@writes_kernel("lookup")
def _lookup(writer: GraphWriter, step: KernelStep) -> None:
    """A function that ONNX has where it gives the table's 256 integers, else the table."""
    source, table = step.register(), step["table"]
    if table.dim() > 1:
        _row_per_channel(writer, step, source, table)
        return
    values = writer.program.values
    before, after = values[source].qparams, values[step.out].qparams
    assert before is not None
    assert after is not None
    known = function_of_table(table, before, after)
    if known is None:
        _gathered(writer, step, source, table)
        return
    reals = writer.dequantized(source)
    done = function_of(writer, reals, known.nodes)
    writer.leave(done, step.out)
    writer.tell(known.integer, known.name, step.kernel)


def function_of(writer: GraphWriter, reals: str, nodes: Sequence[Applied]) -> str:
    """A function of a float32 tensor."""
    done = reals
    for node in nodes:
        known = {"x": reals, "y": done}
        inputs = [known[one] if isinstance(one, str) else writer.constant(one, "number") for one in node.inputs]
        done = writer.node(node.op, *inputs, **node.attributes)
    return writer.same_sizes(done, reals)


def _gathered(writer: GraphWriter, step: KernelStep, source: int, table: Tensor) -> None:
    held = table.to(torch.int16).sub(128).to(torch.int8) if writer.runtime.signed else table
    index = writer.node("Cast", writer.names[source], to=6)
    if writer.runtime.signed:
        index = writer.node("Add", index, writer.constant(torch.tensor(128, dtype=torch.int32), "offset"))
    done = writer.node("Gather", writer.constant(held, "table"), index)
    writer.names[step.out] = writer.is_dtype(writer.same_sizes(done, writer.names[source]), held.dtype)
    writer.tell(True, "Gather of a table of 256 integers", step.kernel)


def _row_per_channel(writer: GraphWriter, step: KernelStep, source: int, table: Tensor) -> None:
    """table[c, q] as one look-up in the flattened table, at 256 c + q."""
    if writer.runtime.signed:
        raise NotWritten(f"is a table per channel, which has no form of signed integers for {writer.runtime.title}")
    shape = [1] * writer.rank(source)
    shape[step.settings.get("axis", 1)] = table.shape[0]
    starts = (torch.arange(table.shape[0], dtype=torch.int32) * 256).reshape(shape)
    index = writer.node("Add", writer.node("Cast", writer.names[source], to=6), writer.constant(starts, "starts"))
    done = writer.node("Gather", writer.constant(table.reshape(-1), "table"), index)
    writer.names[step.out] = writer.is_dtype(writer.same_sizes(done, writer.names[source]), torch.uint8)
    writer.tell(True, "Gather of a table for each channel", step.kernel)


def _from_one(
    writer: GraphWriter, step: KernelStep, op: str, why: str, *, integer: bool = True, **attributes: Any
) -> None:
    reals = writer.dequantized(step.register())
    count = 1 if op == "ReduceMean" else 2
    writer.leave(writer.same_sizes(writer.node(op, reals, **attributes), reals, count=count), step.out)
    writer.tell(integer, why, step.kernel)


def _window(writer: GraphWriter, step: KernelStep, dilations: Sequence[int] = ()) -> dict[str, Any]:
    """A window's settings as ONNX has them."""
    kernel, options = list(step["kernel"]), step.settings
    dims = len(kernel)
    stride = options.get("stride")
    strides, pads = kernel if stride is None else _each(stride, dims), _each(options.get("padding", 0), dims)
    if options.get("ceil_mode"):
        reach = [(k - 1) * d for k, d in zip(kernel, dilations or [1] * dims, strict=True)]
        _check_rounded_up(writer, step, reach, strides, pads)
    return {"kernel_shape": kernel, "strides": strides, "pads": pads * 2}


def _check_rounded_up(
    writer: GraphWriter, step: KernelStep, reach: Sequence[int], strides: Sequence[int], pads: Sequence[int]
) -> None:
    """Raise NotWritten where windows that begin in the input end beyond it: runtimes differ in what they hold."""
    before, after = writer.shape(step.register())[2:], writer.shape(step.out)[2:]
    for old, new, beyond, stride, pad in zip(before, after, reach, strides, pads, strict=True):
        if old is None or new != (old + 2 * pad - beyond - 1) // stride + 1:
            raise NotWritten(
                "pools with ceil_mode, and its last windows reach beyond the input, where runtimes differ: pad the "
                "input, or leave ceil_mode out"
            )


def _each(value: Any, dims: int) -> list[int]:
    """A setting that torch takes as one number for all dimensions or one for each."""
    return list(value) if isinstance(value, (tuple, list)) else [value] * dims
