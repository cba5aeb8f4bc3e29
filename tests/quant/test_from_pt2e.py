"""Programs of PT2E taken over: the same integers and ranges, and the program's own outputs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.runtime.layers.weighted import StaticLayer

with warnings.catch_warnings():  # of torchao about torch, at its import
    warnings.simplefilter("ignore")
    pytest.importorskip("torchao", reason="torchao is not installed")
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torchao
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("seeded_on_one_thread"),
]


class Residual(nn.Module):
    """Norms that are folded, sums, a concatenation, moves, functions that PT2E writes as several, and float layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.deep, self.relu6 = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.ReLU6()
        self.wide, self.last_relu = nn.Conv2d(8, 8, 1), nn.ReLU()
        self.pool, self.layer_norm, self.drop = nn.MaxPool2d(2), nn.LayerNorm(8), nn.Dropout(0.3)
        self.first, self.second, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        x = self.last_relu(x + self.wide(self.relu6(self.deep(x))))
        x = torch.cat([self.pool(x), F.avg_pool2d(x, 2)], 1)[:, 4:12]
        x = F.normalize(self.first(self.layer_norm(x.mean((2, 3)))), dim=1)
        return self.head(self.drop(torch.sigmoid(self.second(x)))).softmax(-1)  # type: ignore[no-any-return]


def with_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, -1.0, 1.5)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


def images() -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def by_pt2e(model: nn.Module, *batches: Any, fold: bool = True, signed: bool = False, **settings: bool) -> nn.Module:
    """By torchao's quantizer for x86, or the one for XNNPACK, whose activations are int8."""
    exported = torch.export.export(copy.deepcopy(model), batches[:1]).module()
    if signed:
        quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    else:
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config(**settings))
    prepared = prepare_pt2e(exported, quantizer)
    for batch in batches:
        prepared(batch)
    converted: nn.Module = convert_pt2e(prepared, fold_quantize=fold)
    return converted


def error(got: Tensor, expected: Tensor) -> float:
    return float(((got - expected).norm() / expected.norm()).detach())


def weights_of(program: Any) -> list[tuple[Tensor, Tensor]]:
    """The integers and scales of a program whose weights were folded."""
    names = [name.removeprefix("_frozen_param") for name, _ in program.named_buffers() if "frozen" in name]
    return [(getattr(program, f"_frozen_param{one}"), getattr(program, f"_scale_{one}")) for one in names]


@pytest.mark.parametrize("reduce_range", [True, False])
def test_a_static_program(reduce_range: bool) -> None:
    model, x = with_statistics(Residual()), images()
    program = by_pt2e(model, x, reduce_range=reduce_range)
    q = quant.from_torch_ao(program, model, x)
    layers = [one for one in (q.stem, q.deep, q.wide, q.first, q.second, q.head) if isinstance(one, StaticLayer)]
    assert len(layers) == len(weights_of(program)) == 6
    for layer, (integers, scale) in zip(layers, weights_of(program), strict=True):
        assert torch.equal(layer.q_weight, integers)
        assert torch.allclose(layer.weight_scale, scale, rtol=1e-6)
    ranges = [node.args[1:3] for node in program.graph.nodes if "quantize_per_tensor.default" in str(node.target)]
    for layer in layers:
        assert (pytest.approx(float(layer.input_scale[0])), int(layer.input_zero_point[0])) in ranges
    with torch.no_grad():
        assert error(q(x), program(x)) < 1e-3
        assert error(q(x), model(x)) < 1.1 * error(program(x), model(x)) + 0.001
    said = [entry.detail for entry in quant.summary(q) if entry.name.startswith("(torch.ao")]
    assert any("reduce_range" in one for one in said) == reduce_range


def test_activations_of_int8_become_uint8() -> None:
    """XNNPACK's, whose sums and outputs are rounded too; here the model's outputs are not."""
    model, x = with_statistics(Residual()), images()
    program = by_pt2e(model, x, signed=True)
    q = quant.from_torch_ao(program, model, x)
    [first, *_] = [node for node in program.graph.nodes if "quantize_per_tensor.default" in str(node.target)]
    assert float(q.stem.input_scale[0]) == pytest.approx(first.args[1])
    assert int(q.stem.input_zero_point[0]) == first.args[2] + 128
    with torch.no_grad():
        assert error(q(x), model(x)) < 1.1 * error(program(x), model(x)) + 0.001


def test_what_the_export_wrote_as_several_has_its_own_range() -> None:
    """F.normalize is a norm, a clamp and a quotient there; its result has not the range of its input."""
    model, x = with_statistics(Residual()), images()
    q = quant.from_torch_ao(by_pt2e(model, x), model, x)
    with torch.no_grad():
        largest = float(F.normalize(torch.randn(64, 16), dim=1).abs().max())
    assert float(q.second.input_scale[0]) < 2 * largest / 255
    assert float(q.second.input_scale[0]) != float(q.first.input_scale[0])


def test_a_program_whose_weights_are_rounded_at_each_call() -> None:
    model, x = with_statistics(Residual()), images()
    one, other = (quant.from_torch_ao(by_pt2e(model, x, fold=fold), model, x) for fold in (True, False))
    assert torch.equal(one(x), other(x))


def test_a_program_leaves_its_models_as_they_are_and_the_floats_weights_do_not_matter() -> None:
    model, x = with_statistics(Residual()), images()
    program, before = by_pt2e(model, x), model(x)
    q, other = quant.from_torch_ao(program, model, x), quant.from_torch_ao(program, Residual().eval(), x)
    assert torch.equal(model(x), before)
    assert torch.equal(q(x), other(x))


def test_it_is_kept_in_a_file(tmp_path: Any) -> None:
    model, x = with_statistics(Residual()), images()
    q = quant.from_torch_ao(by_pt2e(model, x), model, x)
    quant.save(q, tmp_path / "q.safetensors")
    assert torch.equal(quant.load(tmp_path / "q.safetensors", model=model)(x), q(x))


def test_a_dynamic_program() -> None:
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval(), torch.randn(5, 16)
    program = by_pt2e(model, x, is_dynamic=True)
    q = quant.from_torch_ao(program, model)
    for layer, (integers, scale) in zip((q[0], q[2]), weights_of(program), strict=True):
        assert torch.equal(layer.q_weight, integers)
        assert torch.allclose(layer.scale, scale)
    with torch.no_grad():
        assert error(q(x), model(x)) < 1.1 * error(program(x), model(x)) + 0.001


def test_a_dynamic_convolution_stays_float_and_is_said() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(x).mean((2, 3)))  # type: ignore[no-any-return]

    model, x = Both().eval(), images()
    q = quant.from_torch_ao(by_pt2e(model, x, is_dynamic=True), model)
    assert quant.summary(q)["head"].outcome == "int8"
    assert "a dynamic convolution in the program" in quant.summary(q)["conv"].detail


class Functional(nn.Module):
    """A product with a parameter of its own, which is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.relu(self.first(x)), self.weight)


def test_a_weight_that_no_layer_here_has_is_said() -> None:
    model, x = nn.Sequential(Functional(), nn.Linear(16, 4)).eval(), torch.randn(5, 16)
    q = quant.from_torch_ao(by_pt2e(model, x, signed=True), model, x)
    said = [entry.detail for entry in quant.summary(q) if entry.name.startswith("(torch.ao")]
    assert any(one == "0: the int8 weight of its linear is the float model's here" for one in said)
    assert {quant.summary(q)[name].outcome for name in ("0.first", "1")} == {"int8"}
    with torch.no_grad():
        assert error(q(x), model(x)) < 0.02


def of_pt2e() -> tuple[nn.Module, nn.Module, Tensor]:
    model, x = nn.Sequential(nn.Linear(16, 4)).eval(), torch.randn(5, 16)
    return by_pt2e(model, x), model, x


def without_modules() -> tuple[Any, ...]:
    program, model, x = of_pt2e()
    for node in program.graph.nodes:
        node.meta.pop("nn_module_stack", None)
    return program, model, x


REFUSED: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "no example": (lambda: of_pt2e()[:2], "is a static model: give example_inputs, a call of it"),
    "another call": (lambda: (*of_pt2e()[:2], (images(), images())), "has 2 tensors, expected 1, as the program takes"),
    "no modules": (without_modules, r"node 'linear' \(aten.linear.default\) has no 'nn_module_stack'"),
    "its state": (lambda: (of_pt2e()[0].state_dict(), *of_pt2e()[1:]), "has no layer that torch.ao quantised"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    given, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        quant.from_torch_ao(*given())


@pytest.mark.parametrize(
    ("there", "here", "what"),
    [
        ({"stride": 2}, {}, r"stride \[2, 2\], and the float model's has \(1, 1\)"),
        ({"padding": 1}, {}, r"padding \[1, 1\], and"),
        ({}, {"padding": "same"}, "padding"),
        ({"dilation": 2}, {}, "dilation"),
    ],
    ids=["stride", "padding", "same", "dilation"],
)
def test_a_float_model_of_other_places_is_refused(there: dict[str, Any], here: dict[str, Any], what: str) -> None:
    def made(settings: dict[str, Any]) -> nn.Module:
        conv = nn.Conv2d(3, 6, 3, **settings)
        return nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)).eval()

    program = by_pt2e(made(there), images())
    with pytest.raises(ValueError, match=f"the program's convolution '0' has {what}"):
        quant.from_torch_ao(program, made(here), images())


@pytest.mark.parametrize(
    "conv",
    [
        lambda: nn.Conv2d(3, 6, (3, 1), padding=(1, 0), dilation=2),
        lambda: nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"),
        lambda: nn.ConvTranspose2d(3, 6, 3, stride=2, padding=1, output_padding=1),
    ],
    ids=["pairs", "reflect", "transposed"],
)
def test_places_are_known_in_every_form(conv: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(conv(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)).eval()
    program = by_pt2e(model, images())
    q = quant.from_torch_ao(program, model, images())
    with torch.no_grad():
        assert error(q(images()), program(images())) < 0.02
