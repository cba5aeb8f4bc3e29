"""Where reals become integers and the other way round: NaN and inf are met, and planes become pixels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quant.kernels import ops, reference, reference_plan
from quant.kernels.backend import Backend
from torch import Tensor

HEAD = f"{reference_plan.HEADER}\ninputs %0\n"
NORM = "%1 = layer_norm x=%0 weight=- bias=- eps=1e-05\n%2 = quantize x=%1 scale=0.02 zero_point=128\n"
NORM_READ = "%3 = linear_u8s8_u8 q_x=%2 zero_point=128 q_weight=$0 q_bias=- multiplier=$1 "
CLAMPED = "output_zero_point=120 quant_min=30 quant_max=240\n"
TEXTS = {
    "quantize": f"{HEAD}%2 = quantize x=%0 scale=0.02 zero_point=128\noutputs %2",
    "layer norm": f"{HEAD}{NORM}{NORM_READ}{CLAMPED}outputs %3",
}
SHAPES = [(2, 1, 9, 9), (2, 3, 9, 9), (1, 5, 70, 70), (2, 16, 16, 16), (2, 67, 17, 19), (1, 200, 300), (2, 33, 3, 4, 5),
          (3, 40, 1, 1), (0, 20, 4, 4), (2, 20, 0, 4)]  # fmt: skip
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def bytes_of(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def run(inputs: list[Tensor], program: str, backend: Backend, constants: tuple[Tensor, ...] = ()) -> list[Tensor]:
    made: list[Tensor] = torch.ops.octet.run_plan(inputs, list(constants), program, backend.name)
    expected = reference_plan.run_plan(inputs, constants, program)
    for one, other in zip(made, expected, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    return made


@shapes
def test_reals_of_what_lies_channels_last(compiled: Backend, shape: tuple[int, ...]) -> None:
    program = f"{HEAD}%2 = dequantize q=%0 scale=0.02 zero_point=9\noutputs %2"
    (made,) = run([channels_last(bytes_of(*shape))], program, compiled)
    assert made.is_contiguous()


@shapes
def test_integers_of_what_lies_in_planes(compiled: Backend, shape: tuple[int, ...]) -> None:
    run([random(*shape)], TEXTS["quantize"], compiled)
    run([channels_last(random(*shape))], TEXTS["quantize"], compiled)


@shapes
@pytest.mark.parametrize("dtype", ["float", "uint8"])
def test_copies_between_both(compiled: Backend, shape: tuple[int, ...], dtype: str) -> None:
    """The transposition is a view; what is given out has its elements in order."""
    x = random(*shape) if dtype == "float" else bytes_of(*shape)
    program = f"{HEAD}%1 = transpose x=%0 dim0=1 dim1=-1\n%2 = reshape x=%1 shape=%1.0,-1\noutputs %2"
    if 0 not in shape:
        run([x], program, compiled)
        run([channels_last(x)], program, compiled)


@shapes
def test_single_steps(extension: None, shape: tuple[int, ...]) -> None:
    q = bytes_of(*shape)
    for given in (q, channels_last(q), q.transpose(0, -1)):
        made = torch.ops.octet.dequantize(given, 0.02, 9)
        assert made.is_contiguous()
        assert torch.equal(made, reference.dequantize(given, 0.02, 9))
        assert reference.dequantize(given, 0.02, 9).is_contiguous()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 40), (3, 8), (1, 3, 20, 20), (2, 67, 9, 11), (1, 1, 5000)], ids=str)
@pytest.mark.parametrize("program", TEXTS.values(), ids=list(TEXTS))
def test_every_place_is_looked_at(compiled: Backend, shape: tuple[int, ...], program: str, bad: float) -> None:
    constants = [torch.ones(2, shape[-1], dtype=torch.int8), torch.ones(2)]
    operator = torch.ops.octet.run_plan_of_finite
    for last in (False, True) if len(shape) > 2 else (False,):
        x = channels_last(random(*shape)) if last else random(*shape)
        x[(0,) * len(shape)] = 3e38 if program is TEXTS["quantize"] else 3.0
        expected = reference_plan.run_plan([x], constants, program)
        for made in (
            operator([x], constants, program, compiled.name),
            reference_plan.run_plan_of_finite([x], constants, program),
        ):
            assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))
        for place in range(0, x.numel(), max(1, x.numel() // 37)):
            spoiled = x.clone()
            spoiled[tuple(int(i) for i in torch.unravel_index(torch.tensor(place), shape))] = bad
            assert operator([spoiled], constants, program, compiled.name) == []
            assert reference_plan.run_plan_of_finite([spoiled], constants, program) == []


@pytest.mark.parametrize("length", [*range(1, 40), 4099])
def test_all_finite(extension: None, length: int) -> None:
    x = torch.full((length,), 3.4e38)
    assert torch.ops.octet_native.all_finite(x)
    for place in {0, length // 2, length - 1}:
        for bad in (float("nan"), float("inf"), -float("inf")):
            spoiled = x.clone()
            spoiled[place] = bad
            assert not torch.ops.octet_native.all_finite(spoiled)


def test_without_the_extension_the_reference_serves_it() -> None:
    call: Any = ops._without_backend("run_plan_of_finite")
    assert call([torch.tensor([1.0, float("nan")])], [], TEXTS["quantize"], "") == []
    assert len(call([torch.tensor([1.0, 2.0])], [], TEXTS["quantize"], "")) == 1
