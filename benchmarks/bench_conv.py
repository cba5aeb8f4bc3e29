"""Convolutions one by one, at the shapes of ResNet-18 and MobileNetV2: ours against torch's float and its int8 ones.

    python benchmarks/bench_conv.py [--only REGEX] [--network NAME]

GMAC/s of ours, and the others' time over ours. Weights are in +-63, where torch's kernels are exact on every CPU; the
outputs of the int8 ones are compared, and "differ" is the share that is not equal.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Sequence

import display
import harness
import networks
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quant

Layer = tuple[int, int, int, int, int, int]
"""Channels in, channels out, size of the image, kernel, stride, groups."""

EFFORT = harness.Effort(seconds=0.25, rounds=7, patience=1.0)


def layers_of(name: str) -> dict[Layer, int]:
    """The convolutions of a network at 224 x 224, and how often each occurs."""
    found: dict[Layer, int] = {}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Conv2d)
        shape = (module.in_channels, module.out_channels, inputs[0].shape[2], module.kernel_size[0], module.stride[0])
        layer = (*shape, module.groups)
        found[layer] = found.get(layer, 0) + 1

    with torch.device("meta"):
        model = networks.NETWORKS[name]().eval()
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_pre_hook(note)
        model(torch.empty(1, 3, 224, 224))
    return found


def contenders(layer: Layer) -> dict[str, Callable[[], Tensor]]:
    """One call of the layer each, channels last, batch 1."""
    inputs, outputs, size, kernel, stride, groups = layer
    generator = torch.Generator().manual_seed(0)
    q_x = torch.randint(0, 256, (1, inputs, size, size), dtype=torch.uint8, generator=generator)
    q_x = q_x.contiguous(memory_format=torch.channels_last)
    shape = (outputs, inputs // groups, kernel, kernel)
    q_weight = torch.randint(-63, 64, shape, dtype=torch.int8, generator=generator)
    multiplier = torch.full((outputs,), 0.02 / (inputs // groups * kernel**2) ** 0.5)
    by, padding = [stride, stride], [kernel // 2, kernel // 2]
    backend = quant.kernels.current()
    weight = q_weight.float().contiguous(memory_format=torch.channels_last)
    x = q_x.float().contiguous(memory_format=torch.channels_last)
    made: dict[str, Callable[[], Tensor]] = {
        "octet": lambda: backend.conv_u8s8_u8(
            q_x, 128, q_weight, None, by, padding, [1, 1], groups, multiplier, 128, 0, 255
        ),
        "float": lambda: F.conv2d(x, weight, None, by, padding, [1, 1], groups),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and here as a peer only
        torch.backends.quantized.engine = "x86" if "x86" in torch.backends.quantized.supported_engines else "qnnpack"
        theirs = torch._make_per_channel_quantized_tensor(
            q_weight, multiplier, torch.zeros(outputs, dtype=torch.long), 0
        )
        packed = torch.ops.quantized.conv2d_prepack(theirs, None, by, padding, [1, 1], groups)
        quantised = torch._make_per_tensor_quantized_tensor(q_x, 1.0, 128)
    made["torch int8"] = lambda: torch.ops.quantized.conv2d(quantised, packed, 1.0, 128)
    return made


def run(layer: Layer) -> tuple[harness.Race, float]:
    """Times, and the share of outputs in which ours and torch's int8 differ."""
    calls = contenders(layer)
    differ = float((calls["octet"]() != calls["torch int8"]().int_repr()).double().mean())
    named = [harness.Contender(name, call) for name, call in calls.items()]
    return harness.race(str(layer), named, effort=EFFORT, clock=time_of_this_process), differ


time_of_this_process = harness.clock_for(1)


def macs(layer: Layer) -> int:
    """Products of one call."""
    inputs, outputs, size, kernel, stride, groups = layer
    return (-(-size // stride)) ** 2 * outputs * inputs // groups * kernel**2


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", default="", help="only the layers whose text it finds")
    parser.add_argument("--network", choices=list(networks.NETWORKS), help="only this one")
    options = parser.parse_args(arguments)
    facts = harness.machine([], 1, harness.pin(1))
    print(harness.describe(facts))
    for name in [options.network] if options.network else networks.NETWORKS:
        chosen = {layer: count for layer, count in layers_of(name).items() if re.search(options.only, str(layer))}
        rows, sums = [], {"octet": 0.0, "float": 0.0, "torch int8": 0.0}
        for layer, count in chosen.items():
            race, differ = run(layer)
            times = {contender: race.time(contender).median for contender in race.seconds}
            for contender, seconds in times.items():
                sums[contender] += count * seconds
            ratios = [f"{race.ratio(other, 'octet').median:.2f}" for other in ("float", "torch int8")]
            speed = macs(layer) / times["octet"] / 1e9
            rows.append(
                [str(layer), str(count), display.duration(times["octet"]), f"{speed:.0f}", *ratios, f"{differ:.2%}"]
            )
        ratios = [f"{sums[other] / sums['octet']:.2f}" for other in ("float", "torch int8")]
        total = sum(count * macs(layer) for layer, count in chosen.items()) / sums["octet"] / 1e9
        rows.append([f"all of {name}", "", display.duration(sums["octet"]), f"{total:.0f}", *ratios, ""])
        print(
            "\n"
            + display.table(
                ["in, out, size, kernel, stride, groups", "n", "octet", "GMAC/s", "float", "torch int8", "differ"], rows
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
