"""The operators `torch.ops.octet.*`: their schemas, their shape functions, and the extension that computes them.

Operators take plain tensors and a backend name, and are pure, so they survive torch.compile, torch.export and
torch.jit. The extension defines them, so that it serves a C++ program by itself; where it is not built, the same
schemas are defined here and served by the reference, so that a traced or exported model runs there too.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quant.kernels import (
    reference,
    reference_activation,
    reference_cache,
    reference_conv,
    reference_histogram,
    reference_ops,
    reference_plan,
    reference_rnn,
    reference_training,
    tables,
    transforms,
)
from quant.kernels.at_fork import call_around_forks
from quant.kernels.recurrent.kind import find
from torch import Tensor

_BINDING = Path(__file__).resolve().parent / "csrc" / "torch"
OF_TORCH = "_octet_torch{}.so"
"""In a wheel: the extension for a minor version of torch, such as `2_13`. What `quant build` writes is `_octet.so`."""


def _schemas() -> dict[str, str]:
    """The operators of schemas.inc: name -> arguments and results."""
    text = (_BINDING / "schemas.inc").read_text(encoding="ascii")
    entries = re.findall(r'^OCTET_OPERATOR\((\w+),((?:\s*"[^"]*")+)\)', text, re.MULTILINE)
    return {name: "".join(re.findall('"([^"]*)"', strings)) for name, strings in entries}


SCHEMAS = _schemas()
"""Every operator. Shapes, dtypes and meaning: the function of the same name in the references."""

WITH_BACKEND = tuple(name for name, schema in SCHEMAS.items() if "str backend" in schema)
"""The operators that a backend computes; the others are the same everywhere, or those of the default backend."""

HELPERS = (
    *("after_fork", "all_finite", "bad_isa_request", "before_fork", "default_backend", "drop_text", "isa", "keep_text"),
    *("packed_bytes", "route", "run_text", "time_text", "why_not"),
)
"""What is called of the extension beside the operators: `torch.ops.octet_native`."""

LIBRARIES = tuple(
    re.findall(r"^OCTET_LIBRARY\((\w+)", (_BINDING / "libraries.inc").read_text(encoding="ascii"), re.MULTILINE)
)
"""The backends inside the extension."""

_HERE = Path(__file__).resolve().parent

_library = torch.library.Library("octet", "FRAGMENT")
_lock = threading.Lock()


def extension_path() -> Path:
    """QUANT_EXTENSION, else what `quant build` writes, else what a wheel has for this torch. It need not exist."""
    named, built = os.environ.get("QUANT_EXTENSION", ""), _HERE / "_octet.so"
    if named:
        return Path(named)
    shipped = _HERE / OF_TORCH.format("_".join(torch.__version__.split(".")[:2]))
    return shipped if shipped.exists() and not built.exists() else built


@functools.cache
def extension_problem() -> str:
    """Load the extension, once. Returns '' where it is loaded, else the reason that it is not and how to get it.

    QUANT_EXTENSION names another file than the default; "none" loads no extension.
    """
    path = extension_path()
    if str(path) == "none":
        return "QUANT_EXTENSION=none leaves the compiled kernels out"
    with _lock:
        if not path.exists():
            return _missing(path)
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            return f"the compiled kernels do not load: {error}; `quant build --force` builds them for this torch"
        missing = _without_kernel() + [name for name in HELPERS if not hasattr(torch.ops.octet_native, name)]
        other = [name for name in SCHEMAS if _is_unlike(name)]
    if missing:
        return _of_other_sources(path, "it has no", missing)
    return _of_other_sources(path, "other arguments has", other) if other else ""


def _missing(path: Path) -> str:
    shipped = [name.stem.rpartition("torch")[2] for name in _HERE.glob(OF_TORCH.format("*"))]
    if not shipped:
        return f"the compiled kernels are not built ({path.name} is missing); `quant build` builds them"
    versions = ", ".join(sorted((one.replace("_", ".") for one in shipped), key=lambda one: int(one.partition(".")[2])))
    return (
        f"the compiled kernels of this installation are for torch {versions}, and this is torch {torch.__version__}; "
        "`quant build` builds them for it"
    )


def _of_other_sources(path: Path, how: str, names: list[str]) -> str:
    more = f" and {len(names) - 3} more operators" if len(names) > 3 else ""
    return (
        f"{path.name} was built from other sources than these: {how} {', '.join(names[:3])}{more}; "
        "`quant build` builds it anew"
    )


@functools.cache
def isa_problem() -> str:
    """'' where QUANT_ISA is unset or an instruction set of this architecture; else its value and the valid ones.

    Not an error here, so that `quant doctor` can report it.
    """
    return "" if extension_problem() else str(torch.ops.octet_native.bad_isa_request())


def _register() -> None:
    problem = extension_problem()
    for name in SCHEMAS:
        if _defined(name) is None:  # by schemas.cpp, where the extension is loaded
            _library.define(name + SCHEMAS[name])
            # No gradient goes through integers. Without this torch takes them for differentiable, warns in backward,
            # and torch.compile does at once.
            _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    transforms.refuse_derivatives(_library, SCHEMAS)
    for name, shape_function in _shape_functions().items():
        # Plans hold each of their lines to that: one that reads sizes of the meta device may compute on the CPU beside.
        checked = shape_function if name.startswith("run_plan") else _on_one_device(name, shape_function)
        torch.library.register_fake(f"octet::{name}", checked, lib=_library)
    if problem:
        for name in _without_kernel():  # what an old extension has is there already, and is not called
            _library.impl(name, _without_backend(name), "CPU")
    else:
        call_around_forks(torch.ops.octet_native.before_fork.default, torch.ops.octet_native.after_fork.default)


def _shape_functions() -> dict[str, Callable[..., Any]]:
    return {
        "quantize": _fake_quantize,
        "dequantize": _fake_dequantize,
        "requantize": _fake_requantize,
        "linear_u8s8_s32": _fake_linear_s32,
        "linear_u8s8_f32": _fake_linear_f32,
        "linear_u8s8_u8": _fake_linear_u8,
        "conv_u8s8_s32": _fake_conv(torch.int32),
        "conv_u8s8_f32": _fake_conv(torch.float32),
        "conv_u8s8_u8": _fake_conv(torch.uint8),
        "run_plan": _fake_run_plan,
        "run_plan_of_finite": _fake_run_plan,
        "linear_dynamic": _fake_linear_dynamic,
        "linear_dynamic_plain": _fake_linear_dynamic,
        "rnn_layer": _fake_rnn_layer,
        "fake_quantize": _fake_fake_quantize,
        "masked_gradient": _fake_masked_gradient,
        "follow_range": _fake_changing_state,
        "round_weight": _fake_round_weight,
        "batch_statistics": _fake_batch_statistics,
        "histogram": _fake_histogram,
        "observe_histogram": _fake_changing_state,
        "channel_sums": _fake_channel_sums,
        "depthwise_f32": _fake_depthwise_f32,
        "write_byte_cache": _fake_changing_state,
        "attend_byte_cache": _fake_attend_byte_cache,
        "observe_activation": _fake_changing_state,
        "observe_normalized": _fake_changing_state,
        "rnn_layer_static": _fake_rnn_layer_static,
        "embedding": _fake_embedding,
        "embedding_bag": _fake_embedding_bag,
    }


def _on_one_device(operator: str, shape_function: Callable[..., Any]) -> Callable[..., Any]:
    """A shape function that refuses operands of several devices, and None where the kernels do.

    Real operands beside one on the meta device land here too, and would get memory that no one wrote.
    """
    declared = torch._C.parse_schema(operator + SCHEMAS[operator]).arguments
    names = [argument.name for argument in declared]
    needed = [str(argument.type) in ("Tensor", "List[Tensor]") for argument in declared]

    @functools.wraps(shape_function)
    def checked(*arguments: Any) -> Any:
        first: Tensor | None = None
        for name, is_needed, argument in zip(names, needed, arguments, strict=False):
            for one in argument if isinstance(argument, (list, tuple)) else (argument,):
                if one is None and is_needed:
                    raise TypeError(f"{name} is None, expected a tensor")
                if isinstance(one, Tensor):
                    first = one if first is None else first
                    reference.check_device(first, one, name)
        return shape_function(*arguments)

    return checked


def _defined(name: str) -> str | None:
    """The schema by which an operator is defined; None where it is not."""
    schemas = torch._C._jit_get_schemas_for_operator(f"octet::{name}")
    return str(schemas[0]) if schemas else None


def _is_unlike(name: str) -> bool:
    """Whether an operator is defined with other arguments than these sources have."""
    defined = _defined(name)
    return defined is not None and defined != str(torch._C.parse_schema(f"octet::{name}{SCHEMAS[name]}"))


def _without_kernel() -> list[str]:
    """The operators without a kernel."""
    known, has_kernel = torch._C._dispatch_has_kernel, torch._C._dispatch_has_kernel_for_dispatch_key
    return [name for name in SCHEMAS if not (known(f"octet::{name}") and has_kernel(f"octet::{name}", "CPU"))]


ELSEWHERE = {
    "embedding": tables,
    "conv": reference_conv,
    "depthwise_f32": reference_conv,
    "write_byte_cache": reference_cache,
    "attend_byte_cache": reference_cache,
    "run_plan": reference_plan,
    "follow_range": reference_training,
    "round_weight": reference_training,
    "batch_statistics": reference_training,
    "histogram": reference_histogram,
    "observe_histogram": reference_histogram,
    "observe_": reference_activation,
    "channel_sums": reference_activation,
    "fake_quantize": reference_training,
    "masked_gradient": reference_training,
    "rnn": reference_rnn,
}
"""Prefix of an operator's name -> the file of its reference, where that is not reference.py."""


def _without_backend(name: str) -> Callable[..., Any]:
    module = next((module for kind, module in ELSEWHERE.items() if name.startswith(kind)), reference)
    function: Callable[..., Any] = getattr(module, name)
    schema = torch._C.parse_schema(name + SCHEMAS[name]).arguments
    count = len(schema) - (name in WITH_BACKEND)
    tensors = [place for place, one in enumerate(schema) if isinstance(one.type, torch._C.TensorType)]

    def call(*arguments: Any) -> Any:
        if any(arguments[place] is None for place in tensors):  # as the extension refuses it
            raise TypeError("an operand is None, expected a tensor")
        # As with the extension: the gradient of a rounding is zero, so none starts here.
        with torch.no_grad():
            return function(*arguments[:count])

    return call


def _fake_quantize(x: Tensor, scale: float, zero_point: int) -> Tensor:
    return torch.empty_like(x, dtype=torch.uint8)


def _fake_dequantize(q: Tensor, scale: float, zero_point: int) -> Tensor:
    return q.new_empty(q.shape, dtype=torch.float32)


def _fake_requantize(sums: Tensor, multiplier: Tensor, zero_point: int, quant_min: int, quant_max: int) -> Tensor:
    return torch.empty_like(sums, dtype=torch.uint8, memory_format=torch.contiguous_format)


def _linear_like(x: Tensor, q_weight: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], q_weight.shape[0]), dtype=dtype)


def _fake_linear_s32(q_x: Tensor, zero_point: int, q_weight: Tensor, q_bias: Tensor | None, backend: str) -> Tensor:
    return _linear_like(q_x, q_weight, torch.int32)


def _fake_linear_f32(
    q_x: Tensor, zero_point: int, q_weight: Tensor, q_bias: Tensor | None, multiplier: Tensor, backend: str
) -> Tensor:
    return _linear_like(q_x, q_weight, torch.float32)


def _fake_linear_u8(
    q_x: Tensor,
    zero_point: int,
    q_weight: Tensor,
    q_bias: Tensor | None,
    multiplier: Tensor,
    output_zero_point: int,
    quant_min: int,
    quant_max: int,
    backend: str,
) -> Tensor:
    return _linear_like(q_x, q_weight, torch.uint8)


def _fake_conv(dtype: torch.dtype) -> Callable[..., Tensor]:
    def shape_of(
        q_x: Tensor,
        zero_point: int,
        q_weight: Tensor,
        q_bias: Tensor | None,
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        groups: int,
        *rest: object,
    ) -> Tensor:
        spatial = reference_conv.out_sizes(q_x, q_weight, stride, padding, dilation)
        return q_x.new_empty((q_x.shape[0], *spatial, q_weight.shape[0]), dtype=dtype).movedim(-1, 1)

    return shape_of


def _fake_run_plan(inputs: list[Tensor], constants: list[Tensor], program: str, backend: str) -> list[Tensor]:
    # The reference's own shapes, by the shape functions of the operators where the reference would do arithmetic.
    for place, one in enumerate(constants):
        if one.device != constants[0].device:
            raise ValueError(
                f"run_plan: constant 0 is on {constants[0].device} and constant {place} on {one.device}, expected one "
                "device"
            )
    if constants and constants[0].is_meta and not all(one.is_meta for one in inputs):
        raise ValueError("run_plan: constants are on the meta device and an input is not, expected one device")
    operators = torch.ops.octet
    table = dict(reference_ops.OPS)
    table.update(quantize=operators.quantize, dequantize=operators.dequantize)
    for name in ("linear_u8s8_u8", "linear_u8s8_f32", "conv_u8s8_u8", "conv_u8s8_f32"):
        table[name] = functools.partial(getattr(operators, name), backend=backend)
    return reference_plan.run_plan(inputs, constants, program, table=table)


def _fake_linear_dynamic(x: Tensor, q_weight: Tensor, *rest: object) -> Tensor:
    return _linear_like(x, q_weight, torch.float32)


def _fake_rnn_layer(
    x: Tensor,
    batch_sizes: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    q_weight_ih: Tensor,
    scale_ih: Tensor,
    columns_ih: Tensor | None,
    activation_bits: int,
    per_row: bool,
    q_weight_hh: Tensor,
    scale_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    q_weight_hr: Tensor | None,
    scale_hr: Tensor | None,
    mode: str,
    reverse: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty((*x.shape[:-1], h.shape[1]))
    return y, torch.empty_like(h, memory_format=torch.contiguous_format), _fake_cell(h, c, mode)


def _fake_fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int | None,
    quant_min: int,
    quant_max: int,
    low: float,
    high: float,
    with_mask: bool,
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x) if axis is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    mask = torch.empty_like(out, dtype=torch.bool) if with_mask else x.new_empty((0,), dtype=torch.bool)
    return out, mask


def _fake_masked_gradient(grad: Tensor, mask: Tensor) -> Tensor:
    return torch.empty_like(mask, dtype=torch.float32)


def _fake_histogram(x: Tensor, width: float, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(2), x.new_empty(2, dtype=torch.int64), x.new_empty(bins, dtype=torch.int64)


def _fake_channel_sums(x: Tensor, axis: int) -> Tensor:
    return x.new_empty(x.shape[axis])


def _fake_depthwise_f32(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    sizes = reference_conv.out_sizes(x, weight, stride, padding, dilation)
    return x.new_empty((*x.shape[:2], *sizes))


def _fake_attend_byte_cache(q: Tensor, keys: Tensor, key_scale: Tensor, values: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((*q.shape[:3], values.shape[3]))


def _fake_changing_state(x: Tensor, *rest: Any) -> None:
    return None


def _fake_round_weight(weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(weight, memory_format=torch.contiguous_format), weight.new_empty(weight.shape[:1])


def _fake_batch_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[1]), x.new_empty(x.shape[1])


def _fake_rnn_layer_static(
    q_x: Tensor,
    x_scale: float,
    x_zero_point: int,
    batch_sizes: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    q_weight_ih: Tensor,
    scale_ih: Tensor,
    q_weight_hh: Tensor,
    scale_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    h_scale: float,
    h_zero_point: int,
    q_weight_hr: Tensor | None,
    scale_hr: Tensor | None,
    m_scale: float,
    m_zero_point: int,
    mode: str,
    reverse: bool,
    quantized: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.uint8 if quantized else torch.float32
    y = q_x.new_empty((*q_x.shape[:-1], q_weight_hh.shape[1]), dtype=dtype)
    return y, torch.empty_like(h, memory_format=torch.contiguous_format), _fake_cell(h, c, mode)


def _fake_cell(h: Tensor, c: Tensor | None, mode: str) -> Tensor:
    if c is None or not find(mode).has_cell:
        return h.new_empty((0,))
    return torch.empty_like(c, memory_format=torch.contiguous_format)


def _fake_embedding(rows: Tensor, indices: Tensor, bits: int, dim: int, backend: str) -> Tensor:
    return rows.new_empty((*indices.shape, dim), dtype=torch.float32)


def _fake_embedding_bag(
    rows: Tensor,
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    bits: int,
    dim: int,
    mode: str,
    include_last_offset: bool,
    padding_idx: int,
    backend: str,
) -> Tensor:
    bags = offsets.shape[0] - (1 if include_last_offset else 0)
    return rows.new_empty((bags, dim), dtype=torch.float32)


_register()
