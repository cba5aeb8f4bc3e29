"""Files that others quantised, read by `quant.load_onnx`, beside ONNX Runtime on the same file: bits, error and time.

    make bench-onnx-files ARGS='--only BERT'

The files are of `onnxruntime.quantization.quantize_static` (QDQ, per channel and per tensor) and of `nncf.quantize`.
Both sides run on one thread; calls take turns, and the ratio is of medians of CPU time. "values that differ" are
outputs with other bits; "apart" is the largest difference over the file's last step, or over the largest output where
nothing rounds it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import display
import networks
import torch
from bench_runner import in_turns
from static_peers import quiet
from torch import Tensor, nn

import quant

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where `tutorials` is a package

CALIBRATION = 8
"""Samples."""


@dataclass(frozen=True)
class Task:
    """A float model and its calls, by the names of its inputs."""

    model: nn.Module
    names: tuple[str, ...]
    calls: Sequence[tuple[Tensor, ...]]

    def fed(self, place: int) -> dict[str, Any]:
        """A call as arrays."""
        return {name: one.numpy() for name, one in zip(self.names, self.calls[place], strict=True)}


def images(make: Callable[[], nn.Module]) -> Callable[[], Task]:
    """A network of photos, on noise; the last call is not calibrated with."""

    def task() -> Task:
        torch.manual_seed(0)
        batches = list(torch.randn(CALIBRATION + 1, 1, 3, 224, 224))
        model = make()
        if any(module.training for module in model.modules()):
            model = networks.settle_norms(model, batches)
        return Task(model.eval(), ("x",), [(batch,) for batch in batches])

    return task


def efficientnet() -> nn.Module:
    """The trained EfficientNet-Lite0."""
    from tutorials.zoo import efficientnet

    return efficientnet.load()


def bert() -> Task:
    """Sentences of 128 tokens, the last call with a part masked."""
    torch.manual_seed(0)
    model = networks.Bert().eval()
    ids = torch.randint(0, 8000, (CALIBRATION + 1, 1, 128))
    return Task(model, ("ids", "mask"), [(one, torch.ones(1, 128, dtype=torch.int64)) for one in ids])


TASKS: dict[str, Callable[[], Task]] = {
    "ResNet-18": images(networks.ResNet18),
    "MobileNetV2": images(networks.MobileNetV2),
    "EfficientNet-Lite0": images(efficientnet),
    "BERT": bert,
}


def exported(task: Task, path: Path) -> None:
    """The float model as a file with a free batch."""
    axes = {name: {0: "batch"} for name in task.names}
    torch.onnx.export(
        task.model,
        task.calls[0],
        str(path),
        input_names=list(task.names),
        dynamic_axes=axes,
        dynamo=False,
        opset_version=17,
    )


def by_onnxruntime(per_channel: bool) -> Callable[[Task, Path, Path], None]:
    """ONNX Runtime's quantiser, with its own preparation of the file."""

    def make(task: Task, source: Path, target: Path) -> None:
        from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process

        class Reader(CalibrationDataReader):  # type: ignore[misc]
            def __init__(self) -> None:
                self.left = [task.fed(place) for place in range(CALIBRATION)]

            def get_next(self) -> dict[str, Any] | None:
                return self.left.pop() if self.left else None

        ready = source.with_suffix(".ready.onnx")
        quant_pre_process(str(source), str(ready), skip_symbolic_shape=True)
        types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
        quantize_static(str(ready), str(target), Reader(), per_channel=per_channel, **types)

    return make


def by_nncf(task: Task, source: Path, target: Path) -> None:
    """NNCF's quantiser, of a transformer with its scheme for those."""
    import nncf
    import onnx

    data = nncf.Dataset([task.fed(place) for place in range(CALIBRATION)])
    kind = nncf.ModelType.TRANSFORMER if "ids" in task.names else None
    onnx.save(nncf.quantize(onnx.load(str(source)), data, model_type=kind, subset_size=CALIBRATION), str(target))


QUANTISERS: dict[str, Callable[[Task, Path, Path], None]] = {
    "ORT per channel": by_onnxruntime(True),
    "ORT per tensor": by_onnxruntime(False),
    "NNCF": by_nncf,
}


def last_step(path: Path) -> float | None:
    """The scale of the range in which the output is rounded; None where it is not."""
    from quant.onnx.file import read_onnx

    file = read_onnx(path)
    makers = {name: node for node in file.nodes for name in node.outputs}
    last = makers[file.outputs[0]]
    return float(file.constants[last.inputs[1]]) if last.op == "DequantizeLinear" else None


def row(task: Task, path: Path, rounds: int) -> tuple[str, ...]:
    """One line of the table."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    loaded = quant.load_onnx(path)
    fed, call = task.fed(CALIBRATION), task.calls[CALIBRATION]
    with torch.inference_mode():
        ours, theirs, wanted = loaded(*call), torch.from_numpy(session.run(None, fed)[0]), task.model(*call)
        apart = float((ours - theirs).abs().max()) / (last_step(path) or float(theirs.abs().max()))
        errors = [float((one - wanted).norm() / wanted.norm()) for one in (ours, theirs)]
        our_time, their_time = in_turns(
            [lambda: loaded(*call), lambda: session.run(None, fed)], rounds, time.process_time
        )
    differing = float((ours != theirs).double().mean())
    said = "same bits" if not differing else f"{differing:.1%}, {apart:.2g} {'steps' if last_step(path) else 'of max'}"
    numbers = f"{errors[0]:.4f}", f"{errors[1]:.4f}", f"{our_time:.2f}", f"{their_time:.2f}"
    return (said, *numbers, f"{their_time / our_time:.2f}", str(len(loaded.in_torch)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of a network's name")
    parser.add_argument("--by", default="", help="a part of a quantiser's name")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--keep", type=Path, help="a folder in which the files stay, and are taken from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    header = ("file", "values that differ, apart", "error", "of ORT", "ms", "of ORT", "ORT / ours", "in torch")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        kept = options.keep or Path(folder)
        for name, make in TASKS.items():
            if options.only in name:
                task = make()
                for quantiser, write in QUANTISERS.items():
                    if options.by in quantiser:
                        path = file_of(task, kept / f"{name} {quantiser}.onnx", write)
                        rows.append((f"{name}, {quantiser}", *row(task, path, options.rounds)))
                        print(rows[-1], file=sys.stderr, flush=True)
    print(display.table(header, rows))
    return 0


def file_of(task: Task, path: Path, write: Callable[[Task, Path, Path], None]) -> Path:
    """The quantised file, which is made where it is not there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        source = path.with_suffix(".float.onnx")
        with quiet():
            exported(task, source)
            write(task, source, path)
    return path


if __name__ == "__main__":
    sys.exit(main())
