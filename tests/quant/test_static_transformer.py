"""Transformer blocks, statically: what is float between int8 layers runs in the planned call, as torch computes it."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from quant.kernels import ops as kernel_ops
from quant.kernels import use
from quant.kernels.backends.compiled import CompiledBackend
from torch import Tensor, nn

import quant
from quant.runtime.programs import RESERVED
from quant.static.native import Schedule

needs_kernels = pytest.mark.skipif(bool(kernel_ops.extension_problem()), reason="the compiled kernels are not here")


class Block(nn.Module):
    """A post-norm block; `kind` says how it differs from the plain one."""

    def __init__(self, kind: str = "plain", width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.kind, self.heads = kind, heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm, self.norm_after = nn.LayerNorm(width), nn.LayerNorm(width, bias=False)
        self.body = nn.Sequential(nn.Linear(width, 80), nn.GELU(), nn.Linear(80, width))
        self.drop = nn.Dropout(0.5)

    def mask(self, x: Tensor) -> Tensor | None:
        if self.kind == "forbidden":
            seen = torch.arange(x.shape[1]) < torch.arange(x.shape[1])[:, None]  # none for the first query
            return seen.expand(x.shape[0], 1, -1, -1)
        return self.k(x).mean(-1)[:, None, None, :] if self.kind == "masked" else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, self.mask(x), is_causal=self.kind == "causal")
        seen = self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        if self.kind == "pre-norm":
            x = x + seen
            return x + self.body(self.norm(x))
        if self.kind == "in place":
            x = x.clone()
            x.mul_(2.0)
        x = self.norm(x + seen)
        return self.norm_after(x + self.body(x))


KINDS = ["plain", "pre-norm", "causal", "masked", "forbidden", "in place"]
X = torch.randn(2, 10, 48, generator=torch.Generator().manual_seed(1))


def converted(kind: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(kind), Block(kind)).eval()
    return model, quant.quantize_static(model, [X, X * 0.9], progress=False)


def schedule(model: nn.Module) -> Schedule:
    runner: Any = model._modules[RESERVED]
    found: Schedule = runner.program.schedule
    return found


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 10), (1, 17)], ids=str)
def test_planned_is_step_by_step_to_the_bit_and_near_float(kind: str, shape: tuple[int, int]) -> None:
    model, q = converted(kind)
    x = torch.randn(*shape, 48, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        got = q(x)
        with mock.patch.object(CompiledBackend, "plans", False):
            assert torch.equal(q(x), got)
        with use("reference"):
            assert error(got, q(x)) < 0.01
        assert error(got, model(x)) < 0.04


def test_a_block_without_a_mask_is_one_call() -> None:
    made = schedule(converted("plain")[1])
    assert [type(step).__name__ for step in made.steps] == ["Region"]


def names(kind: str) -> set[str]:
    """The steps that run by themselves."""
    return {getattr(step, "step", "") for step in schedule(converted(kind)[1]).steps}


def test_masks_are_planned() -> None:
    for kind in ("masked", "forbidden"):
        assert not any("attention" in name for name in names(kind))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 48)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        x = self.layer(x)
        return F.scaled_dot_product_attention(x, x, x, mask)


BOOLEANS = torch.ones(2, 10, 10, dtype=torch.bool).tril()
REALS = torch.zeros(2, 10, 10).masked_fill(~BOOLEANS, -2.0)


@pytest.mark.parametrize(("captured", "given"), [(BOOLEANS, REALS), (REALS, BOOLEANS)], ids=["reals", "booleans"])
def test_masks_of_the_other_kind_than_captured(captured: Tensor, given: Tensor) -> None:
    model = Masked().eval()
    q = quant.quantize_static(model, [(X, captured)], progress=False)
    with torch.no_grad():
        for mask in (captured, given):
            assert float((q(X, mask) - model(X, mask)).norm() / model(X, mask).norm()) < 0.03
        with pytest.raises((RuntimeError, TypeError, ValueError), match=r"[Ll]ong|int64"):
            q(X, BOOLEANS.long())


def test_writes_to_tensors_of_the_forward_leave_views_planned() -> None:
    assert any("mul" in name for name in names("in place"))
    assert not any(view in name for view in ("flatten", "transpose") for name in names("in place"))


class WritesThroughAView(nn.Module):
    """Doubles its input where it lies, by a view that is computed between float steps with native forms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(48, 48), nn.LayerNorm(48), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        turned = x.transpose(1, 2)
        h = self.norm(h + turned.transpose(1, 2))
        turned.mul_(2.0)
        return self.last(h)


def test_a_write_through_a_view_reaches_the_callers_tensor() -> None:
    model = WritesThroughAView().eval()
    q = quant.quantize_static(model, [X.clone()], progress=False)
    given = X.clone()
    with torch.no_grad():
        got, expected = q(given), model(X.clone())
    assert torch.equal(given, 2 * X)
    assert error(got, expected) < 0.04


class NormFirst(nn.Sequential):
    """Begins with what is float, so that no int8 layer is there to refuse its input."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(48), nn.Linear(48, 48))


@needs_kernels
def test_an_input_of_another_type_is_refused_by_the_name_of_what_reads_it() -> None:
    q = quant.quantize_static(NormFirst().eval(), [X], progress=False)
    with torch.no_grad(), pytest.raises(TypeError, match=r"^layer '0' \(%1\): run_plan: an input is Double"):
        q(X.double())


def test_hooks_of_a_norm_run() -> None:
    _, q = converted("plain")
    seen: list[Tensor] = []
    with torch.no_grad():
        before = q(X)
        handle = q[0].norm.register_forward_hook(lambda module, args, output: seen.append(output))  # type: ignore[index, union-attr]
        hooked = q(X)
        handle.remove()
        assert len(seen) == 1
        assert error(hooked, before) < 0.01
        assert torch.equal(q(X), before)


def test_a_norm_that_changes_is_seen() -> None:
    _, q = converted("plain")
    with torch.no_grad():
        before = q(X)
        twin = copy.deepcopy(q)
        twin[1].norm_after.weight.mul_(2.0)  # type: ignore[index, union-attr, operator]
        assert error(twin(X), 2 * before) < 1e-6
        twin[1].norm_after = nn.Identity()  # type: ignore[index, assignment]
        assert not torch.equal(twin(X), 2 * before)
        assert torch.equal(q(X), before)


def _a_new_norm(block: Any) -> None:
    block.norm = nn.LayerNorm(48).eval()
    nn.init.normal_(block.norm.weight)


def _a_new_weight(block: Any) -> None:
    block.norm.weight = nn.Parameter(torch.randn(48))


def _an_eps(block: Any) -> None:
    block.norm.eps = 10.0


def _a_hook(block: Any) -> None:
    block.norm.register_forward_pre_hook(lambda module, args: (args[0] * 0.0,))


def _a_new_int8_layer(block: Any) -> None:
    block.out = copy.deepcopy(block.out)
    block.out.weight_scale.mul_(2.0)
    block.out.derive()


def _a_loaded_state(block: Any) -> None:
    block.load_state_dict(
        {name: one * 2 if one.dtype == torch.float32 else one for name, one in block.state_dict().items()}
    )


CHANGES = (_a_new_norm, _a_new_weight, _an_eps, _a_hook, _a_new_int8_layer, _a_loaded_state)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_since_the_last_call_is_seen(change: Any) -> None:
    _, q = converted("plain")
    with torch.no_grad():
        before = q(X)
        q[0] = copy.deepcopy(q[0])  # type: ignore[operator, index]
        assert torch.equal(q(X), before)
        change(q[0])  # type: ignore[index]
        changed = q(X)
        assert error(changed, before) > 0.01
        with mock.patch.object(CompiledBackend, "plans", False):
            assert torch.equal(q(X), changed)


def test_dropout_acts_in_training_mode() -> None:
    _, q = converted("plain")
    with torch.no_grad():
        before = q(X)
        q.train()
        assert not torch.equal(q(X), before)
        q.eval()
        assert torch.equal(q(X), before)


@needs_kernels
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_exported_graph_takes_any_length() -> None:
    _, q = converted("plain")
    with torch.no_grad():
        q(X)
        dynamic = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
        graph = torch.export.export(q, (X,), dynamic_shapes=dynamic)
        x = torch.randn(3, 7, 48)
        assert torch.equal(graph.module()(x), q(x))


@needs_kernels
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_graph_gives_the_same() -> None:
    _, q = converted("causal")
    with torch.no_grad():
        q(X)
        graph = torch.jit.trace(q, (X,))
        assert torch.equal(graph(X), q(X))


@needs_kernels
def test_it_compiles_to_one_graph() -> None:
    _, q = converted("plain")
    with torch.no_grad():
        assert torch.equal(torch.compile(q, fullgraph=True, backend="eager")(X), q(X))


def test_a_saved_file_gives_the_same(tmp_path: Any) -> None:
    model, q = converted("pre-norm")
    quant.save(q, tmp_path / "block.q8")
    restored = quant.load(tmp_path / "block.q8", model=model)
    with torch.no_grad():
        assert torch.equal(restored(X), q(X))


def test_every_step_agrees_with_its_simulation() -> None:
    torch.manual_seed(0)
    prepared = quant.prepare(Block().eval(), X)
    with torch.no_grad():
        prepared(X)
    assert quant.parity(prepared, quant.convert(prepared), [X]).holds
