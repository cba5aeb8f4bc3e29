"""Dynamic layers whose weights are stored in 4, 3 and 2 bits: copied, saved, loaded, scripted, and refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quant.kernels import narrow
from torch import Tensor, nn

import quant
from quant.nn import TiedEmbedding

pytestmark = [
    pytest.mark.usefixtures("seeded_on_one_thread"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
    pytest.mark.filterwarnings(r"ignore:.torch\.jit\..*. is deprecated:DeprecationWarning"),
]


class First(nn.Module):
    """A layer inside a model, and the first of its results."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


class Attention(First):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, x, x)[0]
        return y


class Tied(nn.Module):
    """A language model of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(41, 64)
        self.head = nn.Linear(64, 41)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed(tokens))
        return y


X = torch.linspace(-1, 2, 3 * 2 * 64).reshape(3, 2, 64).sin()
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "Linear": (lambda: nn.Linear(64, 41), X),
    "LSTM": (lambda: First(nn.LSTM(64, 32, 2, bidirectional=True)), X),
    "LSTM_projected": (lambda: First(nn.LSTM(64, 64, proj_size=32)), X),
    "GRU": (lambda: First(nn.GRU(64, 32)), X),
    "LSTMCell": (lambda: First(nn.LSTMCell(64, 32)), X[0]),
    "MultiheadAttention": (lambda: Attention(nn.MultiheadAttention(64, 4)), X),
    "MultiheadAttention_odd": (lambda: Attention(nn.MultiheadAttention(96, 12)), torch.cat([X, X], -1)[..., :96]),
    "Tied": (Tied, torch.tensor([[1, 2, 40], [0, 33, 7]])),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "4 bits": {"weight_bits": 4},
    "3 bits, groups": {"weight_bits": 3, "group_size": 32},
    "4 bits, zero points": {"weight_bits": 4, "group_size": 32, "weight_symmetric": False},
    "2 bits": {"weight_bits": 2},
}
EACH = pytest.mark.parametrize("name", MODELS)


BOTH = pytest.mark.parametrize(
    ("name", "settings"),
    [pytest.param(name, settings, id=f"{name}, {text}") for name in MODELS for text, settings in SETTINGS.items()],
)


def quantized(name: str, settings: dict[str, Any], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    recipe = quant.Recipe(default=quant.QConfig(**settings))
    return quant.quantize_dynamic(MODELS[name][0]().eval(), recipe)


def narrow_weights(model: nn.Module) -> list[Tensor]:
    return [one for key, one in model.named_buffers() if "q_weight" in key]


@BOTH
def test_round_trips(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    q, x = quantized(name, settings), MODELS[name][1]
    assert narrow_weights(q)
    assert all(narrow.is_narrow(one) for one in narrow_weights(q))
    expected = q(x)
    assert torch.equal(copy.deepcopy(q)(x), expected)
    other = quantized(name, settings, seed=1)
    assert not torch.equal(other(x), expected)
    other.load_state_dict(q.state_dict())
    assert torch.equal(other(x), expected)
    quant.save(q, tmp_path / "q.q8")
    loaded = quant.load(tmp_path / "q.q8", model=MODELS[name][0]().eval())
    assert torch.equal(loaded(x), expected)
    assert loaded.state_dict().keys() == q.state_dict().keys()


@pytest.mark.parametrize("settings", [{"weight_bits": 4}, {"weight_bits": 4, "group_size": 32}], ids=["rows", "groups"])
@pytest.mark.parametrize("name", ["Linear", "LSTM", "GRU", "Tied"])
def test_scripted(name: str, settings: dict[str, Any]) -> None:
    q, x = quantized(name, settings), MODELS[name][1]
    scripted, file = torch.jit.script(q), io.BytesIO()
    assert torch.equal(scripted(x), q(x))
    torch.jit.save(scripted, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(x), q(x))


@pytest.mark.parametrize("index", [-1, 41])
def test_a_tied_table_has_no_rows_outside_it(index: int) -> None:
    q, tokens = quantized("Tied", {"weight_bits": 4, "group_size": 32}), MODELS["Tied"][1]
    exported, outside = torch.export.export(q, (tokens,)).module(), tokens.clone()
    outside[0, 1] = index
    with pytest.raises(
        IndexError, match=rf"layer 'embed' \(TiedEmbedding\): index {index} is outside the table of 41 rows"
    ):
        q(outside)
    with pytest.raises(IndexError, match="index out of range"):
        exported(outside)


@EACH
def test_the_backends_agree(name: str) -> None:
    q, x = quantized(name, {"weight_bits": 4, "group_size": 32}), MODELS[name][1]
    expected = q(x)
    for module in q.modules():
        if isinstance(module, quant.nn.QuantModule):
            module.backend = "reference"
    assert torch.allclose(q(x), expected, atol=2e-2)


@BOTH
def test_what_the_weights_stand_for(name: str, settings: dict[str, Any]) -> None:
    """The layer is nearly the float one with its dequantised weights: 8-bit activations are all that differ."""
    q, x = quantized(name, settings), MODELS[name][1]
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    layer, of = getattr(q, "layer", q), getattr(model, "layer", model)
    for key, parameter in list(of.named_parameters()):
        if "weight" in key and not isinstance(model, Tied):
            with torch.no_grad():
                parent, _, last = key.rpartition(".")
                parameter.copy_(getattr(layer.get_submodule(parent), last))
    if isinstance(model, Tied):
        assert isinstance(q.embed, TiedEmbedding)
        with torch.no_grad():
            model.head.weight.copy_(q.head.weight)
        assert torch.equal(q.embed(x), model.embed(x))
        assert q.embed.q_weight is q.head.q_weight
    y = model(x)
    assert float(((q(x) - y).norm() / y.norm()).detach()) < 0.03


def test_sizes_that_the_summary_says(tmp_path: Path) -> None:
    goal = 0.145
    models = {
        "Linear": nn.Linear(1024, 512, bias=False),
        "LSTM": nn.LSTM(512, 512, bias=False),
        "GRU": nn.GRU(512, 512, bias=False),
        "Embedding": nn.Embedding(512, 256),
    }
    inputs = {"Embedding": torch.tensor([1, 2])}
    for name, model in models.items():
        x = inputs.get(name, torch.randn(2, 1, 1024 if name == "Linear" else 512))
        size = None if name == "Embedding" else 64
        q = quant.quantize_dynamic(model, quant.Recipe(default=quant.QConfig(weight_bits=4, group_size=size)))
        q(x)
        [entry] = quant.summary(q)
        assert entry.bytes_after <= goal * entry.bytes_before, name
        quant.save(q, tmp_path / "q.q8")
        assert (tmp_path / "q.q8").stat().st_size <= goal * entry.bytes_before + 4096, name  # and the manifest
        assert "64" in entry.detail or name == "Embedding"


def test_weights_that_32_does_not_divide_stay_bytes() -> None:
    q = quant.quantize_dynamic(nn.Linear(40, 8), quant.Recipe(default=quant.QConfig(weight_bits=4)))
    assert q.q_weight.dtype == torch.int8
    assert "weights of 40 inputs stored as bytes, as 32 does not divide them" in quant.summary(q)[""].detail


def test_half_types_keep_the_scales() -> None:
    q = quantized("Linear", {"weight_bits": 4, "group_size": 32})
    expected = q(X)
    for dtype in (torch.bfloat16, torch.float32):
        q.to(dtype)
        assert q.scale.dtype == torch.float16
        assert q(X.to(dtype)).dtype == dtype
    assert torch.equal(q(X), expected)


def test_a_layer_stored_as_bytes_by_an_older_version(tmp_path: Path) -> None:
    """Its file, and its state_dict."""
    q = quantized("Linear", {"weight_bits": 4})
    expected, old = q(X), copy.deepcopy(q)
    old.register_buffer("q_weight", narrow.integers(q.q_weight))
    assert torch.equal(old(X), expected)
    quant.save(old, tmp_path / "old.q8")
    assert torch.equal(quant.load(tmp_path / "old.q8", model=nn.Linear(64, 41))(X), expected)
    fresh = quantized("Linear", {"weight_bits": 4}, seed=1)
    fresh.load_state_dict(old.state_dict())
    assert torch.equal(fresh(X), expected)
    assert narrow.is_narrow(fresh.q_weight)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ({"weight_bits": 4, "group_size": 32}, {"weight_bits": 4, "group_size": 64}),
        ({"weight_bits": 4, "group_size": 32}, {"weight_bits": 4}),
        ({"weight_bits": 3}, {"weight_bits": 4}),
        ({}, {"weight_bits": 4}),
        ({"weight_bits": 4}, {}),
    ],
)
def test_a_state_dict_of_another_form_is_refused(saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    state = nn.Sequential(quantized("Linear", saved)).state_dict()
    model = nn.Sequential(quantized("Linear", loaded))
    with pytest.raises(
        ValueError, match=r"layer '0' \(Linear\): q_weight is of .*, in the state_dict of .*quant\.load"
    ):
        model.load_state_dict(state)


@pytest.mark.parametrize("settings", [{"weight_bits": 4}, {"weight_bits": 4, "group_size": 32}], ids=["rows", "groups"])
def test_scales_of_another_dtype_are_loaded_as_float(settings: dict[str, Any]) -> None:
    q, other = quantized("Linear", settings), quantized("Linear", settings, seed=1)
    for dtype in (torch.float64, torch.float32):
        other.load_state_dict({**q.state_dict(), "scale": q.scale.to(dtype)})
        assert other.scale.dtype == torch.float32
        assert torch.equal(other(X), q(X))


@pytest.mark.parametrize(
    "q_weight",
    [torch.zeros(41, 64, dtype=torch.uint8), torch.full((41, 64), -128, dtype=torch.int8)],
    ids=["unsigned bytes", "-128"],
)
def test_a_weight_that_no_version_stored_is_refused(q_weight: Tensor) -> None:
    q = quantized("Linear", {"weight_bits": 4})
    with pytest.raises(ValueError, match=r"q_weight is of 4 bits .*, in the state_dict of .*, \(41, 64\)"):
        q.load_state_dict({**q.state_dict(), "q_weight": q_weight})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weight_bits": 4, "group_size": 48}, "group_size is 48, expected 32, 64, 128 or None"),
        ({"weight_bits": 8, "group_size": 64}, "expected 2, 3 or 4 bits"),
        ({"weight_bits": 4, "weight_symmetric": False}, "weight_symmetric=False without a group_size"),
        ({"weight_bits": 4, "group_size": 64, "per_channel": False}, "per_channel=False"),
    ],
)
def test_settings_that_are_none(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(quant.recipe.RecipeError, match=said):
        quant.QConfig(**settings)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(96, 8), r"layer '0' \(Linear\): group_size is 64, .* 96 inputs; take group_size=32"),
        (nn.Linear(40, 8), r"layer '0' \(Linear\): group_size is 64, .* 40 inputs; leave group_size out"),
        (nn.LSTM(64, 96), r"layer '0' \(LSTM\): group_size is 64, .* 96 inputs"),
    ],
)
def test_groups_that_do_not_divide(model: nn.Module, said: str) -> None:
    recipe = quant.Recipe(default=quant.QConfig(weight_bits=4, group_size=64))
    with pytest.raises(quant.recipe.RecipeError, match=said):
        quant.quantize_dynamic(nn.Sequential(model), recipe)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(("bits", "most"), [(4, 0.145), (3, 0.115), (2, 0.085)])
def test_tables_have_groups(kind: type[nn.Module], bits: int, most: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(kind(60, 256)).eval(), torch.randint(60, (5, 3))
    errors = []
    for size in (None, 64):
        recipe = quant.Recipe(default=quant.QConfig(weight_bits=bits, group_size=size))
        q = quant.quantize_dynamic(model, recipe)
        errors.append(float((q(x) - model(x)).norm().detach()))
    assert errors[1] < errors[0]
    report = quant.summary(q)
    assert report.bytes_after == q[0].rows.nbytes <= most * report.bytes_before  # type: ignore[union-attr, operator]
    assert "a scale per group of 64" in report["0"].detail
    quant.save(q, tmp_path / "q.q8")
    assert (tmp_path / "q.q8").stat().st_size < report.bytes_after + 8192
    loaded = quant.load(tmp_path / "q.q8", model=nn.Sequential(kind(60, 256)))
    assert torch.equal(loaded(x), q(x))
    assert torch.equal(torch.jit.script(q)(x), q(x))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_groups_that_do_not_divide_a_table(kind: type[nn.Module]) -> None:
    recipe = quant.Recipe(default=quant.QConfig(weight_bits=4, group_size=64))
    with pytest.raises(quant.recipe.RecipeError, match=r"layer '0' .*group_size is 64.*96 inputs; take group_size=32"):
        quant.quantize_dynamic(nn.Sequential(kind(9, 96)), recipe)


def test_the_runner_gets_bytes_and_refuses_groups(tmp_path: Path) -> None:
    q = quantized("Linear", {"weight_bits": 4})
    quant.save(q, tmp_path / "q.q8", runner=True, example_inputs=X)
    assert narrow.is_narrow(q.q_weight)
    loaded = quant.load(tmp_path / "q.q8", model=nn.Linear(64, 41))
    assert torch.equal(loaded(X), q(X))
    grouped = quantized("Linear", {"weight_bits": 4, "group_size": 32})
    with pytest.raises(
        ValueError, match=r"layer '\(root\)' \(Linear\): q_weight is of 4 bits with groups of 32.*group_size"
    ):
        quant.save(grouped, tmp_path / "g.q8", runner=True, example_inputs=X)


@pytest.mark.parametrize("settings", [{"weight_bits": 4}, {"weight_bits": 4, "group_size": 32}], ids=["rows", "groups"])
def test_rounding_by_data_keeps_a_weight_narrow(settings: dict[str, Any]) -> None:
    model, batches = nn.Sequential(nn.Linear(64, 41)).eval(), [torch.randn(64, 64)]
    recipe = quant.Recipe(default=quant.QConfig(**settings))
    q = quant.quantize_dynamic(model, recipe, rounding="gptq", batches=batches, progress=False)
    nearest = quant.quantize_dynamic(model, recipe)
    assert narrow.is_narrow(q[0].q_weight)
    error, other = ((one(batches[0]) - model(batches[0])).norm().detach() for one in (q, nearest))
    assert error < other


def test_a_static_layer_has_no_groups() -> None:
    recipe = quant.Recipe(default=quant.QConfig(weight_bits=4, group_size=32))
    with pytest.raises(quant.recipe.RecipeError, match="group_size=32, and layer '0' is static"):
        quant.quantize_static(nn.Sequential(nn.Linear(32, 8), nn.ReLU()), [torch.randn(4, 32)], recipe, progress=False)
