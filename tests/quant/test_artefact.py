"""`quant.save` and `quant.load`: what comes back computes the same, and what is not an artefact is refused."""

from __future__ import annotations

import copy
import hashlib
import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quant
from quant.nn.embedding import TiedEmbedding

from .altered_files import SafeTensors, seal_artefact


class Tagger(nn.Module):
    """Every kind of int8 module that a file may hold, and a float one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.encoder = nn.LSTM(16, 48, num_layers=2, bidirectional=True)
        self.attention = nn.MultiheadAttention(96, 4)
        self.norm = nn.LayerNorm(96)
        self.cell = nn.GRUCell(96, 16)
        self.head = nn.Linear(16, 20, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder(self.embedding(tokens))[0]
        x = self.norm(self.attention(x, x, x, need_weights=False)[0])
        logits: Tensor = self.head(self.cell(x.mean(dim=0)))
        return logits


class TiedTagger(Tagger):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


TOKENS = torch.arange(12).reshape(4, 3)


def quantized(make: Callable[[], nn.Module], recipe: quant.Recipe | None = None) -> nn.Module:
    torch.manual_seed(0)
    return quant.quantize_dynamic(make().eval(), recipe)


@pytest.mark.parametrize(
    "recipe",
    [
        None,
        quant.Recipe(default=quant.QConfig(weight_bits=4)),
        quant.Recipe(default=quant.QConfig(activation_bits=16)),
        quant.Recipe({"encoder": None}),
    ],
    ids=["default", "4 bits", "16-bit activations", "one layer float"],
)
@pytest.mark.parametrize("make", [Tagger, TiedTagger])
def test_what_is_loaded_computes_the_same(
    make: Callable[[], nn.Module], recipe: quant.Recipe | None, tmp_path: Path
) -> None:
    q = quantized(make, recipe)
    quant.save(q, tmp_path / "model.q8")
    other_weights = make().eval()
    loaded = quant.load(tmp_path / "model.q8", model=other_weights)
    assert torch.equal(loaded(TOKENS), q(TOKENS))
    assert str(quant.summary(loaded)) == str(quant.summary(q))


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    q = quantized(TiedTagger)
    quant.save(q, tmp_path / "model.q8")
    loaded = quant.load(tmp_path / "model.q8", model=TiedTagger())
    assert isinstance(loaded.embedding, TiedEmbedding)
    assert loaded.embedding.q_weight.data_ptr() == loaded.head.q_weight.data_ptr()
    stored = load_file(tmp_path / "model.q8")
    assert ("embedding.q_weight" in stored) != ("head.q_weight" in stored)


def test_a_root_that_is_itself_quantised(tmp_path: Path) -> None:
    q = quantized(lambda: nn.LSTM(4, 32))
    quant.save(q, tmp_path / "model.q8")
    x = torch.randn(5, 2, 4)
    assert torch.equal(quant.load(tmp_path / "model.q8", model=nn.LSTM(4, 32))(x)[0], q(x)[0])


def test_the_float_model_is_left_as_it_was(tmp_path: Path) -> None:
    quant.save(quantized(Tagger), tmp_path / "model.q8")
    model = Tagger()
    before = copy.deepcopy(model.state_dict())
    quant.load(tmp_path / "model.q8", model=model)
    assert isinstance(model.head, nn.Linear)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_float_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(quant.ArtefactError, match="no int8 module"):
        quant.save(Tagger(), tmp_path / "model.q8")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="there is no limit of file sizes")
def test_a_file_that_does_not_fit_is_named_and_the_old_one_stays(tmp_path: Path) -> None:
    """Safetensors has an error of its own, and a temporary file of its own beside the one that it is to write."""
    path, q = tmp_path / "m.q8", quant.quantize_dynamic(Tagger())
    path.write_bytes(b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(
            OSError, match=r"quant\.save: File too large; .*nothing that was there is changed: '.*m\.q8'"
        ):
            quant.save(q, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def written(tmp_path: Path) -> Path:
    path = tmp_path / "model.q8"
    quant.save(quantized(Tagger), path)
    return path


def manifest_of(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return load_file(path), json.loads(file.metadata()["octet"])


def test_a_truncated_file(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(quant.ArtefactError, match="not a whole safetensors file"):
        quant.load(path, model=Tagger())


def test_a_state_dict_is_no_file() -> None:
    with pytest.raises(TypeError, match=r"path is a dict, expected the name of a file of quant.save; a state dict has"):
        quant.load({"weight": torch.ones(1)}, model=nn.Linear(1, 1))  # type: ignore[arg-type]


def test_an_altered_file(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(quant.ArtefactError, match="altered or damaged"):
        quant.load(path, model=Tagger())


@pytest.mark.parametrize(("dtype", "shape"), [("I32", [96]), ("F32", [96, 1])])
def test_a_header_that_says_something_else_of_the_same_bytes(dtype: str, shape: list[int], tmp_path: Path) -> None:
    """Each byte of the data has its checksum still."""
    path = written(tmp_path)
    file = SafeTensors.read(path.read_bytes())
    name, entry = next((name, one) for name, one in file.tensors.items() if (one.dtype, one.shape) == ("F32", [96]))
    entry.dtype, entry.shape = dtype, shape
    path.write_bytes(file.bytes(seal_artefact(file, False)))
    with pytest.raises(quant.ArtefactError, match=f"altered or damaged: {name} do not match"):
        quant.load(path, model=Tagger())


def test_a_file_without_the_forms_of_its_tensors_is_read(tmp_path: Path) -> None:
    """Files of earlier versions have checksums of the bytes alone."""
    path = written(tmp_path)
    file = SafeTensors.read(path.read_bytes())
    texts = seal_artefact(file, True)
    manifest = json.loads(texts["octet"])
    del manifest["forms"], manifest["digest"]
    manifest["digest"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_bytes(file.bytes({**texts, "octet": json.dumps(manifest)}))
    quant.load(path, model=Tagger())


def test_a_foreign_safetensors_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "model.q8")
    with pytest.raises(quant.ArtefactError, match=r"that quant\.save did not write"):
        quant.load(tmp_path / "model.q8", model=Tagger())


def test_a_newer_manifest(tmp_path: Path) -> None:
    path = written(tmp_path)
    tensors, manifest = manifest_of(path)
    save_file(tensors, path, metadata={"octet": json.dumps({**manifest, "schema": 99})})
    with pytest.raises(quant.ArtefactError, match="version 99"):
        quant.load(path, model=Tagger())


def test_a_model_without_the_modules(tmp_path: Path) -> None:
    with pytest.raises(quant.ArtefactError, match="which Sequential does not have"):
        quant.load(written(tmp_path), model=nn.Sequential(nn.Linear(3, 3)))


def test_a_module_of_another_type(tmp_path: Path) -> None:
    model = Tagger()
    model.attention = nn.Linear(3, 3)
    with pytest.raises(quant.ArtefactError, match="int8 MultiheadAttention for 'attention', the model a Linear"):
        quant.load(written(tmp_path), model=model)


def test_a_model_of_another_size(tmp_path: Path) -> None:
    wider = Tagger()
    wider.norm = nn.LayerNorm(97)
    with pytest.raises(quant.ArtefactError, match="does not fit Tagger"):
        quant.load(written(tmp_path), model=wider)


def test_a_folder(tmp_path: Path) -> None:
    for read in (lambda: quant.load(tmp_path, model=Tagger()), lambda: quant.load(tmp_path)):
        with pytest.raises(quant.ArtefactError, match=r"is a folder, expected a file that quant\.save wrote"):
            read()


def test_a_missing_file() -> None:
    with pytest.raises(OSError, match="nowhere"):
        quant.load("nowhere.q8", model=Tagger())
