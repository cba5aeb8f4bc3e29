"""Calls between int8 layers that an ONNX file computes by several nodes, beside the model in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.nn import TiedEmbedding
from quant.onnx import ExportReport
from quant.onnx.export import file_of

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")


def exported(q: nn.Module, folder: Path, inputs: Any, **options: Any) -> ExportReport:
    pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    return quant.export_onnx(q, folder / "model.onnx", target="avx2", verify=inputs, **options)


def largest(report: ExportReport) -> float:
    """The largest error of an output."""
    assert report.verification is not None
    return max(report.verification.outputs.values())


class Between(nn.Module):
    """A function of one layer's reals, before another layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], inputs: int = 16) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(12, 16), nn.Linear(inputs, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))  # type: ignore[no-any-return]


def spread(y: Tensor) -> Tensor:
    """The two largest of each row in their places, as a mixture of experts chooses."""
    values, places = y.topk(2, dim=-1)
    return torch.zeros_like(y) + (torch.arange(16) == places[:, :1]) * values[:, 1:]


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "topk": (lambda y: y.topk(5, dim=-1).values, 5),
    "least, of the first dimension": (lambda y: y.topk(3, 0, largest=False)[0], 16),
    "places of topk": (spread, 16),
    "sort": (lambda y: torch.sort(y, descending=True)[0], 16),
    "argsort": (lambda y: y.gather(1, y.argsort(1)), 16),
    "max of a dimension": (lambda y: y - y.max(1, keepdim=True)[0] - y.min(1, keepdim=True).values, 16),
    "max of two": (lambda y: torch.max(y, -y), 16),
    "max of all": (lambda y: y / y.max(), 16),
    "quotient rounded down": (lambda y: torch.div(y, 0.25, rounding_mode="floor") + y, 16),
    "argmin": (lambda y: y.gather(1, y.argmin(1, keepdim=True)) + y, 16),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_values_in_order(case: str, tmp_path: Path) -> None:
    function, inputs = FUNCTIONS[case]
    q = quant.quantize_static(Between(function, inputs).eval(), [torch.randn(8, 12) for _ in range(3)], progress=False)
    assert largest(exported(q, tmp_path, torch.randn(6, 12))) < 1e-5


def attended(y: Tensor, **settings: Any) -> Tensor:
    heads = y.view(-1, 1, 4, 4)
    return F.scaled_dot_product_attention(heads, heads.flip(2), heads, **settings).flatten(1)


REALS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed twice": lambda y: torch.sin(y).T.mT.T.t() * y.ndim,
    "number of values": lambda y: torch.sin(y) / y.numel(),
    "unequal": lambda y: y * (torch.sin(y) != 0),
    "either": lambda y: y * ((y > 0.5) | (y < -0.5)),
    "both": lambda y: y * torch.logical_and(y > -0.5, y < 0.5),
    "neither": lambda y: y * torch.logical_not(y > 0.5),
    "chosen": lambda y: torch.where(torch.sin(y) > 0, y, -y),
    "numbers before": lambda y: 1 - torch.sin(y) + 2 / (y.abs() + 1),
    "powers": lambda y: torch.sin(y) ** 2,
    "the larger and the smaller": lambda y: torch.maximum(torch.sin(y), y) + torch.minimum(y, -y),
    "product": lambda y: (torch.sin(y)[:, :4, None] @ torch.sin(y)[:, None, :4]).flatten(1),
    "einsum": lambda y: torch.einsum("ni,nj->nij", torch.sin(y)[:, :4], y[:, 4:8].abs()).flatten(1),
    "linear": lambda y: F.linear(torch.sin(y), torch.eye(16).flip(0)),
    "layer norm": lambda y: F.layer_norm(torch.sin(y), (16,)),
    "root mean square": lambda y: F.rms_norm(torch.sin(y), (16,)),
    "group norm": lambda y: F.group_norm(torch.sin(y).view(-1, 4, 4), 2).flatten(1),
    "attention": attended,
    "causal attention": lambda y: attended(y, is_causal=True),
    "scaled attention": lambda y: attended(y, scale=0.3),
    "attention with a mask": lambda y: attended(y, attn_mask=torch.linspace(-2, 2, 16).view(4, 4) > -1.5),
    "attention with numbers added": lambda y: attended(y, attn_mask=torch.linspace(-2, 2, 16).view(4, 4)),
    "normalized": lambda y: F.normalize(torch.sin(y)),
    "padded": lambda y: F.pad(torch.sin(y), (2, 1), value=0.5)[:, 1:17],
    "reshaped as another": lambda y: torch.sin(y).flatten().reshape_as(y),
    "moved": lambda y: torch.sin(y).view(-1, 4, 4).movedim(1, 2).flatten(1),
    "dimensions of one": lambda y: torch.sin(y).unsqueeze(1).unsqueeze(-1).squeeze(1).squeeze(-1),
    "expanded as another": lambda y: torch.sin(y)[:, :1].expand_as(y) + y,
    "repeated": lambda y: torch.sin(y)[:, :8].repeat(1, 2),
    "rolled": lambda y: torch.sin(y).view(-1, 4, 4).roll((1, -1), (1, 2)).flatten(1),
    "narrowed": lambda y: torch.sin(y).narrow(1, 3, 8).repeat(1, 2),
    "selected": lambda y: torch.sin(y).index_select(1, torch.arange(15, -1, -1)),
    "chunks": lambda y: torch.cat(torch.sin(y).chunk(3, 1)[::-1], 1),
    "splits": lambda y: torch.cat(torch.sin(y).split([5, 11], 1)[::-1], 1),
    "taken apart": lambda y: torch.stack(torch.sin(y).view(-1, 4, 4).unbind(1), 2).flatten(1),
    "shuffled": lambda y: F.pixel_shuffle(torch.sin(y).view(-1, 4, 2, 2), 2).flatten(1),
    "indexed": lambda y: torch.sin(y)[:, torch.arange(15, -1, -1)],
    "every second": lambda y: torch.sin(y)[..., ::2].repeat(1, 2),
}
"""Of reals: the sine keeps what follows from being computed in integers."""


@pytest.mark.parametrize("case", REALS)
def test_values_of_reals(case: str, tmp_path: Path) -> None:
    q = quant.quantize_static(Between(REALS[case]).eval(), [torch.randn(8, 12) for _ in range(3)], progress=False)
    assert largest(exported(q, tmp_path, torch.randn(6, 12))) < 0.002


def rows_at_places(y: Tensor) -> Tensor:
    """Messages that are added up where they arrive, as in graph networks."""
    target = torch.arange(16).flip(0) % 5
    sums = torch.zeros_like(y).t().index_add(0, target, y.t()).t()
    return sums + torch.zeros_like(y).scatter_add(1, target.expand_as(y), y)


def on_a_grid(y: Tensor) -> Tensor:
    pictures = y.view(-1, 1, 4, 4)
    line = torch.linspace(-1, 1, 4)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), 2) * 0.9 + 0.05 * pictures.permute(0, 2, 3, 1)
    return torch.nn.functional.grid_sample(pictures, grid, align_corners=True).flatten(1)


def to_the_others_width(y: Tensor) -> Tensor:
    other = y[:, : y.shape[1] - 3]
    return y + torch.nn.functional.pad(other, (0, y.shape[1] - other.shape[1]))


def pairs(y: Tensor) -> Tensor:
    """The products of different features, as in recommendation models."""
    i, j = torch.tril_indices(5, 5, offset=-1)
    return (y[:, :5, None] * y[:, None, :5])[:, i, j]


PLACES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "sums at places": (rows_at_places, 16),
    "grid": (on_a_grid, 16),
    "pairs": (pairs, 10),
    "pads": (to_the_others_width, 16),
    "cosine": (lambda y: y * torch.cosine_similarity(y, y.flip(1), dim=1)[:, None], 16),
    "line of a size": (lambda y: y + torch.linspace(0.0, 2.0, y.shape[0])[:, None], 16),
}


@pytest.mark.parametrize("case", PLACES)
def test_values_at_places(case: str, tmp_path: Path) -> None:
    function, inputs = PLACES[case]
    q = quant.quantize_static(Between(function, inputs).eval(), [torch.randn(8, 12) for _ in range(3)], progress=False)
    assert largest(exported(q, tmp_path, torch.randn(6, 12))) < 0.002


def test_a_line_of_one_value_is_its_start(tmp_path: Path) -> None:
    function, inputs = PLACES["line of a size"]
    q = quant.quantize_static(Between(function, inputs).eval(), [torch.randn(8, 12) for _ in range(3)], progress=False)
    assert largest(exported(q, tmp_path, torch.randn(1, 12))) < 0.002


class Upsampled(nn.Module):
    """A transposed convolution in float, with the older weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 8, 3)
        up = nn.ConvTranspose1d(8, 8, 5, stride=3, padding=1, output_padding=1, groups=2)
        self.up, self.last = nn.utils.parametrizations.weight_norm(up), nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.up(self.first(x)))  # type: ignore[no-any-return]


def test_a_transposed_convolution_of_reals(tmp_path: Path) -> None:
    q = quant.quantize_static(Upsampled().eval(), [torch.randn(2, 3, 11)] * 2, quant.Recipe([("up", None)]),
                              progress=False)  # fmt: skip
    report = exported(q, tmp_path, torch.randn(3, 3, 17))
    assert largest(report) < 0.002
    assert report.verification is not None
    assert report.verification.kernels["ConvTranspose"] == 1


class NormedByItsShape(nn.Module):
    """A layer norm over sizes that its input says, with a bias or without."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.bias = nn.Parameter(torch.randn(8)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.bias is not None:
            return self.last(F.layer_norm(y, y.shape[-1:], None, self.bias))  # type: ignore[no-any-return]
        return self.last(F.layer_norm(y, y.shape[1:]))  # type: ignore[no-any-return]


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_norm_over_sizes_of_a_call(bias: bool, tmp_path: Path) -> None:
    q = quant.quantize_static(NormedByItsShape(bias).eval(), [torch.randn(2, 5, 8)] * 2, progress=False)
    for length in (5, 9):
        assert largest(exported(q, tmp_path, torch.randn(3, length, 8))) < 0.002


class Pooled(nn.Module):
    def __init__(self, size: Any) -> None:
        super().__init__()
        self.first, self.pool, self.last = nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(size), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pool(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [(3, 5), 4, (None, 2)], ids=str)
@pytest.mark.parametrize("which", ["integers", "reals"])
def test_adaptive_pools_of_sizes_that_vary(size: Any, which: str, tmp_path: Path) -> None:
    recipe = quant.Recipe([("first", None)] if which == "reals" else [])  # type: ignore[arg-type]
    data = [torch.randn(2, 3, 14, 17), torch.randn(2, 3, 19, 15)]
    q = quant.quantize_static(Pooled(size).eval(), data, recipe, progress=False)
    for shape in ((2, 3, 14, 17), (3, 3, 23, 31), (1, 3, 7, 8)):
        report = exported(q, tmp_path, torch.randn(shape))
        assert largest(report) < 1e-5, report


def test_adaptive_windows_of_unlike_sizes(tmp_path: Path) -> None:
    """Of a size that is the same in all calls they are constants."""
    model = Between(lambda y: torch.nn.functional.adaptive_avg_pool1d(y[:, None, :7], 3)[:, 0], 3).eval()
    q = quant.quantize_static(model, [torch.randn(8, 12)] * 2, progress=False)
    [windows] = [one for name, one in file_of(q)[0].constants.items() if name.endswith("windows")]
    expected = [[1, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 1, 1], [0, 0, 1], [0, 0, 1]]
    assert windows.tolist() == expected
    assert largest(exported(q, tmp_path, torch.randn(3, 12))) < 1e-5


class Bags(nn.Module):
    def __init__(self, mode: str, padding: int | None, *, last: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(40, 32, mode=mode, padding_idx=padding, include_last_offset=last)
        self.head = nn.Linear(32, 4)

    def forward(self, words: Tensor, second: Tensor | None = None) -> Tensor:
        offsets, weights = (second, None) if words.dim() == 1 else (None, second)
        return self.head(self.bag(words, offsets, weights))  # type: ignore[no-any-return]


BAGS: dict[str, tuple[tuple[Any, ...], Callable[[], dict[str, Tensor]]]] = {
    "sums": (("sum", None), lambda: {"words": torch.randint(0, 40, (3, 7))}),
    "weighted sums": (("sum", None), lambda: {"words": torch.randint(0, 40, (3, 7)), "second": torch.rand(3, 7)}),
    "means without padding": (("mean", 2), lambda: {"words": torch.randint(0, 4, (3, 7))}),
    "largest": (("max", 1), lambda: {"words": torch.cat([torch.randint(0, 9, (3, 7)), torch.ones(1, 7).long()])}),
    "offsets": (("mean", None), lambda: by_offsets(0, 4, 4, 7)),
    "largest by offsets": (("max", 3), lambda: by_offsets(0, 4, 4, 7)),
    "sums by all offsets": (("sum", None, True), lambda: by_offsets(0, 4, 6, 9)),
}


def by_offsets(*offsets: int) -> dict[str, Tensor]:
    return {"words": torch.randint(0, 9, (9,)), "second": torch.tensor(offsets)}


@pytest.mark.parametrize("case", BAGS)
@pytest.mark.parametrize("how", ["static", "dynamic"])
def test_bags_of_embeddings(case: str, how: str, tmp_path: Path) -> None:
    (mode, padding, *last), call = BAGS[case]
    model = Bags(mode, padding, last=bool(last)).eval()
    if how == "static":
        q, example = quant.quantize_static(model, [call(), call()], progress=False), None
    else:
        q, example = quant.quantize_dynamic(model), call()
    assert largest(exported(q, tmp_path, call(), example_inputs=example)) < 1e-5


@pytest.mark.parametrize("per_row", [True, False])
def test_dynamic_layers_with_16_bits(per_row: bool, tmp_path: Path) -> None:
    recipe = quant.Recipe(default=quant.QConfig(activation_bits=16, per_row=per_row))
    q, x = quant.quantize_dynamic(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8)).eval(), recipe), torch.randn(5, 64)
    report = exported(q, tmp_path, x, example_inputs=x)
    assert largest(report) < 1e-6
    assert report.verification is not None
    assert report.verification.kernels["MatMulInteger"] == 4, "two bytes of each value"
    assert "outputs alone are compared" in str(report)


class Decoder(nn.Module):
    """Resizes to the sizes of another input, integers and reals."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.stem, self.side, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.settings = settings

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = F.interpolate(torch.relu(self.stem(x)), size=y.shape[2:], **self.settings)
        done = self.last(z + self.side(y))
        return done, F.interpolate(done, size=(x.shape[2], 9), **self.settings)


@pytest.mark.parametrize("settings", [{}, {"mode": "bilinear"}, {"mode": "bilinear", "align_corners": True}])
def test_resizing_to_sizes_that_differ_between_calls(settings: dict[str, Any], tmp_path: Path) -> None:
    def call(*sizes: int) -> tuple[Tensor, Tensor]:
        return torch.randn(2, 3, *sizes[:2]), torch.randn(2, 3, *sizes[2:])

    q = quant.quantize_static(Decoder(**settings).eval(), [call(14, 16, 20, 18), call(10, 12, 15, 13)], progress=False)
    file_of(q, "openvino")
    for sizes in ((8, 10, 10, 8), (17, 9, 11, 31), (8, 8, 100, 37)):
        assert largest(exported(q, tmp_path, call(*sizes))) < 1e-4


class Resized(nn.Module):
    """The nearest values between two convolutions."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.stem, self.last, self.settings = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), settings

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(F.interpolate(torch.relu(self.stem(x)), **self.settings))
        return result


@pytest.mark.parametrize("factor", [0.29, 0.7, 1.2, 1.7, 2.0, 2.2, 41.0])
def test_resizing_by_factors_that_runtimes_multiply_otherwise(factor: float, tmp_path: Path) -> None:
    data = [torch.randn(1, 3, size, 3) for size in (20, 17)]
    q = quant.quantize_static(Resized(scale_factor=(factor, 1.0)).eval(), data, progress=False)
    for size in (4, 13, 22, 26, 41, 90, 100):
        assert largest(exported(q, tmp_path, torch.randn(1, 3, size, 3))) < 1e-5, size


@pytest.mark.parametrize(("before", "after"), [(100, 29), (90, 62), (41, 53), (10, 7), (49, 31)])
def test_resizing_to_sizes_that_are_known(before: int, after: int, tmp_path: Path) -> None:
    x = torch.randn(1, 3, before, 3)
    q = quant.quantize_static(Resized(size=(after, 3)).eval(), [x, torch.randn(1, 3, before, 3)], progress=False)
    assert largest(exported(q, tmp_path, x)) < 1e-5


def test_a_resize_by_a_factor_computed_anew_is_refused() -> None:
    class Anew(Decoder):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.last(F.interpolate(self.stem(x), scale_factor=0.7, recompute_scale_factor=True))

    calls = [(torch.randn(2, 3, size, size), torch.zeros(1)) for size in (14, 17)]
    q = quant.quantize_static(Anew().eval(), calls, progress=False)
    with pytest.raises(ValueError, match=r"resizes by a factor computed anew, .* differ between calls; give the sizes"):
        file_of(q)


class OfParameters(nn.Module):
    """Reads the dtype and the shape of a parameter, and returns a parameter and a number beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(12, 16), nn.Parameter(torch.randn(5, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, nn.Parameter, int]:
        y = self.layer(x.to(self.table.dtype))
        return y.reshape(-1, self.table.shape[1]) @ self.table.t(), self.table, x.shape[0] + 1


def test_parameters_that_are_read_and_returned(tmp_path: Path) -> None:
    q = quant.quantize_static(OfParameters().eval(), [torch.randn(8, 12) for _ in range(2)], progress=False)
    report = exported(q, tmp_path, torch.randn(3, 12))
    assert largest(report) < 1e-6
    assert report.verification is not None
    assert len(report.verification.outputs) == 2
    assert "the model also returns what is no tensor: a number at 'output_2'" in str(report)


class Tied(nn.Module):
    """An embedding that is the last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(40, 64), nn.Linear(64, 40, bias=False)
        with torch.no_grad():
            self.words.weight *= torch.logspace(-2, 2, 64)  # columns that 8 bits would lose
        self.out.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.words(words))  # type: ignore[no-any-return]


@pytest.mark.parametrize("bits", [8, 16, "auto"])
def test_an_embedding_tied_to_a_dynamic_layer(bits: Any, tmp_path: Path) -> None:
    recipe, words = quant.Recipe(default=quant.QConfig(activation_bits=bits)), torch.randint(0, 40, (3, 7))
    q = quant.quantize_dynamic(Tied().eval(), recipe)
    table = q.get_submodule("words")
    assert isinstance(table, TiedEmbedding)
    assert (table.columns is None) == (bits == 8)
    assert largest(exported(q, tmp_path, words, example_inputs=words)) < 1e-5


def test_a_tied_embedding_with_groups_is_refused_by_name(tmp_path: Path) -> None:
    recipe = quant.Recipe(default=quant.QConfig(weight_bits=4, group_size=32))
    q = quant.quantize_dynamic(Tied().eval(), recipe)
    with pytest.raises(ValueError, match=r"layer '\w+' .*expected a scale per output; quantise it without group_size"):
        file_of(q, example_inputs=torch.randint(0, 40, (3, 7)))


class Sums(nn.Module):
    """Sums of integers: of two layers, of one with the sum before, one that subtracts, and one clamped at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for place, layer in enumerate(self.layers[1:4]):
            y = layer(x)
            x = x - y if place == 1 else torch.relu(x + y) if place else x + y
        return self.layers[4](x)  # type: ignore[no-any-return]


def test_sums_have_the_models_bits(tmp_path: Path) -> None:
    """Those of ONNX Runtime's QLinearAdd, which "fast" is, are other integers for some pairs of some ranges."""
    differing = {"exact": 0, "fast": 0}
    for _ in range(4):
        q = quant.quantize_static(Sums().eval(), [torch.rand(4, 8, 32, 32) - 0.4], progress=False)
        for form in differing:
            report = exported(q, tmp_path, torch.rand(4, 8, 128, 128) - 0.4, sums=form)
            assert report.verification is not None
            assert report.verification.kernels.get("QLinearAdd", 0) == (2 if form == "fast" else 0)
            differing[form] += sum(one.differing > 0 for one in report.verification.steps)
            loaded, x = quant.load_onnx(tmp_path / "model.onnx"), torch.rand(2, 8, 32, 32)
            assert not loaded.in_torch
            with torch.no_grad():
                assert torch.equal(loaded(x), q(x))
    assert differing["exact"] == 0
    assert differing["fast"] > 0, "or the test shows nothing"


def test_reals_that_are_rounded_by_the_inverse_of_a_scale(tmp_path: Path) -> None:
    """x / s and x (1 / s) lie on both sides of a half for some floats; the model multiplies, and so does the file."""
    q = quant.quantize_static(nn.Sequential(nn.Linear(64, 8)).eval(), [torch.randn(64, 64) * 3], progress=False)
    file = file_of(q, target="avx2")[0]
    read = next(node for node in file.nodes if node.op == "DequantizeLinear" and node.inputs[0] not in file.constants)
    scale = file.constants[read.inputs[1]]
    halves = (torch.arange(-100, 100) + 0.5) * scale
    near = torch.cat([halves, torch.nextafter(halves, torch.tensor(9.0)), torch.nextafter(halves, torch.tensor(-9.0))])
    assert bool((torch.round(near / scale) != torch.round(near * (1.0 / scale))).any()), "or the test shows nothing"
    x = near[: len(near) // 64 * 64].reshape(-1, 64)
    report = exported(q, tmp_path, x)
    assert report.verification is not None
    assert report.verification.same_bits


class Masked(nn.Module):
    """-inf and NaN beside numbers whose last bits are the runtime's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.second(torch.relu(self.first(x)))
        return {
            "scores": y.softmax(1).masked_fill(y < 0, -torch.inf),
            "all": y.softmax(1).masked_fill(y > 0, torch.nan),
        }


def test_outputs_of_inf_and_nan_are_compared_by_their_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = [torch.randn(16, 12) for _ in range(3)]
    q = quant.quantize_static(Masked().eval(), rows, progress=False)
    with torch.no_grad():
        given = q(rows[0])
    assert given["scores"].isneginf().any()
    assert given["all"].isnan().any()
    report = exported(q, tmp_path, rows[0])
    assert report.verification is not None
    assert set(report.verification.outputs) == {"scores", "all"}
    assert all(one < 1e-5 for one in report.verification.outputs.values())
