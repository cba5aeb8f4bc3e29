"""quantize_dynamic: what is replaced, what stays the user's, and that nothing happens silently or by halves."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quant.kernels import dispatch, ops
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import quant
from quant import NothingQuantized, QConfig, Recipe, RecipeError, quantize_dynamic, summary
from quant.nn import QuantModule
from quant.nn.registry import supported

pytestmark = pytest.mark.usefixtures("seeded_on_one_thread")

ROOTS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "Linear": (lambda: nn.Linear(6, 5), (torch.ones(2, 6),)),
    "LSTM": (lambda: nn.LSTM(6, 5, 2), (torch.ones(3, 2, 6),)),
    "GRU": (lambda: nn.GRU(6, 5), (torch.ones(3, 2, 6),)),
    "RNN": (lambda: nn.RNN(6, 5), (torch.ones(3, 2, 6),)),
    "LSTMCell": (lambda: nn.LSTMCell(6, 5), (torch.ones(2, 6),)),
    "GRUCell": (lambda: nn.GRUCell(6, 5), (torch.ones(2, 6),)),
    "RNNCell": (lambda: nn.RNNCell(6, 5), (torch.ones(2, 6),)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(6, 2), (torch.ones(3, 2, 6),) * 3),
    "Embedding": (lambda: nn.Embedding(9, 6), (torch.tensor([1, 2]),)),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(9, 6), (torch.tensor([[1, 2]]),)),
}
ROOT = pytest.mark.parametrize("kind", ROOTS)


def first(output: Any) -> Tensor:
    tensor = output[0] if isinstance(output, tuple) else output
    assert isinstance(tensor, Tensor)
    return tensor


class Block(nn.Module):
    """A bit of everything, at several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Sequential(OrderedDict(norm=nn.LayerNorm(8), fc=nn.Linear(8, 4)))

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.rnn(self.embed(tokens))[0])
        return y


class LanguageModel(nn.Module):
    """An embedding and a head of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 30)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed(tokens))
        return y


def snapshot(model: nn.Module) -> dict[str, Any]:
    """What must not change: modules by identity and every tensor by value."""
    return {
        "modules": {name: id(module) for name, module in model.named_modules(remove_duplicate=False)},
        "types": [type(module) for module in model.modules()],
        "state": {name: value.clone() for name, value in model.state_dict().items() if value.device.type != "meta"},
        "attributes": [sorted(module.__dict__) for module in model.modules()],
    }


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(model)
    state, old = after.pop("state"), {**before}
    old_state = old.pop("state")
    assert after == old
    assert state.keys() == old_state.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, old_state[name], rtol=0, atol=0, equal_nan=True)


# --- what is replaced -----------------------------------------------------------------------------------------------


def test_every_supported_type_is_tested_as_a_root() -> None:
    assert set(ROOTS) == {base.__name__ for base in supported() if base.__module__.startswith("torch.")}


@ROOT
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_the_root_is_quantised_as_any_child_is(kind: str, inplace: bool) -> None:
    make, arguments = ROOTS[kind]
    module = make().eval()
    before = snapshot(module)
    quantized = quantize_dynamic(module, inplace=inplace)
    assert isinstance(quantized, QuantModule)
    assert_unchanged(module, before)
    assert [(entry.name, entry.type, entry.outcome) for entry in summary(quantized)] == [("", kind, "int8")]
    child = quantize_dynamic(nn.Sequential(OrderedDict(child=module)))
    assert torch.equal(first(child.child(*arguments)), first(quantized(*arguments)))


def test_names_and_structure_stay() -> None:
    model = Block().eval()
    quantized = quantize_dynamic(model)
    assert type(quantized) is Block
    assert [name for name, _ in quantized.named_children()] == ["embed", "rnn", "head"]
    assert [name for name, _ in quantized.head.named_children()] == ["norm", "fc"]
    assert {type(module) for module in (quantized.embed, quantized.rnn, quantized.head.fc)} == {
        quant.nn.Embedding,
        quant.nn.LSTM,
        quant.nn.Linear,
    }
    assert [quantized.embed.layer_name, quantized.rnn.layer_name, quantized.head.fc.layer_name] == [
        "embed",
        "rnn",
        "head.fc",
    ]
    assert [child.layer_name for child in quantized.rnn.directions] == ["rnn.directions.0"]


def test_the_original_is_untouched_by_default_and_changed_in_place_when_asked() -> None:
    model = Block().eval()
    before = snapshot(model)
    quantized = quantize_dynamic(model)
    assert_unchanged(model, before)
    assert all(mine is not theirs for mine in quantized.parameters() for theirs in model.parameters())
    tokens = torch.tensor([[1, 2, 3]])
    expected = quantized(tokens)
    assert quantize_dynamic(model, inplace=True) is model
    assert torch.equal(model(tokens), expected)


def test_containers_of_every_kind_are_entered() -> None:
    model = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(2, 2)]), "sequence": nn.Sequential(nn.Linear(2, 2))})
    quantized = quantize_dynamic(model)
    assert isinstance(quantized["list"][0], QuantModule)
    assert isinstance(quantized["sequence"][0], QuantModule)


def test_train_and_eval_flags_stay() -> None:
    model = Block().train()
    model.rnn.eval()
    quantized = quantize_dynamic(model)
    assert quantized.training
    assert quantized.embed.training
    assert not any(module.training for module in quantized.rnn.modules())
    assert not any(module.training for module in quantize_dynamic(Block().eval()).modules())


# --- tied and shared ------------------------------------------------------------------------------------------------


def test_a_language_model_head_and_its_embedding_stay_one_tensor() -> None:
    model = LanguageModel().eval()
    quantized = quantize_dynamic(model)
    assert quantized.embed.q_weight is quantized.head.q_weight
    assert quantized.embed.scale is quantized.head.scale
    assert torch.equal(quantized.embed.weight, quantized.head.weight)
    tokens = torch.arange(30)
    assert torch.equal(quantized.embed(tokens), quantized.head.weight)
    real = model(tokens).detach()
    assert float((quantized(tokens) - real).norm() / real.norm()) < 0.03
    report = summary(quantized)
    assert "shares its weight with head" in report["embed"].detail
    assert report.bytes_before == sum(parameter.numel() * 4 for parameter in model.parameters())
    assert report.bytes_after == 30 * 8 + 30 * 4 + 30 * 4  # weight, scales and bias, each once


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: quantize_dynamic(model, Recipe({"extra": None}))])
def test_ties_survive_copies_and_a_second_call(way: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(OrderedDict(lm=quantize_dynamic(LanguageModel()), extra=nn.Identity(), fc=nn.Linear(2, 2)))
    again = way(model)
    assert again.lm.embed.q_weight is again.lm.head.q_weight


def test_tied_linears_share_a_weight_and_keep_their_biases() -> None:
    model = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 6), "c": nn.Linear(6, 6, bias=False)})
    model["b"].weight = model["c"].weight = model["a"].weight
    quantized = quantize_dynamic(model)
    assert quantized["a"].q_weight is quantized["b"].q_weight is quantized["c"].q_weight
    assert torch.equal(quantized["b"].bias, model["b"].bias)
    assert quantized["c"].bias is None


def test_tied_tables_share_their_rows() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(9, 4, padding_idx=1), "b": nn.Embedding(9, 4), "c": nn.EmbeddingBag(9, 4)})
    model["b"].weight = model["c"].weight = model["a"].weight
    quantized = quantize_dynamic(model, Recipe(default=QConfig(weight_bits=4)))
    assert quantized["a"].rows is quantized["b"].rows is quantized["c"].rows
    assert [quantized["a"].padding_idx, quantized["b"].padding_idx] == [1, None]
    assert summary(quantized).bytes_before == 9 * 4 * 4
    assert summary(quantized).bytes_after == 9 * (2 + 4)


def test_tied_layers_with_different_settings_are_an_error_that_names_both() -> None:
    with pytest.raises(RecipeError, match=r"layer 'embed'.*also that of 'head'.*weight_bits 4 here and 8 there"):
        quantize_dynamic(LanguageModel(), Recipe({"embed": QConfig(weight_bits=4)}))


def test_a_tied_layer_that_stays_float_keeps_the_float_weight() -> None:
    model = LanguageModel()
    quantized = quantize_dynamic(model, Recipe({"head": None}))
    assert torch.equal(quantized.head.weight, model.head.weight)
    assert isinstance(quantized.embed, quant.nn.Embedding)


def test_one_module_under_two_names_stays_one() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Sequential(shared)})
    quantized = quantize_dynamic(model)
    assert quantized["a"] is quantized["b"] is quantized["c"][0]
    assert summary(quantized)["a"].detail.endswith("also b, c.0")
    assert len(summary(quantized)) == 1


def test_a_rule_may_name_a_shared_module_by_any_of_its_names() -> None:
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(4, 4)})
    quantized = quantize_dynamic(model, Recipe({"b": None}))
    assert quantized["a"] is quantized["b"]
    assert type(quantized["a"]) is nn.Linear
    assert isinstance(quantized["c"], QuantModule)


# --- what stays the user's ------------------------------------------------------------------------------------------


@ROOT
def test_forward_hooks_and_pre_hooks_stay(kind: str) -> None:
    make, arguments = ROOTS[kind]
    module, seen = make().eval(), []
    module.register_forward_pre_hook(lambda module, inputs: seen.append("pre"))
    module.register_forward_pre_hook(lambda module, inputs, named: seen.append(sorted(named)), with_kwargs=True)
    module.register_forward_hook(lambda module, inputs, output: seen.append(type(module).__module__))
    module.register_forward_hook(lambda module, inputs, named, output: seen.append("named"), with_kwargs=True)
    module.register_forward_hook(lambda module, inputs, output: seen.append("always"), always_call=True)
    quantized = quantize_dynamic(nn.Sequential(OrderedDict(child=module))).child
    quantized(*arguments)
    assert seen == ["pre", [], type(quantized).__module__, "named", "always"]


def test_a_hook_that_changes_the_output_still_does_and_its_handle_removes_it_in_place() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    handle = model[0].register_forward_hook(lambda module, inputs, output: output * 0)
    quantized = quantize_dynamic(model, inplace=True)
    assert float(quantized(torch.ones(1, 3)).abs().max()) == 0.0
    handle.remove()
    assert float(quantized(torch.ones(1, 3)).abs().max()) > 0.0


def test_state_dict_hooks_stay() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_state_dict_post_hook(lambda module, state, prefix, meta: state.update({f"{prefix}mark": 1}))
    assert quantize_dynamic(model).state_dict()["0.mark"] == 1


def test_keyword_arguments_are_called_as_the_float_modules_name_them() -> None:
    x = torch.ones(3, 2, 6)
    quantize_dynamic(nn.Linear(6, 5))(input=x)
    quantize_dynamic(nn.LSTM(6, 5))(input=x, hx=(torch.zeros(1, 2, 5), torch.zeros(1, 2, 5)))
    quantize_dynamic(nn.GRUCell(6, 5))(input=x[0], hx=torch.zeros(2, 5))
    quantize_dynamic(nn.MultiheadAttention(6, 2))(query=x, key=x, value=x, need_weights=False)
    quantize_dynamic(nn.EmbeddingBag(9, 4, mode="sum"))(
        input=torch.tensor([1, 2]), offsets=torch.tensor([0]), per_sample_weights=torch.ones(2)
    )


READ: dict[str, list[str]] = {
    "Linear": ["in_features", "out_features", "weight", "bias"],
    "LSTM": [
        "input_size hidden_size num_layers bias batch_first dropout bidirectional proj_size mode",
        "weight_ih_l0 weight_hh_l0 bias_ih_l0 bias_hh_l0 weight_ih_l1 weight_hh_l1 bias_ih_l1 bias_hh_l1",
    ],
    "GRU": ["input_size hidden_size num_layers mode weight_ih_l0 weight_hh_l0 bias_ih_l0 bias_hh_l0"],
    "RNN": ["input_size hidden_size nonlinearity mode weight_ih_l0 weight_hh_l0 bias_ih_l0 bias_hh_l0"],
    "LSTMCell": ["input_size hidden_size bias weight_ih weight_hh bias_ih bias_hh"],
    "GRUCell": ["input_size hidden_size bias weight_ih weight_hh bias_ih bias_hh"],
    "RNNCell": ["input_size hidden_size bias nonlinearity weight_ih weight_hh bias_ih bias_hh"],
    "MultiheadAttention": [
        "embed_dim kdim vdim num_heads head_dim dropout batch_first add_zero_attn bias_k bias_v",
        "in_proj_weight in_proj_bias q_proj_weight k_proj_weight v_proj_weight",
    ],
    "Embedding": ["num_embeddings embedding_dim padding_idx max_norm norm_type scale_grad_by_freq sparse weight"],
    "EmbeddingBag": ["num_embeddings embedding_dim padding_idx max_norm mode include_last_offset sparse weight"],
}


def assert_reads_alike(module: nn.Module, quantized: nn.Module, names: str) -> None:
    for name in names.split():
        mine, theirs = getattr(quantized, name), getattr(module, name)
        if isinstance(theirs, Tensor):
            assert mine.shape == theirs.shape, name
            assert mine.dtype == torch.float32, name
            # Half a step of 254 over a row, or nothing for what stays float.
            assert float((mine - theirs).detach().abs().max()) <= float(theirs.detach().abs().max()) / 250, name
        else:
            assert mine == theirs, name


@ROOT
def test_attributes_that_other_code_reads(kind: str) -> None:
    module = ROOTS[kind][0]()
    quantized = quantize_dynamic(module)
    for names in READ[kind]:
        assert_reads_alike(module, quantized, names)


def test_attributes_of_the_rarer_recurrent_networks() -> None:
    module = nn.LSTM(6, 5, 2, bidirectional=True, proj_size=3)
    quantized = quantize_dynamic(module)
    assert_reads_alike(module, quantized, " ".join(name for name, _ in module.named_parameters()))
    plain = quantize_dynamic(nn.LSTM(6, 5, 2, bias=False))
    for absent in ("weight_ih_l2", "weight_ih_l0_reverse", "bias_ih_l0", "weight_hr_l0", "weight_ih_lx", "nothing"):
        assert not hasattr(plain, absent), absent


def test_attributes_of_separate_projections() -> None:
    module = nn.MultiheadAttention(6, 2, kdim=4, vdim=5, add_bias_kv=True)
    quantized = quantize_dynamic(module)
    assert_reads_alike(module, quantized, "q_proj_weight k_proj_weight v_proj_weight in_proj_bias bias_k bias_v")
    assert quantized.in_proj_weight is None
    assert_reads_alike(module.out_proj, quantized.out_proj, "weight bias in_features out_features")
    assert quantize_dynamic(nn.MultiheadAttention(6, 2, bias=False)).in_proj_bias is None


def test_attributes_buffers_and_modules_of_the_user_stay() -> None:
    layer = nn.Linear(3, 3)
    layer.tag, layer.notes = "mine", {"a": 1}
    layer.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]))
    layer.register_buffer("cache", torch.zeros(1), persistent=False)
    layer.probe = nn.Identity()
    layer.register_forward_hook(lambda module, inputs, output: output * module.mask)
    quantized = quantize_dynamic(nn.Sequential(layer))[0]
    assert (quantized.tag, quantized.notes) == ("mine", {"a": 1})
    assert isinstance(quantized.probe, nn.Identity)
    assert float(quantized(torch.ones(1, 3))[0, 1].detach()) == 0.0
    assert "mask" in quantized.state_dict()
    assert "cache" not in quantized.state_dict()


@pytest.mark.parametrize("as_buffer", [False, True], ids=["attribute", "buffer"])
def test_a_name_of_the_user_that_int8_needs_is_an_error_and_not_a_clash(as_buffer: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    if as_buffer:
        model[0].register_buffer("scale", torch.ones(1))
    else:
        model[0].scale = 0.5
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"layer '0' \(Linear\): its (attribute|buffer) 'scale' has a name"):
        quantize_dynamic(model, inplace=True)
    assert_unchanged(model, before)


@pytest.mark.parametrize("backend", ["", "reference"], ids=["default", "reference"])
def test_no_gradient_is_promised_that_is_not_given(backend: str) -> None:
    for kind in ("Linear", "LSTM", "GRUCell"):
        make, arguments = ROOTS[kind]
        x = arguments[0].clone().requires_grad_()
        assert not first(quantize_dynamic(make(), backend=backend)(x)).requires_grad


# --- nothing is silent ----------------------------------------------------------------------------------------------


def test_nothing_quantised_names_what_was_found_and_what_is_supported() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU(), nn.Conv2d(1, 1, 3))
    with pytest.raises(NothingQuantized) as caught:
        quantize_dynamic(model)
    message = str(caught.value)
    assert "Conv2d (2), ReLU (1)" in message
    assert all(base.__name__ in message for base in supported())
    assert isinstance(caught.value, ValueError)


def test_nothing_quantised_says_why_supported_modules_were_left() -> None:
    with pytest.raises(NothingQuantized, match="max_norm rewrites the rows"):
        quantize_dynamic(nn.Embedding(3, 3, max_norm=1.0))
    with pytest.raises(NothingQuantized, match="left float by rule 'fc' -> float"):
        quantize_dynamic(nn.Sequential(OrderedDict(fc=nn.Linear(2, 2))), Recipe({"fc": None}))
    with pytest.raises(NothingQuantized, match="left float by the recipe's default"):
        quantize_dynamic(nn.Linear(2, 2), Recipe(default=None))
    scaled = type("Scaled", (nn.Linear,), {"forward": lambda self, x: 2 * nn.Linear.forward(self, x)})(2, 2)
    with pytest.raises(NothingQuantized, match="were left: Scaled overrides Linear's forward, which int8 would skip"):
        quantize_dynamic(nn.Sequential(nn.Conv1d(2, 2, 1), scaled))


def test_already_quantised() -> None:
    quantized = quantize_dynamic(nn.Sequential(OrderedDict(fc=nn.Linear(2, 2))))
    before = snapshot(quantized)
    with pytest.raises(NothingQuantized, match="already quantised: fc; no other module can be"):
        quantize_dynamic(quantized)
    with pytest.raises(NothingQuantized, match=r"already quantised: \(root\)"):
        quantize_dynamic(quantized.fc, inplace=True)
    assert_unchanged(quantized, before)


def test_a_second_call_takes_the_rest_and_remembers_the_first() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 4))
    half = quantize_dynamic(model, Recipe({"1": None, "0": QConfig(weight_bits=4)}))
    whole = quantize_dynamic(half)
    assert whole[0].weight.unique().numel() <= 15 * 4
    assert summary(whole)["0"] == summary(half)["0"]
    assert [entry.outcome for entry in summary(whole)] == ["int4", "int8"]


def test_a_rule_that_hits_nothing_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"rule 'decoder\.\*' -> float matches no module of Block; its modules are"):
        quantize_dynamic(Block(), Recipe({"decoder.*": None}))
    with pytest.raises(RecipeError, match=r"rule GRU -> .*matches no module"):
        quantize_dynamic(Block(), Recipe({nn.GRU: QConfig()}))


def test_a_rule_for_a_type_that_cannot_be_quantised_is_an_error() -> None:
    with pytest.raises(
        RecipeError, match=r"'head.norm' \(LayerNorm\), which cannot be quantised .*supported are Linear"
    ):
        quantize_dynamic(Block(), Recipe({nn.LayerNorm: QConfig()}))
    with pytest.raises(RecipeError, match=r"'head' \(Sequential\)"):
        quantize_dynamic(Block(), Recipe({"head": QConfig()}))


def test_a_rule_for_a_part_of_a_whole_is_an_error() -> None:
    model = nn.Sequential(OrderedDict(attention=nn.MultiheadAttention(4, 2), fc=nn.Linear(4, 4)))
    for settings in (None, QConfig()):
        with pytest.raises(RecipeError, match=r"only parts of modules that are quantised as a whole: 'attention\.out_"):
            quantize_dynamic(model, Recipe({"*.out_proj": settings}))
    # A rule that means more than the part is about the rest.
    quantized = quantize_dynamic(model, Recipe({nn.Linear: None}))
    assert type(quantized.fc) is nn.Linear
    assert isinstance(quantized.attention.out_proj, QuantModule)


def test_a_rule_for_the_projection_of_an_attention_that_stays_float_is_an_error() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    with pytest.raises(RecipeError, match=r"'0\.out_proj' \(NonDynamicallyQuantizableLinear\), which cannot be"):
        quantize_dynamic(model, Recipe({nn.MultiheadAttention: None, "*.out_proj": QConfig()}))


@pytest.mark.parametrize("bits", [5, 6, 7], ids=lambda bits: f"{bits}bits")
def test_table_bits_that_do_not_exist_name_layer_and_rule(bits: int) -> None:
    with pytest.raises(
        RecipeError, match=rf"layer 'embed' \(Embedding\): tables have 8, 4, 3 or 2 bits, rule Embedding.*{bits}$"
    ):
        quantize_dynamic(Block(), Recipe({nn.Embedding: QConfig(weight_bits=bits)}))
    with pytest.raises(RecipeError, match="the recipe's default asks for"):
        quantize_dynamic(Block(), Recipe(default=QConfig(weight_bits=bits)))


@pytest.mark.parametrize(
    "setting",
    [{"activation_observer": "histogram"}, {"activation_symmetric": True}],
    ids=str,
)
def test_settings_that_dynamic_quantisation_does_not_have(setting: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=rf"layer 'rnn' \(LSTM\): dynamic quantisation has no {next(iter(setting))}"):
        quantize_dynamic(Block(), Recipe({"rnn": QConfig(**setting)}))


def test_settings_reach_every_part_of_a_module() -> None:
    recipe = Recipe(default=QConfig(per_row=False, per_channel=False, activation_bits=8))
    for module in (nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2, kdim=3, vdim=5), nn.LSTM(4, 4, 2)):
        parts = [part for part in quantize_dynamic(module, recipe).modules() if hasattr(part, "per_row")]
        assert parts
        for part in parts:
            assert not part.per_row
            assert part.activation_bits == 8
            assert all(
                buffer.unique().numel() == 1 for name, buffer in part.named_buffers() if name.startswith("scale")
            )


def test_an_unknown_or_absent_backend_lists_the_choices() -> None:
    with pytest.raises(dispatch.BackendUnavailable, match="no backend is called 'cuda'; there are native, fbgemm"):
        quantize_dynamic(nn.Linear(2, 2), backend="cuda")
    with pytest.raises(dispatch.BackendUnavailable, match="no backend is called 'cuda'"):
        quantize_dynamic(nn.Linear(2, 2), Recipe(backend="cuda"))
    absent = next((name for name, reason in dispatch.available().items() if reason), None)
    if absent is None:
        pytest.skip("every backend can be used on this machine")
    with pytest.raises(dispatch.BackendUnavailable, match=f"'{absent}' cannot be used here: .*usable are"):
        quantize_dynamic(nn.Linear(2, 2), backend=absent)


def test_the_backend_that_is_asked_for_reaches_every_layer_and_the_report() -> None:
    quantized = quantize_dynamic(Block(), Recipe(backend="onednn"), backend="reference")
    names = {part.backend for part in quantized.modules() if isinstance(part, QuantModule)}
    assert names == {"reference"}
    assert ", reference (exact)" in summary(quantized)["rnn"].detail
    assert {part.backend for part in quantize_dynamic(Block()).modules() if isinstance(part, QuantModule)} == {""}


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class NoForward(nn.Linear):
    """A subclass that adds nothing to what is computed."""


class OwnAttention(nn.MultiheadAttention):
    def forward(self, *arguments: Any, **named: Any) -> Any:
        return super().forward(*arguments, **named)


def test_a_subclass_with_its_own_forward_stays_float_and_the_report_says_so() -> None:
    model = nn.Sequential(OwnForward(3, 3), NoForward(3, 3), OwnAttention(4, 2))
    quantized = quantize_dynamic(model)
    assert [type(module).__module__.partition(".")[0] == "quant" for module in quantized] == [False, True, False]
    assert summary(quantized)["0"].detail == "OwnForward overrides Linear's forward, which int8 would skip"
    assert (summary(quantized)["1"].type, summary(quantized)["1"].outcome) == ("NoForward", "int8")
    # Nor is the projection inside quantised, whose weight the attention reads without calling it.
    assert summary(quantized)["2.out_proj"].outcome == "float"


def test_a_forward_that_was_replaced_on_the_object_stays() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].forward = lambda input: input * 0  # type: ignore[method-assign]
    quantized = quantize_dynamic(model)
    assert float(quantized[0](torch.ones(1, 3)).abs().max()) == 0.0
    assert "its forward was replaced on the object" in summary(quantized)["0"].detail


def weight_norm(module: nn.Linear) -> nn.Linear:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(module)


COMPUTED: dict[str, Callable[[nn.Linear], Any]] = {
    "weight_norm": weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda module: prune.random_unstructured(module, "weight", amount=0.5),
    "parametrized_weight_norm": parametrizations.weight_norm,
    "parametrized_spectral_norm": parametrizations.spectral_norm,
}


@pytest.mark.parametrize("kind", COMPUTED)
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_a_weight_that_torch_computes_at_every_call_is_quantised(kind: str, inplace: bool) -> None:
    layer = nn.Linear(4, 4)
    COMPUTED[kind](layer)
    model = nn.Sequential(layer, nn.Linear(4, 4)).eval()
    x = torch.ones(1, 4)
    expected = model(x).detach()
    quantized = quantize_dynamic(model, inplace=inplace)
    assert all(isinstance(one, QuantModule) for one in quantized)
    assert float((quantized(x) - expected).norm() / expected.norm()) < 0.02
    assert type(layer).forward is not None
    assert torch.equal(nn.Sequential(layer)(x), layer(x))  # the user's own layer is what it was
    assert summary(quantized)["0"].type in ("Linear", "ParametrizedLinear")


def test_a_weight_that_a_hook_of_the_users_computes_stays_float() -> None:
    layer = nn.Linear(4, 4)
    del layer._parameters["weight"]
    layer.raw = nn.Parameter(torch.randn(4, 4))
    layer.register_forward_pre_hook(lambda module, args: setattr(module, "weight", module.raw * 2.0))
    layer(torch.ones(1, 4))
    with pytest.raises(NothingQuantized, match="at every call"):
        quantize_dynamic(layer)


def test_a_computed_weight_of_a_recurrent_network_is_quantised() -> None:
    layer = nn.GRU(4, 4)
    nn.utils.spectral_norm(layer, "weight_hh_l0")
    x = torch.randn(5, 2, 4)
    expected = layer.eval()(x)[0].detach()
    got = quantize_dynamic(layer)(x)[0]
    assert float((got - expected).norm() / expected.norm()) < 0.02


def test_made_permanent_it_is_quantised() -> None:
    layer = parametrizations.weight_norm(nn.Linear(4, 4))
    parametrize.remove_parametrizations(layer, "weight")
    assert isinstance(quantize_dynamic(layer), QuantModule)
    prune.remove(prune.random_unstructured(layer, "weight", amount=0.5), "weight")
    assert isinstance(quantize_dynamic(layer), QuantModule)


def test_lazy_modules_are_named_and_work_once_they_are_initialised() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
    quantized = quantize_dynamic(model)
    assert "run one batch first" in summary(quantized)["0"].detail
    assert quantized(torch.ones(2, 5)).shape == (2, 3)
    model(torch.ones(2, 5))
    assert len(summary(quantize_dynamic(model)).quantized) == 2


def test_max_norm_and_empty_tables_stay_float() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(4, 4, max_norm=1.0), "b": nn.EmbeddingBag(4, 4, max_norm=1.0)})
    model["c"], model["d"] = nn.Embedding(0, 4), nn.Linear(2, 2)
    report = summary(quantize_dynamic(model))
    assert ["max_norm" in report[name].detail for name in "ab"] == [True, True]
    assert report["c"].detail == "the table is empty"


# --- errors change nothing ------------------------------------------------------------------------------------------


def poisoned(name: str, value: float) -> Block:
    model = Block()
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] = value
    return model


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize(
    "name", ["embed.weight", "rnn.weight_hh_l0", "rnn.bias_ih_l0", "head.fc.weight", "head.fc.bias"]
)
def test_weights_that_are_not_finite_are_named(name: str, value: float, inplace: bool) -> None:
    model = poisoned(name, value)
    before = snapshot(model)
    layer, _, parameter = name.rpartition(".")
    with pytest.raises(ValueError, match=rf"layer '{layer}' \(\w+\): {parameter} holds NaN or inf"):
        quantize_dynamic(model, inplace=inplace)
    assert_unchanged(model, before)


def test_weights_that_are_not_finite_do_not_matter_where_they_stay_float() -> None:
    quantized = quantize_dynamic(poisoned("head.fc.weight", float("nan")), Recipe({"head.*": None}))
    assert type(quantized.head.fc) is nn.Linear


WRONG: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "float64": (
        lambda: Block().double(),
        TypeError,
        r"layer 'embed' .*weight is torch.float64, .*model.float\(\) first",
    ),
    "double_root": (
        lambda: nn.GRU(3, 3).double(),
        TypeError,
        r"layer '\(root\)' \(GRU\): weight_ih_l0 is torch.float64",
    ),
    "meta": (lambda: Block().to("meta"), TypeError, r"layer 'embed' .*is on the meta device and has no values"),
    "not_a_module": (lambda: torch.nn.functional.relu, TypeError, "expected an nn.Module, got"),  # type: ignore[dict-item, return-value]
    "table_beyond_float16": (lambda: huge_table(), ValueError, r"layer '0' \(Embedding\): a row's range does not fit"),
}


def huge_table() -> nn.Module:
    model = nn.Sequential(nn.Embedding(3, 3))
    nn.init.constant_(model[0].weight, 1e6)
    return model


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_models_are_refused_by_name_and_unchanged(kind: str) -> None:
    make, error, message = WRONG[kind]
    model = make()
    before = snapshot(model) if isinstance(model, nn.Module) else None
    recipe = Recipe(default=QConfig(weight_bits=4)) if kind == "table_beyond_float16" else None
    for inplace in (False, True):
        with pytest.raises(error, match=message):
            quantize_dynamic(model, recipe, inplace=inplace)
    if before is not None:
        assert_unchanged(model, before)


def test_an_error_in_the_last_layer_leaves_the_first_float() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].columns = "mine"
    before = snapshot(model)
    with pytest.raises(ValueError, match="'columns'"):
        quantize_dynamic(model, inplace=True)
    assert_unchanged(model, before)


def test_a_recipe_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a quant\.Recipe, got dict"):
        quantize_dynamic(nn.Linear(2, 2), {"": None})  # type: ignore[arg-type]


def test_a_missing_extension_is_announced_once() -> None:
    if not ops.extension_problem():
        pytest.skip("the compiled kernels are loaded")
    assert dispatch.default_name() == "reference"
    assert ", reference (exact)" in summary(quantize_dynamic(nn.Linear(2, 2)))[""].detail
