"""The server of the tutorial, with a small model in place of a trained one."""

from __future__ import annotations

import http.client
import io
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from functools import partial
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
    start, length = good.index(b"(1, 5)"), len("(1, 5)")
    unclosed, long, longest = (
        good[:start] + shape.encode() + good[start + length :]
        for shape in ("(1, 5 ", "(10**9", "(99999999999999999999,)")
    )
    with serving.server(str(file), "threads", 1) as (_, port):
        for bad in (
            *(b"no array", b"PK\x03\x04 no archive either", good[:-1], unclosed, long, longest),
            *(serving.bytes_of(numpy.zeros((1, 5), numpy.float32)), objects.getvalue()),
        ):
            with pytest.raises(RuntimeError, match="status 400"):
                serving.asked(port, bad)
        for said in ("", "abc", "-5", "9" * 5000):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(f"POST / HTTP/1.0\r\nContent-Length: {said}\r\n\r\n".encode())
                assert connection.recv(100).startswith(b"HTTP/1.0 411 ")
        with pytest.raises((RuntimeError, ConnectionError)):
            serving.asked(port, bytes(2**20 + 1))
        assert serving.asked(port, good).shape == (1, 5, 4)


def test_a_client_that_says_nothing_holds_no_worker(serving: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving.Handler, "timeout", 0.2)
    server = serving.HTTPServer(("127.0.0.1", 0), partial(serving.Handler, nn.Identity()))
    with server, socket.create_connection(server.server_address):
        handled = threading.Thread(target=server.handle_request, daemon=True)
        handled.start()
        handled.join(30)
        assert not handled.is_alive()


@pytest.mark.parametrize("share", ["fork", "nothing"])
def test_a_server_that_cannot_load_says_so(
    share: str, serving: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="ended with status 1"), serving.server(str(tmp_path / "none"), share, 1):
        pass
    assert ("serving: a worker has ended" if share == "nothing" else "serving: No such file") in capfd.readouterr().err


def test_a_server_that_loses_a_worker_ends(serving: ModuleType, file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving.server(str(file), "fork", 2) as (process, port):
        workers = Path(f"/proc/{process}/task/{process}/children")
        if not workers.exists():
            pytest.skip("which processes are a server's workers is told by Linux's /proc")
        os.kill(int(workers.read_text().split()[0]), signal.SIGKILL)
        until = time.monotonic() + 30
        with suppress(ConnectionError, http.client.HTTPException):
            while time.monotonic() < until:
                serving.asked(port, serving.bytes_of(numpy.zeros((1, 5), numpy.int64)))
        assert time.monotonic() < until
    assert "serving: a worker has ended, with status -9" in capfd.readouterr().err


@pytest.mark.parametrize("words", [["--workers", "0"], ["--port", "99999"]], ids=" ".join)
def test_settings_that_cannot_be_are_refused(words: list[str], serving: ModuleType, file: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        serving.main(["serve", str(file), *words])
    assert ended.value.code == 2 or "port must be 0-65535" in str(ended.value.code)


def test_the_plot_shows_every_way(serving: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'octet-quant[tutorials]'")
    one = serving.Served(10.0, 0.1, 0.2, 1e8)
    served = {(share, form): one for share in serving.SHARES for form in (serving.FLOAT, "int8")}
    serving.draw(tmp_path / "plot.svg", served)
    assert (tmp_path / "plot.svg").stat().st_size > 1000
