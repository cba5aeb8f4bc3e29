"""What `quant.sensitivity` found: a line per layer and group, as a table, a drawing and JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from quant.calibrate.whole_files import replace_file
from quant.page.scales import drawn_bars
from quant.page.text_table import aligned


@dataclass(frozen=True)
class LayerSensitivity:
    """What int8 costs in one layer, or in a group of layers.

    Attributes:
        name: of the layer; of a group the module around its layers.
        kind: the class of the layer's module, or "group".
        layers: the names of the group's layers; of a layer its own.
        only_int8_sqnr, only_int8_kl: of the model's output against float where this alone is int8: in dB, and the mean
            Kullback-Leibler divergence in nats (nan where no output has several classes).
        only_int8_loss: what the metric loses then; None without a metric.
        only_float_sqnr, only_float_kl: the same where this alone is float and all other layers are int8.
        only_float_more: dB that this gains over all layers in int8, on the same outputs; nan where there is no noise.
        only_float_error: its standard error. Behind a changed layer every rounding falls out anew, so a layer of little
            weight gains or loses about as much by chance.
        only_float_gain: what the metric gains by it over the model with all layers in int8; None without a metric.
    """

    name: str
    kind: str
    layers: tuple[str, ...]
    only_int8_sqnr: float
    only_int8_kl: float
    only_int8_loss: float | None
    only_float_sqnr: float
    only_float_kl: float
    only_float_more: float
    only_float_error: float
    only_float_gain: float | None


@dataclass(frozen=True)
class Sensitivity:
    """Every layer and group, what harms the output most first. Printable, iterable, and JSON.

    Attributes:
        layers: sorted by `only_int8_sqnr`.
        groups: of several layers, sorted alike.
        sqnr, kl: of the output with all layers in int8.
        float_metric, int8_metric: the metric of the float model, and with all layers in int8; None without a metric.
        noise: the difference of two calls of the metric with the float model.
        floats: layers that convert leaves float whatever the recipe says, and why.
        evaluations: how often the metric was called.
        seconds: that all took.
    """

    layers: tuple[LayerSensitivity, ...]
    groups: tuple[LayerSensitivity, ...]
    sqnr: float
    kl: float
    float_metric: float | None
    int8_metric: float | None
    noise: float
    floats: dict[str, str]
    evaluations: int
    seconds: float

    def __iter__(self) -> Iterator[LayerSensitivity]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> LayerSensitivity:
        for one in (*self.layers, *self.groups):
            if one.name == name:
                return one
        raise KeyError(f"no layer or group {name!r}; there are {[one.name for one in (*self.layers, *self.groups)]}")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; numbers that are not finite (no error at all) are None."""
        data = asdict(self)
        for key in ("layers", "groups"):
            data[key] = [{name: finite(value) for name, value in one.items()} for one in data[key]]
        return {key: finite(value) for key, value in data.items()}

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The same as text, which is also written to `path`, if any."""
        text = json.dumps(self.to_dict(), indent=2)
        if path is not None:
            replace_file(path, text + "\n", "quant.sensitivity: to_json")
        return text

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Write a drawing: each layer's SQNR in dB where it alone is int8, in the order of the harm.

        Args:
            path: of an .svg file, which browsers show.

        Raises:
            ValueError: another suffix.
        """
        title = "SQNR of the output in dB where one layer alone is int8 (short bars harm most)"
        drawn_bars(path, title, [(one.name or "(root)", one.only_int8_sqnr) for one in self.layers])

    def __str__(self) -> str:
        metric, compared = self.float_metric is not None, not math.isnan(self.sqnr)
        head = ["layer", "type", "only int8: dB", "KL", *(["loss"] if metric else []),
                "only float: dB", "more", "+-", "KL", *(["gain"] if metric else [])]  # fmt: skip
        rows = [_cells(one, metric=metric) for one in (*self.layers, *self.groups)]
        lines = aligned([head, *rows], left=2) if metric or compared else []
        lines.append(
            f"all layers int8: {_db(self.sqnr)} dB, KL {_small(self.kl)}{self._metrics()}; {self.seconds:.1f} s"
        )
        if any(math.isfinite(one.only_float_more) for one in self.layers):
            lines.append(
                "more: dB over all layers int8, on the same outputs; +-: two standard errors; roundings behind a "
                "changed layer fall out otherwise, so that less than these says nothing"
            )
        if not compared:
            what = "a metric alone tells layers apart" if metric else "give evaluate=, a metric, to tell layers apart"
            lines.append(f"the outputs that were compared hold no reals, or zeros alone: {what}")
        if self.noise:
            lines.append(f"two calls of the metric with the float model differ by {self.noise:.3g}")
        lines += [f"float in any case: {name or '(root)'}: {why}" for name, why in self.floats.items()]
        return "\n".join(lines)

    def _metrics(self) -> str:
        if self.float_metric is None or self.int8_metric is None:
            return ""
        drop = self.float_metric - self.int8_metric
        return f", metric {self.int8_metric:.6g} of {self.float_metric:.6g} in float (loses {drop:.4g})"


def _cells(one: LayerSensitivity, *, metric: bool) -> list[str]:
    loss = [_signed(one.only_int8_loss)] if metric else []
    gain = [_signed(one.only_float_gain)] if metric else []
    return [one.name or "(root)", one.kind, _db(one.only_int8_sqnr), _small(one.only_int8_kl), *loss,
            _db(one.only_float_sqnr), _more(one.only_float_more), _more(2 * one.only_float_error).removeprefix("+"),
            _small(one.only_float_kl), *gain]  # fmt: skip


def _db(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def _more(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:+.1f}"


def _small(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2g}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.4f}"


def finite(value: Any) -> Any:
    """A value as JSON has it: None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
