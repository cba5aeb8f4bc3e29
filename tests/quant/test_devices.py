"""Models on another device than the CPU, and default devices.

On `meta` whatever meets a tensor of the CPU raises, so that a tensor made without its device shows where no GPU is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.devices import device_of, tensors_on
from quant.graph import Graph
from quant.runtime.trees import leaves
from quant.static.runner import replaying, runners

META = torch.device("meta")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Positions(nn.Module):
    """Asks for the device of its input, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return self.linear(x + self.embedding(positions)) * self.scale


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.gru = nn.GRU(8, 8, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        head: Tensor = self.head(self.gru(self.lstm(self.embedding(tokens))[0])[0].mean(1))
        return head


def convolutional() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(first, nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(16, 3))


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor]]

CASES: dict[str, Case] = {
    "positions": (Positions, lambda: torch.randn(4, 6, 8)),
    "recurrent": (Recurrent, lambda: torch.randint(0, 20, (4, 6))),
    "convolutional": (convolutional, lambda: torch.randn(4, 3, 14, 14)),
    "attention": (attention, lambda: torch.randn(4, 5, 16)),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, data = CASES[request.param]
    return make(), data()


def devices_in(graph: Graph) -> set[torch.device]:
    return {leaf for node in graph.nodes for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, torch.device)}


@pytest.mark.parametrize("training", [False, True])
def test_a_default_device_changes_nothing(case: tuple[nn.Module, Tensor], training: bool) -> None:
    model, x = case
    prepare = quant.prepare_qat if training else quant.prepare

    def converted() -> nn.Module:
        torch.manual_seed(1)
        prepared = prepare(model, [x])
        prepared.train(training)(x)
        assert device_of(prepared) == torch.device("cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # two steps are no training
            return quant.convert(prepared.eval())

    expected = converted()(x)
    with META:
        q = converted()
    assert torch.equal(q(x), expected)


def test_what_asks_for_a_device_follows_the_model() -> None:
    torch.manual_seed(0)
    prepared = quant.prepare(Positions(), [torch.randn(4, 6, 8)])
    (runner,) = runners(prepared).values()
    assert devices_in(runner.graph) == {torch.device("cpu")}
    prepared.to(META)
    assert devices_in(runner.graph) == {META}
    with replaying():
        assert prepared(torch.randn(2, 5, 8, device=META)).shape == (2, 5, 8)


def test_the_device_of_a_module() -> None:
    assert device_of(nn.Linear(2, 2)) == torch.device("cpu")
    assert device_of(nn.ReLU()) is None
    assert device_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device=META))) is None


def test_tensors_are_made_on_a_device() -> None:
    with META, tensors_on(torch.device("cpu")):
        assert torch.zeros(1).device == torch.device("cpu")
    with META, tensors_on(None):
        assert torch.zeros(1).device == META


def test_an_int8_model_refuses_another_device(case: tuple[nn.Module, Tensor]) -> None:
    model, x = case
    static = quant.quantize_static(model.eval(), [x], progress=False)
    with pytest.raises(
        TypeError, match=r"argument '\w+' is on meta; int8 layers run on the CPU: call it with x.cpu\(\)"
    ):
        static(x.to(META))


@needs_cuda
def test_dynamic_layers_refuse_another_device(case: tuple[nn.Module, Tensor]) -> None:
    model, x = case
    with pytest.raises(TypeError, match=r"layer '.*expected tensors on the CPU, where int8 layers run"):
        quant.quantize_dynamic(model.eval())(x.cuda())


@needs_cuda
@pytest.mark.parametrize("training", [False, True])
def test_a_model_on_cuda(case: tuple[nn.Module, Tensor], training: bool) -> None:
    model, x = case
    model.cuda()
    prepared = (quant.prepare_qat if training else quant.prepare)(model, [x.cuda()])
    assert device_of(prepared) == torch.device("cuda:0")
    if training:
        optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-3)
        for _ in range(25):
            optimizer.zero_grad()
            prepared(x.cuda()).square().mean().backward()
            optimizer.step()
    else:
        prepared(x.cuda())
    q = quant.convert(prepared.eval())
    assert {tensor.device.type for tensor in q.state_dict().values() if isinstance(tensor, Tensor)} == {"cpu"}
    agreement = quant.parity(prepared, q, [x.cuda()])
    assert agreement.holds, agreement
    assert device_of(prepared) == torch.device("cuda:0")


@needs_cuda
def test_capture_leaves_the_random_numbers_of_cuda_as_they_were() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 4)).cuda()
    x = torch.randn(4, 8, device="cuda")
    before = torch.cuda.get_rng_state()
    quant.prepare_qat(model, [x])
    assert torch.equal(torch.cuda.get_rng_state(), before)
