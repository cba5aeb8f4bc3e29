"""Programs of PT2E (torchao's `convert_pt2e`): their layers' integers and their values' ranges, read from the graph.

Such a program is a graph of torch's operators on floats between the operators `quantized_decomposed`, with the settings
in their arguments:

    weight (int8) -> dequantize_per_channel -> conv2d, linear, ...
    x -> quantize_per_tensor -> dequantize_per_tensor -> conv2d         static: scale and zero point are numbers
    x -> choose_qparams -> quantize_per_tensor.tensor -> ...            dynamic

Which of the model's modules a node comes from stands in its meta entry `nn_module_stack` (torch.export, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn

from quant.leaves import is_leaf
from quant.migrate.packed_layers import Layer, Product, Unread
from quant.migrate.recorded_run import INT8_SHIFT, Event, Range, RecordedRun
from quant.migrate.remarks import Remarks
from quant.runtime.arguments import Arguments
from quant.runtime.names import attribute, has_submodule, submodule
from quant.runtime.trees import leaves

QUANTIZED = "quantized_decomposed"
"""The namespace of its operators."""

PRODUCTS = ("linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")

PRODUCT_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)

MOVES = frozenset({
    "alias", "chunk", "clone", "contiguous", "detach", "dropout", "expand", "flatten", "permute", "reshape", "select",
    "slice", "squeeze", "t", "to", "transpose", "unflatten", "unsqueeze", "view", "_to_copy", "_unsafe_view",
})  # fmt: skip
"""Operators whose result has the range of what they read."""

STEPS = 255
"""Of a uint8 value."""


def is_pt2e(model: object) -> TypeGuard[fx.GraphModule]:
    """Whether a model is a program that `convert_pt2e` gave."""
    return isinstance(model, fx.GraphModule) and any(_name(node) in _ROUNDING for node in model.graph.nodes)


def program_layers(program: fx.GraphModule, float_model: nn.Module, remarks: Remarks) -> dict[str, Layer]:
    """The layers with an int8 weight, by their names in the float model.

    Args:
        remarks: gets the int8 weights that no layer here has.

    Raises:
        ValueError: the program does not say which modules its nodes come from; or a convolution has other places than
            the float model's of its name.
    """
    found: dict[str, Layer] = {}
    for node in program.graph.nodes:
        if not any(_is_constant(one) for one in node.all_input_nodes) or node.op != "call_function":
            continue
        path = _module_of(node)
        if path is None:
            raise ValueError(
                f"quant.from_torch_ao: node {node.name!r} ({node.target}) has no 'nn_module_stack', which says what "
                "layer it was; give the program that convert_pt2e returned, in the process that exported it"
            )
        module = _module(float_model, path)
        if _operator(node) in PRODUCTS and isinstance(module, PRODUCT_LAYERS):
            if isinstance(module, nn.modules.conv._ConvNd):
                _check_places(node, path, module)
            found[path] = _layer(program, node)
        else:
            where = path or type(float_model).__name__
            remarks.model.append(f"{where}: the int8 weight of its {_operator(node)} is the float model's here")
    return found


def _module(root: nn.Module, path: str) -> nn.Module | None:
    return submodule(root, path) if has_submodule(root, path) else None


def _is_constant(node: fx.Node) -> bool:
    """Whether a node gives the reals of an int8 weight."""
    if not _is_dequantized(node):
        return False
    source = node.args[0]
    while isinstance(source, fx.Node) and source.op == "call_function":
        source = source.args[0]
    return isinstance(source, fx.Node) and source.op == "get_attr"


def _check_places(node: fx.Node, path: str, module: nn.modules.conv._ConvNd) -> None:
    """Raise where a convolution of the program takes other values of its input together than the float model's."""
    assert isinstance(node.target, torch._ops.OpOverload)
    dims = len(module.kernel_size)
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name not in ("stride", "padding", "dilation", "groups", "output_padding"):
            continue
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        own = getattr(module, argument.name)
        if argument.name == "padding":
            given, own = (_padding(one, module) for one in (given, own if module.padding_mode == "zeros" else 0))
        if _whole(given, dims) != _whole(own, dims):
            raise ValueError(
                f"quant.from_torch_ao: the program's convolution '{path}' has {argument.name} {given}, and the float "
                f"model's has {own}; give the float model that the program was exported from"
            )


def _padding(padding: Any, module: nn.modules.conv._ConvNd) -> Any:
    """As numbers, where both sides are padded alike."""
    if padding == "same" and all(
        d * (k - 1) % 2 == 0 for d, k in zip(module.dilation, module.kernel_size, strict=True)
    ):
        return [d * (k - 1) // 2 for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return 0 if padding == "valid" else padding


def _whole(value: Any, dims: int) -> Any:
    """One number for each dimension."""
    if isinstance(value, int):
        return (value,) * dims
    if isinstance(value, (list, tuple)):
        return tuple(value) * dims if len(value) == 1 else tuple(value)
    return value


def _layer(program: fx.GraphModule, node: fx.Node) -> Layer:
    weight, bias = node.args[1], node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    assert isinstance(weight, fx.Node)
    integers, scale, zero_point = (_constant(program, one) for one in weight.args[:3])
    if integers.dtype != torch.int8:
        return Unread(f"its weight is {str(integers.dtype).removeprefix('torch.')} in the program, expected int8")
    given = node.args[0]
    if not isinstance(given, fx.Node) or not _is_dequantized(given):
        return Unread("its weight alone is int8 in the program, and its input is float")
    dynamic = _name(given).endswith(".tensor")
    if dynamic and _operator(node) != "linear":
        return Unread("a dynamic convolution in the program, which this package has not")
    real = None if bias is None else _constant(program, bias).detach().to(torch.float32).clone()
    return Product(integers, real, dynamic, torch.as_tensor(scale), torch.as_tensor(zero_point))


def program_run(
    program: fx.GraphModule, arguments: Arguments, float_model: nn.Module, leaf_names: Collection[str]
) -> RecordedRun:
    """The calls of a program and its values' ranges, as of a run.

    Args:
        arguments: of a call.
        float_model: whose layers' calls are one event each.
        leaf_names: further modules whose calls are one.

    Raises:
        ValueError: the program takes other tensors; or a value has more than 8 bits.
    """
    run, numbers = RecordedRun(), dict[fx.Node, tuple[int, ...]]()
    given = [one for one in leaves(arguments) if isinstance(one, Tensor)]
    places = [node for node in program.graph.nodes if node.op == "placeholder"]
    if len(given) != len(places):
        raise ValueError(
            f"quant.from_torch_ao: example_inputs has {len(given)} tensors, expected {len(places)}, as the program "
            f"takes: {', '.join(node.name for node in places)}"
        )
    for tensor, node in zip(given, places, strict=True):
        numbers[node] = (len(numbers),)
        run.name_value(tensor, *numbers[node])
    run.calls[""] = [arguments]
    following = iter(range(len(places), 1 << 30))
    for node in program.graph.nodes:
        if node.op == "call_function":
            numbers[node] = _outputs(
                node, numbers, run, following, lambda path: _is_whole(float_model, path, leaf_names)
            )
    return run


def _is_whole(float_model: nn.Module, path: str, leaf_names: Collection[str]) -> bool:
    module = _module(float_model, path)
    return path in leaf_names or (module is not None and is_leaf(module))


def _outputs(
    node: fx.Node,
    numbers: Mapping[fx.Node, tuple[int, ...]],
    run: RecordedRun,
    following: Iterator[int],
    is_whole: Callable[[str], bool],
) -> tuple[int, ...]:
    """The values that a node gives; its event and its range go to the run."""
    inputs = tuple(value for one in node.all_input_nodes for value in numbers.get(one, ())[:1])
    operator = _operator(node)
    if not inputs or _name(node).startswith(f"{QUANTIZED}.choose"):
        return ()
    if _name(node) in _ROUNDING:
        if len(node.args) > 2 and not isinstance(node.args[1], fx.Node):
            run.ranges.setdefault(inputs[0], _range(node))
        return inputs[:1]
    if operator == "getitem":
        source, place = node.args
        assert isinstance(source, fx.Node)
        values = numbers[source]
        return (values[place],) if isinstance(place, int) and place < len(values) else values[:1]
    if operator in MOVES and len(inputs) == 1:
        return inputs
    path = _module_of(node) or ""
    last = run.events[-1] if run.events else None
    if is_whole(path):
        if last is not None and last.name == path and set(last.outputs).intersection(inputs):  # a layer of several
            before = tuple(one for one in inputs if one not in last.outputs)
            run.events.pop()
            inputs = (*last.inputs, *before)
        name, is_module = path, True
    else:
        name, is_module = operator, False
    outputs = tuple(next(following) for _ in range(_count(node)))
    run.events.append(Event(name, is_module, inputs, outputs))
    return outputs


def _count(node: fx.Node) -> int:
    """How many values a node gives, by who takes them apart."""
    places = [one.args[1] for one in node.users if _operator(one) == "getitem" and one.args[0] is node]
    return max((place + 1 for place in places if isinstance(place, int)), default=1)


def _range(node: fx.Node) -> Range:
    """Of quantize_per_tensor and dequantize_per_tensor: (x, scale, zero point, lowest, highest, dtype)."""
    scale, zero_point, low, high, dtype = node.args[1:6]
    shift = INT8_SHIFT if dtype == torch.int8 else 0
    if not 0 <= int(low) + shift <= int(high) + shift <= STEPS:  # type: ignore[arg-type]
        raise ValueError(
            f"quant.from_torch_ao: node {node.name!r} rounds to {low} to {high} ({dtype}), expected 8 bits; quantise "
            "the float model with quant.quantize_static"
        )
    ends = int(low) + shift, int(high) + shift  # type: ignore[arg-type]
    return Range(float(scale), int(zero_point) + shift, *ends)  # type: ignore[arg-type]


_ROUNDING = frozenset(f"{QUANTIZED}.{op}_per_tensor.{form}" for op in ("quantize", "dequantize")
                      for form in ("default", "tensor"))  # fmt: skip

_WEIGHTS = frozenset({f"{QUANTIZED}.dequantize_per_channel.default", f"{QUANTIZED}.dequantize_per_tensor.default",
                      f"{QUANTIZED}.dequantize_per_tensor.tensor"})  # fmt: skip


def _is_dequantized(node: object) -> bool:
    return isinstance(node, fx.Node) and _name(node) in _WEIGHTS


def _name(node: fx.Node) -> str:
    """Namespace, operator and overload, joined by dots; '' where a node calls none."""
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""


def _operator(node: fx.Node) -> str:
    """What a node calls, without namespace and overload."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._opname)
    return getattr(node.target, "__name__", "")


def _module_of(node: fx.Node) -> str | None:
    """The name of the module that a node comes from; None where it does not say."""
    stack = node.meta.get("nn_module_stack")
    return None if not stack else str(list(stack.values())[-1][0])


def _constant(program: fx.GraphModule, value: Any) -> Any:
    """An argument that depends on no input: a number, a tensor of the program, or an operator of such."""
    if not isinstance(value, fx.Node):
        return value
    if value.op == "get_attr":
        return attribute(program, str(value.target))
    assert callable(value.target)
    args = [_constant(program, one) for one in value.args]
    return value.target(*args, **{key: _constant(program, one) for key, one in value.kwargs.items()})
