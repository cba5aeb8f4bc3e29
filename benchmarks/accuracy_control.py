"""NNCF's `quantize_with_accuracy_control`, which `bench_autoquant.py --peers` holds beside `quant.autoquant`.

It quantises an OpenVINO model, and gives operations back to float, the most harmful first, until the metric is within
the budget. It gets the same model, calibration data, metric and budget.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peers import Missing
from static_peers import Predict, by_sample, compiled_by_openvino, export, quiet
from torch import Tensor, nn

ROUNDS = 41


@dataclass(frozen=True)
class Controlled:
    """What it made.

    Attributes:
        predict: the model, one sample at a time inside.
        evaluations: calls of the metric.
        minutes: by the wall clock.
    """

    predict: Predict
    evaluations: int
    minutes: float


def controlled(
    model: nn.Module, batches: Sequence[Any], score: Callable[[Predict], Tensor], max_drop: float
) -> Controlled:
    """The model within a budget by NNCF.

    Args:
        batches: to calibrate with.
        score: a number for each sample, of which more is better.

    Raises:
        Missing: a library is not here, or the model takes no single tensor.
    """
    if not all(isinstance(one, Tensor) and one.is_floating_point() for one in batches):
        raise Missing("its inputs are no single float tensor")
    try:
        import nncf
        import openvino
    except ImportError as error:
        raise Missing(f"{error.name} is not installed") from error
    samples = torch.cat(list(batches)).split(1)
    evaluations = 0

    def validate(compiled: Any, _: Any) -> tuple[float, list[float]]:
        nonlocal evaluations
        evaluations += 1
        scores = score(by_sample(lambda x: compiled(x.numpy())[0]))
        return float(scores.mean()), scores.tolist()

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, quiet(), torch.inference_mode():
        exported = Path(folder, "float.onnx")
        export(model, samples[0], exported)
        made = nncf.quantize_with_accuracy_control(
            openvino.convert_model(exported),
            calibration_dataset=nncf.Dataset([one.numpy() for one in samples]),
            validation_dataset=nncf.Dataset([0]),
            validation_fn=validate,
            max_drop=max_drop,
            drop_type=nncf.DropType.ABSOLUTE,
            subset_size=len(samples),
        )
        compiled = compiled_by_openvino(made)
    minutes = (time.perf_counter() - began) / 60
    return Controlled(by_sample(lambda x: compiled(x.numpy())[0]), evaluations, minutes)


def times_ours(ours: nn.Module, theirs: Predict, example: Tensor) -> float:
    """Their time of a call over ours, called in turns: the median over rounds."""
    ratios = []
    with torch.inference_mode():
        for _ in range(ROUNDS):
            seconds = []
            for call in (ours, theirs):
                call(example)
                began = time.perf_counter()
                call(example)
                seconds.append(time.perf_counter() - began)
            ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)
