"""A model without values whose layers become int8 one after another, as their float tensors come.

What becomes of each layer is decided beforehand, by `quantize_dynamic`'s own rules (`dynamic_decisions.py`). Layers
that share a weight are one group and are built together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quant.dynamic import build, put_in, report_of
from quant.dynamic_decisions import Decision, check_rules, check_settings, check_something, check_tensor, decide
from quant.kernels import dispatch
from quant.kernels.row_slices import VALUES
from quant.nn.attention import leave_fast_paths
from quant.recipe import Recipe
from quant.report import attach_report, summary
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.names import full_name
from quant.shards.reader import ShardError


@dataclass
class Group:
    """Layers that are built together, because they share a weight; mostly it is one.

    Attributes:
        decisions: one for each layer.
        tensors: the parameters, each under all its names.
        missing: those without values, by one of their names.
    """

    decisions: list[Decision]
    tensors: dict[tuple[str, ...], nn.Parameter]
    missing: set[str] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        """Of its float tensors, as the model declares them."""
        return sum(one.numel() * one.element_size() for one in self.tensors.values())


class Assembly:
    """Takes the float tensors of a model, and puts int8 layers into it.

    Attributes:
        model: what is assembled; another object than at first where the root itself is a layer.
        groups: of the layers that become int8.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, backend: str | None) -> None:
        self.model = model
        chosen = backend or recipe.backend or ""
        self._used = dispatch.find(chosen) if chosen else dispatch.current()
        self._backend = chosen
        self._decisions = decide(model, recipe)
        check_rules(model, recipe, self._decisions)
        check_settings(self._decisions, recipe)
        check_something(self._decisions)
        self._earlier = summary(model)
        self.groups = _groups(model, self._decisions)
        self._of = {name: group for group in self.groups for names in group.tensors for name in names}

    def names(self, name: str) -> tuple[str, ...]:
        """All names of the parameter of that name, which is one of a layer to quantise; () where it is none.

        Some may be of layers that stay float, whose values are not this one's business.
        """
        group = self._of.get(name)
        return () if group is None else next(names for names in group.tensors if name in names)

    def is_taken(self, name: str) -> bool:
        """Whether a parameter of that name is of a layer that becomes int8."""
        group = self._of.get(name)
        return group is not None and any(_keys(decision, (name,)) for decision in group.decisions)

    def is_built(self, name: str) -> bool:
        """Whether the layer whose parameter has that name is int8 already."""
        return all(decision.replacement is not None for decision in self._of[name].decisions)

    def supply(self, name: str, tensor: Tensor, what: str) -> None:
        """Give a layer's parameter its values; with the last one of its group, the group becomes int8.

        Args:
            name: of the parameter, one for which `names` has some.
            tensor: float32, bfloat16 or float16, of the parameter's shape. It is not kept.
            what: the tensor in errors.

        Raises:
            ShardError: a value is beyond the dtype that the model declares.
            TypeError, ValueError: the tensor is none that can be quantised, or a recipe's group size does not fit.
        """
        check_tensor(what, tensor)
        group, names = self._of[name], self.names(name)
        check_holds(what, tensor, group.tensors[names].dtype)
        value = nn.Parameter(tensor.detach(), requires_grad=False)  # one object: layers share what is the same
        for decision in group.decisions:
            for key in _keys(decision, names):
                _set(decision.module, key, value)
        group.missing.discard(names[0])
        if not group.missing:
            self._build(group)

    def finish(self) -> nn.Module:
        """The assembled model, with its report.

        Raises:
            ShardError: tensors of a layer never came.
        """
        missing = sorted(name for group in self.groups for name in group.missing)
        if missing:
            raise ShardError(
                f"the checkpoint lacks {', '.join(missing[:8])}, of layers to quantise, and random values are worth no "
                "integers; load the float model, train what is new, and give it to quantize_dynamic"
            )
        leave_fast_paths(self.model)
        attach_report(self.model, report_of(self._decisions, self._used, self._earlier))
        return self.model

    def _build(self, group: Group) -> None:
        build(group.decisions, self._backend)
        declared = {name: one for names, one in group.tensors.items() for name in names}
        for decision in group.decisions:
            replacement = decision.replacement
            assert replacement is not None
            dtype, kept = torch.float32, {id(one) for one in replacement.modules()}
            for key, held in list(decision.module.named_parameters()):
                dtype = declared[full_name(decision.names[0], key)].dtype
                # The decision keeps the float layer, for the report; its values are not to stay with it.
                stays = id(decision.module.get_submodule(key.rpartition(".")[0])) in kept
                left = held.detach().to(dtype).clone() if stays else torch.empty_like(held, dtype=dtype, device="meta")
                _set(decision.module, key, nn.Parameter(left, requires_grad=False))
            for part in replacement.modules():
                if isinstance(part, QuantModule):
                    part.dtype = dtype  # what the model declares, whatever the tensors came in
        self.model = put_in(self.model, group.decisions)


def check_holds(what: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise ShardError where a tensor, called `what`, has values beyond a dtype, which would become inf or wrap."""
    for part in tensor.detach().reshape(-1).split(VALUES) if tensor.dtype != dtype else ():
        value = part.to(dtype)
        wide = part.double() if part.is_floating_point() else part  # float8 compares with no integer
        lost = _lost(part.double(), value.double(), dtype) if dtype.is_floating_point else value != wide
        if bool(lost.any()):
            raise ShardError(
                f"{what} has the value {part[lost][0].item()}, which {dtype} of the model does not hold; make the "
                "model with a wider dtype"
            )


def _lost(part: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Where float64 `part` is beyond `dtype`, as which it is `value`: float8 types have inf, NaN or the largest there.

    What is at most half a step above the largest number is rounded to that one.
    """
    largest = torch.finfo(dtype).max
    half_a_step = math.ldexp(torch.finfo(dtype).eps, math.frexp(largest)[1] - 2)
    beyond = part.isfinite() & (~value.isfinite() | (part.abs() > largest + half_a_step))
    return beyond | (part.isinf() & ~value.isinf())


def _set(model: nn.Module, name: str, value: nn.Parameter) -> None:
    path, _, key = name.rpartition(".")
    model.get_submodule(path)._parameters[key] = value


def _keys(decision: Decision, names: tuple[str, ...]) -> list[str]:
    """The names inside a layer of the parameter that has these names in the model."""
    prefix = full_name(decision.names[0], "")
    prefix = f"{prefix}." if prefix else ""
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _groups(model: nn.Module, decisions: list[Decision]) -> list[Group]:
    """The layers to quantise, in groups that share a parameter, in the model's order."""
    groups: list[Group] = []
    owner: dict[int, Group] = {}
    for decision in decisions:
        if decision.qconfig is None:
            continue
        held = {id(one): one for _, one in decision.module.named_parameters()}
        shared = {id(owner[key]): owner[key] for key in held if key in owner}
        group = Group([], {})
        groups = [one for one in groups if id(one) not in shared]
        for one in shared.values():
            group.decisions.extend(one.decisions)
        group.decisions.append(decision)
        groups.append(group)
        for each in group.decisions:
            owner.update({id(parameter): group for parameter in each.module.parameters()})
    named: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), []).append(name)
    for group in groups:
        parameters = {id(one): one for decision in group.decisions for one in decision.module.parameters()}
        group.tensors = {tuple(named[key]): one for key, one in parameters.items()}
        group.missing = {names[0] for names in group.tensors}
    return groups
