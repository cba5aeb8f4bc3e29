"""What `export_onnx` reports: what became of each step, and how the file's values compare with the model's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quant.onnx.graph_writer import StepForm


@dataclass(frozen=True)
class StepDifference:
    """The uint8 values of a step that a runtime computes otherwise than the model.

    Attributes:
        step: its name in the user's model.
        differing: the share of its values.
        largest: the largest difference, in steps of its range.
    """

    step: str
    differing: float
    largest: int


@dataclass(frozen=True)
class Verification:
    """A run of the file beside the model.

    Attributes:
        ran_in: the runtime, with its version.
        outputs: by name: the relative error (L2) of the file's output against the model's; 0 for the same bits.
        steps: of each uint8 value of the program, in order, and of each that a dynamic layer rounds its input to.
        kernels: how many nodes of each kind the runtime's optimised graph has; empty where it does not say.
        saturating: layers whose sums may overflow 16 bits in the processor that ran the file, which adds them so.
    """

    ran_in: str
    outputs: Mapping[str, float]
    steps: tuple[StepDifference, ...]
    kernels: Mapping[str, int]
    saturating: tuple[str, ...] = ()

    @property
    def same_bits(self) -> bool:
        """Whether all outputs are the model's, to the bit."""
        return not any(self.outputs.values())

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary. JSON has no NaN and no infinity: such an error is null, and `not_comparable` says
        why, by the output's name."""
        finite = {name: error if math.isfinite(error) else None for name, error in self.outputs.items()}
        reasons = {name: _no_number(error) for name, error in self.outputs.items() if finite[name] is None}
        return {**asdict(self), "outputs": finite, "not_comparable": reasons, "same_bits": self.same_bits}

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {error:.2g}" for name, error in self.outputs.items())
        said = "the model's outputs, to the bit" if self.same_bits else f"relative error of outputs: {errors}"
        lines = [f"{self.ran_in}: {said}"]
        if self.saturating:
            lines.append(
                f"THIS PROCESSOR adds two products in 16 bits, and {len(self.saturating)} layers can overflow them "
                f"({', '.join(self.saturating[:4])}{', ...' * (len(self.saturating) > 4)}): export with target='avx2'"
            )
        differing = [one for one in self.steps if one.differing]
        same = f"{len(self.steps) - len(differing)} of {len(self.steps)} uint8 values are the same"
        lines.append(
            same if self.steps else "the model rounds nothing to uint8 that the file shows: outputs alone are compared"
        )
        lines += [f"  {one.step}: {one.differing:.3%} differ, by at most {one.largest}" for one in differing]
        if self.kernels:
            counted = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kernels.items()))
            lines.append(f"optimised graph: {counted}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ExportReport:
    """What became of a model in a file; prints as text.

    Attributes:
        path, bytes: the file and its size.
        runtime, target: what it is for.
        opset: the version of ONNX's operators.
        steps: what each became, in order.
        overflowing: layers whose int8 weights make a runtime's sums of two products overflow on processors without
            VNNI.
        notes: what the model checks or returns, and the file does not.
        verification: the comparison with the model, where it was asked for.
        unsigned: layers whose weights are uint8, for processors without VNNI.
    """

    path: str
    runtime: str
    target: str
    opset: int
    bytes: int
    steps: tuple[StepForm, ...]
    overflowing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    verification: Verification | None = None
    unsigned: tuple[str, ...] = ()

    def __getitem__(self, step: str) -> StepForm:
        for one in self.steps:
            if one.step == step:
                return one
        raise KeyError(f"no step {step!r} in the report; it has {[one.step for one in self.steps]}")

    @property
    def floats(self) -> tuple[StepForm, ...]:
        """The steps that compute real numbers."""
        return tuple(one for one in self.steps if _kind(one) == "float")

    @property
    def share(self) -> str:
        """How many computing steps the runtime computes in integers, and how many by float nodes that give the model's
        own integers."""
        computing = [one for one in self.steps if not one.moves]
        exact = sum(one.exact for one in computing)
        said = f"{sum(one.integer for one in computing)} of {len(computing)} computing steps are integers"
        return f"{said}, {exact} more by exact float nodes" if exact else said

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        checked = self.verification
        return {**asdict(self), "verification": None if checked is None else checked.to_dict()}

    def __str__(self) -> str:
        rows = [(one.step or "(root)", _kind(one), one.why) for one in self.steps]
        widths = [max([len(row[place]) for row in rows], default=0) for place in range(2)]
        lines = [f"{row[0].ljust(widths[0])}  {row[1].ljust(widths[1])}  {row[2]}" for row in rows]
        lines.append(
            f"{self.path}: {self.bytes / 1024:.0f} KiB, opset {self.opset}, for {self.runtime} ({self.target}); "
            f"{self.share}"
        )
        if self.overflowing:
            count = len(self.overflowing)
            lines.append(
                f"WITHOUT VNNI {count} layer{'s' * (count > 1)} can overflow 16 bits in {self.runtime} "
                f"({', '.join(self.overflowing[:4])}{', ...' * (count > 4)}): export for such processors with "
                "target='avx2'"
            )
        if self.unsigned:
            count = len(self.unsigned)
            lines.append(
                f"uint8 weights in {count} layer{'s' * (count > 1)}, which are exact without VNNI and slower than "
                "int8: a model made with QConfig(weight_bits=7) needs none"
            )
        lines += [f"not in the file: {note}" for note in self.notes]
        if self.verification is not None:
            lines.append(str(self.verification))
        return "\n".join(lines)


def _no_number(error: float) -> str:
    if math.isnan(error):
        return "the file gives NaN where the model gives a number, or the other way round"
    return "the file's output has another shape or dtype than the model's, or infinities in other places"


def _kind(form: StepForm) -> str:
    return "moves" if form.moves else "integer" if form.integer else "exact" if form.exact else "float"
