"""What rounding weights by their outputs keeps: nearest, GPTQ and AdaRound at 8, 4 and 3 bits, without any training.

    python benchmarks/bench_rounding.py [mobilenet_v3 efficientnet_b0 depthwise | lite0 | language | words] [--images N]
    [--samples N]

The first three are trained on Fashion-MNIST (`mobile_networks.py`, tutorials/models.py; weights are kept in the
cache) and scored on its test images: accuracy, and the points to float. `lite0` is EfficientNet-Lite0 as its package
has it: seconds of AdaRound by layer, and how far the logits of photos are from float. `language` is
a small Llama-like model of Shakespeare's characters (`language_network.py`), by its perplexity; `words` are g2p-en's
recurrent layers, by the words that it says right. CPU seconds are those
of one process, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import display
import language_network
import mobile_networks
import torch
from quant.kernels import quantize_weight, weight_scheme
from torch import Tensor, nn

import quant
from quant.rounding import gptq

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tutorials"))

from train_fashion import accuracy
from train_fashion import trained as tutorial_network
from zoo import efficientnet, fashion, g2p
from zoo.fetch import DataUnavailable

SAMPLES = 256
GROUP = 64

LINEAR = {bits: quant.Recipe({nn.Linear: quant.QConfig(weight_bits=bits)}, default=None) for bits in (8, 4, 3)}
"""Recipes of the language model: its embedding stays float."""

NORMS = "norms"
"""In the place of a unit: `calibrate.reestimate_batch_norm` of the model as prepared for training, without any."""

METHODS = {
    "nearest": ("nearest", ""),
    "nearest, norms anew": ("nearest", NORMS),
    "GPTQ": ("gptq", "layer"),
    "AdaRound, layers": ("adaround", "layer"),
    "AdaRound, blocks": ("adaround", "block"),
}

RECIPES = {
    "8 bits": quant.QConfig(),
    "4 bits": quant.QConfig(weight_bits=4),
    "4 bits, one scale": quant.QConfig(weight_bits=4, per_channel=False),
    "3 bits": quant.QConfig(weight_bits=3),
}

BEFORE = quant.QConfig(weight_bits=4, bias_correction=False)
"""Rounding to nearest without a corrected bias, as other toolkits do it."""


def rounded(
    model: nn.Module, batches: Sequence[Tensor], qconfig: quant.QConfig, method: str
) -> tuple[nn.Module, float, str]:
    """The int8 model, the CPU seconds of rounding, and what it says of its layers."""
    prepared = quant.prepare(model, batches[0], quant.Recipe(default=qconfig))
    quant.calibrate.run(prepared, batches, progress=False)
    began, text = time.process_time(), ""
    name, unit = METHODS[method]
    if unit == NORMS:
        prepared = quant.prepare_qat(prepared)
        quant.calibrate.reestimate_batch_norm(prepared, batches, progress=False)
    elif unit:
        text = str(quant.learn_rounding(prepared, batches, name, unit=unit))
    return quant.convert(prepared), time.process_time() - began, text


def fashion_rows(
    name: str, images: int, samples: int, recipes: Sequence[str], methods: Sequence[str]
) -> Iterator[list[str]]:
    """A row per recipe and method of one network."""
    in_tutorials = name not in mobile_networks.NETWORKS
    model = tutorial_network(name) if in_tutorials else mobile_networks.trained(name)
    data = fashion.load("train")[0][:samples].split(32)
    test, classes = (one[:images] for one in fashion.load("test"))
    before = accuracy(model, test, classes)

    def row(recipe: str, method: str, q: nn.Module, seconds: float) -> list[str]:
        right = accuracy(q, test, classes)
        return [name, recipe, method, f"{100 * before:.2f}", f"{100 * right:.2f}", f"{100 * (right - before):+.2f}",
                f"{seconds:.0f}"]  # fmt: skip

    if "4 bits" in recipes:
        yield row("4 bits", "nearest, bias as it was", *rounded(model, data, BEFORE, "nearest")[:2])
    for recipe in recipes:
        for method in methods if recipe != "8 bits" else ["nearest"]:
            yield row(recipe, method, *rounded(model, data, RECIPES[recipe], method)[:2])


def lite0(samples: int, methods: Sequence[str]) -> Iterator[list[str]]:
    """EfficientNet-Lite0 with 4-bit weights, by the SQNR of its logits on photos that calibration did not see."""
    model = efficientnet.load()
    data = efficientnet.calibration(-(-samples // 17))[:samples].split(8)
    photos, classes = efficientnet.labelled()
    with torch.no_grad():
        expected = model(photos)
    for method in methods:
        q, seconds, text = rounded(model, data, RECIPES["4 bits"], method)
        with torch.no_grad():
            given = q(photos)
        sqnr = 10 * torch.log10(expected.square().mean() / (given - expected).square().mean()).item()
        same = int((given.argmax(1) == expected.argmax(1)).sum())
        right = int((given.argmax(1) == classes).sum())
        print(text)
        yield [method, f"{sqnr:.1f} dB", f"{same} of {len(photos)}", str(right), f"{seconds:.0f}"]


def language(samples: int) -> Iterator[list[str]]:
    """The language model's perplexity on plays that it did not see; GPTQ's data are plays that it did."""
    model = language_network.trained()
    held_out = language_network.windows(language_network.text(held_out=True), 256, seed=1)
    data = language_network.windows(language_network.text(held_out=False), samples, seed=2)[:, :-1].split(32)
    before = language_network.perplexity(model, held_out)

    def row(weights: str, method: str, q: nn.Module, seconds: float) -> list[str]:
        own = language_network.perplexity(q, held_out)
        return [weights, method, f"{own:.4f}", f"{100 * (own / before - 1):+.2f} %", f"{seconds:.0f}"]

    yield row("float", "", model, 0.0)
    yield row("8 bits", "nearest", quant.quantize_dynamic(model, LINEAR[8]), 0.0)
    for bits in (4, 3):
        yield row(f"{bits} bits", "largest weight", quant.quantize_dynamic(model, LINEAR[bits]), 0.0)
        for method in ("nearest", "gptq", "adaround"):
            began = time.process_time()
            q = quant.quantize_dynamic(model, LINEAR[bits], batches=data, rounding=method)
            yield row(f"{bits} bits", method, q, time.process_time() - began)
        for method in ("nearest", "gptq"):
            began = time.process_time()
            grouped = in_groups(model, data, bits, method)
            yield row(f"{bits} bits g{GROUP}, float activations", method, grouped, time.process_time() - began)


def in_groups(model: nn.Module, batches: Sequence[Tensor], bits: int, method: str) -> nn.Module:
    """A float copy whose linear weights are rounded with a scale for each GROUP of inputs, a block at a time."""
    copied, scheme = copy.deepcopy(model), weight_scheme(bits)
    for block in (*copied.layers, copied.head):
        moments: dict[nn.Module, Tensor] = {}

        def add(layer: nn.Module, args: tuple[Tensor, ...], moments: dict[nn.Module, Tensor] = moments) -> None:
            rows = args[0].flatten(0, -2)
            moments[layer] = moments.get(layer, 0) + rows.t() @ rows

        layers = [layer for layer in block.modules() if isinstance(layer, nn.Linear)]
        hooks = [layer.register_forward_pre_hook(add) for layer in layers]
        with torch.no_grad():
            for batch in batches:
                copied(batch)
            for layer in layers:
                weight = layer.weight.reshape(-1, GROUP)
                if method == "nearest":
                    q, scale = quantize_weight(weight, bits=bits)
                    layer.weight.copy_((q * scale[:, None]).reshape(layer.weight.shape))
                else:
                    rounded = gptq(layer.weight, moments[layer], scheme, group_size=GROUP)
                    layer.weight.copy_(rounded.q * rounded.scale.repeat_interleave(GROUP, 1))
        for hook in hooks:
            hook.remove()
    return copied


def words(samples: int) -> Iterator[list[str]]:
    """Words that g2p-en says right with narrow weights in its two recurrent layers; data are words of neither list."""
    model = g2p.load()
    calibration, seen, _ = g2p.split(samples, 600, 1)
    dictionary = g2p.pronunciations()
    data = [g2p.encode_words(calibration[place : place + 32]) for place in range(0, len(calibration), 32)]

    def row(weights: str, method: str, q: nn.Module, seconds: float) -> list[str]:
        said = g2p.predict(q, seen)
        right = sum(one in dictionary[word] for one, word in zip(said, seen, strict=True))
        return [weights, method, f"{100 * right / len(seen):.1f} %", f"{seconds:.0f}"]

    yield row("float", "", model, 0.0)
    for bits in (4, 3):
        recipe = quant.Recipe(dict.fromkeys(("encoder", "decoder"), quant.QConfig(weight_bits=bits)), default=None)
        yield row(f"{bits} bits", "largest weight", quant.quantize_dynamic(model, recipe), 0.0)
        for method in ("nearest", "gptq", "adaround"):
            began = time.process_time()
            q = quant.quantize_dynamic(model, recipe, batches=data, rounding=method, progress=False)
            yield row(f"{bits} bits", method, q, time.process_time() - began)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = ["mobilenet_v3", "efficientnet_b0", "depthwise", "lite0", "language", "words"]
    parser.add_argument("networks", nargs="*", default=names, help=f"of {', '.join(names)} (default all)")
    parser.add_argument("--images", type=int, default=10_000, help="score at most so many test images (default all)")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"to calibrate and round by (default {SAMPLES})")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    try:
        for name in options.networks:
            if name == "lite0":
                header, rows = (
                    ["EfficientNet-Lite0", "SQNR", "same class", "right", "CPU s"],
                    lite0(options.samples, options.methods),
                )
            elif name == "words":
                header, rows = ["g2p-en", "rounding", "words right", "CPU s"], words(options.samples)
            elif name == "language":
                header = ["language model", "rounding", "perplexity", "to float", "CPU s"]
                rows = language(options.samples)
            else:
                header = ["network", "weights", "rounding", "float", "int8", "points", "CPU s"]
                rows = fashion_rows(name, options.images, options.samples, options.recipes, options.methods)
            shown = []
            for row in rows:
                shown.append(row)
                print("  ".join(row), file=sys.stderr, flush=True)  # a row may take minutes
            print(display.table(header, shown), flush=True)
    except DataUnavailable as error:
        sys.exit(f"bench_rounding: {error}")


if __name__ == "__main__":
    main()
