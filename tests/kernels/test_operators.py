"""The operators as torch sees them: schemas, shape functions, and what becomes of them in a graph."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quant.kernels import dispatch, ops, quantize_weight, tables
from torch import Tensor

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"
slow = pytest.mark.skipif(FAST, reason="OCTET_FAST_TESTS=1: torch's compiler takes minutes under emulation")

Arguments = tuple[Any, ...]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def linear() -> tuple[Tensor, Tensor, Tensor]:
    """q_weight (12, 20), its scale and a float bias."""
    return *quantize_weight(torch.randn(12, 20, generator=generator())), torch.randn(12, generator=generator())


def activations(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator())


def static(name: str, *, bias: bool) -> Arguments:
    q_weight, scale, _ = linear()
    q_bias = torch.arange(12, dtype=torch.int32) if bias else None
    tail = {"s32": (), "f32": (scale,), "u8": (scale / 100, 60, 0, 255)}[name]
    return (activations(2, 3, 20), 128, q_weight, q_bias, *tail, "")


def dynamic(*, bits: int, extras: bool) -> Arguments:
    q_weight, scale, bias = linear()
    columns = torch.rand(20, generator=generator()) if extras else None
    x = torch.randn(2, 3, 20, generator=generator())
    return (x, q_weight, scale, bias if extras else None, columns, bits, not extras, extras, "")


def recurrent(mode: str, *, packed: bool = False, projection: int = 0) -> Arguments:
    gates, hidden = {"lstm": 4, "gru": 3}.get(mode, 1), 6
    state = projection or hidden

    def weight(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        return quantize_weight(torch.randn(rows, columns, generator=generator()) / 3)

    ih, hh = weight(gates * hidden, 5), weight(gates * hidden, state)
    hr = weight(projection, hidden) if projection else (None, None)
    x = torch.randn((6, 5) if packed else (3, 2, 5), generator=generator())
    sizes = torch.tensor([3, 2, 1]) if packed else None
    batch = 3 if packed else 2
    c = torch.zeros(batch, hidden) if mode == "lstm" else None
    bias = torch.randn(gates * hidden, generator=generator())
    h = torch.zeros(batch, state)
    return (x, sizes, h, c, *ih, None, 8, True, *hh, bias, bias.clone(), *hr, mode, packed, "")


def recurrent_static(mode: str, *, quantized: bool = True, projection: int = 0) -> Arguments:
    x, sizes, h, c, ih, s_ih, _, _, _, hh, s_hh, b_ih, b_hh, hr, s_hr, *_ = recurrent(mode, projection=projection)
    head = (activations(*x.shape), 0.02, 120, sizes, h, c, ih, s_ih, hh, s_hh, b_ih, b_hh, 0.01, 128)
    return (*head, hr, s_hr, 0.01, 128, mode, True, quantized, "")


def rows(bits: int) -> Tensor:
    return tables.pack_table(torch.randn(9, 6, generator=generator()), bits)


def observed(channels: int) -> Arguments:
    """What an observer of one row and one mean keep before the first batch."""
    low, high = torch.full((1,), float("inf")), torch.full((1,), float("-inf"))
    none = torch.zeros((), dtype=torch.int64)
    mean = [torch.zeros(channels, dtype=torch.float64), none.clone(), low.clone(), high.clone()]
    return (low, high, none.clone(), none.clone(), torch.zeros(1, 64, dtype=torch.int64), mean)


def normalized() -> Arguments:
    x = torch.randn(2, 3, 4, 5, generator=generator())
    return (x, torch.zeros(3), torch.ones(3), torch.ones(3), torch.zeros(3), 1e-5, True, 0.0, 6.0, *observed(3))


CALLS: dict[str, tuple[str, Callable[[], Arguments]]] = {
    "quantize": ("quantize", lambda: (torch.randn(4, 5), 0.1, 3)),
    "dequantize": ("dequantize", lambda: (activations(4, 5), 0.1, 3)),
    "requantize": ("requantize", lambda: (activations(4, 5).int(), torch.rand(5), 3, 0, 255)),
    "linear s32": ("linear_u8s8_s32", lambda: static("s32", bias=False)),
    "linear s32 bias": ("linear_u8s8_s32", lambda: static("s32", bias=True)),
    "linear f32": ("linear_u8s8_f32", lambda: static("f32", bias=True)),
    "linear u8": ("linear_u8s8_u8", lambda: static("u8", bias=True)),
    "dynamic": ("linear_dynamic", lambda: dynamic(bits=8, extras=False)),
    "dynamic 16 bits": ("linear_dynamic", lambda: dynamic(bits=16, extras=True)),
    "dynamic plain": ("linear_dynamic_plain", lambda: dynamic(bits=8, extras=True)[:4]),
    "lstm": ("rnn_layer", lambda: recurrent("lstm")),
    "lstm packed": ("rnn_layer", lambda: recurrent("lstm", packed=True)),
    "lstm projected": ("rnn_layer", lambda: recurrent("lstm", projection=4)),
    "gru": ("rnn_layer", lambda: recurrent("gru")),
    "rnn": ("rnn_layer", lambda: recurrent("rnn_tanh", packed=True)),
    "lstm static": ("rnn_layer_static", lambda: recurrent_static("lstm", projection=4)),
    "gru static": ("rnn_layer_static", lambda: recurrent_static("gru", quantized=False)),
    "fake quantize": (
        "fake_quantize",
        lambda: (
            torch.randn(4, 5),
            torch.tensor(0.1),
            torch.tensor(3, dtype=torch.int32),
            None,
            0,
            255,
            0.0,
            6.0,
            True,
        ),
    ),
    "fake quantize rows": (
        "fake_quantize",
        lambda: (torch.randn(2, 5), torch.rand(2), torch.zeros(2, dtype=torch.int32), 0, -7, 7, -1e9, 1e9, False),
    ),
    "masked gradient": ("masked_gradient", lambda: (torch.randn(4, 5), torch.randn(4, 5) > 0)),
    "follow range": (
        "follow_range",
        lambda: (
            torch.randn(40, generator=generator()),
            0.1,
            0.0,
            6.0,
            0,
            255,
            None,
            torch.ones(1),
            torch.ones(1),
            *(torch.zeros((), dtype=torch.int64) for _ in range(3)),
            torch.ones(()),
            torch.ones((), dtype=torch.int32),
        ),
    ),
    "round weight": (
        "round_weight",
        lambda: (torch.randn(3, 2, 2), torch.rand(3), torch.randn(3), torch.tensor(0.1), 2.0**30, 127),
    ),
    "batch statistics": ("batch_statistics", lambda: (torch.randn(2, 3, 5, 5, generator=generator()),)),
    "observe histogram": (
        "observe_histogram",
        lambda: (
            torch.randn(2, 99, generator=generator()),
            torch.full((2,), -1.0),
            torch.ones(2),
            *(torch.zeros((), dtype=torch.int64) for _ in range(2)),
            torch.zeros(2, 64, dtype=torch.int64),
        ),
    ),
    "observe activation": (
        "observe_activation",
        lambda: (torch.randn(2, 3, 4, 5, generator=generator()), 1, *observed(3)),
    ),
    "observe normalized": ("observe_normalized", normalized),
    "channel sums": ("channel_sums", lambda: (torch.randn(2, 3, 4, generator=generator()), 1)),
    "depthwise of reals": (
        "depthwise_f32",
        lambda: (torch.randn(2, 3, 6, 5), torch.randn(3, 1, 3, 3), torch.randn(3), [2, 1], [1, 1], [1, 2]),
    ),
    "write byte cache": (
        "write_byte_cache",
        lambda: (
            torch.randn(2, 3, 5, 4, generator=generator()),
            9,
            torch.zeros(2, 3, 1, 4, 16, dtype=torch.int8),
            torch.ones(2, 3, 16),
        ),
    ),
    "attend byte cache": (
        "attend_byte_cache",
        lambda: (
            torch.randn(2, 6, 2, 4, generator=generator()),
            torch.ones(2, 3, 1, 4, 16, dtype=torch.int8),
            torch.rand(2, 3, 16, generator=generator()),
            torch.ones(2, 3, 16, 5, dtype=torch.int8),
            torch.rand(2, 3, 16, generator=generator()),
            11,
            0.5,
            False,
            None,
        ),
    ),
    "histogram": ("histogram", lambda: (torch.randn(99, generator=generator()), 2.0**-4, 64)),
    "embedding": ("embedding", lambda: (rows(4), torch.tensor([[0, 8], [3, 3]]), 4, 6, "")),
    "bags": (
        "embedding_bag",
        lambda: (rows(8), torch.tensor([1, 2, 8]), torch.tensor([0, 2]), None, 8, 6, "mean", False, -1, ""),
    ),
    "bags weighted": (
        "embedding_bag",
        lambda: (rows(8), torch.tensor([1, 2]), torch.tensor([0, 2]), torch.rand(2), 8, 6, "sum", True, 1, ""),
    ),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Forgets earlier graphs, whose number per function torch limits."""
    torch.compiler.reset()


IN_PLACE = ("follow range", "observe histogram", "observe activation", "observe normalized", "write byte cache")
"""Calls that return nothing and change what an observer keeps; they are no part of a graph."""

calls = pytest.mark.parametrize("name", [name for name in CALLS if name not in IN_PLACE])


def call(name: str) -> tuple[Any, Arguments]:
    operator, arguments = CALLS[name]
    return getattr(torch.ops.octet, operator).default, arguments()


def same(actual: Any, expected: Any) -> None:
    pairs = zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


class Calling(torch.nn.Module):
    """A module whose forward is one operator on a given input and constants."""

    def __init__(self, operator: Any, arguments: Arguments) -> None:
        super().__init__()
        self.operator = operator
        self.rest = arguments[1:]
        for index, argument in enumerate(self.rest):
            if isinstance(argument, Tensor):
                self.register_buffer(f"constant_{index}", argument)

    def forward(self, x: Tensor) -> Any:
        return self.operator(x, *(getattr(self, f"constant_{i}", value) for i, value in enumerate(self.rest)))


def test_every_operator_is_called_here() -> None:
    called = {operator for operator, _ in CALLS.values()}
    assert set(ops.SCHEMAS) - called <= {name for name in ops.SCHEMAS if name.startswith(("conv_", "run_plan"))}


@slow
@pytest.mark.parametrize("name", list(CALLS))
def test_opcheck(name: str) -> None:
    operator, arguments = call(name)
    torch.library.opcheck(operator, arguments)


@calls
def test_the_shape_function_tells_the_truth(name: str) -> None:
    operator, arguments = call(name)
    expected = operator(*arguments)
    meta = operator(*(a.to("meta") if isinstance(a, Tensor) else a for a in arguments))
    pairs = zip(meta, expected, strict=True) if isinstance(expected, tuple) else [(meta, expected)]
    for shape, real in pairs:
        assert (shape.shape, shape.dtype, shape.stride()) == (real.shape, real.dtype, real.stride())


@calls
def test_two_calls_give_the_same_bits(name: str) -> None:
    operator, arguments = call(name)
    same(operator(*arguments), operator(*arguments))


@slow
@calls
def test_compile_with_a_full_graph(name: str) -> None:
    operator, arguments = call(name)
    compiled = torch.compile(Calling(operator, arguments), fullgraph=True, backend="aot_eager")
    same(compiled(arguments[0]), operator(*arguments))


@slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # inductor's own imports
def test_compile_to_native_code_with_changing_shapes(extension: None) -> None:
    if not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("torch.compile's inductor needs a C++ compiler")
    q_weight, scale, bias = linear()

    def function(x: Tensor) -> Tensor:
        y = dispatch.current().linear_dynamic(x * 2, q_weight, scale, bias, None, 8, True, False)
        return torch.nn.functional.gelu(y).sum(0)

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for size in (3, 5, 9):
        x = torch.randn(size, 20)
        torch.testing.assert_close(compiled(x), function(x), rtol=1e-5, atol=1e-5)


@slow
@calls
def test_export_save_and_load(name: str) -> None:
    operator, arguments = call(name)
    program = torch.export.export(Calling(operator, arguments), (arguments[0],))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    same(torch.export.load(file).module()(arguments[0]), operator(*arguments))


@slow
def test_export_keeps_a_dynamic_batch() -> None:
    operator, arguments = call("dynamic")
    batch = torch.export.Dim("batch", min=2, max=64)
    module = Calling(operator, arguments)
    program = torch.export.export(module, (arguments[0],), dynamic_shapes=({0: batch},))
    x = torch.randn(7, 3, 20)
    same(program.module()(x), module(x))


@slow
@calls
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_trace_save_and_load(name: str) -> None:
    operator, arguments = call(name)
    traced = torch.jit.trace(Calling(operator, arguments), (arguments[0],))
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    same(torch.jit.load(file)(arguments[0]), operator(*arguments))


@slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_script() -> None:
    def function(x: Tensor, q_weight: Tensor, scale: Tensor) -> Tensor:
        y = torch.ops.octet.linear_dynamic(x, q_weight, scale, None, None, 8, True, True, "")
        return torch.ops.octet.dequantize(torch.ops.octet.quantize(y, 0.1, 0), 0.1, 0)

    q_weight, scale, _ = linear()
    x = torch.randn(3, 20)
    same(torch.jit.script(function)(x, q_weight, scale), function(x, q_weight, scale))


def test_a_backend_that_is_no_library_is_refused_in_a_graph(extension: None) -> None:
    operator, arguments = call("dynamic")
    with pytest.raises(ValueError, match="'onednn' cannot serve a compiled, exported or scripted graph"):
        operator(*arguments[:-1], "onednn")


def test_the_layers_choice_is_kept_in_a_graph(extension: None) -> None:
    operator, arguments = call("dynamic")
    program = torch.export.export(Calling(operator, (*arguments[:-1], "qnnpack")), (arguments[0],))
    assert "qnnpack" in program.graph_module.code


def test_no_gradient_starts_at_integers() -> None:
    operator, arguments = call("dynamic")
    y = operator(arguments[0].requires_grad_(), *arguments[1:])
    assert not y.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        y.sum().backward()


OLD = """
import warnings, torch
warnings.simplefilter("ignore")
from quant.kernels import dispatch, ops
print(ops.extension_problem())
print(dispatch.default_name())
print(torch.ops.octet.quantize(torch.tensor([0.0, 1.0]), 0.5, 3).tolist())
"""


def test_an_extension_without_all_operators_is_not_used_and_says_how_to_build_it(
    run_python: Callable[..., str],
) -> None:
    """Any library that torch can load stands for one that an older version built."""
    library = next((Path(torch.__file__).parent / "lib").glob("libtorch_global_deps.*"))
    problem, backend, q = run_python(OLD, QUANT_EXTENSION=str(library)).splitlines()
    assert problem.startswith(f"{library.name} was built from other sources than these: it has no quantize, dequantize")
    assert problem.endswith("more operators; `quant build` builds it anew")
    assert backend == "reference"
    assert q == "[3, 5]"


def test_an_extension_is_asked_for_all_that_is_called_of_it() -> None:
    root = Path(__file__).resolve().parents[2]
    sources = [
        path for folder in ("quant", "kernels", "observers", "calibrate") for path in (root / folder).rglob("*.py")
    ]
    called = {
        name for path in sources for name in re.findall(r"torch\.ops\.octet_native\.(\w+)", path.read_text("utf-8"))
    }
    assert called
    assert called <= set(ops.HELPERS)


def test_an_extension_without_a_helper_names_it(extension: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "HELPERS", (*ops.HELPERS, "of_later"))
    assert "it has no of_later; `quant build`" in ops.extension_problem.__wrapped__()


def test_an_extension_without_one_operator_names_it(extension: None, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = torch.library.Library("octet", "FRAGMENT")
    newer.define("linear_u9s9_u9(Tensor x) -> Tensor")
    monkeypatch.setitem(ops.SCHEMAS, "linear_u9s9_u9", "(Tensor x) -> Tensor")
    try:
        assert "it has no linear_u9s9_u9; `quant build`" in ops.extension_problem.__wrapped__()
    finally:
        newer._destroy()
