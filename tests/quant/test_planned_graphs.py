"""Graph networks, which take parts of tensors by indices and add them up where others say: native regions."""

from __future__ import annotations

import statistics
import warnings

import pytest
import torch
import torch.nn.functional as F
from quant.kernels import dispatch
from torch import Tensor, nn

import quant
from quant.runtime.program_runner import ProgramRunner
from quant.runtime.region import Region

planned = pytest.mark.skipif(
    not dispatch.current().plans, reason="without the compiled kernels all steps run one by one"
)


class Net(nn.Module):
    """Layers around what a subclass does with their values, (nodes, 8), and edges, (2, count) of int64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def between(self, x: Tensor, edges: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.last(self.between(self.first(x), edges))


class ByDegree(Net):
    """A graph convolution: sums at the ends of edges, normalised by degrees."""

    def between(self, x: Tensor, edges: Tensor) -> Tensor:
        degree = torch.zeros(x.shape[0]).scatter_add_(0, edges[1], torch.ones(edges.shape[1])).clamp(min=1)
        norm = (degree[edges[0]] * degree[edges[1]]).rsqrt()
        messages = norm[:, None] * x.index_select(0, edges[0])
        return torch.zeros(x.shape).scatter_add_(0, edges[1][:, None].expand_as(messages), messages)


class BySum(Net):
    """Messages of both ends of an edge, added up at one."""

    def between(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = torch.relu(x[source] - x[target])
        return x + torch.zeros_like(x).index_add(0, target, messages)


class ByColumns(Net):
    """Columns taken and added to, some from the end, in new shapes."""

    def between(self, x: Tensor, edges: Tensor) -> Tensor:
        columns = edges[0, : x.shape[1]] % 8
        taken = (
            x[:, columns.view(2, -1)].flatten(1)
            + x[:, edges[1, :4].reshape(2, 2) % 8 - 8].sum((1, 2), keepdim=False)[:, None]
        )
        return x.new_zeros(x.shape[0], 8).index_add(1, columns, taken) + x.new_ones((x.size(0), 1))


class OfLayers(Net):
    """Integers of a layer are taken as integers."""

    def between(self, x: Tensor, edges: Tensor) -> Tensor:
        x = torch.relu(x)
        return x[edges[0]] + x[edges[1]]


class GivesIndices(Net):
    """Indices that others read too: a call of torch's, and the caller."""

    def forward(self, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        source = edges[0]
        y = self.first(x)[source]
        return self.last(y + source.sort()[0][:, None].float().erf()), source[1:]


class Buffered(Net):
    """Sums that are kept on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(12, 8))

    def between(self, x: Tensor, edges: Tensor) -> Tensor:
        self.sums.index_add_(0, edges[1], x[edges[0]])
        return x + self.sums[edges[0, 0]]


KINDS = (ByDegree, BySum, ByColumns, OfLayers)
NODES, EDGES = 12, 30
NEAR = 0.1
"""Largest relative error: of three layers without training, and few samples."""


def inputs(seed: int = 0, nodes: int = NODES, edges: int = EDGES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(nodes, 8, generator=generator), torch.randint(nodes, (2, edges), generator=generator)


def converted(kind: type[Net], nodes: int = 200) -> tuple[nn.Module, nn.Module, ProgramRunner]:
    torch.manual_seed(0)
    model = kind().eval()
    q = quant.quantize_static(model, [inputs(seed, nodes, 2 * nodes) for seed in range(4)], progress=False)
    runner = next(one for one in q.modules() if isinstance(one, ProgramRunner))
    return model, q, runner


def steps(runner: ProgramRunner) -> list[object]:
    assert runner.program.schedule is not None
    return list(runner.program.schedule.steps)


@planned
@pytest.mark.parametrize("kind", [ByDegree, BySum, OfLayers])
def test_a_graph_network_is_one_native_call(kind: type[Net]) -> None:
    assert [type(one) for one in steps(converted(kind)[2])] == [Region]


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_network_of_any_size_is_near_float(kind: type[Net]) -> None:
    model, q, runner = converted(kind)
    errors = []
    for seed, nodes, edges in ((50, NODES, EDGES), (51, 40, 90), (52, 9, 8), (53, 30, 90)):
        given = inputs(seed, nodes, edges)
        with torch.no_grad():
            y, expected = q(*given), model(*given)
            held = runner.held(*given)
        assert torch.equal(y, held.reals[runner.program.values[-1].node])
        errors.append(float((y - expected).norm() / expected.norm()))
    assert statistics.median(errors) < NEAR  # more sums may meet in one place than calibration saw


@pytest.mark.parametrize("kind", KINDS)
def test_indices_beyond_all_nodes_are_an_error(kind: type[Net]) -> None:
    _, q, _ = converted(kind)
    x, edges = inputs()
    edges[:, 3] = 9000
    with torch.no_grad():
        if kind is ByColumns:  # whose indices are remainders
            q(x, edges)
            return
        with pytest.raises((IndexError, RuntimeError), match=r"9000|out of range"):
            q(x, edges)


def test_indices_of_another_width_are_taken_step_by_step() -> None:
    model, q, _ = converted(OfLayers)
    x, edges = inputs(3)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", quant.types.UncapturedCall)
        y, expected = q(x, edges.int()), model(x, edges.int())
    assert float((y - expected).norm() / expected.norm()) < NEAR


def test_indices_are_given_out_and_read_by_others() -> None:
    model, q, _ = converted(GivesIndices)
    given = inputs(4)
    with torch.no_grad():
        (y, indices), (expected, wanted) = q(*given), model(*given)
    assert torch.equal(indices, wanted)
    assert float((y - expected).norm() / expected.norm()) < NEAR


def test_sums_that_outlive_the_call_are_kept() -> None:
    model, q, _ = converted(Buffered, NODES)
    with torch.no_grad():
        for seed in (1, 2):
            y, expected = q(*inputs(seed)), model(*inputs(seed))
            assert float((y - expected).norm() / expected.norm()) < NEAR
    assert float((q.sums - model.sums).norm() / model.sums.norm()) < NEAR
    assert model.sums.any()


def test_graph_networks_are_saved_with_their_calls(tmp_path: object) -> None:
    for kind in KINDS:
        model, q, _ = converted(kind)
        quant.save(q, f"{tmp_path}/graph.safetensors")
        loaded = quant.load(f"{tmp_path}/graph.safetensors", model=model)
        with torch.no_grad():
            assert torch.equal(loaded(*inputs(9)), q(*inputs(9)))


class Logits(nn.Module):
    """Clamps and filled tensors of each form."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.layer(x))
        y = y.clamp(-0.25, 0.5) + y.clamp(max=0.125) * torch.clamp(y, min=0.25)
        ones = torch.ones((2, x.shape[0], 1)) + torch.ones_like(y) + torch.zeros(size=(x.shape[0], 8))
        return y * ones + y.new_zeros(x.shape[0], 8)


def test_clamps_and_tensors_of_one_number() -> None:
    torch.manual_seed(0)
    model = Logits().eval()
    q = quant.quantize_static(model, [torch.randn(6, 8) for _ in range(4)], progress=False)
    runner = next(one for one in q.modules() if isinstance(one, ProgramRunner))
    if dispatch.current().plans:
        assert [type(one) for one in steps(runner)] == [Region]
    x = torch.randn(11, 8)
    with torch.no_grad():
        y, expected = q(x), model(x)
        assert torch.equal(y, runner.held(x).reals[runner.program.values[-1].node])
    assert float((y - expected).norm() / expected.norm()) < NEAR
