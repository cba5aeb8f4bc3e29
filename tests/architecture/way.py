"""The way of a model, a batch, a tensor and a file through the code: which functions of which files, in their order.

    python tests/architecture/way.py                       # this checkout: how many stops, in which files
    python tests/architecture/way.py --all                 # every stop, with the file that it was called from
    python tests/architecture/way.py --checkout ../older   # another checkout, its kernels built

A *stop* is a function that is called from another file, counted once. A file leads on if it calls into another one; a
file that does not has helpers alone. An arrow between files climbs where the calling file imports the called one, which
belongs to a unit that comes later in order.py. A call of a later unit that is not imported is a callback: of a function
or an object that was handed down.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # tests/, where `architecture` is a package

from architecture.order import ORDER
from architecture.sources import FOLDERS, arrows, files, link, unit_of

ROOT = Path(__file__).resolve().parents[2]
CHILD = "OCTET_WAY_CHILD"


@dataclass
class Way:
    """What one call went through.

    Attributes:
        arrows: (calling file, called file, called function), in the order in which each was first seen.
    """

    arrows: dict[tuple[str, str, str], None] = field(default_factory=dict)

    @property
    def stops(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys((called, function) for _, called, function in self.arrows))

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.stops))

    @property
    def leading_on(self) -> list[str]:
        """Files that call into another one."""
        callers = {caller for caller, _, _ in self.arrows}
        return [file for file in self.files if file in callers]

    @property
    def upwards(self) -> list[tuple[str, str]]:
        """Calling and called file, where the called one belongs to a unit that comes later in ORDER."""
        pairs = dict.fromkeys((caller, called) for caller, called, _ in self.arrows if caller)
        return [(caller, called) for caller, called in pairs if place(called) > place(caller)]


def place(file: str) -> int:
    """Of a file's unit in ORDER; one that is not there is taken for the highest."""
    top = file.split("/", 1)[0]
    package = next(name for name, folder in FOLDERS.items() if folder == top)
    inner = tuple(Path(file).relative_to(top).with_suffix("").parts)
    unit = unit_of(".".join((package, *inner)).removesuffix(".__init__"), inner)
    return ORDER.index(unit) if unit in ORDER else len(ORDER)


class Watch:
    """A profile function that notes every call from one file of ours into another."""

    def __init__(self, site: Path) -> None:
        self.prefix = f"{site}/quant/"
        self.way = Way()
        self._file: dict[CodeType, str] = {}

    def file(self, code: CodeType) -> str:
        """The file of ours, relative to a checkout; "" for anyone else's."""
        if code not in self._file:
            name = code.co_filename
            inner = name.removeprefix(self.prefix) if name.startswith(self.prefix) else ""
            own_folder = inner.split("/", 1)[0] in FOLDERS.values()
            self._file[code] = inner if own_folder or not inner else f"quant/{inner}"
        return self._file[code]

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or frame.f_code.co_name.startswith("<"):
            return
        name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # Python 3.10 has none
        called = self.file(frame.f_code)
        if not called:
            return
        above = frame.f_back
        while above is not None and not self.file(above.f_code):
            above = above.f_back
        caller = self.file(above.f_code) if above is not None else ""
        if caller != called:
            self.way.arrows.setdefault((caller, called, name))


def watched(site: Path, action: Callable[[], Any]) -> tuple[Way, Any]:
    watch = Watch(site)
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        result = action()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return watch.way, result


def ways(site: Path) -> dict[str, Way]:
    """Of a small convolutional network with a sum and a concatenation."""
    import torch
    from torch import Tensor, nn

    import quant

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            self.body, self.side = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = (x + self.body(x)).relu()
            x = torch.cat([x, self.side(x)], 1)
            return self.head(x.mean((2, 3)))

    torch.manual_seed(0)
    model, batches = Net().eval(), [torch.randn(2, 3, 8, 8) for _ in range(2)]
    found = {}
    found["a model through quantize_static"], q = watched(
        site, lambda: quant.quantize_static(model, batches, progress=False)
    )
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        prepared = quant.prepare(model, (batches[0],))
        prepared(batches[0])
        found["a batch through calibration"], _ = watched(site, lambda: prepared(batches[1]))
        q(batches[0])
        found["a tensor through a plan"], _ = watched(site, lambda: q(batches[1]))
        quant.save(q, Path(folder, "net.q8"))
        found["a file through load"], _ = watched(site, lambda: quant.load(Path(folder, "net.q8"), model=model))
    return found


def show(name: str, way: Way, imported: set[tuple[str, str]], everything: bool) -> str:
    """Args: imported: importing and imported file, of all imports."""
    climbing = [pair for pair in way.upwards if pair in imported]
    callbacks = [pair for pair in way.upwards if pair not in imported]
    rows = [
        f"{name}: {len(way.stops)} stops in {len(way.files)} files, of which {len(way.leading_on)} lead on; "
        f"{len(climbing)} arrows between files climb, {len(callbacks)} are callbacks"
    ]
    if everything:
        rows += [f"  {called} {function}  < {caller or 'the caller'}" for caller, called, function in way.arrows]
    else:
        rows.append(f"  {' > '.join(way.files)}")
    rows += [f"  climbs: {caller} > {called}" for caller, called in climbing]
    rows += [f"  calls back: {caller} > {called}" for caller, called in callbacks]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=ROOT, help="folder of the sources (default: this one)")
    parser.add_argument("--all", action="store_true", help="print every stop")
    options = parser.parse_args()
    if CHILD in os.environ:
        sources = files(options.checkout)
        path_of = {one.module: one.path for one in sources}
        imported = {(one.file, path_of[one.module]) for one in arrows(sources)}
        print(
            "\n\n".join(show(name, way, imported, options.all) for name, way in ways(Path(os.environ[CHILD])).items())
        )
        return 0
    with tempfile.TemporaryDirectory() as folder:
        link(options.checkout, Path(folder))
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONSAFEPATH": "1", CHILD: folder}
        return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
