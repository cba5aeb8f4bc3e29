"""Recurrent layers as nodes: the model's own arithmetic step by step, or the nearest operator that a runtime has.

No operator of ONNX has an LSTM with calibrated ranges or an integer GRU. `recurrent="exact"` writes them as products of
integers in a Scan (`recurrent_steps.py`). `recurrent="fast"` takes ONNX Runtime's DynamicQuantizeLSTM for an LSTM,
static or dynamic, with the layer's own int8 weights and ranges of each call, and ONNX's GRU and RNN with float weights.
A layer that is float in the model is ONNX's in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quant.onnx.call import WrittenCall, writes_call
from quant.onnx.graph_writer import Dimension, GraphWriter, NotWritten
from quant.onnx.integer_weights import integer_weight
from quant.onnx.recurrent_steps import exact_cell, exact_layer, has_ranges
from quant.onnx.sizes import reshaped
from quant.runtime.instructions import RecurrentCall, TakeSequence
from quant.runtime.layers.narrow_bytes import weight_in_bytes
from quant.runtime.layers.recurrent_module import Int8Cell, Int8Sequence
from quant.runtime.names import submodule

MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""

DOMAINS = {MICROSOFT: 1}
"""The version of the operators of each further domain."""

GATES = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2), "RNN_TANH": (0,), "RNN_RELU": (0,)}
"""Torch's gates in the order of ONNX: i o f c of i f g o, and z r h of r z n."""

FORMS = ("exact", "fast")
"""Of recurrent layers with int8 weights, and of sums: the model's numbers, or the fastest operator of the runtime."""


def write_recurrent(writer: GraphWriter, call: RecurrentCall) -> None:
    """Write a layer of a static program."""
    module: Any = submodule(writer.root, call.path)
    x = writer.take(call.args[0], reals=not (_is_exact(writer, module) and has_ranges(module)))
    if isinstance(module, Int8Cell):
        states = writer.take(call.args[1] if len(call.args) > 1 else call.kwargs.get("hx"), reals=True)
        _keep_states(writer, call.out, cell(writer, module, x, states))
        return
    states = writer.take(call.args[1] if len(call.args) > 1 else call.kwargs.get("hx"), reals=True)
    shape = writer.program.values[call.args[0].index].shape if hasattr(call.args[0], "index") else None
    if shape is None or len(shape) != 3:
        raise NotWritten("is called with a packed sequence or without a batch; export it with padded sequences")
    writer.held[call.out] = sequence(writer, module, x, states)


def first_output(writer: GraphWriter, instruction: TakeSequence) -> None:
    """Take the output sequence, rounded where the model reads it as integers."""
    y, _ = writer.held[instruction.source]
    writer.leave(y, instruction.out)


def _keep_states(writer: GraphWriter, out: int, states: Any) -> None:
    """What a cell returns: h, or (h, c)."""
    if isinstance(states, str):
        writer.leave(states, out)
    else:
        writer.held[out] = states


@writes_call("LSTMCell", "GRUCell", "RNNCell")
def _cell_in_float(call: WrittenCall) -> Any:
    """A float cell, or a dynamic one, in a model's own call."""
    module = call.module
    if not isinstance(module, (nn.RNNCellBase, Int8Cell)):
        raise NotWritten(f"is a {type(module).__name__}, whose arithmetic is its own")
    if call.rank() != 2:
        raise NotWritten("is called without a batch; export it with one")
    return cell(call.writer, module, call.get(0, "input"), call.get(1, "hx"))


def cell(writer: GraphWriter, module: Any, x: str, states: Any) -> Any:
    """A cell as a layer over one step: h, or (h, c)."""
    given: list[str] = [] if states is None else [states] if isinstance(states, str) else list(states)
    if _is_exact(writer, module):
        stepped = exact_cell(writer, module, x, given)
        writer.tell(True, _exactly(module), "recurrent")
        for one in stepped:
            writer.note_size(one, 0, Dimension(x, 0))
        return stepped[0] if len(stepped) == 1 else tuple(stepped)
    axes = writer.numbers([0], "axes")
    raised = [writer.node("Unsqueeze", one, axes) for one in (x, *given)]
    _, *ends = _layer(writer, _OneStep(module), 0, raised[0], raised[1:])
    writer.tell(_has_int8_form(_OneStep(module)), _by_operator(_OneStep(module)), "recurrent")
    done = [writer.node("Squeeze", one, axes) for one in ends]
    for one in done:
        writer.note_size(one, 0, Dimension(x, 0))
    return done[0] if len(done) == 1 else tuple(done)


def _is_exact(writer: GraphWriter, module: Any) -> bool:
    """Whether a layer or cell is written with the model's own arithmetic."""
    return writer.recurrent == "exact" and isinstance(module, (Int8Cell, Int8Sequence))


def _exactly(module: Any) -> str:
    """For the report."""
    ranges = "calibrated ranges" if has_ranges(module) else "a range for each row"
    steps = "a step" if isinstance(module, Int8Cell) else "steps in a Scan"
    return f"MatMul of integers, {steps}: {ranges}"


class _OneStep:
    """A cell under the names of a layer: one layer of one direction."""

    bidirectional, training, proj_size = False, False, 0

    def __init__(self, module: Any) -> None:
        self.cell, self.mode = module, _mode(module)
        self.hidden_size, self.bias = module.hidden_size, module.bias
        self.directions = [module.direction] if isinstance(module, Int8Cell) else []
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            setattr(self, f"{kind}_l0", getattr(module, kind, None))


def _mode(module: Any) -> str:
    """The name of torch for the kind of a cell."""
    if isinstance(module, Int8Cell):
        return str(module.direction.mode).upper()
    if isinstance(module, nn.RNNCell):
        return f"RNN_{module.nonlinearity.upper()}"
    return "LSTM" if isinstance(module, nn.LSTMCell) else "GRU"


@writes_call("LSTM", "GRU", "RNN")
def _in_float(call: WrittenCall) -> Any:
    """A float layer, or a dynamic one, in a model's own call."""
    module = call.module
    if not isinstance(module, (nn.RNNBase, Int8Sequence)):
        raise NotWritten(f"is a {type(module).__name__}, whose arithmetic is its own")
    if call.rank() != 3:
        raise NotWritten("is called without a batch; export it with one")
    return sequence(call.writer, module, call.get(0, "input"), call.get(1, "hx"))


def sequence(writer: GraphWriter, module: Any, x: str, states: Any) -> tuple[Any, Any]:
    """All layers and directions: (y, (h, c)), or (y, h)."""
    exact = _is_exact(writer, module)
    if not exact and (module.mode not in GATES or module.proj_size):
        kind = "projections" if module.proj_size else f"the kind {module.mode}"
        raise NotWritten(f"is a recurrent layer with {kind}, which ONNX has not")
    if module.training and module.dropout:
        raise NotWritten("drops values, in training mode")
    given: list[str] = [] if states is None else [states] if isinstance(states, str) else list(states)
    batch_axis = 0 if module.batch_first else 1
    turns = module.batch_first and not exact
    y = writer.node("Transpose", x, perm=[1, 0, 2]) if turns else x
    ends: list[list[str]] = [[], []]
    for layer in range(module.num_layers):
        own = [_of_layer(writer, state, layer, module) for state in given]
        y, *last = _exact(writer, module, layer, y, own) if exact else _layer(writer, module, layer, y, own)
        for kept, one in zip(ends, last, strict=False):
            kept.append(one)
    joined = [one[0] if len(one) == 1 else writer.node("Concat", *one, axis=0) for one in ends if one]
    y = writer.node("Transpose", y, perm=[1, 0, 2]) if turns else y
    for axis in (batch_axis, 1 - batch_axis):
        writer.note_size(y, axis, Dimension(x, axis))
    why = _exactly(module) if exact else _by_operator(module)
    writer.tell(exact or _has_int8_form(module), why, "recurrent")
    return y, joined[0] if len(joined) == 1 else tuple(joined)


def _exact(writer: GraphWriter, module: Any, layer: int, x: str, states: Sequence[str]) -> list[str]:
    ways = module.num_directions
    y, *last = exact_layer(writer, module, module.directions[layer * ways : (layer + 1) * ways], layer, x, states)
    for axis in (0, 1):
        writer.note_size(y, axis, Dimension(x, axis))
    return [y, *last]


def _of_layer(writer: GraphWriter, state: str, layer: int, module: Any) -> str:
    """(directions, batch, hidden) of (layers * directions, batch, hidden)."""
    if module.num_layers == 1:
        return state
    ways = 2 if module.bidirectional else 1
    ends = [writer.numbers([one], "ends") for one in (layer * ways, (layer + 1) * ways)]
    return writer.node("Slice", state, *ends, writer.numbers([0], "axes"))


def _layer(writer: GraphWriter, module: Any, layer: int, x: str, states: Sequence[str]) -> list[str]:
    """One layer on (time, batch, input): (time, batch, directions * hidden), and its last states."""
    ways = [False, True] if module.bidirectional else [False]
    if len(ways) > 1 and _has_int8_form(module) and any(one.columns_ih is not None for one in module.directions):
        each = [_operator(writer, module, layer, x, [_of_way(writer, one, way) for one in states], [way])
                for way in ways]  # fmt: skip
        outputs = [writer.node("Concat", *same, axis=0 if place else 1)
                   for place, same in enumerate(zip(*each, strict=True))]  # fmt: skip
    else:
        outputs = _operator(writer, module, layer, x, states, ways)
    turned = writer.node("Transpose", outputs[0], perm=[0, 2, 1, 3])
    return [reshaped(writer, turned, (0, 0, len(ways) * module.hidden_size)), *outputs[1:]]


def _of_way(writer: GraphWriter, state: str, way: bool) -> str:
    """(1, batch, hidden) of (directions, batch, hidden)."""
    return writer.node("Gather", state, writer.numbers([int(way)], "direction"), axis=0)


def _operator(
    writer: GraphWriter, module: Any, layer: int, x: str, states: Sequence[str], ways: Sequence[bool]
) -> list[str]:
    """One node for some directions: (time, directions, batch, hidden), and the last states.

    Args:
        ways: False for the direction from first to last, True for the other.
    """
    direction = "bidirectional" if len(ways) > 1 else "reverse" if ways[0] else "forward"
    settings = {"hidden_size": module.hidden_size, "direction": direction}
    names = ["_reverse" if way else "" for way in ways]
    head = [x, "", "", _biases(writer, module, layer, names), "", *states]
    if _has_int8_form(module):
        per_layer = 2 if module.bidirectional else 1
        return _int8(writer, [module.directions[layer * per_layer + way] for way in ways], layer, head, settings)
    order = GATES[module.mode]
    for place, kind in ((1, "ih"), (2, "hh")):
        weights = [_gates(getattr(module, f"weight_{kind}_l{layer}{name}"), order) for name in names]
        head[place] = writer.constant(torch.stack(weights).float(), f"weight_{kind}_l{layer}")
    op, more = _float_operator(module, len(names))
    return writer.several(op, *head, outputs=3 if op == "LSTM" else 2, **settings, **more)


def _biases(writer: GraphWriter, module: Any, layer: int, names: Sequence[str]) -> str:
    if not module.bias:
        return ""
    order = GATES[module.mode]
    rows = []
    for name in names:
        parts = [getattr(module, f"bias_{kind}_l{layer}{name}") for kind in ("ih", "hh")]
        rows.append(torch.cat([_gates(part, order) for part in parts]))
    return writer.constant(torch.stack(rows).float(), f"bias_l{layer}")


def _float_operator(module: Any, ways: int) -> tuple[str, dict[str, Any]]:
    if module.mode == "LSTM":
        return "LSTM", {}
    if module.mode == "GRU":
        return "GRU", {"linear_before_reset": 1}
    return "RNN", {"activations": ["Tanh" if module.mode == "RNN_TANH" else "Relu"] * ways}


def _has_int8_form(module: Any) -> bool:
    """Whether DynamicQuantizeLSTM takes its weights."""
    owner = module.cell if isinstance(module, _OneStep) else module
    return isinstance(owner, (Int8Cell, Int8Sequence)) and module.mode == "LSTM"


def _by_operator(module: Any) -> str:
    """For the report: the operator that a layer became, and what it has otherwise than the model."""
    if not _has_int8_form(module):
        owner = module.cell if isinstance(module, _OneStep) else module
        is_float = not isinstance(owner, (Int8Cell, Int8Sequence))
        return f"{module.mode}, float weights" + ("" if is_float else ": no runtime has an operator with int8 weights")
    why = "DynamicQuantizeLSTM: int8 weights, ranges of each call"
    if any(getattr(one, "activation_bits", 8) != 8 for one in module.directions):
        why += ", 8 bits of an input of 16"
    if any(one.terms == 2 for one in module.directions):
        why += ", the first of two terms of a weight"
    return why


def _int8(
    writer: GraphWriter, directions: Sequence[Any], layer: int, head: list[str], settings: dict[str, Any]
) -> list[str]:
    """DynamicQuantizeLSTM with the layer's integers.

    It has one range of 8 bits for the input of a call. The second term of a weight reads an input so much finer
    (`quant.nn.base.RESIDUAL_STEPS`) that it would be rounded to 0 there, and is left out.
    """
    order, scales = GATES["LSTM"], []
    columns, size = directions[0].columns_ih, directions[0].q_weight_ih.shape[1] // directions[0].terms
    if columns is not None:
        [only] = directions
        head = [writer.node("Mul", head[0], writer.constant(only.columns_ih[:size], f"columns_l{layer}")), *head[1:]]
    for place, kind in ((1, "ih"), (2, "hh")):
        whole = [weight_in_bytes(one, f"q_weight_{kind}") for one in directions]
        weights = torch.stack([_gates(one[:, :size] if kind == "ih" else one, order).t() for one in whole])
        head[place], zero_point = integer_weight(writer, weights, f"weight_{kind}_l{layer}")
        scale = torch.stack([_gates(one._buffers[f"scale_{kind}"], order) for one in directions])
        scales.append(writer.constant(scale, f"scale_{kind}_l{layer}"))
        scales.append(writer.constant(zero_point.expand(scale.shape), f"zero_point_{kind}_l{layer}"))
    inputs = [*head, *[""] * (8 - len(head)), *scales]
    return writer.several("DynamicQuantizeLSTM", *inputs, outputs=3, domain=MICROSOFT, **settings)


def _gates(rows: Tensor, order: Sequence[int]) -> Tensor:
    """The gates of a weight, a bias or a scale in another order."""
    parts = rows.detach().chunk(len(order))
    return torch.cat([parts[place] for place in order]).contiguous()
