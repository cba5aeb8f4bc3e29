"""The report that every conversion leaves on the model it returns: the outcome for each module, and the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from quant.kernels import narrow
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.names import child_of, full_name
from quant.runtime.packed_weights import packed_weights

REPORT_ATTRIBUTE = "_quant_report"


@dataclass(frozen=True)
class ReportEntry:
    """The outcome for one module.

    Attributes:
        name: dotted name in the user's model, '' for the root.
        type: class name of the user's module.
        outcome: "int8", "int4", ... for a module that computes in integers, "float" for one that does not.
        detail: for quantised modules the ranges, routes and backend; for float ones the reason.
        bytes_before, bytes_after: bytes of the module's own parameters and buffers, without children that have
            entries and without shared tensors that an earlier entry counts.
    """

    name: str
    type: str
    outcome: str
    detail: str
    bytes_before: int
    bytes_after: int

    @property
    def quantized(self) -> bool:
        """Whether the module computes in integers."""
        return is_quantized(self.outcome)


def storage(weights: Iterable[Tensor], bits: int) -> str:
    """How weights of few bits are stored, for an entry's detail; '' for those of more."""
    if bits not in narrow.NARROW_BITS:
        return ""
    in_bytes = [one for one in weights if not narrow.is_narrow(one)]
    if not in_bytes:
        return f"stored in {bits} bits"
    if any(one.dim() > 2 for one in in_bytes):
        return "its weight stored as bytes, as those of convolutions are"
    sizes = ", ".join(map(str, sorted({one.shape[1] for one in in_bytes})))
    return f"weights of {sizes} inputs stored as bytes, as {narrow.BLOCK} does not divide them"


def is_quantized(outcome: str) -> bool:
    """Whether an entry's outcome is of a module that computes in integers."""
    return outcome != "float"


@dataclass(frozen=True)
class Report:
    """The report of a conversion, module by module. Printable, iterable, and JSON through `to_dict`.

    Attributes:
        entries: one per module.
        float_bytes: bytes of the parameters and buffers that no quantised module holds.
        packed: entry's name -> bytes of the packed weights that this process holds for the module, besides its buffers;
            entries without any are left out, '' has what none covers. What no kernel has read yet is not packed.
            None where no model was asked. No part of what is compared: a copy of a model packs its own.
    """

    entries: tuple[ReportEntry, ...]
    float_bytes: int = 0
    packed: Mapping[str, int] | None = field(default=None, compare=False)

    def __iter__(self) -> Iterator[ReportEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> ReportEntry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(f"no module {name!r} in the report; it has {[entry.name for entry in self.entries]}")

    @property
    def quantized(self) -> tuple[ReportEntry, ...]:
        """The modules that compute in integers."""
        return tuple(entry for entry in self.entries if entry.quantized)

    @property
    def bytes_before(self) -> int:
        """Bytes of the quantised modules' parameters before."""
        return sum(entry.bytes_before for entry in self.quantized)

    @property
    def bytes_after(self) -> int:
        """Bytes of the quantised modules' weights, scales and biases after."""
        return sum(entry.bytes_after for entry in self.quantized)

    @property
    def model_bytes_before(self) -> int:
        """Bytes of all parameters and buffers of the float model, each once, in the types that they had there."""
        grown = sum(entry.bytes_after - entry.bytes_before for entry in self.entries if not entry.quantized)
        return self.bytes_before + self.float_bytes - grown

    @property
    def model_bytes_after(self) -> int:
        """Bytes of all parameters and buffers of the model now, each once."""
        return self.bytes_after + self.float_bytes

    @property
    def bytes_packed(self) -> int:
        """Bytes of packed weights that this process holds for the model now, besides its parameters and buffers."""
        return sum((self.packed or {}).values())

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary: `modules`, bytes of the quantised ones and of the whole model, packed weights."""
        return {
            "modules": [asdict(entry) for entry in self.entries],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "model_bytes_before": self.model_bytes_before,
            "model_bytes_after": self.model_bytes_after,
            "bytes_packed": self.bytes_packed,
            "packed": dict(self.packed or {}),
        }

    def __str__(self) -> str:
        head = ("module", "type", "now", "KiB before", "KiB after", "how / why")
        rows = [
            (
                entry.name or "(root)",
                entry.type,
                entry.outcome,
                f"{entry.bytes_before / 1024:.1f}",
                f"{entry.bytes_after / 1024:.1f}",
                entry.detail,
            )
            for entry in self.entries
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head) - 1)]

        def line(row: tuple[str, ...]) -> str:
            cells = [
                cell.rjust(width) if i in (3, 4) else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=False))
            ]
            return "  ".join([*cells, row[-1]]).rstrip()

        lines = [line(head), line(tuple("-" * width for width in [*widths, len(head[-1])])), *map(line, rows)]
        whole = self.model_bytes_before
        ratio = f", {self.model_bytes_after / whole:.3f} of float" if whole else ""
        owners = [entry.quantized for entry in self.entries if entry.bytes_before]
        others = [entry.quantized for entry in self.entries if not entry.bytes_before]
        rest = f", {sum(others)} of {len(others)} entries without any of their own" if others else ""
        lines.append(
            f"{sum(owners)} of {len(owners)} modules with parameters quantised{rest}; "
            f"{_change(self.bytes_before, self.bytes_after)} of them, "
            f"{_change(whole, self.model_bytes_after)} of the whole model{ratio}"
        )
        if self.packed is not None and self.quantized:
            lines.append(f"packed weights in this process: {self.bytes_packed / 1024:.1f} KiB")
        return "\n".join(lines)


def _change(before: int, after: int) -> str:
    return f"{before / 1024:.1f} KiB -> {after / 1024:.1f} KiB"


def own_bytes(module: nn.Module, counted: set[int] | None = None) -> int:
    """Bytes of a module's own parameters and buffers, children not counted.

    Args:
        module: any; lazy parameters that are not initialised have no bytes.
        counted: ids of the tensors that count no more, because they are shared; those counted here are added.
    """
    return bytes_of(own_tensors(module), set() if counted is None else counted)


def own_tensors(module: nn.Module) -> dict[int, int]:
    """The bytes of a module's own parameters and buffers by the tensors' ids."""
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return {id(one): one.numel() * one.element_size() for one in tensors if not nn.parameter.is_lazy(one)}


def bytes_of(tensors: Mapping[int, int], counted: set[int]) -> int:
    """The sum of `own_tensors` that are not in `counted`, to which they are added."""
    size = sum(tensors[one] for one in tensors.keys() - counted)
    counted.update(tensors)
    return size


def attach_report(model: nn.Module, report: Report) -> None:
    """Store `report` on `model`, for `summary`; it is plain data, which deepcopy and pickle keep."""
    setattr(model, REPORT_ATTRIBUTE, report)


def summary(model: nn.Module) -> Report:
    """The report of a quantised model: the outcome for each module, and the reason.

    In a model assembled from quantised and other parts, each part has its own report; other modules with parameters
    are listed as float.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quant.summary: expected an nn.Module, got {type(model).__name__}")
    entries, counted = tuple(_entries(model, "", set())), set[int]()
    every = sum(own_bytes(module, counted) for module in model.modules())
    return Report(entries, every - Report(entries).bytes_after, _packed_by_entry(model, entries))


def _packed_by_entry(model: nn.Module, entries: Iterable[ReportEntry]) -> dict[str, int]:
    """The packed weights of each entry's module and of those inside it that have no entry of their own."""
    names, found = {entry.name for entry in entries}, dict[str, int]()
    for path, size in packed_weights(model).items():
        owner = path
        while owner and owner not in names:
            owner = owner.rpartition(".")[0]
        found[owner] = found.get(owner, 0) + size
    return found


def _entries(module: nn.Module, name: str, seen: set[int]) -> Iterator[ReportEntry]:
    """The entries of `module`, which is called `name`, and of its children: each module once."""
    if id(module) in seen:
        return
    seen.add(id(module))
    report = None
    with contextlib.suppress(Exception):  # of a __getattr__ of the user's
        report = getattr(module, REPORT_ATTRIBUTE, None)
    if isinstance(report, Report):
        modules = dict(module.named_modules(remove_duplicate=False))
        replaced = _replaced(modules)
        for entry in report:
            if entry.name in replaced:
                size = sum(bytes_of(own_tensors(part), set()) for part in modules[entry.name].modules())
                detail = f"replaced by a {type(modules[entry.name]).__name__} after the conversion; called in float"
                entry = replace(entry, outcome="float", detail=detail, bytes_before=size, bytes_after=size)
            detail = entry.detail + _chosen_backend(entry, modules.get(entry.name))
            yield replace(entry, name=full_name(name, entry.name), detail=detail)
        return
    if isinstance(module, QuantModule):
        size = sum(own_bytes(child) for child in module.modules())
        yield ReportEntry(name, type(module).__name__, "int8", "already quantised", size, size)
        return
    size = own_bytes(module)
    if size:
        yield ReportEntry(name, type(module).__name__, "float", "never quantised", size, size)
    for child_name, child in module.named_children():
        yield from _entries(child, f"{name}.{child_name}" if name else child_name, seen)


def _replaced(modules: Mapping[str, nn.Module]) -> set[str]:
    """Names of modules that the user has replaced in converted ones (`runtime/user_replacements.py`)."""
    replaced: set[str] = set()
    for path, module in modules.items():
        origin = getattr(child_of(module, "_quant"), "origin", None)
        replaced |= {full_name(path, name) for name in origin.replaced()} if origin is not None else set()
    return replaced & modules.keys()


def _chosen_backend(entry: ReportEntry, module: nn.Module | None) -> str:
    """The backend chosen for a layer after conversion, as `kernels.autotune` does."""
    if module is None or not entry.quantized:
        return ""
    parts = module.named_modules() if isinstance(module, QuantModule) else [("", module)]
    chosen = [(name, getattr(part, "backend", None)) for name, part in parts]
    return "".join(
        f"; {name} runs on {backend}" if name else f"; runs on {backend}"
        for name, backend in chosen
        if backend and backend not in entry.detail
    )
