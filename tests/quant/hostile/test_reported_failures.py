"""Ordinary use that failed: replaced children, odd batches, half types, subclasses, trainers' extra arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel

import quant

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")


def static(model: nn.Module, batches: list[Any]) -> nn.Module:
    return quant.quantize_static(model.eval(), batches, progress=False)


def near(expected: Tensor, found: Tensor, decibels: float = 25) -> bool:
    signal, error = expected.detach().double(), (expected - found).detach().double()
    return bool(error.square().sum() <= signal.square().sum() * 10 ** (-decibels / 10))


def backbone() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 16)).eval()


def test_the_head_of_an_int8_backbone_is_replaced() -> None:
    image = torch.randn(2, 3, 8, 8)
    model, q = backbone(), static(backbone(), [image] * 2)
    model[3] = q[3] = nn.Identity()
    assert near(model(image), q(image))


def test_a_float_head_is_put_on_an_int8_backbone() -> None:
    image, head = torch.randn(2, 3, 8, 8), nn.Linear(288, 5)
    model, q = backbone(), static(backbone(), [image] * 2)
    model[3] = q[3] = head
    assert near(model(image), q(image))


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Conv1d(4, 16, 3)), nn.ReLU(), nn.Conv1d(16, 8, 1))


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Conv1d(4, 16, 3), nn.ReLU(), nn.Conv1d(16, 8, 1))
    prune.l1_unstructured(model[0], "weight", amount=0.4)
    return model


@pytest.mark.parametrize("make", [old_weight_norm, pruned])
@pytest.mark.parametrize("kind", ["static", "dynamic", "qat"])
def test_a_weight_that_a_hook_computes(make: Callable[[], nn.Module], kind: str) -> None:
    """A model whose weights were computed just before, with gradients: such a tensor cannot be copied."""
    torch.manual_seed(0)
    model = make()
    x = torch.rand(2, 4, 16)
    model(x)
    if kind == "dynamic":
        with pytest.raises(quant.NothingQuantized):
            quant.quantize_dynamic(model)
        return
    if kind == "qat":
        p = quant.prepare_qat(model, x).train()
        p(x).sum().backward()
        q = quant.convert(p.eval())
    else:
        q = static(model, [x] * 2)
    assert near(model.eval()(x), q(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_types_dynamically(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).to(dtype)
    x = torch.randn(8, 32).to(dtype)
    found = quant.quantize_dynamic(model)(x)
    assert found.dtype == dtype
    assert near(model(x).float(), found.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_types_statically(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).to(dtype)
    x = torch.randn(64, 32).to(dtype)
    q = static(model, [x] * 2)
    assert q(x).dtype == dtype
    assert near(model(x).float(), q(x).float())


class OwnLstm(nn.LSTM):
    def start(self, batch: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, batch, 16), torch.zeros(1, batch, 16)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = OwnLstm(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x, self.rnn.start(x.shape[1]))[0]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_recurrent_subclass_keeps_its_methods(kind: str) -> None:
    model, x = Tagger().eval(), torch.randn(5, 8, 8)
    q = quant.quantize_dynamic(model) if kind == "dynamic" else static(model, [x] * 2)
    assert near(model(x), q(x))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        return self.layer(x) if gain is None else self.layer(x) * gain


@pytest.mark.parametrize("keys", [("x",), ("x", "gain")])
def test_batches_of_a_dict_and_a_label(keys: tuple[str, ...]) -> None:
    model, x = Named().eval(), torch.randn(32, 8)
    inputs = {"x": x, "gain": torch.tensor(2.0)}
    batches = [({key: inputs[key] for key in keys}, torch.arange(32)) for _ in range(2)]
    q = static(model, batches)
    assert near(model(**batches[0][0]), q(**batches[0][0]))


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
@pytest.mark.parametrize("kind", ["static", "qat"])
def test_a_cell_as_the_root(cell: Callable[[int, int], nn.Module], kind: str) -> None:
    model, x = cell(8, 16).eval(), torch.randn(32, 8)
    if kind == "static":
        q = static(model, [x] * 2)
    else:
        p = quant.prepare_qat(model, x).train()
        p(x)
        q = quant.convert(p.eval())
    first = [out if isinstance(out, Tensor) else out[0] for out in (model(x), q(x))]
    assert near(*first)


class TakesAnything(nn.Module):
    """As Hugging Face's models for a task: it computes its own loss, and takes what a trainer adds."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Tensor]:
        logits = self.head(self.body(x).relu())
        if labels is None:
            return {"logits": logits}
        total = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return {"loss": total / kwargs.get("num_items_in_batch", len(labels)), "logits": logits}


def test_a_trainer_passes_an_argument_that_the_examples_had_not() -> None:
    model, x, labels = TakesAnything(), torch.randn(32, 8), torch.arange(32) % 4
    p = quant.prepare_qat(model, {"x": x, "labels": labels}, examples=[{"x": x}]).train()
    for count in (32, 64):
        expected, found = (m(x=x, labels=labels, num_items_in_batch=torch.tensor(count)) for m in (model, p))
        assert near(expected["loss"], found["loss"], 20)
        found["loss"].backward()
    assert set(quant.convert(p.eval())(x=x)) == {"logits"}


def test_the_average_of_models_in_training_is_converted() -> None:
    x = torch.randn(64, 8)
    p = quant.prepare_qat(nn.Sequential(nn.Linear(8, 16)), x).train()
    for _ in range(2):
        p(x).sum().backward()
    average = AveragedModel(p, use_buffers=True)
    average.update_parameters(p)
    average.eval()
    assert near(average(x), quant.convert(average)(x))
