"""quantize_dynamic with data: integers by the layers' outputs, block by block, resumed to the same bits, and bad
input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quant.calibrate import CalibrationError, CheckpointError, DataError
from quant.kernels import QScheme, weight_scheme
from torch import Tensor, nn

import quant
from quant.rounding import output_error
from quant.rounding.methods import choose_in_groups

FOUR = quant.Recipe(default=quant.QConfig(weight_bits=4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Stack().eval()


@pytest.fixture
def data() -> list[Tensor]:
    torch.manual_seed(1)
    mix = torch.randn(16, 16)
    return [torch.randn(32, 5, 16) @ mix for _ in range(4)]


def error(q: nn.Module, model: nn.Module, data: list[Tensor]) -> float:
    with torch.no_grad():
        return sum(float((q(x) - model(x)).square().mean()) for x in data)


def quantized(model: nn.Module, data: list[Tensor], rounding: str = "gptq", **settings: Any) -> nn.Module:
    return quant.quantize_dynamic(model, FOUR, batches=data, rounding=rounding, progress=False, **settings)


@pytest.mark.parametrize("rounding", ["gptq", "adaround"])
def test_outputs_are_nearer_to_float(rounding: str, model: nn.Module, data: list[Tensor]) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain, scaled = quant.quantize_dynamic(model, FOUR), quantized(model, data, "nearest")
    q = quantized(model, data[:3], rounding)
    assert error(scaled, model, data) < error(plain, model, data)
    assert error(q, model, data[3:]) < 0.85 * error(scaled, model, data[3:])
    assert int(q.get_submodule("head").q_weight.abs().max()) <= 7  # type: ignore[operator, union-attr]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert "of the error of rounding to nearest" in str(quant.summary(q))


def test_a_killed_run_goes_on_to_the_same_bits(
    model: nn.Module, data: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quant.rounding import checkpoint

    expected = quantized(model, data)
    write, left = checkpoint.Checkpoint.write, [2]

    def killed(self: checkpoint.Checkpoint) -> None:
        write(self)
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.Checkpoint, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        quantized(model, data, checkpoint=tmp_path / "c")
    monkeypatch.setattr(checkpoint.Checkpoint, "write", write)
    again = quantized(model, data, checkpoint=tmp_path / "c")
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    with pytest.raises(CheckpointError, match="method is 'gptq' there"):
        quantized(model, data, "adaround", checkpoint=tmp_path / "c")


def test_a_checkpoint_of_other_texts_is_refused(tmp_path: Path) -> None:
    def forward(model: nn.Module, texts: list[str]) -> None:
        model(torch.tensor([[ord(letter) / 100 - 1 for letter in text] for text in texts]))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    texts: list[Any] = [["abcdefgh", "ijklmnop"]] * 40
    q = quantized(model, texts, forward=forward, checkpoint=tmp_path / "c")
    again = quantized(model, texts, forward=forward, checkpoint=tmp_path / "c")
    assert torch.equal(q.get_submodule("0").q_weight, again.get_submodule("0").q_weight)  # type: ignore[arg-type]
    others: list[Any] = [["!!!!!!!!", "{z{z{z{z"]] * 40
    with pytest.raises(CheckpointError, match="written with another data, or in another order"):
        quantized(model, others, forward=forward, checkpoint=tmp_path / "c")


@pytest.mark.parametrize("rounding", ["gptq", "adaround"])
@pytest.mark.parametrize(
    "qconfig",
    [
        quant.QConfig(weight_bits=4),
        quant.QConfig(weight_bits=3, group_size=32),
        quant.QConfig(weight_bits=4, group_size=32, weight_symmetric=False),
    ],
    ids=str,
)
def test_narrow_weights_and_groups(qconfig: quant.QConfig, rounding: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).eval()
    mix = torch.randn(64, 64)
    data = [torch.randn(64, 64) @ mix for _ in range(3)]
    recipe = quant.Recipe(default=qconfig)
    plain = quant.quantize_dynamic(model, recipe)
    q = quant.quantize_dynamic(model, recipe, batches=data, rounding=rounding, progress=False)
    assert q[0].q_weight.dtype == torch.uint8  # type: ignore[index, union-attr]
    assert error(q, model, data) < 0.8 * error(plain, model, data)


@pytest.mark.parametrize("symmetric", [True, False])
def test_adaround_learns_in_groups_too(symmetric: bool) -> None:
    torch.manual_seed(0)
    weight, rows = torch.randn(16, 64), torch.randn(200, 64) @ torch.randn(64, 64)
    hessian = rows.t() @ rows / len(rows)
    scheme = weight_scheme(3) if symmetric else QScheme(torch.uint8, 0, 7, symmetric=False)
    q, scale, zero = choose_in_groups("adaround", weight, hessian, scheme, 32, bits=3)
    assert (scale.shape, zero.shape) == ((16, 2), (16, 2))
    assert int(q.min()) >= scheme.quant_min
    assert int(q.max()) <= scheme.quant_max

    def by_column(one: Tensor) -> Tensor:
        return one.repeat_interleave(32, dim=1)

    nearest = (torch.round(weight / by_column(scale)) + by_column(zero)).clamp(scheme.quant_min, scheme.quant_max)
    real, other = ((one - by_column(zero)) * by_column(scale) for one in (q, nearest))
    assert output_error(weight, real, hessian).sum() < 0.5 * output_error(weight, other, hessian).sum()
    assert not torch.equal(q, choose_in_groups("gptq", weight, hessian, scheme, 32, bits=3).q)


def test_in_place_and_half_models(model: nn.Module, data: list[Tensor]) -> None:
    q = quantized(model, data)
    halves = quantized(model.to(torch.bfloat16), [x.to(torch.bfloat16) for x in data])
    assert halves(data[0].to(torch.bfloat16)).dtype == torch.bfloat16
    torch.manual_seed(0)
    own = Stack().eval()
    assert quantized(own, data, inplace=True) is own
    assert torch.equal(own(data[0]), q(data[0]))


def test_inputs_of_many_decades_keep_their_columns(data: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8)).eval()
    with torch.no_grad():
        model[0].weight[:, :4] *= 1e-5
    wide = [x * torch.cat([torch.full((4,), 1e5), torch.ones(12)]) for x in data]
    q, plain = quantized(model, wide), quant.quantize_dynamic(model, FOUR)
    assert q[0].columns is not None  # type: ignore[index, union-attr]
    assert error(q, model, wide) < 0.7 * error(plain, model, wide)


def test_a_layer_that_nobody_calls_is_rounded_to_nearest(model: nn.Module, data: list[Tensor]) -> None:
    model.add_module("spare", nn.Linear(4, 4))
    q = quantized(model, data)
    assert "rounded to nearest: the batches do not call it" in str(quant.summary(q))


def test_bad_input_is_named(model: nn.Module, data: list[Tensor]) -> None:
    with pytest.raises(ValueError, match="rounding is 'best', expected one of 'nearest', 'gptq', 'adaround'"):
        quant.quantize_dynamic(model, FOUR, rounding="best")
    with pytest.raises(ValueError, match="rounding='gptq' needs batches="):
        quant.quantize_dynamic(model, FOUR, rounding="gptq")
    with pytest.raises(TypeError, match="batches is a Tensor"):
        quant.quantize_dynamic(model, FOUR, batches=data[0])
    with pytest.raises(DataError, match="there are no batches"):
        quantized(model, [])
    with pytest.raises(CalibrationError, match=r"batch 0, int64 \[4\]"):
        quantized(model, [torch.zeros(4, dtype=torch.int64)])
    with pytest.raises(ValueError, match="checkpoint keeps what"):
        quant.quantize_dynamic(model, FOUR, batches=data, checkpoint="c")


def test_a_layer_may_get_its_input_by_name(model: nn.Module, data: list[Tensor]) -> None:
    class Named(nn.Module):
        def __init__(self, head: nn.Module) -> None:
            super().__init__()
            self.head = head

        def forward(self, x: Tensor) -> Any:
            return self.head(input=x)

    q, plain = quantized(Named(model.head), data), quantized(model.head, data)
    assert torch.equal(q(data[0]), plain(data[0]))


def test_the_report_says_where_no_finite_values_came(model: nn.Module, data: list[Tensor]) -> None:
    q = quantized(model, [torch.full_like(data[0], torch.nan)])
    assert "rounded to nearest: no finite values came to it" in str(quant.summary(q))


@pytest.mark.parametrize("verb", ["quantize_dynamic", "quantize_static", "learn_rounding", "autoquant"])
def test_a_checkpoint_needs_a_folder(verb: str, model: nn.Module, data: list[Tensor], tmp_path: Path) -> None:
    def unread() -> Iterator[Tensor]:
        raise AssertionError("known before the data is read")
        yield

    more: dict[str, Any] = {
        "quantize_dynamic": {"rounding": "gptq", "batches": unread()},
        "quantize_static": {"rounding": "gptq", "batches": unread()},
        "learn_rounding": {"batches": unread()},
        "autoquant": {"data": unread(), "evaluate": lambda model: 0.0, "max_drop": 0.1},
    }
    settings = {**more[verb], "checkpoint": tmp_path / "none" / "c", "progress": False}
    with pytest.raises(FileNotFoundError, match=rf"{verb}: checkpoint: there is no folder '.*none' to write 'c' in"):
        getattr(quant, verb)(model, **settings)


class Recurrent(nn.Module):
    """A recurrent layer of two layers and directions, over sequences whose features correlate."""

    def __init__(self, kind: type[nn.Module], size: int = 160) -> None:
        super().__init__()
        self.rnn = kind(size, 32, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Any) -> Tensor:
        y = self.rnn(x)[0]
        return self.head(y.data if isinstance(y, nn.utils.rnn.PackedSequence) else y)


def sequences(size: int = 160) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(size, size, generator=generator) / size**0.5
    return [torch.randn(16, 12, size, generator=generator) @ mix for _ in range(4)]


@pytest.mark.parametrize("rounding", ["gptq", "adaround"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_weights_of_recurrent_layers(kind: type[nn.Module], rounding: str) -> None:
    torch.manual_seed(0)
    model, data = Recurrent(kind).eval(), sequences()
    recipe = quant.Recipe({"rnn": quant.QConfig(weight_bits=4)}, default=None)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def made(rounding: str) -> nn.Module:
        return quant.quantize_dynamic(model, recipe, batches=data[:3], rounding=rounding, progress=False)

    q, scaled = made(rounding), made("nearest")
    for layer in (0, 1):
        for end in (f"l{layer}", f"l{layer}_reverse"):
            real, own, other = (getattr(one.rnn, f"weight_ih_{end}") for one in (model, q, scaled))
            assert not torch.equal(own, other)
            x = data[3].reshape(-1, 160) if layer == 0 else _outputs(model, data[3])
            gains = 0.9 if layer == 0 else 1.0  # states of an untrained network hardly correlate
            assert (x @ (own - real).t()).norm() < gains * (x @ (other - real).t()).norm(), end
            assert not torch.equal(getattr(q.rnn, f"weight_hh_{end}"), getattr(scaled.rnn, f"weight_hh_{end}"))
    states = model.rnn(data[3])[0].detach()[..., :32].reshape(-1, 32) if kind is not nn.LSTM else None
    if states is not None:  # of the second layer, forwards
        real, own, other = (one.rnn.weight_hh_l1 for one in (model, q, scaled))
        assert (states @ (own - real).t()).norm() < (states @ (other - real).t()).norm()
    assert error(q, model, data[3:]) < error(scaled, model, data[3:])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert "rounded by its outputs, with 0." in quant.summary(q)["rnn"].detail


def _outputs(model: Any, x: Tensor) -> Tensor:
    """What the second layer of a float recurrent layer reads."""
    first = type(model.rnn)(160, 32, bidirectional=True, batch_first=True)
    first.load_state_dict({name: tensor for name, tensor in model.rnn.state_dict().items() if "_l0" in name})
    with torch.no_grad():
        return first(x)[0].reshape(-1, 64)


def test_recurrent_layers_take_packed_sequences_cells_and_groups(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Recurrent(nn.LSTM).eval(), sequences()
    four = quant.Recipe(default=quant.QConfig(weight_bits=4))

    def made(model: nn.Module, batches: Any, **settings: Any) -> Any:
        chosen = {"rounding": "gptq", **settings}
        return quant.quantize_dynamic(model, four, batches=batches, progress=False, **chosen)

    packed = [nn.utils.rnn.pack_padded_sequence(x, torch.full((16,), 12), batch_first=True) for x in data]
    by_padded, by_packed = made(model, data), made(model, packed)
    for name in ("weight_ih_l0", "weight_ih_l1_reverse"):
        same = getattr(by_padded.rnn, name) == getattr(by_packed.rnn, name)
        assert same.float().mean() > 0.99  # the same rows in another order
    again = made(model, data, checkpoint=tmp_path / "c"), made(model, data, checkpoint=tmp_path / "c")
    for one in again:
        assert all(torch.equal(one.state_dict()[name], tensor) for name, tensor in by_padded.state_dict().items())

    cell = nn.ModuleDict({"cell": nn.GRUCell(160, 32)}).eval()
    rows = [x[:, 0] for x in data]
    run = {"forward": lambda model, batch: model["cell"](batch)}
    q, plain = made(cell, rows, **run), made(cell, rows, rounding="nearest", **run)
    real = cell["cell"].weight_ih
    errors = [(rows[0] @ (one["cell"].direction.float_tensor("weight_ih") - real).t()).norm() for one in (q, plain)]
    assert errors[0] < 0.9 * errors[1]

    grouped = quant.Recipe(default=quant.QConfig(weight_bits=4, group_size=32))
    q = quant.quantize_dynamic(model, grouped, batches=data, rounding="gptq", progress=False)
    plain = quant.quantize_dynamic(model, grouped)
    errors = [(data[0] @ (one.rnn.weight_ih_l0 - model.rnn.weight_ih_l0).t()).norm() for one in (q, plain)]
    assert errors[0] < 0.9 * errors[1]


def test_a_recurrent_layer_that_nobody_calls_says_so() -> None:
    torch.manual_seed(0)
    model, data = Recurrent(nn.GRU).eval(), sequences()
    model.add_module("spare", nn.LSTM(160, 8))
    q = quant.quantize_dynamic(model, FOUR, batches=data, rounding="gptq", progress=False)
    assert "rounded to nearest: the batches do not call it" in quant.summary(q)["spare"].detail


def test_an_input_projection_in_two_terms_is_left_as_it_is() -> None:
    torch.manual_seed(0)
    model, data = Recurrent(nn.LSTM, size=16).eval(), sequences(16)
    q, plain = (
        quant.quantize_dynamic(model, batches=data, rounding="gptq", progress=False),
        quant.quantize_dynamic(model),
    )
    assert torch.equal(q.rnn.weight_ih_l0, plain.rnn.weight_ih_l0)  # type: ignore[union-attr]
    assert not torch.equal(q.rnn.weight_ih_l1, plain.rnn.weight_ih_l1)  # type: ignore[union-attr]
