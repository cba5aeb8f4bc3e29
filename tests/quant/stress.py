"""`make stress`: int8 models under many threads, in forked and spawned processes, through signals, and for long.

Each part runs in a process of its own, and says what it did. It fails where a result is not what one thread gives,
where memory grows, and where somebody waits for ever.

    python tests/quant/stress.py --seconds 600                 # every part, each for so long
    python tests/quant/stress.py --part threads --seed 7       # one of them
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __package__ in (None, ""):
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import quant
from tests.quant.runner_models import Residual, SmallTagger

SECONDS = float(os.environ.get("OCTET_FUZZ_SECONDS", "60"))
THREADS = 64
MOST_GROWN = 256 << 10
"""Bytes of a process that its calls may add: what the C library and Python keep for themselves, and no plan a call."""


class Wrong(AssertionError):
    """A model of ours does something else than it does alone, or leaves something behind."""


class Block(nn.Module):
    """Attention and two linear layers, normalised before each."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        parts = (one(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class Frames(nn.Module):
    """A recurrent layer over frames of reals."""

    def __init__(self) -> None:
        super().__init__()
        self.states, self.last = nn.LSTM(12, 16, batch_first=True), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.states(x)[0])


class Stepped(nn.Module):
    """A step that no kernel computes between two native calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.cumsum(torch.relu(self.first(x)), 2) / 9)


Call = tuple[Tensor, ...]


@dataclass(frozen=True)
class Kind:
    """A model and how it is called.

    Attributes:
        make: the float model.
        call: inputs for a batch and a length, and values by a generator.
        static: whether it is calibrated; else dynamic.
    """

    make: Callable[[], nn.Module]
    call: Callable[[int, int, torch.Generator], Call]
    static: bool


def _images(batch: int, length: int, g: torch.Generator) -> Call:
    return (torch.randn(batch, 3, 16 + 2 * length, 24, generator=g),)


def _rows(width: int) -> Callable[[int, int, torch.Generator], Call]:
    return lambda batch, length, g: (torch.randn(batch, length, width, generator=g),)


def _words(batch: int, length: int, g: torch.Generator) -> Call:
    return (torch.randint(0, 20, (length, batch), generator=g),)


def _words_and_states(batch: int, length: int, g: torch.Generator) -> Call:
    return (*_words(batch, length, g), torch.randn(2, batch, 8, generator=g) / 4)


WIDE: dict[str, Kind] = {
    "wide cnn": Kind(
        lambda: nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1)),
        lambda batch, length, g: (torch.randn(batch + 1, 3, 64, 48 + length, generator=g),),
        True,
    ),
    "wide linear": Kind(
        lambda: nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)),
        lambda batch, length, g: (torch.randn(64 * batch + length, 512, generator=g),),
        False,
    ),
    "wide lstm": Kind(
        lambda: nn.Sequential(nn.LSTM(256, 512)),
        lambda batch, length, g: (torch.randn(2 + length % 5, batch, 256, generator=g),),
        False,
    ),
}
"""Models whose layers several threads share."""

KINDS: dict[str, Kind] = {
    "static cnn": Kind(Residual, _images, True),
    "static block": Kind(Block, _rows(32), True),
    "static lstm": Kind(Frames, _rows(12), True),
    "static with a float step": Kind(Stepped, _images, True),
    "dynamic lstm": Kind(SmallTagger, _words_and_states, False),
    "dynamic linear": Kind(lambda: nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 7)), _rows(24), False),
    "embedding": Kind(lambda: nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 9)), _words, False),
    "embedding bag": Kind(lambda: nn.Sequential(nn.EmbeddingBag(20, 16), nn.Linear(16, 9)), _words, False),
}


def quantized(kind: Kind) -> nn.Module:
    """The int8 model; with weights that are the same each time, in any thread."""
    model = kind.make().eval()
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=g) / max(parameter[0].numel(), 1) ** 0.5)
    if not kind.static:
        return quant.quantize_dynamic(model)
    batches = [kind.call(2, 5, torch.Generator().manual_seed(seed)) for seed in range(2)]
    return quant.quantize_static(model, batches, progress=False)


def flat(output: Any) -> list[Tensor]:
    """The tensors of an output."""
    if isinstance(output, Tensor):
        return [output]
    return [tensor for one in output for tensor in flat(one)]


def run(model: nn.Module, call: Call) -> list[Tensor]:
    with torch.inference_mode():
        return flat(model(*call))


@dataclass
class Subject:
    """An int8 model, its calls, and what one thread gave for each."""

    name: str
    model: nn.Module
    calls: list[Call]
    expected: list[list[Tensor]]

    @classmethod
    def of(cls, name: str, count: int = 24) -> Subject:
        kind, sizes = {**KINDS, **WIDE}[name], random.Random(name)
        model = quantized(kind)
        calls = [
            kind.call(1 + sizes.randrange(4), 1 + sizes.randrange(20), torch.Generator().manual_seed(place))
            for place in range(count)
        ]
        return cls(name, model, calls, [run(model, call) for call in calls])

    def check(self, model: nn.Module, place: int) -> None:
        """One call of this model, or of another that has to be as it is."""
        found, place = run(model, self.calls[place % len(self.calls)]), place % len(self.calls)
        for one, other in zip(found, self.expected[place], strict=True):
            if not torch.equal(one, other):
                raise Wrong(f"{self.name}, call {place}: not what one thread gives")

    def save(self, folder: Path) -> Path:
        path = folder / f"{self.name.replace(' ', '_')}.{threading.get_ident()}.q8"
        quant.save(self.model, path)
        return path

    def load(self, path: Path) -> nn.Module:
        return quant.load(path, model={**KINDS, **WIDE}[self.name].make().eval())


class Workers:
    """Threads whose first error is raised where they are joined."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._threads: list[threading.Thread] = []

    def start(self, work: Callable[..., None], *args: Any) -> None:
        def guarded() -> None:
            try:
                work(*args)
            except BaseException as error:
                self.errors.append(
                    str(error) if isinstance(error, Wrong) else "".join(traceback.format_exception(error)[-12:])
                )

        self._threads.append(threading.Thread(target=guarded, daemon=True))
        self._threads[-1].start()

    def join(self, seconds: float = 600.0) -> None:
        end = time.monotonic() + seconds
        for one in self._threads:
            one.join(max(0.0, end - time.monotonic()))
        if any(one.is_alive() for one in self._threads):
            raise Wrong(f"{sum(one.is_alive() for one in self._threads)} threads wait for ever")
        if self.errors:
            raise Wrong(f"{len(self.errors)} threads failed, the first: {self.errors[0]}")


@dataclass(frozen=True)
class Kept:
    """What a process holds: counts of the extension, Python's objects, and bytes."""

    plans: int
    texts: int
    packed: int
    objects: int
    allocated: int
    resident: int

    @classmethod
    def now(cls) -> Kept:
        gc.collect()
        native = torch.ops.octet_native
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return cls(
            native.plan_count(),
            native.text_count(),
            native.packed_count(),
            len(gc.get_objects()),
            _allocated(),
            pages * resource.getpagesize(),
        )


_MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO]


def _allocated() -> int:
    """Bytes that the C library has given out; 0 where it does not count them."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _Mallinfo
    info = library.mallinfo2()
    return int(info.uordblks + info.hblkhd)


# Threads


def threads(seconds: float, seed: int, count: int = THREADS) -> str:
    """All models by all threads, sizes in any order, while others are made, saved, loaded and dropped."""
    torch.set_num_threads(1)
    subjects = [Subject.of(name) for name in KINDS]
    before = Kept.now()
    end, totals, workers = time.monotonic() + seconds, Counter[str](), Workers()
    totals_of: list[Counter[str]] = []

    def call(number: int) -> None:
        draws, own = random.Random(f"{seed} {number}"), Counter[str]()
        totals_of.append(own)
        while time.monotonic() < end and not workers.errors:
            subject = draws.choice(subjects)
            subject.check(subject.model, draws.randrange(1000))
            own["calls"] += 1

    def make(number: int, folder: Path) -> None:
        draws, own = random.Random(f"{seed} made {number}"), Counter[str]()
        totals_of.append(own)
        while True:
            subject = draws.choice(subjects)
            made = Subject(subject.name, quantized(KINDS[subject.name]), subject.calls, subject.expected)
            made.check(made.model, draws.randrange(1000))
            loaded = subject.load(made.save(folder))
            made.check(loaded, draws.randrange(1000))
            own["models made, saved, loaded and dropped"] += 1
            if time.monotonic() >= end or workers.errors:
                break

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once, here: the filters are all threads'
        for number in range(count):
            workers.start(call, number)
        for number in range(2):
            workers.start(make, number, Path(folder))
        workers.join(seconds + 600)
    for own in totals_of:
        totals.update(own)
    after = Kept.now()
    for name in ("texts", "packed"):
        if getattr(after, name) > getattr(before, name):
            raise Wrong(
                f"{getattr(after, name)} {name} after all other models are gone, {getattr(before, name)} before"
            )
    return f"{count} threads on {len(subjects)} models: " + ", ".join(f"{n} {what}" for what, n in totals.items())


def first_calls(seconds: float, seed: int, count: int = 16) -> str:
    """Threads that make the first call of a model at once: texts, plans and packed weights are made by several."""
    torch.set_num_threads(1)
    subjects, draws, rounds = [Subject.of(name, 6) for name in KINDS], random.Random(seed), 0
    end = time.monotonic() + seconds
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with tempfile.TemporaryDirectory() as folder:
        files = [subject.save(Path(folder)) for subject in subjects]
        while rounds < len(subjects) or time.monotonic() < end:
            subject, path = subjects[rounds % len(subjects)], files[rounds % len(subjects)]
            model, begin, workers = subject.load(path), threading.Barrier(count), Workers()
            same = draws.randrange(2)

            def work(
                number: int, subject: Subject = subject, model: nn.Module = model, begin: Any = begin, same: int = same
            ) -> None:
                begin.wait()
                for place in (0 if same else number, number + 1):
                    subject.check(model, place)

            for number in range(count):
                workers.start(work, number)
            workers.join()
            rounds += 1
    sys.setswitchinterval(switch)
    return f"{rounds} models whose first call {count} threads made at once"


# Long


def long(seconds: float, seed: int) -> str:
    """Calls of mixed sizes: no memory is left of them."""
    torch.set_num_threads(1)
    subjects = [Subject.of(name) for name in KINDS]
    draws, count = random.Random(seed), 0

    def calls(subject: Subject, number: int) -> None:
        for _ in range(number):
            run(subject.model, subject.calls[draws.randrange(len(subject.calls))])

    for subject in subjects:
        calls(subject, 200)
    before, end = Kept.now(), time.monotonic() + seconds
    while time.monotonic() < end:
        for subject in subjects:
            calls(subject, 100)
            subject.check(subject.model, draws.randrange(1000))
            count += 101
    return f"{count} calls of {len(subjects)} models, {grown(before, Kept.now())}"


def grown(before: Kept, after: Kept) -> str:
    """The growth in words.

    Raises:
        Wrong: there is more than there was.
    """
    for name in ("plans", "texts", "packed"):
        if getattr(after, name) != getattr(before, name):
            raise Wrong(f"{getattr(after, name)} {name}, {getattr(before, name)} before")
    objects, allocated = after.objects - before.objects, after.allocated - before.allocated
    if objects > 100:
        raise Wrong(f"{objects} more objects of Python")
    if allocated > MOST_GROWN:
        raise Wrong(f"{allocated} more bytes allocated")
    resident = after.resident - before.resident
    return f"{objects} more objects of Python, {allocated} more bytes allocated, {resident} resident"


def made_and_dropped(seconds: float, seed: int) -> str:
    """Models that are made, called, saved, loaded and dropped again and again: nothing is left of them."""
    torch.set_num_threads(1)
    subjects, draws, count = [Subject.of(name, 4) for name in KINDS], random.Random(seed), 0

    def once(subject: Subject, path: Path) -> None:
        made = Subject(subject.name, quantized(KINDS[subject.name]), subject.calls, subject.expected)
        made.check(made.model, draws.randrange(1000))
        quant.save(made.model, path)
        subject.check(subject.load(path), draws.randrange(1000))

    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            for subject in subjects:
                once(subject, Path(folder) / "model.q8")
        before, end = Kept.now(), time.monotonic() + seconds
        while count < len(subjects) or time.monotonic() < end:
            once(subjects[count % len(subjects)], Path(folder) / "model.q8")
            count += 1
        return f"{count} models made, saved, loaded and dropped: {grown(before, Kept.now())}"


# Signals


class Interrupted(Exception):
    """What the handler of a signal raises."""


def signals(seconds: float, seed: int) -> str:
    """A signal's handler raises anywhere in a call, as Ctrl-C does: the next call is as if there had been none."""
    torch.set_num_threads(1)
    subjects, draws = [Subject.of(name, 6) for name in KINDS], random.Random(seed)
    totals, end = Counter[str](), time.monotonic() + seconds

    def handler(number: int, frame: Any) -> None:
        raise draws.choice((Interrupted, KeyboardInterrupt))

    known = signal.signal(signal.SIGALRM, handler)
    with tempfile.TemporaryDirectory() as folder:
        files = [subject.save(Path(folder)) for subject in subjects]
        models = [subject.load(path) for subject, path in zip(subjects, files, strict=True)]
        taken = [_seconds(subject, model) for subject, model in zip(subjects, models, strict=True)]
        while time.monotonic() < end:
            place = draws.randrange(len(subjects))
            subject = subjects[place]
            if draws.randrange(4) == 0:  # first calls too, which make texts and plans
                models[place] = subject.load(files[place])
            with contextlib.suppress(Interrupted, KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, draws.random() * 1.5 * taken[place]))
                subject.check(models[place], draws.randrange(1000))
                signal.setitimer(signal.ITIMER_REAL, 0)
                totals["calls that ended before"] += 1
            with contextlib.suppress(Interrupted, KeyboardInterrupt):  # one that came between
                signal.setitimer(signal.ITIMER_REAL, 0)
            totals["interrupted calls"] += 1
            subject.check(models[place], draws.randrange(1000))
    signal.signal(signal.SIGALRM, known)
    totals["interrupted calls"] -= totals["calls that ended before"]
    return ", ".join(f"{n} {what}" for what, n in totals.items())


def _seconds(subject: Subject, model: nn.Module) -> float:
    begin = time.perf_counter()
    for place in range(6):
        subject.check(model, place)
    return (time.perf_counter() - begin) / 6


# Processes


def in_child(work: Callable[[], None]) -> int:
    """The pid of a forked process that does this, and says on its standard error where that fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def wait(child: int, what: str) -> None:
    end = time.monotonic() + HANG_SECONDS
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            if status:
                raise Wrong(f"{what}: the child ended with {os.waitstatus_to_exitcode(status)}")
            return
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise Wrong(f"{what}: the child waits for ever")


HANG_SECONDS = 120.0
"""Of a child, which takes a part of a second."""


def forks(seconds: float, seed: int) -> str:
    """Processes that fork before and after their first call, on one thread and two, and while other threads call.

    Each begins as a fork of this one, which has shared no work with a thread.
    """
    torch.set_num_threads(1)
    subjects, draws = [Subject.of(name, 4) for name in (*WIDE, "static block", "embedding")], random.Random(seed)
    totals, end = Counter[str](), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        files = [subject.save(Path(folder)) for subject in subjects]
        while len(totals) < 6 or time.monotonic() < end:
            count, when = 1 + totals.total() % 2, ("before", "after", "while")[totals.total() // 2 % 3]
            place = draws.randrange(len(subjects))
            moment = "while others call" if when == "while" else f"{when} the first call"
            what = f"{moment} on {count} thread{'s' * (count - 1)}"

            def parent(place: int = place, count: int = count, when: str = when) -> None:
                torch.set_num_threads(count)
                subject, known = subjects[place], [subjects[place].model, subjects[place].load(files[place])]
                done, workers = threading.Event(), Workers()

                def calls() -> None:
                    while not done.is_set():
                        subject.check(known[1], 1)

                if when == "after":
                    for model in known:
                        subject.check(model, 0)
                if when == "while":
                    for _ in range(4):
                        workers.start(calls)
                    time.sleep(0.01)
                for model in known:
                    wait(in_child(functools.partial(subject.check, model, 1)), "called in it")
                    subject.check(model, 2)  # and the parent goes on
                wait(in_child(lambda: wait(in_child(lambda: subject.check(known[0], 3)), "its child")), "a child of it")
                done.set()
                workers.join()

            wait(in_child(parent), f"{subjects[place].name}, forked {what}")
            totals[what] += 1
    return "forked " + ", ".join(f"{n} times {what}" for what, n in totals.items())


class Answers(torch.utils.data.Dataset[list[Tensor]]):
    """What an int8 model gives for calls, computed where they are read."""

    def __init__(self, model: nn.Module, calls: list[Call]) -> None:
        self.model, self.calls = model, calls

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, index: int) -> list[Tensor]:
        return [one.clone() for one in run(self.model, self.calls[index])]


def workers(seconds: float, seed: int) -> str:
    """DataLoader's workers that hold an int8 model, forked and spawned, which it came to by a fork or a pickle."""
    subjects, totals, end = [Subject.of(name, 6) for name in KINDS], Counter[str](), time.monotonic() + seconds
    torch.set_num_threads(2)  # its workers set their own to one
    turn = seed
    while len(totals) < 2 or time.monotonic() < end:
        # A spawned process imports torch, which takes seconds.
        method, subject = ("spawn" if turn % 8 == 7 else "fork"), subjects[turn % len(subjects)]
        turn += 1
        loader = torch.utils.data.DataLoader(
            Answers(subject.model, subject.calls),
            batch_size=None,
            num_workers=2,
            multiprocessing_context=multiprocessing.get_context(method),
            timeout=300,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            found = list(loader)
        for one, other in zip(found, subject.expected, strict=True):
            if not all(map(torch.equal, one, other)):
                raise Wrong(f"{subject.name} in a worker by {method}: not what this process gives")
        totals[method] += 1
    return ", ".join(f"{n} loaders with two workers by {method}" for method, n in totals.items())


def shared(seconds: float, seed: int) -> str:
    """What forked processes hold of a model's weights by themselves: little after a first call, all of them before."""
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).eval()
    q, x = quant.quantize_dynamic(model), torch.randn(3, 2048)
    del model
    weights = 4 * 2048 * 2048
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.q8"
        quant.save(q, path, runner=True, example_inputs=x)
        q = quant.load(path)
        held = {}
        for when in ("before", "after"):
            if when == "after":
                expected = run(q, (x,))
            reader, writer = os.pipe()

            def work(writer: int = writer) -> None:
                begin = own_bytes()
                for _ in range(5):
                    run(q, (x,))
                os.write(writer, str(own_bytes() - begin).encode())

            wait(in_child(work), f"forked {when} the first call")
            held[when] = int(os.read(reader, 100))
            os.close(reader), os.close(writer)
        mapped = mapped_bytes(path)
    if not torch.equal(run(q, (x,))[0], expected[0]):
        raise Wrong("another result after the file is gone")
    if held["after"] > weights // 8:
        raise Wrong(f"a child that is forked after the first call holds {held['after']} bytes of its own")
    words = [
        f"{held[when] / 2**20:.1f} MiB of its own in a child that is forked {when} the first call" for when in held
    ]
    return (
        f"int8 weights of {weights / 2**20:.0f} MiB, {mapped / 2**20:.1f} of them mapped from the file: "
        + ", ".join(words)
    )


def own_bytes() -> int:
    """Memory of this process that no other has."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private"))


def mapped_bytes(path: Path) -> int:
    """The size of the mappings of a file in this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    spans = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans)


PARTS: dict[str, Callable[[float, int], str]] = {
    "threads": threads,
    "first calls": first_calls,
    "long": long,
    "made and dropped": made_and_dropped,
    "signals": signals,
    "forks": forks,
    "workers": workers,
    "shared": shared,
}


def _run_part(part: str, options: argparse.Namespace) -> int:
    """One part, in this process; 1 where it failed."""
    begin = _spent()
    try:
        work = functools.partial(threads, count=options.threads) if part == "threads" else PARTS[part]
        said, status = work(options.seconds, options.seed), 0
    except Wrong as wrong:
        said, status = f"WRONG: {wrong}", 1
    print(f"{part}: {said} ({_spent() - begin:.0f} CPU seconds)", flush=True)
    return status


def _spent() -> float:
    """Seconds of CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="of each; default: OCTET_FUZZ_SECONDS, or %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=THREADS, help="of the part of that name")
    parser.add_argument("--part", choices=[*PARTS], action="append", help="one part, in this process; may be repeated")
    options = parser.parse_args()
    if options.part:
        return sum(_run_part(part, options) for part in options.part)
    failed = 0
    for part in PARTS:
        words = [__file__, "--part", part, "--seconds", options.seconds, "--seed", options.seed]
        words += ["--threads", options.threads]
        failed += subprocess.run([sys.executable, *map(str, words)], check=False).returncode != 0
    print(f"{len(PARTS)} parts, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
