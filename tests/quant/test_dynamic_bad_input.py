"""Bad input to int8 layers: an error of the right type that names the layer, or what float gives; never a crash."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quant.kernels import dispatch
from torch import Tensor, nn

import quant
from quant import QConfig, Recipe, RecipeError, quantize_dynamic

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")
NAN, INF = float("nan"), float("inf")


def int8(module: nn.Module, backend: str | None = None, bits: int = 8) -> nn.Module:
    """The int8 layer of a model in which it is called 'net.it'."""
    model = nn.Sequential(OrderedDict(net=nn.Sequential(OrderedDict(it=module)))).eval()
    it = quantize_dynamic(model, Recipe(default=QConfig(weight_bits=bits)), backend=backend).net.it
    assert isinstance(it, nn.Module)
    return it


def first(output: Any) -> Tensor:
    tensor = output[0] if isinstance(output, tuple) else output
    assert isinstance(tensor, Tensor)
    return tensor.detach()


FLOATS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Linear": (lambda: nn.Linear(6, 5), (4, 6)),
    "LSTM": (lambda: nn.LSTM(6, 5, 2), (4, 3, 6)),
    "GRU": (lambda: nn.GRU(6, 5, bidirectional=True), (4, 3, 6)),
    "RNN_tanh": (lambda: nn.RNN(6, 5), (4, 3, 6)),
    "RNN_relu": (lambda: nn.RNN(6, 5, nonlinearity="relu"), (4, 3, 6)),
    "LSTMCell": (lambda: nn.LSTMCell(6, 5), (3, 6)),
    "GRUCell": (lambda: nn.GRUCell(6, 5), (3, 6)),
    "RNNCell": (lambda: nn.RNNCell(6, 5), (3, 6)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(6, 2), (4, 3, 6)),
}
EACH = pytest.mark.parametrize("kind", FLOATS)


def call(layer: nn.Module, x: Tensor) -> Tensor:
    return first(layer(x, x, x) if hasattr(layer, "num_heads") else layer(x))


# --- dtype and size -------------------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_wrong_dtype(backend: str, kind: str, dtype: torch.dtype) -> None:
    make, shape = FLOATS[kind]
    with pytest.raises(TypeError, match=r"layer 'net\.it.*' \(\w+\): input is .*, expected"):
        call(int8(make(), backend), torch.ones(shape).to(dtype))


@EACH
@pytest.mark.parametrize("features", [0, 5, 7, 12], ids=lambda features: f"{features}features")
def test_wrong_feature_size(backend: str, kind: str, features: int) -> None:
    make, shape = FLOATS[kind]
    with pytest.raises(ValueError, match=r"layer 'net\.it.*shape .*expected .*6"):
        call(int8(make(), backend), torch.ones(*shape[:-1], features))


@EACH
def test_wrong_number_of_dimensions(kind: str) -> None:
    make, _ = FLOATS[kind]
    layer = int8(make())
    for x in (torch.tensor(1.0), torch.ones(2, 2, 2, 2, 6) if kind != "Linear" else torch.tensor(1.0)):
        with pytest.raises((ValueError, IndexError)):
            call(layer, x)


@EACH
def test_two_terms_do_not_hide_a_wrong_size(kind: str) -> None:
    # Half the features twice would fit a projection in two terms.
    make, shape = FLOATS[kind]
    with pytest.raises(ValueError, match=r"net\.it"):
        call(int8(make()), torch.ones(*shape[:-1], 3))


STATES = {
    "batch": lambda hx: hx[..., :-1, :],
    "features": lambda hx: hx[..., :-1],
    "layers": lambda hx: torch.cat([hx, hx]),
    "dimensions": lambda hx: hx[0],
}


@pytest.mark.parametrize("wrong", STATES)
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN_relu"])
def test_wrong_state_of_a_sequence(kind: str, wrong: str) -> None:
    make, shape = FLOATS[kind]
    layer, x = int8(make()), torch.ones(shape)
    h = torch.zeros(2 if kind in ("LSTM", "GRU") else 1, 3, 5)
    bad = STATES[wrong](h)
    for hx in ((bad, h), (h, bad)) if kind == "LSTM" else (bad,):
        with pytest.raises(ValueError, match=r"layer 'net\.it': [hc]_0 has shape .*expected \[\d, 3, 5\]"):
            layer(x, hx)


@pytest.mark.parametrize("wrong", ["batch", "features", "dimensions"])
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_wrong_state_of_a_cell(backend: str, kind: str, wrong: str) -> None:
    layer, h = int8(FLOATS[kind][0](), backend), torch.zeros(3, 5)
    bad = STATES[wrong](h)
    for hx in ((bad, h), (h, bad)) if kind == "LSTMCell" else (bad,):
        with pytest.raises(ValueError, match=r"layer 'net\.it"):
            layer(torch.ones(3, 6), hx)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "LSTMCell", "RNNCell"])
def test_wrong_dtype_of_a_state(backend: str, kind: str) -> None:
    make, shape = FLOATS[kind]
    layer = int8(make(), backend)
    h = torch.zeros(3, 5) if kind.endswith("Cell") else torch.zeros(2, 3, 5)
    for bad in (h.double(), h.half()):
        for hx in ((bad, h), (h, bad)) if kind.startswith("LSTM") else (bad,):
            with pytest.raises(TypeError, match=r"layer 'net\.it"):
                layer(torch.ones(shape), hx)


# --- layout and emptiness -------------------------------------------------------------------------------------------


@EACH
def test_layout_does_not_matter(backend: str, kind: str) -> None:
    make, shape = FLOATS[kind]
    layer, x = int8(make(), backend), torch.randn(shape)
    expected = call(layer, x)
    strided = torch.stack([x, x * 2], dim=-1)[..., 0]
    turned = x.transpose(0, -1).contiguous().transpose(0, -1)
    for other in (strided, turned, x.flip(0).flip(0)):
        assert torch.equal(other, x)
        assert torch.equal(call(layer, other), expected)
    row = x[:1].expand(shape)
    assert torch.equal(call(layer, row), call(layer, row.contiguous()))


@EACH
def test_a_state_that_is_not_contiguous(kind: str) -> None:
    if kind in ("Linear", "MultiheadAttention"):
        pytest.skip(f"{kind} has no state")
    make, shape = FLOATS[kind]
    layer, x = int8(make()), torch.randn(shape)
    size = (3, 5) if kind.endswith("Cell") else (2 if kind in ("LSTM", "GRU") else 1, 3, 5)
    h = torch.stack([torch.randn(size)] * 2, dim=-1)[..., 0]
    pair = kind.startswith("LSTM")
    y = first(layer(x, (h, h) if pair else h))
    assert torch.equal(y, first(layer(x, (h.contiguous(), h.contiguous()) if pair else h.contiguous())))


@EACH
def test_empty_batch_gives_empty_output(backend: str, kind: str) -> None:
    make, shape = FLOATS[kind]
    layer = int8(make(), backend)
    empty = torch.ones(*shape[:-2], 0, shape[-1])
    assert call(layer, empty).shape == (*shape[:-2], 0, call(layer, torch.ones(shape)).shape[-1])


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN_tanh"])
def test_empty_sequence_gives_the_state_back(backend: str, kind: str) -> None:
    make, _ = FLOATS[kind]
    layer = int8(make(), backend)
    h = torch.randn(1 if kind == "RNN_tanh" else 2, 3, 5)
    y, state = layer(torch.ones(0, 3, 6), (h, h * 2) if kind == "LSTM" else h)
    assert y.shape == (0, 3, 10 if kind == "GRU" else 5)
    assert torch.equal(state[0] if kind == "LSTM" else state, h)
    if kind == "LSTM":
        assert torch.equal(state[1], h * 2)


# --- NaN and inf ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 16], ids=["8bits", "16bits"])
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
def test_a_row_that_is_not_finite_is_nan_and_the_others_are_as_before(backend: str, value: float, bits: int) -> None:
    layer = quantize_dynamic(nn.Linear(40, 5), Recipe(default=QConfig(activation_bits=bits)), backend=backend)
    x = torch.randn(6, 40)
    expected = layer(x)
    for column in (0, 17, 39):
        broken = x.clone()
        broken[2, column] = value
        y = layer(broken)
        assert bool(y[2].isnan().all())
        assert torch.equal(y[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN_tanh", "RNN_relu"])
def test_nan_runs_through_its_own_sample_only_as_in_float(backend: str, kind: str) -> None:
    make, shape = FLOATS[kind]
    module = make().eval()
    layer, x = int8(module, backend), torch.randn(shape)
    expected = call(layer, x)
    x[2, 1, 0] = NAN
    y = call(layer, x)
    assert torch.equal(y.isnan(), call(module, x).isnan())
    assert torch.equal(y[:, [0, 2]], expected[:, [0, 2]])


@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
@pytest.mark.parametrize("where", ["input", "state"])
def test_nan_in_a_cell_stays_in_its_row_as_in_float(backend: str, kind: str, where: str) -> None:
    module = FLOATS[kind][0]().eval()
    layer, x, h = int8(module, backend), torch.randn(3, 6), torch.randn(3, 5)
    (x if where == "input" else h)[1, 2] = NAN
    hx = (h, torch.zeros(3, 5)) if kind == "LSTMCell" else h
    y = first(layer(x, hx))
    assert bool(y[1].isnan().all())
    assert torch.equal(y.isnan(), first(module(x, hx)).isnan())


@EACH
def test_numbers_at_the_ends_of_float32_do_not_break_anything(backend: str, kind: str) -> None:
    make, shape = FLOATS[kind]
    layer = int8(make(), backend)
    for value in (3.4e38, -3.4e38, 1e-45, -1e-38, 0.0):
        y = call(layer, torch.full(shape, value))
        assert y.shape == call(layer, torch.ones(shape)).shape
        if abs(value) < 1:
            assert bool(y.isfinite().all())


@pytest.mark.parametrize("kind", ["zero", "constant_rows", "tiny", "huge", "one_channel", "one_feature"])
def test_strange_weights(backend: str, kind: str) -> None:
    sizes = {"one_channel": (8, 1), "one_feature": (1, 8)}.get(kind, (8, 8))
    module = nn.Linear(*sizes)
    with torch.no_grad():
        if kind == "zero":
            module.weight.zero_()
        elif kind == "constant_rows":
            module.weight.copy_(torch.arange(1.0, 9.0).unsqueeze(1).expand(8, 8))
        elif kind in ("tiny", "huge"):
            module.weight.mul_(1e-35 if kind == "tiny" else 1e35)
            module.bias.zero_()
    x = torch.randn(5, sizes[0])
    y, real = int8(module, backend)(x).double(), module(x).detach().double()
    if kind == "zero":
        assert torch.equal(y, real)
    assert float((y - real).norm()) <= 0.03 * float(real.norm())


# --- tables ---------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed(tokens))
        return y


@pytest.mark.parametrize("index", [-1, 9, 2**40, -(2**40)], ids=str)
@pytest.mark.parametrize("bits", [8, 4], ids=["8bits", "4bits"])
def test_an_index_outside_the_table(backend: str, bits: int, index: int) -> None:
    table, bag = int8(nn.Embedding(9, 4), backend, bits), int8(nn.EmbeddingBag(9, 4), backend, bits)
    indices = torch.tensor([0, index, 1])
    with pytest.raises(IndexError, match=r"layer 'net\.it' \(Embedding\): index .*outside the table of 9 rows"):
        table(indices)
    with pytest.raises(IndexError, match=r"layer 'net\.it' \(EmbeddingBag\): index"):
        bag(indices, torch.tensor([0]))
    with pytest.raises(IndexError, match=r"layer 'net\.it' \(EmbeddingBag\): index"):
        bag(indices.reshape(1, 3))
    tied = int8(Tied(), backend)
    with pytest.raises(IndexError, match=r"layer 'net\.it\.embed' \(TiedEmbedding\)"):
        tied(indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool])
def test_indices_of_another_dtype(backend: str, dtype: torch.dtype) -> None:
    indices = torch.ones(1, 2).to(dtype)
    for module in (nn.Embedding(9, 4), nn.EmbeddingBag(9, 4), Tied()):
        with pytest.raises(TypeError, match=r"layer 'net\.it.*: indices are .*expected int32 or int64"):
            int8(module, backend)(indices)


OFFSETS = {"past_the_end": [0, 5], "falling": [0, 3, 1], "not_from_zero": [1, 2], "negative": [0, -1]}


@pytest.mark.parametrize("last", [False, True], ids=["open", "include_last_offset"])
@pytest.mark.parametrize("kind", OFFSETS)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_offsets_that_cannot_be(backend: str, mode: str, kind: str, last: bool) -> None:
    bag = int8(nn.EmbeddingBag(9, 4, mode=mode, include_last_offset=last), backend)
    with pytest.raises(IndexError, match=r"layer 'net\.it' \(EmbeddingBag\): offsets must"):
        bag(torch.tensor([1, 2, 3, 4]), torch.tensor(OFFSETS[kind]))


def test_bag_arguments_that_do_not_fit(backend: str) -> None:
    bag, mean = int8(nn.EmbeddingBag(9, 4, mode="sum"), backend), int8(nn.EmbeddingBag(9, 4), backend)
    line, start = torch.tensor([1, 2, 3, 4]), torch.tensor([0])
    square = line.reshape(2, 2)
    wrong: list[tuple[nn.Module, tuple[Any, ...], str]] = [
        (bag, (line,), "a 1-D input needs offsets"),
        (bag, (square, start), "offsets go with a 1-D input"),
        (bag, (line.reshape(1, 2, 2),), r"input has shape \[1, 2, 2\], expected \(n,\) or \(bags, length\)"),
        (bag, (line[0], start), "expected"),
        (bag, (line, start.reshape(1, 1)), "one dimension"),
        (bag, (line, start, torch.ones(3)), "per_sample_weights have shape"),
        (bag, (square, None, torch.ones(1, 4)), "per_sample_weights have shape"),
        (mean, (line, start, torch.ones(4)), "per_sample_weights go with mode 'sum'"),
    ]
    for layer, arguments, message in wrong:
        with pytest.raises(ValueError, match=rf"layer 'net\.it'.*{message}"):
            layer(*arguments)
    with pytest.raises(TypeError, match=r"layer 'net\.it'.*per_sample_weights are .*, expected"):
        bag(line, start, torch.ones(4, dtype=torch.float64))


# --- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no_weights"])
def test_attention_arguments_that_do_not_fit(need_weights: bool) -> None:
    layer, x = int8(nn.MultiheadAttention(6, 2, batch_first=True)), torch.ones(2, 4, 6)
    wrong: list[tuple[tuple[Tensor, ...], dict[str, Tensor], str]] = [
        ((x, x[0], x[0]), {}, "have 3, 2 and 2 dimensions"),
        ((x, x[:1], x[:1]), {}, "batches of 2, 1 and 1"),
        ((x, x, x[:, :3]), {}, "lengths of 4, 4 and 3"),
        ((x, x, x), {"attn_mask": torch.zeros(1, 4)}, r"attn_mask has shape \[1, 4\], expected \[4, 4\]"),
        ((x, x, x), {"attn_mask": torch.zeros(2, 4, 4)}, r"attn_mask has shape \[2, 4, 4\].*or \[4, 4, 4\]"),
        ((x, x, x), {"attn_mask": torch.zeros(4)}, r"attn_mask has shape \[4\]"),
        ((x, x, x), {"key_padding_mask": torch.zeros(4, 2)}, r"key_padding_mask has shape \[4, 2\], expected \[2, 4\]"),
        ((x, x, x), {"key_padding_mask": torch.zeros(2, 1)}, r"key_padding_mask has shape \[2, 1\]"),
    ]
    for arguments, named, message in wrong:
        with pytest.raises(ValueError, match=rf"layer 'net\.it'.*{message}"):
            layer(*arguments, need_weights=need_weights, **named)
    for named in ({"attn_mask": torch.zeros(4, 4, dtype=torch.uint8)}, {"key_padding_mask": torch.zeros(2, 4).long()}):
        with pytest.raises(
            TypeError, match=r"layer 'net\.it': \w+_mask is torch\..*expected torch.bool or a float type"
        ):
            layer(x, x, x, need_weights=need_weights, **named)


# --- a quantised model that was mistreated --------------------------------------------------------------------------


@EACH
def test_on_the_meta_device_it_says_so(kind: str) -> None:
    make, shape = FLOATS[kind]
    layer = int8(make()).to("meta")
    with pytest.raises(ValueError, match=r"layer 'net\.it.*input is on cpu and q_weight\w* on meta"):
        call(layer, torch.ones(shape))


@EACH
def test_turned_into_another_float_type_it_says_so(kind: str) -> None:
    make, shape = FLOATS[kind]
    layer = int8(make()).to(torch.float64)
    with pytest.raises((TypeError, RuntimeError), match=r"layer 'net\.it|dtype"):
        call(layer, torch.ones(shape))


def test_static_and_dynamic_calls_of_one_weight_do_not_crash() -> None:
    # torch's own oneDNN linear ends the process when one packed weight serves both.
    if dispatch.available()["onednn"]:
        pytest.skip(dispatch.available()["onednn"])
    layer, chosen = int8(nn.Linear(64, 64), "onednn"), dispatch.find("onednn")
    x = torch.randn(4, 64)
    for _ in range(3):
        chosen.linear_u8s8_s32(torch.randint(0, 256, (4, 64), dtype=torch.uint8), 3, layer.q_weight, None)
        expected = layer(x)
    assert torch.equal(layer(x), expected)


def test_groups_that_do_not_divide_are_refused_before_a_layer_is_made() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(96, 8), nn.Embedding(5, 48))
    recipe = Recipe(default=QConfig(weight_bits=4, group_size=64))
    with pytest.raises(RecipeError, match=r"layer '1'.*group_size is 64, expected a divisor of .* 96 inputs"):
        quantize_dynamic(model, recipe, inplace=True)
    assert type(model[0]) is nn.Linear


H = torch.zeros(1, 2, 16)


@pytest.mark.parametrize(
    ("make", "call", "message"),
    [
        (nn.LSTM, (torch.zeros(5, 2, 16), H), "the state is Tensor, expected two tensors"),
        (nn.LSTM, (torch.zeros(5, 2, 16), (H, H, H)), "expected two tensors"),
        (nn.GRU, (torch.zeros(5, 2, 16), (H, H)), "the state is tuple, expected one tensor"),
        (nn.LSTM, ((torch.zeros(5, 2, 16),),), "input is tuple, expected a tensor"),
        (nn.GRU, (None,), "input is NoneType, expected a tensor"),
        (nn.LSTMCell, (torch.zeros(2, 16), H[0]), "expected two tensors"),
        (nn.GRUCell, (None,), "input is NoneType"),
        (nn.LSTM, (torch.zeros(7, 3, 2, 16),), r"input has shape \[7, 3, 2, 16\]"),
        (nn.LSTM, (torch.zeros(5, 2, 16).half(),), "input is (Half|torch.float16|.*16)"),
    ],
)
def test_a_recurrent_layer_refuses_other_kinds_of_arguments(make: Any, call: Any, message: str) -> None:
    q = quant.quantize_dynamic(make(16, 16).eval())
    with pytest.raises((TypeError, ValueError), match=rf"layer '\(root\)'.*{message}"):
        q(*call)


def test_a_recurrent_layer_has_all_weights() -> None:
    float_layer = nn.LSTM(16, 16, 2, bidirectional=True, proj_size=8)
    got = quant.quantize_dynamic(float_layer).all_weights
    assert [[one.shape for one in each] for each in got] == [
        [one.shape for one in each] for each in float_layer.all_weights
    ]


def test_a_dict_of_arguments_says_that_it_is_one() -> None:
    class TakesDict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, d: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.layer(d["x"])  # type: ignore[no-any-return]

    with pytest.raises(TypeError, match=r"keyword arguments by their names, here x; .*give \(example_inputs,\)"):
        quant.prepare_qat(TakesDict(), {"x": torch.zeros(2, 16)})
