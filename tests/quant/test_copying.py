"""Models that torch refuses to copy, or whose weights hooks compute: weight norm, pruning, left-over tensors."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import quant
from quant.copying import copy_model
from quant.parity import parity

pytestmark = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")


def twice_pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", amount=0.3)
    prune.random_unstructured(layer, "weight", amount=0.2)


HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": nn.utils.weight_norm,
    "weight_norm_whole": lambda layer: nn.utils.weight_norm(layer, dim=None),
    "spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.4),
    "pruned_rows": lambda layer: prune.ln_structured(layer, "weight", amount=0.25, n=2, dim=0),
    "pruned_twice": twice_pruned,
    "pruned_bias": lambda layer: prune.l1_unstructured(layer, "bias", amount=0.5),
}
EACH = pytest.mark.parametrize("kind", HOOKS)
X = torch.randn(6, 4, 10, generator=torch.Generator().manual_seed(2))


def hooked(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
    HOOKS[kind](model[0])
    HOOKS[kind](model[3])
    return model.eval()


def error(expected: Tensor, got: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@torch.no_grad()
@EACH
def test_static_and_dynamic_models_have_the_computed_weights(kind: str, tmp_path: Path) -> None:
    model = hooked(kind)
    with torch.enable_grad():
        model(X)  # leaves weights with a history behind, which deepcopy refuses
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    expected = model(X)
    with torch.enable_grad():
        model(X)
    for q in (quant.quantize_static(model, [X], progress=False), quant.quantize_dynamic(model)):
        assert error(expected, q(X)) < 0.02
        assert {entry.outcome for entry in quant.summary(q) if entry.name in ("3", "5")} == {"int8"}
        quant.save(q, tmp_path / "model.q8")
        assert torch.equal(quant.load(tmp_path / "model.q8", model=hooked(kind))(X), q(X))
    assert torch.equal(model(X), expected)


@torch.no_grad()
@EACH
def test_parameters_that_were_changed_since_the_last_call_count(kind: str) -> None:
    model = hooked(kind)
    model(X)
    for parameter in model.parameters():
        parameter.mul_(1.5).add_(0.01)
    copied = copy_model(model)
    assert torch.allclose(copied(X), model(X), rtol=1e-5, atol=1e-6)
    assert {id(one) for one in copied.parameters()}.isdisjoint({id(one) for one in model.parameters()})
    quantized = quant.quantize_static(model, [X], progress=False)
    assert error(model(X), quantized(X)) < 0.02


@EACH
def test_training_goes_to_what_the_weight_is_computed_from(kind: str) -> None:
    model = hooked(kind)
    p = quant.prepare_qat(model, X)
    p.train()
    optimizer = torch.optim.SGD(p.parameters(), lr=0.002)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = (p(X) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert not quant.check_optimizer(p, optimizer)
    if kind.startswith("pruned"):
        tensor = "bias" if kind == "pruned_bias" else "weight"
        gone = getattr(model[3], f"{tensor}_mask") == 0
        assert bool((getattr(p[3], tensor)[gone] == 0).all())
    q = quant.convert(p)
    p.eval()
    assert parity(p, q, [X]).holds


@torch.no_grad()
@pytest.mark.parametrize("kind", ["weight_norm", "pruned"])
def test_a_checkpoint_of_the_float_model_loads_into_the_one_that_trains(kind: str) -> None:
    model, other = hooked(kind), hooked(kind)
    for parameter in other.parameters():
        parameter.mul_(1.25)
    p = quant.prepare_qat(model, X)
    p.load_state_dict(other.state_dict())
    p.train()(X)
    assert error(other(X), p.eval()(X)) < 0.1
    assert error(model(X), p(X)) > 0.2


@torch.no_grad()
def test_a_tensor_that_a_forward_left_on_a_module_is_no_hindrance() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.kept, self.list = nn.Linear(10, 8), None, []

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    model = Keeps().eval()
    with torch.enable_grad():
        model.kept = model(X)
        model.list = [{"last": model.kept}, (model.kept * 2,)]
    copied = copy_model(model)
    assert torch.equal(copied.kept, model.kept)
    assert copied.list[0]["last"] is copied.kept
    assert copied.kept.grad_fn is None
    for q in (quant.quantize_static(model, [X], progress=False), quant.quantize_dynamic(model)):
        assert error(model(X), q(X)) < 0.02


@torch.no_grad()
def test_recurrent_weights_under_a_hook_are_read_as_they_are_now() -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(10, 8).eval(), X
    nn.utils.weight_norm(layer, "weight_hh_l0")
    layer.weight_hh_l0_g.mul_(1.5)
    expected = layer(x)[0]
    for q in (quant.quantize_dynamic(layer), quant.quantize_static(layer, [x], progress=False)):
        assert error(expected, q(x)[0]) < 0.03


def by_lambda(model: nn.Module) -> None:
    first, rest = model[0], list(model[1:])
    model.forward = lambda x, then=rest[0]: rest[1](then(first(x)))  # type: ignore[method-assign]


def by_wrapper(model: nn.Module) -> None:
    before = model.forward

    @functools.wraps(before)
    def doubled(*args: Tensor) -> Tensor:
        return 2 * before(*args)

    model.forward = doubled  # type: ignore[method-assign]


def by_partial(model: nn.Module) -> None:
    model.forward = functools.partial(lambda layers, x: layers[2](layers[1](layers[0](x))), [*model])  # type: ignore[method-assign]


def by_hook(model: nn.Module) -> None:
    layer = nn.Linear(8, 8)
    model.add_module("more", nn.Identity())
    model.more.add_module("layer", layer)
    model[0].register_forward_hook(lambda module, args, output: layer(output))


@pytest.mark.parametrize("change", [by_lambda, by_wrapper, by_partial, by_hook])
def test_functions_that_hold_layers_hold_those_of_the_copy(change: Callable[[nn.Module], None]) -> None:
    """Else the copy would compute with the layers of the user's model, and training would train them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 8))
    change(model)
    x = torch.randn(4, 10)
    copied = copy_model(model)
    assert torch.equal(copied(x), model(x))
    copied(x).square().mean().backward()
    assert all(one.grad is None for one in model.parameters())
    assert all(one.grad is not None for one in copied.parameters())


def test_a_function_that_holds_nothing_of_the_model_and_one_that_holds_itself_stay() -> None:
    seen: list[object] = []
    seen.append(seen)
    model = nn.Sequential(nn.Linear(10, 8))

    def hook(module: nn.Module, args: object, output: Tensor) -> None:
        seen.append(hook)

    model.register_forward_hook(hook)
    copied = copy_model(model)
    assert list(copied._forward_hooks.values()) == [hook]
    copied(X[0])
    assert seen[1:] == [hook]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_parameters_of_a_scripted_part_are_the_copys_own() -> None:
    """torch computes those of the copy from the parameters that were copied, and trains these."""
    model = nn.Sequential(nn.Linear(10, 8), torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh())))
    next(model[1].parameters()).requires_grad_(False)
    copied = copy_model(model)
    copied(torch.randn(4, 10)).sum().backward()
    assert all(one.grad is None for one in model.parameters())
    assert [one.grad is not None for one in copied.parameters()] == [True, True, False, True]


def test_a_copy_has_tables_of_hooks_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[0].notes = OrderedDict()
    model[0].notes.kept = [1]  # an attribute of an empty table
    copied = copy_model(model)
    seen: list[str] = []
    copied[0].register_forward_hook(lambda module, args, output: seen.append("copy"))
    model(torch.randn(1, 2))
    assert seen == []
    copied(torch.randn(1, 2))
    assert seen == ["copy"]
    assert copied[0].notes.kept == [1]
    assert copied[0].notes.kept is not model[0].notes.kept


def test_a_list_that_holds_itself_is_copied() -> None:
    model = nn.Linear(2, 2)
    model.ring = [model.weight * 2]  # with a history
    model.ring.append(model.ring)
    ring = copy_model(model).ring
    assert ring[1] is ring
    assert ring is not model.ring
    assert torch.equal(ring[0], model.ring[0])
    assert ring[0].grad_fn is None


class Feature(nn.Module):
    """Holds what Python has no copy of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gains = nn.Linear(10, 10), (float(number) for number in range(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("convert", [quant.quantize_dynamic, lambda model: quant.prepare(model, X)])
def test_an_attribute_that_has_no_copy_is_named(convert: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(10, 10), Feature())
    with pytest.raises(
        TypeError, match=r"1 \(Feature\): the attribute 'gains', a generator, cannot be copied \(cannot "
    ):
        convert(model)


@EACH
def test_a_copy_draws_no_random_numbers(kind: str) -> None:
    model = nn.Sequential(nn.Linear(10, 10)).eval()
    HOOKS[kind](model[0])
    before = torch.get_rng_state()
    copy_model(model)
    assert torch.equal(torch.get_rng_state(), before)
