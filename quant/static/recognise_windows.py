"""Recognises what looks at windows and edges of images: pools, means, resizing, padding."""

from __future__ import annotations

from typing import Any

from quant.static.meaning import Call, Handler, Meaning, StaysFloat, per_dimension


def max_pool(dims: int) -> Handler:
    """The largest of each window."""

    def handler(call: Call) -> Meaning:
        batched = call.activation()
        if call.module is not None:
            module: Any = call.module
            if module.return_indices:
                raise StaysFloat("it also returns indices")
            settings = (module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
        else:
            kernel = call.get(1, "kernel_size")
            settings = (kernel, call.get(2, "stride"), call.get(3, "padding", 0), call.get(4, "dilation", 1),
                        call.get(5, "ceil_mode", False))  # fmt: skip
        for value in settings:
            call.constant(value, "window")
        options = dict(zip(("kernel", "stride", "padding", "dilation", "ceil_mode"), settings, strict=True))
        return Meaning("max_pool", (batched,), {**options, "kernel": per_dimension(options["kernel"], dims)})

    return handler


def avg_pool(dims: int) -> Handler:
    """The mean of each window."""
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    defaults = (None, None, 0, False, True, None)

    def handler(call: Call) -> Meaning:
        if call.module is not None:
            options = {name: getattr(call.module, name, default) for name, default in zip(names, defaults, strict=True)}
        else:
            pairs = enumerate(zip(names, defaults, strict=True), 1)
            options = {
                name: call.constant(call.get(place, name, default), "window") for place, (name, default) in pairs
            }
        kernel = per_dimension(options.pop("kernel_size"), dims)
        options["stride"] = kernel if options["stride"] is None else options["stride"]
        if dims == 1:
            options.pop("divisor_override")
        return Meaning("avg_pool", (call.activation(),), {"kernel": kernel, **options})

    return handler


def adaptive(op: str, dims: int) -> Handler:
    """Pooling to a given size; op is "adaptive_avg_pool" or "adaptive_max_pool"."""

    def handler(call: Call) -> Meaning:
        module: Any = call.module
        if module is not None and getattr(module, "return_indices", False):
            raise StaysFloat("it also returns indices")
        size = call.get(1, "output_size") if module is None else module.output_size
        return Meaning(op, (call.activation(),), {"size": per_dimension(call.constant(size, "output size"), dims)})

    return handler


def mean_over(call: Call) -> Meaning:
    """The mean over dimensions."""
    index = call.activation()
    dim = call.constant(call.get(1, "dim"), "dim")
    if call.node.kwargs.get("dtype") is not None:
        raise StaysFloat("it changes the dtype")
    dims = tuple(range(call.rank(index))) if dim is None else per_dimension(dim, 1)
    return Meaning("mean", (index,), {"dim": dims, "keepdim": bool(call.get(2, "keepdim", False))})


def interpolate(call: Call) -> Meaning:
    """Resizing by the nearest value or linearly."""
    names = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
    if call.module is not None:
        options = {name: getattr(call.module, name, None) for name in names[:5]}
    else:
        options = {name: call.get(place, name) for place, name in enumerate(names, 1)}
    options["mode"] = options["mode"] or "nearest"
    if options["mode"] not in ("nearest", "nearest-exact", "bilinear", "linear", "trilinear"):
        raise StaysFloat(f"interpolation {options['mode']!r} has no int8 kernel")
    return Meaning(
        "interpolate", (call.activation(),), {"options": {k: v for k, v in options.items() if v is not None}}
    )


def pad_function(call: Call) -> Meaning:
    """`F.pad` with zeros or with the input's own values."""
    mode, value = call.get(2, "mode", "constant"), call.get(3, "value")
    if value not in (None, 0, 0.0):
        raise StaysFloat("it pads with a value other than zero")
    return Meaning("pad", (call.activation(),), {"widths": call.get(1, "pad"), "mode": mode})


def pad_module(mode: str) -> Handler:
    """The padding layers of torch.nn, as `pad_function`."""

    def handler(call: Call) -> Meaning:
        module: Any = call.module
        if getattr(module, "value", 0.0) != 0:
            raise StaysFloat("it pads with a value other than zero")
        return Meaning("pad", (call.activation(),), {"widths": tuple(module.padding), "mode": mode})

    return handler
