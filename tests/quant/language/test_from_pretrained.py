"""`OctetConfig` in `from_pretrained` and `save_pretrained`: the bits of quantize_dynamic, and the same from a file."""

from __future__ import annotations

import copy
import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import quant
from quant.shards import ShardError

from .models import EACH, EACH_BITS, SUBJECTS, Subject, transformers

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of on its own account

DTYPE = torch.bfloat16


def octet(subject: Subject, bits: int) -> Any:
    transformers()
    from quant.integrations.transformers_quantizer import OctetConfig

    return OctetConfig(recipe=subject.recipe(bits))


def assert_same(found: nn.Module, expected: nn.Module, subject: Subject) -> None:
    mine, others = found.state_dict(), expected.state_dict()
    assert mine.keys() == others.keys()
    for name in mine:
        assert mine[name].dtype is others[name].dtype, name
        assert torch.equal(mine[name], others[name]), name
    with torch.inference_mode():
        assert torch.equal(found(**subject.batch(DTYPE)).logits, expected(**subject.batch(DTYPE)).logits)


@EACH_BITS
@EACH
def test_loading_is_quantising_the_whole_and_saving_keeps_the_bits(subject: Subject, bits: int, tmp_path: Path) -> None:
    model = subject.make(DTYPE)
    model.save_pretrained(tmp_path / "float", max_shard_size="100KB")
    kind = type(model)
    q = kind.from_pretrained(tmp_path / "float", quantization_config=octet(subject, bits), dtype=DTYPE)
    whole = quant.quantize_dynamic(kind.from_pretrained(tmp_path / "float", dtype=DTYPE), subject.recipe(bits))
    assert_same(q, whole, subject)
    assert list(quant.summary(q)) == list(quant.summary(whole))
    q.save_pretrained(tmp_path / "int", max_shard_size="30KB")
    again = kind.from_pretrained(tmp_path / "int")
    assert_same(again, q, subject)
    assert list(quant.summary(again)) == list(quant.summary(q))
    assert again.config.quantization_config.to_recipe() == subject.recipe(bits)
    assert not any(parameter.requires_grad for name, parameter in again.named_parameters() if "proj.bias" in name)
    files = [load_file(file) for file in (tmp_path / "int").glob("*.safetensors")]
    distinct = {id(one): one.nbytes for one in q.state_dict(keep_vars=True).values()}
    assert sum(one.nbytes for file in files for one in file.values()) == sum(distinct.values())


def test_rules_leave_layers_float(tmp_path: Path) -> None:
    subject = SUBJECTS["llama_tied"]
    subject.make(DTYPE).save_pretrained(tmp_path)
    transformers()
    from quant.integrations.transformers_quantizer import OctetConfig

    config = OctetConfig(bits=4, group_size=64, rules={"lm_head": None, "*.0.mlp.*": quant.QConfig()})
    q = type(subject.make()).from_pretrained(tmp_path, quantization_config=config, dtype=DTYPE)
    report = quant.summary(q)
    outcomes = [report[name].outcome for name in ("lm_head", "model.embed_tokens", "model.layers.0.mlp.up_proj")]
    assert outcomes == ["float", "int4", "int8"]
    assert torch.equal(q.lm_head.weight, subject.make(DTYPE).lm_head.weight)
    q.save_pretrained(tmp_path / "again")
    assert_same(type(q).from_pretrained(tmp_path / "again"), q, subject)


def test_what_from_pretrained_refuses(tmp_path: Path) -> None:
    subject = SUBJECTS["llama"]
    model = subject.make(DTYPE)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="device_map puts the model on cuda:0, and int8 layers run on the CPU"):
        type(model).from_pretrained(tmp_path, quantization_config=octet(subject, 4), device_map="cuda:0")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = octet(subject, 4).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="are not of an int8 model that save_pretrained wrote; take it out"):
        type(model).from_pretrained(tmp_path)


def saved(subject: Subject, folder: Path, dtype: torch.dtype = DTYPE) -> nn.Module:
    """A model of 4 bits that `save_pretrained` has written there."""
    model = subject.make(dtype)
    model.save_pretrained(folder / "float")
    q: nn.Module = type(model).from_pretrained(folder / "float", quantization_config=octet(subject, 4), dtype=dtype)
    q.save_pretrained(folder)
    return q


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # qwen2's first parameter is the float32 bias of an int8 layer
def test_a_saved_model_loads_in_the_dtype_that_is_asked_for(name: str, tmp_path: Path) -> None:
    subject = SUBJECTS[name]
    q = saved(subject, tmp_path)
    for asked, dtype in (
        (None, DTYPE),
        ("auto", DTYPE),
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
    ):
        again = type(q).from_pretrained(tmp_path, **({} if asked is None else {"dtype": asked}))
        assert again.model.norm.weight.dtype is dtype
        assert again.model.layers[0].mlp.up_proj.dtype is dtype
        for key, tensor in q.state_dict().items():
            assert torch.equal(again.state_dict()[key].to(tensor.dtype), tensor), key
        with torch.inference_mode():
            logits = again(**subject.batch(dtype)).logits
            assert logits.dtype is dtype
            assert float((logits - q(**subject.batch(DTYPE)).logits).abs().max()) < 0.1 * float(logits.abs().max())


DAMAGED = {
    "cut off": '{"layers',
    "a list": "[]",
    "no tensors": '{"layers": {}}',
    "a number for a form": '{"layers": {}, "tensors": {"a": 5}, "report": []}',
    "a dtype that there is not": '{"layers": {}, "tensors": {"a": ["int9", [1]]}, "report": []}',
    "a layer without its class": '{"layers": {"lm_head": {}}, "tensors": {}, "report": []}',
    "another report": '{"layers": {}, "tensors": {}, "report": [{"a": 1}]}',
}


@pytest.mark.parametrize("header", DAMAGED.values(), ids=list(DAMAGED))
def test_a_damaged_header_is_named(header: str, tmp_path: Path) -> None:
    q, file = saved(SUBJECTS["llama"], tmp_path), tmp_path / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "octet": header})
    with pytest.raises(
        ShardError, match=r"model.safetensors has a damaged header 'octet' \(.*; load the file again, or"
    ):
        type(q).from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["llama_tied", "qwen2", "mixtral"])
def test_what_quantize_dynamic_and_load_quantized_give_is_saved(name: str, tmp_path: Path) -> None:
    subject = SUBJECTS[name]
    subject.make(DTYPE).save_pretrained(tmp_path / "float")
    model = type(subject.make()).from_pretrained(tmp_path / "float", dtype=DTYPE)
    q = quant.quantize_dynamic(model, subject.recipe(4))
    q.save_pretrained(tmp_path / "dynamic")
    again = type(model).from_pretrained(tmp_path / "dynamic")
    assert_same(again, q, subject)
    assert list(quant.summary(again)) == list(quant.summary(q))
    assert again.config.quantization_config.to_recipe() == subject.recipe(4)
    assert not hasattr(model.config, "quantization_config")
    if name == "mixtral":  # whose files have other names
        return
    with torch.device("meta"):
        bare = type(model)(model.config).eval().to(DTYPE)
    loaded = quant.load_quantized(bare, tmp_path / "float", subject.recipe(4))
    loaded.save_pretrained(tmp_path / "loaded")
    assert_same(type(model).from_pretrained(tmp_path / "loaded"), q, subject)  # rotary frequencies in float32, as here


def test_a_recipe_that_no_file_holds_is_not_saved(tmp_path: Path) -> None:
    model = SUBJECTS["llama"].make(DTYPE)
    q = quant.quantize_dynamic(model, quant.Recipe({nn.Embedding: None}))
    with pytest.raises(quant.RecipeError, match="only names have a form in JSON; name the layers, with wildcards"):
        q.save_pretrained(tmp_path)


def test_a_model_with_a_predicate_is_copied_and_pickled() -> None:
    subject = SUBJECTS["llama"]
    q = quant.quantize_dynamic(subject.make(), quant.Recipe({lambda _, module: isinstance(module, nn.Embedding): None}))
    config = q.hf_quantizer.quantization_config
    assert copy.deepcopy(q).hf_quantizer.quantization_config.to_recipe() is config.to_recipe()
    again = pickle.loads(pickle.dumps(q))
    assert_same(again, q, subject)
    for ask in (again.hf_quantizer.quantization_config.to_dict, again.hf_quantizer.quantization_config.to_recipe):
        with pytest.raises(quant.RecipeError, match="only names have a form in JSON"):
            ask()


def test_a_model_that_stays_float_is_not_marked() -> None:
    subject = SUBJECTS["llama"]
    both = nn.ModuleDict({"text": subject.make(), "head": nn.Linear(8, 8)})
    q = quant.quantize_dynamic(both, quant.Recipe({"text.*": None}))
    assert getattr(q["text"], "hf_quantizer", None) is None
    assert quant.quantize_dynamic(both)["text"].hf_quantizer is not None


def test_checkpoints_under_older_names_are_from_pretrained_s(tmp_path: Path) -> None:
    model = SUBJECTS["mixtral"].make(DTYPE)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        bare = type(model)(model.config).eval().to(DTYPE)
    with pytest.raises(
        ShardError, match=r"names of an older form .* from_pretrained\(.*quantization_config=OctetConfig"
    ):
        quant.load_quantized(bare, tmp_path)


def test_integers_that_a_saved_model_lacks_are_not_drawn_at_random(tmp_path: Path) -> None:
    subject = SUBJECTS["llama"]
    model = subject.make(DTYPE)
    model.save_pretrained(tmp_path / "float")
    q = type(model).from_pretrained(tmp_path / "float", quantization_config=octet(subject, 4))
    q.save_pretrained(tmp_path / "int")
    file = tmp_path / "int" / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
    save_file({name: one for name, one in load_file(file).items() if name != "lm_head.q_weight"}, file, metadata=header)
    with pytest.raises(ValueError, match="files lack 1 tensors of int8 layers, of q_weight; save the"):
        type(model).from_pretrained(tmp_path / "int")


def test_settings_beside_a_recipe_are_refused() -> None:
    kind = type(octet(SUBJECTS["llama"], 4))
    with pytest.raises(quant.RecipeError, match="a recipe has its own bits"):
        kind(bits=4, recipe=quant.Recipe())


def test_layers_that_the_checkpoint_lacks_are_not_drawn_at_random(tmp_path: Path) -> None:
    subject = SUBJECTS["llama"]
    model = subject.make(DTYPE)
    state = {name: one for name, one in model.state_dict().items() if not name.endswith("1.mlp.up_proj.weight")}
    model.save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model.layers.1.mlp.up_proj.weight, of layers to quantise"):
        type(model).from_pretrained(tmp_path, quantization_config=octet(subject, 4))


@pytest.mark.parametrize("name", ["llama_tied", "gemma2"])
def test_load_quantized_takes_what_transformers_writes(name: str, tmp_path: Path) -> None:
    subject = SUBJECTS[name]
    model = subject.make(DTYPE)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    with torch.device("meta"):
        bare = type(model)(model.config).eval().to(DTYPE)
    q = quant.load_quantized(bare, tmp_path, subject.recipe(4))
    assert_same(q, quant.quantize_dynamic(model, subject.recipe(4)), subject)


def test_a_folder_that_from_pretrained_reads_says_so(tmp_path: Path) -> None:
    subject = SUBJECTS["llama"]
    subject.make(DTYPE).save_pretrained(tmp_path / "float")
    kind = type(subject.make())
    q = kind.from_pretrained(tmp_path / "float", quantization_config=octet(subject, 4), dtype=DTYPE)
    q.save_pretrained(tmp_path / "int")
    with pytest.raises(ValueError, match="quantised, by octet; load it with transformers' from_pretrained"):
        quant.load_quantized(subject.make(), tmp_path / "int")


NO_FOLDER = "and from_pretrained would load the folder with random weights; write a file by quant.save"


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "in another model"])
def test_what_no_folder_holds_is_not_saved(wrapped: bool, tmp_path: Path) -> None:
    """`from_pretrained` would draw the weights at random, with a warning: of static models, and of those of a file."""
    subject = SUBJECTS["llama"]
    model, batch = subject.make(), subject.batch(torch.float32)
    float_model = nn.ModuleDict({"text": model, "head": nn.Linear(64, 64)}) if wrapped else model
    static = quant.quantize_static(
        Around(model) if wrapped else model, [batch], forward=lambda m, b: m(**b), progress=False
    )
    dynamic = quant.quantize_dynamic(float_model, subject.recipe(4))
    quant.save(dynamic, tmp_path / "q.safetensors")
    loaded = quant.load(tmp_path / "q.safetensors", model=float_model)
    for q, what in ((static, "is a static int8 model"), (loaded, "is a model of quant.load")):
        for one in (q, copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
            text: Any = one.text if wrapped and q is static else one["text"] if wrapped else one
            with pytest.raises(ValueError, match=f"save_pretrained: LlamaForCausalLM {what}, {NO_FOLDER}"):
                text.save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
    model.save_pretrained(tmp_path / "float")  # the float model is as it was


class Around(nn.Module):
    """A model of transformers in one of another class."""

    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        self.text = text

    def forward(self, **batch: Any) -> Any:
        return self.text(**batch).logits


def test_without_the_library_s_quantizer_nothing_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    subject = SUBJECTS["llama"]
    model = subject.make()
    monkeypatch.setitem(sys.modules, "quant.integrations.transformers_quantizer", None)  # as with transformers 4
    q = quant.quantize_dynamic(model)
    with pytest.raises(ValueError, match=f"holds int8 layers, which transformers reads from version 5 on, {NO_FOLDER}"):
        q.save_pretrained(tmp_path)


def test_a_model_of_another_library_is_not_saved(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

    class Net(nn.Module, hub.PyTorchModelHubMixin):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    model = Net().eval()
    for q in (quant.quantize_dynamic(model), quant.quantize_static(model, [torch.randn(4, 8)], progress=False)):
        with pytest.raises(ValueError, match=f"Net .*{NO_FOLDER}"):
            q.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)


def test_quant_imports_no_transformers() -> None:
    code = "import quant, sys; quant.load_quantized; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def alter_header(file: Path, alter: Callable[[dict[str, Any]], object]) -> None:
    """What the file has of ours is another."""
    with safe_open(file, "pt") as opened:
        metadata = dict(opened.metadata())
    header = json.loads(metadata["octet"])
    alter(header)
    save_file(load_file(file), file, {**metadata, "octet": json.dumps(header)})


LAYER = "model.layers.0.mlp.up_proj"
ALTERED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a form without a size": (
        lambda header: header["tensors"][f"{LAYER}.q_weight"][1].pop(),
        f"layer '{LAYER}' of the checkpoint is no int8 Linear: .*; load its files again",
    ),
    "a form beyond all memory": (
        lambda header: header["tensors"][f"{LAYER}.q_weight"].__setitem__(1, [2**62, 4, 8]),
        f"a damaged header 'octet' .*tensor '{LAYER}.q_weight' of shape .* is larger than any memory",
    ),
    "a setting that no layer has": (
        lambda header: header["layers"][LAYER]["inner"][""].update(forward=8),
        f"layer '{LAYER}' of the checkpoint, part '': setting 'forward' is not one of an int8 layer, got 8; load",
    ),
    "a part that it has not": (
        lambda header: header["layers"][LAYER]["inner"].update(more={"activation_bits": 8}),
        f"layer '{LAYER}' of the checkpoint, part 'more': .*; load its files again",
    ),
    "a report of another form": (
        lambda header: header["report"][0].update(bytes_after="many"),
        "model.safetensors has a damaged header 'octet' .*'report' is not a list of entries",
    ),
    "a layer that shares nobody's tensors": (
        lambda header: header["layers"][LAYER].update(shares="model"),
        f"a damaged header 'octet' .*layer '{LAYER}' shares the tensors of 'model', which has none",
    ),
}


@pytest.mark.parametrize(("alter", "words"), ALTERED.values(), ids=ALTERED)
def test_altered_headers_are_refused(
    alter: Callable[[dict[str, Any]], object], words: str, int8_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(int8_folder, tmp_path / "int")
    alter_header(tmp_path / "int" / "model.safetensors", alter)
    with pytest.raises(ValueError, match=words):
        type(SUBJECTS["llama_tied"].make()).from_pretrained(tmp_path / "int")


def test_a_file_that_was_cut_is_named(int8_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(int8_folder, tmp_path / "int")
    file = tmp_path / "int" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ShardError, match=r"model\.safetensors is not a whole safetensors file: .*; load the"):
        type(SUBJECTS["llama_tied"].make()).from_pretrained(tmp_path / "int")


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"forward": 1}, "OctetConfig: unknown fields ['forward'], expected some of ['bits', "),
        ({"dtype": "octet"}, "OctetConfig: dtype is 'octet', expected None or one of float32, bfloat16, float16"),
    ],
    ids=["unknown", "no dtype"],
)
def test_another_configuration_is_refused(field: dict[str, Any], words: str, int8_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(int8_folder, tmp_path / "int")
    file = tmp_path / "int" / "config.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    document["quantization_config"].update(field)
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(quant.RecipeError, match=re.escape(words)):
        type(SUBJECTS["llama_tied"].make()).from_pretrained(tmp_path / "int")


@pytest.fixture(scope="module")
def int8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of an int8 model."""
    folder, subject = tmp_path_factory.mktemp("saved"), SUBJECTS["llama_tied"]
    subject.make().save_pretrained(folder / "float")
    kind = type(subject.make())
    kind.from_pretrained(folder / "float", quantization_config=octet(subject, 8)).save_pretrained(folder / "int")
    return folder / "int"
