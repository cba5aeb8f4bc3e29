"""Models that torch.ao quantised, taken over: the same integers, and error and time beside torch.ao.

    make bench-torch-ao

"integers" counts the weighted layers whose int8 weights are torch.ao's, of all that it quantised. Errors are relative
(L2), against the float model, and means over calls that calibration has not seen: on one of them either side may be
nearer by chance. Times are medians of CPU time on one thread, in turns; a PT2E program is timed as it is, without
Inductor.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import display
import networks
import torch
from bench_runner import in_turns
from torch import Tensor, nn

import quant
from quant.migrate.packed_layers import Product, int8_weight, packed_layers
from quant.migrate.pt2e_program import is_pt2e

with warnings.catch_warnings():  # torch.ao is deprecated, and says so at its import
    warnings.simplefilter("ignore")
    import torch.ao.quantization as ao
    from torch.ao.nn.quantized import FloatFunctional
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx


@dataclass(frozen=True)
class Task:
    """A float model, torch.ao's, and inputs that calibration has not seen."""

    original: nn.Module
    theirs: nn.Module
    example: Any
    unseen: list[Tensor]


CALIBRATION = 8


def photos(count: int) -> list[Tensor]:
    return [torch.randn(1, 3, 224, 224) for _ in range(count)]


def by_fx(make: Callable[[], nn.Module]) -> Callable[[], Task]:
    def build() -> Task:
        batches = photos(2 * CALIBRATION)
        model = networks.settle_norms(make(), batches[:CALIBRATION])
        mapping = ao.get_default_qconfig_mapping("x86")
        prepared = prepare_fx(copy.deepcopy(model), mapping, (batches[0],))
        for batch in batches[:CALIBRATION]:
            prepared(batch)
        return Task(model, convert_fx(prepared), batches[0], batches[CALIBRATION:])

    return build


def by_pt2e(make: Callable[[], nn.Module]) -> Callable[[], Task]:
    def build() -> Task:
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        batches = photos(2 * CALIBRATION)
        model = networks.settle_norms(make(), batches[:CALIBRATION])
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(torch.export.export(model, (batches[0],)).module(), quantizer)
        for batch in batches[:CALIBRATION]:
            prepared(batch)
        return Task(model, convert_pt2e(prepared), batches[0], batches[CALIBRATION:])

    return build


class Stubbed(nn.Module):
    """Blocks of a ResNet as torch.ao's eager mode wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
        self.stem = nn.Conv2d(3, 64, 7, 4, 3)
        self.convs = nn.ModuleList(nn.Conv2d(64, 64, 3, padding=1) for _ in range(4))
        self.sums, self.relus = nn.ModuleList(FloatFunctional() for _ in range(4)), nn.ReLU()
        self.head = nn.Linear(64, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relus(self.stem(self.quant(x)))
        for conv, add in zip(self.convs, self.sums, strict=True):
            x = add.add_relu(x, conv(x))
        return self.dequant(self.head(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1)))


def eager() -> Task:
    batches, model = photos(2 * CALIBRATION), Stubbed().eval()
    prepared = copy.deepcopy(model)
    prepared.qconfig = ao.get_default_qconfig("x86")
    ao.prepare(prepared, inplace=True)
    for batch in batches[:CALIBRATION]:
        prepared(batch)
    return Task(model, ao.convert(prepared), batches[0], batches[CALIBRATION:])


class Tagger(nn.Module):
    """An LSTM of both directions between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.states = nn.Linear(80, 256), nn.LSTM(256, 256, batch_first=True, bidirectional=True)
        self.last = nn.Linear(512, 45)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.states(torch.relu(self.first(x)))[0])


def dynamic() -> Task:
    model = Tagger().eval()
    return Task(
        model, ao.quantize_dynamic(model, {nn.Linear, nn.LSTM}), None, [torch.randn(1, 35, 80) for _ in range(8)]
    )


TASKS: dict[str, Callable[[], Task]] = {
    "ResNet-18, FX": by_fx(networks.ResNet18),
    "MobileNetV2, FX": by_fx(networks.MobileNetV2),
    "ResNet-18, PT2E x86": by_pt2e(networks.ResNet18),
    "MobileNetV2, PT2E x86": by_pt2e(networks.MobileNetV2),
    "residual blocks, eager": eager,
    "LSTM tagger, dynamic": dynamic,
}


def same_integers(theirs: nn.Module, ours: nn.Module) -> tuple[int, int]:
    """Layers whose int8 weights are torch.ao's, of all its linear layers and convolutions."""
    held = [one for module in ours.modules() for name, one in module.named_buffers(recurse=False) if name == "q_weight"]
    if is_pt2e(theirs):
        weights = [one for one in theirs.state_dict().values() if isinstance(one, Tensor) and one.dtype is torch.int8]
        weights = [one for one in weights if one.dim() > 1]  # zero points beside them
    else:
        products = [one for one in packed_layers(theirs.state_dict()).values() if isinstance(one, Product)]
        weights = [int8_weight(one.quantized).q_weight for one in products]
    return sum(any(torch.equal(one, mine) for mine in held if mine.shape == one.shape) for one in weights), len(weights)


def error(model: nn.Module, task: Task, x: Tensor) -> float:
    """Relative, L2, against the float model."""
    wanted = task.original(x)
    return float((model(x) - wanted).norm() / wanted.norm())


def row(name: str, task: Task, rounds: int) -> tuple[str, ...]:
    """One line of the table."""
    ours = quant.from_torch_ao(task.theirs, task.original, task.example)
    with torch.inference_mode():
        errors = [statistics.mean(error(model, task, x) for x in task.unseen) for model in (ours, task.theirs)]
        x = task.unseen[0]
        times = in_turns([lambda: ours(x), lambda: task.theirs(x)], rounds, time.process_time)
    same, count = same_integers(task.theirs, ours)
    numbers = [f"{one:.4f}" for one in errors] + [f"{one:.2f}" for one in times]
    return (name, f"{same}/{count}", *numbers, f"{times[1] / times[0]:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of a model's name")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch.ao's, about itself
    rows = []
    for name, make in TASKS.items():
        if options.only in name:
            torch.manual_seed(0)
            try:
                rows.append(row(name, make(), options.rounds))
            except ImportError as problem:
                print(f"{name}: left out: {problem}", file=sys.stderr)
    print(display.table(("model", "integers", "error", "of torch.ao", "ms", "of torch.ao", "torch.ao / ours"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
