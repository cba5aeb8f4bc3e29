"""`nn.MultiheadAttention` and torch's encoders in static models: int8 projections, and all of it in the planned run."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from quant.kernels import ops as kernel_ops
from quant.kernels import use
from quant.kernels.backends.compiled import CompiledBackend
from torch import Tensor, nn

import quant
from quant.capture.attention import multihead
from quant.prepare import RESERVED
from quant.recipe import Recipe, RecipeError
from quant.runtime.uncaptured import UncapturedCall

needs_kernels = pytest.mark.skipif(bool(kernel_ops.extension_problem()), reason="the compiled kernels are not here")

WIDTH, HEADS, BATCH, LENGTH, KEYS = 32, 4, 2, 6, 9


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def module(**settings: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(WIDTH, HEADS, **settings).eval()
    for name, bias in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(bias)
    return made


def masks(keys: int) -> dict[str, dict[str, Tensor]]:
    padding = torch.arange(keys) >= torch.tensor([[keys], [keys - 2]])
    forbidden = torch.ones(LENGTH, keys).triu(1).bool()
    return {
        "none": {},
        "bool": {"attn_mask": forbidden},
        "float": {"attn_mask": seeded(LENGTH, keys, seed=3)},
        "heads": {"attn_mask": seeded(BATCH * HEADS, LENGTH, keys, seed=4)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": forbidden, "key_padding_mask": padding},
    }


@pytest.mark.parametrize("mask", list(masks(KEYS)))
@pytest.mark.parametrize("need_weights", [False, True], ids=["alone", "with weights"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["length first", "batch first"])
@pytest.mark.parametrize("kind", ["self", "cross", "value", "separate", "no bias"])
def test_what_is_captured_computes_what_torch_does(kind: str, batch_first: bool, need_weights: bool, mask: str) -> None:
    settings = {"separate": {"kdim": 20, "vdim": 24}, "no bias": {"bias": False}}.get(kind, {})
    attention = module(batch_first=batch_first, **settings)
    keys = LENGTH if kind in ("self", "no bias", "value") else KEYS
    wide = [WIDTH, attention.kdim, attention.vdim]
    q, k, v = (seeded(BATCH, n, w, seed=i) for i, (n, w) in enumerate(zip((LENGTH, keys, keys), wide, strict=True)))
    k, v = {"self": (q, q), "no bias": (q, q), "value": (q, v), "cross": (k, k), "separate": (k, v)}[kind]
    given = (q, k, v) if batch_first else tuple(one.transpose(0, 1) for one in (q, k, v))
    given = (given[0], given[0] if k is q else given[1], given[0] if v is q else given[1] if v is k else given[2])
    kwargs = {**masks(keys)[mask], "need_weights": need_weights}
    with torch.no_grad():
        for average in (True, False):
            expected = attention(*given, **kwargs, average_attn_weights=average)
            got = multihead(attention, *given, **kwargs, average_attn_weights=average)
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("need_weights", [False, True])
def test_one_sequence_without_a_batch(need_weights: bool) -> None:
    attention, x = module(batch_first=True), seeded(LENGTH, WIDTH)
    for kwargs in ({}, {"attn_mask": seeded(HEADS, LENGTH, LENGTH)}, {"key_padding_mask": torch.arange(LENGTH) > 3}):
        with torch.no_grad():
            expected = attention(x, x, x, need_weights=need_weights, **kwargs)
            got = multihead(attention, x, x, x, need_weights=need_weights, **kwargs)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_a_causal_hint_needs_its_mask() -> None:
    x = seeded(BATCH, LENGTH, WIDTH)
    with pytest.raises(ValueError, match="is_causal is a hint about attn_mask"):
        multihead(module(), x, x, x, is_causal=True)


class Around(nn.Module):
    """An attention between two layers; `kind` says which mask it makes or takes."""

    def __init__(self, kind: str = "plain", **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **settings})

    def forward(self, x: Tensor) -> Any:
        x = self.before(x)
        if self.kind == "cross":
            return self.after(self.attention(x, x * 0.5, x * 0.5)[0])
        if self.kind == "causal":
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.after(self.attention(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0])
        y, weights = self.attention(x, x, x)
        return (self.after(y), weights) if self.kind == "weights" else self.after(y)


X = seeded(3, LENGTH, WIDTH, seed=9)
PADDING = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [LENGTH - 2], [LENGTH]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)


def encoder(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, **{"batch_first": True, **settings})
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=bool(settings.get("batch_first", True)))


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 64, batch_first=True), 2)


CASES: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "plain": (Around(), {"x": X}),
    "length first": (Around(batch_first=False), {"x": X}),
    "one sequence": (Around(), {"x": X[0]}),
    "separate": (Around("cross", kdim=WIDTH, vdim=WIDTH), {"x": X}),
    "cross": (Around("cross"), {"x": X}),
    "causal": (Around("causal"), {"x": X}),
    "weights": (Around("weights"), {"x": X}),
    "encoder": (encoder(), {"src": X}),
    "norm first": (encoder(norm_first=True, activation="gelu", batch_first=False), {"src": X}),
    "padded": (encoder(dropout=0.0), {"src": X, "src_key_padding_mask": PADDING}),
    "causal encoder": (encoder(), {"src": X, "mask": CAUSAL}),
    "decoder": (decoder(), {"tgt": X, "memory": X * 0.5, "tgt_mask": CAUSAL}),
}


def first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def converted(case: str) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    model, kwargs = CASES[case]
    prepared = quant.prepare(model.eval(), kwargs)
    with torch.no_grad():
        prepared(**kwargs)
    return prepared, quant.convert(prepared), kwargs


def error(got: Any, expected: Any) -> float:
    return float((first(got) - first(expected)).norm() / first(expected).norm())


@pytest.mark.parametrize("case", list(CASES))
def test_planned_is_step_by_step_to_the_bit_and_near_float(case: str) -> None:
    prepared, q, kwargs = converted(case)
    with torch.no_grad():
        got = q(**kwargs)
        with mock.patch.object(CompiledBackend, "plans", False):
            assert torch.equal(first(q(**kwargs)), first(got))
        with use("reference"):
            assert error(got, q(**kwargs)) < 0.01
        assert error(got, prepared(**kwargs)) < 0.03
    assert {quant.summary(q)[name].outcome for name, one in q.named_modules() if isinstance(one, nn.Linear)} == {"int8"}
    assert quant.parity(prepared, q, [kwargs]).holds


def test_weights_that_somebody_reads_are_those_of_float() -> None:
    model, kwargs = CASES["weights"]
    _, q, _ = converted("weights")
    with torch.no_grad():
        assert error(q(**kwargs)[::-1], model(**kwargs)[::-1]) < 0.02


def regions(q: nn.Module) -> list[str]:
    runner: Any = q._modules[RESERVED]
    return [type(step).__name__ for step in runner.program.schedule.steps]


@pytest.mark.parametrize("case", ["plain", "length first", "separate", "cross", "one sequence", "encoder", "decoder"])
def test_an_attention_is_part_of_one_native_call(case: str) -> None:
    assert regions(converted(case)[1]).count("Region") == 1


def test_added_keys_stay_dynamic() -> None:
    for settings in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        q = quant.quantize_static(Around(**settings).eval(), [X], progress=False)
        assert quant.summary(q)["attention"].detail.startswith("no static kernel, so dynamic: ")


@pytest.mark.parametrize("rule", ["attention", nn.MultiheadAttention], ids=str)
def test_a_rule_for_the_attention_is_one_for_its_projections(rule: Any, tmp_path: Path) -> None:
    model = Around().eval()
    q = quant.quantize_static(model, [X], recipe=Recipe({rule: None}), progress=False)
    assert quant.summary(q)["attention"].outcome == quant.summary(q)["attention.out_proj"].outcome == "float"
    assert quant.summary(q)["after"].outcome == "int8"
    quant.save(q, tmp_path / "q.q8")
    with torch.no_grad():
        assert torch.equal(quant.load(tmp_path / "q.q8", model=model)(X), q(X))


@pytest.mark.parametrize("settings", [{}, {"add_bias_kv": True}], ids=["static", "dynamic"])
def test_a_rule_for_one_projection_alone_is_refused(settings: Any) -> None:
    with pytest.raises(RecipeError, match=r"no module matches 'attention\.\*' -> float; .*is quantised as a whole"):
        quant.prepare(Around(**settings).eval(), X, Recipe({"attention.*": None}))


@pytest.mark.parametrize("case", ["plain", "weights", "padded", "decoder"])
def test_a_saved_file_gives_the_same(case: str, tmp_path: Path) -> None:
    _, q, kwargs = converted(case)
    quant.save(q, tmp_path / "q.q8")
    with torch.no_grad():
        assert torch.equal(first(quant.load(tmp_path / "q.q8", model=CASES[case][0])(**kwargs)), first(q(**kwargs)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_exports_and_traces() -> None:
    _, q, kwargs = converted("encoder")
    with torch.no_grad():
        assert torch.equal(torch.export.export(q, (), kwargs).module()(**kwargs), q(**kwargs))
        assert torch.equal(torch.jit.trace(q, (kwargs["src"],))(kwargs["src"]), q(**kwargs))


def test_other_lengths_and_batches() -> None:
    _, q, _ = converted("encoder")
    x = seeded(1, 17, WIDTH)
    with torch.no_grad():
        assert error(q(x), CASES["encoder"][0](x)) < 0.03


def test_the_attention_can_be_called_by_itself() -> None:
    model, _ = CASES["plain"]
    _, q, _ = converted("plain")
    with torch.no_grad():
        x = model.before(X)  # type: ignore[operator]
        y, weights = q.attention(x, x, x)  # type: ignore[operator]
        expected, scores = model.attention(x, x, x)  # type: ignore[operator]
        assert error(y, expected) < 0.05
        assert error(weights, scores) < 0.05


def test_weights_are_dropped_in_training_mode() -> None:
    model = Around(dropout=0.9).eval()
    q = quant.quantize_static(model, [X], progress=False)
    trained = quant.prepare_qat(model, X)
    trained.train()(X)
    trained.eval()
    for one in (q, trained):
        with torch.no_grad():
            assert error(one.train()(X), one(X)) > 0.5
            assert error(one.eval()(X), one(X)) == 0.0


def test_the_projections_train() -> None:
    trained = quant.prepare_qat(Around("causal"), X).train()
    trained(X).square().mean().backward()
    assert [name for name, one in trained.named_parameters() if one.grad is None] == []
    trained.eval()
    q = quant.convert(trained)
    assert quant.parity(trained, q, [X]).holds


@pytest.mark.parametrize("case", ["plain", "encoder"])
def test_another_rank_than_captured_runs_by_the_own_forward(case: str) -> None:
    _, q, _ = converted(case)
    with torch.no_grad():
        with pytest.warns(UncapturedCall, match="was of 3 dimensions in example_inputs and is of 2 now"):
            got = q(X[0])
        assert error(got, CASES[case][0](X[0])) < 0.03
