"""Models that torch.ao quantised: the same integers, layer by layer, against torch.ao's own layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.runtime.layers.requantizing import clamp_limits
from quant.runtime.layers.weighted import StaticLayer

with warnings.catch_warnings():  # torch.ao is deprecated, and says so at its import
    warnings.simplefilter("ignore")
    import torch.ao.quantization as ao
    from torch.ao.nn.quantized import FloatFunctional
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    quantized = torch.ops.quantized

pytestmark = [
    # Of torch.ao: that it is deprecated, and what it does badly.
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:To copy construct from a tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*reduce_range:UserWarning"),
    pytest.mark.filterwarnings("ignore:All inputs of this cat operator:UserWarning"),
    pytest.mark.usefixtures("seeded_on_one_thread"),
]

ENGINES = [name for name in ("x86", "fbgemm", "qnnpack") if name in torch.backends.quantized.supported_engines]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each engine of torch.ao that is here, set for the test."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = request.param
    yield request.param
    torch.backends.quantized.engine = before


class Residual(nn.Module):
    """What image networks are made of: norms, two activations of one module, a sum, a concatenation, a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.relu6 = nn.ReLU6()
        self.wide = nn.Conv2d(8, 8, 1)
        self.swish = nn.Hardswish()
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        y = self.relu6(self.deep(x))
        y = self.relu(x + self.wide(y))
        z = self.swish(self.wide(y))
        y = torch.cat([F.max_pool2d(y, 2), F.avg_pool2d(z, 2)], 1)
        return self.head(self.drop(torch.flatten(F.adaptive_avg_pool2d(y, 1), 1))).softmax(-1)


class Stubbed(nn.Module):
    """As torch.ao's eager mode wants it: stubs and FloatFunctional."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
        self.stem, self.norm, self.relu = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.deep, self.late = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu6 = nn.ReLU6()
        self.add, self.cat = FloatFunctional(), FloatFunctional()
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(self.quant(x))))
        y = self.add.add(x, self.relu6(self.late(self.deep(x))))
        y = F.adaptive_avg_pool2d(self.cat.cat([y, x], 1), 1)
        return self.dequant(self.head(torch.flatten(y, 1)))


def with_statistics(model: nn.Module) -> nn.Module:
    """The model in eval mode, its norms with numbers that matter; some gains negative, one 0."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, -1.0, 1.5)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            module.weight.data[0] = 0.0
    return model.eval()


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def by_fx(model: nn.Module, mapping: Any, *batches: Any) -> nn.Module:
    prepared = prepare_fx(copy.deepcopy(model), mapping, batches[:1])
    for batch in batches:
        prepared(batch)
    converted: nn.Module = convert_fx(prepared)
    return converted


def by_eager(model: nn.Module, engine: str, fused: list[list[str]] | None = None) -> nn.Module:
    prepared = copy.deepcopy(model)
    if fused:
        prepared = ao.fuse_modules(prepared, fused)
    prepared.qconfig = ao.get_default_qconfig(engine)
    ao.prepare(prepared, inplace=True)
    prepared(images())
    converted: nn.Module = ao.convert(prepared)
    return converted


def error(got: Tensor, expected: Tensor) -> float:
    return float(((got - expected).norm() / expected.norm()).detach())


def weight_of(layer: Any) -> tuple[Tensor, Tensor]:
    """The integers and the scales of one of torch.ao's layers."""
    weight = layer.weight()
    if weight.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric):
        return weight.int_repr(), weight.q_per_channel_scales().float()
    return weight.int_repr(), torch.tensor(weight.q_scale())


def calls_of(model: nn.Module, x: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Input and output of each layer with a static weight, the last call's, by name."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        module.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: (inputs[0], output)}))
        for name, module in model.named_modules()
        if hasattr(module, "scale") and callable(getattr(module, "weight", None))
    ]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return seen


def check_layers(q: nn.Module, ao_model: nn.Module, x: Any, apart: tuple[str, ...] = ()) -> None:
    """Each static layer has torch.ao's weight and input range, and gives its integers on its inputs, within one step.

    Args:
        apart: layers whose norm torch.ao computes after them.
    """
    theirs = dict(ao_model.named_modules())
    for name, (x_in, y) in calls_of(ao_model, x).items():
        own = q.get_submodule(name)
        assert isinstance(own, StaticLayer), name
        q_weight, scale = weight_of(theirs[name])
        site = len(own.input_scale) - 1
        assert float(own.input_scale[site]) == pytest.approx(x_in.q_scale(), rel=1e-6), name
        assert int(own.input_zero_point[site]) == x_in.q_zero_point(), name
        if name in apart:
            continue
        assert torch.equal(own.q_weight, q_weight), name
        assert torch.allclose(own.weight_scale, scale.expand_as(own.weight_scale), rtol=1e-6), name
        got = own.compute(x_in.int_repr(), site)
        given = y.int_repr()
        if own.clamps[site] is not None:  # which torch.ao may compute after the layer
            given = given.clamp(*clamp_limits(own.clamps[site], y.q_scale(), y.q_zero_point()))
        if got.dtype == torch.uint8:
            assert float(own.output_scale[site]) == pytest.approx(y.q_scale(), rel=1e-6), name
            assert int(own.output_zero_point[site]) == y.q_zero_point(), name
            steps = (got.int() - given.int()).abs()
        else:  # float32, which torch.ao rounds
            steps = (torch.round(got / y.q_scale()) + y.q_zero_point()).clamp(0, 255) - given
        assert float(steps.abs().max()) <= 1, name
        assert float((steps != 0).float().mean()) < 0.02, name


def test_fx_static(engine: str) -> None:
    model, x = with_statistics(Residual()), images()
    ao_model = by_fx(model, ao.get_default_qconfig_mapping(engine), x, images(1))
    q = quant.from_torch_ao(ao_model, model, x)
    check_layers(q, ao_model, x)
    with torch.no_grad():
        exact, came, ours = model(x), ao_model(x), q(x)
    assert error(ours, exact) < 1.1 * error(came, exact) + 0.001
    report = quant.summary(q)
    assert all(entry.outcome == "int8" for entry in report if entry.bytes_before)
    assert "the integers of torch.ao's weight" in report["stem"].detail
    assert "torch.ao did not fuse its clamp" in report["deep"].detail


def test_fx_static_after_another_file(engine: str, tmp_path: Path) -> None:
    model, x = with_statistics(Residual()), images()
    q = quant.from_torch_ao(by_fx(model, ao.get_default_qconfig_mapping(engine), x), model, x)
    quant.save(q, tmp_path / "q.safetensors")
    restored = quant.load(tmp_path / "q.safetensors", model=model)
    assert torch.equal(restored(x), q(x))
    assert quant.summary(restored)["stem"].detail == quant.summary(q)["stem"].detail


def test_eager_static(engine: str) -> None:
    model, x = with_statistics(Stubbed()), images()
    ao_model = by_eager(model, engine, [["stem", "norm", "relu"]])
    q = quant.from_torch_ao(ao_model, model, x)
    check_layers(q, ao_model, x, apart=("deep",))
    with torch.no_grad():
        exact, came, ours = model(x), ao_model(x), q(x)
    assert error(ours, exact) < 1.1 * error(came, exact) + 0.001
    details = {entry.name: entry.detail for entry in quant.summary(q)}
    assert "kept apart" in details["deep"]
    assert "kept apart" not in details["stem"]


def test_a_float_model_that_was_fused_before(engine: str) -> None:
    model, x = with_statistics(Stubbed()), images()
    names = [["stem", "norm", "relu"]]
    q = quant.from_torch_ao(by_eager(model, engine, names), ao.fuse_modules(model, names), x)
    other = quant.from_torch_ao(by_eager(model, engine, names), model, x)
    with torch.no_grad():
        assert torch.equal(q(x), other(x))


def test_a_norm_that_torch_ao_kept_apart_is_folded_with_the_same_integers(engine: str) -> None:
    """A gain of 0 and negative ones too."""
    model, x = with_statistics(Stubbed()), images()
    ao_model = by_eager(model, engine)
    q = quant.from_torch_ao(ao_model, model, x)
    layer, norm = q.get_submodule("deep"), model.late
    gain = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    integers, _ = weight_of(ao_model.deep)
    expected = (integers * torch.sign(gain).reshape(-1, 1, 1, 1)).clamp(-127, 127)
    assert torch.equal(layer.q_weight.float(), expected.float())
    with torch.no_grad():
        exact, came, ours = model(x), ao_model(x), q(x)
    assert error(ours, exact) < 1.1 * error(came, exact) + 0.001


def test_the_float_models_weights_do_not_matter(engine: str) -> None:
    model, x = with_statistics(Stubbed()), images()
    ao_model = by_eager(model, engine)
    q = quant.from_torch_ao(ao_model, model, x)
    other = quant.from_torch_ao(ao_model, Stubbed().eval(), x)
    assert torch.equal(q(x), other(x))


class Decoder(nn.Module):
    """Transposed convolutions with groups, in one dimension and in two."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Conv1d(4, 8, 3, padding=1)
        self.up = nn.ConvTranspose1d(8, 6, 4, stride=2, groups=2)
        self.image = nn.ConvTranspose2d(6, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.up(F.relu(self.line(x))))
        return self.image(y.unsqueeze(-1))


@pytest.mark.parametrize("engine", [one for one in ENGINES if one != "x86"], indirect=True)
def test_transposed_convolutions(engine: str) -> None:
    """Not by the engine x86 (oneDNN), whose outputs of these layers are off by half of their size in torch 2.13."""
    model, x = Decoder().eval(), torch.randn(2, 4, 10)
    mapping = ao.QConfigMapping().set_global(
        ao.QConfig(
            # Of 7 bits: FBGEMM's sums of two products overflow without VNNI.
            activation=ao.HistogramObserver.with_args(reduce_range=True),
            weight=ao.default_weight_observer,
        )
    )
    ao_model = by_fx(model, mapping, x)
    q = quant.from_torch_ao(ao_model, model, x)
    check_layers(q, ao_model, x)
    assert "torch.ao did not fuse its clamp" in quant.summary(q)["up"].detail


class Around(nn.Module):
    """A layer between two convolutions, or between two linear layers."""

    def __init__(self, between: nn.Module, dims: int) -> None:
        super().__init__()
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}.get(dims)
        self.first, self.last = (nn.Linear(8, 8) if conv is None else conv(8, 8, 1) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


BETWEEN: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "Conv1d, ReLU": (lambda: nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.ReLU()), 1),
    "Conv2d of groups, dilated": (lambda: nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4), 2),
    "Conv3d, ReLU": (lambda: nn.Sequential(nn.Conv3d(8, 8, 3, padding=1), nn.ReLU()), 3),
    "Linear, ReLU": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()), 0),
    "BatchNorm2d": (lambda: nn.Sequential(nn.ReLU(), with_statistics(nn.BatchNorm2d(8)), nn.ReLU()), 2),
    "BatchNorm3d": (lambda: nn.Sequential(nn.ReLU(), with_statistics(nn.BatchNorm3d(8))), 3),
    "LayerNorm": (lambda: nn.LayerNorm(8), 0),
    "GroupNorm": (lambda: nn.GroupNorm(2, 8), 2),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(8, affine=True), 2),
    "LeakyReLU": (lambda: nn.LeakyReLU(0.2), 2),
    "PReLU": (lambda: nn.PReLU(), 2),
    "ELU": (lambda: nn.ELU(), 2),
    "ReLU6": (lambda: nn.ReLU6(), 0),
    "Hardtanh": (lambda: nn.Hardtanh(-0.5, 0.5), 2),
    "Hardswish": (lambda: nn.Hardswish(), 2),
    "Sigmoid": (lambda: nn.Sigmoid(), 0),
    "Hardsigmoid": (lambda: nn.Hardsigmoid(), 2),
    "Tanh": (lambda: nn.Tanh(), 0),
    "Softmax": (lambda: nn.Softmax(-1), 0),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), 2),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), 2),
    "Upsample": (lambda: nn.Upsample(scale_factor=2), 2),
    "PixelShuffle": (lambda: nn.Sequential(nn.Conv2d(8, 32, 1), nn.PixelShuffle(2)), 2),
    "Dropout": (lambda: nn.Dropout(0.5), 0),
    "Identity": (lambda: nn.Identity(), 0),
}


@pytest.mark.parametrize("which", BETWEEN)
def test_every_layer_that_torch_ao_has_in_static_form(which: str) -> None:
    between, dims = BETWEEN[which]
    model, x = Around(between(), dims).eval(), torch.randn(2, 8, *[6] * dims) if dims else torch.randn(9, 8)
    if "igmoid" in which or which == "Tanh":  # all 8 bits: two products of them overflow in torch.ao without VNNI
        (nn.init.dirac_ if dims else nn.init.eye_)(model.last.weight)
    ao_model = by_fx(model, ao.get_default_qconfig_mapping("fbgemm"), x)
    q = quant.from_torch_ao(ao_model, model, x)
    check_layers(q, ao_model, x)
    with torch.no_grad():
        exact, came, ours = model(x), ao_model(x), q(x)
    assert error(ours, exact) < 1.2 * error(came, exact) + 0.002


@pytest.mark.parametrize("how", ["eager", "fx"])
def test_the_state_of_a_static_model_in_another_process(how: str) -> None:
    """Loaded into what torch.ao gives of any calibration, as the guide says."""
    model, x = with_statistics(Stubbed()), images()

    def converted(batch: Tensor) -> nn.Module:
        if how == "fx":
            return by_fx(model, ao.get_default_qconfig_mapping("fbgemm"), batch)
        return by_eager(model, "fbgemm", [["stem", "norm", "relu"]])

    theirs, other = converted(x), converted(images(1) * 3)
    other.load_state_dict(theirs.state_dict())
    one, another = quant.from_torch_ao(theirs, model, x), quant.from_torch_ao(other, model, x)
    assert torch.equal(one(x), another(x))


class Mixed(nn.Module):
    """A network with a recurrent layer and a table beside static layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 8, mode="sum")
        self.first = nn.Linear(8, 16)
        self.rnn = nn.LSTM(16, 12, batch_first=True)
        self.norm = nn.LayerNorm(12)
        self.last = nn.Linear(12, 3)
        self.kept = nn.Linear(3, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = F.relu(self.first(self.bag(words))).unsqueeze(1)
        y = self.last(self.norm(self.rnn(x)[0].squeeze(1)))
        return self.kept(y)


def test_dynamic_and_float_layers_beside_static_ones() -> None:
    model, words = Mixed().eval(), torch.randint(20, (5, 4))
    mapping = (
        ao.get_default_qconfig_mapping("x86")
        .set_object_type(nn.LSTM, ao.default_dynamic_qconfig)
        .set_object_type(nn.EmbeddingBag, ao.float_qparams_weight_only_qconfig)
        .set_module_name("kept", None)
    )
    ao_model = by_fx(model, mapping, words)
    q = quant.from_torch_ao(ao_model, model, words)
    assert {entry.name: entry.outcome for entry in quant.summary(q) if entry.bytes_before} == {
        "bag": "int8",
        "first": "int8",
        "rnn": "int8",
        "norm": "float",
        "last": "int8",
        "kept": "float",
    }
    check_layers(q, ao_model, words)
    with torch.no_grad():
        exact, came, ours = model(words), ao_model(words), q(words)
    assert error(ours, exact) < 1.2 * error(came, exact) + 0.001


class Tagger(nn.Module):
    """Every layer that torch.ao quantises dynamically."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 16, 2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(32, 8, batch_first=True)
        self.lstm_cell, self.gru_cell = nn.LSTMCell(8, 8), nn.GRUCell(8, 8)
        self.rnn_cell = nn.RNNCell(8, 8, nonlinearity="relu")
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gru(self.lstm(x)[0])[0][:, -1]
        return self.head(self.rnn_cell(self.gru_cell(self.lstm_cell(y)[0])))


KINDS = {nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell, nn.Linear}


def dynamic(model: nn.Module, kinds: Any = KINDS, dtype: torch.dtype = torch.qint8) -> nn.Module:
    converted: nn.Module = ao.quantize_dynamic(model, kinds, dtype=dtype)
    return converted


def held(model: nn.Module) -> nn.Module:
    return model


def state(model: nn.Module) -> Any:
    return model.state_dict()


@pytest.mark.parametrize("given", [held, state])
def test_dynamic(engine: str, given: Callable[[nn.Module], Any]) -> None:
    model, x = Tagger().eval(), torch.randn(3, 7, 12)
    ao_model = dynamic(model)
    q = quant.from_torch_ao(given(ao_model), model)
    packed = [
        (pair.unpack(), own, what)
        for values, own in zip(ao_model.lstm._all_weight_values, q.lstm.directions, strict=True)
        for pair, what in zip(values.param.__getstate__()[0][4], ("ih", "hh"), strict=True)
    ]
    for cell, own in ((ao_model.gru_cell, q.gru_cell), (ao_model.lstm_cell, q.lstm_cell)):
        packed += [(getattr(cell, f"_packed_weight_{what}").unpack(), own.direction, what) for what in ("ih", "hh")]
    assert len(packed) == 12
    for (weight, bias), own, what in packed:
        assert torch.equal(getattr(own, f"q_weight_{what}"), weight.int_repr())
        assert torch.equal(getattr(own, f"scale_{what}").unique(), torch.tensor([weight.q_scale()]))
        assert torch.equal(getattr(own, f"bias_{what}"), bias)
    weight, bias = ao_model.head._packed_params._weight_bias()
    assert torch.equal(q.head.q_weight, weight.int_repr())
    assert torch.equal(q.head.bias, bias)
    with torch.no_grad():
        exact, came, ours = model(x), ao_model(x), q(x)
    assert error(ours, exact) < error(came, exact)
    assert all("the integers of torch.ao's weight" in entry.detail for entry in quant.summary(q))


TABLES = {
    "8 bits": (nn.EmbeddingBag, ao.float_qparams_weight_only_qconfig, torch.quint8),
    "4 bits": (nn.EmbeddingBag, ao.float_qparams_weight_only_qconfig_4bit, torch.quint4x2),
    "embedding": (nn.Embedding, ao.float_qparams_weight_only_qconfig, torch.quint8),
}


def table(kind: Any) -> nn.Module:
    return kind(20, 8, mode="sum") if kind is nn.EmbeddingBag else kind(20, 8)


@pytest.mark.parametrize("given", [held, state])
@pytest.mark.parametrize("which", TABLES)
def test_tables(which: str, given: Callable[[nn.Module], Any]) -> None:
    """The same integers and ends; in float32 a product and a sum, which a fused instruction may round once."""
    kind, setting, dtype = TABLES[which]
    model, words = nn.Sequential(table(kind)).eval(), torch.randint(20, (5, 4))
    ao_model = dynamic(model, {kind: setting}, dtype)
    q = quant.from_torch_ao(given(ao_model), model)
    packed = ao_model.state_dict()["0._packed_params._packed_weight"].int_repr().reshape(20, -1)
    assert torch.equal(q[0].rows[:, : packed.shape[1]], packed)
    assert torch.allclose(q(words), ao_model(words), rtol=1e-5, atol=1e-6)
    assert quant.summary(q)["0"].outcome == ("int4" if which == "4 bits" else "int8")


def test_a_mode_that_torch_ao_does_not_follow() -> None:
    """Its EmbeddingBag sums whatever the mode is (torch/ao/nn/quantized/modules/embedding_ops.py, torch 2.13)."""
    model, words = nn.Sequential(nn.EmbeddingBag(20, 8, mode="mean")).eval(), torch.randint(20, (5, 4))
    ao_model = dynamic(model, {nn.EmbeddingBag: ao.float_qparams_weight_only_qconfig}, torch.quint8)
    q = quant.from_torch_ao(ao_model, model)
    assert error(ao_model(words), 4 * model(words)) < 0.01
    assert error(q(words), model(words)) < 0.01
    assert "torch.ao adds up its bags" in quant.summary(q)["0"].detail


def test_what_stays_float_has_torch_aos_numbers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).eval()
    nn.init.normal_(model[1].weight)
    q = quant.from_torch_ao(dynamic(model), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    assert torch.equal(q[1].weight, model[1].weight)


def affine(weight: Any = None) -> Any:
    return ao.QConfig(
        activation=ao.MinMaxObserver,
        weight=ao.MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_affine),
    )


def test_a_weight_with_a_zero_point_is_rounded_anew() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).eval()
    nn.init.uniform_(model[0].weight, 0.0, 1.0)
    x = torch.randn(9, 8)
    ao_model = by_fx(model, ao.QConfigMapping().set_global(affine()), x)
    q = quant.from_torch_ao(ao_model, model, x)
    assert "rounded anew" in quant.summary(q)["0"].detail
    weight = getattr(ao_model, "0").weight().dequantize()
    assert float((q[0].weight - weight).abs().max()) <= float(q[0].weight_scale.max()) / 2 * 1.001
    with torch.no_grad():
        exact, came, ours = model(x), ao_model(x), q(x)
    assert error(ours, exact) < 1.2 * error(came, exact) + 0.001


def test_reduced_ranges_are_said() -> None:
    model, x = with_statistics(Residual()), images()
    said = {
        name: [entry.detail for entry in quant.summary(q) if entry.name.startswith("(torch.ao")]
        for name in ("x86", "onednn")
        for q in [quant.from_torch_ao(by_fx(model, ao.get_default_qconfig_mapping(name), x), model, x)]
    }
    assert "reduce_range" in said["x86"][0]
    assert said["onednn"] == []


def test_a_functional_layer_stays_float() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.relu(self.first(x)), self.weight).relu()

    model, x = Functional().eval(), torch.randn(9, 8)
    ao_model = by_fx(model, ao.get_default_qconfig_mapping("x86"), x)
    q = quant.from_torch_ao(ao_model, model, x)
    with torch.no_grad():
        assert error(q(x), model(x)) < 1.1 * error(ao_model(x), model(x)) + 0.001


def test_an_activation_of_the_same_input_is_not_taken_for_another() -> None:
    """torch.ao fuses the ReLU; the sigmoid of its result has another range."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)
            nn.init.dirac_(self.last.weight)  # one product a sum: two of 8 bits overflow in oneDNN without VNNI

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.sigmoid(F.relu(self.conv(x))))

    model, x = Two().eval(), images()
    ao_model = by_fx(model, ao.get_default_qconfig_mapping("x86"), x)
    q = quant.from_torch_ao(ao_model, model, x)
    check_layers(q, ao_model, x)
    assert float(q.conv.output_scale) == pytest.approx(float(ao_model.conv.scale))


REFUSED = [
    pytest.param(lambda: (3, nn.Linear(2, 2)), TypeError, "ao_model is a int", id="no model"),
    pytest.param(lambda: (nn.Linear(2, 2), "x"), TypeError, "float_model is a str", id="no float model"),
    pytest.param(
        lambda: (nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))),
        ValueError,
        "Sequential has no layer that torch.ao quantised; .*convert_pt2e",
        id="float",
    ),
    pytest.param(
        lambda: (dynamic(nn.Sequential(nn.Linear(2, 3))), nn.Sequential(nn.Linear(2, 4))),
        ValueError,
        r"layer '0': expected a weight of shape \(3, 2\), .* float_model has one of \(4, 2\); give the float",
        id="another shape",
    ),
    pytest.param(
        lambda: (dynamic(nn.Sequential(nn.LSTM(2, 3, 2))), nn.Sequential(nn.LSTM(2, 3))),
        ValueError,
        "layer '0': expected 2 layers and directions, .* float_model has 1;",
        id="fewer layers",
    ),
    pytest.param(
        lambda: (dynamic(nn.Sequential(nn.Linear(2, 3))), nn.Sequential(nn.ReLU())),
        ValueError,
        "layer '0': expected product, as torch.ao's model has it, and float_model has ReLU; give the float model",
        id="another kind",
    ),
    pytest.param(
        lambda: (dynamic(nn.Sequential(nn.Linear(2, 3))), nn.ModuleDict({"head": nn.Linear(2, 3)})),
        ValueError,
        "layer '0' of torch.ao's model is not in ModuleDict, .* its layers are head$",
        id="another name",
    ),
    pytest.param(
        lambda: (dynamic(nn.Sequential(nn.Linear(2, 3)), dtype=torch.float16), nn.Sequential(nn.Linear(2, 3))),
        ValueError,
        "no int8 layer; 0: float16 in torch.ao",
        id="float16",
    ),
]


@pytest.mark.parametrize(("given", "kind", "message"), REFUSED)
def test_refused(given: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        quant.from_torch_ao(*given())


def test_a_static_model_without_its_calls_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval(), torch.randn(9, 8)
    ao_model = by_fx(model, ao.get_default_qconfig_mapping("x86"), x)
    with pytest.raises(ValueError, match="GraphModule is a static model: give example_inputs"):
        quant.from_torch_ao(ao_model, model)
    with pytest.raises(ValueError, match=r"the state_dict is of a static model, .*load it into the model"):
        quant.from_torch_ao(ao_model.state_dict(), model, x)


def test_a_prepared_model_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval(), torch.randn(9, 8)
    prepared = prepare_fx(model, ao.get_default_qconfig_mapping("x86"), (x,))
    with pytest.raises(ValueError, match="A prepared model is to be converted first"):
        quant.from_torch_ao(prepared, model, x)


def test_packed_weights_of_an_engine_that_is_not_here() -> None:
    class Foreign(nn.Module):
        def _save_to_state_dict(self, *args: Any) -> None:
            raise RuntimeError("Didn't find engine for operation quantized::linear_unpack NoQEngine")

    with pytest.raises(ValueError, match=r"cannot be unpacked in this process, which has the engines .*: Didn't find"):
        quant.from_torch_ao(nn.Sequential(Foreign()), nn.Sequential(nn.Linear(2, 2)))


def test_models_are_left_as_they_are(engine: str) -> None:
    model, x = with_statistics(Residual()), images()
    ao_model = by_fx(model, ao.get_default_qconfig_mapping(engine), x)
    before, float_before = ao_model(x), model(x)
    quant.from_torch_ao(ao_model, model, x)
    assert torch.equal(ao_model(x), before)
    assert torch.equal(model(x), float_before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in ao_model.modules())
