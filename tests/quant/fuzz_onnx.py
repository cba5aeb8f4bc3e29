"""Damaged ONNX files into `quant.load_onnx`: a clear error, or the numbers of the reference; no crash, no hang.

    python tests/quant/fuzz_onnx.py --count 3000

Seeds are a convolutional network and a transformer's layer. Half of the cases change bytes or cut the file, half change
what it says: names, attributes, sizes, dtypes, numbers, nodes. Each batch runs in a process of its own, under limits of
time and memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import resource
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quant

BATCH = 40
SECONDS = 120
"""Of CPU time, for a batch."""

MEMORY = 12 << 30


class Attention(nn.Module):
    """A layer of a transformer, on reals."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        seen = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        x = self.norm(x + self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.narrow(torch.nn.functional.gelu(self.wide(x)))


def seeds(folder: Path) -> list[tuple[bytes, Tensor]]:
    """The files and a call of each."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU6(), nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.SiLU(), nn.MaxPool2d(2)]
    network = nn.Sequential(*layers, nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    made = []
    for model, x in ((network, torch.randn(2, 3, 16, 16)), (Attention(), torch.randn(2, 5, 16))):
        path = folder / f"{len(made)}.onnx"
        quant.export_onnx(quant.quantize_static(model.eval(), [x], progress=False), path)
        made.append((path.read_bytes(), x))
    return made


def of_bytes(data: bytes, draw: random.Random) -> bytes:
    """With other bytes, or cut."""
    changed = bytearray(data)
    how = draw.randrange(4)
    for _ in range(draw.choice((1, 1, 2, 8))):
        place = draw.randrange(len(changed))
        if how == 0:
            changed[place] = draw.randrange(256)
        elif how == 1:
            changed[place] ^= 1 << draw.randrange(8)
        elif how == 2:
            del changed[place : place + draw.choice((1, 4, 64))]
        else:
            changed[place:place] = bytes(draw.randrange(256) for _ in range(draw.choice((1, 4))))
    return bytes(changed[: draw.randrange(len(changed))] if draw.random() < 0.2 else changed)


NUMBERS = (-1, 0, 1, 2, 3, 7, 255, 256, -128, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, -(2**63))


def of_model(data: bytes, draw: random.Random) -> bytes:
    """With one thing said otherwise."""
    import onnx

    model = onnx.load_from_string(data)
    graph = model.graph
    draw.choice((_attribute, _inputs, _operator, _constant, _dtype, _node, _size, _version))(model, graph, draw)
    return bytes(model.SerializeToString())


def _attribute(model: Any, graph: Any, draw: random.Random) -> None:
    node = draw.choice([node for node in graph.node if node.attribute])
    attribute = draw.choice(node.attribute)
    if attribute.ints:
        attribute.ints[draw.randrange(len(attribute.ints))] = draw.choice(NUMBERS)
    elif draw.random() < 0.2:
        attribute.name = draw.choice(("axis", "pads", "to", "perm", "nonsense"))
    else:
        attribute.i = draw.choice(NUMBERS)


def _inputs(model: Any, graph: Any, draw: random.Random) -> None:
    node = draw.choice(graph.node)
    names = [name for other in graph.node for name in (*other.input, *other.output)]
    if node.input and draw.random() < 0.8:
        node.input[draw.randrange(len(node.input))] = draw.choice([*names, "", "nobody"])
    else:
        node.input.append(draw.choice(names))


def _operator(model: Any, graph: Any, draw: random.Random) -> None:
    from quant.onnx.load_registry import OPERATORS
    from quant.onnx.load_torch import TORCH

    draw.choice(graph.node).op_type = draw.choice(sorted({*OPERATORS, *TORCH}))


def _constant(model: Any, graph: Any, draw: random.Random) -> None:
    from onnx import numpy_helper

    place = draw.randrange(len(graph.initializer))
    held = graph.initializer[place]
    array = numpy_helper.to_array(held).copy()
    if array.dtype == "int64" and array.size:
        array.reshape(-1)[draw.randrange(array.size)] = draw.choice(NUMBERS)
    elif draw.random() < 0.5 and array.size:
        array.reshape(-1)[draw.randrange(array.size)] = draw.choice((0, 1, 100))
    else:
        array = array.reshape(-1)[: draw.randrange(array.size + 1)]
    graph.initializer[place].CopyFrom(numpy_helper.from_array(array, held.name))


def _dtype(model: Any, graph: Any, draw: random.Random) -> None:
    draw.choice(graph.initializer).data_type = draw.randrange(24)


def _node(model: Any, graph: Any, draw: random.Random) -> None:
    place = draw.randrange(len(graph.node))
    if draw.random() < 0.5:
        del graph.node[place]
    else:
        graph.node.insert(draw.randrange(len(graph.node)), graph.node[place])


def _size(model: Any, graph: Any, draw: random.Random) -> None:
    held = draw.choice([one for one in graph.initializer if one.dims])
    held.dims[draw.randrange(len(held.dims))] = draw.choice(NUMBERS)


def _version(model: Any, graph: Any, draw: random.Random) -> None:
    if draw.random() < 0.5:
        model.opset_import[0].version = draw.choice((0, 9, 10, 13, 21, 28, 99))
    else:
        graph.input[0].type.tensor_type.elem_type = draw.randrange(24)


def outcome(data: bytes, x: Tensor, path: Path) -> str:
    """What a file gives: "refused", "no such call", "numbers"; else what is wrong with it."""
    path.write_bytes(data)
    try:
        loaded = quant.load_onnx(path)
    except ValueError as error:
        return "refused" if str(error).startswith("quant.load_onnx: ") else f"unclear: {error}"
    reference = quant.load_onnx(path, backend="reference")
    results = []
    for module in (loaded, reference):
        try:
            results.append(module(x))
        except (TypeError, ValueError) as error:
            results.append(str(error))
    ours, wanted = results
    if isinstance(ours, str) or isinstance(wanted, str):
        return (
            "no such call"
            if isinstance(ours, str) and isinstance(wanted, str)
            else f"one of two: {ours!s:.200} {wanted!s:.200}"
        )
    pairs = zip(*((one if isinstance(one, tuple) else (one,)) for one in (ours, wanted)), strict=True)
    return "numbers" if all(_alike(one, other) for one, other in pairs) else "other numbers than the reference's"


def _alike(one: Tensor, other: Tensor) -> bool:
    """Within what floats in another order, and a step that they decide, make."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    if not torch.equal(one.isfinite(), other.isfinite()):
        return False
    kept = one.isfinite()
    apart = (one[kept].double() - other[kept].double()).norm()
    return float(apart) <= 0.05 * float(other[kept].double().norm()) + 1e-6


def case(seed: int, files: list[tuple[bytes, Tensor]]) -> tuple[bytes, Tensor]:
    """The file of a number, the same in every run."""
    draw = random.Random(seed)
    data, x = files[seed % len(files)]
    change: Callable[[bytes, random.Random], bytes] = of_bytes if seed // len(files) % 2 else of_model
    return change(data, draw), x


def run_batch(first: int, count: int, files: list[tuple[bytes, Tensor]], folder: str, answer: Any) -> None:
    """Send (number, outcome) of each; what the process dies of is the case that did not answer."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in range(first, first + count):
        try:
            data, x = case(seed, files)
            said = outcome(data, x, Path(folder, f"{first}.onnx"))
        except Exception as error:  # of whatever kind: it is what this looks for
            said = f"unclear: {type(error).__name__}: {error}"
        answer.send((seed, said))
    answer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        files = seeds(Path(folder))
        kinds, bad = Counter[str](), []
        seed, last = options.first, options.first + options.count
        while seed < last:
            for answered, said in answers(seed, min(BATCH, last - seed), files, folder):
                seed = answered + 1
                kinds[said.partition(":")[0]] += 1
                if said not in ("refused", "no such call", "numbers"):
                    bad.append((answered, said))
                    print(answered, said[:400], flush=True)
    print(dict(kinds))
    return int(bool(bad))


def answers(first: int, count: int, files: list[tuple[bytes, Tensor]], folder: str) -> list[tuple[int, str]]:
    """Of a batch; a process that ends early gives the case that it died of."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=run_batch, args=(first, count, files, folder, there), daemon=True)
    process.start()
    there.close()
    got: list[tuple[int, str]] = []
    while len(got) < count:
        try:
            got.append(here.recv())
        except EOFError:
            process.join()
            got.append((first + len(got), f"crash: the process ended with {process.exitcode}"))
            break
    process.join()
    return got


if __name__ == "__main__":
    sys.exit(main())
