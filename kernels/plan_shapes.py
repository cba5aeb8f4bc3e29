"""Checks of shapes in plans, for the reference: those of the kernels (csrc/core/plan/lower_*.cpp) that torch's own
functions do not make. Each raises ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from quant.kernels import narrow
from quant.kernels.plan_sizes import check_memory
from quant.kernels.recurrent.kind import find
from quant.kernels.tables import TABLE_BITS, groups_of_rows
from torch import Tensor
from torch._subclasses import FakeTensor

Settings = Mapping[str, Any]
LINEAR = {"linear": 1, "bilinear": 2}
"""Modes of interpolation -> dimensions that they are for."""

WINDOW = 1 << 23
"""Most values of a window, so that their sum is exact in float32."""


def expect(holds: bool, what: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not holds:
        raise ValueError(what)


def dimension(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    expect(-rank <= dim < rank, f"dimension {dim} of a tensor of {rank} dimensions")
    return dim % rank


def _dimensions(*names: str) -> Callable[[Settings], None]:
    def check(settings: Settings) -> None:
        x = settings["x"]
        for name in names:
            for dim in settings[name] if isinstance(settings[name], tuple) else (settings[name],):
                dimension(dim, x.dim())

    return check


def _lookup(settings: Settings) -> None:
    table, q = settings["table"], settings["q"]
    expect(table.dim() in (1, 2) and table.shape[-1] == 256, "its table has no 256 entries")
    if table.dim() == 2:
        axis = dimension(settings.get("axis", 1), q.dim())
        expect(q.shape[axis] == table.shape[0], f"its table is for {table.shape[0]} channels")


def _outputs(settings: Settings, count: int) -> None:
    for name in ("q_bias", "multiplier"):
        values = settings[name]
        expect(values is None or tuple(values.shape) == (count,), f"{name} has not {count} values")
    if not isinstance(settings["multiplier"], FakeTensor):  # which has no values
        expect(bool(settings["multiplier"].isfinite().all()), "multiplier holds what is not finite")


def _conv(settings: Settings) -> None:
    q_x, weight = settings["q_x"], settings["q_weight"]
    dims = q_x.dim() - 2
    expect(1 <= dims <= 3 and weight.dim() == q_x.dim(), "input and weight differ in dimensions")
    for name in ("stride", "padding", "dilation"):
        expect(len(settings[name]) == dims, f"{name} has {len(settings[name])} values, expected {dims}")
    expect(0 not in weight.shape[2:], "its kernel is empty")
    groups = settings["groups"]
    expect(q_x.shape[1] == weight.shape[1] * groups and weight.shape[0] % groups == 0, "its groups do not fit")
    expect(groups == 1 or 0 not in weight.shape[:2], "its groups hold nothing")
    for size, pad, step, kernel in zip(
        q_x.shape[2:], settings["padding"], settings["dilation"], weight.shape[2:], strict=True
    ):
        expect(size + 2 * pad - step * (kernel - 1) >= 1, "the kernel does not fit the padded input")
    padded = (size + 2 * pad for size, pad in zip(q_x.shape[2:], settings["padding"], strict=True))
    check_memory([*q_x.shape[:2], *padded], "its padded input")
    _outputs(settings, weight.shape[0])


def _linear(settings: Settings) -> None:
    _outputs(settings, _product_shape(settings["q_weight"], "q_weight")[0])


def _product_shape(weight: Tensor, name: str) -> tuple[int, int]:
    """(N, K) of a weight of bytes, or of a narrow one."""
    if weight.dtype == torch.uint8:
        expect(weight.dim() == 3, f"{name} has {weight.dim()} dimensions, expected 3 of a weight of few bits")
        outputs, bits, eighth = weight.shape
        expect(
            bits in narrow.NARROW_BITS and narrow.fits(eighth * 8, bits), f"{name} has no shape of a weight of few bits"
        )
        return outputs, eighth * 8
    expect(weight.dtype == torch.int8, f"{name} is {weight.dtype}, expected torch.int8 or torch.uint8")
    expect(weight.dim() == 2, f"{name} has {weight.dim()} dimensions, expected 2")
    return weight.shape[0], weight.shape[1]


def _window(q: Tensor, dims: int) -> None:
    expect(1 <= dims <= 3, f"its window has {dims} dimensions, expected 1 to 3")
    expect(q.dim() in (dims + 1, dims + 2), f"its input has {q.dim()} dimensions, expected {dims + 2}")
    expect(0 not in q.shape[q.dim() - dims - 1 :], "its input is empty")


def _pool(settings: Settings) -> None:
    kernel = settings["kernel"]
    _window(settings["q"], len(kernel))
    for name in ("stride", "padding", "dilation"):
        value = settings.get(name)
        expect(not isinstance(value, tuple) or len(value) in (1, len(kernel)), f"{name} has other dimensions")
    padding = settings.get("padding", 0)
    pads = padding if isinstance(padding, tuple) else (padding,)
    pads = pads * len(kernel) if len(pads) == 1 else pads
    for pad, size in zip(pads, kernel, strict=True):
        expect(pad <= size // 2, "its padding is more than half its window")
    if "zero_point" in settings:
        expect(math.prod(kernel) < WINDOW, f"its window holds more than {WINDOW} values")
        expect(
            len(kernel) > 1 or "divisor_override" not in settings, "a window of one dimension has no divisor_override"
        )


def _adaptive(settings: Settings) -> None:
    q, size = settings["q"], settings["size"]
    _window(q, len(size))
    before = q.dim() - len(size)
    kept = [old if new is None else new for old, new in zip(q.shape[before:], size, strict=True)]
    _within_memory([*q.shape[:before], *kept])


def _mean(settings: Settings) -> None:
    q = settings["q"]
    dims = [dimension(dim, q.dim()) for dim in settings["dim"]]
    expect(len(set(dims)) == len(dims), "takes a dimension twice")
    count = math.prod(q.shape[dim] for dim in dims)
    expect(0 < count < WINDOW, f"its mean is over {count} values")


def _interpolate(settings: Settings) -> None:
    q = settings["q"]
    dims = q.dim() - 2
    expect(1 <= dims <= 3, "its input has no spatial dimensions, or more than three")
    sized = settings.get("size") is not None
    wanted = settings["size"] if sized else settings["scale_factor"]
    sizes = wanted if isinstance(wanted, tuple) else (wanted,) * dims
    expect(len(sizes) == dims, "its size has another number of dimensions")
    expect(settings["mode"] not in LINEAR or LINEAR[settings["mode"]] == dims, "its mode is for other dimensions")
    spatial = sizes if sized else [math.floor(size * factor) for size, factor in zip(q.shape[2:], sizes, strict=True)]
    expect(all(size > 0 for size in (*spatial, *q.shape[1:])), "it would be empty")
    _within_memory([*q.shape[:2], *spatial])


def _pad(settings: Settings) -> None:
    q, widths, mode = settings["q"], settings["widths"], settings["mode"]
    pairs = len(widths) // 2
    expect(
        len(widths) % 2 == 0 and pairs <= q.dim(), "its widths are not in pairs, or more than its input's dimensions"
    )
    expect(q.dtype is not torch.int64, "its input is int64")
    fits = mode == "constant" or (pairs <= 3 and q.dim() - pairs in (1, 2))
    expect(fits, f"mode {mode} is for the last dimensions of all but one or two")
    expect(mode == "constant" or 0 not in q.shape[q.dim() - pairs - 1 :], "its input has no values to repeat")
    sizes = list(q.shape)
    for pair in range(pairs):
        before, after = widths[2 * pair : 2 * pair + 2]
        size = q.shape[q.dim() - 1 - pair]
        expect(max(0, -before) + max(0, -after) <= size, "cuts away more than its input has")
        expect(mode == "constant" or (before >= 0 and after >= 0), f"mode {mode} cuts nothing away")
        sizes[q.dim() - 1 - pair] += before + after
    _within_memory(sizes)


def _within_memory(sizes: Sequence[float]) -> None:
    check_memory(sizes, "its result")


def _attention(settings: Settings) -> None:
    q, k, v = settings["q"], settings["k"], settings["v"]
    same = q.dim() == k.dim() == v.dim() >= 3
    expect(same, "q, k and v differ in dimensions, or have less than three")
    fits = k.shape[-1] == q.shape[-1] and k.shape[-2] == v.shape[-2] and k.shape[-2] > 0
    expect(fits, "q, k and v have shapes that do not go together")
    mask = settings.get("mask")
    if mask is not None:  # torch would add queries for a longer one
        scores = (*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])
        wanted = scores[max(0, len(scores) - mask.dim()) :]
        fits = mask.dim() <= len(scores) and all(one in (1, size) for one, size in zip(mask.shape, wanted, strict=True))
        expect(fits, "its mask does not fit the scores")


def _group_norm(settings: Settings) -> None:
    x = settings["x"]
    expect(x.dim() >= 2, "its input has no channels")
    channels = x.shape[1]
    expect(channels > 0 and channels % settings["groups"] == 0, "its groups do not fit")
    expect(x.numel() // settings["groups"] != 1, "its groups have one value each")
    _per_channel(settings)


def _instance_norm(settings: Settings) -> None:
    x = settings["x"]
    expect(x.dim() >= 3, "its input has no pixels")
    expect(x.shape[1] > 0, "its groups do not fit")
    expect(math.prod(x.shape[2:]) != 1, "its groups have one value each")
    _per_channel(settings)


def _per_channel(settings: Settings) -> None:
    channels = settings["x"].shape[1]
    for name in ("weight", "bias"):
        values = settings[name]
        expect(values is None or tuple(values.shape) == (channels,), f"{name} has not {channels} values")


def _layer_norm(settings: Settings) -> None:
    x = settings["x"]
    expect(x.dim() >= 1 and x.shape[-1] > 0, "its input has no features")
    for name in ("weight", "bias"):
        values = settings[name]
        expect(values is None or tuple(values.shape) == (x.shape[-1],), f"{name} has not {x.shape[-1]} values")
    size = settings.get("size")
    expect(size is None or x.shape[-1] == size, f"its rows have not {size} values")


def _rms_norm(settings: Settings) -> None:
    x, size, weight = settings["x"], settings["size"], settings["weight"]
    expect(x.dim() >= 1 and x.shape[-1] == size, f"its rows have not {size} values")
    expect(weight is None or tuple(weight.shape) == (size,), f"weight has not {size} values")


def _reduce(settings: Settings) -> None:
    x = settings["x"]
    dims = [dimension(dim, x.dim()) for dim in settings["dim"]]
    expect(len(set(dims)) == len(dims), "takes a dimension twice")
    _within_memory([size for dim, size in enumerate(x.shape) if dim not in dims])


def _matmul(settings: Settings) -> None:
    a, b = settings["q_a"], settings["q_b"]
    expect(min(a.dim(), b.dim()) >= 2, "its factors have less than two dimensions")
    expect(a.shape[-1] == b.shape[-2] > 0, "its factors have shapes that do not go together")


def _expand(settings: Settings) -> None:
    x, shape = settings["x"], settings["shape"]
    fresh = len(shape) - x.dim()
    expect(fresh >= 0, "its input has more dimensions")
    expect(all(size >= 0 for size in shape[:fresh]), "a new dimension has no size to keep")
    kept = [old if size == -1 else size for old, size in zip(x.shape, shape[fresh:], strict=True)]
    _within_memory([*shape[:fresh], *kept])


def _reshape(settings: Settings) -> None:
    # Of what has values torch checks it.
    sizes = [size for size in settings["shape"] if isinstance(size, int)]
    if 0 in sizes:
        _within_memory(sizes)


def _softmax(settings: Settings) -> None:
    expect(settings["x"].dim() >= 1, "its input has no dimensions")


def _linear_dynamic(settings: Settings) -> None:
    x, weight = settings["x"], settings["q_weight"]
    outputs, columns = _weight(weight, "q_weight")
    features = x.shape[-1] if x.dim() else 0
    expect(features == columns, f"the input has {features} features, expected {columns}")
    expect(settings["bits"] in (8, 16), "its activations have neither 8 nor 16 bits")
    if settings["scale"].dim() < 2:
        _vectors(settings, outputs, "scale")
    else:
        _scales_by_group(weight, settings["scale"])
    _vectors(settings, outputs, "bias")
    _vectors(settings, columns, "columns")


def _scales_by_group(weight: Tensor, scale: Tensor) -> None:
    expect(narrow.is_narrow(weight), "its scales are by group, which a weight of bytes has not")
    try:
        narrow.check(weight, scale)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _weight(weight: Tensor, name: str) -> tuple[int, int]:
    shape = _product_shape(weight, name)
    expect(weight.numel() > 0, f"{name} is empty")
    return shape


def _vectors(settings: Settings, count: int, *names: str) -> None:
    for name in names:
        values = settings.get(name)
        expect(values is None or tuple(values.shape) == (count,), f"{name} has not {count} values")


def _embedding(settings: Settings) -> None:
    x, table = settings["x"], settings.get("weight")
    if table is None:
        bits, table = settings["bits"], settings["rows"]
        expect(table.dim() == 2, f"rows has {table.dim()} dimensions, expected 2")
        expect(bits in TABLE_BITS, "its values have not 8, 4, 3 or 2 bits")
        expect(groups_of_rows(table.shape[1], settings["dim"], bits) > 0, "its rows have another length")
        _within_memory([*x.shape, settings["dim"]])
        return
    expect(table.dim() == 2, f"weight has {table.dim()} dimensions, expected 2")
    _within_memory([*x.shape, table.shape[1]])


def _index_select(settings: Settings) -> None:
    x, dim = settings["x"], dimension(settings["dim"], settings["x"].dim())
    _within_memory([*x.shape[:dim], *settings["index"].shape, *x.shape[dim + 1 :]])


def _index_add(settings: Settings) -> None:
    x, index, source = settings["x"], settings["index"], settings["source"]
    dim = dimension(settings["dim"], x.dim())
    named = source.dim() == x.dim() and index.dim() == 1 and index.shape[0] == source.shape[dim]
    expect(named, "what it adds has another shape than its indices name")
    sizes = zip(x.shape, source.shape, strict=True)
    expect(all(d == dim or one == other for d, (one, other) in enumerate(sizes)), "what it adds has another size")


def _scatter_add(settings: Settings) -> None:
    x, index, source = settings["x"], settings["index"], settings["source"]
    dim = dimension(settings["dim"], x.dim())
    expect(index.dim() == x.dim() == source.dim(), "its operands differ in dimensions")
    sizes = enumerate(zip(index.shape, source.shape, x.shape, strict=True))
    fits = all(size <= given and (d == dim or size <= there) for d, (size, given, there) in sizes)
    expect(fits, "its indices have more values than there are to add, or to add to")


def _recurrent(settings: Settings) -> None:
    x, kind = settings["q_x"] if "q_x" in settings else settings["x"], find(settings["mode"])
    weight_ih, weight_hh, weight_hr = (settings[f"q_weight_{name}"] for name in ("ih", "hh", "hr"))
    expect(x.dim() == 3, "its input is not (time, batch, features)")
    expect(settings.get("bits", 8) in (8, 16), "its activations have neither 8 nor 16 bits")
    rows, columns = _weight(weight_ih, "q_weight_ih")
    width, state = _weight(weight_hh, "q_weight_hh")
    expect(
        width % kind.gates == 0 and rows == width,
        f"its weights have not the same multiple of {kind.gates} rows",
    )
    features, hidden = x.shape[2], width // kind.gates
    expect(columns == features, f"the input has {features} features, expected {columns}")
    _vectors(settings, width, "scale_ih", "scale_hh", "bias_ih", "bias_hh")
    _vectors(settings, features, "columns_ih")
    if weight_hr is None:
        expect(state == hidden, "its states have another size than its gates, and no projection")
    else:
        shape = _weight(weight_hr, "q_weight_hr")
        expect(kind.projects, "its kind has no projection")
        expect(shape == (state, hidden), "q_weight_hr has other sizes")
        expect(settings["scale_hr"] is not None, "has no scale_hr")
        _vectors(settings, state, "scale_hr")
    expect(kind.has_cell or settings["c"] is None, "its kind has no c")
    for name, size in (("h", state), ("c", hidden)):
        first = settings[name]
        expect(first is None or tuple(first.shape) == (x.shape[1], size), f"{name} has other sizes")


CHECKS: dict[str, Callable[[Settings], None]] = {
    "lookup": _lookup,
    **dict.fromkeys(("conv_u8s8_u8", "conv_u8s8_f32"), _conv),
    **dict.fromkeys(("linear_u8s8_u8", "linear_u8s8_f32"), _linear),
    **dict.fromkeys(("max_pool", "avg_pool"), _pool),
    **dict.fromkeys(("adaptive_avg_pool", "adaptive_max_pool"), _adaptive),
    "mean": _mean,
    "interpolate": _interpolate,
    "pad": _pad,
    "flatten": _dimensions("start", "end"),
    "permute": _dimensions("dims"),
    "transpose": _dimensions("dim0", "dim1"),
    "squeeze": _dimensions("dim"),
    "slice": _dimensions("dim"),
    "select": _dimensions("dim"),
    "chunk": _dimensions("dim"),
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "attention": _attention,
    "softmax": _softmax,
    "reduce_f32": _reduce,
    "index_select": _index_select,
    "index_add": _index_add,
    "scatter_add": _scatter_add,
    "expand": _expand,
    "reshape": _reshape,
    "linear_dynamic": _linear_dynamic,
    **dict.fromkeys(("embedding", "embedding_table"), _embedding),
    **dict.fromkeys(("rnn_static", "rnn_dynamic"), _recurrent),
    **dict.fromkeys(("matmul", "matmul_f32"), _matmul),
}
"""Operator -> its check."""
