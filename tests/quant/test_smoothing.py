"""Outliers of activations: scaled into the weights or given 16 bits where it is measured to help, and nowhere else."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import quant
from quant.runtime.layers.scaled_linear import ScaledLinear
from quant.smoothing import smooth
from quant.smoothing.inputs import watching

WIDTH = 48


class Block(nn.Module):
    """A transformer's block, its norms before the layers or behind the sums."""

    def __init__(self, *, before: bool = True) -> None:
        super().__init__()
        self.before = before
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.last_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        y: Tensor = self.out(F.scaled_dot_product_attention(query, key, value))
        return y

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.attend(self.norm(x))
            return x + self.narrow(F.gelu(self.wide(self.last_norm(x))))
        x = self.norm(x + self.attend(x))
        y: Tensor = self.last_norm(x + self.narrow(F.gelu(self.wide(x))))
        return y


def plant(norm: nn.LayerNorm, layers: list[nn.Linear], gain: float = 60.0, *, pays: bool = True) -> None:
    """Let three channels of a norm be loud; the weights behind it make up for that where it `pays`."""
    loud = torch.tensor([3, 11, 30])
    with torch.no_grad():
        norm.weight[loud] *= gain
        norm.bias[loud] *= gain
        for layer in layers if pays else ():
            layer.weight[:, loud] /= gain


def transformer(*, before: bool = True, gain: float = 60.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(before=before), Block(before=before), nn.Linear(WIDTH, 10)).eval()
    for block in model[:2]:
        plant(block.norm, [block.query, block.key, block.value] if before else [block.wide], gain)
        if before:
            plant(block.last_norm, [block.wide], gain)
    return model


def data(count: int = 8, seed: int = 1, width: int = WIDTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 12, width, generator=generator) for _ in range(count)]


def sqnr(expected: Tensor, got: Tensor) -> float:
    expected, got = expected.detach(), got.detach()
    return float(10 * torch.log10(expected.square().sum() / (expected - got).square().sum()))


def static(model: nn.Module, batches: Any, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", quant.types.CalibrationWarning)
        return quant.quantize_static(model, batches, progress=False, **options)


@pytest.mark.parametrize("before", [True, False], ids=["norms before", "norms behind sums"])
def test_loud_channels_cost_nothing_and_leave_no_layer_float(before: bool) -> None:
    model, even, (x,) = transformer(before=before), transformer(before=before, gain=1.0), data(1, seed=9)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        q = quant.quantize_static(model, data(), progress=False)
        without = quant.quantize_static(even, data(), progress=False)
        assert sqnr(model(x), q(x)) > sqnr(even(x), without(x)) - 1
        assert sqnr(model(x), q(x)) > sqnr(model(x), quant.quantize_dynamic(model)(x)) - 4
    floats = [entry.name for entry in quant.summary(q) if entry.outcome == "float" and entry.type == "Linear"]
    assert not floats


def test_the_report_says_what_was_measured() -> None:
    report = quant.summary(static(transformer(), data()))
    entry = report["0.query"]
    assert entry.type == "Linear"
    assert "input scaled by channel (alpha 0." in entry.detail
    assert "dB instead of" in entry.detail
    assert "scaled" not in report["2"].detail


def test_the_float_model_is_the_same_up_to_float32() -> None:
    model, (x,) = transformer(), data(1, seed=9)
    scaled = smooth(model, data())
    assert isinstance(scaled[0].wide, ScaledLinear)
    assert not any(isinstance(module, ScaledLinear) for module in model.modules())
    with torch.no_grad():
        assert sqnr(model(x), scaled(x)) > 110
        torch.testing.assert_close(scaled[0].wide.weight, model[0].wide.weight, rtol=1e-6, atol=0)


def test_layers_of_one_input_share_their_columns() -> None:
    block = smooth(transformer(), data())[0]
    assert block.query.columns is block.key.columns is block.value.columns


def test_models_without_outliers_are_left_alone() -> None:
    torch.manual_seed(0)
    models: list[tuple[nn.Module, list[Tensor]]] = [
        (nn.Sequential(Block(), nn.Linear(WIDTH, 10)).eval(), data()),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 4, 3)).eval(),
         [torch.randn(2, 3, 16, 16) for _ in range(4)]),
    ]  # fmt: skip
    for model, batches in models:
        q, plain = static(model, batches), static(model, batches, smooth=False)
        assert torch.equal(q(batches[0]), plain(batches[0]))
        assert list(q.state_dict()) == list(plain.state_dict())


def test_a_switch_leaves_everything_as_it_is() -> None:
    q = static(transformer(), data(), smooth=False)
    assert not any(isinstance(module, ScaledLinear) for module in q.modules())


def test_layers_that_the_recipe_leaves_float_or_hooks_watch_are_left_alone() -> None:
    model = transformer()
    model[1].query.register_forward_hook(lambda *_: None)
    scaled = smooth(model, data(), quant.Recipe({"0.*": None}))
    assert {name for name, module in scaled.named_modules() if isinstance(module, ScaledLinear)} <= {
        "1.key", "1.value", "1.wide"
    }  # fmt: skip


def test_a_weight_that_another_module_reads_is_left_alone() -> None:
    model = transformer()
    model[1].query.weight = model[0].query.weight
    scaled = smooth(model, data())
    assert scaled[1].query.weight is scaled[0].query.weight


class Shared(nn.Module):
    """One layer behind two norms, and a norm whose output is returned as well."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.layer = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.two(self.layer(self.one(x)))
        return self.other(self.layer(seen)), seen


def test_a_layer_that_is_called_twice_and_a_norm_that_is_returned_keep_their_values() -> None:
    torch.manual_seed(0)
    model = Shared().eval()
    plant(model.one, [model.layer])
    plant(model.two, [], pays=False)
    x = data(1, seed=5)[0]
    q = static(model, data())
    with torch.no_grad():
        expected, scaled = model(x), smooth(model, data())(x)
    assert isinstance(q.layer, ScaledLinear)
    for one, other, int8 in zip(expected, scaled, q(x), strict=True):
        assert sqnr(one, other) > 110
        assert sqnr(one, int8) > 25


def test_a_call_that_no_program_stands_for_has_the_weights_that_its_forward_reads() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor, features: bool = False) -> Tensor:
            h = self.norm(x)
            return h if features else self.layer(h)

    model, x = Branching().eval(), data(1)[0]
    plant(model.norm, [model.layer])
    q = static(model, data())
    assert isinstance(q.layer, ScaledLinear)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", quant.types.UncapturedCall)
        torch.testing.assert_close(q(x, features=True), model(x, features=True))
        assert sqnr(model(x[0, 0]), q(x[0, 0])) > 25  # another rank


def test_files_hold_the_scales(tmp_path: Path) -> None:
    model, (x,) = transformer(), data(1, seed=9)
    q = static(model, data())
    quant.save(q, tmp_path / "q.q8")
    loaded = quant.load(tmp_path / "q.q8", model=transformer())
    assert torch.equal(loaded(x), q(x))
    again = quant.load(tmp_path / "q.q8", model=transformer(), example_inputs=x)
    assert torch.equal(again(x), q(x))
    with pytest.raises(quant.ArtefactError, match="does not have"):
        quant.load(tmp_path / "q.q8", model=nn.Sequential(nn.Linear(WIDTH, 3)))


def test_compare_and_parity_follow_the_scaled_layers() -> None:
    model, batches = transformer(), data(2)
    q = static(model, batches)
    assert "0.query" in str(quant.compare(model, q, batches))
    prepared = quant.prepare(smooth(model, batches), batches[0])
    quant.calibrate.run(prepared, batches, progress=False)
    assert quant.parity(prepared, quant.convert(prepared), batches).holds


def test_training_starts_from_the_smoothed_model() -> None:
    model, batches = transformer(), data()
    prepared = quant.prepare_qat(smooth(model, batches), batches[0]).train()
    optimizer = torch.optim.SGD(prepared.parameters(), 1e-4)
    with torch.no_grad():
        targets = [model(x) for x in batches]
    for x, y in zip(batches, targets, strict=True):
        optimizer.zero_grad()
        (prepared(x) - y).square().mean().backward()
        optimizer.step()
    q = quant.convert(prepared.eval())
    assert sqnr(targets[0], q(batches[0])) > 25


def test_16_bits_that_are_asked_for_keep_the_columns() -> None:
    wide = quant.QConfig(activation_bits=16)
    model, x = transformer(), data(1)[0]
    with torch.no_grad():
        q, eight = static(model, data()), static(model, data(), recipe=quant.Recipe({"0.query": None}))
        some = static(model, data(), recipe=quant.Recipe({"*.key": wide, "0.wide": wide}))
        every = static(model, data(), recipe=quant.Recipe(default=wide))
        plain = static(model, data(), recipe=quant.Recipe(default=wide), smooth=False)
    scaled = {name for name, one in q.named_modules() if isinstance(one, ScaledLinear)}
    for other in (some, every):
        assert {name for name, one in other.named_modules() if isinstance(one, ScaledLinear)} == scaled
        for name in scaled:
            assert torch.equal(other.get_submodule(name).columns, q.get_submodule(name).columns)  # type: ignore[arg-type]
    assert "0.query" not in {name for name, one in eight.named_modules() if isinstance(one, ScaledLinear)}
    detail = quant.summary(some)["0.wide"].detail
    assert "16-bit input" in detail
    assert "input scaled by channel" in detail
    with torch.no_grad():
        assert sqnr(model(x), every(x)) > sqnr(model(x), plain(x)) + 6


def test_an_input_of_many_decades_gets_16_bits() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.LogSoftmax(1)).eval()
    batches = [torch.randn(2, 8, 40) * 10 ** (0.7 * torch.randn(2, 1, 1)) for _ in range(64)]
    q, plain = static(model, batches), static(model, batches, smooth=False)
    detail = quant.summary(q)["0"].detail
    assert "16-bit input" in detail
    assert "16 bits for its input" in detail
    with torch.no_grad():
        faint = min(batches, key=lambda x: float(x.abs().max()))
        assert sqnr(model(faint), q(faint)) > sqnr(model(faint), plain(faint)) + 6


def test_nothing_of_the_data_is_lost_and_no_generator_moves() -> None:
    seen: list[int] = []

    def stream() -> Iterator[Tensor]:
        for place, x in enumerate(data(20)):
            seen.append(place)
            yield x

    model = transformer()
    state = torch.random.get_rng_state()
    q = static(model, stream())
    assert seen == list(range(20))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(static(model, iter(data(20)))(data()[0]), q(data()[0]))


class Writing(nn.Module):
    """Writes into its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.add_(1.0))
        return y


@pytest.mark.parametrize("forward", [None, lambda model, batch: model(batch)], ids=["rule", "forward"])
def test_what_a_forward_writes_does_not_reach_calibration(forward: Any) -> None:
    torch.manual_seed(0)
    model = Writing().eval()
    q, plain = (static(model, data(), forward=forward, smooth=one, example_inputs=data()[0]) for one in (True, False))
    assert torch.equal(q(data()[0]), plain(data()[0]))


def test_an_error_in_the_data_is_that_of_calibration() -> None:
    with pytest.raises(quant.types.CalibrationError, match="batch"):
        quant.quantize_static(
            transformer(), [*data(1), torch.randn(4, 12, 7)], example_inputs=data(1)[0], progress=False
        )


def test_a_lone_layer() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, 8).eval()
    loud = torch.ones(WIDTH)
    loud[5] = 80.0
    with torch.no_grad():
        layer.weight[:, 5] /= 80
    batches = [x * loud for x in data()]
    q = static(copy.deepcopy(layer), batches)
    assert isinstance(q, ScaledLinear)
    assert sqnr(layer(batches[0]).detach(), q(batches[0])) > 30


class Holding(nn.Module):
    """A forward that reaches its layer by a list, and reads what the user set on it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)
        self.layer.gain = 2.0  # type: ignore[assignment]
        self.layers = (self.layer,)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[0](self.norm(x)) * self.layer.gain
        return y


def test_a_scaled_layer_is_the_same_object_with_what_was_set_on_it() -> None:
    torch.manual_seed(0)
    model, (x,) = Holding().eval(), data(1, seed=9)
    plant(model.norm, [model.layer])
    scaled, q = smooth(model, data()), static(model, data())
    assert isinstance(scaled.layer, ScaledLinear)
    assert scaled.layers[0] is scaled.layer
    assert type(model.layer) is nn.Linear
    with torch.no_grad():
        assert sqnr(model(x), scaled(x)) > 110
        assert sqnr(model(x), q(x)) > 30
    assert quant.summary(q)["layer"].outcome == "int8"


class Stream(IterableDataset[Tensor]):
    """Data of no known length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.cat(data()))


class Loader:
    """Gives its batches anew each time, and counts those that are in memory."""

    def __init__(self) -> None:
        self.alive, self.most = 0, 0

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[Tensor]:
        for x in itertools.islice(itertools.cycle(data()), 64):
            batch = x.clone()
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(batch, self._gone)
            yield batch
            del batch

    def _gone(self) -> None:
        self.alive -= 1


def test_a_loader_of_a_stream_has_no_length() -> None:
    loader: DataLoader[Tensor] = DataLoader(Stream(), batch_size=4)
    q = static(transformer(), loader)
    assert isinstance(q[0].wide, ScaledLinear)


def test_batches_of_a_loader_are_looked_at_one_by_one() -> None:
    loader = Loader()
    static(transformer(), loader)
    assert loader.most <= 3


@pytest.mark.parametrize(
    ("batches", "limit", "verb"),
    [([], None, r"calibrate\.run: "), (data(2), 0, r"quant\.quantize_static: limit is 0")],
    ids=["empty", "limit 0"],
)
def test_no_batches_are_refused(batches: list[Tensor], limit: int | None, verb: str) -> None:
    with pytest.raises(ValueError, match=verb):
        quant.quantize_static(transformer(), batches, example_inputs=data(1)[0], limit=limit, progress=False)


def test_a_write_between_two_layers_gives_them_different_inputs() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = x + 1
            y = self.one(x)
            x.mul_(torch.arange(WIDTH))
            z: Tensor = y + self.two(x)
            return z

    model = Writing().eval()
    with torch.no_grad(), watching(model, ["one", "two"], 1) as watch:
        model(data(1)[0])
    assert [seen.layers for seen in watch.groups()] == [["one"], ["two"]]


def test_little_of_a_convolutions_inputs_is_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3, dilation=2, padding=2), nn.Conv2d(64, 4, 3), nn.Conv2d(4, 4, (33, 1)))
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("quant.smoothing.inputs.KEPT", 3 * 4096)
        with watching(model, ["0", "1", "2"], 8) as watch:
            for _ in range(8):
                model(torch.randn(2, 3, 60, 62))
    first, second, third = ([tuple(x.shape) for x in seen.kept] for seen in watch.groups())
    assert first == [(1, 3, 36, 37)]
    assert second == [(1, 64, 7, 8)]
    assert third == [(1, 4, 33, 32)]  # the kernel's height at least


@pytest.mark.parametrize("data_of", [False, True], ids=["in place", "through data"])
def test_a_layer_whose_weight_a_forward_writes_to_is_left_alone(data_of: bool) -> None:
    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                (self.layer.weight.data if data_of else self.layer.weight).clamp_(-0.05, 0.05)
            y: Tensor = self.last(self.layer(self.norm(x)))
            return y

    torch.manual_seed(0)
    model, (x,) = Bounded().eval(), data(1, seed=9)
    plant(model.norm, [model.layer])
    q = static(model, data())
    assert type(smooth(model, data()).layer) is nn.Linear
    with torch.no_grad():
        assert sqnr(model(x), q(x)) > 30


class Numbered(Dataset[Tensor]):
    """Samples by their numbers, each of which is noted; a generator of the set's own disturbs them."""

    def __init__(self, model_width: int = WIDTH) -> None:
        self.width, self.asked = model_width, list[int]()
        self.noise = random.Random(3)

    def __len__(self) -> int:
        return 32

    def __getitem__(self, place: int) -> Tensor:
        self.asked.append(place)
        rows = torch.randn(12, self.width, generator=torch.Generator().manual_seed(place))
        return rows + self.noise.random() * 1e-3


@pytest.mark.parametrize("own", [True, False], ids=["a generator of its own", "torch's generator"])
def test_a_loader_that_shuffles_is_shuffled_once(own: bool) -> None:
    def loader() -> tuple[Numbered, torch.Generator, DataLoader[Tensor]]:
        torch.manual_seed(5)
        data, generator = Numbered(), torch.Generator().manual_seed(5)
        loader = DataLoader(data, 2, shuffle=True, generator=generator if own else None)
        return data, generator if own else torch.default_generator, loader

    data, generator, alone = loader()
    list(alone)
    expected, after, noise = data.asked, generator.get_state(), data.noise.getstate()
    model = transformer()
    data, generator, alone = loader()
    quant.quantize_static(model, alone, progress=False)
    assert data.asked[-len(data) :] == expected
    assert torch.equal(generator.get_state(), after)
    assert data.noise.getstate() == noise


def test_the_weight_of_an_int8_scaled_layer_is_asked_for_in_vain() -> None:
    q = static(transformer(), data())
    with pytest.raises(AttributeError, match=r"its weight is int8, a part of the converted program.*smooth=False"):
        q[0].wide.weight  # type: ignore[union-attr, operator]  # noqa: B018
    assert not hasattr(q[0].wide, "weight")
    with pytest.raises(AttributeError, match="has no attribute 'wieght'"):
        q[0].wide.wieght  # type: ignore[union-attr, operator]  # noqa: B018
