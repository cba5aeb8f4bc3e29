"""What every observer promises, whatever its idea: tests/observers/test_<name>.py tests the ideas."""

from __future__ import annotations

import copy
import math
import os
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant.kernels import ACTIVATION_U8, QScheme, weight_scheme
from quant.observers import OBSERVERS, FixedObserver, NoDataSeen, Observer
from torch import Tensor, nn

from quant import observers

EXAMPLES = 20 if os.environ.get("OCTET_FAST_TESTS") == "1" else 100
PER_TENSOR = {"affine": ACTIVATION_U8, "symmetric": weight_scheme(8, None), "4bit": weight_scheme(4, None)}
DATA_DRIVEN = [name for name in OBSERVERS if name != "fixed"]
MERGE_EXACT = ["minmax", "histogram", "percentile", "entropy", "mse", "fixed"]

every_observer = pytest.mark.parametrize("name", list(OBSERVERS))
every_data_driven = pytest.mark.parametrize("name", DATA_DRIVEN)
every_scheme = pytest.mark.parametrize("scheme", list(PER_TENSOR.values()), ids=list(PER_TENSOR))


def make_observer(name: str, scheme: QScheme = ACTIVATION_U8, **options: Any) -> Observer:
    """As `observers.make_observer`, with the ends that "fixed" has no default for."""
    ends = {"low": 0.0, "high": 1.0} if name == "fixed" else {}
    return observers.make_observer(name, scheme, **ends, **options)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_state(a: nn.Module, b: nn.Module) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for key in first:
        assert first[key].dtype == second[key].dtype, key
        assert torch.equal(first[key], second[key]), key


@every_observer
def test_returns_the_very_same_tensor(name: str) -> None:
    x = normal(3, 4)
    observer = make_observer(name)
    assert observer(x) is x
    assert observer(x[:0]).shape == (0, 4)


@every_observer
def test_builds_no_graph_and_leaves_autograd_alone(name: str) -> None:
    observer = make_observer(name)
    x = normal(3, 4).requires_grad_()
    observer(x * 2).square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 8 * x.detach())
    assert not any(buffer.requires_grad for buffer in observer.buffers())
    assert not list(observer.parameters())


@every_observer
def test_leaves_the_values_alone(name: str) -> None:
    x = normal(1000)
    before = x.clone()
    make_observer(name)(x)
    assert torch.equal(x, before)


@every_data_driven
@pytest.mark.parametrize("axis", [None, 1])
def test_nothing_seen_is_an_error_that_names_the_layer(name: str, axis: int | None) -> None:
    observer = make_observer(name, replace(ACTIVATION_U8, axis=axis))
    observer.name = "encoder.3.fc"
    observer(torch.empty(0, 3))
    with pytest.raises(NoDataSeen, match=r"'encoder\.3\.fc'"):
        observer.qparams()
    assert issubclass(NoDataSeen, ValueError)


@every_data_driven
def test_extremes_that_are_no_numbers_are_no_data(name: str) -> None:
    """As an altered file may have them."""
    observer = make_observer(name)
    observer(torch.linspace(-1, 1, 50))
    observer.low.fill_(torch.nan)
    with pytest.raises(NoDataSeen):
        observer.range()


@every_data_driven
def test_only_nan_and_inf_is_nothing_seen(name: str) -> None:
    observer = make_observer(name)
    observer(torch.tensor([math.nan, math.inf, -math.inf]))
    with pytest.raises(NoDataSeen, match="1 NaN and 2 infinite"):
        observer.range()


@every_data_driven
def test_a_channel_without_data_is_named(name: str) -> None:
    observer = make_observer(name, replace(ACTIVATION_U8, axis=0))
    observer(torch.tensor([[1.0, 2.0], [math.nan, math.nan]]))
    with pytest.raises(NoDataSeen, match=r"channels \[1\]"):
        observer.range()


@every_observer
@pytest.mark.parametrize("axis", [None, 0])
def test_nan_and_inf_are_counted_and_left_out(name: str, axis: int | None) -> None:
    clean, dirty = (make_observer(name, replace(ACTIVATION_U8, axis=axis)) for _ in range(2))
    values = normal(2, 500)
    clean(values)
    bad = torch.tensor([math.nan, math.inf, -math.inf, math.nan, math.nan]).repeat(2, 1)
    dirty(torch.cat((values, bad), dim=1))
    assert int(dirty.nan_count) == 6
    assert int(dirty.inf_count) == 4
    assert int(clean.nan_count) == int(clean.inf_count) == 0
    assert dirty.qparams() == clean.qparams()
    dirty.nan_count.zero_()
    dirty.inf_count.zero_()
    same_state(dirty, clean)


@every_observer
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_what_is_not_real_is_refused(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="floating"):
        make_observer(name)(torch.ones(3, dtype=dtype))


@every_observer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_float_dtypes_are_the_same_values(name: str, dtype: torch.dtype) -> None:
    x = normal(2, 300).to(torch.bfloat16).clamp(-4, 4)  # representable in all of them but for subnormals of float16
    x = x.to(torch.float16).to(torch.float32)
    one, other = make_observer(name), make_observer(name)
    one(x)
    assert other(x.to(dtype)).dtype == dtype
    same_state(one, other)


@every_observer
def test_float64_beyond_float32_counts_as_infinite(name: str) -> None:
    observer = make_observer(name)
    observer(torch.tensor([1e300, -1.0, 1.0], dtype=torch.float64))
    assert int(observer.inf_count) == 1
    assert (float(observer.low), float(observer.high)) == (-1.0, 1.0)


@every_observer
@every_scheme
@pytest.mark.parametrize("value", [3.7, -3.7, 0.0, 1e-30, 3e38, -3e38, 1e-44], ids=str)
def test_a_constant_gives_sane_parameters(name: str, scheme: QScheme, value: float) -> None:
    observer = make_observer(name, scheme)
    observer(torch.full((10,), value))
    qparams = observer.qparams()
    x = torch.tensor([value])
    if name != "fixed":
        error = (qparams.dequantize(qparams.quantize(x)) - x).abs()
        assert bool(error <= qparams.scale / 2 + 1e-6 * abs(value))
    assert float(qparams.dequantize(qparams.quantize(torch.zeros(1)))) == 0.0


@every_data_driven
@every_scheme
def test_all_negative_values_are_covered(name: str, scheme: QScheme) -> None:
    observer = make_observer(name, scheme)
    x = -normal(2000).abs() - 1.0
    observer(x)
    low, high = observer.range()
    assert float(low) <= -1.0
    assert float(high) <= 0.0 or scheme.symmetric
    zero_point = observer.qparams().zero_point
    assert int(zero_point) == (scheme.symmetric_zero_point if scheme.symmetric else scheme.quant_max)


@every_data_driven
def test_the_range_lies_within_what_was_seen(name: str) -> None:
    observer = make_observer(name)
    x = normal(5000) ** 3
    observer(x)
    low, high = observer.range()
    assert float(x.min()) <= float(low) <= float(high) <= float(x.max())
    assert low.shape == high.shape == ()


@every_data_driven
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_per_axis_is_one_observer_for_each_index(name: str, axis: int) -> None:
    scheme = replace(ACTIVATION_U8, axis=axis)
    x = normal(3, 4, 5) * torch.arange(1, 4).view(3, 1, 1)
    together = make_observer(name, scheme)
    together(x)
    together(2 * x)
    low, high = together.range()
    assert low.shape == high.shape == (x.shape[axis],)
    for index in range(x.shape[axis]):
        alone = make_observer(name)
        alone(x.select(axis, index))
        alone(2 * x.select(axis, index))
        assert (low[index], high[index]) == alone.range()


@every_observer
def test_an_axis_that_is_absent_or_changes_size_is_refused(name: str) -> None:
    observer = make_observer(name, replace(ACTIVATION_U8, axis=1))
    with pytest.raises(ValueError, match="axis 1 does not exist"):
        observer(normal(3))
    observer(normal(2, 3))
    with pytest.raises(ValueError, match="size 4, expected 3"):
        observer(normal(2, 4))


@every_observer
@pytest.mark.parametrize("axis", [None, 1])
def test_memory_format_does_not_matter(name: str, axis: int | None) -> None:
    scheme = replace(ACTIVATION_U8, axis=axis)
    x = normal(2, 3, 4, 5)
    layouts = [x.to(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().transpose(2, 3)]
    expected = make_observer(name, scheme)
    expected(x)
    for other in layouts:
        observer = make_observer(name, scheme)
        observer(other)
        same_state(expected, observer)
    observer = make_observer(name, scheme)
    observer(x[:, :, ::2, 1:3])
    expected.reset()
    expected(x[:, :, ::2, 1:3].contiguous())
    same_state(expected, observer)


@every_observer
@pytest.mark.parametrize("axis", [None, 1])
def test_state_dict_loads_into_a_fresh_observer_and_goes_on(name: str, axis: int | None) -> None:
    scheme = replace(ACTIVATION_U8, axis=axis)
    unbroken = make_observer(name, scheme)
    unbroken(normal(4, 3, seed=1))
    resumed = make_observer(name, scheme)
    resumed.load_state_dict(unbroken.state_dict())
    same_state(unbroken, resumed)
    for observer in (unbroken, resumed):
        observer(5 * normal(4, 3, seed=2))
    same_state(unbroken, resumed)
    assert unbroken.qparams() == resumed.qparams()


@every_data_driven
def test_an_unseen_state_loads_back_as_unseen(name: str) -> None:
    scheme = replace(ACTIVATION_U8, axis=0)
    seen = make_observer(name, scheme)
    seen(normal(2, 3))
    seen.load_state_dict(make_observer(name, scheme).state_dict())
    with pytest.raises(NoDataSeen):
        seen.range()


@pytest.mark.parametrize("axis", [None, 1])
def test_a_state_of_other_bins_is_refused(axis: int | None) -> None:
    scheme = replace(ACTIVATION_U8, axis=axis)
    other = make_observer("histogram", scheme, bins=1024)
    other(normal(2, 3))
    with pytest.raises(RuntimeError, match="size mismatch for counts"):
        make_observer("histogram", scheme).load_state_dict(other.state_dict())


@every_observer
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_equal_and_independent(name: str, how) -> None:  # type: ignore[no-untyped-def]
    observer = make_observer(name, replace(ACTIVATION_U8, axis=1))
    observer(normal(4, 3))
    twin: Observer = how(observer)
    same_state(observer, twin)
    twin(100 * normal(4, 3))
    assert not torch.equal(observer.low, twin.low)


@every_observer
def test_statistics_stay_float32_when_the_model_is_cast(name: str) -> None:
    model = nn.Sequential(make_observer(name))
    observer = model[0]
    assert isinstance(observer, Observer)
    observer(torch.tensor([-70001.0, 0.1]))
    for cast in (model.half, model.bfloat16, model.double, model.float):
        cast()
        assert observer.low.dtype == torch.float32
        assert float(observer.low) == -70001.0


@every_observer
@pytest.mark.parametrize("axis", [None, 1])
def test_inference_mode_and_training_may_alternate(name: str, axis: int | None) -> None:
    observer = make_observer(name, replace(ACTIVATION_U8, axis=axis))
    with torch.inference_mode():
        observer(normal(4, 3))
    observer(10 * normal(4, 3).requires_grad_())
    copy.deepcopy(observer).load_state_dict(observer.state_dict())
    observer.qparams()


@every_data_driven
def test_reset_forgets(name: str) -> None:
    observer, fresh = make_observer(name), make_observer(name)
    observer(torch.tensor([math.nan, 100.0]))
    observer.reset()
    same_state(observer, fresh)
    for each in (observer, fresh):
        each(normal(10))
    same_state(observer, fresh)


@pytest.mark.parametrize("name", MERGE_EXACT)
@pytest.mark.parametrize("axis", [None, 1])
@settings(max_examples=EXAMPLES // 4)
@given(scales=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6), cut=st.integers(0, 6), seed=st.integers(0, 99))
def test_merging_shards_is_one_pass_to_the_bit_in_any_order(
    name: str, axis: int | None, scales: list[float], cut: int, seed: int
) -> None:
    scheme = replace(ACTIVATION_U8, axis=axis)
    batches = [scale * normal(8, 3, seed=seed + i) for i, scale in enumerate(scales)]
    one, left, right = (make_observer(name, scheme) for _ in range(3))
    for batch in batches:
        one(batch)
    for batch in reversed(batches[:cut]):
        left(batch)
    for batch in batches[cut:]:
        right(batch)
    right.merge(left)
    same_state(one, right)


@every_observer
def test_merging_with_an_observer_that_saw_nothing_changes_nothing(name: str) -> None:
    scheme = replace(ACTIVATION_U8, axis=1)
    for seen_first in (True, False):
        seen, empty = make_observer(name, scheme), make_observer(name, scheme)
        seen(normal(4, 3))
        expected = copy.deepcopy(seen)
        target = seen if seen_first else empty
        target.merge(empty if seen_first else seen)
        same_state(expected, target)


@every_observer
def test_merge_adds_the_counts_of_what_was_not_finite(name: str) -> None:
    a, b = make_observer(name), make_observer(name)
    a(torch.tensor([1.0, math.nan]))
    b(torch.tensor([1.0, math.inf, math.nan]))
    a.merge(b)
    assert (int(a.nan_count), int(a.inf_count)) == (2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"scheme": weight_scheme(8, None)}, "cannot merge"), ({"scheme": ACTIVATION_U8, "bins": 1024}, "bins")],
)
def test_merging_other_settings_is_refused(options: dict[str, object], message: str) -> None:
    other = OBSERVERS["histogram"](**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        make_observer("histogram").merge(other)


def test_merging_another_class_or_other_channels_is_refused() -> None:
    scheme = replace(ACTIVATION_U8, axis=0)
    with pytest.raises(TypeError, match="cannot merge a FixedObserver"):
        make_observer("minmax").merge(FixedObserver.sigmoid())
    a, b = make_observer("minmax", scheme), make_observer("minmax", scheme)
    a(normal(2, 3))
    b(normal(3, 3))
    with pytest.raises(ValueError, match="size 3, expected 2"):
        a.merge(b)


@every_data_driven
@every_scheme
@settings(max_examples=EXAMPLES // 4)
@given(values=st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=40))
def test_inside_the_range_the_error_is_half_a_step_and_order_is_kept(
    name: str, scheme: QScheme, values: list[float]
) -> None:
    x = torch.tensor(values).sort().values
    observer = make_observer(name, scheme)
    observer(x)
    qparams, (low, high) = observer.qparams(), observer.range()
    back = qparams.dequantize(qparams.quantize(x))
    inside = (x >= low) & (x <= high)
    # Scale, reciprocal, both products each round once: relative errors of half an epsilon in the value.
    bound = qparams.scale.double() / 2 + 4 * torch.finfo(torch.float32).eps * x.double().abs()
    assert bool(((back.double() - x.double()).abs() <= bound)[inside].all())
    assert bool((back[1:] >= back[:-1]).all())
    assert float(qparams.dequantize(qparams.quantize(torch.zeros(1)))) == 0.0


@every_observer
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_same_state(name: str) -> None:
    x = normal(4, 3)
    for axis in (None, 1):
        here, there = (make_observer(name, replace(ACTIVATION_U8, axis=axis)) for _ in range(2))
        here(x)
        there.cuda()(x.cuda())
        same_state(here, there.cpu())


def test_repr_says_the_settings() -> None:
    assert "percentile=99.9" in repr(make_observer("percentile", percentile=99.9))
