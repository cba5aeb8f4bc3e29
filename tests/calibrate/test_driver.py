"""`run` on a small observed model: what it calls, counts, restores, warns of and refuses."""

from __future__ import annotations

import errno
import io
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from quant.calibrate import CalibrationError, CalibrationWarning
from quant.kernels import ACTIVATION_U8
from quant.observers import FixedObserver, HistogramObserver, MinMaxObserver, Observer
from torch import Tensor, nn

from quant import calibrate


class Net(nn.Module):
    """fc between two observers, and a branch that no data reaches."""

    def __init__(self, observer: Callable[[], Observer] = HistogramObserver) -> None:
        super().__init__()
        self.before = observer()
        self.fc = nn.Linear(3, 3)
        self.after = observer()
        self.drop = nn.Dropout(0.9)
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(3) * 2)
            self.fc.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.drop(self.fc(self.before(x))))
        return out


def data(count: int = 4) -> list[Tensor]:
    return list(torch.randn(count, 5, 3, generator=torch.Generator().manual_seed(0)))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_observers_see_every_batch_without_dropout() -> None:
    net = Net(MinMaxObserver)
    done = calibrate.run(net, data(), progress=False)
    joint = torch.cat(data())
    assert (done.batches, done.samples, done.resumed, done.warnings) == (4, 20, 0, ())
    assert done.seconds > 0
    assert (net.before.low.item(), net.before.high.item()) == (joint.min().item(), joint.max().item())
    assert net.after.high.item() == 2 * joint.max().item()


@pytest.mark.parametrize(
    "batches",
    [
        (x for x in data()),
        [(x, torch.zeros(5)) for x in data()],
        [{"x": x} for x in data()],
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.cat(data()), torch.zeros(20)), batch_size=5),
    ],
    ids=["a generator", "pairs", "dicts", "a DataLoader"],
)
def test_any_iterable_gives_the_same(batches: Iterable[Any]) -> None:
    net, expected = Net(), Net()
    calibrate.run(expected, data(), progress=False)
    calibrate.run(net, batches, progress=False)
    assert_same(state(net), state(expected))


def test_forward_overrides_the_rule() -> None:
    net = Net(MinMaxObserver)
    calibrate.run(net, [{"image": data()[0]}], forward=lambda model, batch: model(batch["image"] * 3), progress=False)
    assert net.before.high.item() == (data()[0] * 3).max().item()


def test_limit_takes_no_batch_too_many() -> None:
    taken = []

    def endless() -> Iterator[Tensor]:
        while True:
            taken.append(1)
            yield data(1)[0]

    assert calibrate.run(Net(), endless(), limit=3, progress=False).batches == 3
    assert len(taken) == 3


def test_a_second_run_goes_on_from_the_first() -> None:
    net, expected = Net(), Net()
    calibrate.run(net, data()[:1], progress=False)
    calibrate.run(net, data()[1:], progress=False)
    calibrate.run(expected, data(), progress=False)
    assert_same(state(net), state(expected))


def test_no_graph_is_built_and_buffers_born_inside_can_be_trained() -> None:
    class Caching(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            assert not out.requires_grad
            self.cache = torch.ones(3)
            return out

    net = Caching()
    calibrate.run(net, data(), progress=False)
    (nn.Parameter(torch.ones(3)) * net.cache).sum().backward()


@pytest.mark.parametrize("fails", [False, True], ids=["after success", "after an error"])
def test_training_flags_come_back_as_they_were(fails: bool) -> None:
    net = Net().train()
    net.drop.eval()  # frozen: net.train() would thaw it
    batches: list[Any] = [*data(), "not a tensor"] if fails else data()
    flags = []
    net.fc.register_forward_hook(lambda *_: flags.append(any(module.training for module in net.modules())))
    try:
        calibrate.run(net, batches, progress=False)
    except CalibrationError:
        assert fails
    assert flags == [False] * 4
    assert (net.training, net.fc.training, net.drop.training) == (True, True, False)


def test_values_that_are_not_finite_name_the_layer_and_the_batch_once() -> None:
    net = Net()
    net.after.name = "encoder.3"
    batches = data()
    batches[2][0, 0] = torch.inf
    batches[2][1, :2] = torch.nan
    batches[3][0, 0] = torch.nan
    with pytest.warns(CalibrationWarning) as caught:
        done = calibrate.run(net, batches, progress=False)
    assert done.warnings == tuple(str(warning.message) for warning in caught)
    assert len(done.warnings) == 2
    assert "layer 'before': 2 NaN and 1 infinite values in batch 2" in done.warnings[0]
    # inf * 0 is NaN: the row of 3 outputs that had the infinity has inf, NaN, NaN.
    assert re.search(r"layer 'encoder\.3': \d NaN and \d infinite values in batch 2", done.warnings[1])


def test_observers_that_saw_nothing_are_named_together() -> None:
    class Branching(Net):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.ModuleList([MinMaxObserver(), HistogramObserver(), FixedObserver.sigmoid()])
            self.never[1].name = "head.conv"
            self.channels = MinMaxObserver(replace(ACTIVATION_U8, axis=1))

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            self.channels(torch.where(torch.arange(3) == 1, torch.nan, x))
            return x

    with pytest.warns(CalibrationWarning) as caught:
        calibrate.run(Branching(), data(), progress=False)
    [text] = [str(warning.message) for warning in caught if "no finite value" in str(warning.message)]
    assert text.endswith("3 observers saw no finite value: never.0, head.conv, channels (channels [1])")


def test_a_guess_about_batches_is_said_once() -> None:
    with pytest.warns(CalibrationWarning, match="label, which forward does not take: not used") as caught:
        calibrate.run(Net(), [{"x": x, "label": x} for x in data()], progress=False)
    assert len(caught) == 1


def test_an_error_in_the_model_names_the_batch() -> None:
    expected = r"batch 2, \(float32 \[5, 4\], int64 \[5\]\): RuntimeError: .*"
    batches = [*data(2), (torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64))]
    with pytest.raises(CalibrationError, match=expected) as caught:
        calibrate.run(Net(), batches, progress=False)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_in_the_data_is_the_data_s_own() -> None:
    def broken() -> Iterator[Tensor]:
        yield data()[0]
        raise LookupError("the disk is gone")

    with pytest.raises(LookupError, match="the disk is gone"):
        calibrate.run(Net(), broken(), progress=False)


@pytest.mark.parametrize(
    ("batches", "options", "error", "message"),
    [
        ([], {}, ValueError, "batches is empty"),
        (torch.zeros(5, 3), {}, TypeError, "batches is a Tensor, .* put a single batch in a list"),
        ({"x": torch.zeros(5, 3)}, {}, TypeError, "batches is a dict"),
        (3, {}, TypeError, "batches is a int"),
        (data(), {"limit": 0}, ValueError, "limit is 0, expected at least 1"),
    ],
    ids=["empty", "a tensor", "a dict", "a number", "limit"],
)
def test_wrong_arguments(batches: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        calibrate.run(Net(), batches, progress=False, **options)


def test_a_model_without_observers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Linear has no observers; quant\.prepare"):
        calibrate.run(nn.Linear(3, 3), data(), progress=False)
    with pytest.raises(TypeError, match=r"prepared is a list, expected an nn\.Module"):
        calibrate.run([], data(), progress=False)  # type: ignore[arg-type]


def test_the_bar_has_a_rate_and_the_remaining_time(
    terminal: io.StringIO, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", terminal)
    calibrate.run(Net(), data(), limit=3)
    assert re.search(r"calibrating: 100%.* 3/3 \[\d\d:\d\d<\d\d:\d\d, .*batch/s\]", terminal.getvalue())
    calibrate.run(Net(), (x for x in data()))
    assert re.search(r"calibrating: 4batch \[.*batch/s\]", terminal.getvalue())
    said = terminal.getvalue()
    calibrate.run(Net(), data(), progress=False)
    assert terminal.getvalue() == said
    assert capsys.readouterr().out == ""


def test_warnings_as_errors_leave_the_model_in_order() -> None:
    net = Net().train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CalibrationWarning):
            calibrate.run(net, [torch.full((1, 3), torch.nan)], progress=False)
    assert net.training


class Loader:
    """As a DataLoader, whose workers find no room."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def __iter__(self) -> Iterator[Tensor]:
        yield data()[0]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_workers_without_shared_memory_are_said() -> None:
    """Of torch's own loader it is an OSError without a word about what is full."""
    with pytest.raises(OSError, match=r"2 workers: No space left on device; they share .*/dev/shm.*num_workers=0"):
        calibrate.run(Net(), Loader(2), progress=False)
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device$"):
        calibrate.run(Net(), Loader(0), progress=False)


def test_suspicious_extremes_stand_in_the_warnings_of_a_run() -> None:
    net = Net(MinMaxObserver)
    done = calibrate.run(net, [batch + 100 for batch in data()], progress=False)  # no warning of Python's
    rows = {row.layer: row.warnings for row in calibrate.ranges(net)}
    assert "far from zero" in rows["before"][0]
    assert done.warnings == tuple(
        f"calibrate.run: layer {layer!r}: {text}" for layer, texts in rows.items() for text in texts
    )


def test_one_value_of_every_input_is_a_warning_and_of_a_layer_within_is_none() -> None:
    net = Net(MinMaxObserver)
    done = calibrate.run(net, [torch.zeros(5, 3)] * 2, progress=False)  # nobody says what is an input
    assert [text.partition(", ")[0] for text in done.warnings] == [
        "calibrate.run: layer 'before': is always 0", "calibrate.run: layer 'after': is always 0",
    ]  # fmt: skip
    net.before.of_input = True
    with pytest.warns(CalibrationWarning, match=r"every input always has one value, .*: before; give data"):
        calibrate.run(net, [torch.zeros(5, 3)], progress=False)
    net.after.of_input = True
    net.after(torch.ones(1))
    calibrate.run(net, [torch.zeros(5, 3)], progress=False)  # as a mask of zeros beside an image
