"""Einsums of two tensors are products: linear layers with a parameter, products of integers with two activations."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.capture import capture
from quant.capture.einsum import contraction
from quant.graph import Graph, evaluate


class Einsum(nn.Module):
    """An einsum of an activation with a parameter, or of two activations."""

    def __init__(self, equation: str, weight: tuple[int, ...] | None = None, *, weight_first: bool = False) -> None:
        super().__init__()
        self.equation, self.weight_first = equation, weight_first
        self.weight = None if weight is None else nn.Parameter(torch.randn(weight) / weight[0])

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        other = self.weight if y is None else y
        return torch.einsum(self.equation, other, x) if self.weight_first else torch.einsum(self.equation, x, other)


WEIGHTS = {
    "radial functions": ("bik,iko->bo", (5, 8, 6), (4, 5, 8), False),
    "projection": ("bnd,de->bne", (8, 6), (2, 3, 8), False),
    "a row for each output": ("bi,oi->bo", (6, 8), (3, 8), False),
    "weight first": ("oc,bchw->bohw", (6, 8), (2, 8, 3, 4), True),
    "heads": ("bnd,dhe->bhne", (8, 2, 6), (2, 3, 8), False),
    "no arrow": ("ij,jk", (8, 6), (3, 8), False),
    "spaces": ("b i , o i -> b o", (6, 8), (3, 8), False),
}
PAIRS = {
    "scores": ("bhid,bhjd->bhij", (2, 2, 3, 8), (2, 2, 5, 8)),
    "scores, heads last": ("bqhd,bkhd->bhqk", (2, 3, 2, 8), (2, 5, 2, 8)),
    "values": ("bhqk,bkhd->bqhd", (2, 2, 3, 5), (2, 5, 2, 8)),
    "several rows and columns": ("bijc,bklc->bijkl", (2, 3, 4, 8), (2, 5, 6, 8)),
    "no batch": ("nd,md->nm", (3, 8), (5, 8)),
    "two sums": ("bicd,bjdc->bij", (2, 3, 4, 6), (2, 5, 6, 4)),
}


def targets(graph: Graph) -> list[str]:
    return [one.target if isinstance(one.target, str) else one.target.__name__ for one in graph.nodes]


def run(graph: Graph, model: nn.Module, *inputs: Tensor) -> Tensor:
    """The output of a graph, call by call."""
    values: dict[int, object] = {}
    for node in graph.nodes:
        is_input = node.index < len(inputs)
        values[node.index] = inputs[node.index] if is_input else evaluate(node, model, values.__getitem__)
    output = values[graph.output.index]
    assert isinstance(output, Tensor)
    return output


def larger(x: Tensor) -> Tensor:
    """Another batch; its other sizes are the layer's."""
    return torch.randn(x.shape[0] + 3, *x.shape[1:])


def of_pair(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    return quant.quantize_static(model, [(x, y)], forward=lambda model, pair: model(*pair), progress=False)


@pytest.mark.parametrize(("equation", "weight", "shape", "first"), WEIGHTS.values(), ids=WEIGHTS)
def test_with_a_parameter_it_is_a_linear_layer(
    equation: str, weight: tuple[int, ...], shape: tuple[int, ...], first: bool
) -> None:
    torch.manual_seed(0)
    model, x = Einsum(equation, weight, weight_first=first).eval(), torch.randn(shape)
    graph = capture(model, x).graphs[""]
    assert "einsum" not in targets(graph)
    for one in (x, larger(x)):
        assert torch.allclose(run(graph, model, one), model(one), atol=1e-6)
    q = quant.quantize_static(model, [x], progress=False)
    assert [entry.outcome for entry in quant.summary(q) if entry.bytes_before] == ["int8"]
    expected = model(x)
    assert (q(x) - expected).norm() / expected.norm() < 0.02
    assert q(larger(x)).shape == model(larger(x)).shape


@pytest.mark.parametrize(("equation", "shape", "other"), PAIRS.values(), ids=PAIRS)
def test_of_two_activations_it_is_a_product(equation: str, shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x, y = Einsum(equation).eval(), torch.randn(shape), torch.randn(other)
    graph = capture(model, (x, y)).graphs[""]
    assert "einsum" not in targets(graph)
    assert targets(graph).count("matmul") == 1
    assert torch.allclose(run(graph, model, x, y), model(x, y), atol=1e-5)
    q = of_pair(model, x, y)
    expected = model(x, y)
    assert (q(x, y) - expected).norm() / expected.norm() < 0.03
    if equation[0] == "b":
        assert q(larger(x), larger(y)).shape == model(larger(x), larger(y)).shape


@pytest.mark.parametrize(
    ("weight", "other"), [((4, 6, 8), None), (None, (5, 6, 4))], ids=["with a parameter", "of two activations"]
)
def test_another_split_of_the_summed_dimensions_is_refused(
    weight: tuple[int, ...] | None, other: tuple[int, ...] | None
) -> None:
    """As float refuses it: 3 by 8 has as many values as 4 by 6. Other sizes that belong together are taken."""
    torch.manual_seed(0)
    model = Einsum("bik,iko->bo" if other is None else "bcd,jdc->bj", weight).eval()
    x = (torch.randn(16, 4, 6), *([] if other is None else [torch.randn(other)]))
    q = quant.quantize_static(model, [x], forward=lambda model, batch: model(*batch), progress=False)
    with pytest.raises(RuntimeError):
        model(torch.randn(16, 3, 8), *x[1:])
    with pytest.raises(RuntimeError, match="size"):
        q(torch.randn(16, 3, 8), *x[1:])
    for one in [x, (x[0][:7], *x[1:])] + ([] if other is None else [(torch.randn(16, 3, 8), torch.randn(5, 8, 3))]):
        assert (q(*one) - model(*one)).norm() < 0.05 * model(*one).norm()


def test_shapes_are_known_in_all_recordings() -> None:
    """Sizes that follow from the batch are no constants of the program."""
    model = Einsum("bijc,bklc->bijkl").eval()
    q = of_pair(model, torch.randn(2, 3, 4, 8), torch.randn(2, 5, 6, 8))
    x, y = torch.randn(3, 5, 2, 8), torch.randn(3, 4, 7, 8)
    assert q(x, y).shape == (3, 5, 2, 4, 7)


OTHERS = {
    "a diagonal": ("bii,ij->bj", (2, 4, 4), (4, 3)),
    "no sum": ("bi,bj->bij", (2, 3), (2, 4)),
    "a sum of one alone": ("bik,ij->bj", (2, 3, 4), (3, 5)),
    "any dimensions": ("...d,de->...e", (2, 3, 4), (4, 5)),
    "a vector": ("bi,i->b", (2, 3), (3,)),
    "one size for several": ("bij,bjk->bik", (1, 3, 4), (5, 4, 6)),
}


@pytest.mark.parametrize(("equation", "shape", "other"), OTHERS.values(), ids=OTHERS)
def test_what_is_no_product_stays(equation: str, shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    model, x, y = Einsum(equation).eval(), torch.randn(shape), torch.randn(other)
    assert "einsum" in targets(capture(model, (x, y)).graphs[""])


def test_a_weight_for_each_of_a_batch_stays_float() -> None:
    """It would be a product of activations whose second one has one scale for all weights."""
    model, x = Einsum("bi,bio->bo", (3, 8, 6)).eval(), torch.randn(3, 8)
    other = Einsum("bni,bio->bno", (3, 8, 6)).eval()
    assert "einsum" in targets(capture(model, x).graphs[""])
    assert "einsum" in targets(capture(other, torch.randn(3, 4, 8)).graphs[""])


def test_spans_of_modules_end_where_their_calls_do() -> None:
    """Modules with einsums in them, and behind others, are called by themselves as before."""
    torch.manual_seed(0)
    first, second = Einsum("bnd,de->bne", (8, 6)), Einsum("bnd,dhe->bnhe", (6, 2, 4))
    model, x = nn.Sequential(nn.Linear(8, 8), first, nn.ReLU(), second, nn.Linear(4, 4)).eval(), torch.randn(2, 3, 8)
    expected = model(x)
    q = quant.quantize_static(model, [x], progress=False)
    assert (q(x) - expected).norm() / expected.norm() < 0.03
    q = quant.quantize_static(model[:2], [x], progress=False)
    assert (q.get_submodule("1")(model[0](x)) - model[:2](x)).norm() / model[:2](x).norm() < 0.03


def test_it_is_trained() -> None:
    """Fake quantisation trains the parameter that the model has."""
    torch.manual_seed(0)
    model = Einsum("bik,iko->bo", (5, 8, 6))
    x = torch.randn(4, 5, 8)
    trained = quant.prepare_qat(copy.deepcopy(model), x)
    trained(x).square().sum().backward()
    (weight,) = (one for name, one in trained.named_parameters() if name.endswith("weight"))
    assert weight.shape == (5, 8, 6)
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0


class Chain(nn.Module):
    """Three einsums in a row, each of which has more calls as a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8) / 3) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.einsum("bd,od->bo", x, weight).relu()
        return x


def test_one_behind_others_is_a_product_as_well() -> None:
    torch.manual_seed(0)
    model, x = Chain().eval(), torch.randn(16, 8)
    graph = capture(model, x).graphs[""]
    assert targets(graph).count("matmul") == 3
    assert torch.allclose(run(graph, model, x), model(x), atol=1e-6)
    q = quant.quantize_static(model, [x], progress=False)
    assert not any(entry.name.startswith("einsum") for entry in quant.summary(q))


def test_operands_in_a_list() -> None:
    class Listed(Einsum):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return torch.einsum(self.equation, [x, self.weight])

    model, x = Listed("bi,oi->bo", (6, 8)).eval(), torch.randn(3, 8)
    graph = capture(model, x).graphs[""]
    assert "einsum" not in targets(graph)
    assert torch.allclose(run(graph, model, x), model(x), atol=1e-6)


@pytest.mark.parametrize(("equation", "first"), [("oc,cn->on", True), ("oc,bc->ob", True), ("bd,ed->eb", False)])
def test_its_result_can_be_viewed(equation: str, first: bool) -> None:
    """Torch's einsum lays these results out in order, where a permuted product has none that `view` takes."""

    class Viewed(Einsum):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return super().forward(x, y).view(-1)

    model = Viewed(equation, (6, 8), weight_first=first).eval()
    x = torch.randn((8, 5) if equation == "oc,cn->on" else (5, 8))
    q = quant.quantize_static(model, [x], progress=False)
    assert (q(x) - model(x)).norm() / model(x).norm() < 0.03


def test_letters() -> None:
    found = contraction("bqhd,bkhd->bhqk")
    assert found is not None
    assert (found.batch, found.rows, found.columns, found.summed) == ("bh", "q", "k", "d")
    assert contraction("ij->ji") is None
    assert contraction(None) is None
