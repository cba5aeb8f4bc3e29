"""A run that stopped at any moment, resumed by the same call, ends in the state of one that never stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quant.calibrate import CalibrationError, CalibrationWarning, CheckpointError, checkpoint
from quant.kernels import ACTIVATION_U8, weight_scheme
from quant.observers import OBSERVERS, FixedObserver, HistogramObserver, MinMaxObserver, Observer, make_observer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quant import calibrate

FAST = os.environ.get("OCTET_FAST_TESTS") == "1"
ENDS = {"fixed": {"low": 0.0, "high": 1.0}}
"""What observers need that have no default for it."""


class Net(nn.Module):
    """Every observer there is, and one per channel, behind a layer."""

    def __init__(self, bins: int = 4096, weight: float = 2.0) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(3) * weight)
        self.points = nn.ModuleDict({name: make_observer(name, **ENDS.get(name, {})) for name in OBSERVERS})
        self.points["histogram"] = HistogramObserver(bins=bins)
        self.channels = HistogramObserver(weight_scheme(8, axis=1), bins=64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        for point in self.points.values():
            x = point(x)
        out: Tensor = self.channels(x)
        return out


def data(count: int = 8) -> list[Tensor]:
    scales = torch.arange(1, count + 1).reshape(-1, 1, 1)
    return list(torch.randn(count, 5, 3, generator=torch.Generator().manual_seed(0)) * scales)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def run(net: nn.Module, batches: Any, path: Path, **options: Any) -> calibrate.Calibration:
    return calibrate.run(net, batches, progress=False, checkpoint=path, checkpoint_every=0, **options)


@pytest.fixture
def expected() -> dict[str, Tensor]:
    net = Net()
    calibrate.run(net, data(), progress=False)
    return state(net)


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """The checkpoint of a run over the first four of the eight batches."""
    path = tmp_path / "half.safetensors"
    run(Net(), data(), path, limit=4)
    return path


def test_a_resumed_run_ends_as_one_run(half: Path, expected: dict[str, Tensor]) -> None:
    net = Net()
    calls = []
    net.fc.register_forward_hook(lambda *_: calls.append(1))
    done = run(net, data(), half)
    assert (done.batches, done.samples, done.resumed, len(calls)) == (8, 40, 4, 4)
    assert_same(state(net), expected)


def test_a_finished_run_is_not_run_again(half: Path) -> None:
    net = Net()
    done = run(net, data(), half, limit=4)
    assert (done.batches, done.resumed) == (4, 4)
    assert net.points["minmax"].high.item() == torch.cat(data()[:4]).mul(2).max().item()


def test_resuming_counts_what_was_not_finite_before(tmp_path: Path) -> None:
    path, batches = tmp_path / "c", data()
    batches[1][0, 0] = torch.nan
    with pytest.warns(CalibrationWarning, match="in batch 1"):
        run(Net(), batches, path, limit=4)
    net = Net()
    done = run(net, batches, path)  # warnings are errors here: what was said is not said again
    assert len(done.warnings) == 8
    assert net.points["minmax"].nan_count == 3


def test_the_writer_waits_between_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(checkpoint, "write", lambda path, *_: written.append(path))
    calibrate.run(Net(), data(), progress=False, checkpoint=tmp_path / "c", checkpoint_every=1000)
    assert len(written) == 2  # to see that it can be written, and at the end


def test_a_checkpoint_that_cannot_be_written_is_known_before_the_work(tmp_path: Path) -> None:
    net = Net()
    net.register_forward_pre_hook(lambda *_: pytest.fail("a batch was run"))
    with pytest.raises(
        FileNotFoundError, match=r"calibrate\.run: checkpoint: there is no folder '.*missing' to write 'c'"
    ):
        run(net, data(), tmp_path / "missing" / "c")


def stop_in_data(error: BaseException) -> Iterator[Tensor]:
    for index, batch in enumerate(data()):
        if index == 5:
            raise error
        yield batch


def test_a_write_that_fails_leaves_the_old_file_and_no_other(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = half.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        run(Net(), data(), half)
    assert half.read_bytes() == before
    assert [file.name for file in half.parent.iterdir()] == [half.name]


def test_a_stop_between_batches_loses_nothing(tmp_path: Path, expected: dict[str, Tensor]) -> None:
    path = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt):
        calibrate.run(Net(), stop_in_data(KeyboardInterrupt()), progress=False, checkpoint=path, checkpoint_every=1000)
    net = Net()
    assert run(net, data(), path).resumed == 5
    assert_same(state(net), expected)


def test_a_stop_within_a_batch_leaves_the_checkpoint_before_it(tmp_path: Path, expected: dict[str, Tensor]) -> None:
    """Some observers have seen the batch and some have not: that state must not be kept."""
    path, net = tmp_path / "c", Net()

    def interrupt(module: nn.Module, args: Any, out: Tensor) -> None:
        if out.abs().max() == (data()[5] * 2).abs().max():
            raise KeyboardInterrupt

    net.points["histogram"].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(net, data(), path)
    for model in (Net(), net):  # the interrupted model itself may go on as well
        model.points["histogram"]._forward_hooks.clear()
        copied = path.with_name("again")
        copied.write_bytes(path.read_bytes())
        assert run(model, data(), copied).resumed == 5
        assert_same(state(model), expected)


def test_a_stop_while_skipping_leaves_the_checkpoint(half: Path, expected: dict[str, Tensor]) -> None:
    before = half.read_bytes()

    def interrupted_at(place: int) -> Iterator[Tensor]:
        yield from data()[:place]
        raise KeyboardInterrupt

    for place in (0, 1, 3):
        with pytest.raises(KeyboardInterrupt):
            run(Net(), interrupted_at(place), half)
        assert half.read_bytes() == before
    net = Net()
    run(net, data(), half)
    assert_same(state(net), expected)


def refused(path: Path, message: str, net: nn.Module | None = None, batches: Any = None, **options: Any) -> None:
    """The checkpoint is refused, and neither the model nor the file is changed."""
    net = net or Net()
    before, content = state(net), path.read_bytes()
    with pytest.raises(CheckpointError, match=message):
        run(net, data() if batches is None else batches, path, **options)
    assert_same(state(net), before)
    assert path.read_bytes() == content
    assert [file.name for file in path.parent.iterdir() if file.name.endswith(".partial")] == []


class OtherObserver(Net):
    def __init__(self) -> None:
        super().__init__()
        self.points["minmax"] = FixedObserver.sigmoid()


class OneMore(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more: Observer = MinMaxObserver()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (OtherObserver, r"'points\.minmax' is MinMaxObserver\(.*\) there and FixedObserver\("),
        (lambda: Net(bins=1024), r"'points\.histogram' is .*bins=4096.* there and .*bins=1024"),
        (OneMore, r"'more' is absent there and MinMaxObserver"),
        (lambda: Net(weight=3.0), "written with other weights"),
    ],
    ids=["another class", "another setting", "another observer", "other weights"],
)
def test_another_model_is_refused(half: Path, make: Any, message: str) -> None:
    refused(half, message, make())


def test_other_data_is_refused(half: Path) -> None:
    refused(half, "other batches, or in another order", batches=[data()[i] for i in (1, 0, 2, 3, 4)])
    refused(half, "has seen 4 batches, and there are only 3 now", batches=data()[:3])
    refused(half, "has seen 4 batches, and there are only 0 now", batches=[])
    refused(half, "has seen 4 batches, more than limit=3", limit=3)


def numbers(text: str) -> Tensor:
    return torch.tensor([float(ord(letter)) for letter in text])


READ = {
    "arrays": ([one.numpy() for one in data()], [one.numpy() + 1 for one in data()], torch.from_numpy),
    "texts": (
        [["abc", "def"]] * 8,
        [["abc", "deg"]] * 8,
        lambda batch: torch.stack([numbers(text) for text in batch]),
    ),
    "numbers": ([1.0] * 8, [2.0] * 8, lambda batch: torch.full((2, 3), batch)),
    "a number beside": ([(data()[0], 1)] * 8, [(data()[0], 2)] * 8, lambda batch: batch[0] * batch[1]),
}


@pytest.mark.parametrize("kind", READ)
def test_other_arrays_texts_and_numbers_are_refused(kind: str, tmp_path: Path) -> None:
    batches, others, read = READ[kind]
    path = tmp_path / "c"

    def forward(model: nn.Module, batch: Any) -> None:
        model(read(batch))

    run(Net(), batches, path, forward=forward, limit=4)
    refused(path, "other batches, or in another order", batches=others, forward=forward)
    done = run(Net(), batches, path, forward=forward)
    assert done.resumed == 4
    assert done.samples == 8 * {"arrays": 5, "texts": 2, "numbers": 1, "a number beside": 5}[kind]


class Normed(Net):
    """Has buffers besides those of observers, one of which its forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(self.norm(x))


def test_other_buffers_are_refused(tmp_path: Path) -> None:
    path, other, net = tmp_path / "c", Normed(), Normed()
    run(net, data(), path, limit=4)
    other.norm.running_var *= 100  # type: ignore[operator]
    refused(path, "other values in the model's buffers, as the running mean .* finish with the version", other)
    assert run(Normed(), data(), path, limit=6).resumed == 4
    assert run(Normed(), data(), path).resumed == 6


def test_a_model_that_wrote_to_its_buffers_goes_on(tmp_path: Path) -> None:
    path, net = tmp_path / "c", Normed()
    with pytest.raises(KeyboardInterrupt):
        run(net, stop_in_data(KeyboardInterrupt()), path)
    assert run(net, data(), path).resumed == 5


def test_a_file_of_a_version_that_looked_at_tensors_alone_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "c", checkpoint.write

    def write_as_before(path: Path, observers: Any, identity: Any, progress: checkpoint.Progress) -> None:
        own = {name: value for name, value in identity.items() if name != "buffers"}
        write(path, observers, own, replace(progress, values=None))

    monkeypatch.setattr(checkpoint, "write", write_as_before)
    run(Normed(), [(one, 1) for one in data()], path, limit=4)
    monkeypatch.undo()
    assert run(Normed(), [(one, 1) for one in data()], path).resumed == 4


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save_file({"x": torch.zeros(3)}, path)
    refused(path, r"a safetensors file that calibrate\.run did not write")
    path.write_text("weights")
    refused(path, "not a whole safetensors file")
    path.write_bytes(b"")
    refused(path, "not a whole safetensors file")


@settings(max_examples=20 if FAST else 100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_refused(half: Path, share: float) -> None:
    data_ = half.read_bytes()
    cut = half.with_name("cut")
    cut.write_bytes(data_[: int(share * len(data_))])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        checkpoint.read(cut, checkpoint.observers_of(Net()), checkpoint.identity(Net()))


@settings(max_examples=20 if FAST else 100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_an_altered_file_is_refused_or_means_the_same(half: Path, share: float, bit: int) -> None:
    """Every byte counts, but for those of the header that stand for nothing (padding)."""
    data_ = bytearray(half.read_bytes())
    place = int(share * len(data_))
    data_[place] ^= 1 << bit
    altered = half.with_name("altered")
    altered.write_bytes(data_)
    net = Net()
    observers, identity = checkpoint.observers_of(net), checkpoint.identity(net)
    good = checkpoint.read(half, observers, identity)
    try:
        found = checkpoint.read(altered, observers, identity)
    except CheckpointError:
        return
    assert found.progress == good.progress
    for name, observer in found.observers.items():
        assert_same(state(observer), state(good.observers[name]))


def test_another_version_is_refused(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SCHEMA", 2)
    refused(half, "has version 1, this library reads 2")


class Runner(nn.Module):
    """Holds observers under the name of this version, or of those before it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._quant = nn.Module()
        self._quant.add_module(name, nn.ModuleDict({"x": MinMaxObserver()}))

    def forward(self, x: Tensor) -> Tensor:
        [name] = self._quant._modules
        out: Tensor = self._quant.get_submodule(name)["x"](x)  # type: ignore[index]
        return out


def test_a_run_that_an_earlier_version_began_goes_on(tmp_path: Path) -> None:
    path, whole = tmp_path / "run.q8c", Runner("observers")
    calibrate.run(Runner("points"), data()[:3], checkpoint=path, progress=False)
    now = Runner("observers")
    calibrate.run(now, data(), checkpoint=path, progress=False)
    calibrate.run(whole, data(), progress=False)
    assert_same(state(now), state(whole))


def test_what_is_refused_says_which_version_wrote_it(half: Path) -> None:
    refused(half, r"octet-quant \S+ wrote it, this is \S+: finish with the version and the model", OneMore())


def test_the_file_holds_plain_tensors_and_json(half: Path) -> None:
    raw = half.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    manifest = json.loads(header["__metadata__"][checkpoint.KEY])
    assert (manifest["batches"], manifest["samples"], manifest["schema"]) == (4, 20, 1)
    assert manifest["versions"]["torch"] in (torch.__version__, torch.__version__.partition("+")[0])  # as pip knows it
    assert {"points.minmax.low", "channels.counts"} < set(header)


def test_a_state_that_is_not_tensors_is_refused_at_once(tmp_path: Path) -> None:
    class Odd(MinMaxObserver):
        def get_extra_state(self) -> str:
            return "text"

    net = nn.Sequential(Odd(ACTIVATION_U8))
    with pytest.raises(TypeError, match=r"observer '0': _extra_state of its state is a str, expected tensors"):
        run(net, data(), tmp_path / "c")


def test_a_failing_batch_leaves_the_checkpoint_before_it(tmp_path: Path, expected: dict[str, Tensor]) -> None:
    path = tmp_path / "c"
    with pytest.raises(CalibrationError, match="batch 6"):
        run(Net(), [*data()[:6], torch.zeros(2, 7)], path)
    net = Net()
    assert run(net, data(), path).resumed == 6
    assert_same(state(net), expected)


# One process imports torch and computes nothing, so that it may fork: each child runs until it is killed.
KILLER = """
import importlib.util, json, os, random, signal, sys, time
import torch
from pathlib import Path
from quant.calibrate import checkpoint
from safetensors import safe_open
from safetensors.torch import save_file
spec = importlib.util.spec_from_file_location("under_test", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
folder, kills, rng = Path(sys.argv[2]), int(sys.argv[3]), random.Random(int(sys.argv[4]))
path = folder / "checkpoint"

def child(told):
    torch.set_num_threads(1)
    def telling():
        for batch in module.data(40):
            os.write(told, b".")
            yield batch
    net = module.Net()
    done = module.run(net, telling(), path)
    save_file({n: t.clone() for n, t in net.state_dict().items()}, folder / "end")
    (folder / "resumed").write_text(str(done.resumed))

def spawn():
    heard, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(heard)
            child(told)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    os.close(told)
    return pid, heard

def seen():
    if not path.exists():
        return 0
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()[checkpoint.KEY])["batches"]

killed = 0
while killed < kills or seen() == 0:  # the last run shall have some to go on from
    pid, heard = spawn()
    for _ in range(rng.randrange(41)):  # batches, not seconds: a slow machine comes as far as a fast one
        if not os.read(heard, 1):
            break
    time.sleep(rng.uniform(0.0, 0.01))
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    os.close(heard)
    assert status in (0, signal.SIGKILL), status
    if status == 0:  # it was faster: begin anew
        path.unlink()
    killed += status == signal.SIGKILL
last, heard = spawn()
assert os.waitpid(last, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is missing")
def test_a_run_killed_again_and_again_ends_as_one_run(tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    done = subprocess.run(
        [sys.executable, "-c", KILLER, __file__, str(tmp_path), "4" if FAST else "12", str(seed)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stderr[-3000:]}"
    net = Net()
    calibrate.run(net, data(40), progress=False)
    assert_same(load_file(tmp_path / "end"), state(net))
    assert int((tmp_path / "resumed").read_text()) > 0


def test_a_folder_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        IsADirectoryError, match=rf"calibrate.run: checkpoint '{tmp_path}' is a folder, expected the name"
    ):
        calibrate.run(Net(), [torch.randn(5, 3)], checkpoint=tmp_path, progress=False)
