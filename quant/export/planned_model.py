"""A model that is one native call, as a module: what `octet-run` computes of its file, with the same bits in Python."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quant.export.output_text import filled
from quant.export.whole_plan import DTYPES, PlanValue, WholePlan, whole_plan
from quant.kernels import dispatch
from quant.kernels.reference_plan import run_plan_of_finite
from quant.report import attach_report, summary
from quant.runtime import nonfinite
from quant.runtime.names import dtype_name


class PlannedModel(nn.Module):
    """A quantised model as its plan alone: neither the model's code nor its layers.

    All that it computes is one native call, float attention, norms and softmax of a model of `quant.quantize_dynamic`
    among it, so it has the bits of the torch-free runner. Those of the model itself are the same, but where that leaves
    real numbers to torch; both are equally near to the float model.

    Attributes:
        plan: the text, what it takes and gives; its constants are this module's buffers constant_0, constant_1, ...
        backend: a name of `quant.kernels.available()`, or None for the fastest that is exact here.
    """

    def __init__(self, plan: WholePlan, backend: str | None = None) -> None:
        super().__init__()
        if backend is not None:
            dispatch.current(backend)  # raises where it is none of this machine
        self.plan, self.backend = dataclasses.replace(plan, constants=()), backend
        for place, tensor in enumerate(plan.constants):
            self.register_buffer(f"constant_{place}", tensor)
        self.eval()

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """What the model returns, from its inputs by place or by name.

        The inputs are those of the plan, which `print` shows: tensors that the model reads, each by itself. One that
        comes in a list or a dictionary has the name of that argument, the second of them with "_2" behind it.
        Named tuples come as tuples, and objects of other classes as dictionaries of their fields.

        Raises:
            TypeError: an input is missing, given twice or unknown, or has another dtype.
            ValueError, IndexError: an input has sizes that the model does not take, or NaN or inf came to where a value
                is rounded to an integer. The message names the input, or the layer that refuses it.
            RuntimeError: torch compiles, traces or exports the call.
        """
        outputs = self.run(self._in_order(args, kwargs))
        return filled(self.plan.returns, dict(zip([one.name for one in self.plan.outputs], outputs, strict=True)))

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs in the plan's order, from the inputs in its order; raises as `forward` does."""
        if nonfinite.in_a_graph():
            raise RuntimeError(
                "a planned model is one native call, and no part of a graph of torch.compile, torch.export or "
                "torch.jit: compile or export the model that it was made of"
            )
        if len(inputs) != len(self.plan.inputs):
            names = ", ".join(one.name for one in self.plan.inputs)
            raise TypeError(f"the model has {len(self.plan.inputs)} inputs ({names}), got {len(inputs)}")
        for x, expected in zip(inputs, self.plan.inputs, strict=True):
            _check(x, expected)
        bytes_of = [x.view(torch.uint8) if x.dtype == torch.bool else x for x in inputs]
        backend, text = dispatch.current(self.backend), self.plan.text
        constants = [one for one in self._buffers.values() if one is not None]
        try:
            if backend.plans:
                outputs: list[Tensor] = torch.ops.octet.run_plan_of_finite(bytes_of, constants, text, backend.name)
            else:
                outputs = run_plan_of_finite(bytes_of, constants, text, table=backend.operators)
        except (ValueError, IndexError) as error:
            raise type(error)(self._explained(str(error), inputs)) from error
        if not outputs and self.plan.outputs:
            raise ValueError("NaN or inf came to where a value is rounded to an integer")
        return outputs

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PlannedModel:
        for x in self.buffers():
            if fn(x[:0] if x.dim() else x).dtype != x.dtype:
                raise TypeError(
                    f"PlannedModel: its {dtype_name(x.dtype)} constants cannot become another dtype: a plan takes, "
                    "computes and gives float32; convert inputs and outputs instead"
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        takes, gives = (", ".join(one.name for one in ends) for ends in (self.plan.inputs, self.plan.outputs))
        return f"inputs=({takes}), outputs=({gives}), operations={len(self.plan.steps)}"

    def _in_order(self, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> list[Tensor]:
        names = [one.name for one in self.plan.inputs]
        placed, by_name = names[: len(args)], names[len(args) :]
        fits = len(args) + len(kwargs) == len(names) and not kwargs.keys() & set(placed)
        if not fits or kwargs.keys() != set(by_name):
            got = f"{len(args)} by place" + "".join(f", {name!r}" for name in kwargs)
            raise TypeError(f"the model has {len(names)} inputs ({', '.join(names)}), got {got}")
        return [*args, *(kwargs[name] for name in by_name)]

    def _explained(self, error: str, inputs: Sequence[Tensor]) -> str:
        """An error of the plan with its layer's name, and with the inputs that are unlike those at export."""
        quoted = re.search(r"plan line '%(\d+) = ", error)
        lines = [line.partition(" = ")[0] for line in self.plan.text.split("\n")[2:-1]]
        if quoted is not None and f"%{quoted[1]}" in lines:
            error = f"layer '{self.plan.steps[lines.index(f'%{quoted[1]}')]}': {error[quoted.start() :]}"
        unlike = (_unlike(x, expected) for x, expected in zip(inputs, self.plan.inputs, strict=True))
        return "; ".join([error, *filter(None, unlike)])


def to_plan(model: nn.Module, example_inputs: Any = None, *, backend: str | None = None) -> PlannedModel:
    """A quantised model as one native call: what `quant.save(..., runner=True)` writes and the torch-free runner runs.

    A model of `quant.quantize_dynamic` runs its modules one by one in Python. Its plan takes 0.5 to 0.8 of that time
    (docs/guides/dynamic.md), and has neither hooks nor submodules.

    Args:
        model: what `convert`, `quantize_static` or `quantize_dynamic` returned.
        example_inputs: of a model from `quantize_dynamic`, whose forward was never captured: a tensor, a tuple of
            positional arguments, or a dict of keyword arguments. Sizes stay free where the model leaves them free.
        backend: a name of `quant.kernels.available()`, or None for the fastest that is exact here.

    Raises:
        ExportError: the model is not one native call; the message names the steps outside of it, with reasons.
    """
    result = PlannedModel(whole_plan(model, example_inputs, in_bytes=False), backend)
    attach_report(result, summary(model))
    return result


def _check(x: Tensor, expected: PlanValue) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"input '{expected.name}' is a {type(x).__name__}, expected a tensor of {expected.dtype}")
    dtype = DTYPES.get(x.dtype, dtype_name(x.dtype))
    if dtype != expected.dtype:
        raise TypeError(f"input '{expected.name}' is {dtype}, expected {expected.dtype}")
    if expected.fixed_rank and expected.shape is not None and x.dim() != len(expected.shape):
        raise ValueError(f"input '{expected.name}' has {x.dim()} dimensions, expected {len(expected.shape)}")


def _unlike(x: Tensor, expected: PlanValue) -> str:
    """How an input differs from what it was at export, where it does in more than sizes that are free; else ''."""
    if expected.shape is None:
        return ""
    known = [size if isinstance(size, int) else None for size in expected.shape]
    if len(known) == x.dim() and all(size in (None, own) for size, own in zip(known, x.shape, strict=True)):
        return ""
    sizes = ", ".join("any" if size is None else str(size) for size in known)
    return f"input '{expected.name}' is ({', '.join(map(str, x.shape))}), at export it was ({sizes})"
