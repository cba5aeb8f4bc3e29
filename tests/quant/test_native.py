"""Planned runs of converted models: what is computed together, and that nothing else changes by it."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from quant.kernels import dispatch, ops
from quant.kernels.backends.compiled import CompiledBackend
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import quant
from quant.runtime.programs import RESERVED
from quant.static.native import Schedule


class Net(nn.Module):
    """Convolutions, a look-up, pooling, a reshape by the batch's size, a move that has no native form, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Hardswish(), nn.MaxPool2d(2))
        self.mix, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.mix(x).flip(3)
        return self.head(x.view(x.shape[0], -1))


def converted(x: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = Net().eval()
    prepared = quant.prepare(model, x)
    with torch.no_grad():
        prepared(x)
        return quant.convert(prepared)


def schedule(model: nn.Module) -> Schedule:
    runner: Any = model._modules[RESERVED]
    found: Schedule = runner.program.schedule
    return found


def by_steps(model: nn.Module, x: Tensor) -> Tensor:
    with mock.patch.object(CompiledBackend, "plans", False):
        y: Tensor = model(x)
    return y


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_regions_reach_up_to_what_has_no_native_form() -> None:
    model = converted(X)
    made = schedule(model)
    assert len(made.regions) == 2
    assert list(made.reasons.values()) == ["flip has no native kernel"]
    entry = quant.summary(model)["(planned run)"]
    assert "native calls: 2" in entry.detail
    assert "flip has no native kernel" in entry.detail


@pytest.mark.parametrize("batch", [1, 5])
def test_planned_and_step_by_step_are_the_same(batch: int) -> None:
    model, x = converted(X), torch.randn(batch, 3, 8, 8)
    assert torch.equal(model(x), by_steps(model, x))
    assert torch.equal(model.features(x), by_steps(model.features, x))  # type: ignore[operator, arg-type]


def test_other_numbers_make_another_plan() -> None:
    model = converted(X)
    model(X)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["head.weight_scale"] *= 2
    state["mix.input_scale"] *= 1.5
    model.load_state_dict(state)
    assert torch.equal(model(X), by_steps(model, X))
    model.head.q_weight = -model.head.q_weight  # type: ignore[union-attr, operator]
    assert torch.equal(model(X), by_steps(model, X))


def test_copies_share_nothing() -> None:
    model = converted(X)
    before = model(X)
    twin = copy.deepcopy(model)
    twin.head.q_weight.zero_()  # type: ignore[union-attr, operator]
    assert torch.equal(twin(X), by_steps(twin, X))
    assert not torch.equal(twin(X), before)
    assert torch.equal(model(X), before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_exported_graph_takes_any_batch() -> None:
    model = converted(X)
    model(X)
    graph = torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    x = torch.randn(7, 3, 8, 8)
    assert torch.equal(graph.module()(x), model(x))


class Padded(nn.Module):
    """Pads as TensorFlow does, reads the batch's size before anything else, and reshapes by it at the end."""

    def __init__(self, pad: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pad = pad
        self.stem, self.deep = nn.Conv2d(3, 20, 3, 2), nn.Conv2d(20, 20, 5, 2, groups=20)
        self.pool, self.head = nn.AdaptiveAvgPool2d(2), nn.Linear(80, 5)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.size(0)
        x = F.relu6(self.stem(self.pad(x)))
        x = F.relu6(self.deep(F.pad(x, (1, 2, 1, 2))))
        return self.head(self.pool(x).view(batch, -1))


class Scaled(nn.Module):
    """Pads by a width that is computed at run time."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (x.shape[2] // x.shape[2], 0, 0, 0))


PADS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "a module": (nn.ZeroPad2d((0, 1, 0, 1)), True),
    "a function": (lambda x: F.pad(x, (0, 1, 2, 0)), True),
    "constant zero": (lambda x: F.pad(x, (0, 1, 2, 0), "constant", 0.0), True),
    "channels of zeros": (lambda x: F.pad(x[:, :2], (0, 1, 0, 1, 0, 1)), True),
    "another constant": (nn.ConstantPad2d(1, 0.5), False),
    "reflected": (nn.ReflectionPad2d(1), True),
    "cropped": (lambda x: F.pad(x, (-1, 1, 0, -1)), False),
    "read twice": (lambda x: F.pad(x, (0, 1, 0, 1)).mul(1.0) + F.pad(x, (0, 1, 0, 1)), True),
    "by what is computed": (Scaled(), False),
}


@pytest.mark.parametrize(("pad", "planned"), PADS.values(), ids=list(PADS))
def test_a_padded_stem(pad: Callable[[Tensor], Tensor], planned: bool) -> None:
    torch.manual_seed(0)
    model, x = Padded(pad).eval(), torch.randn(2, 3, 12, 12)
    prepared = quant.prepare(model, x)
    with torch.no_grad():
        prepared(x)
        q = quant.convert(prepared)
    first = schedule(q).regions[0]
    assert (
        any(" = pad " in piece and "fill=0" in piece for piece in first.pieces[:2] if isinstance(piece, str)) is planned
    )
    for shape in ((2, 3, 12, 12), (1, 3, 12, 12), (5, 3, 9, 14), (1, 3, 7, 7)):
        other = torch.randn(shape)
        assert torch.equal(q(other), by_steps(q, other))
    with torch.no_grad():
        assert (q(x) - model(x)).norm() < 0.1 * model(x).norm()


def test_a_padded_stem_is_one_call() -> None:
    prepared = quant.prepare(Padded(nn.ZeroPad2d((0, 1, 0, 1))).eval(), X)
    with torch.no_grad():
        prepared(X)
        made = schedule(quant.convert(prepared))
    assert len(made.steps) == 1
    assert not made.reasons


def test_a_hook_of_a_float_pad_runs() -> None:
    model = Padded(nn.ZeroPad2d((0, 1, 0, 1))).eval()
    seen: list[Any] = []
    model.pad.register_forward_hook(lambda module, args, output: seen.append(output.shape))  # type: ignore[attr-defined]
    prepared = quant.prepare(model, X)
    with torch.no_grad():
        prepared(X)
        q = quant.convert(prepared)
    seen.clear()
    q(X)
    assert seen == [(2, 3, 9, 9)]


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.rnn, self.after = nn.Linear(8, 8), nn.GRU(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.rnn(self.before(x))[0])
        return out


@pytest.mark.parametrize("never_run", ["converted", "pickled", "copied", "loaded"])
@pytest.mark.parametrize("kind", ["layer", "layers", "recurrent"])
def test_a_model_that_never_ran_compiles_as_one_graph(kind: str, never_run: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(8, 8)
    if kind != "layer":
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)) if kind == "layers" else _Recurrent()
    x = torch.randn(4, 3, 8)
    prepared = quant.prepare(model.eval(), x)
    prepared(x)
    q = quant.convert(prepared)
    expected = quant.convert(prepared)(x)
    if never_run == "pickled":
        q = pickle.loads(pickle.dumps(q))
    elif never_run == "copied":
        q = copy.deepcopy(q)
    elif never_run == "loaded":
        q.load_state_dict(quant.convert(prepared).state_dict())
    torch.compiler.reset()
    assert torch.equal(torch.compile(q, fullgraph=True, backend="eager")(x), expected)


TRANSPOSED = {
    "a stride, a padding and more": (nn.ConvTranspose2d(4, 6, 3, 2, 1, 1), (3, 5)),
    "a stride beyond the kernel": (nn.ConvTranspose2d(4, 6, 2, 3), (3, 5)),
    "groups": (nn.ConvTranspose1d(4, 6, 4, 2, 1, groups=2), (7,)),
    "three dimensions": (nn.ConvTranspose3d(4, 6, 2, 2), (2, 3, 2)),
}


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize(("layer", "sizes"), TRANSPOSED.values(), ids=list(TRANSPOSED))
def test_transposed_convolutions_are_planned_by_their_phases(
    layer: nn.Module, sizes: tuple[int, ...], is_last: bool
) -> None:
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(sizes)]
    after = [nn.ReLU()] if is_last else [conv(6, 3, 1)]
    x = torch.randn(2, 4, *[4] * len(sizes), generator=torch.Generator().manual_seed(2))
    model = quant.quantize_static(
        nn.Sequential(conv(4, 4, 1), copy.deepcopy(layer), *after).eval(), [x], progress=False
    )
    assert len(schedule(model).steps) == 1
    for shape in [(2, 4, *[4] * len(sizes)), (3, 4, *sizes), (0, 4, *sizes)]:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        assert torch.equal(model(x), by_steps(model, x))


def test_a_transposed_convolution_with_a_dilation_runs_by_itself() -> None:
    x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(2))
    layers = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 3, dilation=2), nn.Conv2d(4, 4, 1))
    model = quant.quantize_static(layers.eval(), [x], progress=False)
    assert schedule(model).reasons == {"1": "conv_transpose with a dilation has no plan"}


@pytest.mark.skipif(bool(ops.extension_problem()), reason="no compiled kernels")
def test_the_texts_of_a_model_go_with_it() -> None:
    kept = torch.ops.octet_native.text_count
    gc.collect()
    before, model = kept(), converted(X)
    expected = model(X)
    regions = len(schedule(model).regions)
    assert kept() == before + regions
    other = copy.deepcopy(model)
    assert torch.equal(other(X), expected)
    assert kept() == before + 2 * regions
    del other, model
    gc.collect()
    assert kept() == before


@pytest.mark.skipif(bool(ops.extension_problem()), reason="no compiled kernels")
def test_backends_that_take_turns_keep_one_text_each() -> None:
    compiled = [name for name in dispatch.available() if isinstance(dispatch.find(name), CompiledBackend)]
    if len(compiled) < 2:
        pytest.skip("one compiled backend")
    model = converted(X)
    regions = len(schedule(model).regions)
    gc.collect()
    before = torch.ops.octet_native.text_count()
    for _ in range(3):
        for name in compiled:
            with dispatch.use(name):
                model(X)
    assert torch.ops.octet_native.text_count() <= before + regions * len(compiled)
    del model
    gc.collect()
    assert torch.ops.octet_native.text_count() <= before


@pytest.mark.skipif(not dispatch.current().plans, reason="without the compiled kernels there are no texts")
def test_a_text_that_is_dropped_is_heard_by_no_mode() -> None:
    """Recordings listen by function modes, and a collector may drop a model's texts while one runs."""

    class Listening(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[object] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.heard.append(func)
            return func(*args, **(kwargs or {}))

    q = quant.quantize_static(nn.Sequential(nn.Linear(8, 8)).eval(), [torch.randn(8, 8)], progress=False)
    q(torch.randn(2, 8))
    with Listening() as listening:
        del q
        gc.collect()
    assert listening.heard == []


class OfBytes(nn.Module):
    """Makes numbers of what the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.float() / 255)
        return out


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64, torch.int32, torch.float64, torch.float16])
def test_float_of_a_caller_s_bytes_takes_other_types_too(dtype: torch.dtype) -> None:
    model = OfBytes().eval()
    batches = [torch.randint(0, 256, (8, 4), dtype=torch.uint8) for _ in range(4)]
    q = quant.quantize_static(model, batches, progress=False)
    assert torch.equal(q(batches[0].to(dtype)), q(batches[0]))
