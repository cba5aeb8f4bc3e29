"""The cases of `make bench`: what is computed, by whom, and what is to be reached.

A case builds its float model, the batches that everyone calibrates on, and other inputs on which everyone's error is
measured. Random weights, but for EfficientNet-Lite0: time does not depend on them, errors of different libraries on
the same network compare.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import graph_peers
import networks
import peers
import small_programs
import table_peers
import torch
from peers import SEVEN, SEVEN_BITS, Maker, Missing, Peer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tutorials"))

STEPS, LAYERS = 35, 2
BERT_LAYERS, TOKENS = 4, 128
ROWS, WIDTH, BAGS, PER_BAG = 200_000, 64, 256, 32

FLOAT = ("float", "compiled", "ort float", "openvino float")
"""Contenders without integers: their error is nobody's bar."""

COMPILING = ("compiled", "pt2e")
"""Contenders that need a C++ compiler and up to minutes before their first call."""

SATURATES = "ort full"
"""ONNX Runtime without reduce_range: not judged where products saturate."""


@dataclass(frozen=True)
class Task:
    """What one case computes.

    Attributes:
        model: float, in eval mode.
        batches: to calibrate on.
        probes: inputs on which errors are measured; the first is the one that is timed.
    """

    model: nn.Module
    batches: list[Tensor]
    probes: list[Tensor]


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        section: heading.
        name: as tables show it.
        shape: recorded with the result.
        build: the task; raises Missing where its data cannot be had.
        makers: everyone who takes part.
        goal: the fastest peer's time over ours that is to be reached, with an error at most that peer's.
        limit: most seconds of ours.
        quick: whether --quick measures it.
    """

    section: str
    name: str
    shape: dict[str, Any]
    build: Callable[[], Task]
    makers: Callable[[Task], dict[str, Maker]]
    goal: float | None = None
    limit: float | None = None
    quick: bool = False


def inference(maker: Maker) -> Maker:
    """Called in inference mode, as eager models are in production."""

    @functools.wraps(maker)
    def make(model: nn.Module, x: Tensor) -> Peer:
        return dataclasses.replace(maker(model, x), scope=torch.inference_mode)

    return make


def absent(reason: str) -> Maker:
    """Stands for a peer that has nothing for a case."""

    def make(model: nn.Module, x: Tensor) -> Peer:
        raise Missing(reason)

    return make


def _float_graphs() -> dict[str, Maker]:
    return {
        "ort float": graph_peers.onnxruntime([], "ort float", None),
        "openvino float": graph_peers.openvino([], "openvino float", quantized=False),
    }


def _dynamic(task: Task) -> dict[str, Maker]:
    """Of layers whose input ranges are taken at run time."""
    return {
        "float": inference(peers.torch_float),
        "compiled": graph_peers.compiled,
        "octet": inference(peers.octet()),
        SEVEN: inference(peers.octet(recipe=SEVEN_BITS, name=SEVEN)),
        **{f"ao {engine}": peers.torch_ao(engine) for engine in peers.AO_ENGINES},
        "ort": functools.partial(peers.onnxruntime, name="ort", reduce_range=True),
        SATURATES: functools.partial(peers.onnxruntime, name=SATURATES, reduce_range=False),
        **_float_graphs(),
        "openvino int8": graph_peers.openvino(task.batches, "openvino int8", quantized=True),
    }


def recurrent_makers(task: Task) -> dict[str, Maker]:
    """LSTM and GRU."""
    return {**_dynamic(task), "pt2e": absent("torchao's x86 quantiser has no recurrent layers")}


def linear_makers(task: Task) -> dict[str, Maker]:
    """Linear layers, and stacks of them: ours dynamic, and static where that is more than a layer."""
    return {**_dynamic(task), "pt2e": graph_peers.pt2e(task.batches)}


def bert_makers(task: Task) -> dict[str, Maker]:
    """Transformers: ours and ONNX Runtime's dynamic and static."""
    return {
        **linear_makers(task),
        "octet static": graph_peers.octet_static(task.batches, "octet static"),
        "ort static": graph_peers.onnxruntime(task.batches, "ort static", True),
    }


def conv_makers(task: Task) -> dict[str, Maker]:
    """Convolutional networks, all static."""
    return {
        "float": inference(peers.torch_float),
        "compiled": graph_peers.compiled,
        "octet": graph_peers.octet_static(task.batches),
        SEVEN: graph_peers.octet_static(task.batches, SEVEN, SEVEN_BITS),
        "ao fx": graph_peers.ao_fx(task.batches),
        "pt2e": graph_peers.pt2e(task.batches),
        "ort": graph_peers.onnxruntime(task.batches, "ort", True),
        SATURATES: graph_peers.onnxruntime(task.batches, SATURATES, False),
        **_float_graphs(),
        "openvino int8": graph_peers.openvino(task.batches, "openvino int8", quantized=True),
    }


def call_makers(task: Task) -> dict[str, Maker]:
    """Small static programs: float beside ours shows what a call costs."""
    return {"float": inference(peers.torch_float), "octet": graph_peers.octet_static(task.batches)}


def table_makers(bits: int) -> Callable[[Task], dict[str, Maker]]:
    """Embedding tables of 8 or 4 bits."""
    return lambda task: {
        "float": inference(peers.torch_float),
        "compiled": graph_peers.compiled,
        "octet": inference(table_peers.octet(bits)),
        "ao": inference(table_peers.torch_ao(bits)),
        "fbgemm-gpu": inference(table_peers.fbgemm_gpu(bits)),
    }


def _noise(make: Callable[[], nn.Module], shape: tuple[int, ...], batches: int = 8) -> Callable[[], Task]:
    """A model with random weights, on normal noise."""

    def build() -> Task:
        torch.manual_seed(0)
        data = [torch.randn(shape) for _ in range(batches + 4)]
        model = networks.settle_norms(make(), data[:batches])
        return Task(model, data[:batches], data[batches:])

    return build


def recurrent() -> Iterator[Case]:
    """Sequences of 35 steps through two layers."""
    goals = {("LSTM", 512, 1): 1.15, ("LSTM", 1024, 1): 1.15}
    for kind in (nn.LSTM, nn.GRU):
        for hidden in (512, 1024):
            for batch in (1, 16):
                name = kind.__name__
                yield Case(
                    "recurrent",
                    f"{name} H{hidden} B{batch}",
                    {"kind": name, "steps": STEPS, "layers": LAYERS, "hidden": hidden, "batch": batch},
                    _noise(functools.partial(kind, hidden, hidden, LAYERS), (STEPS, batch, hidden), batches=4),
                    recurrent_makers,
                    goal=goals.get((name, hidden, batch), 1.05),
                    quick=(hidden, batch) == (512, 1) or (name, hidden) == ("LSTM", 512),
                )


def linear() -> Iterator[Case]:
    """Single layers, from Python."""
    for rows, inputs, outputs in (
        *((1, 64, 64), (1, 512, 512), (1, 1024, 1024), (16, 1024, 1024)),
        *((128, 768, 768), (128, 768, 3072), (128, 3072, 768)),
    ):
        small = (rows, inputs, outputs) == (1, 64, 64)
        yield Case(
            "linear",
            f"Linear {rows}x{inputs}x{outputs}",
            {"kind": "Linear", "rows": rows, "in_features": inputs, "out_features": outputs},
            _noise(functools.partial(nn.Linear, inputs, outputs), (rows, inputs)),
            linear_makers,
            limit=3e-6 if small else None,
            quick=small,
        )


def _efficientnet() -> Task:
    from zoo import efficientnet
    from zoo.fetch import DataUnavailable

    try:
        model, (images, _), data = efficientnet.load(), efficientnet.labelled(), efficientnet.calibration()
    except DataUnavailable as error:
        raise Missing(str(error)) from error
    return Task(model, list(data.split(1)), list(images.split(1)))


def convolutional() -> Iterator[Case]:
    """Images of 224 x 224, one at a time."""
    image = (1, 3, 224, 224)
    for name, make, goal in (
        ("ResNet-18", networks.ResNet18, 1.05),
        ("ResNet-50", networks.ResNet50, 1.05),
        ("MobileNetV2", networks.MobileNetV2, 1.25),
    ):
        shape = {"kind": name, "batch": 1, "size": 224}
        build = _noise(make, image)
        yield Case("convolutional", name, shape, build, conv_makers, goal=goal, quick=name == "MobileNetV2")
    name = "EfficientNet-Lite0"
    shape = {"kind": name, "batch": 1, "size": 224, "weights": "trained"}
    yield Case("convolutional", name, shape, _efficientnet, conv_makers, goal=1.2, quick=True)


def transformer() -> Iterator[Case]:
    """Layers of BERT-base."""
    yield Case(
        "transformer",
        f"BERT-base, {BERT_LAYERS} layers",
        {"kind": "BERT-base", "layers": BERT_LAYERS, "tokens": TOKENS},
        _noise(lambda: nn.Sequential(*(networks.BertLayer() for _ in range(BERT_LAYERS))), (1, TOKENS, 768)),
        bert_makers,
        goal=1.05,
        quick=True,
    )


def tables() -> Iterator[Case]:
    """Sums of rows of a table far larger than the cache."""
    for bits in (8, 4):
        yield Case(
            "tables",
            f"EmbeddingBag {bits} bits",
            {"kind": "EmbeddingBag", "rows": ROWS, "width": WIDTH, "bags": BAGS, "per_bag": PER_BAG, "bits": bits},
            _bags,
            table_makers(bits),
            quick=True,
        )


def _bags() -> Task:
    torch.manual_seed(0)
    model = nn.EmbeddingBag(ROWS, WIDTH, mode="sum").eval()
    return Task(model, [], [torch.randint(ROWS, (BAGS, PER_BAG)) for _ in range(2)])


def calls() -> Iterator[Case]:
    """One call of a small static program: nearly all of it is what every call costs, whatever it computes."""
    row = (1, small_programs.WIDTH)
    for name, make, shape in (
        ("one Linear", small_programs.linear, row),
        ("two Linears", small_programs.two_linears, row),
        ("two outputs", small_programs.Heads, row),
        ("small CNN", small_programs.convolutions, (1, 3, 32, 32)),
        ("LSTM of 8 steps", small_programs.Sequence, (1, 8, small_programs.WIDTH)),
        ("step by step", small_programs.FloatSteps, row),
    ):
        kind = {"kind": f"call of {name}", "input": shape}
        yield Case("calls", f"call: {name}", kind, _noise(make, shape), call_makers, quick=True)


SECTIONS: Mapping[str, Callable[[], Iterator[Case]]] = {
    "recurrent": recurrent,
    "linear": linear,
    "convolutional": convolutional,
    "transformer": transformer,
    "tables": tables,
    "calls": calls,
}
"""In the order of the output."""
