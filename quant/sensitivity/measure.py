"""`sensitivity`: the forms of a model with one layer in int8, or all but one, and what each costs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quant.calibrate.batches import Arguments
from quant.calibrate.driver import Forward
from quant.dynamic import quantize_dynamic
from quant.kernels.progress import progress_of
from quant.metric import Evaluate, Metric, Score
from quant.prepare import check_model
from quant.recipe import QConfig, Recipe
from quant.report import summary
from quant.runtime.arguments import copied
from quant.runtime.matching import CaptureMismatch
from quant.sensitivity.output_error import OutputError
from quant.sensitivity.replay import Replay, Unlike, outputs_of
from quant.sensitivity.result import LayerSensitivity, Sensitivity
from quant.sensitivity.sweep import Form, OtherSteps, Sweep, sole_runner
from quant.static.dynamic_fallback import dynamic_part
from quant.submodule_calls import evaluating
from quant.variants import Calibrated

VERB = "quant.sensitivity"

Forms = dict[str, tuple[tuple[str, ...], bool]]
"""Name -> (layers, whether these alone are int8; else they alone are float)."""

Result = tuple[OutputError, float | None]
"""The error of a form's outputs, and its metric."""

ALL = "all"
"""The name of the form with all layers in int8."""


@torch.inference_mode(False)
def sensitivity(
    model: nn.Module,
    data: Iterable[Any],
    evaluate: Evaluate | None = None,
    *,
    recipe: Recipe | None = None,
    forward: Forward | None = None,
    example_inputs: Any = None,
    limit: int | None = None,
    progress: bool = True,
) -> Sensitivity:
    """What each layer costs the model's output where it alone is int8, and where it alone is float.

    Args:
        model: any float module, unedited; left as it is.
        data: batches to calibrate with, as for `quantize_static`; the outputs of the first four are compared, of small
            batches of as many as have 16 samples.
        evaluate: called with a model in eval mode; returns a number, or a score for each sample, of which more is
            better. Without it the output's SQNR and divergence are measured alone.
        recipe: how layers are quantised; None quantises everything that has an int8 kernel.
        forward: called with (model, batch) where the model is not simply called with its inputs; the outputs of the
            calls that it makes with the float model are compared.
        example_inputs: what the model is captured with, as in `prepare`.
        limit: batches to take at most.
        progress: a bar on standard error, two lines where that is no terminal.

    Raises:
        DataError: there are no batches, or the model does not take them.
        MetricError: `evaluate` gives no number, or less for better models.
        NothingQuantized, RecipeError: as `prepare`.

    Warns:
        MetricWarning: `evaluate` gives another number in a second call with the float model.
    """
    began = time.perf_counter()
    check_model(model, VERB)
    metric = None if evaluate is None else Metric(evaluate, VERB)
    score = None if metric is None else metric.of_float(model)
    calibrated = Calibrated(
        model, data, VERB, recipe, forward=forward, example_inputs=example_inputs, limit=limit, progress=progress
    )
    return measured(calibrated, metric, score, progress=progress, began=began)


def measured(
    calibrated: Calibrated, metric: Metric | None, score: Score | None, *, progress: bool, began: float
) -> Sensitivity:
    """The sensitivity of a model that is calibrated already.

    Args:
        score: of the float model, by `metric`.
    """
    converting = time.perf_counter()
    converted = calibrated.converted(calibrated.recipe)
    converting = time.perf_counter() - converting
    floats = left_float(converted, calibrated.layers)
    groups = groups_of([name for name in calibrated.layers if name not in floats])
    members = {**{name: (name,) for name in calibrated.layers if name not in floats}, **groups}
    forms: Forms = {ALL: ((), False)}
    for name, layers in members.items():
        forms[f"int8 {name}"], forms[f"float {name}"] = (layers, True), (layers, False)
    bar = progress_of("sensitivity", unit="form", total=len(forms), shown=progress)
    with bar, evaluating(calibrated.probe, calibrated.prepared, converted):
        began_floats = time.perf_counter()
        expected = [_called(calibrated.probe, call) for call in calibrated.calls]
        floats_seconds = time.perf_counter() - began_floats
        whole = _error(expected, (_called(converted, call) for call in calibrated.calls))
        began_metric = time.perf_counter()
        int8 = None if metric is None else metric(converted).value
        seconds = Seconds(converting + time.perf_counter() - began_metric, floats_seconds)
        known = {ALL: (whole, int8)}
        measure = _Forms(calibrated, sweep_of(calibrated, floats), metric, forms, expected, seconds, known=known)
        results = {}
        for name in forms:
            results[name] = measure.of(name)
            bar.update()
    lines = {name: _line(name, layers, calibrated, results, score) for name, layers in members.items()}
    by_harm = sorted(lines, key=lambda name: lines[name].only_int8_sqnr)
    return Sensitivity(
        layers=tuple(lines[name] for name in by_harm if name not in groups),
        groups=tuple(lines[name] for name in by_harm if name in groups),
        sqnr=whole.sqnr,
        kl=whole.kl,
        float_metric=None if score is None else score.value,
        int8_metric=int8,
        noise=0.0 if metric is None else metric.noise,
        floats=floats,
        evaluations=0 if metric is None else metric.calls,
        seconds=time.perf_counter() - began,
    )


def harms(calibrated: Calibrated, settings: Mapping[str, QConfig] | None = None) -> dict[str, float]:
    """By layer, the power of the error that it makes at the output where it alone is int8, over the output's power.

    Args:
        settings: of the layers to measure, as dynamic ones; None measures all as they were calibrated.
    """
    floats = {} if settings else left_float(calibrated.converted(calibrated.recipe), calibrated.layers)
    forms: Forms = {name: ((name,), True) for name in settings or calibrated.layers if name not in floats}
    with evaluating(calibrated.probe, calibrated.prepared):
        expected = [_called(calibrated.probe, call) for call in calibrated.calls]
        sweep = sweep_of(calibrated, floats, settings)
        measure = _Forms(calibrated, sweep, None, forms, expected, settings=settings)
        return {name: measure.of(name)[0].share for name in forms}


GROUP = "group"


@dataclass(frozen=True)
class Seconds:
    """What forms with all layers but few in int8 cost, by the wall clock.

    Attributes:
        converting: to convert one, and to run the metric on it.
        floats: the float model's calls whose outputs are compared.
    """

    converting: float
    floats: float


def groups_of(layers: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The modules with several of these layers in them, but not all: the innermost around each layer."""
    groups: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        outer = layer
        while outer:
            outer = outer.rpartition(".")[0]
            inside = tuple(name for name in layers if name.startswith(f"{outer}.") and outer)
            if 1 < len(inside) < len(layers):
                groups.setdefault(outer, inside)
                break
    return {name: inside for name, inside in groups.items() if name not in layers}


def left_float(converted: nn.Module, layers: Iterable[str]) -> dict[str, str]:
    """The layers that a conversion left float although its recipe quantises them, and why."""
    entries = {entry.name: entry for entry in summary(converted)}
    return {name: entries[name].detail for name in layers if name in entries and not entries[name].quantized}


def sweep_of(
    calibrated: Calibrated, floats: Mapping[str, str], settings: Mapping[str, QConfig] | None = None
) -> Sweep | None:
    """The sweep over a calibrated model's layers; None where it is no single graph, or writes what is read again.

    Args:
        floats: layers that convert leaves float, and why.
        settings: of layers that are dynamic in the forms to measure.
    """
    runner = sole_runner(calibrated.prepared)
    if runner is None:
        return None
    try:
        sweep = Sweep(runner, calibrated.recipe, _stand_ins(calibrated, settings or {}), floats)
        args, kwargs = copied(calibrated.calls[0])
        with torch.no_grad():
            return sweep if sweep.note_writes(sweep.begin(args, kwargs)) else None
    except (CaptureMismatch, OtherSteps):
        return None


def _stand_ins(calibrated: Calibrated, settings: Mapping[str, QConfig]) -> dict[str, nn.Module]:
    """The dynamic int8 forms of the layers without ranges, where they have one, and of those with such settings."""
    forms: dict[str, nn.Module] = {}
    for layer in calibrated.layers.values():
        if layer.static and layer.name not in settings:
            continue
        try:
            own = nn.Sequential(calibrated.model.get_submodule(layer.name))
            rules = Recipe(
                {"0": dynamic_part(settings.get(layer.name, layer.qconfig))},
                default=None,
                backend=calibrated.recipe.backend,
            )
            forms[layer.name] = quantize_dynamic(own, rules).get_submodule("0")
        except ValueError:  # it stays float
            continue
    return forms


class _Forms:
    """Measures forms: by the sweep where the model is one graph, else by building and running each."""

    def __init__(
        self,
        calibrated: Calibrated,
        sweep: Sweep | None,
        metric: Metric | None,
        forms: Forms,
        expected: list[Any],
        seconds: Seconds | None = None,
        settings: Mapping[str, QConfig] | None = None,
        known: Mapping[str, Result] | None = None,
    ) -> None:
        self.known = known or {}
        self.calibrated, self.metric, self.forms, self.expected = calibrated, metric, forms, expected
        self.settings = settings or {}
        self._simulating = 0.0  # seconds of the sweep for forms in integers
        swept = {} if sweep is None else self._forms(sweep)
        self._compared = {} if sweep is None else self._swept(sweep, swept)
        simulates = seconds is not None and self._simulates(seconds)
        self._replayed = {name: one for name, one in swept.items() if one[1] or simulates}
        self._evaluated = None if metric is None or not self._compared else self._recorded(sweep, self._replayed)

    def of(self, name: str) -> Result:
        """The error of the output, and the metric.

        A form that is known as it was built is measured as its neighbours are: those of the sweep by the sweep.
        """
        built: nn.Module | None = None
        error = self._compared.get(name)
        if name in self.known and (error is None or self.metric is None or not self._replays(name)):
            return self.known[name] if error is None else (error, self.known[name][1])
        if error is None:
            built = self._built(name)
            error = _error(self.expected, (_called(built, call) for call in self.calibrated.calls))
        if self.metric is None:
            return error, None
        try:
            if self._replays(name):
                replay = self._evaluated
                assert replay is not None
                return error, Metric(lambda model: replay.evaluated(name, self._evaluate), VERB)(replay.model).value
        except Unlike:
            self._evaluated = None
        return error, self.metric(built or self._built(name)).value

    def _replays(self, name: str) -> bool:
        return self._evaluated is not None and name in self._replayed

    def _evaluate(self, model: nn.Module) -> Any:
        assert self.metric is not None
        self.metric.calls += 1
        return self.metric.evaluate(model)

    def _simulates(self, seconds: Seconds) -> bool:
        """Whether forms in integers cost the metric less by the sweep than built and run.

        The outputs that were compared tell how long the sweep takes for one, in times of the float model.
        """
        if self.metric is None or not self._simulating or not seconds.floats:
            return False
        each = self._simulating / sum(not alone for _, alone in self.forms.values())
        return each / seconds.floats * self.metric.float_seconds < seconds.converting

    def _forms(self, sweep: Sweep) -> dict[str, tuple[Form, bool]]:
        """The forms that the sweep can compute."""
        known: dict[str, tuple[Form, bool]] = {}
        for name, (_, alone) in self.forms.items():
            with contextlib.suppress(OtherSteps):
                known[name] = sweep.form(self._recipe(name)), alone
        return known

    def _swept(self, sweep: Sweep, forms: Mapping[str, tuple[Form, bool]]) -> dict[str, OutputError]:
        errors = {name: OutputError() for name in forms}
        with torch.no_grad():
            for call, expected in zip(self.calibrated.calls, self.expected, strict=True):
                args, kwargs = copied(call)
                try:
                    outputs = outputs_of(sweep, forms, sweep.begin(args, kwargs))[1]
                except CaptureMismatch:
                    return {}
                began = time.perf_counter()
                for name, output in outputs:
                    if not forms[name][1]:
                        self._simulating += time.perf_counter() - began
                    errors[name].add(expected, sweep.finished(output, args, kwargs))
                    began = time.perf_counter()
        return errors

    def _recorded(self, sweep: Sweep | None, forms: Mapping[str, tuple[Form, bool]]) -> Replay | None:
        assert sweep is not None
        replay = Replay(self.calibrated.prepared, sweep, forms)
        try:
            with torch.no_grad():
                replay.record(self._evaluate)
        except Unlike:
            return None
        return replay

    def _recipe(self, name: str) -> Recipe:
        layers, alone = self.forms[name]
        if alone:
            return self.calibrated.recipe_of_only(layers, self.settings)
        return self.calibrated.recipe_with(dict.fromkeys(layers))

    def _built(self, name: str) -> nn.Module:
        return self.calibrated.converted(self._recipe(name))


def _called(model: nn.Module, call: Arguments) -> Any:
    args, kwargs = copied(call)
    with torch.no_grad():
        return copied(model(*args, **kwargs))


def _error(expected: list[Any], outputs: Iterator[Any]) -> OutputError:
    error = OutputError()
    for one, other in zip(expected, outputs, strict=True):
        error.add(one, other)
    return error


def _line(
    name: str,
    layers: tuple[str, ...],
    calibrated: Calibrated,
    results: Mapping[str, Result],
    score: Score | None,
) -> LayerSensitivity:
    alone, loss = results[f"int8 {name}"]
    without, gain = results[f"float {name}"]
    whole, int8 = results[ALL]
    more, error = without.gain_over(whole)
    return LayerSensitivity(
        name=name,
        kind=calibrated.layers[name].kind if name in calibrated.layers else GROUP,
        layers=layers,
        only_int8_sqnr=alone.sqnr,
        only_int8_kl=alone.kl,
        only_int8_loss=None if score is None or loss is None else score.value - loss,
        only_float_sqnr=without.sqnr,
        only_float_kl=without.kl,
        only_float_more=more,
        only_float_error=error,
        only_float_gain=None if int8 is None or gain is None else gain - int8,
    )
