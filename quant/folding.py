"""Folding into weights, and the parameters involved: batch norms in every form in which they are written.

A batch norm is a module of torch.nn; or a call of `F.batch_norm` (timm's `BatchNormAct2d`), which `FunctionalNorm`
shows as such a module; or it is written out, x * scale + bias (torchvision's `FrozenBatchNorm2d`): that is two
`Affine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quant.graph import Graph, Kind, Node, evaluate, written_arguments, written_origin
from quant.runtime.names import attribute
from quant.runtime.objects import Result
from quant.runtime.trees import Attr, Ref, leaves, map_leaves

NORM_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
"""The parameters of F.batch_norm, in order."""

NORM_DEFAULTS = {"momentum": 0.1, "eps": 1e-5}


@dataclass(frozen=True)
class Affine:
    """y = gain x + shift, with one constant of the model per channel: a `ChannelFactor` or a `ChannelShift`.

    Attributes:
        constant: an Attr, a Ref to a value that follows from parameters alone, or a tensor.
        axis: the axis of x that the constants belong to, 1 or -1; 0 for a single constant.
    """

    constant: Any
    axis: int

    @property
    def keeps_weight(self) -> bool:
        """Whether folding changes only the bias, and not the weight."""
        return False

    def fold(self, rows: Tensor, bias: Tensor | None, constant: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weight, output channels first, and bias of a layer after folding."""
        raise NotImplementedError

    def after(self, gain: Tensor, shift: Tensor, constant: Tensor) -> tuple[Tensor, Tensor]:
        """Gain and shift of its result on gain x + shift, one number per channel each."""
        rows, moved = self.fold(gain, shift, constant)
        assert moved is not None
        return rows, moved


@dataclass(frozen=True)
class ChannelFactor(Affine):
    """y = constant x."""

    def fold(self, rows: Tensor, bias: Tensor | None, constant: Tensor) -> tuple[Tensor, Tensor | None]:
        numbers = _per_row(constant, rows)
        return rows * numbers.reshape(-1, *[1] * (rows.dim() - 1)), None if bias is None else bias * numbers


@dataclass(frozen=True)
class ChannelShift(Affine):
    """y = own_sign x + sign constant."""

    sign: int = 1
    own_sign: int = 1

    @property
    def keeps_weight(self) -> bool:
        return self.own_sign > 0

    def fold(self, rows: Tensor, bias: Tensor | None, constant: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.own_sign < 0:
            rows, bias = -rows, None if bias is None else -bias
        shift = self.sign * _per_row(constant, rows)
        return rows, shift if bias is None else bias + shift


def _per_row(constant: Tensor, rows: Tensor) -> Tensor:
    """The constants, one for each row of a weight."""
    return constant.reshape(-1).to(rows.dtype).expand(rows.shape[0])


@dataclass(frozen=True)
class Transposed:
    """A weight that is stored as (in, out), as for `torch.addmm` and `x @ weight`."""

    source: Any


def parameter(
    source: Any, graph: Graph, root: nn.Module, instead: Mapping[Attr | Ref, Tensor] | None = None
) -> Tensor | None:
    """The tensor of a step's weight or bias: a parameter, a constant, or a value that follows from them alone.

    Args:
        instead: of parameters, or values, what the tensor is computed from in their place.
    """
    if source is None or isinstance(source, Tensor):
        return source
    if isinstance(source, Transposed):
        kept = parameter(source.source, graph, root, instead)
        assert kept is not None
        return kept.t()
    known = instead or {}

    def real(leaf: Any) -> Any:
        return known.get(leaf, leaf) if isinstance(leaf, Attr) else leaf

    values: dict[int, Any] = {leaf.index: tensor for leaf, tensor in known.items() if isinstance(leaf, Ref)}
    for index in sorted(_behind(graph, source) - values.keys()):
        node = graph.nodes[index]
        node = replace(node, args=map_leaves(real, node.args), kwargs=map_leaves(real, node.kwargs)) if known else node
        values[index] = evaluate(node, root, values.__getitem__)
    tensor: Tensor
    if isinstance(source, Attr):
        tensor = known[source] if source in known else attribute(root, source.path)
    else:
        tensor = values[source.index]
    return tensor


def is_norm(place: int, graph: Graph, root: nn.Module) -> bool:
    """Whether a node is a batch norm, a module or a call, with running statistics of the model."""
    node = graph.nodes[place]
    if node.kind is not Kind.MODULE:
        return is_own_norm(node, graph)
    module = attribute(root, node.target)
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None


def norm_of(place: int, graph: Graph, root: nn.Module) -> Any:
    """The batch norm of a node: the module, or a `FunctionalNorm` of the call."""
    node = graph.nodes[place]
    return attribute(root, node.target) if node.kind is Kind.MODULE else FunctionalNorm(node, graph, root)


def gain_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    """Gain and shift of a batch norm in eval mode, y = gain x + shift, one number per channel each."""
    gain = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        gain = gain * norm.weight
    shift = -norm.running_mean * gain
    return gain, shift if norm.bias is None else shift + norm.bias


def norm_arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call of F.batch_norm by name."""
    return {**NORM_DEFAULTS, **dict(zip(NORM_ARGUMENTS, node.args, strict=False)), **node.kwargs}


def is_own_norm(node: Node, graph: Graph) -> bool:
    """Whether a node is a call of F.batch_norm with running statistics of the model."""
    if node.target is not F.batch_norm or not node.args or not isinstance(node.args[0], Ref):
        return False
    arguments = norm_arguments(node)
    own = [arguments.get(name) for name in NORM_ARGUMENTS[1:5]]
    kept = arguments.get("running_mean") is not None and arguments.get("running_var") is not None
    settled = all(depends_on_nothing(graph, one) and not is_written(graph, one) for one in own)
    return kept and not arguments.get("training") and settled


def own_shape(graph: Graph, root: nn.Module, source: Any) -> tuple[int, ...] | None:
    """The shape of a constant of the model: a parameter, a buffer, or a value that follows from them; else None.

    Tensors that a forward writes to are read at every call, and so are not constants.
    """
    if is_written(graph, source):
        return None
    if isinstance(source, Attr):
        source = attribute(root, source.path)
    if isinstance(source, Tensor):
        return tuple(source.shape)
    if not isinstance(source, Ref) or not depends_on_nothing(graph, source):
        return None
    meta = graph.nodes[source.index].meta
    return None if meta is None or meta.dtype != torch.float32 else meta.shape


def is_written(graph: Graph, source: Any) -> bool:
    """Whether the forward writes to a parameter or buffer that an argument is, or is computed from."""
    written = _written_paths(graph)
    return bool(written) and not written.isdisjoint(paths_behind(graph, source))


def _written_paths(graph: Graph) -> set[str]:
    """The attributes of the model that the forward sets, or changes in place."""
    writes = graph.output.writes if isinstance(graph.output, Result) else ()
    paths = {write.target for write in writes if isinstance(write.target, str)}
    for node in graph.nodes:
        in_place = node.kind is Kind.METHOD and node.target.endswith("_") and not node.target.endswith("__")
        origins = [written_origin(graph, one) for one in written_arguments(node)] if in_place or node.writes else []
        paths.update(one.path for one in origins if isinstance(one, Attr))
    return paths


def paths_behind(graph: Graph, tree: Any) -> set[str]:
    """The parameters and buffers that an argument, or what a tree of them holds, is or is computed from."""
    behind = _behind(graph, tree)
    read = leaves([tree, *((graph.nodes[index].args, graph.nodes[index].kwargs) for index in sorted(behind))])
    return {leaf.path for leaf in read if isinstance(leaf, Attr)}


def _behind(graph: Graph, tree: Any) -> set[int]:
    """The nodes that an argument is, or is computed from, each once: there may be very many paths to it."""
    behind: set[int] = set()
    rest = [leaf.index for leaf in leaves(tree) if isinstance(leaf, Ref)]
    while rest:
        index = rest.pop()
        if index not in behind:
            behind.add(index)
            rest.extend(graph.nodes[index].refs)
    return behind


def origin(tree: Any, graph: Graph) -> str:
    """How constants of the model, or a tree of them, follow from its parameters: the same in all programs of a module.

    Tensors that are no parameters or buffers are the same where they are one object.
    """
    known: dict[int, int] = {}

    def word(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return known[leaf.index]
        return id(leaf) if isinstance(leaf, Tensor) else leaf

    for index in sorted(_behind(graph, tree)):
        node = graph.nodes[index]
        known[index] = hash((node.kind, repr(node.target), repr(map_leaves(word, (node.args, node.kwargs)))))
    return repr(map_leaves(word, tree))


def has_parameter(graph: Graph, root: nn.Module, source: Any) -> bool:
    """Whether an argument depends on a parameter: buffers alone are a filter bank or a table of positions."""
    return any(isinstance(attribute(root, path), nn.Parameter) for path in paths_behind(graph, source))


def depends_on_nothing(graph: Graph, source: Any) -> bool:
    """Whether an argument depends on parameters and constants alone."""
    return all(graph.nodes[index].kind not in (Kind.INPUT, Kind.GUARD) for index in _behind(graph, source))


class FunctionalNorm:
    """A call of F.batch_norm with tensors of the model, presented as a batch norm module.

    It follows the mode of the calling module, as `training=self.training` does. A call with
    `training=False` in training mode too, or whose weight and bias are buffers, stays in eval mode.
    Where that module is a batch norm itself (timm's), momentum and the count of batches are read from it: in eval mode,
    in which models are captured, the call has other values.
    """

    def __init__(self, node: Node, graph: Graph, root: nn.Module) -> None:
        arguments = norm_arguments(node)
        self.owner: Any = attribute(root, node.owner)
        self.running_mean: Any = parameter(arguments["running_mean"], graph, root)
        self.running_var: Any = parameter(arguments["running_var"], graph, root)
        self.weight = parameter(arguments.get("weight"), graph, root)
        self.bias = parameter(arguments.get("bias"), graph, root)
        self.eps: float = arguments["eps"]
        self.momentum: float | None = arguments["momentum"]
        self.track_running_stats = True
        self.num_batches_tracked = torch.zeros((), dtype=torch.long)
        is_frozen = node.frozen or (self.weight is not None and not isinstance(self.weight, nn.Parameter))
        if isinstance(self.owner, nn.modules.batchnorm._BatchNorm):
            self.momentum = self.owner.momentum
            self.track_running_stats = self.owner.track_running_stats
            if self.owner.num_batches_tracked is not None:
                self.num_batches_tracked = self.owner.num_batches_tracked
            is_frozen = node.frozen
        self.is_frozen = is_frozen
        self.training: bool = self.owner.training and not is_frozen

    def share(self, batches: int | Tensor) -> float | None:
        """The weight of the latest batch in the running statistics, after a number of batches."""
        return 1.0 / float(batches) if self.momentum is None else self.momentum

    def __call__(self, x: Tensor) -> Tensor:
        """The module's forward, with its updates of statistics."""
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        share, kept = self.momentum, self.track_running_stats
        if kept:
            self.num_batches_tracked.add_(1)
            share = self.share(self.num_batches_tracked)
        mean, variance = (self.running_mean, self.running_var) if kept else (None, None)
        return F.batch_norm(x, mean, variance, self.weight, self.bias, True, share or 0.0, self.eps)
