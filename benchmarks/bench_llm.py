"""Language models: loading into 4 bits, GPTQ, and decode and prefill against the peers (`make bench-llm`).

    python benchmarks/bench_llm.py                     # loading, GPTQ, decode, prefill
    python benchmarks/bench_llm.py --part load         # peak of memory, against the size of the 4-bit model
    python benchmarks/bench_llm.py --part gptq         # 100 million parameters by GPTQ; killed, it goes on
    python benchmarks/bench_llm.py --part decode --contexts 32 2048 --layers 2

The stack has layers of the shapes of Llama 3.2 1B and random weights. Contenders of a row take turns in one process;
peers that are not to be had are named with the reason. Beside a decoding step stands a plain read of as many bytes as
our 4-bit weights: the sum of a float32 tensor. Loading has a process of its own, whose resident memory at the peak,
less that before, is compared with the bytes of the model that it made. Exit status 1 where that is above the goal,
where GPTQ takes too long, or gives other integers after it was killed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import display
import harness
import torch
from bench_memory import status
from interrupted_rounding import interrupted
from language_stack import LAYERS, WIDTH, Stack, Whole
from llm_peers import PEERS
from peers import Missing
from safetensors.torch import save_file
from torch import Tensor, nn

import quant
from quant.export import to_plan

LOAD_GOAL = 1.20
"""Most memory at the peak of loading, over the bytes of the 4-bit model."""

PARTS = ("load", "gptq", "decode", "prefill")
TIMED = ("decode", "prefill")
READ = "read"
BASE = "octet 4 bits g64, one call"
"""What others are compared with: the peers run graphs, too."""
GROUPS = {"weight_bits": 4, "group_size": 64}
CLIPPED = {**GROUPS, "weight_observer": "mse"}
OURS = {"octet 4 bits g64": GROUPS, "octet 4 bits g64 mse": CLIPPED, "octet 8 bits": {}}
EFFORT = harness.Effort(seconds=4.0, rounds=9, patience=1.0)
MIB = 1 << 20


# --- loading --------------------------------------------------------------------------------------------------------


def write_shards(folder: Path, layers: int) -> None:
    """Random weights of a whole model in bfloat16, a file for each layer and one for the rest."""
    with torch.device("meta"):
        state = Whole(layers).state_dict()
    del state["head.weight"]  # tied
    torch.manual_seed(0)
    shards: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        place = ".".join(name.split(".")[:2]) if name.startswith("layers.") else "rest"
        shards.setdefault(place, {})[name] = tensor
    for place, tensors in shards.items():
        drawn = {name: 0.02 * torch.randn(one.shape, dtype=torch.bfloat16) for name, one in tensors.items()}
        save_file(drawn, folder / f"{place}.safetensors")


def load(folder: Path, layers: int) -> dict[str, float]:
    """Load the shards into 4 bits; bytes and seconds, in a process that has done nothing else."""
    torch.manual_seed(0)
    quant.quantize_dynamic(nn.Linear(64, 64), quant.Recipe(default=quant.QConfig(**GROUPS)))  # imports and threads
    with torch.device("meta"):
        model = Whole(layers).to(torch.bfloat16)
    before, start = status("VmRSS"), time.perf_counter()
    q = quant.load_quantized(model, folder, quant.Recipe(default=quant.QConfig(**GROUPS)))
    spent, peak = time.perf_counter() - start, status("VmHWM") - before
    report = quant.summary(q)
    return {"peak": peak, "model": report.model_bytes_after, "float": report.model_bytes_before, "seconds": spent}


def loading(layers: int) -> bool:
    """Print what loading takes; whether the goal is reached."""
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder), layers)
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        command = [sys.executable, __file__, "--child", folder, "--layers", str(layers)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(answer.splitlines()[-1])
    share = found["peak"] / found["model"]
    header = ("layers", "bf16 shards", "4-bit model", "of bf16", "peak of loading", "over the model", "goal", "seconds")
    line = [
        str(layers),
        f"{size / MIB:.0f} MiB",
        f"{found['model'] / MIB:.0f} MiB",
        f"{found['model'] / found['float']:.3f}",
        f"{found['peak'] / MIB:.0f} MiB",
        f"{share:.3f}",
        f"{'reached' if share <= LOAD_GOAL else 'NOT reached'}: {LOAD_GOAL}",
        f"{found['seconds']:.1f}",
    ]
    print(display.table(header, [line]), flush=True)
    return bool(share <= LOAD_GOAL)


# --- decode and prefill ---------------------------------------------------------------------------------------------


def contenders(model: nn.Module, x: Tensor) -> tuple[list[harness.Contender], dict[str, int], dict[str, str]]:
    """Float, ours and the peers; the bytes of ours; and the peers that are missing, with the reasons."""
    expected = model(x)
    runners: list[harness.Contender] = [harness.Contender("torch float32", lambda: model(x))]
    sizes, missing = {}, dict[str, str]()
    for name, settings in OURS.items():
        q = quant.quantize_dynamic(model, quant.Recipe(default=quant.QConfig(**settings)))
        error = harness.relative_error(q(x), expected)
        runners.append(harness.Contender(name, lambda q=q: q(x), error=error))
        plan = to_plan(q, x)
        error = harness.relative_error(plan(x), expected)
        runners.append(harness.Contender(f"{name}, one call", lambda plan=plan: plan(x), error=error))
        sizes[name] = sizes[f"{name}, one call"] = quant.summary(q).bytes_after
    for name, make in PEERS.items():
        try:
            call = make(model, x)
            error = harness.relative_error(call(), expected)
        except Missing as reason:
            missing[name] = str(reason)
            continue
        runners.append(harness.Contender(name, call, error=error))
    return runners, sizes, missing


def measured(part: str, context: int, layers: int, threads: int) -> tuple[list[list[str]], dict[str, str]]:
    """The lines of a row, and the peers that are missing."""
    torch.manual_seed(0)
    tokens = context if part == "prefill" else 1
    model = Stack(layers, 0 if part == "prefill" else context).eval()
    x = torch.randn(1, tokens, WIDTH)
    runners, sizes, missing = contenders(model, x)
    if part == "decode":
        reals = torch.ones(sizes[BASE] // 4)
        runners.append(harness.Contender(READ, reals.sum))
    race = harness.race(f"{part} {context}", runners, effort=EFFORT, clock=harness.clock_for(threads))
    lines = []
    for runner in runners:
        if runner.name == READ:
            continue
        seconds, share = race.time(runner.name).median, ""
        if part == "decode" and runner.name in sizes:
            rate = sizes[runner.name] / seconds
            of_read = rate / (sizes[BASE] / race.time(READ).median)
            share = f"{rate / 1e9:.1f} GB/s, {of_read:.2f} of a read"
        ratio = race.ratio(runner.name, BASE).median
        error = "" if runner.error is None else f"{runner.error:.3f}"
        rate_text = f"{tokens * layers / LAYERS / seconds:.1f}"
        lines.append([part, str(context), runner.name, rate_text, f"{ratio:.2f}", error, share])
    return lines, missing


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--contexts", type=int, nargs="+", default=[32, 512, 2048], help="tokens")
    parser.add_argument("--layers", type=int, help=f"of the stack: {LAYERS} to load, and 4 to time, by default")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(load(Path(options.child), options.layers)))
        return 0
    if len(options.threads) > 1:
        given = ["--part", *options.part, "--contexts", *map(str, options.contexts)]
        given += ["--layers", str(options.layers)] if options.layers else []
        return harness.in_children(options.threads, given)
    threads: int = options.threads[0]
    print(harness.describe(harness.machine(("onnxruntime", "openvino", "torchao"), threads, harness.pin(threads))))
    good = loading(options.layers or LAYERS) if "load" in options.part else True
    good &= interrupted() if "gptq" in options.part else True
    header = (
        "",
        "tokens",
        "who",
        f"tokens/s of {LAYERS} layers",
        "time over ours at 4 bits, one call",
        "error",
        "weights",
    )
    missing: dict[str, str] = {}
    with torch.inference_mode():
        for part in (part for part in TIMED if part in options.part):
            for context in options.contexts:
                lines, absent = measured(part, context, options.layers or 4, threads)
                print(display.table(header, lines), flush=True)  # each row takes minutes
                missing.update(absent)
    for name, reason in missing.items():
        print(f"{name} is missing: {reason}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
