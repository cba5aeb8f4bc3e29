"""The server of the tutorial, with a small model in place of a trained one."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
from torch import nn

import quant

from .conftest import TUTORIALS, load


@pytest.fixture(scope="module")
def serving(zoo: ModuleType) -> ModuleType:
    return load("octet_serving", TUTORIALS / "serving.py")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    path = tmp_path_factory.mktemp("served") / "model.q8"
    quant.save(quant.quantize_dynamic(model), path, runner=True, example_inputs=torch.zeros(1, 32, dtype=torch.int64))
    return path


@pytest.mark.parametrize("share", ["fork", "threads", "nothing"])
def test_every_way_of_sharing_answers_with_the_models_bits(share: str, serving: ModuleType, file: Path) -> None:
    words = torch.randint(1000, (2, 7))
    with torch.inference_mode():
        expected = quant.load(file)(words).numpy()
    with serving.server(str(file), share, 2) as (process, port):
        body = serving.bytes_of(words.numpy())
        assert len(serving.pressed(port, [body], clients=3, seconds=0.3)) >= 3
        assert numpy.array_equal(serving.asked(port, body), expected)
        workers = Path(f"/proc/{process}/task/{process}/children")
        if workers.exists():
            # A process that spawns has one more, which watches over what they share.
            assert len(workers.read_text().split()) == {"fork": 2, "threads": 0, "nothing": 3}[share]
            assert serving.memory(process) > 2**20
    with pytest.raises(ConnectionRefusedError):
        serving.asked(port, body)
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_what_is_no_input_is_refused_and_the_server_goes_on(serving: ModuleType, file: Path) -> None:
    good = serving.bytes_of(numpy.zeros((1, 5), numpy.int64))
    objects = io.BytesIO()
    numpy.save(objects, numpy.array([{}], dtype=object), allow_pickle=True)
    with serving.server(str(file), "threads", 1) as (_, port):
        for bad in (b"no array", serving.bytes_of(numpy.zeros((1, 5), numpy.float32)), objects.getvalue()):
            with pytest.raises(RuntimeError, match="status 400"):
                serving.asked(port, bad)
        with pytest.raises((RuntimeError, ConnectionError)):
            serving.asked(port, bytes(2**20 + 1))
        assert serving.asked(port, good).shape == (1, 5, 4)


def test_a_server_that_cannot_load_says_so(serving: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with status 1"), serving.server(str(tmp_path / "none"), "fork", 1):
        pass


def test_the_plot_shows_every_way(serving: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'octet-quant[tutorials]'")
    one = serving.Served(10.0, 0.1, 0.2, 1e8)
    served = {(share, form): one for share in serving.SHARES for form in (serving.FLOAT, "int8")}
    serving.draw(tmp_path / "plot.svg", served)
    assert (tmp_path / "plot.svg").stat().st_size > 1000
