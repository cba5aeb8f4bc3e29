"""`make fuzz-files`: altered and cut files of every kind that this library reads.

Each is refused by an error of a documented type that names the file, or gives a model that runs, or refuses a call
clearly. One whose checksums were not made right again is refused or gives the same bits. No case may end its process,
take 5 seconds of it, take more memory than twice that of the valid file and a few MiB, open a file outside of its
folder, import a module, start a process, or execute code that reading the valid file does not.

    python tests/quant/fuzz_files.py --seconds 600 --seed 1000
    python tests/quant/fuzz_files.py --case static --draws 0,3,1
"""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import os
import re
import resource
import shutil
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import safetensors.torch
import torch
from torch import Tensor, nn

if __package__ in (None, ""):
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from quant.calibrate import checkpoint, whole_files

import quant
from quant import calibrate, qat
from quant.cli import files as cli_files
from quant.cli.errors import UserError
from tests.kernels import fuzzing
from tests.kernels.fuzzing import Draws, Fuzzer, Wrong
from tests.quant import altered_files as alter

PATH = "tests/quant/fuzz_files.py"
SECONDS = 5.0
"""Of CPU time for one case; the valid files take milliseconds."""
MEMORY = 16 << 20
"""Bytes that a case may take beyond twice those of the valid file."""

CHILD_SECONDS = 60.0
"""Of one child, which reads every valid file before its cases."""

HANG_SECONDS = 120.0
"""Of one case by the clock; what computes longer than SECONDS is found by that."""

ROOT = Path(tempfile.gettempdir()) / f"octet-fuzz-files-{os.getpid()}"


@dataclass
class Kind:
    """Files of one kind.

    Attributes:
        file: bytes of a valid one.
        alter: gives other bytes, what was done, and whether its checksums are right again.
        load: reads the file at a path, uses what comes, and gives what can be compared.
        refusals: the errors by which reading refuses a file.
        names_file: whether their messages have the file's name.
        suffix: of the file's name.
        opens: what another library reads elsewhere for the valid file too.
    """

    file: bytes
    alter: Callable[[bytes, Draws], tuple[bytes, str, bool]]
    load: Callable[[Path], Any]
    refusals: tuple[type[Exception], ...] = (ValueError, OSError)
    names_file: bool = True
    suffix: str = ".q8"
    opens: tuple[str, ...] = ()


class CallRefused(Exception):
    """The model was read, and refuses the call."""


CALL_REFUSALS = (ValueError, TypeError, RuntimeError, IndexError)
"""An IndexError is that of a table, as torch's, and names the layer."""


def called(model: Callable[..., Any], *inputs: Any) -> list[Any]:
    """The outputs of a model; CallRefused where it refuses the call clearly."""
    try:
        with torch.no_grad():
            return leaves(model(*inputs))
    except CALL_REFUSALS as error:
        if isinstance(error, RecursionError) or (isinstance(error, IndexError) and "layer '" not in str(error)):
            raise
        raise CallRefused(f"{type(error).__name__}: {error}") from error


def leaves(value: Any) -> list[Any]:
    """What a structure holds."""
    if isinstance(value, dict):
        return [leaf for key, one in value.items() for leaf in (key, *leaves(one))]
    if isinstance(value, (tuple, list)):
        return [leaf for one in value for leaf in leaves(one)]
    return [value]


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether two results are the same to the bit."""
    if len(one) != len(other):
        return False
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype and a.dim()
        else torch.equal(a, b)
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else a == b
        for a, b in zip(one, other, strict=True)
    )


class Tagger(nn.Module):
    """Tables, recurrent and linear layers, of 8 and 4 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.wide, self.lstm = nn.Embedding(8, 32), nn.Linear(32, 8), nn.LSTM(8, 4, batch_first=True)
        self.attention, self.cell = nn.MultiheadAttention(4, 2, batch_first=True), nn.GRUCell(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.lstm(torch.relu(self.wide(self.embedding(tokens))))[0]
        x = self.attention(x, x, x, need_weights=False)[0]
        logits: Tensor = self.head(self.cell(x.mean(1)))
        return logits


class Images(nn.Module):
    """A convolutional network with what converters fold, join and leave to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.cat([x + self.second(x), x], 1)[:, 2:6]
        logits: Tensor = self.fc(nn.functional.silu(nn.functional.max_pool2d(x, 2)).mean((2, 3)))
        return logits


class Sounds(nn.Module):
    """Recurrent layers, a norm and attention of its own, some of it in float."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.norm, self.query, self.fc = (
            nn.GRU(4, 4, batch_first=True),
            nn.LayerNorm(4),
            nn.Linear(4, 4),
            nn.Linear(4, 2),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y, state = self.gru(x)
        scores = self.query(y) @ y.transpose(1, 2)
        y = self.norm(scores.softmax(-1) @ y)
        return {"logits": self.fc(y), "state": torch.erf(state)}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(torch.relu(self.first(x)))
        return logits


TOKENS = torch.tensor([[1, 5, 2], [0, 7, 3]])
PICTURES = torch.linspace(-1, 1, 2 * 2 * 36).reshape(2, 2, 6, 6)
SOUND = torch.linspace(-1, 1, 2 * 3 * 4).reshape(2, 3, 4)
ROWS = torch.linspace(-1, 1, 4 * 6).reshape(4, 6)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


def static(model: nn.Module, x: Tensor) -> nn.Module:
    return quant.quantize_static(model, [x], progress=False)


def written(write: Callable[[Path], object]) -> bytes:
    """The bytes of the file that a function writes."""
    ROOT.mkdir(exist_ok=True)
    path = ROOT / "valid"
    write(path)
    data = path.read_bytes()
    path.unlink()
    return data


def sealed(
    seal: Callable[[alter.SafeTensors, bool], dict[str, str]],
) -> Callable[[bytes, Draws], tuple[bytes, str, bool]]:
    return lambda data, draws: alter.altered_safetensors(data, draws, seal)


def unsealed(data: bytes, draws: Draws) -> tuple[bytes, str, bool]:
    """Of a safetensors file that has no checksums."""
    return (*alter.altered_safetensors(data, draws, alter.plain)[:2], True)


def of_json(data: bytes, draws: Draws) -> tuple[bytes, str, bool]:
    if draws.below(10) == 9:
        return (*alter.altered_bytes(data, draws), True)
    document, said = alter.altered_json(json.loads(data), draws)
    return alter.dumps(document).encode("utf-8", "replace"), said, True


def of_bytes(data: bytes, draws: Draws) -> tuple[bytes, str, bool]:
    return (*alter.altered_bytes(data, draws), True)


artefact = sealed(alter.seal_artefact)


def dynamic() -> Kind:
    model = made(Tagger)
    rules = {"wide": quant.QConfig(weight_bits=4, group_size=32), "embedding": quant.QConfig(weight_bits=4)}
    data = written(lambda path: quant.save(quant.quantize_dynamic(model, quant.Recipe(rules)), path))
    return Kind(data, artefact, lambda path: called(quant.load(path, model=model), TOKENS))


def narrow() -> Kind:
    model = made(Small)
    recipe = quant.Recipe(default=quant.QConfig(weight_bits=3, activation_bits=16))
    data = written(lambda path: quant.save(quant.quantize_dynamic(model, recipe), path))
    return Kind(data, artefact, lambda path: called(quant.load(path, model=model), ROWS))


def convolutional() -> Kind:
    model = made(Images)
    data = written(lambda path: quant.save(static(model, PICTURES), path))
    return Kind(data, artefact, lambda path: called(quant.load(path, model=model), PICTURES))


def recurrent() -> Kind:
    model = made(Sounds)
    data = written(lambda path: quant.save(static(model, SOUND), path))
    return Kind(data, artefact, lambda path: called(quant.load(path, model=model), SOUND))


def captured_again() -> Kind:
    """A file without programs, as older versions wrote it."""
    model = made(Small)
    file = alter.SafeTensors.read(written(lambda path: quant.save(static(model, ROWS), path)))
    file.documents["octet"]["programs"] = {"": {"why_none": "an older version"}}
    data = file.bytes(alter.seal_artefact(file, True))
    return Kind(data, artefact, lambda path: called(quant.load(path, model=model), ROWS))


def runner() -> Kind:
    data = written(lambda path: quant.save(static(made(Images), PICTURES), path, runner=True))
    return Kind(data, artefact, lambda path: called(quant.load(path), PICTURES))


def report() -> Kind:
    data = written(lambda path: quant.save(static(made(Small), ROWS), path))

    def load(path: Path) -> Any:
        read = cli_files.read_report(path)
        return [read.to_dict(), str(read), read.model_bytes_before]

    return Kind(data, artefact, load, (UserError, OSError))


def prepared() -> nn.Module:
    recipe = quant.Recipe(default=quant.QConfig(activation_observer="moving_average"))
    model = quant.prepare(made(Images), PICTURES, recipe)
    calibrate.run(model, [PICTURES], progress=False)
    return model


def ends_of(model: nn.Module) -> list[Any]:
    """What a prepared model has as ranges."""
    return [list(map(float, (one.qparams().scale, one.qparams().zero_point)))
            for one in checkpoint.observers_of(model).values() if one.scheme.axis is None]  # fmt: skip


def calibration() -> Kind:
    model = prepared()
    observers, identity = checkpoint.observers_of(model), checkpoint.identity(model)
    progress = checkpoint.Progress(1, 2, "0" * 64, ())
    data = written(lambda path: checkpoint.write(path, observers, identity, progress))

    def load(path: Path) -> Any:
        saved = checkpoint.read(path, observers, identity)
        try:
            values = [[*one.state_dict().values(), one.range()] for one in saved.observers.values()]
        except CALL_REFUSALS as error:
            raise CallRefused(str(error)) from error
        return leaves([vars(saved.progress), values])

    return Kind(data, sealed(alter.seal_checkpoint(checkpoint.KEY)), load)


def resumed_calibration() -> Kind:
    """The same, gone on from."""
    model = quant.prepare(made(Images), PICTURES)
    data = written(
        lambda path: calibrate.run(model, [PICTURES, PICTURES], progress=False, checkpoint=path, checkpoint_every=0)
    )
    start = quant.prepare(made(Images), PICTURES)

    def load(path: Path) -> Any:
        one = copy.deepcopy(start)
        calibrate.run(one, [PICTURES, PICTURES], progress=False, checkpoint=path)
        return ends_of(one)

    return Kind(data, sealed(alter.seal_checkpoint(checkpoint.KEY)), load, names_file=False)


def gptq() -> Kind:
    model = made(Small)

    def run(path: Path) -> list[Any]:
        quantized = quant.quantize_dynamic(model, batches=[ROWS], rounding="gptq", checkpoint=path, progress=False)
        return called(quantized, ROWS)

    return Kind(written(run), sealed(alter.seal_checkpoint("octet.rounding")), run)


def learned_rounding() -> Kind:
    start = quant.prepare(made(Small), ROWS)
    calibrate.run(start, [ROWS], progress=False)

    def run(path: Path) -> list[Any]:
        model = copy.deepcopy(start)
        quant.learn_rounding(model, [ROWS], steps=2, checkpoint=path, progress=False)
        return called(quant.convert(model), ROWS)

    return Kind(written(run), sealed(alter.seal_checkpoint("octet.rounding")), run)


def search() -> Kind:
    model = made(Small)

    def run(path: Path) -> list[Any]:
        found = quant.autoquant(
            model, [ROWS], lambda one: float(one(ROWS).mean()), max_drop=0.1, checkpoint=path, progress=False,
            objective="size", max_evaluations=4,
        )  # fmt: skip
        return [repr(found.recipe), *called(found.model, ROWS)]

    return Kind(written(run), of_json, run, suffix=".json")


def ranges() -> Kind:
    model = prepared()
    data = written(lambda path: calibrate.save_ranges(model, path))

    def load(path: Path) -> Any:
        one = copy.deepcopy(model)
        calibrate.load_ranges(one, path)
        return ends_of(one)

    return Kind(data, of_json, load, suffix=".json")


def recipes() -> Kind:
    config = quant.QConfig(weight_bits=4, group_size=32)
    fixed = quant.QConfig(activation_observer="fixed", activation_options={"low": 0.0, "high": 6.0})
    recipe = quant.Recipe({"fc*": config, "head": None, "conv": fixed}, backend="reference")
    model = made(Images)

    def load(path: Path) -> Any:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            return ["no JSON, which the user reads"]
        read = quant.Recipe.from_dict(document)
        return [repr(read), *(str(read.resolve(name, one)) for name, one in model.named_modules())]

    return Kind(json.dumps(recipe.to_dict()).encode(), of_json, load, names_file=False, suffix=".json")


def unfolded(path: Path, files: dict[str, bytes], name: str) -> Path:
    """A folder beside `path` with these files, of which one is what `path` holds behind a line of its name."""
    changed, _, data = path.read_bytes().partition(b"\n")
    folder = path.parent / name
    folder.mkdir(exist_ok=True)
    for one, whole in files.items():
        (folder / one).unlink(missing_ok=True)  # what is mapped stays as it is
        (folder / one).write_bytes(data if one == changed.decode() else whole)
    return folder


def shards() -> Kind:
    """A folder with an index, two files and a configuration, of which one is altered."""
    state = made(Small).state_dict()
    parts = [dict(list(state.items())[:2]), dict(list(state.items())[2:])]
    names = ["a.safetensors", "b.safetensors"]
    index = {"metadata": {}, "weight_map": {key: name for name, part in zip(names, parts, strict=True) for key in part}}
    files = {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "config.json": json.dumps({"model_type": "x", "quantization_config": None}).encode(),
        **{name: safetensors.torch.save(part, {"format": "pt"}) for name, part in zip(names, parts, strict=True)},
    }

    def change(data: bytes, draws: Draws) -> tuple[bytes, str, bool]:
        name = draws.choice(list(files))
        how = unsealed if name.endswith(".safetensors") else of_json
        changed, said, _ = how(files[name], draws)
        return b"\n".join([name.encode(), changed]), f"{name}: {said}", True

    def load(path: Path) -> Any:
        folder = unfolded(path, files, "altered")
        with torch.device("meta"):
            model = Small().eval()
        return called(quant.load_quantized(model, folder), ROWS)

    return Kind(b"none\n", change, load)


def pretrained() -> Kind:
    """A folder that `save_pretrained` of transformers wrote: its file, or the recipe in config.json.

    The rest of config.json is read by transformers, which takes a model without a quantization_config for a float one.
    """
    import transformers

    from quant.integrations.transformers_quantizer import OctetConfig
    from tests.quant.language.models import SUBJECTS

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    subject, name = SUBJECTS["llama_tied"], "model.safetensors"
    kind: Any = type(subject.make())
    with tempfile.TemporaryDirectory() as place:
        subject.make().save_pretrained(f"{place}/float")
        config = OctetConfig(recipe=subject.recipe(4))
        kind.from_pretrained(f"{place}/float", quantization_config=config).save_pretrained(f"{place}/int")
        files = {one.name: one.read_bytes() for one in Path(place, "int").iterdir()}

    def change(data: bytes, draws: Draws) -> tuple[bytes, str, bool]:
        if draws.below(4) < 3:
            changed, said, _ = unsealed(files[name], draws)
            return b"\n".join([name.encode(), changed]), said, True
        document = json.loads(files["config.json"])
        held = document["quantization_config"]
        held["recipe"], said = alter.altered_json(held["recipe"], draws)
        text = alter.dumps(document)
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return data, "no JSON, which transformers reads", True
        return b"\n".join([b"config.json", text.encode("utf-8", "replace")]), f"recipe: {said}", True

    def load(path: Path) -> Any:
        model = kind.from_pretrained(unfolded(path, files, "pretrained"))
        return called(lambda: model(**subject.batch()).logits)

    refusals = (ValueError, OSError, RuntimeError)
    return Kind(b"none\n", change, load, refusals, names_file=False, opens=("/proc/mounts",))


def shard() -> Kind:
    data = safetensors.torch.save(made(Small).state_dict())

    def load(path: Path) -> Any:
        with torch.device("meta"):
            model = Small().eval()
        return called(quant.load_quantized(model, path), ROWS)

    return Kind(data, unsealed, load, suffix=".safetensors")


def weights() -> Kind:
    def load(path: Path) -> Any:
        model = Small().eval()
        cli_files._fit(model, cli_files.read_weights(path), path)
        return called(model, ROWS)

    data = safetensors.torch.save(made(Small).state_dict())
    return Kind(data, unsealed, load, (UserError, OSError), suffix=".safetensors")


def pickled() -> Kind:
    buffer = io.BytesIO()
    torch.save(made(Small).state_dict(), buffer)

    def load(path: Path) -> Any:
        model = Small().eval()
        cli_files._fit(model, cli_files.read_weights(path), path)
        return called(model, ROWS)

    return Kind(buffer.getvalue(), of_bytes, load, (UserError, OSError), suffix=".pt")


def quantized_pickle() -> Kind:
    """A state that `quant import` reads."""
    buffer = io.BytesIO()
    torch.save({"scale": torch.ones(3), "settings": (1, "x", None), "weight": torch.zeros(3, dtype=torch.int8)}, buffer)

    def load(path: Path) -> Any:
        return leaves(dict(cli_files.read_quantized(path)))

    return Kind(buffer.getvalue(), of_bytes, load, (UserError, OSError), suffix=".pt")


def array() -> Kind:
    data = written(lambda path: numpy.save(path.open("wb"), ROWS.numpy()))
    return Kind(
        data, of_bytes, lambda path: [cli_files.read_array(str(path), "--example")], (UserError,), suffix=".npy"
    )


def training() -> Kind:
    """The state of a model that is trained for int8, which users keep as they keep others."""
    model = qat.prepare_qat(made(Small).train(), ROWS)
    model(ROWS)
    data = safetensors.torch.save(
        {name: one.contiguous() for name, one in model.state_dict().items() if isinstance(one, Tensor)}
    )

    def load(path: Path) -> Any:
        one = copy.deepcopy(model)
        try:
            state = safetensors.torch.load_file(path)
        except safetensors.SafetensorError:
            return ["no file of safetensors, which the user reads"]
        one.load_state_dict({**model.state_dict(), **state})
        return called(quant.convert(one.eval()), ROWS)

    return Kind(data, unsealed, load, (ValueError, RuntimeError), names_file=False)


def onnx_file() -> Kind:
    import random

    from tests.quant import fuzz_onnx

    data = written(lambda path: quant.export_onnx(static(made(Images), PICTURES), path))

    def change(data: bytes, draws: Draws) -> tuple[bytes, str, bool]:
        seed = draws.below(1 << 40)
        draw = random.Random(seed)
        how = draws.choice((fuzz_onnx.of_model, fuzz_onnx.of_bytes, outside))
        try:
            return how(data, draw), f"{how.__name__} of {seed}", True
        except ValueError:  # protobuf's, of a number that a field does not take
            return data, "nothing", True

    return Kind(data, change, lambda path: called(quant.load_onnx(path), PICTURES), suffix=".onnx")


def outside(data: bytes, draw: Any) -> bytes:
    """With the data of a constant in another file, as large models have it."""
    import onnx

    model = onnx.load_from_string(data)
    held = draw.choice(model.graph.initializer)
    held.ClearField("raw_data")
    held.data_location = onnx.TensorProto.EXTERNAL
    places = ("../outside", "/etc/passwd", "beside", "", "a/../../outside", "/proc/self/mem", ".", "\0", "link")
    for key, value in (("location", draw.choice(places)), ("offset", draw.choice(("0", "-1", str(2**62)))),
                       ("length", draw.choice(("1", "4", "-1", str(2**62), "x")))):  # fmt: skip
        entry = held.external_data.add()
        entry.key, entry.value = key, value
    return bytes(model.SerializeToString())


KINDS: dict[str, Callable[[], Kind]] = {
    "dynamic": dynamic, "narrow": narrow, "convolutional": convolutional, "recurrent": recurrent, "runner": runner,
    "captured-again": captured_again, "report": report, "calibration": calibration,
    "resumed-calibration": resumed_calibration, "gptq": gptq, "learned-rounding": learned_rounding, "search": search,
    "ranges": ranges, "recipes": recipes, "shards": shards, "shard": shard, "weights": weights, "pickled": pickled,
    "quantized-pickle": quantized_pickle, "array": array, "training": training, "onnx": onnx_file,
}  # fmt: skip
if importlib.util.find_spec("transformers"):  # of the environment of integrations
    KINDS["pretrained"] = pretrained

SLOW = {"captured-again", "resumed-calibration", "gptq", "learned-rounding", "search", "training", "onnx", "pretrained"}
"""Kinds whose cases take some ten milliseconds: they come once where others come SHARE times."""
SHARE = 12

_kinds: dict[str, tuple[Kind, list[Any], int]] = {}
"""With what the valid file gives, and the bytes that reading it takes."""


def begin(names: Sequence[str]) -> None:
    """Make the valid files and read each, twice: the second time nothing is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            if name in _kinds:
                continue
            kind = KINDS[name]()
            path = ROOT / f"file{kind.suffix}"
            for _ in range(2):
                path.unlink(missing_ok=True)
                path.write_bytes(kind.file)
                start = watermark()
                expected = kind.load(path)
                took = peak() - start
            _kinds[name] = kind, expected, took


def watermark() -> int:
    """Let the largest memory begin anew, and give that of now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Last:
    """What was done in the last case, and what it may not do."""

    said = ""
    watching = False
    hooked = warm = 0
    warmed: frozenset[str] = frozenset()
    seen = ""
    opens: tuple[str, ...] = ()

    @staticmethod
    def words() -> str:
        return _Last.said


_READ_FROM = tuple({*map(os.path.realpath, (sys.prefix, sys.base_prefix, *sysconfig.get_paths().values())),
                    str(Path(__file__).resolve().parents[2]), str(ROOT)})  # fmt: skip
_FORBIDDEN = re.compile(
    r"(os\.(system|exec|posix_spawn|spawn|fork|forkpty|putenv|chmod|chown|link|symlink|rmdir|listxattr|setxattr|kill|truncate)"
    r"|subprocess\.|socket\.|shutil\.|ctypes\.dlopen|pickle\.find_class|marshal\.load|webbrowser|urllib)"
)


def _watch(event: str, args: Any) -> None:
    """An audit hook."""
    if not _Last.watching:
        return
    if event == "open":
        name = os.fsdecode(args[0]) if isinstance(args[0], (str, bytes, os.PathLike)) else ""
        if name and not os.path.realpath(name).startswith(_READ_FROM) and name not in _Last.opens:
            _Last.seen = _Last.seen or f"opened {name}"
    elif event == "import":
        if args[0].partition(".")[0] not in _Known.packages:
            _Last.seen = _Last.seen or f"imported {args[0]}"
    elif event == "exec":
        if not str(args[0].co_filename).startswith(_READ_FROM) and args[0].co_filename not in (
            "<string>",
            "<run of steps>",
            "<frozen importlib._bootstrap>",
        ):
            _Last.seen = _Last.seen or f"executed {args[0].co_filename}"
    elif (
        event in ("shutil.rmtree", "os.rmdir")
        and Path(args[0]).parent == ROOT
        and str(args[0]).endswith(whole_files.SUFFIX)
    ):
        return  # where a checkpoint is written before it takes the place of the last one
    elif _FORBIDDEN.match(event):
        _Last.seen = _Last.seen or f"{event} {args!r:.80}"


class _Known:
    packages: frozenset[str] = frozenset()


def _observed(load: Callable[[Path], Any], path: Path) -> Any:
    if _Last.hooked != os.getpid():
        _Known.packages = frozenset(name.partition(".")[0] for name in sys.modules)
        sys.addaudithook(_watch)
        _Last.hooked = os.getpid()
    _Last.seen, _Last.watching = "", True
    try:
        return load(path)
    finally:
        _Last.watching = False


def check(kind_name: str, draws: Draws, drawn: Callable[[], None]) -> str:
    """One case; `refused`, `call refused`, `the same` or `another`."""
    begin([kind_name])
    kind, expected, took = _kinds[kind_name]
    _Last.opens = kind.opens
    data, said, resealed = kind.alter(kind.file, draws)
    path = ROOT / f"file{kind.suffix}"
    path.unlink(missing_ok=True)  # tensors of an earlier case may be mapped from it
    _Last.said = f"{kind_name}: {said}"
    if _Last.warm != os.getpid():
        _Last.warm, _Last.warmed = os.getpid(), frozenset()
    if kind_name not in _Last.warmed:  # what a new process has to touch is not the case's
        _Last.warmed |= {kind_name}
        path.write_bytes(kind.file)
        kind.load(path)
        path.unlink()
    path.write_bytes(data)
    drawn()
    start, seconds = watermark(), time.process_time()
    outcome, found = "", None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = _observed(kind.load, path)
        except CallRefused as refused:
            outcome = "call refused"
            _check_message(str(refused))
        except kind.refusals as error:
            if isinstance(error, RecursionError):
                raise
            outcome = "refused"
            _check_message(str(error))
            if kind.names_file and ROOT.name not in str(error):
                raise Wrong(f"does not name the file: {type(error).__name__}: {error!s:.300}") from error
    memory, seconds = peak() - start, time.process_time() - seconds
    if _Last.seen:
        raise Wrong(_Last.seen)
    if memory > 2 * took + MEMORY:
        raise Wrong(f"took {memory >> 20} MiB, the valid file {took >> 20} MiB ({outcome})")
    if seconds > SECONDS:
        raise Wrong(f"took {seconds:.1f} s")
    if outcome:
        return outcome
    if same(found, expected):
        return "the same"
    if not resealed:
        raise Wrong("gives something else, and its checksums were not made right")
    return "another"


def _check_message(text: str) -> None:
    """Refuse a message by which somebody wanted memory that is not there."""
    for words in (
        "can't allocate memory",
        "Unable to allocate",
        "MemoryError",
        "std::bad_alloc",
        "Storage size calculation",
    ):
        if words in text:
            raise Wrong(f"wanted memory: {text:.300}")


def turns() -> Iterator[str]:
    """The kinds in their turns."""
    slow = [name for name in KINDS if name in SLOW]
    for number in range(SHARE):
        yield from (name for name in KINDS if name not in SLOW)
        yield from slow[number::SHARE]


def fuzzer() -> Fuzzer:
    return Fuzzer(PATH, tuple(turns()), check, words=_Last.words)


def main() -> int:
    ROOT.mkdir()
    try:
        torch.set_num_threads(1)
        fuzzing.CHILD_SECONDS, fuzzing.HANG_SECONDS = CHILD_SECONDS, HANG_SECONDS
        begin([name for name in KINDS if f"--case={name}" in sys.argv or name in sys.argv] or list(KINDS))
        return fuzzing.main(fuzzer(), __doc__)
    finally:
        shutil.rmtree(ROOT)


if __name__ == "__main__":
    sys.exit(main())
