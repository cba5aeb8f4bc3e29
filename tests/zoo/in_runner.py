"""An int8 model of the zoo in `octet-run`: the bits that Python gives, or a refusal that names the step.

The program is that of `make runner`, or of the folder in $OCTET_RUNNER.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import quant
from quant.export.naming import named_leaves
from quant.export.whole_plan import runner_of
from quant.runtime.binding import bound_values

from .entry import Batch, Entry

PROGRAM = Path(os.environ.get("OCTET_RUNNER", Path(__file__).resolve().parents[2] / "build")) / "octet-run"
THREADS = ("1", "2")


@dataclass(frozen=True)
class Call:
    """Inputs and outputs of one call of the model in Python, by their names in the file."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


def verdict(entry: Entry, q: nn.Module, batches: list[Batch]) -> tuple[str, str]:
    """What becomes of a converted model: a verdict as `measure` has it, and how it was refused ('' where it ran)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            quant.save(q, folder / "model.q8", runner=True)
        except quant.ArtefactError as error:
            return "ok", f"refused {error}"
        for call in calls_of(entry, q, batches):
            for threads in THREADS:
                problem = difference(folder, call, threads)
                if problem:
                    return f"wrong: {problem} ({threads} threads)", ""
    return "ok", ""


def calls_of(entry: Entry, q: nn.Module, batches: list[Batch]) -> list[Call]:
    """What goes in and comes out where the batches are run."""
    expected, calls = runner_of(q).expected, []
    assert expected is not None

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        values = bound_values(expected, module, args, kwargs)
        inputs = {one.name: values[index].clone() for index, one in expected.inputs.items() if index in values}
        calls.append(Call(inputs, {name: leaf for name, leaf in named_leaves(output) if isinstance(leaf, Tensor)}))

    hook = q.register_forward_hook(note, with_kwargs=True)
    try:
        with torch.inference_mode():
            for batch in batches:
                entry.run(q, batch)
    finally:
        hook.remove()
    return calls


def difference(folder: Path, call: Call, threads: str) -> str:
    """How the outputs of octet-run differ from Python's; '' where they have the same bits."""
    outputs = {name: folder / f"out{place}.npy" for place, name in enumerate(call.outputs)}
    words = [str(PROGRAM), str(folder / "model.q8"), "--threads", threads]
    for place, (name, x) in enumerate(call.inputs.items()):
        numpy.save(folder / f"in{place}.npy", x.contiguous().numpy())
        words += ["--input", f"{name}={folder}/in{place}.npy"]
    for path in outputs.values():
        words += ["--output", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"octet-run: {done.stderr.strip() or f'status {done.returncode}'}"
    for name, path in outputs.items():
        found, wanted = torch.from_numpy(numpy.load(path)), call.outputs[name].contiguous()
        if found.shape != wanted.shape:
            return f"output '{name}' is {tuple(found.shape)}, in Python {tuple(wanted.shape)}"
        unlike = int((found.view(torch.int32) != wanted.view(torch.int32)).sum())
        if unlike:
            return f"{unlike} of {wanted.numel()} values of output '{name}' have other bits"
    return ""
