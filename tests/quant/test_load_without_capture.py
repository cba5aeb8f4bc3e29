"""Files of programs: what is built from them does all that the converted model does, and nothing of it is captured."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant
from quant.artefact import rebuild
from quant.artefact.file import CONSTANT, TABLE, read, write
from quant.runtime.trees import leaves
from quant.runtime.uncaptured import UncapturedCall
from quant.static.fingerprint import fingerprint


@dataclass
class Answer:
    """What a forward gives."""

    scores: Tensor
    hidden: tuple[Tensor, ...]


class Block(nn.Module):
    """A part that the graph sees through: a residual sum around a folded norm."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.fc, self.norm, self.act = nn.Linear(features, features), nn.BatchNorm1d(features), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.norm(self.fc(x))) + x
        return out


class Model(nn.Module):
    """Layers of torch's and of functions, a part, an LSTM, an embedding, a counter, and an output of its own class."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.embedding, self.block, self.scale = nn.Embedding(10, 8), Block(8), scale
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.matrix = nn.Parameter(torch.randn(12, 8))
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, tokens: Tensor, *, times: int = 1) -> Answer:
        self.calls += 1
        if tokens.shape[1] > 20:
            tokens = tokens[:, :20]
        x = self.block(self.embedding(tokens).mean(1)) * self.scale
        y, (h, _) = self.rnn(x.unsqueeze(1).repeat(1, 3, 1))
        parts = F.linear(y[:, -1], self.matrix).chunk(3, -1)
        out = self.head((parts[0] * parts[1]).relu()) if times == 1 else self.head(parts[2])
        return Answer(out, (h, x))


TOKENS = torch.arange(24).reshape(4, 6) % 10


def model(seed: int = 0, **settings: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**settings).eval()


def converted() -> nn.Module:
    prepared = quant.prepare(model(), TOKENS, examples=[{"tokens": TOKENS, "times": 2}])
    with torch.no_grad():
        for times in (1, 2, 1):
            prepared(TOKENS, times=times)
    return quant.convert(prepared)


@pytest.fixture
def q() -> nn.Module:
    return converted()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("programs") / "model.q8"
    quant.save(converted(), path)
    return path.read_bytes()


@pytest.fixture
def path(whole: bytes, tmp_path: Path) -> Path:
    (tmp_path / "model.q8").write_bytes(whole)
    return tmp_path / "model.q8"


class Captured(Exception):
    """Loading wanted to capture."""


@pytest.fixture
def never_captured() -> Iterator[None]:
    with mock.patch.object(rebuild, "rebuild", side_effect=Captured):
        yield


@pytest.fixture
def loaded(path: Path, never_captured: None) -> nn.Module:
    return quant.load(path, model=model(seed=1))


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))


def answers(q: nn.Module) -> list[Any]:
    with torch.no_grad():
        return [q(TOKENS), q(TOKENS[:2], times=2), q(TOKENS % 3)]


def test_bits_programs_report_and_state_are_those_of_the_converted_model(
    q: nn.Module, loaded: nn.Module, tmp_path: Path, path: Path
) -> None:
    quant.save(loaded, tmp_path / "again.q8")
    assert (tmp_path / "again.q8").read_bytes() == path.read_bytes()
    assert str(loaded.program) == str(q.program)
    assert loaded.program[""] == q.program[""] if isinstance(q.program, dict) else loaded.program == q.program
    assert same(answers(loaded), answers(q))
    assert quant.summary(loaded) == quant.summary(q)
    assert {name: value.shape for name, value in loaded.state_dict().items()} == {
        name: value.shape for name, value in q.state_dict().items()
    }
    assert int(loaded.calls) == int(q.calls) == 3  # type: ignore[arg-type]


def test_parts_can_be_called_copied_pickled_and_compiled(q: nn.Module, loaded: Any) -> None:
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(loaded.block(x), q.block(x))  # type: ignore[operator]
        twin = copy.deepcopy(loaded)
        assert same(answers(twin), answers(copy.deepcopy(q)))


def test_a_call_that_no_program_stands_for_runs_by_the_users_forward(q: nn.Module, loaded: nn.Module) -> None:
    found = []
    for one in (q, loaded):
        with torch.no_grad(), pytest.warns(UncapturedCall):
            found.append(one(TOKENS.repeat(1, 4)))
    assert same(*found)


def test_modules_can_be_replaced_as_in_the_converted_model(q: Any, loaded: Any) -> None:
    before = answers(q)
    with torch.no_grad():
        q.block.act, loaded.block.act = nn.Tanh(), nn.Tanh()
        assert same(answers(loaded), answers(q))
        q.block.fc = loaded.block.fc = nn.Linear(8, 8)
        assert same(answers(loaded), answers(q))
        assert not same(answers(q), before)
        q.rnn = loaded.rnn = nn.LSTM(8, 8, batch_first=True)
        for one in (q, loaded):
            with pytest.raises(RuntimeError, match=r"'rnn': it was replaced after quant.convert"):
                one(TOKENS)


def test_compare_and_parity_work_on_what_was_loaded(q: nn.Module, loaded: nn.Module) -> None:
    one, other = (quant.compare(model(), each, [TOKENS]) for each in (q, loaded))
    assert one.to_dict() == other.to_dict()
    prepared = quant.prepare(model(), TOKENS)
    with torch.no_grad():
        prepared(TOKENS)
    assert quant.parity(prepared, loaded, [TOKENS])


def test_a_state_dict_of_the_converted_model_loads_and_another_calibrations_is_refused(
    q: nn.Module, loaded: nn.Module
) -> None:
    loaded.load_state_dict(q.state_dict())
    state = q.state_dict()
    [ranges] = [name for name in state if name.endswith("_quant.ranges")]
    with pytest.raises(RuntimeError, match="of another calibration"):
        loaded.load_state_dict({**state, ranges: state[ranges] * 2})


def test_another_backend(q: nn.Module, path: Path, never_captured: None) -> None:
    loaded: Any = quant.load(path, model=model(), backend="reference")
    assert loaded.block.fc.backend == loaded._quant.backend == "reference"


SCRIPT = """
import sys
import torch
from torch import nn
import quant
folder = sys.argv[1]
models = {
    "images": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)),
    "attention": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "recurrent": nn.LSTM(8, 8),
}
inputs = {"images": torch.ones(1, 3, 8, 8), "attention": torch.ones(1, 4, 8), "recurrent": torch.ones(4, 1, 8)}
for name, model in models.items():
    loaded = quant.load(f"{folder}/{name}.q8", model=model)
    with torch.no_grad():
        loaded(inputs[name])
makers = ("capture", "fusion", "prepare", "convert", "qat", "forward_state", "further_programs")
print([name for name in sys.modules if name.startswith(tuple(f"quant.{maker}" for maker in makers))])
"""


def test_a_process_that_loads_and_runs_imports_nothing_that_captures_or_converts(tmp_path: Path) -> None:
    flat = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    made: dict[str, tuple[nn.Module, Tensor]] = {
        "images": (flat, torch.randn(2, 3, 8, 8)),
        "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 4, 8)),
        "recurrent": (nn.LSTM(8, 8), torch.randn(4, 2, 8)),
    }
    for name, (float_model, x) in made.items():
        quant.save(quant.quantize_static(float_model.eval(), [x], progress=False), tmp_path / f"{name}.q8")
    places = [place for place in sys.path if place and "tests" not in place]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True, text=True, check=False, env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_public_functions_stand_before_modules_of_their_names() -> None:
    import quant.compare
    import quant.convert

    assert callable(quant.convert)
    assert callable(quant.compare)
    assert set(quant.__all__) <= set(dir(quant))
    assert all(hasattr(quant, name) for name in quant.__all__)
    with pytest.raises(AttributeError, match="module 'quant' has no attribute 'nothing'"):
        quant.nothing  # noqa: B018


def forward_of_another_order(self: Model, tokens: Tensor, *, times: int = 1) -> Answer:
    x = self.block(self.embedding(tokens).mean(1)) + self.scale
    y, (h, _) = self.rnn(x.unsqueeze(1).repeat(1, 3, 1))
    return Answer(self.head(F.linear(y[:, -1], self.matrix).chunk(3, -1)[0]), (h, x))


def test_code_that_was_changed_since_is_captured_and_its_calls_compared(path: Path) -> None:
    with (
        mock.patch.object(Model, "forward", forward_of_another_order),
        pytest.raises(quant.ArtefactError, match=r"call \d+ is .*, expected "),
    ):
        quant.load(path, model=model())


def renamed(self: Block, x: Tensor) -> Tensor:
    summand = self.act(self.norm(self.fc(x)))
    out: Tensor = summand + x
    return out


def test_code_that_was_changed_and_computes_the_same_loads(q: nn.Module, path: Path) -> None:
    with mock.patch.object(Block, "forward", renamed):
        with mock.patch.object(rebuild, "rebuild", side_effect=Captured), pytest.raises(Captured):
            quant.load(path, model=model())
        assert same(answers(quant.load(path, model=model())), answers(q))


@pytest.mark.parametrize("other", [{"scale": 3.0}, {}], ids=["an attribute", "a helper"])
def test_what_the_forward_could_decide_by_is_looked_at(path: Path, other: dict[str, Any], never_captured: None) -> None:
    changed = model(**other)
    if not other:
        changed.block.act = nn.SiLU(inplace=True)
    with pytest.raises(Captured):
        quant.load(path, model=changed)


class Complex(nn.Module):
    """A constant that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.table = nn.Linear(4, 4), [torch.ones(4, dtype=torch.complex64)]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.fc(x) * self.table[0]).real
        return out


def test_a_model_without_a_text_says_why_and_is_captured_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    q = quant.quantize_static(Complex().eval(), [x], progress=False)
    quant.save(q, tmp_path / "model.q8")
    reason = read(tmp_path / "model.q8")[0]["programs"][""]["why_none"]
    assert reason == "a constant of its forward is a tensor that a file cannot hold"
    assert torch.equal(quant.load(tmp_path / "model.q8", model=Complex())(x), q(x))


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a file's programs, and give it a checksum that fits."""
    manifest, tensors = read(path)
    change(manifest["programs"][""])
    write(path, tensors, {name: manifest[name] for name in ("static", "programs", "modules", "report", "float_bytes")})


def in_text(kind: str, old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        entry = document["units"][0]["programs"][0]
        assert old in entry[kind]
        entry[kind] = entry[kind].replace(old, new)

    return change


def in_layer(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["layers"][0].update({name: value})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (in_text("program", "method mean(", "os.system("), "os.system is not a function that a program may name"),
        (in_text("program", "method mean(", "method __reduce_ex__("), "is not a tensor method"),
        (in_text("program", "module embedding", "module nothing"), "there is no module 'nothing'"),
        (in_text("program", "@calls", "@forward.__globals__"), "leads through a private attribute"),
        (in_text("program", "@calls", "@forward.fc"), "there is no module 'forward'"),
        (in_text("program", "@calls", "@forward"), "'forward' is no parameter, buffer or attribute"),
        (in_text("program", "layer block.fc", "layer rnn"), "'rnn' is no int8 layer with a place 0"),
        (in_text("program", "layer /linear_", "layer /nothing_"), "is no int8 layer with a place 0"),
        (in_text("program", "output ", "output %999, "), "%999 is used before it is defined"),
        (in_text("program", "scale=", "scale=-"), "not a scale and zero point"),
        (in_text("program", "octet.mul", "octet.destroy"), "there is no operator 'destroy'"),
        (in_text("schedule", "native(", "foreign("), "expected 'native'"),
        (in_text("schedule", "'embedding'", "'nothing'"), "there is no module 'nothing'"),
        (in_text("floats", "module block.fc", "module block.__class__"), "leads through a private attribute"),
        (in_layer("names", ["nothing"]), "cannot be read"),
        (in_layer("clamps", []), "its tensors and settings do not fit each other"),
        (in_layer("product", {"kind": "conv", "pad_before": None}), "cannot be read"),
        (in_layer("product", {"kind": "os", "pad_before": None}), "is not a product of an int8 layer"),
        (in_layer("backend", 3), "expected str, got 3"),
        (lambda document: document["units"][0].update(path="nothing"), "cannot be read"),
        (lambda document: document["units"][0]["programs"][0].update(ranges=[[1, "nan", 3]]), "not a scale and zero"),
        (lambda document: document.pop("units"), "cannot be read"),
        (lambda document: document["units"][0]["programs"].clear(), "cannot be read"),
        (lambda document: document.update(recurrent=[{"names": ["block"]}]), "cannot be read"),
    ],
)  # fmt: skip
def test_a_file_that_names_what_it_may_not_is_refused(
    path: Path, change: Callable[[dict[str, Any]], None], said: str, never_captured: None
) -> None:
    rewritten(path, change)
    with pytest.raises(quant.ArtefactError, match=r"does not fit the model: its programs cannot be read: ") as caught:
        quant.load(path, model=model())
    assert said in str(caught.value)


def mutated(text: str, draw: random.Random) -> str:
    """JSON with a few signs changed, taken away or doubled, that is JSON still."""
    while True:
        signs = list(text)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(signs))
            signs[place] = draw.choice(["", signs[place] * 2, draw.choice('0123456789%$@!&?()[]{},.:="abc\\-_ ')])
        try:
            found = json.loads("".join(signs))
        except ValueError:
            continue
        return json.dumps(found)


def test_mutated_programs_load_or_are_refused(path: Path, never_captured: None) -> None:
    draw, whole = random.Random(0), path.read_bytes()
    document = json.dumps(read(path)[0]["programs"][""])
    refused = 0
    for _ in range(60):
        path.write_bytes(whole)
        changed = json.loads(mutated(document, draw))

        def change(known: Any, changed: Any = changed) -> None:
            known.clear()
            known.update(changed)

        rewritten(path, change)
        try:
            quant.load(path, model=model())
        except (quant.ArtefactError, Captured):
            refused += 1
    assert refused > 30


def test_the_constants_of_programs_are_in_the_file_once(tmp_path: Path) -> None:
    images = torch.randn(2, 3, 8, 8)
    table = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 4, 1), nn.Flatten())
    quant.save(quant.quantize_static(table.eval(), [images], progress=False), tmp_path / "model.q8")
    manifest, tensors = read(tmp_path / "model.q8")
    assert sum(name.startswith(TABLE) for name in tensors) == 1
    constants = [name for name in tensors if name.startswith(CONSTANT)]
    assert constants
    assert [manifest["same"][name].startswith(TABLE) for name in constants] == [True]


class Shy:
    """Raises an error of its own whatever it is asked for."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return Shy
        raise LookupError(name)

    def __deepcopy__(self, memo: Any) -> Shy:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Shy, ()


def test_an_object_that_cannot_be_looked_into_is_no_error() -> None:
    float_model = nn.Sequential(nn.Linear(4, 4))
    assert fingerprint(float_model)
    float_model.__dict__["shy"] = Shy()
    assert fingerprint(float_model) == ""


def test_a_fingerprint_is_of_what_a_forward_could_decide_by() -> None:
    found = {fingerprint(model(seed=seed)) for seed in (0, 1)}
    assert len(found) == 1, "weights do not count"
    odd = model()
    odd.block.extra = {"levels": [1, 2]}  # type: ignore[assignment]
    found.add(fingerprint(odd))
    odd.block.extra["levels"].append(3)  # type: ignore[index, operator, union-attr]
    found.add(fingerprint(odd))
    found.add(fingerprint(model().double()))
    with mock.patch.object(Block, "forward", renamed):
        found.add(fingerprint(model()))
    own = model()
    own.block.forward = lambda x: x  # type: ignore[method-assign]
    found.add(fingerprint(own))
    own.block.forward = lambda x: x + 1  # type: ignore[method-assign]
    found.add(fingerprint(own))
    assert len(found) == 7
