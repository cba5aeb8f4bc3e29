"""FakeQuantize: exact arithmetic, straight-through gradient, switches and ranges that survive what training does."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from quant.kernels import ACTIVATION_U8, WEIGHT_S8, QParams, choose_qparams, weight_scheme
from quant.observers import (
    FakeQuantize,
    FakeQuantizeBase,
    FixedObserver,
    HistogramObserver,
    LSQFakeQuantize,
    LSQPlusFakeQuantize,
    MinMaxObserver,
    MovingAverageObserver,
    NoDataSeen,
    PACTFakeQuantize,
)
from quant.observers.fake_quantize import fake_quantize
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

KINDS = {
    "moving_average": lambda: FakeQuantize(MovingAverageObserver(momentum=0.1)),
    "minmax": lambda: FakeQuantize(MinMaxObserver()),
    "histogram": lambda: FakeQuantize(HistogramObserver()),
    "fixed": lambda: FakeQuantize(FixedObserver(low=-1.0, high=1.0)),
    "per_channel": lambda: FakeQuantize(MinMaxObserver(replace(WEIGHT_S8, axis=1))),
    "lsq": lambda: LSQFakeQuantize(),
    "lsq_channels": lambda: LSQFakeQuantize(weight_scheme(4, 1), channels=3),
    "lsq+": lambda: LSQPlusFakeQuantize(),
    "lsq+_channels": lambda: LSQPlusFakeQuantize(replace(ACTIVATION_U8, axis=1), channels=3),
    "pact": lambda: PACTFakeQuantize(alpha=2.0),
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(kind: str) -> FakeQuantizeBase:
    return KINDS[kind]()


def started(kind: str) -> FakeQuantizeBase:
    module = make(kind)
    module(normal(4, 3))
    return module


def same_state(a: nn.Module, b: nn.Module) -> None:
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key


@every_kind
def test_forward_is_qparams_to_the_bit(kind: str) -> None:
    module = started(kind)
    for training in (True, False):
        module.train(training)
        x = normal(50, 3, seed=5) * 2
        out = module(x)
        qparams = module.qparams()
        assert torch.equal(out, qparams.dequantize(qparams.quantize(x)))
        assert out.dtype == torch.float32


@pytest.mark.parametrize("bits", range(2, 9))
def test_few_bits_give_few_values(bits: int) -> None:
    module = FakeQuantize(MinMaxObserver(weight_scheme(bits, None)))
    assert module(normal(5000)).unique().numel() <= 2**bits - 1


@every_kind
def test_off_is_the_input_itself(kind: str) -> None:
    module = started(kind)
    module.set_quantizing(False)
    x = normal(4, 3)
    assert module(x) is x
    module.set_quantizing(True)
    assert module(x) is not x


def test_the_gradient_passes_inside_and_is_zero_outside() -> None:
    scheme = ACTIVATION_U8
    qparams = choose_qparams(torch.tensor(-1.0), torch.tensor(1.0), scheme)
    step = float(qparams.scale)
    edge = (255 - int(qparams.zero_point)) * step
    values = [-5.0, -0.5, 0.0, 0.7, edge + 0.4 * step, edge + 0.6 * step, math.inf, -math.inf, math.nan]
    x = torch.tensor(values, requires_grad=True)
    upstream = torch.arange(1.0, 10.0)
    fake_quantize(x, qparams.scale, qparams.zero_point, scheme).backward(upstream)
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0, 0.0]


def test_per_channel_gradients_use_each_channels_range() -> None:
    module = FakeQuantize(MinMaxObserver(WEIGHT_S8))
    module(torch.tensor([[-1.0, 1.0], [-10.0, 10.0]]))
    module.set_observing(False)
    x = torch.full((2, 2), 5.0, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_the_batch_is_part_of_the_range_it_is_rounded_with() -> None:
    module = FakeQuantize(MinMaxObserver())
    x = torch.tensor([-1.0, 2.0])
    assert torch.allclose(module(x), x, atol=3 / 510)


def test_eval_observes_nothing_unless_told() -> None:
    for in_eval in (False, True):
        module = FakeQuantize(MovingAverageObserver(WEIGHT_S8, momentum=1.0), observe_in_eval=in_eval)
        module(normal(4, 3))
        module.eval()
        before = copy.deepcopy(module)
        module(5 * normal(4, 3))
        assert torch.equal(before.scale, module.scale) != in_eval


def test_frozen_ranges_stay() -> None:
    module = started("moving_average")
    module.set_observing(False)
    before = copy.deepcopy(module)
    module(100 * normal(4, 3))
    same_state(before, module)


def test_observing_without_quantising_then_quantising() -> None:
    module = FakeQuantize(HistogramObserver())
    module.set_quantizing(False)
    for seed in range(3):
        module(normal(100, seed=seed))
    assert module.qparams() == module.observer.qparams()
    module.observer(5 * normal(100))
    module.set_quantizing(True)
    module.eval()
    module(normal(10))
    assert module.qparams() == module.observer.qparams()


@every_kind
def test_nothing_seen_is_an_error_that_names_the_layer(kind: str) -> None:
    module = make(kind).eval()
    module.name = "stem.conv"
    if kind in ("pact", "fixed"):
        module(normal(2, 3))
        return
    with pytest.raises(NoDataSeen, match=r"'stem\.conv'"):
        module(normal(2, 3))
    with pytest.raises(NoDataSeen, match=r"'stem\.conv'"):
        module.qparams()


def test_freezing_before_data_is_an_error_when_it_matters() -> None:
    module = FakeQuantize()
    module.set_observing(False)
    with pytest.raises(NoDataSeen):
        module(normal(3))
    with pytest.raises(NoDataSeen):
        module.qparams()


@every_kind
def test_an_empty_batch_passes(kind: str) -> None:
    assert make(kind)(torch.empty(0, 3)).shape == (0, 3)
    assert started(kind)(torch.empty(0, 3)).shape == (0, 3)


@every_kind
def test_integers_are_refused(kind: str) -> None:
    with pytest.raises(TypeError, match="floating"):
        make(kind)(torch.ones(4, 3, dtype=torch.int64))


def test_nan_in_a_batch_is_said_once_with_the_layer() -> None:
    module = FakeQuantize()
    module.name = "head"
    with pytest.warns(UserWarning, match="'head'.*1 NaN and 1 infinite"):
        out = module(torch.tensor([math.nan, math.inf, -1.0, 1.0]))
    assert torch.isfinite(out).all()
    module(torch.tensor([math.nan, 1.0]))


def test_a_batch_of_nan_alone_is_an_error() -> None:
    module = FakeQuantize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NoDataSeen):
            module(torch.tensor([math.nan]))


def test_freezing_an_empty_range_warns_with_the_layer() -> None:
    module = FakeQuantize()
    module.name = "dead"
    module(torch.zeros(3))
    assert module.collapsed
    with pytest.warns(UserWarning, match="'dead'.*empty"):
        module.set_observing(False)
    assert torch.equal(module(torch.ones(2)), torch.full((2,), 255 * module.scale))


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_are_the_float32_result_rounded_once(kind: str, dtype: torch.dtype) -> None:
    module = started(kind).eval()
    x = normal(20, 3).to(dtype).requires_grad_()
    out = module(x)
    assert out.dtype == dtype
    assert torch.equal(out, module(x.detach().to(torch.float32)).to(dtype))
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(kind: str, dtype: torch.dtype) -> None:
    module, linear = started(kind), nn.Linear(3, 3)
    with torch.autocast("cpu", dtype=dtype):
        out = module(linear(normal(8, 3)))
        assert out.dtype == dtype
        loss = out.float().square().mean()
    loss.backward()
    assert linear.weight.grad is not None
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        assert bool(torch.isfinite(parameter.grad).all())


@every_kind
def test_a_checkpoint_resumes_exactly(kind: str) -> None:
    module = started(kind)
    module.set_observing(False)
    module.set_quantizing(False)
    fresh = make(kind)
    fresh.load_state_dict(module.state_dict())
    same_state(module, fresh)
    x = normal(4, 3)
    assert fresh(x) is x
    for each in (module, fresh):
        each.set_quantizing(True)
        each.set_observing(True)
        each(3 * normal(4, 3, seed=8))
    same_state(module, fresh)
    assert torch.equal(module.eval()(x), fresh.eval()(x))


@every_kind
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_behave_alike(kind: str, how) -> None:  # type: ignore[no-untyped-def]
    module = started(kind)
    module.set_observing(False)
    twin = how(module)
    same_state(module, twin)
    assert torch.equal(module(normal(4, 3)), twin(normal(4, 3)))


def test_an_average_of_models_follows_the_switches() -> None:
    model = nn.Sequential(nn.Linear(3, 3), FakeQuantize())
    model[1].set_quantizing(False)  # type: ignore[operator]
    model(normal(4, 3))
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True).eval()
    model[1].set_quantizing(True)  # type: ignore[operator]
    model(normal(4, 3))
    average.update_parameters(model)
    assert average(normal(4, 3)).unique().numel() <= 12
    assert torch.equal(average(normal(4, 3)), model.eval()(normal(4, 3)))


def test_what_compile_and_cuda_go_by_is_renewed_on_loading_and_on_train() -> None:
    module, other = FakeQuantize(), FakeQuantize()
    other.set_quantizing(False)
    module.load_state_dict(other.state_dict())
    assert module._known == {"observing": True, "quantizing": False}
    module.observing.fill_(False)
    module.eval()
    assert module._known == {"observing": False, "quantizing": False}
    assert "observing=False" in repr(module)


def test_half_does_not_touch_ranges() -> None:
    module = FakeQuantize(MinMaxObserver())
    module(torch.tensor([-1e6, 1e6]))
    before = module.qparams()
    assert nn.Sequential(module).half()[0].qparams() == before  # type: ignore[operator]


@every_kind
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_observes_once(kind: str, reentrant: bool) -> None:
    plain, checkpointed = started(kind), started(kind)
    x, y = (normal(4, 3).requires_grad_() for _ in range(2))
    plain(x * 1.5).square().sum().backward()
    checkpoint(lambda v: checkpointed(v * 1.5), y, use_reentrant=reentrant).square().sum().backward()
    same_state(plain, checkpointed)
    assert x.grad is not None
    assert y.grad is not None
    assert torch.equal(x.grad, y.grad)


def test_moving_ranges_within_no_grad_and_inference_mode() -> None:
    module = FakeQuantize(MovingAverageObserver(replace(ACTIVATION_U8, axis=1)))
    with torch.inference_mode():
        module(normal(4, 3))
    module(normal(4, 3).requires_grad_()).sum().backward()
    module.eval()(normal(4, 3))


# Dynamo raises two of PyTorch's own warnings while tracing any autograd.Function.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@every_kind
def test_compile_is_the_same_to_the_bit_without_a_graph_break(kind: str) -> None:
    torch._dynamo.reset()
    eager = started(kind)
    twin = copy.deepcopy(eager)
    # The histogram's grid is Python: it steps out of the graph.
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=kind != "histogram")
    for seed in range(3):
        x, y = (normal(4, 3, seed=seed).requires_grad_() for _ in range(2))
        first, second = eager(x), compiled(y)
        assert torch.equal(first, second)
        first.square().sum().backward()
        second.square().sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        assert torch.equal(x.grad, y.grad)
    same_state(eager, twin)
    for each in (eager, twin):
        each.set_quantizing(False)
    x = normal(4, 3)
    assert torch.equal(compiled(x), x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
def test_compile_leaves_out_nan_as_eager_does() -> None:
    torch._dynamo.reset()
    eager, twin = FakeQuantize(), FakeQuantize()
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    x = torch.tensor([math.nan, math.inf, -1.0, 2.0])
    with pytest.warns(UserWarning, match="1 NaN"):
        expected = eager(x)
    assert torch.equal(compiled(x), expected)
    same_state(eager, twin)


def test_a_model_trains_and_the_frozen_result_is_what_the_integers_give() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(normal(4, 8) / 3)
    on_x = FakeQuantize(MovingAverageObserver(momentum=0.1))
    on_w = FakeQuantize(MovingAverageObserver(weight_scheme(4), momentum=1.0), observe_in_eval=True)
    x = normal(64, 8)
    target = x @ normal(4, 8, seed=9).T
    optimiser = torch.optim.Adam([weight], lr=0.05)
    losses = []
    for _ in range(60):
        loss = (on_x(x) @ on_w(weight).T - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    on_w.eval()
    trained = on_w(weight)
    qparams: QParams = on_w.qparams()
    assert torch.equal(trained, qparams.dequantize(qparams.quantize(weight.detach())))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_kind
def test_cuda_gives_the_same(kind: str) -> None:
    here, there = make(kind), make(kind).cuda()
    for seed in range(2):
        x, y = normal(4, 3, seed=seed).requires_grad_(), normal(4, 3, seed=seed).cuda().requires_grad_()
        a, b = here(x), there(y)
        assert torch.equal(a, b.cpu())
        a.sum().backward()
        b.sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        assert torch.equal(x.grad, y.grad.cpu())


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_given_range_is_what_rounds(before: bool) -> None:
    observer = MovingAverageObserver()
    if before:
        observer.give(0.0, 255.0)
    module = FakeQuantize(observer)
    if not before:
        observer.give(0.0, 255.0)
    x = torch.tensor([-3.0, 2.4, 300.0])
    assert module(x).tolist() == [0.0, 2.0, 255.0]
    assert float(module.eval().qparams().scale) == 1.0


def test_hooks_of_the_observer_are_told_of_each_batch() -> None:
    plain, hooked = FakeQuantize(), FakeQuantize()
    seen: list[torch.Tensor] = []
    hooked.observer.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    x = torch.randn(4, 5)
    assert torch.equal(plain(x), hooked(x))
    assert len(seen) == 1
    assert torch.equal(seen[0], x)
