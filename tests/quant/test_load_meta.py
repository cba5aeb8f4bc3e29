"""`quant.load` into a float model on the meta device: the same model, without the float weights' memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.artefact import ArtefactError, without_memory

from .test_artefact import TOKENS, Tagger, TiedTagger
from .test_artefact_static import CASES, MINMAX, Everything, made, same


def empty(make: Callable[[], nn.Module]) -> nn.Module:
    """The model on the meta device, with buffers that no file holds on the CPU."""
    with torch.device("meta"):
        model = make().eval()
    for name, buffer in made(make).named_buffers():
        owner, _, key = name.rpartition(".")
        if key in model.get_submodule(owner)._non_persistent_buffers_set:
            model.get_submodule(owner)._buffers[key] = buffer
    return model


def nothing_is_left(model: nn.Module) -> bool:
    lists = [one for part in model.modules() if isinstance(part, nn.RNNBase) for one in part._flat_weights]
    return not any(one.is_meta for one in (*model.parameters(), *model.buffers(), *lists) if one is not None)


@pytest.mark.parametrize("make", [Tagger, TiedTagger])
@pytest.mark.parametrize(
    "recipe",
    [
        None,
        quant.Recipe(default=quant.QConfig(weight_bits=4)),
        quant.Recipe({"encoder": None, "embedding": None, "cell": None, "head": None}),
    ],
    ids=["8 bits", "4 bits", "most float"],
)
def test_a_dynamic_model(make: type[Tagger], recipe: quant.Recipe | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    q = quant.quantize_dynamic(make().eval(), recipe)
    quant.save(q, tmp_path / "q")
    float_model = empty(make)
    loaded = quant.load(tmp_path / "q", model=float_model)
    assert same(loaded(TOKENS), q(TOKENS))
    assert nothing_is_left(loaded)
    assert all(one.is_meta for one in float_model.parameters())  # the model is left as it was
    tied = any(len(names) > 1 for names in shared(q))
    assert any(len(names) > 1 for names in shared(loaded)) == tied
    quant.save(loaded, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "q").read_bytes()


def shared(model: nn.Module) -> list[list[str]]:
    """The names of each tensor of a model's state."""
    names: dict[int, list[str]] = {}
    for name, one in model.state_dict(keep_vars=True).items():
        names.setdefault(id(one), []).append(name)
    return list(names.values())


@pytest.mark.parametrize(
    ("case", "rules"),
    [*((case, {}) for case in CASES), ("everything", {"conv2": None, "rnn": None}), ("everything", {nn.Linear: None})],
)
@pytest.mark.parametrize("captured", [False, True], ids=["programs", "captured"])
def test_a_static_model(
    case: str, rules: dict[Any, None], captured: bool, tmp_path: Path, without_programs: Callable[[Path], None]
) -> None:
    make, x = CASES[case]
    q = quant.quantize_static(made(make), [x], quant.Recipe(rules, default=MINMAX), progress=False)
    quant.save(q, tmp_path / "q")
    if captured:
        without_programs(tmp_path / "q")
    loaded = quant.load(tmp_path / "q", model=empty(make))
    assert same(loaded(x), q(x))
    assert nothing_is_left(loaded)


def test_a_buffer_that_is_nowhere_is_named(tmp_path: Path) -> None:
    make, x = CASES["everything"]
    quant.save(quant.quantize_static(made(make), [x], quant.Recipe(default=MINMAX), progress=False), tmp_path / "q")
    with torch.device("meta"):
        model = Everything().eval()
    with pytest.raises(ArtefactError, match="does not fit the model: buffer 'offset' is on the meta device and not"):
        quant.load(tmp_path / "q", model=model)


def test_rotary_tables_are_computed_by_the_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=96
    )
    torch.manual_seed(0)
    q = quant.quantize_dynamic(transformers.LlamaForCausalLM(config).eval())
    quant.save(q, tmp_path / "q")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    loaded = quant.load(tmp_path / "q", model=model)
    tokens = torch.arange(12).reshape(2, 6)
    with torch.inference_mode():
        assert torch.equal(loaded(tokens).logits, q(tokens).logits)
    assert nothing_is_left(loaded)


class Computes(nn.Module):
    """A layer, and a table that the model computes, or cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.table

    def initialize_weights(self) -> None:
        self.table.copy_(torch.arange(8.0))


class WantsMore(Computes):
    def initialize_weights(self, gain: float) -> None:  # type: ignore[override]
        raise AssertionError("of another library, and not to be called")


@pytest.mark.parametrize("captured", [False, True], ids=["programs", "captured"])
@pytest.mark.parametrize("convert", ["dynamic", "static", "inner"])
def test_an_inner_module_computes_its_buffers(
    convert: str, captured: bool, tmp_path: Path, without_programs: Callable[[Path], None]
) -> None:
    x = torch.randn(4, 8)
    model: nn.Module = nn.Sequential(Computes().eval())
    if convert == "static":
        q = quant.quantize_static(model, [x], progress=False)
    elif convert == "inner":
        model[0] = quant.quantize_static(model[0], [x], progress=False)  # type: ignore[operator, index, arg-type]
        q = model
    else:
        q = quant.quantize_dynamic(model)
    quant.save(q, tmp_path / "q")
    if captured and convert != "dynamic":
        without_programs(tmp_path / "q")
    with torch.device("meta"):
        loaded = quant.load(tmp_path / "q", model=nn.Sequential(Computes().eval()))
    assert torch.equal(loaded(x), q(x))
    assert nothing_is_left(loaded)


def test_a_method_of_that_name_that_wants_arguments_is_not_called(tmp_path: Path) -> None:
    quant.save(quant.quantize_dynamic(WantsMore().eval()), tmp_path / "q")
    with torch.device("meta"):
        model = WantsMore().eval()
    with pytest.raises(ArtefactError, match="buffer 'table' is on the meta device and not"):
        quant.load(tmp_path / "q", model=model)


def test_an_attribute_without_values_is_named(tmp_path: Path) -> None:
    class Attribute(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 8))
            self.factor = torch.tensor(2.0)

    quant.save(quant.quantize_dynamic(Attribute().eval()), tmp_path / "q")
    with torch.device("meta"):
        model = Attribute().eval()
    with pytest.raises(
        ArtefactError, match="attribute 'factor' is a tensor on the meta device, whose values no file has"
    ):
        quant.load(tmp_path / "q", model=model)


def test_the_float_weights_are_never_all_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))

    given: list[weakref.ref[Tensor]] = []
    largest, zeros = 0, without_memory._zeros

    def counted(like: Tensor) -> Tensor:
        nonlocal largest
        new = zeros(like)
        given.append(weakref.ref(new))
        largest = max(largest, sum(one.numel() for one in (each() for each in given) if one is not None))
        return new

    monkeypatch.setattr(without_memory, "_zeros", counted)
    quant.save(quant.quantize_dynamic(made(make)), tmp_path / "q")
    quant.load(tmp_path / "q", model=empty(make))
    assert len(given) == 16
    assert largest <= 2 * (256 + 1) * 256
