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
"""Of recurrent layers with int8 weights: the model's numbers, or the fastest operator that the runtime has."""

DIRECTIONS = {False: "forward", True: "bidirectional"}


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
    integers = _has_int8_form(_OneStep(module))
    why = "DynamicQuantizeLSTM: int8 weights, ranges of each call" if integers else f"{_mode(module)}, float weights"
    writer.tell(integers, why, "recurrent")
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
    integers = exact or _has_int8_form(module)
    fast = "DynamicQuantizeLSTM: int8 weights, ranges of each call" if integers else f"{module.mode}, float weights"
    writer.tell(integers, _exactly(module) if exact else fast, "recurrent")
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
    settings = {"hidden_size": module.hidden_size, "direction": DIRECTIONS[module.bidirectional]}
    names = ["", "_reverse"] if module.bidirectional else [""]
    bias = _biases(writer, module, layer, names)
    head = [x, "", "", bias, "", *states]
    if _has_int8_form(module):
        outputs = _int8(writer, module, layer, head, settings)
    else:
        order = GATES[module.mode]
        for place, kind in ((1, "ih"), (2, "hh")):
            weights = [_gates(getattr(module, f"weight_{kind}_l{layer}{name}"), order) for name in names]
            head[place] = writer.constant(torch.stack(weights).float(), f"weight_{kind}_l{layer}")
        op, more = _float_operator(module, len(names))
        outputs = writer.several(op, *head, outputs=3 if op == "LSTM" else 2, **settings, **more)
    turned = writer.node("Transpose", outputs[0], perm=[0, 2, 1, 3])
    return [reshaped(writer, turned, (0, 0, len(names) * module.hidden_size)), *outputs[1:]]


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
    """Whether a layer has one int8 term a weight, as DynamicQuantizeLSTM takes it."""
    owner = module.cell if isinstance(module, _OneStep) else module
    if not isinstance(owner, (Int8Cell, Int8Sequence)) or module.mode != "LSTM":
        return False
    directions: Any = module.directions
    return all(one.terms == 1 and one.columns_ih is None for one in directions)


def _int8(writer: GraphWriter, module: Any, layer: int, head: list[str], settings: dict[str, Any]) -> list[str]:
    ways, order = 2 if module.bidirectional else 1, GATES[module.mode]
    directions = [module.directions[layer * ways + way] for way in range(ways)]
    scales = []
    for place, kind in ((1, "ih"), (2, "hh")):
        weights = torch.stack([_gates(weight_in_bytes(one, f"q_weight_{kind}"), order).t() for one in directions])
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
