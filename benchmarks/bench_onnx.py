"""Our ONNX files in ONNX Runtime and OpenVINO: bits, errors, float nodes, and time beside ours in Python.

    make bench-onnx ARGS='--only U-Net'

The models are those of `make bench-runner`. "ORT" is the relative error (L2) of the outputs in ONNX Runtime against
the model's; "0" is the same bits. "last bits" is how far the model's own outputs move where floats change by one last
bit, those of the call and those that float layers give: a runtime that adds floats in another order cannot be expected
to be nearer. "integers" counts the nodes of its optimised graph that compute in integers, after the plus the steps
whose integers float nodes compute exactly, and all nodes that compute, in the bodies of Scans too; those in float
follow. "to float" are the errors of ours, of ONNX Runtime and of OpenVINO against the float model. Times are medians of
CPU time on one thread, in turns.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import display
import torch
from bench_runner import in_turns
from runner_cases import CASES, Task
from torch import Tensor, nn

import quant
from quant.export.naming import named_leaves
from quant.onnx import ExportReport
from quant.runtime.layers.quant_module import QuantModule

INTEGER = (
    "QLinear", "QGemm", "MatMulInteger", "ConvInteger", "DynamicQuantize", "MaxPool", "NhwcMaxPool", "Resize", "Clip",
)  # fmt: skip
"""How the names of nodes begin that compute in integers; pools, Resize and Clip are that on uint8, as we write them."""

NO_ARITHMETIC = frozenset({
    "QuantizeLinear", "DequantizeLinear", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Gather",
    "Concat", "Split", "Expand", "Identity", "Cast", "Shape", "Pad", "Range", "Constant", "Tile", "GatherND",
    "GatherElements", "DepthToSpace", "ConstantOfShape", "ReorderInput", "ReorderOutput",
})  # fmt: skip
"""Nodes that move values or convert them."""


def nodes(kernels: Mapping[str, int]) -> tuple[int, int, str]:
    """How many nodes compute in integers, of how many that compute, and the others."""
    computing = collections.Counter({name: n for name, n in kernels.items() if name not in NO_ARITHMETIC})
    floats = {name: n for name, n in computing.items() if not name.startswith(INTEGER)}
    total = sum(computing.values())
    return total - sum(floats.values()), total, ", ".join(f"{n} {name}" for name, n in sorted(floats.items()))


def tensors(output: Any) -> list[Tensor]:
    return [one for _, one in named_leaves(output) if isinstance(one, Tensor)]


def error(ours: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest over the outputs."""
    apart = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(ours, wanted, strict=True)]
    return max(apart)


DRAWS = 3
"""Of noise in the last bits."""


def moved_by_last_bits(model: nn.Module, inputs: Sequence[Tensor]) -> float | None:
    """The largest error that a change of one last bit makes of a model's outputs; None where there is no float to move.

    Moved are the floats of the call and, in models of modules (dynamic ones), what each float layer gives.
    """
    wanted, moved = tensors(model(*inputs)), list[float]()
    for seed in range(DRAWS):
        generator, count = torch.Generator().manual_seed(seed), collections.Counter[str]()

        def nudged(x: Any, generator: torch.Generator = generator, count: collections.Counter[str] = count) -> Any:
            if not isinstance(x, Tensor) or x.dtype != torch.float32:
                return x
            count["floats"] += x.numel()
            up = torch.rand(x.shape, generator=generator) < 0.5
            return torch.nextafter(x, torch.where(up, torch.inf, -torch.inf))

        with _behind_float_layers(model, nudged):
            outputs = tensors(model(*map(nudged, inputs)))
        if not count["floats"]:
            return None
        moved.append(error(outputs, wanted))
    return max(moved)


@contextlib.contextmanager
def _behind_float_layers(model: nn.Module, change: Callable[[Any], Any]) -> Iterator[None]:
    """Change what the layers that are no int8 ones give."""
    inside = {part for one in model.modules() if isinstance(one, QuantModule) for part in one.modules()}
    layers = [one for one in model.modules() if one not in inside and not list(one.children())]
    hooks = [one.register_forward_hook(lambda module, args, output: change(output)) for one in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def in_onnxruntime(path: Path, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    fed = {one.name: x.numpy() for one, x in zip(session.get_inputs(), inputs, strict=True)}
    return lambda: [torch.from_numpy(one) for one in session.run(None, fed)]


def in_openvino(path: Path, inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)
    fed = [x.numpy() for x in inputs]

    def run() -> list[Tensor]:
        results = compiled(fed)
        return [torch.from_numpy(results[place].copy()) for place in range(len(compiled.outputs))]

    return run


def exported(task: Task, path: Path, runtime: str, verify: Any, **forms: str) -> ExportReport:
    example = task.inputs if task.is_dynamic else None
    return quant.export_onnx(task.model, path, runtime=runtime, example_inputs=example, verify=verify, **forms)


def row(name: str, task: Task, folder: Path, rounds: int, **forms: str) -> tuple[str, ...]:
    """One line of the table."""
    wanted, ours = tensors(task.original(*task.inputs)), tensors(task.model(*task.inputs))
    report = exported(task, folder / "ort.onnx", "ort", task.inputs, **forms)
    assert report.verification is not None
    integers, total, floats = nodes(report.verification.kernels)
    exact = sum(one.exact for one in report.steps)
    calls: list[Callable[[], object]] = [lambda: task.model(*task.inputs)]
    theirs = in_onnxruntime(folder / "ort.onnx", task.inputs)
    calls.append(theirs)
    said = [f"{error(ours, wanted):.4f}", f"{error(theirs(), wanted):.4f}"]
    try:
        exported(task, folder / "openvino.onnx", "openvino", False)
        others = in_openvino(folder / "openvino.onnx", task.inputs)
        calls.append(others)
        said.append(f"{error(others(), wanted):.4f}")
    except Exception as problem:  # OpenVINO's own kinds, as of operators that it has not
        print(f"{name}: OpenVINO: {str(problem).splitlines()[0][:200]}", file=sys.stderr)
        said.append("-")
    times = [f"{one:.2f}" for one in in_turns(calls, rounds, time.process_time)]
    apart = max(report.verification.outputs.values())
    mark = "0" if report.verification.same_bits else f"{apart:.1g}"
    moved = moved_by_last_bits(task.model, task.inputs)
    return (
        name,
        mark,
        "-" if moved is None else f"{moved:.1g}",
        f"{integers}{f' + {exact}' if exact else ''} / {total}",
        *said,
        *times,
        *["-"] * (3 - len(times)),
        floats,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of a model's name")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--target", default="vnni", help="of ONNX Runtime's files: vnni (the default) or avx2")
    parser.add_argument("--recurrent", default="exact", help="form of recurrent layers: exact (the default) or fast")
    parser.add_argument("--sums", default="exact", help="form of sums of integers: exact (the default) or fast")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, failed = [], 0
    for name, make in CASES.items():
        if options.only not in name:
            continue
        torch.manual_seed(0)
        try:
            with tempfile.TemporaryDirectory() as folder, torch.no_grad():
                forms = {"target": options.target, "recurrent": options.recurrent, "sums": options.sums}
                rows.append(row(name, make(), Path(folder), options.rounds, **forms))
        except (RuntimeError, ValueError) as problem:
            failed += 1
            print(f"{name}: {problem}", file=sys.stderr)
        else:
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    header = (
        "model",
        "ORT",
        "last bits",
        "integers",
        "to float: ours",
        "ORT",
        "OpenVINO",
        "ms ours",
        "ORT",
        "OpenVINO",
        "float nodes in ORT",
    )
    print(display.table(header, rows))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
