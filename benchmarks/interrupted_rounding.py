"""GPTQ of a language model of 100 million parameters: its time, and a run that is killed and goes on (`bench_llm.py`).

    python interrupted_rounding.py CHECKPOINT     # one run, in a process of its own; a line of JSON

A run is killed with SIGKILL at a moment drawn within the time that a whole run took, and the same command goes on from
its checkpoint. Its integers, scales and zero points have to be those of the whole run, to the bit.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))  # a safe path leaves the script's own folder out

import display
import language_network
import torch
from bench_memory import status
from quant.calibrate.checkpoint import digest
from torch import Tensor, nn

import quant

MOST_MINUTES = 15.0
"""Of a whole run."""

WIDTH, HEADS, LAYERS, INNER = 768, 12, 14, 2048
SAMPLES = 64
MIB = 1 << 20


def model() -> nn.Module:
    """The language model of `language_network.py`, as wide as GPT-2 (small) and two layers deeper; random weights."""
    torch.manual_seed(0)
    return language_network.LanguageModel(WIDTH, HEADS, LAYERS, INNER).eval()


def rounded(checkpoint: Path) -> dict[str, Any]:
    """4 bits in groups of 64 by GPTQ, from windows of Shakespeare's plays."""
    data = language_network.windows(language_network.text(held_out=False), SAMPLES, seed=2)[:, :-1].split(16)
    network = model()
    parameters = sum(one.numel() for one in network.parameters())
    recipe = quant.Recipe({"*embed": None}, default=quant.QConfig(weight_bits=4, group_size=64))
    began = time.perf_counter()
    q = quant.quantize_dynamic(network, recipe, inplace=True, batches=data, rounding="gptq", checkpoint=checkpoint)
    seconds = time.perf_counter() - began
    layers = sum(entry.quantized for entry in quant.summary(q))
    tensors = {name: value for name, value in q.state_dict().items() if isinstance(value, Tensor)}
    return {
        "parameters": parameters,
        "layers": layers,
        "seconds": seconds,
        "peak": status("VmHWM"),
        "file": checkpoint.stat().st_size,
        "digest": digest("", tensors),
    }


def _run(checkpoint: Path, kill_after: float | None = None) -> dict[str, Any] | None:
    """A run in a process of its own; None where it was killed, as `subprocess` does it (SIGKILL)."""
    command = [sys.executable, __file__, str(checkpoint)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=kill_after)
    except subprocess.TimeoutExpired:
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def interrupted() -> bool:
    """Print what rounding takes, whole and interrupted; whether it is in time, and gives the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        whole_file, file = Path(folder) / "whole", Path(folder) / "killed"
        began = time.perf_counter()
        whole = _run(whole_file)
        assert whole is not None
        starting = time.perf_counter() - began - whole["seconds"]
        moment = starting + random.uniform(0.1, 0.9) * whole["seconds"]
        killed = _run(file, kill_after=moment) is None
        there = file.stat().st_size if file.exists() else 0
        gone_on = _run(file)
        assert gone_on is not None
    same, minutes = whole["digest"] == gone_on["digest"], whole["seconds"] / 60
    good = same and killed and minutes <= MOST_MINUTES
    header = ("parameters", "layers", "minutes", "peak", "killed after", "of its file", "goes on for", "the same bits")
    line = [
        f"{whole['parameters'] / 1e6:.0f} million",
        str(whole["layers"]),
        f"{minutes:.1f} (at most {MOST_MINUTES:.0f})",
        f"{whole['peak'] / MIB:.0f} MiB",
        f"{moment / 60:.1f} min" if killed else "not: it was done before",
        f"{there / whole['file']:.2f}",
        f"{gone_on['seconds'] / 60:.1f} min",
        "yes" if same else "NO",
    ]
    print(display.table(header, [line]), flush=True)
    return good


if __name__ == "__main__":
    print(json.dumps(rounded(Path(sys.argv[1]))))
