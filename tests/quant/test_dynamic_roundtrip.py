"""Each int8 layer kind copied, pickled, saved, exported, compiled, traced, scripted and shared between threads."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from quant import QConfig, Recipe, quantize_dynamic, summary
from quant.nn import QuantModule

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"

pytestmark = [
    pytest.mark.usefixtures("seeded_on_one_thread"),
    # torch's own, of what is asked for here and of what its compiler uses.
    pytest.mark.filterwarnings(r"ignore:.torch\.jit\..*. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]
SLOW = pytest.mark.skipif(FAST, reason="OCTET_FAST_TESTS=1: graph capture takes minutes under emulation")


class First(nn.Module):
    """A layer inside a model, and only the first of its results."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *arguments: Tensor) -> Tensor:
        output = self.layer(*arguments)
        return output[0] if isinstance(output, tuple) else output


class Packed(nn.Module):
    """A recurrent layer over sequences of different lengths."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0])[0]


class Tied(nn.Module):
    """A language model of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 9)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed(tokens))
        return y


def lossy_linear() -> nn.Linear:
    """A Linear whose small columns take 16-bit activations."""
    layer = nn.Linear(6, 5)
    with torch.no_grad():
        layer.weight *= torch.logspace(0, -6, 6)
    return layer


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    arguments: tuple[Tensor, ...]
    bits: int = 8

    def quantized(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return quantize_dynamic(First(self.make()).eval(), Recipe(default=QConfig(weight_bits=self.bits)))


X, X2 = torch.linspace(-1, 1, 36).reshape(3, 2, 6), torch.linspace(-2, 1, 48).reshape(4, 2, 6)
TOKENS, STARTS = torch.tensor([[1, 2, 8], [0, 2, 3]]), torch.tensor([0, 2, 2])
CASES = {
    "Linear": Case(lambda: nn.Linear(6, 5), (X,)),
    "Linear_no_bias": Case(lambda: nn.Linear(6, 5, bias=False), (X,)),
    "Linear_columns": Case(lossy_linear, (X,)),
    "LSTM": Case(lambda: nn.LSTM(6, 5, 2, bidirectional=True), (X,)),
    "LSTM_projected": Case(lambda: nn.LSTM(6, 5, 2, proj_size=3, bias=False, batch_first=True), (X,)),
    "GRU": Case(lambda: nn.GRU(6, 5, 2), (X, torch.ones(2, 2, 5))),
    "RNN_tanh": Case(lambda: nn.RNN(6, 5), (X,)),
    "RNN_relu": Case(lambda: nn.RNN(6, 5, nonlinearity="relu"), (X,)),
    "LSTMCell": Case(lambda: nn.LSTMCell(6, 5), (X[0],)),
    "GRUCell": Case(lambda: nn.GRUCell(6, 5), (X[0], torch.ones(2, 5))),
    "RNNCell": Case(lambda: nn.RNNCell(6, 5), (X[0],)),
    "MultiheadAttention": Case(lambda: nn.MultiheadAttention(6, 2), (X, X2, X2)),
    "MultiheadAttention_separate": Case(
        lambda: nn.MultiheadAttention(6, 2, kdim=6, vdim=6, add_bias_kv=True), (X, X, X)
    ),
    "TransformerEncoder": Case(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2), (X,)
    ),
    "TransformerDecoderLayer": Case(lambda: nn.TransformerDecoderLayer(6, 2, 8), (X, X2)),
    "Embedding": Case(lambda: nn.Embedding(9, 6), (TOKENS,)),
    "Embedding_4bits": Case(lambda: nn.Embedding(9, 6), (TOKENS,), 4),
    "EmbeddingBag": Case(lambda: nn.EmbeddingBag(9, 6), (TOKENS,)),
    "EmbeddingBag_offsets": Case(lambda: nn.EmbeddingBag(9, 6, mode="sum"), (TOKENS.flatten(), STARTS)),
    "EmbeddingBag_max_4bits": Case(lambda: nn.EmbeddingBag(9, 6, mode="max", padding_idx=2), (TOKENS,), 4),
    "Tied": Case(Tied, (TOKENS,)),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def assert_same(again: Callable[..., Any], quantized: nn.Module, case: Case) -> None:
    assert torch.equal(again(*case.arguments), quantized(*case.arguments))


def test_the_cases_hold_every_int8_class() -> None:
    held = {type(part).__name__ for case in CASES.values() for part in case.quantized().modules()}
    classes = {kind.__name__ for kind in finest(QuantModule)} - {"Conv1D", "Experts"}  # of transformers
    assert classes <= held


def finest(kind: type[QuantModule]) -> set[type[QuantModule]]:
    """Our own classes below `kind` that have none of ours below them."""
    below = [one for one in kind.__subclasses__() if one.__module__.startswith("quant.nn.")]
    return {one for each in below for one in finest(each)} or {kind}


@EACH
def test_deepcopy(case: Case) -> None:
    quantized = case.quantized()
    again = copy.deepcopy(quantized)
    assert_same(again, quantized, case)
    assert summary(again) == summary(quantized)
    # A copy has weights of its own: what is done to one is not seen in the other.
    before = quantized(*case.arguments)
    for tensor in again.state_dict().values():
        tensor.zero_()
    assert torch.equal(quantized(*case.arguments), before)
    assert not torch.equal(again(*case.arguments), before)


@EACH
def test_pickle(case: Case) -> None:
    quantized = case.quantized()
    again = pickle.loads(pickle.dumps(quantized))
    assert_same(again, quantized, case)
    assert summary(again) == summary(quantized)


@EACH
def test_torch_save_of_the_module(case: Case) -> None:
    quantized, file = case.quantized(), io.BytesIO()
    torch.save(quantized, file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=False), quantized, case)


@EACH
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_state_dict_into_a_freshly_quantised_model(case: Case, assign: bool) -> None:
    quantized, fresh = case.quantized(), case.quantized(seed=1)
    before = fresh(*case.arguments)
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    # Called before and after: packed weights of the old values must not survive.
    fresh.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert_same(fresh, quantized, case)
    assert not torch.equal(fresh(*case.arguments), before)


@EACH
def test_int8_state_dict_into_the_float_model_is_an_error_that_names_tensors(case: Case) -> None:
    with pytest.raises(
        RuntimeError, match=r'(?s)Missing key\(s\) in state_dict: "layer\..*Unexpected key\(s\).*"layer\.'
    ):
        First(case.make()).load_state_dict(case.quantized().state_dict())
    quantized = case.quantized()
    before = quantized(*case.arguments)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)"):
        quantized.load_state_dict(First(case.make()).state_dict())
    assert quantized(*case.arguments).shape == before.shape


@pytest.mark.parametrize(
    ("saved", "loaded"), [(lossy_linear, nn.Linear), (nn.Linear, lossy_linear)], ids=["to16", "to8"]
)
def test_a_state_dict_decides_how_columns_are_scaled(saved: Any, loaded: Any) -> None:
    def make(kind: Any) -> nn.Module:
        return quantize_dynamic(nn.Sequential(kind(6, 5) if kind is nn.Linear else kind()))

    source, target = make(saved), make(loaded)
    assert source[0].activation_bits != target[0].activation_bits
    target.load_state_dict(source.state_dict())
    assert target[0].activation_bits == source[0].activation_bits
    assert torch.equal(target(X), source(X))


def test_a_recurrent_state_dict_decides_how_columns_are_scaled() -> None:
    def make(tilt: float) -> nn.Module:
        layer = nn.GRU(160, 8)
        with torch.no_grad():
            layer.weight_ih_l0 *= torch.logspace(0, tilt, 160)
        return quantize_dynamic(layer)

    x = torch.randn(3, 2, 160)
    for source, target in ((make(-6), make(0)), (make(0), make(-6))):
        target.load_state_dict(source.state_dict())
        assert torch.equal(target(x)[0], source(x)[0])


def test_ties_survive_every_round_trip() -> None:
    quantized = CASES["Tied"].quantized()
    for again in (copy.deepcopy(quantized), pickle.loads(pickle.dumps(quantized))):
        assert again.layer.embed.q_weight is again.layer.head.q_weight
    fresh = CASES["Tied"].quantized(seed=1)
    fresh.load_state_dict(quantized.state_dict())
    assert fresh.layer.embed.q_weight is fresh.layer.head.q_weight


@SLOW
@EACH
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # of torch.export.load, torch 2.10
def test_export(case: Case) -> None:
    quantized, file = case.quantized(), io.BytesIO()
    torch.export.save(torch.export.export(quantized, case.arguments), file)
    file.seek(0)
    assert_same(torch.export.load(file).module(), quantized, case)


@SLOW
@pytest.mark.parametrize("kind", ["Linear", "LSTM", "GRU", "MultiheadAttention", "EmbeddingBag"])
def test_export_of_any_batch(kind: str) -> None:
    case = CASES[kind]
    quantized, batch = case.quantized(), torch.export.Dim("batch", min=1, max=64)
    dimension = 0 if kind == "EmbeddingBag" else 1
    program = torch.export.export(
        quantized, case.arguments, dynamic_shapes=(({dimension: batch},) * len(case.arguments),)
    )
    wider = tuple(torch.cat([argument, argument, argument], dim=dimension) for argument in case.arguments)
    assert torch.equal(program.module()(*wider), quantized(*wider))


@SLOW
@EACH
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_compile(case: Case, grad: bool) -> None:
    quantized = case.quantized()
    torch._dynamo.reset()
    # aot_eager is the whole of torch.compile but for Inductor, which reorders the float operations in between.
    compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        assert_same(compiled, quantized, case)


@SLOW
@pytest.mark.parametrize("kind", ["Linear", "LSTM", "Tied"])
def test_compile_with_inductor(kind: str) -> None:
    if not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("torch.compile's inductor needs a C++ compiler")
    case = CASES[kind]
    quantized = case.quantized()
    torch._dynamo.reset()
    assert_same(torch.compile(quantized, fullgraph=True), quantized, case)


@SLOW
@EACH
def test_trace(case: Case, request: pytest.FixtureRequest) -> None:
    quantized = case.quantized()
    if "Transformer" in request.node.name:
        # torch's encoder compares shapes in Python; the int8 layers themselves trace without a warning.
        request.applymarker(pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"))
    traced = torch.jit.trace(quantized, case.arguments)
    assert_same(traced, quantized, case)
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    assert_same(torch.jit.load(file), quantized, case)


@SLOW
@pytest.mark.parametrize("kind", ["Linear", "LSTM", "RNN_relu", "MultiheadAttention", "Embedding", "EmbeddingBag"])
def test_a_trace_serves_other_shapes(kind: str) -> None:
    case = CASES[kind]
    quantized = case.quantized()
    traced = torch.jit.trace(quantized, case.arguments)
    for times in (1, 3):
        longer = tuple(torch.cat([argument] * times + [argument[:1]]) for argument in case.arguments)
        wider = tuple(torch.cat([argument] * times + [argument[:, :1]], dim=1) for argument in case.arguments)
        for other in (longer, wider):
            assert torch.equal(traced(*other), quantized(*other))


class OneArgument(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class OneArgumentFirst(OneArgument):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class ThreeArguments(OneArgument):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(x, x, x)[0]


class TwoArguments(OneArgument):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


SCRIPTED: dict[str, type[nn.Module]] = {
    **dict.fromkeys(
        ("Linear", "Linear_no_bias", "Linear_columns", "GRUCell", "RNNCell", "TransformerEncoder"), OneArgument
    ),
    **dict.fromkeys(("Embedding", "Embedding_4bits", "EmbeddingBag", "EmbeddingBag_max_4bits", "Tied"), OneArgument),
    **dict.fromkeys(("LSTM", "LSTM_projected", "GRU", "RNN_tanh", "RNN_relu", "LSTMCell"), OneArgumentFirst),
    **dict.fromkeys(("MultiheadAttention", "MultiheadAttention_separate"), ThreeArguments),
    "TransformerDecoderLayer": TwoArguments,
}


@SLOW
@pytest.mark.parametrize("kind", SCRIPTED)
def test_script(kind: str) -> None:
    case = CASES[kind]
    module = SCRIPTED[kind](case.make()).eval()
    assert isinstance(torch.jit.script(module), torch.jit.ScriptModule)  # what is asked: where the float module scripts
    quantized = quantize_dynamic(module, Recipe(default=QConfig(weight_bits=case.bits)))
    scripted, x = torch.jit.script(quantized), case.arguments[0]
    assert torch.equal(scripted(x), quantized(x))
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    assert torch.equal(torch.jit.load(file)(x), quantized(x))


@SLOW
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN_tanh"])
def test_script_over_packed_sequences(kind: str) -> None:
    quantized = quantize_dynamic(Packed(CASES[kind].make()).eval())
    lengths = torch.tensor([2, 3])
    assert torch.equal(torch.jit.script(quantized)(X, lengths), quantized(X, lengths))


@EACH
def test_eight_threads_at_once(case: Case) -> None:
    quantized = case.quantized()
    expected = case.quantized()(*case.arguments)
    start, outputs, errors = threading.Barrier(8), [], []

    def work() -> None:
        try:
            start.wait()
            # The first calls pack the weights, all at once.
            outputs.extend(quantized(*case.arguments) for _ in range(5))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(outputs) == 40
    assert all(torch.equal(output, expected) for output in outputs)


def test_a_state_dict_with_none_for_a_weight_is_refused_with_its_name() -> None:
    q = quantize_dynamic(nn.Sequential(nn.Linear(8, 4)))
    for name in ("q_weight", "scale"):
        with pytest.raises(RuntimeError, match=f'"0.{name}", expected torch.Tensor .* but received .*NoneType'):
            q.load_state_dict({**q.state_dict(), f"0.{name}": None})  # type: ignore[dict-item]
