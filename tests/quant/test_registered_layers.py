"""A registered int8 layer with a form for known ranges: static quantisation, training, files, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quant.kernels import QParams
from torch import Tensor, nn

import quant
from quant import int8_classes
from quant.static.simulation import simulating
from quant.types import UncapturedCall


class Scaled(nn.Module):
    """y = (x W') g: a gain per output, which the weight could not say alone where W is shared."""

    def __init__(self, inputs: int, outputs: int, power: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.gain = nn.Parameter(torch.rand(outputs) + 0.5)
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = nn.functional.linear(x, self.weight) * self.gain**self.power
        return y


class Int8Scaled(quant.nn.StaticQuantModule):
    """`Scaled` with an int8 weight, by exact integer products."""

    kept_in_files = ("power",)

    def __init__(self, module: Scaled, qconfig: quant.QConfig) -> None:
        super().__init__()
        self.power = module.power
        highest = 2 ** (qconfig.weight_bits - 1) - 1
        scale = module.weight.detach().abs().amax() / highest
        self.register_buffer("scale", scale)
        self.register_buffer("q_weight", torch.round(module.weight.detach() / scale).to(torch.int8))
        self.register_buffer("gain", module.gain.detach().clone())

    @property
    def weight(self) -> Tensor:
        return self.q_weight.float() * self.scale

    def dynamic(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight) * self.gain**self.power

    def static(self, q_x: Tensor, input: QParams, output: QParams | None) -> Tensor:
        sums = (q_x.int() - input.zero_point) @ self.q_weight.int().T
        y = sums.float() * (input.scale * self.scale * self.gain**self.power)
        return y if output is None else output.quantize(y)


class Net(nn.Module):
    """A registered layer between layers of torch, called at two places, and one whose output is float."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 16), Scaled(16, 16, power=2), nn.Linear(16, 16)
        self.head = Scaled(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x=self.first(x).relu()).relu()
        return self.head(self.last(self.inner(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


X = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def registered(own_registries: None) -> None:
    quant.nn.register_int8(Scaled)(Int8Scaled)


def calibrated(model: nn.Module, recipe: quant.Recipe | None = None) -> nn.Module:
    prepared = quant.prepare(model, X, recipe)
    prepared(X)
    return prepared


def relative(y: Tensor, expected: Tensor) -> float:
    return float((y - expected).detach().norm() / expected.detach().norm())


def test_it_is_one_int8_layer_with_the_ranges_of_each_call() -> None:
    model = net()
    prepared = calibrated(model)
    q = quant.convert(prepared)
    assert [type(q.get_submodule(name)) for name in ("inner", "head")] == [Int8Scaled, Int8Scaled]
    assert [q.inner.sites, q.head.sites] == [2, 1]
    assert q.inner.input_scale[0] != q.inner.input_scale[1]
    assert "= layer inner(" in str(q.program)
    assert ", site=1)" in str(q.program)
    entry = quant.summary(q)["inner"]
    assert entry.outcome == "int8"
    assert entry.detail.startswith(f"static {__name__}.Int8Scaled, input [0, ")
    assert quant.summary(q)["head"].detail.count("float output") == 1
    assert relative(q(X), model(X)) < 0.05
    agreement = quant.parity(prepared, q, [X])
    assert agreement.holds
    assert {"inner", "inner@1", "head"} <= {step.name for step in agreement}
    errors = {step.name: step.kind for step in quant.compare(model, q, [X])}
    assert errors["inner@1"] == "Int8Scaled"


def test_an_error_of_its_own_names_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    q = quant.convert(calibrated(net()))
    monkeypatch.setattr(Int8Scaled, "static", lambda self, q_x, input, output: q_x.double())
    with pytest.raises(TypeError, match=r"'inner' .*Int8Scaled\.static gave torch\.float64, expected torch\.uint8"):
        q(X)


def test_parity_sees_a_form_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = calibrated(net())
    q = quant.convert(prepared)
    own = Int8Scaled.static
    monkeypatch.setattr(Int8Scaled, "static", lambda self, q_x, *ranges: own(self, q_x // 2, *ranges))
    assert not quant.parity(prepared, q, [X]).holds


@pytest.mark.parametrize("programs", [True, False], ids=["by its programs", "captured again"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "calibrated"])
def test_a_file_keeps_it(
    tmp_path: Path, without_programs: Callable[[Path], None], programs: bool, trained: bool
) -> None:
    recipe = quant.Recipe({"inner": quant.QConfig(weight_bits=6)})
    prepared = quant.prepare_qat(net(), X, recipe) if trained else calibrated(net(), recipe)
    if trained:
        prepared.train()(X)
    q = quant.convert(prepared)
    assert int(q.inner.q_weight.abs().max()) == 31
    quant.save(q, tmp_path / "net.q8")
    if not programs:
        without_programs(tmp_path / "net.q8")
    torch.manual_seed(2)
    loaded: Any = quant.load(tmp_path / "net.q8", model=Net())
    assert torch.equal(loaded(X), q(X))
    assert loaded.inner.power == 2
    assert loaded.inner.layer_name == "inner"
    assert loaded.inner.sites == 2
    loaded.load_state_dict(q.state_dict())
    assert torch.equal(loaded(X), q(X))


def test_a_file_is_not_read_where_nothing_is_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quant.save(quant.convert(calibrated(net())), tmp_path / "net.q8")
    known = int8_classes.LAYERS._known
    monkeypatch.delitem(known, Scaled)
    with pytest.raises(
        quant.ArtefactError, match=r"holds an int8 Int8Scaled for 'inner', and .*Scaled has no such layer here; import"
    ):
        quant.load(tmp_path / "net.q8", model=net())


def test_training_goes_through_its_rounded_weight() -> None:
    model = net()
    trained = quant.prepare_qat(model, X)
    trained.train()
    loss = trained(X).square().mean()
    loss.backward()
    gradients = dict(trained.named_parameters())
    assert all(
        float(gradients[f"{name}.{own}"].grad.norm()) > 0 for name in ("inner", "head") for own in ("weight", "gain")
    )
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter -= 0.01 * parameter.grad
    assert trained(X).square().mean() < loss
    trained.eval()
    q = quant.convert(trained)
    assert quant.parity(trained, q, [X]).holds
    assert torch.equal(q.inner.q_weight, Int8Scaled(trained.inner, quant.QConfig()).q_weight)


def test_a_model_that_is_such_a_layer_alone() -> None:
    torch.manual_seed(0)
    layer = Scaled(8, 4)
    prepared = calibrated(layer)
    q = quant.convert(prepared)
    assert isinstance(q, Int8Scaled)
    assert torch.equal(q(X), q.compute(q._known[0][0].quantize(X), 0))
    assert quant.parity(prepared, q, [X]).holds
    spoiled = X.clone()
    spoiled[3, 0] = torch.nan
    assert q(spoiled).isnan().all(1).nonzero().flatten().tolist() == [3]


class Branching(Net):
    """A forward that is decided by values, so that its layers are captured one by one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if bool(x.isfinite().all()) else torch.zeros_like(x))


def test_in_a_part_that_runs_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Branching().eval()
    q = quant.convert(calibrated(model))
    assert isinstance(q.head, Int8Scaled)
    assert quant.summary(q)["head"].outcome == "int8"
    assert relative(q(X), model(X)) < 0.05
    quant.save(q, tmp_path / "net.q8")
    assert torch.equal(quant.load(tmp_path / "net.q8", model=Branching())(X), q(X))


def test_a_call_that_no_program_stands_for_takes_a_range_of_its_own() -> None:
    class Doubled(Net):
        def forward(self, x: Tensor, twice: bool = False) -> Tensor:
            return super().forward(torch.cat([x, x]) if twice else x)

    torch.manual_seed(0)
    model = Doubled().eval()
    prepared = calibrated(model)
    q = quant.convert(prepared)
    with pytest.warns(UncapturedCall):
        y = q(X, twice=True)
    assert relative(y, model(X, twice=True)) < 0.05
    with simulating(prepared), pytest.warns(UncapturedCall):
        assert relative(prepared(X, twice=True), y) < 1e-5


def test_the_recipe_and_other_calls_leave_it_float() -> None:
    class Called(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(self.first(x)))

    class Loud(Scaled):
        def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
            return super().forward(x) * gain

    class LoudNet(Called):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.inner(self.first(x), 2.0))

    q = quant.quantize_static(Called(), [X], quant.Recipe({"inner": None}), progress=False)
    assert type(q.inner) is Scaled
    assert quant.summary(q)["inner"].detail == "the recipe says so"
    quant.nn.register_int8(Loud)(Int8Scaled)
    model = LoudNet()
    model.inner = Loud(16, 16)
    q = quant.quantize_static(model, [X], progress=False)
    assert "called with 2 arguments, and a registered int8 layer takes one" in quant.summary(q)["inner"].detail


def test_what_is_no_such_layer_is_refused() -> None:
    class Half(quant.nn.StaticQuantModule):
        def dynamic(self, x: Tensor) -> Tensor:
            return x

    class Other(Int8Scaled):
        pass

    class Forgetful(Int8Scaled):
        weight = None  # type: ignore[assignment]

    class Mine(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    with pytest.raises(TypeError, match=r"Half has no static, which quant\.nn\.StaticQuantModule describes"):
        quant.nn.register_int8(Mine)(Half)
    with pytest.raises(ValueError, match=r"Other is registered, and .*Int8Scaled was before"):
        quant.nn.register_int8(Scaled)(Other)
    quant.nn.register_int8(Mine)(Forgetful)
    with pytest.raises(ValueError, match=r"layer '1': .*Forgetful has NoneType as 'weight', expected the real values"):
        quant.convert(calibrated(nn.Sequential(nn.Linear(8, 8), Mine(8, 8))))
    learned = quant.Recipe(default=quant.QConfig(weight_observer="lsq"))
    with pytest.raises(quant.RecipeError, match=r"'inner': .*scales of recurrent and registered layers are not"):
        quant.prepare_qat(net(), X, learned)


def test_dynamic_quantisation_takes_it_too(tmp_path: Path) -> None:
    model = net()
    q = quant.quantize_dynamic(model)
    assert isinstance(q.inner, Int8Scaled)
    assert relative(q(X), model(X)) < 0.05
    quant.save(q, tmp_path / "net.q8")
    assert torch.equal(quant.load(tmp_path / "net.q8", model=Net())(X), q(X))


LAYERS = """
import torch
import quant

class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)

class Int8Doubled(quant.nn.StaticQuantModule):
    def __init__(self, module, qconfig):
        super().__init__()
        self.inner = quant.nn.Linear.from_float(module, qconfig)

    weight = property(lambda self: self.inner.weight)
    bias = property(lambda self: self.inner.bias)

    def dynamic(self, x):
        return 2 * self.inner(x)

    def static(self, q_x, input, output):
        y = 2 * torch.nn.functional.linear(input.dequantize(q_x), self.weight, self.bias)
        return y if output is None else output.quantize(y)
"""


def test_one_of_an_installed_package_needs_no_call(install: Callable[..., None], tmp_path: Path) -> None:
    install(LAYERS, "octet.layers", **{"toy_module.Doubled": "toy_module:Int8Doubled"})
    import toy_module  # type: ignore[import-not-found]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(toy_module.Doubled(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()

    prepared = calibrated(model())
    q = quant.convert(prepared)
    assert type(q[0]) is toy_module.Int8Doubled
    assert quant.parity(prepared, q, [X]).holds
    quant.save(q, tmp_path / "toy.q8")
    assert torch.equal(quant.load(tmp_path / "toy.q8", model=model())(X), q(X))
