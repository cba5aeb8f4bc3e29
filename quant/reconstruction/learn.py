"""`learn_rounding`: the integers of a calibrated model's weights, by what they do to its outputs on data.

The model is walked through once, block by block, with all calls side by side (`walk.py`). Each layer is solved by the
second moments of what it reads behind the layers that are done (`layers.py`), and then, where asked for, the layers
of a block together (`blocks.py`).
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.calibrate import CalibrationWarning, DataError
from quant.calibrate.batches import Caller, check_batches, count_samples
from quant.calibrate.checkpoint import check_folder
from quant.calibrate.driver import Forward, evaluating
from quant.kernels.progress import progress_of
from quant.ops.operator import Weighted
from quant.ops.step import Step
from quant.qat.runner import TrainingRunner
from quant.reconstruction.blocks import STEPS as BLOCK_STEPS
from quant.reconstruction.blocks import learn_block
from quant.reconstruction.layers import LayerWeight, layer_weight, solved
from quant.reconstruction.units import Block, blocks_of, why_dynamic_left, why_left
from quant.reconstruction.walk import Walk, recorded_calls, writes_in_place
from quant.rounding.checkpoint import Checkpoint, identity
from quant.rounding.methods import METHODS
from quant.runtime.layers.weighted import QWeight
from quant.runtime.names import full_name
from quant.static.dynamic_fallback import dynamic_settings
from quant.static.prepared import is_prepared, record_of
from quant.static.runner import GraphRunner, runners, unwrapped
from quant.static.simulation import as_converted
from quant.static.weights import folded

UNITS = ("layer", "block")
SAMPLES = 256
"""Samples that are used by default."""


@dataclass(frozen=True)
class LayerError:
    """What rounding anew did for one layer.

    Attributes:
        name: the layer's full name.
        bits: of its weight.
        nearest: its error with rounding to nearest, behind the layers before it.
        learned: the same with the integers that it has now; never larger.
        block: the error of its block's outputs with the integers that were chosen layer by layer, and after they were
            learned together; None where they were not.
        seconds: that it took.
    """

    name: str
    bits: int
    nearest: float
    learned: float
    block: tuple[float, float] | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Reconstruction:
    """The result of `learn_rounding`.

    Attributes:
        layers: that were rounded anew, in the order of the model.
        left: why others stay as they are, by name.
        samples: that were used.
        resumed: layers that a checkpoint already had.
        seconds: that this call took.
    """

    layers: tuple[LayerError, ...]
    left: dict[str, str]
    samples: int
    resumed: int
    seconds: float

    def __str__(self) -> str:
        rows = [f"{'layer':40} bits  error of nearest  learned  seconds"]
        for one in self.layers:
            share = one.learned / one.nearest if one.nearest > 0 else 1.0
            rows.append(f"{one.name:40} {one.bits:4}  {one.nearest:16.4g}  {share:7.3f}  {one.seconds:7.2f}")
        rows += [f"{name or '(root)':40} as it was: {why}" for name, why in self.left.items()]
        return "\n".join(rows)


@torch.inference_mode(False)
@torch.no_grad()
def learn_rounding(
    prepared: nn.Module,
    batches: Iterable[Any],
    method: str = "adaround",
    *,
    unit: str = "block",
    samples: int = SAMPLES,
    steps: int | None = None,
    forward: Forward | None = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Reconstruction:
    """Choose the integers of a calibrated model's weights by the error of its outputs; `quant.convert` takes them.

    Linear layers and convolutions of every number of bits that the recipe gives them; with data as for calibration, of
    which some hundred samples are enough. Each layer is rounded for the inputs that it gets behind the layers before
    it, and its bias takes the mean error that is left (unless the recipe says bias_correction=False).

    Args:
        prepared: from `quant.prepare`, after `quant.calibrate.run`; changed in place.
        batches: as for `quant.calibrate.run`.
        method: "adaround" (Nagel et al. 2020), or "gptq" (Frantar et al. 2022), which takes a fraction of the time.
        unit: "block" then learns the layers of a block together for the block's output (BRECQ, Li et al. 2021), by
            AdaRound whatever chose them first, where none of its functions works in place; "layer" does not, and is
            quicker.
        samples: the most that are used. Their values at one place of the model are held in memory twice.
        steps: of learning, for each layer and each block; None for the defaults.
        forward: called with (model, batch) where the model is not simply called with its inputs.
        seed: of what is drawn: the order of batches, and lines of large images.
        checkpoint: a file that is written after each block and, if it is there, gone on from. The result is to the bit
            that of one run, with as many threads.
        progress: a bar on standard error, two lines where that is no terminal.

    Raises:
        ValueError: a setting that does not exist; `prepared` is no calibrated model; no layer can be rounded anew.
        DataError: there are no batches, or they never call the model.
        CalibrationError: the model failed on a batch, which the message describes.
        CheckpointError: the file is damaged, or belongs to something else.
    """
    began = time.perf_counter()
    _check(method, unit, samples, steps)
    check_folder(checkpoint, "quant.learn_rounding")
    check_batches(batches, "quant.learn_rounding")
    model = unwrapped(prepared)
    units = _runners(model)
    chosen, counted = _taken(batches, samples)
    settings = {"method": method, "unit": unit, "steps": steps, "seed": seed, "threads": torch.get_num_threads()}
    path = None if checkpoint is None else Path(checkpoint)
    kept = Checkpoint(path, {} if path is None else identity(model, chosen, settings))
    this = _Learning(method, unit, steps, seed, kept)
    info = record_of(model)
    this.left.update({name: why_dynamic_left(model.get_submodule(name)) for name in dynamic_settings(model, info)})
    with evaluating(model), torch.no_grad():
        calls = recorded_calls(model, units.values(), chosen, forward or _by_rule(model))
        if not any(calls.values()):
            raise DataError("quant.learn_rounding: the batches never call the model; nothing was learned")
        total = sum(len(_layers(one)) for one in units.values() if calls[id(one)])
        bar = progress_of(f"rounding ({method})", unit="layer", total=total, shown=progress)
        with bar:
            for name, runner in units.items():
                if not calls[id(runner)]:
                    this.left[name or "(root)"] = "the batches do not call it"
                    continue
                seen = [one for one in runner.programs() if one.has_seen()]
                with as_converted(seen, info.recipe), runner.settled():
                    this.module(name, runner, calls.pop(id(runner)), bar)
    if not this.layers:
        reasons = "; ".join(f"{name or '(root)'}: {why}" for name, why in list(this.left.items())[:8])
        reasons = reasons or "the recipe quantises none of its linear layers and convolutions"
        raise ValueError(f"quant.learn_rounding: no layer can be rounded anew; {reasons}")
    return Reconstruction(tuple(this.layers), this.left, counted, this.resumed, time.perf_counter() - began)


class _Learning:
    """One call of `learn_rounding`: its settings, and what is done."""

    def __init__(self, method: str, unit: str, steps: int | None, seed: int, kept: Checkpoint) -> None:
        self.method, self.unit, self.steps, self.seed, self.kept = method, unit, steps, seed, kept
        self.layers: list[LayerError] = []
        self.left: dict[str, str] = {}
        self.resumed = 0

    def module(self, path: str, runner: GraphRunner, calls: list[dict[int, Any]], bar: Any) -> None:
        """Round the layers of one captured module anew."""
        fused = runner.fused
        for step in fused.steps:
            if step.integer and step.operator.anchor and (why := why_left(step, fused)):
                self.left[full_name(path, step.name)] = why
        if runner.graph.writes:
            self.left[path or "(root)"] = "its forward writes to its own state, so its steps cannot be repeated"
            return
        walk = Walk(runner, calls)
        for index, block in enumerate(blocks_of(fused, {step.output for step in _layers(runner)})):
            self._block(path, block, walk, index, bar)

    def _block(self, path: str, block: Block, walk: Walk, index: int, bar: Any) -> None:
        names = {step.output: full_name(path, step.name) for step in block.layers}
        if block.layers and all(name in self.kept.done for name in names.values()):
            for step in block.layers:
                weight, numbers = self.kept.done[names[step.output]]
                self._check_kept(walk.runner, step, names[step.output])
                self._take(walk.runner, step, weight)
                self._note(names[step.output], step, numbers, 0.0)
            self.resumed += len(block.layers)
            walk.advance(block.steps)
            bar.update(len(block.layers))
            return
        # A layer that is a block by itself is solved by all data already.
        together = self.unit == "block" and len(block.layers) > 1 and bool(block.outputs)
        together = together and not any(writes_in_place(step, walk.runner) for step in block.steps)
        begun = [call.copy() for call in walk.calls] if together else []
        solutions: dict[int, tuple[LayerWeight, torch.Tensor]] = {}
        errors: dict[int, list[float]] = {}
        took: dict[int, float] = {}
        for place, step in enumerate(block.steps):
            if step.output in names:
                start = time.perf_counter()
                layer = layer_weight(step, walk, self._seed(index, place))
                layer, choice = solved(layer, self.method, self.steps)
                solutions[step.output], errors[step.output] = (layer, choice.q), [choice.nearest, choice.error]
                self._take(walk.runner, step, layer.layer(choice.q))
                took[step.output] = time.perf_counter() - start
                bar.update()
                bar.set_postfix_str(step.name, refresh=False)
            walk.advance([step])
        if together:
            self._together(block, walk, begun, solutions, errors, took, index)
        for step in block.layers:
            self.kept.done[names[step.output]] = walk.runner.learned_weights[step.name], errors[step.output]
            self._note(names[step.output], step, errors[step.output], took[step.output])
        if block.layers:
            self.kept.write()

    def _together(
        self,
        block: Block,
        walk: Walk,
        begun: list[Any],
        solutions: dict[int, tuple[LayerWeight, torch.Tensor]],
        errors: dict[int, list[float]],
        took: dict[int, float],
        index: int,
    ) -> None:
        start = time.perf_counter()
        generator = torch.Generator().manual_seed(self._seed(index, len(block.steps)))
        steps = self.steps or BLOCK_STEPS
        _, after, before = learn_block(block, walk, begun, solutions, steps=steps, generator=generator)
        for step in block.layers:
            self._take(walk.runner, step, walk.runner.learned_weights[step.name])
            errors[step.output] += [before, after]
            took[step.output] += (time.perf_counter() - start) / len(block.layers)
        if after < before:  # what goes on is what the block gives now
            for call, end in zip(begun, walk.calls, strict=True):
                for step in block.steps:
                    walk.run_rounded(step, call)
                end.rounded, end.both = call.rounded, call.both

    def _seed(self, block: int, place: int) -> int:
        return self.seed * 1_000_003 + block * 1_009 + place

    def _check_kept(self, runner: GraphRunner, step: Step, name: str) -> None:
        """Raise CheckpointError where a layer's weight in the file is not one of this layer."""
        weight, bias = folded(step, runner.graph, runner.root)
        per_output = torch.empty(step.weighted.output_first(weight).shape[0])
        self.kept.check_fits(
            name,
            q_weight=torch.empty_like(weight, dtype=torch.int8),
            scale=per_output,
            bias=None if bias is None else per_output,
        )

    def _take(self, runner: GraphRunner, step: Step, weight: QWeight) -> None:
        """Give a layer its weight, in every program of the module that calls it."""
        runner.learned_weights[step.name] = weight
        layer = runner.fused.layer_of(step)
        for other in runner.programs():
            for one in other.fused.steps if other is not runner else ():
                if isinstance(one.operator, Weighted) and other.fused.layer_of(one) == layer:
                    other.learned_weights[one.name] = weight

    def _note(self, name: str, step: Step, numbers: list[float], seconds: float) -> None:
        assert step.qconfig is not None
        nearest, learned, *block = numbers
        together = (block[0], block[1]) if block else None
        self.layers.append(LayerError(name, step.qconfig.weight_bits, nearest, learned, together, seconds))


def _layers(runner: GraphRunner) -> list[Step]:
    """The steps of a program that are rounded anew."""
    return [
        step for step in runner.fused.steps if isinstance(step.operator, Weighted) and not why_left(step, runner.fused)
    ]


def _runners(model: nn.Module) -> dict[str, GraphRunner]:
    found = runners(model)
    if not found or not is_prepared(model):
        raise ValueError(
            f"quant.learn_rounding: {type(model).__name__} is not from quant.prepare; prepare and calibrate it first"
        )
    if any(isinstance(one, TrainingRunner) for one in found.values()):
        raise ValueError(
            "quant.learn_rounding: the model is prepared for training, whose weights are rounded as they are trained; "
            "start from quant.prepare"
        )
    seen = {name: one for name, one in found.items() if one.has_seen()}
    if not seen:
        raise ValueError(
            "quant.learn_rounding: the observers saw no data; run quant.calibrate.run(prepared, batches) first"
        )
    return seen


def _taken(batches: Iterable[Any], samples: int) -> tuple[list[Any], int]:
    """Batches until there are so many samples."""
    chosen: list[Any] = []
    counted = 0
    iterator: Iterator[Any] = iter(batches)
    for batch in iterator:
        count = count_samples(batch)
        if count == 0:
            continue
        chosen.append(batch)
        counted += count
        if counted >= samples:
            break
    if not chosen:
        raise DataError("quant.learn_rounding: there are no batches; give some hundred samples of real inputs")
    if counted < 32:
        warnings.warn(
            f"quant.learn_rounding: {counted} samples are few; weights may be rounded for these alone, give some "
            "hundred",
            CalibrationWarning,
            stacklevel=4,
        )
    return chosen, counted


def _by_rule(model: nn.Module) -> Forward:
    caller = Caller(model)

    def forward(prepared: nn.Module, batch: Any) -> Any:
        args, kwargs = caller.arguments(batch)
        return prepared(*args, **kwargs)

    return forward


def _check(method: str, unit: str, samples: int, steps: int | None) -> None:
    for name, value, legal in (("method", method, METHODS), ("unit", unit, UNITS)):
        if value not in legal:
            raise ValueError(f"quant.learn_rounding: {name} is {value!r}, expected one of {', '.join(legal)}")
    for name, number in (("samples", samples), ("steps", 1 if steps is None else steps)):
        if type(number) is not int or number < 1:
            raise ValueError(f"quant.learn_rounding: {name} is {number!r}, expected a whole number of at least 1")
