"""NaN and inf in the inputs of static models: NaN in the samples that hold them, and the bits of all others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from quant.calibrate import CalibrationWarning
from torch import Tensor, nn

import quant
from quant.runtime import nonfinite
from quant.static.simulation import simulating

pytestmark = [
    pytest.mark.usefixtures("seeded_on_one_thread"),
    # Of tracing: what it warns of are shapes that are constants.
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

BAD = pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)


def convnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3))
    return nn.Sequential(stem, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Float(nn.Module):
    """A float step in the middle, whose NaN only arises there."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(torch.sqrt(x.amax(1, keepdim=True)) + self.one(x).log_softmax(-1))
        return y


class Sequence(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.cells, self.head = kind(8, 16, batch_first=batch_first), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.cells(x)[0])
        return y


class Columns(nn.Module):
    """A convolution over images that a recurrent layer reads column by column."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.cells, self.head = nn.Conv2d(3, 4, 3), nn.GRU(24, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.cells(self.conv(x).flatten(1, 2).permute(2, 0, 1))[0])
        return y


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (convnet, (4, 3, 16, 16)),
    "one linear layer": (lambda: nn.Linear(6, 4), (4, 6)),
    "linear layers": (lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4)), (4, 6)),
    "float in the middle": (Float, (4, 6)),
    "transformer": (encoder, (4, 5, 16)),
    "LSTM": (lambda: Sequence(nn.LSTM, True), (4, 5, 8)),
    "GRU alone": (lambda: nn.GRU(8, 16, 2, batch_first=True), (4, 5, 8)),
}
models = pytest.mark.parametrize(("make", "shape"), MODELS.values(), ids=list(MODELS))


def converted(model: nn.Module, *shape: int, **options: str) -> tuple[nn.Module, Tensor]:
    batches = [torch.rand(shape) for _ in range(3)]
    return quant.quantize_static(model.eval(), batches, progress=False, **options), batches[0]  # type: ignore[arg-type]


def first(output: object) -> Tensor:
    found = output[0] if isinstance(output, tuple) else output
    assert isinstance(found, Tensor)
    return found


@models
@BAD
def test_only_its_sample_is_nan(
    make: Callable[[], nn.Module], shape: tuple[int, ...], bad: float, backend: str
) -> None:
    q, x = converted(make(), *shape, backend=backend)
    with torch.inference_mode():
        clean = first(q(x))
        x[2].view(-1)[3] = bad
        found = first(q(x))
    assert found[2].isnan().all()
    others = [0, 1, 3]
    assert torch.equal(found[others], clean[others])
    assert clean.isfinite().all()


@BAD
def test_nan_that_a_float_step_makes(bad: float, backend: str) -> None:
    q, x = converted(Float(), 4, 6, backend=backend)
    with torch.inference_mode():
        clean = q(x)
        x[1] = -1.0  # the root of a negative number
        found = q(x)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize(
    ("make", "shape"), [MODELS["convolutions"], MODELS["transformer"]], ids=["conv", "transformer"]
)
@pytest.mark.parametrize("how", ["compile", "trace"])
def test_in_a_graph(make: Callable[[], nn.Module], shape: tuple[int, ...], how: str) -> None:
    q, x = converted(make(), *shape)
    with torch.inference_mode():
        clean = q(x)
        graph = torch.compile(q, backend="eager") if how == "compile" else torch.jit.trace(q, (x,))  # type: ignore[no-untyped-call]
        assert torch.equal(graph(x), clean)
        x[2].view(-1)[3] = float("nan")
        found = graph(x)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU], ids=["LSTM", "GRU"])
def test_samples_beside_each_other_in_a_sequence(kind: type[nn.RNNBase], backend: str) -> None:
    q, x = converted(Sequence(kind, False), 5, 4, 8, backend=backend)
    with torch.inference_mode():
        clean = q(x)
        x[2, 1, 3] = float("nan")
        found = q(x)
    assert found[2:, 1].isnan().all()
    assert torch.equal(found[:, [0, 2, 3]], clean[:, [0, 2, 3]])


def test_images_read_as_sequences() -> None:
    q, x = converted(Columns(), 2, 3, 8, 9)
    with torch.inference_mode():
        clean = q(x)
        x[1, 1, 3, 3] = float("nan")
        found = q(x)
    assert found[:, 1].isnan().all()
    assert torch.equal(found[:, 0], clean[:, 0])


def test_a_state_that_is_lost(backend: str) -> None:
    model = nn.GRU(8, 16, batch_first=True).eval()
    batches = [(torch.rand(4, 5, 8), torch.zeros(1, 4, 16)) for _ in range(3)]
    q = quant.quantize_static(
        model, batches, progress=False, backend=backend, forward=lambda model, batch: model(*batch)
    )
    x, h = batches[0]
    with torch.inference_mode():
        clean = q(x, h)[0]
        h[0, 1, 0] = float("nan")
        found = q(x, h)[0]
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2, 3]], clean[[0, 2, 3]])


def lost(*shape: int, at: tuple[int, ...]) -> dict[int, object]:
    x, registers = torch.zeros(shape), dict[int, object]()
    x[at] = torch.nan
    nonfinite.note(x, registers)
    return registers


def test_an_output_without_samples_is_lost_as_a_whole() -> None:
    registers = lost(4, 3, at=(1, 0))
    found = nonfinite.spoiled(
        {"rows": torch.zeros(4, 2), "mean": torch.zeros(()), "names": torch.zeros(3).int()}, registers
    )
    assert found["rows"].isnan().any(1).tolist() == [False, True, False, False]
    assert found["mean"].isnan()
    assert not found["names"].any()


def test_windows_of_a_sample_are_that_sample() -> None:
    registers = lost(2, 3, 8, at=(1, 0, 0))
    x = torch.zeros(8, 3)  # four windows of each
    x[6] = torch.inf
    nonfinite.note(x, registers)
    assert nonfinite.spoiled(torch.zeros(2, 5), registers).isnan().any(1).tolist() == [False, True]


def test_finite_values_cost_nothing() -> None:
    registers: dict[int, object] = {}
    nonfinite.note(torch.full((3, 2), 3.4e38), registers)
    assert registers == {}


class Masked(nn.Module):
    """Puts infinities where a mask says so, by a call or by a buffer, and reads them in some way."""

    def __init__(self, read: Callable[[Tensor], Tensor], by_buffer: bool) -> None:
        super().__init__()
        self.first, self.last, self.read, self.by_buffer = nn.Linear(16, 16), nn.Linear(16, 16), read, by_buffer
        self.register_buffer("hidden", torch.full((16,), -torch.inf).where(torch.arange(16) > 12, torch.zeros(16)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        y = y + self.hidden if self.by_buffer else y.masked_fill(x < -0.9, -torch.inf)
        return self.last(self.read(y))


def masked_batches() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(16, 16) * 2 - 1 for _ in range(4)]


BY = pytest.mark.parametrize("by_buffer", [False, True], ids=["filled", "added"])


@BY
def test_a_layer_that_reads_infinities_of_a_mask_stays_float(by_buffer: bool) -> None:
    torch.manual_seed(0)
    model = Masked(lambda y: y[:, None].flatten(1), by_buffer).eval()
    q = quant.quantize_static(model, masked_batches(), progress=False)
    assert {entry.name: entry.outcome for entry in quant.summary(q)}["last"] == "float"
    trained = quant.prepare_qat(model, masked_batches()[0]).train()
    for x in masked_batches():
        assert bool(model(x).isinf().any())
        for found in (q(x), trained(x)):
            assert torch.equal(torch.isfinite(found), torch.isfinite(model(x)))
            assert torch.equal(found.isposinf(), model(x).isposinf())


@BY
def test_a_layer_that_reads_what_a_softmax_makes_of_a_mask_is_int8(by_buffer: bool) -> None:
    torch.manual_seed(0)
    q = quant.quantize_static(Masked(lambda y: y.softmax(-1), by_buffer).eval(), masked_batches(), progress=False)
    assert {entry.name: entry.outcome for entry in quant.summary(q)}["last"] == "int8"


def spoiled_batch() -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(8, 16)
    x[3, 2], x[5, 1] = torch.inf, torch.nan
    return x


@torch.no_grad()
def test_convert_says_what_calibration_by_hand_left_out_and_says_it_once() -> None:
    torch.manual_seed(0)
    prepared = quant.prepare(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(8, 16))
    prepared(spoiled_batch())
    with pytest.warns(CalibrationWarning, match=r"layer 'input_0' and 1 more: 1 NaN and 1 infinite values came"):
        quant.convert(prepared)
    quant.convert(prepared)


@pytest.mark.parametrize("form", ["simulated", "trained", "int8"])
def test_samples_that_are_not_finite_are_nan_and_others_keep_their_bits(form: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x, bad = torch.randn(8, 16), spoiled_batch()
    rows = torch.tensor([3, 5])
    clean = bad.index_fill(0, rows, 0.0)
    prepared = quant.prepare_qat(model, x).train() if form == "trained" else quant.prepare(model, x)
    prepared(x)
    prepared.eval()
    with torch.no_grad(), simulating(prepared) if form == "simulated" else contextlib.nullcontext():
        run = quant.convert(prepared) if form == "int8" else prepared
        found, expected = run(bad), run(clean)
    assert bool(found[rows].isnan().all())
    others = torch.tensor([0, 1, 2, 4, 6, 7])
    assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("pooled", [False, True], ids=["mean", "pool"])
def test_integers_over_no_values_have_no_mean(pooled: bool, backend: str) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.one(x))
            mean = nn.functional.adaptive_avg_pool1d(y.transpose(1, 2), 1).squeeze(-1) if pooled else y[:, 2:].mean(1)
            out: Tensor = self.two(mean)
            return out

    q, _ = converted(Mean(), 3, 5, 6, backend=backend)
    with pytest.raises(ValueError, match=r"^layer .*: its (mean is over 0 values|input is empty)$"):
        q(torch.zeros(3, 0, 6))
    assert q(torch.zeros(0, 5, 6)).shape == (0, 4)
