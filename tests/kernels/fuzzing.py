"""The frame of the kernels' fuzzers: a case is a list of draws, and runs in a process that it may end.

    python tests/kernels/fuzz_kernels.py --seconds 600 --seed 1000        # cases 1000, 1001, ...
    python tests/kernels/fuzz_kernels.py --case requantize --draws 0,3,1  # one that failed

Numbers of cases are those of their seeds. Cases run in forked children, some thousand in each; a child that ends, hangs
or finds something wrong names its case, whose draws are then made smaller for as long as it fails.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import resource
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")

HANG_SECONDS = 30.0
"""Of one case, which takes milliseconds."""
MEMORY = 6 << 30
"""Of address space, beside what a child has when it begins."""
CHILD_SECONDS, CHILD_CASES = 5.0, 4000
"""Of one child: a new one has empty caches."""
PAUSE = 0.05
"""Seconds between two looks at a child, at most."""
SMALLER_ATTEMPTS, SMALLER_SECONDS = 300, 20.0
SECONDS = float(os.environ.get("OCTET_FUZZ_SECONDS", "60"))


class Wrong(AssertionError):
    """A case that is not as it has to be."""


class Draws:
    """The numbers that decide a case. They come from a seed, or are given: those that are missing are 0.

    Attributes:
        taken: the draws so far.
    """

    def __init__(self, source: int | str | Sequence[int]) -> None:
        self._random = random.Random(source) if isinstance(source, (int, str)) else None
        self._given: Sequence[int] = () if isinstance(source, (int, str)) else source
        self.taken: list[int] = []

    def below(self, count: int) -> int:
        """A number of [0, count); 0 is the plainest."""
        place = len(self.taken)
        if self._random is not None:
            number = int(self._random.random() * count)
        else:
            number = min(self._given[place], count - 1) if place < len(self._given) else 0
        self.taken.append(number)
        return number

    def choice(self, options: Sequence[T]) -> T:
        """One of several; the first is the plainest."""
        return options[self.below(len(options))]

    def one_in(self, count: int) -> bool:
        """True once in so many."""
        return self.below(count) == count - 1

    def generator(self) -> torch.Generator:
        """Of random values, which no smaller case needs to be the same."""
        return torch.Generator().manual_seed(self.below(1 << 16))


@dataclass(frozen=True)
class Fuzzer:
    """What a campaign runs.

    Attributes:
        path: of the program, for the command that repeats a case.
        kinds: the kinds of cases, which take turns.
        check: draws a case of a kind, calls its last argument, runs the case and says how it went in a word or two;
            raises Wrong.
        isas: QUANT_ISA of the children, which take turns; "" for what the machine chooses.
        words: of the last case of a kind, in words; empty where its draws say all.
    """

    path: str
    kinds: Sequence[str]
    check: Callable[[str, Draws, Callable[[], None]], str]
    isas: Sequence[str] = ("",)
    words: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Failure:
    """A case that failed, as small as it was found."""

    kind: str
    isa: str
    draws: tuple[int, ...]
    message: str
    words: str

    def command(self, path: str) -> str:
        isa = f" --isa {self.isa}" if self.isa else ""
        return f"python {path}{isa} --case {self.kind} --draws {','.join(map(str, self.draws)) or '-'}"


@dataclass
class Result:
    """Of a campaign."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    again: Counter[str] = field(default_factory=Counter)
    cases: int = 0
    next_seed: int = 0


@dataclass
class _Child:
    """What a child left behind."""

    status: int
    hung: bool
    place: int
    answer: list[Any]

    def ended(self) -> str:
        """How it ended, where it did not end well."""
        if self.hung:
            return f"hangs: no answer in {HANG_SECONDS:.0f} s"
        if os.WIFSIGNALED(self.status):
            return f"the process ended by {signal.Signals(os.WTERMSIG(self.status)).name}"
        return "" if self.status == 0 else f"the process ended with {os.waitstatus_to_exitcode(self.status)}"


def _limit(parent: int) -> None:
    """A child's: no dumps, not all memory, and its end where its parent has ended, in a hang too."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(MEMORY)


def limit_memory(more: int) -> None:
    """Allow so many bytes of address space beside what this process has, which is much under a sanitizer."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + more
    allowed = resource.getrlimit(resource.RLIMIT_AS)[1]  # less in a child of a child
    most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def in_child(
    isa: str, work: Callable[[Callable[[int], None], Callable[[Any], None]], None], *, quiet: bool = True
) -> _Child:
    """work(at, say) in a forked process: at(place) before each case, say(anything JSON has) as often as it likes."""
    board = mmap.mmap(-1, 8)
    reader, writer = os.pipe()
    sys.stdout.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            if isa:
                os.environ["QUANT_ISA"] = isa
            _limit(parent)
            if quiet:  # torch writes a page for each error of its own that ends a process
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with os.fdopen(writer, "w", encoding="utf-8", buffering=1) as out:
                work(
                    lambda place: struct.pack_into("q", board, 0, place), lambda said: print(json.dumps(said), file=out)
                )
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    return _wait(pid, board, reader)


def _wait(pid: int, board: mmap.mmap, reader: int) -> _Child:
    text, place, waited, hung, last = b"", -1, 0.0, False, time.monotonic()
    os.set_blocking(reader, False)
    pause = 0.0002
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        try:
            while part := os.read(reader, 1 << 16):
                text += part
        except BlockingIOError:
            pass
        if done:
            break
        now, at = time.monotonic(), struct.unpack_from("q", board, 0)[0]
        waited += min(now - last, 2 * PAUSE)  # not the time that both processes were stopped
        last = now
        if at != place:
            place, waited = at, 0.0
        elif waited > HANG_SECONDS and not hung:
            hung = True
            os.kill(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, PAUSE)
    os.close(reader)
    lines = text.decode("utf-8", "replace").split("\n")
    return _Child(status, hung, struct.unpack_from("q", board, 0)[0], [json.loads(line) for line in lines[:-1]])


def _checked(fuzzer: Fuzzer, kind: str, draws: Draws, drawn: Callable[[], None] = lambda: None) -> str:
    """The outcome; every error is one that a case has. `drawn` is called between drawing a case and running it."""
    try:
        return fuzzer.check(kind, draws, drawn)
    except Wrong:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise Wrong(f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {error}") from error


def run_one(
    fuzzer: Fuzzer, kind: str, isa: str, source: int | str | Sequence[int], *, quiet: bool = True
) -> tuple[str, list[int], str]:
    """One case: why it fails or "", its draws where it came to name them, and its words."""

    def work(at: Callable[[int], None], say: Callable[[Any], None]) -> None:
        draws = Draws(source)
        try:
            _checked(fuzzer, kind, draws, lambda: say({"words": fuzzer.words()}))
        except Wrong as wrong:
            say({"wrong": str(wrong)})
        say({"draws": draws.taken})

    child = in_child(isa, work, quiet=quiet)
    wrong = next((said["wrong"] for said in child.answer if "wrong" in said), "")
    draws = next((said["draws"] for said in child.answer if "draws" in said), [])
    return wrong or child.ended(), draws, next((said["words"] for said in child.answer if "words" in said), "")


def draws_of(fuzzer: Fuzzer, kind: str, isa: str, source: str) -> list[int]:
    """The draws of a case that ends its process: they are said one by one."""

    class Said(Draws):
        def below(self, count: int) -> int:
            number = super().below(count)
            answers[0](number)
            return number

    answers: list[Callable[[Any], None]] = []

    def work(at: Callable[[int], None], answer: Callable[[Any], None]) -> None:
        answers.append(answer)
        _checked(fuzzer, kind, Said(source))

    return [int(number) for number in in_child(isa, work).answer]


def smaller(fuzzer: Fuzzer, kind: str, isa: str, draws: Sequence[int]) -> list[int]:
    """Draws with which the case still fails, as few and as small as a few hundred attempts find them."""
    best, attempts, end = list(draws), 0, time.monotonic() + SMALLER_SECONDS

    def fails(candidate: list[int]) -> bool:
        nonlocal attempts
        attempts += 1
        return (
            attempts <= SMALLER_ATTEMPTS and time.monotonic() < end and bool(run_one(fuzzer, kind, isa, candidate)[0])
        )

    for size in (len(best) // 2, len(best) // 4, 4, 1):
        while size and len(best) > size and fails(best[:-size]):
            best = best[:-size]
    changed = True
    while changed and attempts < SMALLER_ATTEMPTS and time.monotonic() < end:
        changed = False
        for place, number in enumerate(best):
            for less in sorted({0, number // 2, max(number - 1, 0)}):
                candidate = [*best[:place], less, *best[place + 1 :]]
                if less < number and fails(candidate):
                    best, changed = candidate, True
                    break
    while best and best[-1] == 0:
        best.pop()
    return best


def _source(kind: str, seed: int) -> str:
    return f"{kind} {seed}"


def campaign(
    fuzzer: Fuzzer, *, seed: int, seconds: float, count: int, tell: Callable[[str], None] = lambda told: None
) -> Result:
    """Run cases from a seed on, until time or count is up."""
    result, end, turn = Result(next_seed=seed), time.monotonic() + seconds, 0
    while result.next_seed < seed + count and time.monotonic() < end:
        isa = fuzzer.isas[turn % len(fuzzer.isas)]
        turn += 1
        first, last = result.next_seed, min(result.next_seed + CHILD_CASES, seed + count)
        until = min(end, time.monotonic() + CHILD_SECONDS)

        def work(
            at: Callable[[int], None],
            say: Callable[[Any], None],
            first: int = first,
            last: int = last,
            until: float = until,
        ) -> None:
            outcomes = Counter[str]()
            for number in range(first, last):
                at(number)
                kind = fuzzer.kinds[number % len(fuzzer.kinds)]
                try:
                    outcomes[f"{kind}: {_checked(fuzzer, kind, Draws(_source(kind, number)))}"] += 1
                except Wrong as wrong:
                    say({"failed": number, "why": str(wrong)})
                if outcomes.total() >= 256:
                    say({"outcomes": outcomes})
                    outcomes.clear()
                if time.monotonic() > until:
                    break
            say({"outcomes": outcomes, "next": number + 1})

        child = in_child(isa, work)
        failed = [(said["failed"], said["why"]) for said in child.answer if "failed" in said]
        summaries = [said for said in child.answer if "outcomes" in said]
        for said in summaries:
            result.outcomes.update(said["outcomes"])
        result.next_seed = next((said["next"] for said in summaries if "next" in said), -1)
        if result.next_seed < 0:
            failed.append((child.place, child.ended() or "the process said nothing"))
            result.next_seed = child.place + 1
        result.cases += result.next_seed - first
        for number, why in failed:
            _note(fuzzer, isa, number, why, result, tell)
    return result


def _note(fuzzer: Fuzzer, isa: str, number: int, why: str, result: Result, tell: Callable[[str], None]) -> None:
    """Keep a failure: the first of its kind and reason made smaller, of the others how many there are."""
    kind = fuzzer.kinds[number % len(fuzzer.kinds)]
    about = f"{kind}: {' '.join(why.split()[:6])}"
    result.again[about] += 1
    if result.again[about] > 1:
        return
    source = _source(kind, number)
    draws = run_one(fuzzer, kind, isa, source)[1] or draws_of(fuzzer, kind, isa, source)
    draws = smaller(fuzzer, kind, isa, draws)
    again, _, words = run_one(fuzzer, kind, isa, draws)
    failure = Failure(kind, isa, tuple(draws), again or f"{why} (not alone: --seed {number} --count 1)", words)
    result.failures.append(failure)
    tell(f"{failure.message}\n{failure.words}\n    {failure.command(fuzzer.path)}\n")


def perturbed() -> None:
    """Begin anew with memory that is not zero where nothing was written, and threads that do not spin."""
    wanted = {"MALLOC_PERTURB_": "165", "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})


def usable_isas() -> list[str]:
    """The instruction sets that this machine has, asked for in children: a process has one."""
    from quant.kernels import build, ops

    if ops.extension_problem():
        return [""]
    names = []
    for one in build.instruction_sets(build.host_arch()):
        child = in_child(one.name, lambda at, say: say(str(torch.ops.octet_native.isa_refusal())))
        if child.answer == [""]:
            names.append(one.name)
    return names


def main(fuzzer: Fuzzer, description: str | None) -> int:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="default: OCTET_FUZZ_SECONDS, or %(default)s")
    parser.add_argument("--count", type=int, default=1 << 60, help="cases at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--isa", choices=[*fuzzer.isas], help="instruction set, as QUANT_ISA")
    parser.add_argument("--case", choices=[*fuzzer.kinds], help="cases of this kind alone")
    parser.add_argument("--draws", help="the one case of these draws; - for none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    isas = [options.isa] if options.isa is not None else fuzzer.isas
    kinds = [options.case] if options.case else fuzzer.kinds
    fuzzer = Fuzzer(fuzzer.path, kinds, fuzzer.check, isas, fuzzer.words)
    if options.draws is not None:
        draws = [int(word) for word in options.draws.split(",") if word != "-"]
        why, _, words = run_one(fuzzer, kinds[0], isas[0], draws, quiet=False)
        print(f"{why or 'ok'}\n{words}")
        return int(bool(why))
    result = campaign(
        fuzzer,
        seed=options.seed,
        seconds=options.seconds,
        count=options.count,
        tell=lambda told: print(told, flush=True),
    )
    for outcome, times in sorted(result.outcomes.items()):
        print(f"{times:8} {outcome}")
    for about, times in sorted(result.again.items()):
        print(f"{times:8} FAILED {about}")
    print(f"{result.cases} cases, the next is --seed {result.next_seed}; {result.again.total()} failures")
    return int(bool(result.again))
