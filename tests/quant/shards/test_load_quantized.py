"""Checkpoints that are quantised while they are loaded: the bits of the whole model, and errors with the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import quant
from quant.shards import ShardError
from quant.shards.assembly import check_holds

FOUR = quant.QConfig(weight_bits=4, group_size=32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 96)
        self.down = nn.Linear(96, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Language(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(70, 64)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(64, 70, bias=False)
        self.register_buffer("seen", torch.arange(3))
        self.memory = nn.GRU(64, 64, batch_first=True)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.memory(self.blocks(self.words(tokens)))[0])


def made(*, dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> Language:
    torch.manual_seed(0)
    return Language(tied=tied).eval().to(dtype)


def empty(*, dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> Language:
    with torch.device("meta"):
        return Language(tied=tied).eval().to(dtype)


def state(model: nn.Module) -> dict[str, Tensor]:
    """As it is saved: what is tied once."""
    kept: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        kept.setdefault(id(tensor), name)
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name in kept.values()}


def in_shards(tensors: dict[str, Tensor], folder: Path, count: int = 3) -> Path:
    """The tensors in several files with an index, and a folder with them."""
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    places = {name: f"model-{index % count + 1:05}-of-{count:05}.safetensors" for index, name in enumerate(names)}
    for file in sorted(set(places.values())):
        save_file({name: tensors[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


TOKENS = torch.arange(24).reshape(2, 12)


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    mine, others = found.state_dict(), expected.state_dict()
    assert mine.keys() == others.keys()
    for name in mine:
        assert mine[name].dtype is others[name].dtype, name
        assert torch.equal(mine[name], others[name]), name
    assert torch.equal(found(TOKENS), expected(TOKENS))
    assert quant.summary(found) == quant.summary(expected)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("qconfig", [quant.QConfig(), FOUR], ids=["8 bits", "4 bits"])
def test_the_bits_are_those_of_quantising_the_whole(
    tmp_path: Path, dtype: torch.dtype, tied: bool, qconfig: quant.QConfig
) -> None:
    model, recipe = made(dtype=dtype, tied=tied), quant.Recipe(default=qconfig)
    q = quant.load_quantized(empty(dtype=dtype, tied=tied), in_shards(state(model), tmp_path), recipe)
    assert_same(q, quant.quantize_dynamic(model, recipe))
    assert not any(tensor.device.type == "meta" for tensor in q.state_dict().values())


def as_folder(folder: Path) -> Any:
    return folder


def as_index(folder: Path) -> Any:
    return str(folder / "model.safetensors.index.json")


def as_files(folder: Path) -> Any:
    return sorted(folder.glob("*.safetensors"))


def as_folder_without_index(folder: Path) -> Any:
    (folder / "model.safetensors.index.json").unlink()
    return folder


@pytest.mark.parametrize("form", [as_folder, as_index, as_files, as_folder_without_index])
def test_shards_are_a_folder_an_index_or_files(tmp_path: Path, form: Callable[[Path], Any]) -> None:
    model = made()
    q = quant.load_quantized(empty(), form(in_shards(state(model), tmp_path)))
    assert_same(q, quant.quantize_dynamic(model))


def test_one_file_and_a_root_that_is_a_layer(tmp_path: Path) -> None:
    model = nn.Linear(64, 8)
    save_file(dict(model.state_dict()), tmp_path / "one.safetensors")
    with torch.device("meta"):
        bare = nn.Linear(64, 8)
    q = quant.load_quantized(bare, tmp_path / "one.safetensors")
    x = torch.randn(3, 64)
    assert torch.equal(q(x), quant.quantize_dynamic(model)(x))


def test_what_the_model_declares_is_the_type_of_its_layers(tmp_path: Path) -> None:
    """A bfloat16 checkpoint in a float32 model: its values, and float32 around the layers."""
    model = made()
    q = quant.load_quantized(empty(dtype=torch.float32), in_shards(state(model), tmp_path))
    assert_same(q, quant.quantize_dynamic(model.float()))


def test_layers_that_the_recipe_leaves_float_are_loaded(tmp_path: Path) -> None:
    model, recipe = made(), quant.Recipe({"blocks.0.*": None, "head": None})
    q = quant.load_quantized(empty(), in_shards(state(model), tmp_path), recipe)
    assert torch.equal(q.get_submodule("blocks.0.up").weight, model.blocks[0].up.weight)  # type: ignore[arg-type, union-attr]
    assert_same(q, quant.quantize_dynamic(model, recipe))


def test_a_table_that_a_float_layer_shares_stays_whole_there(tmp_path: Path) -> None:
    model, recipe = made(tied=True), quant.Recipe({"head": None}, default=FOUR)
    q = quant.load_quantized(empty(tied=True), in_shards(state(model), tmp_path), recipe)
    assert torch.equal(q.get_submodule("head").weight, model.head.weight)  # type: ignore[arg-type]
    assert quant.summary(q)["words"].outcome == "int4"


def test_both_names_of_a_tied_tensor_must_be_equal(tmp_path: Path) -> None:
    model = made(tied=True)
    both = {**state(model), "head.weight": model.head.weight.detach().clone()}
    assert_same(quant.load_quantized(empty(tied=True), in_shards(both, tmp_path)), quant.quantize_dynamic(model))
    both["head.weight"] = both["head.weight"] + 1
    with pytest.raises(ShardError, match=r"'words.weight' of .*safetensors and 'head.weight' differ.*untie them"):
        quant.load_quantized(empty(tied=True), in_shards(both, tmp_path))


# --- bad input ------------------------------------------------------------------------------------------------------


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def replaced(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__setitem__(name, value)


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "a missing weight": (without("blocks.1.up.weight"), "'blocks.1.up.weight' of Language is in none of the shards"),
    "a missing norm": (without("blocks.1.norm.bias"), "'blocks.1.norm.bias' of Language is in none of the shards"),
    "a missing buffer": (without("seen"), "'seen' of Language is in none of the shards"),
    "another shape": (
        replaced("blocks.0.up.weight", torch.zeros(96, 32)),
        r"tensor 'blocks.0.up.weight' of .*safetensors has shape \(96, 32\), the model's \(96, 64\); make the model",
    ),
    "integers": (
        replaced("head.weight", torch.zeros(70, 64, dtype=torch.int8)),
        "tensor 'head.weight' of .*safetensors is I8, expected float32, bfloat16 or float16",
    ),
    "fp8": (
        replaced("head.weight", torch.zeros(70, 64, dtype=torch.float8_e4m3fn)),
        "tensor 'head.weight' of .*safetensors is fp8 .*convert this one to bfloat16 first",
    ),
    "a float in place of an integer": (
        replaced("seen", torch.tensor([0.5, 1.0, 2.0])),
        "tensor 'seen' of .*safetensors is F32, the model's is torch.int64; convert it",
    ),
    "NaN": (
        replaced("head.weight", torch.full((70, 64), float("nan"))),
        "tensor 'head.weight' of .*safetensors holds NaN or inf",
    ),
    "GPTQ": (
        replaced("blocks.0.up.g_idx", torch.zeros(64, dtype=torch.int32)),
        "tensor 'blocks.0.up.g_idx' of .*safetensors is of a checkpoint that GPTQ has quantised.*load the float",
    ),
    "AWQ": (
        replaced("blocks.0.up.qweight", torch.zeros(8, 96, dtype=torch.int32)),
        "'blocks.0.up.qweight' of .*safetensors is of a checkpoint that AWQ or GPTQ has quantised",
    ),
    "bitsandbytes": (
        replaced("blocks.0.up.SCB", torch.zeros(96)),
        r"'blocks.0.up.SCB' of .*safetensors is of a checkpoint that bitsandbytes \(8 bits\) has quantised",
    ),
    "one more": (
        replaced("rotary.inv_freq", torch.zeros(4)),
        "tensor 'rotary.inv_freq' of .*safetensors is not of Language, nor are 0 others; give their names as ignore=",
    ),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_checkpoints_that_do_not_fit(tmp_path: Path, case: str) -> None:
    change, message = BROKEN[case]
    tensors = state(made())
    change(tensors)
    with pytest.raises(ValueError, match=message):
        quant.load_quantized(empty(), in_shards(tensors, tmp_path))


def test_what_is_to_be_ignored_is(tmp_path: Path) -> None:
    tensors = {**state(made()), "rotary.inv_freq": torch.zeros(4)}
    q = quant.load_quantized(empty(), in_shards(tensors, tmp_path), ignore=["*.inv_freq"])
    assert_same(q, quant.quantize_dynamic(made()))


def test_names_of_another_model_are_shown(tmp_path: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in state(made()).items()}
    with pytest.raises(ShardError, match=r"of Language is in none of .*they have 'model.*are names changed"):
        quant.load_quantized(empty(), in_shards(tensors, tmp_path))


def test_groups_that_do_not_divide(tmp_path: Path) -> None:
    recipe = quant.Recipe(default=quant.QConfig(weight_bits=4, group_size=64))
    with pytest.raises(
        quant.RecipeError, match=r"layer 'blocks.0.down'.*group_size is 64, expected a divisor of .* 96"
    ):
        quant.load_quantized(empty(), in_shards(state(made()), tmp_path), recipe)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8"])
def test_a_configuration_that_says_quantised(tmp_path: Path, method: str) -> None:
    folder = in_shards(state(made()), tmp_path)
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method, "bits": 4}}))
    with pytest.raises(
        ShardError, match=f"config.json says that the weights .* quantised, by {method}; load the float"
    ):
        quant.load_quantized(empty(), folder)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"holds no .safetensors file"):
        quant.load_quantized(empty(), tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(b"no header at all")
    with pytest.raises(ShardError, match=r"weights.safetensors is not a whole safetensors file"):
        quant.load_quantized(empty(), tmp_path)
    with pytest.raises(ShardError, match="pickles are not read"):
        quant.load_quantized(empty(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ShardError, match="there are no files"):
        quant.load_quantized(empty(), [])
    with pytest.raises(ShardError, match=r"empty path, expected a file or folder; '\.' is the working folder"):
        quant.load_quantized(empty(), "")
    for number in (5, [5]):
        with pytest.raises(TypeError, match=r"shards is 5, expected a .safetensors file, a list of them, an index or"):
            quant.load_quantized(empty(), number)  # type: ignore[arg-type]
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(ShardError, match="is no index of safetensors files"):
        quant.load_quantized(empty(), tmp_path / "index.json")
    with pytest.raises(FileNotFoundError):
        quant.load_quantized(empty(), tmp_path / "absent.safetensors")


def test_an_index_whose_files_are_not_all_there(tmp_path: Path) -> None:
    folder = in_shards(state(made()), tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ShardError, match=r"names model-00002-of-00003.safetensors, which is not beside it"):
        quant.load_quantized(empty(), folder)


@pytest.mark.parametrize("place", ["../weights.safetensors", "/weights.safetensors"])
def test_an_index_that_points_out_of_its_folder(tmp_path: Path, place: str) -> None:
    save_file(state(made()), tmp_path / "weights.safetensors")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(state(made()), place)})
    )
    with pytest.raises(ShardError, match=f"names '{place}', which lies outside its folder"):
        quant.load_quantized(empty(), folder)


def test_values_that_the_declared_dtype_does_not_hold(tmp_path: Path) -> None:
    tensors = {**state(made(dtype=torch.float32)), "blocks.0.norm.weight": torch.full((64,), 1e6)}
    folder = in_shards(tensors, tmp_path)
    with pytest.raises(
        ShardError, match=r"'blocks.0.norm.weight' of .* has the value 1000000.0, which torch.float16 of the model does"
    ):
        quant.load_quantized(empty(dtype=torch.float16), folder)
    quant.load_quantized(empty(dtype=torch.bfloat16), folder)


def test_a_bias_of_an_int8_layer_that_the_declared_dtype_does_not_hold(tmp_path: Path) -> None:
    tensors = {**state(made(dtype=torch.float32)), "blocks.0.up.bias": torch.full((96,), -1e6)}
    folder = in_shards(tensors, tmp_path)
    with pytest.raises(ShardError, match=r"'blocks.0.up.bias' of .* has the value -1000000.0, which torch.float16 of"):
        quant.load_quantized(empty(dtype=torch.float16), folder)
    quant.load_quantized(empty(dtype=torch.bfloat16), folder)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    model = made()
    save_file(state(model), tmp_path / "a.safetensors")
    save_file(state(model), tmp_path / "b.safetensors")
    with pytest.raises(ShardError, match=r"is in .*a.safetensors and in .*b.safetensors"):
        quant.load_quantized(empty(), tmp_path)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 64)
        self.register_buffer("table", torch.arange(64.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.table


def test_a_derived_buffer_needs_values(tmp_path: Path) -> None:
    model = Rotary()
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        bare = Rotary()
    with pytest.raises(ShardError, match="buffer 'table' is on the meta device and not persistent"):
        quant.load_quantized(bare, tmp_path)
    half_bare = Rotary()
    half_bare.fc.to("meta")
    x = torch.randn(2, 64)
    assert torch.equal(quant.load_quantized(half_bare, tmp_path)(x), quant.quantize_dynamic(model)(x))


class Drawn(nn.Module):
    """With transformers' method that draws parameters and computes buffers, of modules that are not marked."""

    def __init__(self, *, computes: bool = True) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(64, 64), nn.Parameter(torch.rand(64))
        self.computes = computes
        self.register_buffer("places", torch.arange(128), persistent=False)
        self.register_buffer("mask", torch.ones(64, 64).tril().bool(), persistent=False)
        self.register_buffer("seen", torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale @ self.mask.to(x.dtype) + self.places[:64] + self.seen[2]

    @torch.no_grad()
    def initialize_weights(self) -> None:
        if self._is_hf_initialized:
            return
        for drawn in (self.scale, self.fc.bias, self.seen):
            drawn.zero_()
        self.places.copy_(torch.arange(128))
        if self.computes:
            self.mask.copy_(torch.ones(64, 64).tril())


def test_computing_buffers_leaves_what_was_loaded(tmp_path: Path) -> None:
    model = Drawn()
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    with torch.device("meta"):
        bare, lacking = Drawn(), Drawn(computes=False)
    x = torch.randn(2, 64)
    assert torch.equal(quant.load_quantized(bare, tmp_path)(x), quant.quantize_dynamic(model)(x))
    with pytest.raises(ShardError, match="buffer 'mask' is on the meta device and not persistent"):
        quant.load_quantized(lacking, tmp_path)


def test_the_wrong_kind_of_argument(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"expected an nn.Module, got type"):
        quant.load_quantized(Language, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected a quant.Recipe, got QConfig"):
        quant.load_quantized(empty(), tmp_path, FOUR)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ignore is '\*.inv_freq', expected a list of names: ignore=\['\*.inv_freq'\]"):
        quant.load_quantized(empty(), tmp_path, ignore="*.inv_freq")


FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("dtype", [torch.float16, *FLOAT8], ids=str)
def test_a_value_beyond_a_small_type_is_refused(dtype: torch.dtype) -> None:
    """float8 types have inf, NaN or the largest number for it."""
    largest = torch.finfo(dtype).max
    check_holds("x", torch.tensor([largest * 1.0001, -largest, 1e-9, torch.nan]), dtype)  # the first is rounded to it
    beyond = [largest * 1.2, -largest * 8] + ([] if dtype in (torch.float16, torch.float8_e5m2) else [torch.inf])
    for value in beyond:
        said = rf"x has the value -?[\dinf.]+, which {dtype} of the model does not hold"
        with pytest.raises(ShardError, match=said):
            check_holds("x", torch.tensor([1.0, value]), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_float64_value_beyond_float32_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ShardError, match=rf"x has the value 1e\+300, which {dtype} of the model does not hold"):
        check_holds("x", torch.tensor([1.0, 1e300], dtype=torch.float64), dtype)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_a_float8_fraction_is_refused_as_an_integer(dtype: torch.dtype) -> None:
    check_holds("x", torch.tensor([1.0, -2.0]).to(dtype), torch.int8)
    with pytest.raises(ShardError, match=r"x has the value 2\.5, which torch\.int8"):
        check_holds("x", torch.tensor([1.0, 2.5]).to(dtype), torch.int8)
