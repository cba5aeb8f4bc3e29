"""`make fuzz-kills`: processes that are killed, disks and memory that are full, at each moment of what writes files.

    python tests/quant/fuzz_kills.py --seconds 600 --seed 1000     # random cases 1000, 1001, ...
    python tests/quant/fuzz_kills.py --every [save gptq ...]       # each call that changes a file, of each job, in turn

Kinds of cases, each in forked processes of its own:

- `call`: SIGKILL before, within or after one of the calls that change files (open, write, fsync, rename, ...);
- `moment`: SIGKILL after a random time;
- `full`: such a call, or all from it on, end with an error: no space, quota, input/output, read-only, not permitted;
- `memory`: an allocation of the kernels or of torch's tensors, or all from it on, fail;
- `left`: so many MiB of address space are left;
- `runner`: the last three of octet-run;
- `ranks`: one of two processes that train together, or both, are killed.

After a kill files are old or new, what is lost is the batch, layer or measurement under way, and the next run ends with
the bits of one that was not killed, and leaves no other file. An error names the file, or says that memory is short;
nothing that was there is changed, and the same process then does what it could not.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.kernels import fuzzing
from tests.kernels.fuzzing import Draws, Fuzzer, Wrong, in_child
from tests.quant import killed_jobs
from tests.quant.killed_jobs import JOBS, TASKS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
KILLS = {"before": 1, "half way": 3, "after": 2}
HOW_LONG = {"from there on": 4, "once": 5}
"""Actions of fault_shim.cpp."""
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES)
LEFT = re.compile(r"\..*\.partial")
"""Names of what a kill leaves, which the next writer removes."""
ABOUT_MEMORY = re.compile(r"memory|alloc", re.IGNORECASE)
MOST_LEFT = 96
"""MiB of address space."""
HANG_SECONDS = 900.0
"""Of one case, which takes seconds: machines are paused."""


def compiled(folder: Path) -> Path:
    """The library that is preloaded. Raises FileNotFoundError without a compiler."""
    cxx = shutil.which(os.environ.get("CXX", "g++"))
    if cxx is None:
        raise FileNotFoundError("no C++ compiler: neither $CXX nor g++ was found")
    library = folder / "fault_shim.so"
    if not library.exists() or library.stat().st_mtime < (HERE / "fault_shim.cpp").stat().st_mtime:
        own = folder / f"fault_shim.{os.getpid()}.so"  # another process may want the library at the same time
        command = [cxx, "-std=c++17", "-O2", "-shared", "-fPIC", str(HERE / "fault_shim.cpp"), "-o", str(own)]
        subprocess.run(command, check=True)
        own.replace(library)
    return library


@functools.cache
def shim() -> ctypes.CDLL:
    """The preloaded library."""
    library = ctypes.CDLL(None)
    library.fault_arm_files.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    library.fault_arm_memory.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
    library.fault_kill_after.argtypes = [ctypes.c_double]
    library.fault_seen_files.restype = library.fault_seen_memory.restype = ctypes.c_long
    return library


def counting_files(folder: Path) -> None:
    shim().fault_arm_files(os.fsencode(folder), -1, 0, 0)


@dataclass(frozen=True)
class Reference:
    """A run of a job that nothing disturbed.

    Attributes:
        said: its result, and the counts of killed_jobs.
        old: the files that were there before, byte for byte.
        before, after: the folder's files, by `content`.
        calls: that changed files.
        seconds: that it took.
    """

    said: dict[str, Any]
    old: dict[str, bytes]
    before: dict[str, bytes]
    after: dict[str, bytes]
    calls: int
    seconds: float


def contents(folder: Path) -> dict[str, bytes]:
    return {one.name: b"a folder" if one.is_dir() else content(one) for one in folder.iterdir()}


def content(file: Path) -> bytes:
    """Its bytes; of a safetensors file with its header in one order, which safetensors writes in any."""
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    if file.suffix != ".q8" or size > len(raw):
        return raw
    try:
        return json.dumps(json.loads(raw[8 : 8 + size]), sort_keys=True).encode() + raw[8 + size :]
    except ValueError:
        return raw


def described(error: BaseException) -> dict[str, str]:
    return {"type": type(error).__name__, "text": str(error)}


def run_job(name: str, folder: Path, arm: Callable[[], object] = lambda: None) -> Any:
    """A job in a process of its own: how it ended, and what it said."""

    def work(at: Callable[[int], None], say: Callable[[Any], None]) -> None:
        killed_jobs.counts.clear()
        arm()
        try:
            result = JOBS[name].run(folder, at)
        except Exception as error:
            say({"error": described(error)})
            return
        finally:
            shim().fault_disarm()
        say({"result": result, "calls": shim().fault_seen_files(), "counts": killed_jobs.counts})

    return in_child("", work)


def end_of(name: str, child: Any) -> dict[str, Any]:
    """What a job that came to its end said."""
    said: dict[str, Any] = child.answer[-1] if child.answer else {}
    if child.ended() or "result" not in said:
        raise Wrong(f"{name}: does not go on: {child.ended() or said.get('error', 'it says nothing')}")
    return said


@functools.cache
def reference(name: str) -> Reference:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        in_child("", lambda at, say: say(str(JOBS[name].before(folder))))
        old = {one.name: one.read_bytes() for one in folder.iterdir()}
        before, since = contents(folder), time.monotonic()
        said = end_of(name, run_job(name, folder, lambda: counting_files(folder)))
        seconds, after = time.monotonic() - since, contents(folder)
    if set(after) != set(JOBS[name].files):
        raise Wrong(f"{name}: without a fault it leaves {sorted(after)}, expected {sorted(JOBS[name].files)}")
    return Reference(said, old, before, after, said["calls"], seconds)


def put_before(name: str, folder: Path) -> None:
    for one, old in reference(name).old.items():
        (folder / one).write_bytes(old)


def check_files(name: str, folder: Path, *, killed: bool) -> None:
    """Old or new, and no others; a kill may leave some of names that say so."""
    job, known, there = JOBS[name], reference(name), contents(folder)
    for one, now in there.items():
        if one not in job.files and not (killed and LEFT.fullmatch(one)):
            raise Wrong(f"{name}: leaves {one}")
        if one in set(job.files) - set(job.checkpoints) and now not in (known.before.get(one), known.after[one]):
            raise Wrong(f"{name}: {one} is neither old nor new: {len(now)} bytes")
    gone = set(known.before) - set(there)
    if gone:
        raise Wrong(f"{name}: {sorted(gone)} are gone")


def check_end(name: str, folder: Path, said: dict[str, Any]) -> None:
    """The result of one run that nothing disturbed, and its files."""
    known, there = reference(name), contents(folder)
    if said["result"] != known.said["result"]:
        raise Wrong(f"{name}: another result than that of one run")
    if set(there) != set(known.after):
        raise Wrong(f"{name}: the next run leaves {sorted(set(there) - set(known.after))}")
    odd = [one for one in there if one not in JOBS[name].checkpoints and there[one] != known.after[one]]
    if odd:
        raise Wrong(f"{name}: {odd[0]} has other bytes than after one run")


def check_killed(name: str, arms: list[Callable[[Path], object]]) -> str:
    """A job that is killed so, one after the other, and then runs to its end."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        put_before(name, folder)
        kills, done, begun, unkept = 0, 0, 0, 0
        for arm in arms:
            child = run_job(name, folder, functools.partial(arm, folder))
            if child.hung or not os.WIFSIGNALED(child.status):
                end_of(name, child)
            elif os.WTERMSIG(child.status) != signal.SIGKILL:
                raise Wrong(f"{name}: {child.ended()}")
            kills += os.WIFSIGNALED(child.status)
            done, begun = max(done, child.place), begun + max(child.place, 0)
            if not all((folder / one).exists() for one in JOBS[name].checkpoints):
                unkept += max(child.place, 0)  # a search's file begins with the float model's score
            check_files(name, folder, killed=True)
        said = end_of(name, run_job(name, folder))
        check_end(name, folder, said)
        counts, once = said["counts"], reference(name).said["counts"]
        if name == "calibrate" and counts["resumed"] < done:
            raise Wrong(f"{name}: {done} batches were done, {counts['resumed']} were kept")
        if name == "autoquant" and begun - unkept + counts["calls"] > once["calls"] + kills:
            raise Wrong(f"{name}: {begun + counts['calls']} measurements and {kills} kills, {once['calls']} in one run")
    return f"{name}, {'killed' if kills else 'to its end'}"


def at_call(place: int, action: int) -> Callable[[Path], object]:
    return lambda folder: shim().fault_arm_files(os.fsencode(folder), place, action, 0)


def check_call(draws: Draws) -> str:
    name, action = draws.choice(list(JOBS)), draws.choice(list(KILLS.values()))
    calls = reference(name).calls
    return check_killed(name, [at_call(draws.below(calls), action) for _ in range(1 + draws.below(3))])


def check_moment(draws: Draws) -> str:
    name = draws.choice(list(JOBS))
    longest = reference(name).seconds

    def after(part: float) -> Callable[[Path], object]:
        return lambda folder: shim().fault_kill_after(part * longest)

    return check_killed(name, [after((1 + draws.below(1000)) / 1000) for _ in range(1 + draws.below(3))])


def check_full(draws: Draws) -> str:
    name, action, number = draws.choice(list(JOBS)), draws.choice(list(HOW_LONG.values())), draws.choice(ERRORS)
    return check_refused(name, draws.below(reference(name).calls), action, number)


def check_refused(name: str, place: int, action: int, number: int) -> str:
    """A job that a call ends with an error, and again when none does, in one process."""
    with tempfile.TemporaryDirectory(prefix="full-") as at:
        folder = Path(at)
        put_before(name, folder)

        def work(at: Callable[[int], None], say: Callable[[Any], None]) -> None:
            shim().fault_arm_files(os.fsencode(folder), place, action, number)
            try:
                JOBS[name].run(folder, at)
                say({"error": None})
            except Exception as error:
                say({"error": described(error)})
            shim().fault_disarm()
            try:
                check_files(name, folder, killed=False)
                say({"again": JOBS[name].run(folder, at)})
            except Exception as error:
                say({"wrong": described(error)})

        child = in_child("", work)
        said: dict[str, Any] = {}
        for one in child.answer:
            said |= one
        if child.ended():
            raise Wrong(f"{name}: {child.ended()}")
        if "wrong" in said:
            raise Wrong(f"{name}: after {said['error']}: {said['wrong']}")
        check_end(name, folder, {"result": said["again"]})
        if said["error"] is None:
            return f"{name}, nothing said"
        text = said["error"]["text"]
        named = any(one in text for one in JOBS[name].files) or str(folder) in text
        if not (named and os.strerror(number) in text and said["error"]["type"] in CLEAR):
            raise Wrong(f"{name}: an error that does not say it: {said['error']}")
    return f"{name}, refused"


CLEAR = ("OSError", "PermissionError", "JobFailed")

LIBRARIES = "_octet,libc10"


@functools.cache
def models() -> Path:
    """The folder of TASKS's files."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-kills-"))
    in_child("", lambda at, say: say(str(killed_jobs.write_models(folder))))
    return folder


@functools.cache
def task_reference(name: str, threads: int) -> dict[str, Any]:
    """The result of a task, its allocations and its seconds."""

    def work(at: Callable[[int], None], say: Callable[[Any], None]) -> None:
        torch.set_num_threads(threads)
        prepare_task(name)
        shim().fault_arm_memory(LIBRARIES.encode(), -1, 0)
        result = TASKS[name](models())
        shim().fault_disarm()
        say({"result": result, "calls": shim().fault_seen_memory()})

    return end_of(name, in_child("", work))


def prepare_task(name: str) -> None:
    """What is not tried: threads are there, and the model that sees other sizes has run."""
    torch.randn(1 << 18).add(1.0)
    kind = name.rpartition(" ")[2]
    if name.startswith("other sizes"):
        killed_jobs.outputs(killed_jobs.loaded(models(), kind), killed_jobs.made(kind)[1])


Fault = tuple[Callable[[], object], Callable[[], object]]
"""What makes memory short, and what ends that."""


def check_short(name: str, threads: int, faults: list[Fault]) -> str:
    """A task for which memory does not suffice, and again when it does; several times in one process."""

    def work(at: Callable[[int], None], say: Callable[[Any], None]) -> None:
        torch.set_num_threads(threads)
        for begin, end in faults:
            prepare_task(name)
            begin()
            try:
                said: dict[str, Any] = {"error": None, "result": TASKS[name](models())}
            except Exception as error:
                said = {"error": described(error)}
            end()
            say({**said, "again": TASKS[name](models())})
            killed_jobs.loaded.cache_clear()

    child = in_child("", work)
    if child.ended():
        last = child.answer[-1]["error"] if child.answer else None
        raise Wrong(f"{name}, {threads} threads: {child.ended()} at fault {len(child.answer)}, behind {last}")
    result, refused = task_reference(name, threads)["result"], 0
    for said in child.answer:
        if said["again"] != result or said.get("result", result) != result:
            raise Wrong(f"{name}: another result after {said['error']}")
        if said["error"] is None:
            continue
        refused += 1
        if not ABOUT_MEMORY.search(said["error"]["text"]) and said["error"]["type"] != "MemoryError":
            raise Wrong(f"{name}: an error that does not say it: {said['error']}")
    return f"{name}, {'some' if refused else 'none'} refused"


FAULTS = 8
"""Of one task in one process."""


def check_memory(draws: Draws) -> str:
    name, threads = draws.choice(list(TASKS)), 1 + draws.below(2)
    count, names = task_reference(name, threads)["calls"], LIBRARIES.encode()

    def fault() -> Fault:
        place, action = draws.below(count), draws.choice(list(HOW_LONG.values()))
        return functools.partial(shim().fault_arm_memory, names, place, action), shim().fault_disarm

    return check_short(name, threads, [fault() for _ in range(1 + draws.below(FAULTS))])


def check_left(draws: Draws) -> str:
    name, threads = draws.choice(list(TASKS)), 1 + draws.below(2)

    def leave(left: int) -> None:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + (left << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def end() -> None:
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    lefts = [draws.below(MOST_LEFT) for _ in range(1 + draws.below(FAULTS))]
    return check_short(name, threads, [(functools.partial(leave, left), end) for left in lefts])


def octet_run() -> Path | None:
    """The runner's program, where it is built."""
    program = Path(os.environ.get("OCTET_RUNNER", ROOT / "build")) / "octet-run"
    return program if program.exists() else None


def run_program(folder: Path, kind: str, threads: int, fault: dict[str, str], most: int | None = None) -> Any:
    """The program on the input of a network, whose output goes to the folder."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if most is not None:
            resource.setrlimit(resource.RLIMIT_AS, (most, most))

    words = [octet_run(), models() / f"{kind}.q8", "--input", models() / f"{kind}.npy", "--threads", threads]
    command = [*map(str, words), "--output", str(folder / "output.npy")]
    environment = {**os.environ, **{f"OCTET_FAULT_{name}": value for name, value in fault.items()}}
    return subprocess.run(command, env=environment, preexec_fn=limit, capture_output=True, text=True, check=False)


@functools.cache
def program_reference(kind: str, threads: int, what: str) -> tuple[int, bytes]:
    """The calls of the program that may fail, and its output."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        where = {"FOLDER": str(folder)} if what == "file" else {"LIBRARIES": "."}
        done = run_program(folder, kind, threads, {**where, "PLACE": "-1", "ACTION": "0", "COUNT": f"{models()}/count"})
        if done.returncode:
            raise Wrong(f"octet-run {kind}: without a fault {done.stderr}")
        return int((models() / "count").read_text(encoding="ascii")), (folder / "output.npy").read_bytes()


def check_runner(draws: Draws) -> str:
    what, kind = draws.choice(["memory", "file", "left"]), draws.choice(killed_jobs.KINDS)
    threads, refused = 1 + draws.below(4), 0
    calls, whole = program_reference(kind, threads, what)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for _ in range(1 + draws.below(FAULTS)):
            (folder / "output.npy").write_bytes(b"old")
            fault, most = {"PLACE": str(draws.below(calls))}, None
            if what == "left":
                fault, most = {}, (LEAST_OF_RUNNER + draws.below(MOST_LEFT)) << 20
            elif what == "memory":
                fault |= {"LIBRARIES": ".", "ACTION": str(draws.choice(list(HOW_LONG.values())))}
            else:
                action = draws.choice([*KILLS.values(), *HOW_LONG.values()])
                fault |= {"FOLDER": place, "ACTION": str(action), "ERRNO": str(draws.choice(ERRORS))}
            done = run_program(folder, kind, threads, fault, most)
            refused += done.returncode == 1
            killed = done.returncode == -signal.SIGKILL and what == "file"
            about = f"octet-run {kind}, {what}: status {done.returncode}, {done.stderr}"
            if not killed and done.returncode not in (0, 1):
                raise Wrong(about)
            if done.returncode == 1 and not re.search("memory|cannot write .*output.npy: ", done.stderr):
                raise Wrong(f"{about}: it does not say it")
            if (folder / "output.npy").read_bytes() not in ((whole,) if done.returncode == 0 else (b"old", whole)):
                raise Wrong(f"{about}: its output is neither old nor new")
            if run_program(folder, kind, threads, {}).returncode or set(contents(folder)) != {"output.npy"}:
                raise Wrong(f"{about}: the next run leaves {sorted(contents(folder))}")
    return f"{what}, {'some' if refused else 'none'} refused"


LEAST_OF_RUNNER = 32
"""MiB of address space with which octet-run begins, its libraries and the preloaded one."""


def check_ranks(draws: Draws) -> str:
    from tests.quant import killed_ranks

    whole, seconds = ranks_reference()
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as stores:
        folder, kills = Path(place), 0
        for attempt in range(1 + draws.below(2)):
            who, part = draws.choice([(True, False), (False, True), (True, True)]), (1 + draws.below(1000)) / 1000
            arm = functools.partial(shim().fault_kill_after, part * seconds)
            arms = arm if who[0] else bool, arm if who[1] else bool
            said = killed_ranks.pair(folder, Path(stores, str(attempt)), arms)
            kills += sum("killed" in one for one in said)
            if any(one.get("killed", "SIGKILL") != "SIGKILL" for one in said):
                raise Wrong(f"ranks: {said}")
        said = killed_ranks.pair(folder, Path(stores, "last"), (bool, bool))
        if [one.get("digest") for one in said] != [whole, whole]:
            raise Wrong(f"ranks: {said}, expected {whole}")
    return "killed" if kills else "to its end"


@functools.cache
def ranks_reference() -> tuple[str, float]:
    """The digest of a training that nobody disturbs, and its seconds."""
    from tests.quant import killed_ranks

    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryDirectory() as stores:
        since = time.monotonic()
        said = killed_ranks.pair(Path(place), Path(stores, "only"), (bool, bool))
        if "digest" not in said[0] or said[0]["digest"] != said[1].get("digest"):
            raise Wrong(f"ranks: without a kill {said}")
        return str(said[0]["digest"]), time.monotonic() - since


CHECKS: dict[str, Callable[[Draws], str]] = {
    "call": check_call,
    "moment": check_moment,
    "full": check_full,
    "memory": check_memory,
    "left": check_left,
    "runner": check_runner,
    "ranks": check_ranks,
}


def check(kind: str, draws: Draws, drawn: Callable[[], None]) -> str:
    drawn()
    return CHECKS[kind](draws)


def every(names: Sequence[str]) -> int:
    """Each call of each job: killed before, within and after it, and refused from there on."""
    if unknown := sorted(set(names) - set(JOBS)):
        print(f"--every: no job is called {', '.join(unknown)}; there are {', '.join(JOBS)}", file=sys.stderr)
        return 2
    outcomes, failed = Counter[str](), 0
    for name in names:
        for place in range(reference(name).calls):
            tries: list[Callable[[], str]] = [
                functools.partial(check_killed, name, [at_call(place, action)]) for action in KILLS.values()
            ]
            tries.append(functools.partial(check_refused, name, place, HOW_LONG["from there on"], errno.ENOSPC))
            for one in tries:
                try:
                    outcomes[one()] += 1
                except Wrong as wrong:
                    failed += 1
                    print(f"call {place}: {wrong}", flush=True)
        print(f"{name}: {reference(name).calls} calls, {outcomes.total() + failed} faults so far", flush=True)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:8} {outcome}")
    print(f"{outcomes.total() + failed} faults; {failed} failures")
    return int(bool(failed))


def begin_anew() -> None:
    """With the library preloaded, and threads that do not spin."""
    library = str(compiled(Path(tempfile.gettempdir())))
    wanted = {"LD_PRELOAD": library, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})


def missing(kind: str) -> str:
    """What a kind of cases needs and is not here, or ""."""
    if kind == "runner" and octet_run() is None:
        return "octet-run is not built: make runner"
    if kind == "ranks" and not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        return "torch was built without gloo"
    return ""


def main() -> int:
    begin_anew()
    fuzzing.HANG_SECONDS, fuzzing.CHILD_SECONDS = HANG_SECONDS, 3600.0  # each child runs every job once without a fault
    torch.set_num_threads(1)
    try:
        if "--every" in sys.argv:
            return every(sys.argv[sys.argv.index("--every") + 1 :] or list(JOBS))
        for kind in filter(missing, CHECKS):
            print(f"{kind}: left out: {missing(kind)}")
        kinds = [kind for kind in CHECKS if not missing(kind)]
        models()  # here: a child that has shared work with a thread has no child that could quantise them
        return fuzzing.main(Fuzzer("tests/quant/fuzz_kills.py", kinds, check), __doc__)
    finally:
        if models.cache_info().currsize:
            shutil.rmtree(models())


if __name__ == "__main__":
    sys.exit(main())
