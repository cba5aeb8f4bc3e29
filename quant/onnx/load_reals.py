"""The operators of ONNX on reals that plans have: a line or two each, so that a network is not cut where it computes in
float."""

from __future__ import annotations

import torch
from torch import Tensor

from quant.kernels.reference_plan import Register
from quant.onnx.file import FLATTENING, Node
from quant.onnx.load_plan import NotTranslated, PlanWriter
from quant.onnx.load_registry import translates
from quant.onnx.load_torch import reduced
from quant.onnx.load_values import Real, Value, Weight

WORDS = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div"}
"""Of arithmetic, as plans have them."""


def _operand(plan: PlanWriter, node: Node, place: int) -> int | Tensor:
    """The register of an operand, or a constant.

    Raises:
        NotTranslated: it is not float32.
    """
    name = node.inputs[place]
    value = plan.values.get(name)
    if name not in plan.file.constants and not isinstance(value, Weight):
        return plan.real(plan.value(node, place), node)
    constant = value.reals() if isinstance(value, Weight) else plan.file.constants[name]
    if constant.dtype != torch.float32:
        raise NotTranslated(f"{node}: computes with a constant of {constant.dtype}")
    return constant


def _register(plan: PlanWriter, operand: int | Tensor) -> Register:
    return Register(plan.emit("constant", value=plan.constant(operand)) if isinstance(operand, Tensor) else operand)


@translates(*WORDS, of_reals=True)
def _arithmetic(plan: PlanWriter, node: Node) -> Value:
    a, b = _operand(plan, node, 0), _operand(plan, node, 1)
    word = WORDS[node.op]
    if isinstance(b, Tensor) and not b.dim() and isinstance(a, int):
        return Real(plan.emit("number_f32", x=Register(a), by=word, number=float(b)))
    if isinstance(a, Tensor) and not a.dim() and isinstance(b, int) and word != "div":
        word = "sub_from" if word == "sub" else word
        return Real(plan.emit("number_f32", x=Register(b), by=word, number=float(a)))
    left, right = _register(plan, a), _register(plan, b)
    if word == "add":
        return Real(plan.emit("add_f32", a=left, b=right))
    return Real(plan.emit("binary_f32", a=left, b=right, by=word))


@translates("Pow", of_reals=True)
def _power(plan: PlanWriter, node: Node) -> Value:
    """Squares, as a norm that is written as single nodes has them."""
    exponent = plan.file.constants.get(node.inputs[1])
    if exponent is None or exponent.numel() != 1 or float(exponent) != 2.0:
        raise NotTranslated(f"{node}: is no square")
    x = _register(plan, _operand(plan, node, 0))
    if not plan.keeps_rank(x.index, exponent):
        raise NotTranslated(f"{node}: its exponent has more dimensions than its base")
    return Real(plan.emit("binary_f32", a=x, b=x, by="mul"))


@translates("Neg", "Abs", "Sqrt", "Exp", "Sigmoid", "Tanh", of_reals=True)
def _unary(plan: PlanWriter, node: Node) -> Value:
    return Real(plan.emit("unary_f32", x=_register(plan, _operand(plan, node, 0)), by=node.op.lower()))


@translates("Gelu", of_reals=True)
def _gelu(plan: PlanWriter, node: Node) -> Value:
    if node.attributes.get("approximate", b"none") != b"none":
        raise NotTranslated(f"{node}: is approximated by tanh")
    return Real(plan.emit("unary_f32", x=_register(plan, _operand(plan, node, 0)), by="gelu"))


@translates("Softmax", "LogSoftmax", *FLATTENING.values(), of_reals=True)
def _softmax(plan: PlanWriter, node: Node) -> Value:
    x = _register(plan, _operand(plan, node, 0))
    axis, rank = node.attributes.get("axis", 1 if node.op in FLATTENING.values() else -1), plan.ranks[x.index]
    if axis != -1 and (rank is None or axis != rank - 1):
        raise NotTranslated(f"{node}: is not over the last dimension")
    return Real(plan.emit("softmax", x=x, logarithm=node.op.startswith("Log")))


@translates("LayerNormalization", of_reals=True)
def _layer_norm(plan: PlanWriter, node: Node) -> Value:
    weight = _operand(plan, node, 1)
    bias = _operand(plan, node, 2) if len(node.inputs) > 2 and node.inputs[2] else None
    if node.attributes.get("axis", -1) != -1 or isinstance(weight, int) or isinstance(bias, int) or weight.dim() != 1:
        raise NotTranslated(f"{node}: is not over the last dimension, or has a weight that is computed")
    if len(weight) == 1:
        raise NotTranslated(f"{node}: has one weight for all, where each row may have more values")
    return Real(
        plan.emit(
            "layer_norm",
            x=_register(plan, _operand(plan, node, 0)),
            weight=plan.constant(weight),
            bias=None if bias is None else plan.constant(bias.expand_as(weight)),
            eps=float(node.attributes.get("epsilon", 1e-5)),
            size=len(weight),
        )
    )


@translates("ReduceMean", "ReduceSum", of_reals=True)
def _reduced(plan: PlanWriter, node: Node) -> Value:
    dims = reduced(node.attributes, plan.array(node, 1))
    if not dims:
        raise NotTranslated(f"{node}: has no axes")
    word, keep = node.op.removeprefix("Reduce").lower(), bool(node.attributes.get("keepdims", 1))
    return Real(plan.emit("reduce_f32", x=_register(plan, _operand(plan, node, 0)), by=word, dim=dims, keepdim=keep))


@translates("Concat", of_reals=True)
def _concat(plan: PlanWriter, node: Node) -> Value:
    parts = tuple(_register(plan, _operand(plan, node, place)) for place in range(len(node.inputs)))
    return Real(plan.emit("cat_f32", tensors=parts, dim=int(node.attributes["axis"])))
