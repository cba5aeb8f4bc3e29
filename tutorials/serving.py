"""Serve an int8 model over HTTP by workers that share its weights, and measure what that is worth.

    python tutorials/serving.py serve FILE.q8 [--workers N] [--share fork|threads|nothing] [--port N]
    python tutorials/serving.py measure [--workers N] [--seconds S] [--out FILE.svg]

A request is an array in numpy's .npy format, and so is the answer: `curl --data-binary @words.npy localhost:8000`. The
standard library's server stands for yours; docs/guides/serving.md says what matters in any. `measure` serves a trained
sentence encoder (MiniLM of zoo/minilm.py) in float and int8, and ends in asserts.
"""

from __future__ import annotations

import argparse
import http.client
import io
import multiprocessing
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy
import torch
from torch import nn

import quant

OUT = Path(__file__).parent / "out" / "serving.svg"
SHARES = ("fork", "threads", "nothing")
FLOAT = "float"
"""In place of a file: the float sentence encoder, which int8 is measured beside."""
WORDS, LONGEST_BODY = 32, 2**20
PATIENCE = 10.0
"""Seconds that a client may say nothing for: it would hold a worker."""


def loaded(file: str) -> nn.Module:
    """The model of a file of `quant.save(..., runner=True)`: no code of the model's is needed."""
    if file != FLOAT:
        return quant.load(file)
    from zoo import minilm

    return minilm.load()


def array_of(data: bytes) -> numpy.ndarray:
    """An array of the bytes of an .npy file; one with objects is refused, as it would be unpickled.

    Raises:
        ValueError: the bytes are no such file, or one of an array that is longer than they are.
    """
    if not data.startswith(b"\x93NUMPY"):
        raise ValueError("the body is no .npy file")
    try:
        found: numpy.ndarray = numpy.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # numpy lets out what its parser and its allocator raise
        raise ValueError(f"the body is no .npy file that can be read: {error}") from error
    return found


def bytes_of(array: numpy.ndarray) -> bytes:
    """The bytes of an .npy file."""
    stream = io.BytesIO()
    numpy.save(stream, array, allow_pickle=False)
    return stream.getvalue()


class Handler(BaseHTTPRequestHandler):
    """Answers a POST by the model of the server; one call at a time on each thread."""

    timeout = PATIENCE

    def __init__(self, model: nn.Module, *arguments: object) -> None:
        self.model = model
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_POST(self) -> None:
        said = self.headers.get("Content-Length", "")
        if not (said.isascii() and said.isdigit() and len(said) < 20):
            self.send_error(411, explain=f"Content-Length is {said!r}, expected the number of bytes of the body")
            return
        if not 0 < int(said) <= LONGEST_BODY:
            self.send_error(413, explain=f"the body has {said} bytes, expected 1 to {LONGEST_BODY}")
            return
        try:
            inputs = torch.from_numpy(array_of(self.rfile.read(int(said))))
            with torch.inference_mode():
                answer = bytes_of(self.model(inputs).numpy())
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            self.send_error(400, explain=str(error))
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: object) -> None:
        """Nothing: a line a request is for the server in front."""


def serving(listening: socket.socket, model: nn.Module, kind: type[HTTPServer] = HTTPServer) -> None:
    """Answer what comes to a socket, which other workers may listen to as well."""
    server = kind(listening.getsockname(), partial(Handler, model), bind_and_activate=False)
    server.socket.close()
    server.socket = listening
    server.serve_forever()


def load_and_serve(listening: socket.socket, file: str, ready: Connection) -> None:
    """The body of a worker that shares nothing; it says when it has loaded."""
    torch.set_num_threads(1)
    model = warm(loaded(file))
    ready.send(True)
    serving(listening, model)


def warm(model: nn.Module) -> nn.Module:
    """The model after a call, which packs its weights for this CPU: workers that are forked later share these too."""
    with torch.inference_mode():
        model(torch.ones(1, WORDS, dtype=torch.int64))
    return model


def serve(file: str, share: str, workers: int, port: int, ready: Callable[[int], None]) -> None:
    """Serve until the process is told to end.

    Args:
        share: "fork" has worker processes that are forked from one that has loaded and called the model; "threads" are
            in one process; "nothing" has processes that load it themselves.
        ready: is given the port, once all workers have loaded.

    Raises:
        RuntimeError: a worker has ended; the others end with this process, for what watches over it to start it anew.
    """
    torch.set_num_threads(1)  # a worker each core; and torch's own threads would not be in a forked child
    if not 0 <= port <= 65535:  # create_server would leave its socket open
        raise ValueError(f"port must be 0-65535, not {port}")
    listening = socket.create_server(("127.0.0.1", port), backlog=128)
    if share == "threads":
        model = warm(loaded(file))
        ready(listening.getsockname()[1])
        serving(listening, model, limited(workers))
        return
    processes: list[BaseProcess] = []  # daemons, which end with this process
    if share == "fork":
        fork, model = multiprocessing.get_context("fork"), warm(loaded(file))
        for _ in range(workers):
            processes.append(fork.Process(target=serving, args=(listening, model), daemon=True))
            processes[-1].start()
    else:
        spawn, told = multiprocessing.get_context("spawn"), []
        for _ in range(workers):
            here, there = spawn.Pipe(duplex=False)
            processes.append(spawn.Process(target=load_and_serve, args=(listening, file, there), daemon=True))
            processes[-1].start()
            there.close()
            told.append(here)
        try:
            for here in told:
                here.recv()
        except EOFError:
            raise RuntimeError("a worker has ended before it had loaded; the lines above are its own") from None
    ready(listening.getsockname()[1])
    ended = wait([process.sentinel for process in processes])
    first = next(process for process in processes if process.sentinel in ended)
    first.join()  # its status comes a moment later
    raise RuntimeError(f"a worker has ended, with status {first.exitcode}")


def limited(workers: int) -> type[HTTPServer]:
    """A server with a thread a connection, of which so many compute at a time."""
    free = threading.BoundedSemaphore(workers)

    class Limited(ThreadingHTTPServer):
        def finish_request(self, *arguments: object) -> None:
            with free:
                super().finish_request(*arguments)  # type: ignore[arg-type]

    return Limited


# --- measuring ---


def asked(port: int, body: bytes) -> numpy.ndarray:
    """The answer to one request, over a connection of its own."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", "/", body)
        response = connection.getresponse()
        data = response.read()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {data.decode(errors='replace')}")
    return array_of(data)


@contextmanager
def server(file: str, share: str, workers: int) -> Iterator[tuple[int, int]]:
    """A server in a process of its own: its process id and port, once each worker answers."""
    command = [sys.executable, __file__, "serve", file, "--share", share, "--workers", str(workers), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the server of {file} ended with status {process.wait()}")
            yield process.pid, int(line.rpartition(":")[2])
        finally:
            process.terminate()


def memory(process: int) -> int:
    """Bytes of a process and its children, pages that several share counted in part (Linux's Pss)."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    own = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return own + sum(memory(int(child)) for child in children)


def pressed(port: int, bodies: Sequence[bytes], clients: int, seconds: float) -> list[float]:
    """Seconds that each request took, by clients that ask again as soon as they have an answer."""
    until = time.perf_counter() + seconds
    taken: list[list[float]] = [[] for _ in range(clients)]

    def ask(own: list[float]) -> None:
        while (began := time.perf_counter()) < until:
            asked(port, bodies[len(own) % len(bodies)])
            own.append(time.perf_counter() - began)

    threads = [threading.Thread(target=ask, args=(own,)) for own in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [one for own in taken for one in own]


@dataclass(frozen=True)
class Served:
    """Medians over rounds: requests a second, the median and 99th percentile of a request in seconds, and bytes."""

    rate: float
    p50: float
    p99: float
    bytes: float


def measure(file: str, workers: int, seconds: float, rounds: int = 3) -> dict[tuple[str, str], Served]:
    """What each way of sharing gives in float and int8, in turns; the answers' cosines to float's are asserted."""
    from zoo import minilm

    words = torch.randint(1000, minilm.WORDS, (8, 1, WORDS), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = minilm.load()(words[0])
    bodies = [bytes_of(one.numpy()) for one in words]
    cells = [(share, form) for share in SHARES for form in (FLOAT, "int8")]
    seen: dict[tuple[str, str], list[Served]] = {cell: [] for cell in cells}
    for round_ in range(rounds):
        for share, form in cells[:: 1 if round_ % 2 == 0 else -1]:
            with server(FLOAT if form == FLOAT else file, share, workers) as (process, port):
                pressed(port, bodies, 2 * workers, 2.0)  # until each worker has loaded and packed
                found = torch.from_numpy(asked(port, bodies[0]))
                assert float(nn.functional.cosine_similarity(found, expected)) > 0.99
                taken = pressed(port, bodies, 2 * workers, seconds)
                p50, p99 = numpy.percentile(taken, [50, 99])
                seen[share, form].append(Served(len(taken) / seconds, float(p50), float(p99), memory(process)))
    return {
        cell: Served(*(statistics.median(column) for column in zip(*map(astuple, rows), strict=True)))
        for cell, rows in seen.items()
    }


def astuple(one: Served) -> tuple[float, float, float, float]:
    return one.rate, one.p50, one.p99, one.bytes


def draw(path: Path, served: Mapping[tuple[str, str], Served]) -> None:
    """Requests a second, and memory, by form and sharing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, title, value in (
        (left, "requests a second", lambda one: one.rate),
        (right, "MiB of all workers", lambda one: one.bytes / 2**20),
    ):
        for form, shift, colour in ((FLOAT, -0.2, "#444444"), ("int8", 0.2, "#1f6f8b")):
            values = [value(served[share, form]) for share in SHARES]
            axes.bar([place + shift for place in range(len(SHARES))], values, 0.38, color=colour, label=form)
        axes.set(title=title, xticks=range(len(SHARES)), xticklabels=SHARES, xlabel="what shares the weights")
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def measure_and_tell(options: argparse.Namespace) -> None:
    """The table and the plot."""
    from zoo import minilm
    from zoo.fetch import DataUnavailable

    try:
        model = minilm.load()
    except DataUnavailable as error:
        sys.exit(f"serving: {error}")
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "minilm.q8")
        quant.save(
            quant.quantize_dynamic(model),
            file,
            runner=True,
            example_inputs=torch.ones(2, WORDS, dtype=torch.int64),
        )
        served = measure(file, options.workers, options.seconds)
    print(f"{options.workers} workers, {2 * options.workers} clients, sentences of {WORDS} words")
    for (share, form), one in served.items():
        print(
            f"{share:8} {form:6} {one.rate:6.1f} a second, p50 {1e3 * one.p50:6.1f} ms, p99 {1e3 * one.p99:6.1f} ms, "
            f"{one.bytes / 2**20:5.0f} MiB"
        )
    for share in SHARES:
        assert served[share, "int8"].rate > served[share, FLOAT].rate
        assert served[share, "int8"].bytes < served[share, FLOAT].bytes
    assert served["fork", "int8"].bytes < 0.7 * served["nothing", "int8"].bytes
    draw(options.out, served)
    print(f"wrote {options.out}")


def positive(word: str) -> int:
    """A number of workers."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word}, expected 1 or more")
    return number


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("serve", help="serve a file until the process is told to end")
    one.add_argument("file", help=f"of quant.save(..., runner=True); {FLOAT!r} for the float sentence encoder")
    one.add_argument("--share", choices=SHARES, default="fork", help="what shares the weights (default fork)")
    one.add_argument("--workers", type=positive, default=2, help="that compute at a time (default 2)")
    one.add_argument("--port", type=int, default=8000, help="on this machine alone; 0 for any (default 8000)")
    other = verbs.add_parser("measure", help="requests a second, latency and memory, float and int8")
    other.add_argument("--workers", type=positive, default=2, help="default 2")
    other.add_argument("--seconds", type=float, default=6.0, help="of a round (default 6)")
    other.add_argument("--out", type=Path, default=OUT, help="the plot (default tutorials/out)")
    options = parser.parse_args(arguments)
    if options.verb == "measure":
        measure_and_tell(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that daemons are ended
    ready = lambda port: print(f"http://127.0.0.1:{port}", flush=True)  # noqa: E731
    try:
        serve(options.file, options.share, options.workers, options.port, ready)
    except (OSError, RuntimeError, ValueError) as error:  # a file, a port, a worker
        sys.exit(f"serving: {error}")


if __name__ == "__main__":
    main()
