"""Cross-layer equalisation: an equivalent float model whose channels have similar magnitudes (Nagel et al. 2019,
arXiv:1906.04721, section 4.1).

Between two layers a channel can be scaled down in the first and up in the second: for s > 0, relu(x / s) s is
relu(x). With R1 and R2 the largest weights of channel i in the first layer (its output) and in the second (its input),
batch norms folded in,

    s_i = sqrt(R1_i / R2_i),    R1_i / s_i = R2_i s_i = sqrt(R1_i R2_i)                     (equation 11 there)

makes the two equal. With one scale for a whole weight, small channels are then not rounded away. With a scale per
channel every row fits already; there equalisation only makes the columns unequal, and can do harm.

What has one scale even then is the value between the layers. Before a depthwise convolution, whose weight has a row for
each channel, s_i in proportion to the channel's largest value gives every channel all 256 levels and costs no weight
anything: each row of either layer is multiplied as a whole.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quant.capture import capture
from quant.copying import copy_model
from quant.folding import norm_of
from quant.fusion.fuse import fuse
from quant.fusion.fused_graph import FusedGraph
from quant.graph import Graph, Kind
from quant.ops.conv import Conv, ConvTranspose
from quant.ops.linear import Linear
from quant.ops.pad import Pad
from quant.ops.step import Step
from quant.recipe import Recipe
from quant.runtime.names import attribute, full_name
from quant.runtime.trees import Attr, leaves
from quant.static.runner import runners
from quant.static.weights import folded

ROUNDS, CONVERGED = 100, 1e-3
"""The number of rounds: pairs overlap, so each partly undoes the one before, and a few rounds converge."""

SIGMAS = 6.0
"""The largest output of a batch norm is estimated as beta + 6 |gamma|, as in section 5 there."""

LEAST = 2.0**-8
"""The least factor of a channel's values: one that is so much smaller than others has no level of 8 bits."""

WEIGHTS, ACTIVATIONS = "weights", "activations"


@dataclass
class Pair:
    """Two consecutive layers of a captured module; the second is the only reader of the first, with `pads` between."""

    first: Step
    pads: tuple[Step, ...]
    second: Step
    fused: FusedGraph
    root: nn.Module

    def ranges(self) -> tuple[Tensor, Tensor]:
        """R1 and R2: the largest magnitude per channel between the layers, float32 (channels,)."""
        rows = folded(self.first, self.fused.graph, self.root)[0].flatten(1)
        columns = _by_input(folded(self.second, self.fused.graph, self.root)[0], self.second)
        return rows.abs().amax(1), columns.abs().amax([d for d in range(columns.dim()) if d not in (0, 2)]).flatten()

    def rescale(self, s: Tensor) -> None:
        """Divide the first layer's output channels by s, (channels,), and multiply the second's input channels."""
        norm = self.norm
        if norm is None:
            weight = self._own(self.first, "weight")
            weight.div_(s.reshape(-1, *[1] * (weight.dim() - 1)))
        else:
            norm.weight.div_(s)
        bias = self._own(self.first, "bias") if norm is None else norm.bias
        if bias is not None:
            bias.div_(s)
        weight = self._own(self.second, "weight")
        columns = _by_input(weight, self.second)
        columns.mul_(s.reshape(columns.shape[0], 1, columns.shape[2], *[1] * (columns.dim() - 3)))  # a view

    def excess(self) -> float:
        """The first layer's estimated largest output, relative to its clamp."""
        norm, (_, high) = self.norm, self.first.weighted.clamp or (0.0, math.inf)
        if norm is None or high == math.inf:
            return 0.0
        return float((norm.bias + SIGMAS * norm.weight.abs()).amax()) / float(high)

    @property
    def is_depthwise(self) -> bool:
        """Whether the second layer has a row of its weight for each channel, and the first one a batch norm."""
        operator = self.second.operator
        if not isinstance(operator, Conv) or self.norm is None or self.norm.bias is None:
            return False
        return bool(operator.groups == len(self.norm.bias))

    def peaks(self) -> Tensor:
        """The largest magnitudes between the layers, float32 (channels,), as the batch norm lets expect."""
        clamp, norm = self.first.weighted.clamp, self.norm
        if clamp is None:
            return norm.bias.abs() + SIGMAS * norm.weight.abs()  # type: ignore[no-any-return]
        return (norm.bias + SIGMAS * norm.weight.abs()).clamp(0.0, clamp[1])  # type: ignore[no-any-return]

    @property
    def norm(self) -> Any:
        """The batch norm of the first layer, or None."""
        place = self.first.weighted.batch_norm
        return None if place is None else norm_of(place, self.fused.graph, self.root)

    def _own(self, step: Step, name: str) -> Any:
        source = getattr(step.weighted, name)
        return None if source is None else attribute(self.root, source.path)


@torch.inference_mode(False)  # `evaluating` turns gradients on, so they are turned off inside
@torch.no_grad()
def equalize(model: nn.Module, example_inputs: Any, *, ranges: str = WEIGHTS) -> nn.Module:
    """A float copy of `model` with the same outputs, in which one scale suffices for each whole weight, or for values.

    Consecutive convolutions and linear layers are equalised, with their batch norms, and with nothing, a ReLU or a
    padding of images between them. A ReLU6 after a batch norm is included: channels are scaled so as not to reach 6, so
    that it acts as a ReLU; values that it did clamp change. (Where `ranges` is "activations" it stays a ReLU6, and
    changes values beyond six standard deviations.) Layers with forward hooks stay as they are. The copy has the user's
    classes and names; quantise it, or train it by `prepare_qat`, as any float model.

    Args:
        model: a float module, trained; left as it is.
        example_inputs: as for `quant.prepare`.
        ranges: what becomes alike. "weights": the largest weights of a channel on both sides. "activations": the
            largest values of the channels that a depthwise convolution reads from a layer with a batch norm, whose
            numbers say how large they are. Weights with a scale for each channel lose nothing by it, and a call takes
            as long as before.

    Raises:
        TypeError: `model` is not a module.
        ValueError: it is prepared already, or has no such pair of layers; or `ranges` is neither of these.
    """
    if ranges not in (WEIGHTS, ACTIVATIONS):
        raise ValueError(f"quant.equalize: ranges is {ranges!r}, expected {WEIGHTS!r} or {ACTIVATIONS!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"quant.equalize: expected an nn.Module, got {type(model).__name__}")
    if runners(model):
        raise ValueError("quant.equalize: the model is prepared already; equalise the float model it came from")
    equalized = copy_model(model)
    pairs = list(_pairs(equalized, example_inputs))
    if ranges == ACTIVATIONS:
        _equalize_values(pairs)
        return equalized
    if not pairs:
        raise ValueError(
            "quant.equalize: no two convolutions or linear layers of the model follow each other with nothing but a "
            "batch norm and a ReLU between, so there is nothing to equalise; use a scale per channel"
        )
    for _ in range(ROUNDS):
        if max(map(_equalize_pair, pairs)) < CONVERGED:
            break
    for pair in pairs:
        excess = pair.excess()
        if excess > 1.0:
            first, _ = pair.ranges()
            pair.rescale(torch.full_like(first, excess))
    return equalized


def _equalize_values(pairs: list[Pair]) -> None:
    """Make the channels that depthwise convolutions read alike in size."""
    pairs = [pair for pair in pairs if pair.is_depthwise]
    if not pairs:
        raise ValueError(
            "quant.equalize: no depthwise convolution of the model follows a convolution with nothing but a batch norm "
            "and a ReLU between, so there are no values to equalise; equalize(ranges='weights') looks at other layers"
        )
    for pair in pairs:
        peaks = pair.peaks()
        if float(peaks.max()) > 0.0:
            pair.rescale((peaks / peaks.max()).clamp(min=LEAST))


def _equalize_pair(pair: Pair) -> float:
    """Equalise a pair; returns the largest |log s|."""
    first, second = pair.ranges()
    # A channel of zeros on one side cannot be scaled against the other.
    s = torch.where((first > 0) & (second > 0), (first / second).sqrt(), 1.0)
    pair.rescale(s)
    return float(s.log().abs().max())


def _by_input(weight: Tensor, step: Step) -> Tensor:
    """A weight (out, in / groups, ...) as (groups, out / groups, in / groups, ...), a view whatever its strides."""
    groups = step.operator.groups if isinstance(step.operator, Conv) else 1
    by_group: Tensor = weight.unflatten(0, (groups, -1))
    return by_group


def _pairs(model: nn.Module, example_inputs: Any) -> Iterator[Pair]:
    modules = dict(model.named_modules())
    captured = capture(model, example_inputs)
    graphs, islands = captured.graphs, captured.islands
    uses = Counter(id(p) for path, graph in graphs.items() for p in _uses(graph, modules[path], islands))
    for path, graph in graphs.items():
        root = modules[path]
        fused, users = fuse(graph, root, Recipe()), graph.users()
        makers = {step.output: step for step in fused.steps}
        for second in fused.steps:
            found = _before(second, makers, users)
            if found is None:
                continue
            pair = Pair(*found, second, fused, root)
            if _scalable(pair) and not _hooked(pair) and all(uses[id(p)] == 1 for p in _parameters(pair)):
                yield pair


def _before(
    second: Step, makers: Mapping[int, Step], users: Mapping[int, list[int]]
) -> tuple[Step, tuple[Step, ...]] | None:
    """The step whose value a layer alone reads, and the borders put around its images, which keep channels apart."""
    step = second
    pads: list[Step] = []
    while step.inputs and (first := makers.get(step.inputs[0])) and users[first.output] == [step.nodes[0]]:
        if not isinstance(first.operator, Pad):
            return first, tuple(pads)
        widths, known = first.operator.widths, second.operator
        if not isinstance(known, Conv) or not isinstance(widths, tuple) or len(widths) > 2 * len(known.stride):
            return None  # of channels, or by numbers that only a call knows
        pads.append(first)
        step = first
    return None


def _uses(graph: Graph, root: nn.Module, islands: Mapping[str, str]) -> Iterator[Tensor]:
    """The parameters that a graph's calls read, repeated as often as they do; an island's calls count for it."""
    for node in graph.nodes:
        if node.kind is Kind.MODULE and full_name(graph.path, node.target) not in islands:
            yield from attribute(root, node.target).parameters()
        for leaf in leaves((node.args, node.kwargs)):
            if isinstance(leaf, Attr):
                yield attribute(root, leaf.path)


def _scalable(pair: Pair) -> bool:
    """Whether a channel may be scaled down in the first layer and up in the second."""
    first, second = pair.first.operator, pair.second.operator
    if type(first) is not type(second) or not isinstance(first, (Linear, Conv)) or isinstance(first, ConvTranspose):
        return False
    if first.affine:
        return False
    low, high = first.clamp or (0.0, math.inf)
    if low != 0.0 or high <= 0.0 or (high != math.inf and (pair.norm is None or pair.norm.bias is None)):
        return False
    return all(isinstance(p, nn.Parameter) for p in _parameters(pair))


def _hooked(pair: Pair) -> bool:
    """Whether modules of the pair, or modules around them, have forward hooks, which may change values between them."""
    nodes = [pair.fused.graph.nodes[index] for step in (pair.first, *pair.pads, pair.second) for index in step.nodes]
    paths = {node.target if node.kind is Kind.MODULE else node.owner for node in nodes}
    names = {name for path in paths for name in itertools.accumulate(path.split("."), "{}.{}".format)}
    modules = [pair.root.get_submodule(name) for name in names]
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules if module is not pair.root)


def _parameters(pair: Pair) -> list[Any]:
    """The tensors that `rescale` writes to; not all are parameters where it cannot."""
    sources = [pair.first.weighted.weight, pair.second.weighted.weight]
    if pair.norm is None:
        bias = pair.first.weighted.bias
        sources += [bias] * (bias is not None)
    parameters = [attribute(pair.root, one.path) if isinstance(one, Attr) else one for one in sources]
    if pair.norm is not None:
        parameters += [pair.norm.weight] + [pair.norm.bias] * (pair.norm.bias is not None)
    return parameters
