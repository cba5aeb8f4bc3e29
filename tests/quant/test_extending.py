"""What others bring, by a call and by entry point: a backend that multiplies, an observer, a leaf, an int8 layer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quant.kernels import Backend, BackendUnavailable, available, dispatch, register_backend
from quant.kernels.per_weight import PerWeight
from quant.kernels.reference import exact_product
from quant.observers import OBSERVERS, RangeObserver
from torch import Tensor, nn

import quant
from quant import Recipe, RecipeError, quantize_dynamic, quantize_static, summary

pytestmark = pytest.mark.usefixtures("own_registries")


LOOPS = """
from quant.kernels import Backend

class Loops(Backend):
    name = "loops"

    def product(self, q_x, q_weight):
        return (q_x.long()[:, None] * q_weight.long()).sum(2).int()
"""


class Counting(Backend):
    """A product, and a count of how often it was asked for."""

    name = "counting"

    def __init__(self) -> None:
        self.calls = 0

    def product(self, q_x: Tensor, q_weight: Tensor) -> Tensor:
        self.calls += 1
        return exact_product(q_x, q_weight)


class Mixed(nn.Module):
    """Convolutions of several kinds, a layer that is called twice, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=2, bias=False)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.up = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.wide = nn.ConvTranspose2d(8, 8, 3, dilation=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.grouped(x)) + self.depthwise(x)
        return self.head(self.wide(torch.relu(self.up(x))).mean((2, 3)))


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(1))


USABLE = [name for name, reason in available().items() if not reason and name != "reference"]


@pytest.mark.parametrize("name", USABLE)
def test_every_backend_computes_static_layers_to_the_references_bit(name: str) -> None:
    torch.manual_seed(0)
    model, x = Mixed().eval(), images()
    expected = quantize_static(model, [x], backend="reference", progress=False)
    converted = quantize_static(model, [x], backend=name, progress=False)
    with torch.inference_mode():
        assert torch.equal(converted(x), expected(x))
        assert torch.equal(converted(x[:0]), expected(x[:0]))
    report = summary(converted)
    by = {entry.name: entry.detail for entry in report}
    assert all(f", {name} (" in by[layer] for layer in ("stem", "grouped", "up", "head"))
    assert f"reference (exact), as {name} has no kernel for a transposed convolution with a dilation" in by["wide"]


def test_a_backend_with_a_product_alone_computes_layers_of_every_kind() -> None:
    torch.manual_seed(0)
    backend = Counting()
    assert register_backend(backend) is backend
    assert available()["counting"] == ""

    lstm, sequence = nn.LSTM(6, 8, num_layers=2, bidirectional=True), torch.randn(5, 3, 6)
    ours, expected = (quantize_dynamic(lstm, backend=name) for name in ("counting", "reference"))
    for mine, theirs in zip(ours(sequence)[1], expected(sequence)[1], strict=True):
        assert torch.equal(mine, theirs)

    calls = backend.calls
    model, x = Mixed().eval(), images()
    ours, expected = (quantize_static(model, [x], backend=name, progress=False) for name in ("counting", "reference"))
    with torch.inference_mode():
        assert torch.equal(ours(x), expected(x))
    assert backend.calls > calls
    details = {entry.name: entry.detail for entry in summary(ours)}
    assert ", counting (exact)" in details["stem"]
    assert (
        "reference (exact), as counting has no kernel for a convolution of 32 groups of 1 input channels"
        in details["depthwise"]
    )


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_by_a_product_are_exact(dims: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.kernels.product_conv.MOST_BYTES", 3000)  # images one by one
    torch.manual_seed(0)
    q_x = torch.randint(0, 256, (3, 32, *[9, 7, 6][:dims]), dtype=torch.uint8)
    q_weight = torch.randint(-128, 128, (6, 32 // groups, *[3, 2, 1][:dims]), dtype=torch.int8)
    q_bias = torch.randint(-9999, 9999, (6,), dtype=torch.int32)
    for bias in (None, q_bias):
        places = ([2, 1, 1][:dims], [1, 0, 2][:dims], [1, 2, 1][:dims], groups)
        arguments = (q_x, 77, q_weight, bias, *places)
        expected = dispatch.find("reference").conv_u8s8_s32(*arguments)
        backend = Counting()
        found = backend.conv_u8s8_s32(*arguments)
        assert backend.calls == groups * (1 if dims == 1 else 3)
        assert torch.equal(found, expected)
        assert found.dtype == torch.int32
    with pytest.raises(ValueError, match=r"q_x has 32 channels, q_weight .* expects 64 in 2 groups"):
        Counting().conv_u8s8_s32(q_x, 0, q_weight.new_zeros(6, 32, *[1] * dims), None, *places[:3], 2)


def test_a_weight_that_is_written_to_is_multiplied_as_it_is_now() -> None:
    backend = Counting()
    q_x = torch.full((1, 8, 2, 2), 3, dtype=torch.uint8)
    q_weight = torch.ones(2, 8, 1, 1, dtype=torch.int8)
    ones = [1, 1], [0, 0], [1, 1], 1
    assert backend.conv_u8s8_s32(q_x, 0, q_weight, None, *ones).unique().tolist() == [24]
    q_weight.fill_(2)
    assert backend.conv_u8s8_s32(q_x, 0, q_weight, None, *ones).unique().tolist() == [48]
    kept: PerWeight[Any] = backend._matrices._kept  # type: ignore[union-attr]
    assert len(kept) == 1
    del q_weight
    assert len(kept) == 0


class Rounding(Counting):
    """A product in float32, as a library without integers would have it."""

    name = "rounding"

    def product(self, q_x: Tensor, q_weight: Tensor) -> Tensor:
        return (q_x.float() @ q_weight.float().t()).int()


class Wide(Counting):
    """Sums of another type."""

    name = "wide"

    def product(self, q_x: Tensor, q_weight: Tensor) -> Tensor:
        return exact_product(q_x, q_weight).long()


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (Rounding(), "its product of 5 x 1031 by 3 is not exact: 33388[0-9]* where the sum is 33388"),
        (Wide(), r"its product of 1 x 1 by 1 is torch.int64 \(1, 1\), expected torch.int32 \(1, 1\)"),
    ],
    ids=["inexact", "another type"],
)
def test_a_product_that_is_not_exact_is_not_used(backend: Backend, message: str) -> None:
    register_backend(backend)
    with pytest.raises(BackendUnavailable, match=f"backend '{backend.name}' cannot be used here: {message}"):
        quantize_dynamic(nn.Linear(4, 4), backend=backend.name)
    assert available()[backend.name]


def test_what_is_no_backend_is_refused() -> None:
    class Nameless(Counting):
        name = ""

    class Productless(Backend):
        name = "productless"

    class Native(Counting):
        name = "native"

    with pytest.raises(ValueError, match=r"Nameless has the name '', expected the same, not empty"):
        register_backend(Nameless())
    with pytest.raises(ValueError, match=r"backend 'productless': .*Productless has no product\(q_x, q_weight\)"):
        register_backend(Productless())
    with pytest.raises(ValueError, match=r"backend 'native': .*Native is registered, and .*CompiledBackend was before"):
        register_backend(Native())
    with pytest.raises(TypeError, match=r"expected a quant.kernels.Backend"):
        register_backend(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_a_backend_of_an_installed_package_is_imported_when_it_is_named(install: Callable[..., None]) -> None:
    install(LOOPS, "octet.backends", loops="toy_module:Loops")
    with pytest.raises(BackendUnavailable, match=r"no backend is called 'loop'; there are native, .*, loops"):
        dispatch.find("loop")
    assert "toy_module" not in sys.modules
    layer, x = nn.Linear(6, 4), torch.randn(3, 6)
    ours, expected = (quantize_dynamic(layer, backend=name) for name in ("loops", "reference"))
    assert torch.equal(ours(x), expected(x))
    assert "loops (exact)" in summary(ours)[""].detail


def test_available_lists_what_packages_offer_and_why_not(install: Callable[..., None]) -> None:
    install(LOOPS, "octet.backends", loops="toy_module:Loops", broken="toy_module:Missing", other="toy_module:Loops")
    found = available()
    assert found["loops"] == ""
    assert "toy 1.0 offers it by the entry point toy_module:Missing, which does not load" in found["broken"]
    assert "Loops has the name 'loops', expected the same" in found["other"]


class Quartiles(quant.observers.Observer):
    """The range between two quantiles of the last tensor seen, widened by a factor."""

    def __init__(self, scheme: Any = quant.kernels.ACTIVATION_U8, *, factor: float = 2.0) -> None:
        super().__init__(scheme)
        if not factor > 0:
            raise ValueError(f"Quartiles: factor is {factor}, expected a positive number")
        self.factor = factor

    def _update(self, rows: Tensor, seen: Any) -> None:
        low, high = torch.quantile(rows, torch.tensor([0.25, 0.75]), dim=1)
        self.low.copy_(torch.minimum(self.low, low * self.factor))
        self.high.copy_(torch.maximum(self.high, high * self.factor))

    def _merge(self, other: quant.observers.Observer) -> None:
        self.low.copy_(torch.minimum(self.low, other.low))
        self.high.copy_(torch.maximum(self.high, other.high))


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(64, 8)


def test_an_observer_of_ones_own_is_used_by_its_name(tmp_path: Path) -> None:
    quant.observers.register("quartiles")(Quartiles)
    settings = quant.QConfig(
        activation_observer="quartiles", activation_options={"factor": 3}, weight_observer="quartiles"
    )
    assert quant.QConfig.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    model, x = small()
    prepared = quant.prepare(model, x, Recipe(default=settings))
    quant.calibrate.run(prepared, [x], progress=False)
    quant.calibrate.save_ranges(prepared, tmp_path / "ranges.json")
    written = json.loads((tmp_path / "ranges.json").read_text())["ranges"]["input_0"]
    assert written["info"]["observer"] == "quartiles"
    low, high = torch.quantile(x.flatten(), torch.tensor([0.25, 0.75])).tolist()
    assert (written["low"], written["high"]) == pytest.approx((3 * low, 3 * high), rel=1e-5)
    converted = quant.convert(prepared)
    quant.save(converted, tmp_path / "small.q8")
    loaded = quant.load(tmp_path / "small.q8", model=small()[0])
    assert torch.equal(loaded(x), converted(x))


def test_an_observer_of_ones_own_is_refused_where_it_has_no_place() -> None:
    quant.observers.register("quartiles")(Quartiles)
    model, x = small()
    with pytest.raises(RecipeError, match=r"prepare_qat: .* activation_observer 'quartiles', which searches"):
        quant.prepare_qat(model, x, Recipe(default=quant.QConfig(activation_observer="quartiles")))
    with pytest.raises(RecipeError, match="observer 'quartiles' has no option 'bins'; its options: factor"):
        quant.QConfig(activation_observer="quartiles", activation_options={"bins": 3})
    with pytest.raises(RecipeError, match="factor is 0, expected a positive number"):
        quant.QConfig(activation_observer="quartiles", activation_options={"factor": 0})


def test_an_observer_of_ranges_trains() -> None:
    class Halved(RangeObserver):
        """Half of each batch's extremes, the latest alone."""

        follows_batches = True

        def _update(self, rows: Tensor, seen: Any) -> None:
            self.low.copy_(seen.low / 2)
            self.high.copy_(seen.high / 2)

        def _merge(self, other: quant.observers.Observer) -> None:
            raise NotImplementedError

    quant.observers.register("halved")(Halved)
    with pytest.raises(RecipeError, match="weight_observer is 'halved', whose range follows the batches"):
        quant.QConfig(weight_observer="halved")
    model, x = small()
    trained = quant.prepare_qat(model, x, Recipe(default=quant.QConfig(activation_observer="halved")))
    trained.train()
    trained(x).sum().backward()
    assert any(isinstance(one, Halved) for one in trained.modules())
    assert quant.parity(trained.eval(), quant.convert(trained), [x]).holds


def test_what_is_no_observer_is_refused() -> None:
    class Sightless(quant.observers.Observer):
        def _merge(self, other: quant.observers.Observer) -> None:
            raise NotImplementedError

    class Positional(Quartiles):
        def __init__(self, scheme: Any, factor: float) -> None:
            super().__init__(scheme, factor=factor)

    with pytest.raises(ValueError, match=r"observer 'one': .*Sightless has no _update"):
        quant.observers.register("one")(Sightless)
    with pytest.raises(ValueError, match=r"the constructor of .*Positional takes \(scheme.*expected the scheme first"):
        quant.observers.register("one")(Positional)
    with pytest.raises(TypeError, match=r"expected a subclass of quant.observers.Observer"):
        quant.observers.register("one")(nn.Linear)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="needs a name that is not empty, 'auto' or 'dynamic'"):
        quant.observers.register("auto")(Quartiles)
    with pytest.raises(ValueError, match=r"observer 'minmax': .*Quartiles is registered, and .*MinMaxObserver was"):
        quant.observers.register("minmax")(Quartiles)
    assert "one" not in OBSERVERS


OBSERVER = """
import torch
from quant.observers import MinMaxObserver

class Doubled(MinMaxObserver):
    def _range(self):
        return 2 * self.low, 2 * self.high
"""


def test_an_observer_of_an_installed_package_is_imported_when_it_is_named(install: Callable[..., None]) -> None:
    install(OBSERVER, "octet.observers", doubled="toy_module:Doubled")
    with pytest.raises(
        RecipeError, match=r"is 'double', expected one of auto, dynamic, minmax, .*, doubled; that of another"
    ):
        quant.QConfig(activation_observer="double")
    assert "toy_module" not in sys.modules
    model, x = small()
    converted = quantize_static(
        model, [x], Recipe(default=quant.QConfig(activation_observer="doubled")), progress=False
    )
    low = float(summary(converted)["0"].detail.partition("input [")[2].partition(",")[0])
    assert low == pytest.approx(2 * float(x.min()), rel=0.02)


def test_a_broken_package_is_named_where_its_observer_is_asked_for(install: Callable[..., None]) -> None:
    install("1 / 0", "octet.observers", doubled="toy_module:Doubled")
    with pytest.raises(
        RecipeError, match=r"weight_observer: observer 'doubled': toy 1.0 offers it .* ZeroDivisionError"
    ):
        quant.QConfig(weight_observer="doubled")


LEAF = """
import torch

class Opaque(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2

class Other(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 3
"""


def test_a_leaf_of_an_installed_package_needs_no_call(install: Callable[..., None]) -> None:
    install(LEAF, "octet.leaves", **{"toy_module.Opaque": "toy_module:Opaque"})
    import toy_module  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), toy_module.Opaque(8, 8), toy_module.Other(8, 4)), torch.randn(16, 8)
    report = summary(quantize_static(model, [x], progress=False))
    assert [report[name].outcome for name in "012"] == ["int8", "float", "int8"]
    assert "registered" in report["1"].detail


def test_a_leaf_that_is_another_class_is_named(install: Callable[..., None]) -> None:
    install(LEAF, "octet.leaves", **{"toy_module.Opaque": "toy_module:Other"})
    import toy_module

    with pytest.raises(
        ValueError, match=r"leaf toy_module.Opaque: expected that class, got toy_module.Other \(toy 1.0"
    ):
        quant.prepare(nn.Sequential(nn.Linear(8, 8), toy_module.Opaque(8, 8)), torch.randn(2, 8))


def test_a_leaf_is_a_class_of_modules() -> None:
    with pytest.raises(TypeError, match=r"register_leaf: expected a class, got an object of .*Linear"):
        quant.register_leaf(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"leaf builtins.int: expected a subclass of torch.nn.Module"):
        quant.register_leaf(int)  # type: ignore[arg-type]


class Cosine(nn.Linear):
    """A linear layer over directions: x / |x|, then a temperature."""

    def __init__(self, inputs: int, outputs: int, temperature: float = 10.0) -> None:
        super().__init__(inputs, outputs)
        self.temperature = temperature

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.nn.functional.normalize(x, dim=-1)) * self.temperature


class Int8Cosine(quant.nn.QuantModule):
    """`Cosine` with an int8 weight."""

    kept_in_files = ("temperature",)

    def __init__(self, module: Cosine, qconfig: quant.QConfig) -> None:
        super().__init__()
        self.temperature = module.temperature
        self.inner = quant.nn.Linear.from_float(module, qconfig)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.nn.functional.normalize(x, dim=-1)) * self.temperature


def test_an_int8_layer_of_ones_own_stands_in_for_its_class(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), Cosine(16, 4)), torch.randn(64, 8)
    assert summary(quantize_dynamic(model))["1"].outcome == "float"
    quant.nn.register_int8(Cosine)(Int8Cosine)
    q = quantize_dynamic(model)
    assert type(q[1]) is Int8Cosine
    assert q[1].inner.layer_name == "1.inner"
    assert (q(x) - model(x)).norm() < 0.02 * model(x).norm()
    entry = summary(q)["1"]
    assert entry.outcome == "int8"
    assert entry.detail.startswith(f"{Int8Cosine.__module__}.Int8Cosine, {dispatch.current().name} (")
    quant.save(q, tmp_path / "cosine.q8")
    again = nn.Sequential(nn.Linear(8, 16), Cosine(16, 4, temperature=1.0))
    assert torch.equal(quant.load(tmp_path / "cosine.q8", model=again)(x), q(x))
    with pytest.raises(quant.ArtefactError, match="the file holds an int8 Int8Cosine for '1', the model a Linear"):
        quant.load(tmp_path / "cosine.q8", model=nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))


def test_a_weight_that_is_tied_to_a_layer_of_ones_own_is_quantised_by_each() -> None:
    quant.nn.register_int8(Cosine)(Int8Cosine)
    model = nn.Sequential(nn.Linear(8, 8), Cosine(8, 8))
    model[1].weight = model[0].weight
    q = quantize_dynamic(model)
    assert [type(layer) for layer in q] == [quant.nn.Linear, Int8Cosine]


def test_what_makes_no_int8_layer_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"int8 layer of torch.nn.*Linear: .*Int8Cosine is registered, and .* was before"
    ):
        quant.nn.register_int8(nn.Linear)(Int8Cosine)
    with pytest.raises(TypeError, match=r"expected a subclass of quant.nn.QuantModule, got .*Cosine"):
        quant.nn.register_int8(Cosine)(Cosine)  # type: ignore[type-var]
    quant.nn.register_int8(Cosine)(lambda module, qconfig: module)
    with pytest.raises(
        ValueError, match=r"layer '\(root\)' \(Cosine\): .*lambda.* returned a .*Cosine, expected a quant.nn"
    ):
        quantize_dynamic(Cosine(4, 4))


LAYERS = """
import torch
import quant

class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)

class Int8Doubled(quant.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)
"""


def test_an_int8_layer_of_an_installed_package_needs_no_call(install: Callable[..., None]) -> None:
    install(LAYERS, "octet.layers", **{"toy_module.Doubled": "toy_module:Int8Doubled"})
    import toy_module

    model, x = nn.Sequential(toy_module.Doubled(8, 8)), torch.randn(4, 8)
    q = quantize_dynamic(model)
    assert type(q[0]) is toy_module.Int8Doubled
    assert (q(x) - model(x)).norm() < 0.02 * model(x).norm()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["compiled", "exported", "traced"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
def test_a_product_of_ones_own_is_an_operator_of_graphs(how: str, static: bool) -> None:
    register_backend(Counting())
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    if static:
        made = quantize_static(model, [x], backend="counting", progress=False)
    else:
        made = quantize_dynamic(model, backend="counting")
    with torch.no_grad():
        expected = made(x)
        if how == "compiled":
            torch.compiler.reset()
            graph: Any = torch.compile(made, fullgraph=True, backend="eager")
        elif how == "exported":
            exported = torch.export.export(made, (x,))
            graph = exported.module()
            assert "octet.product" in exported.graph_module.code
            assert static == ("octet.conv_by_product" in exported.graph_module.code)
        else:
            graph = torch.jit.trace(made, (x,), check_trace=False)
        assert torch.equal(graph(x), expected)
