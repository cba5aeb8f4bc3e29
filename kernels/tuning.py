"""The result of `autotune`: what was measured and chosen, as data and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

FLOAT = "float"
"""The float layer's name among the candidates."""


@dataclass(frozen=True)
class Tuned:
    """What `autotune` measured and chose for one module, or for parts that run in one native call.

    Attributes:
        name: dotted name of the module that was called, '' for the model.
        kind: the name of its class.
        shapes: the shapes of the tensors that it was called with, as text.
        parts: number of modules that the choice applies to.
        seconds: candidate -> time of all its calls in one inference; '' is the dispatcher's choice.
        backend: the chosen backend; '' for the dispatcher's choice.
        cannot: candidate -> the reason that it was not measured.
    """

    name: str
    kind: str
    shapes: str
    parts: int
    seconds: Mapping[str, float]
    backend: str
    cannot: Mapping[str, str]

    @property
    def slower_than_float(self) -> bool:
        """Whether the float layer, where it was measured, beats every backend."""
        return FLOAT in self.seconds and self.seconds[FLOAT] < self.seconds[self.backend]


@dataclass(frozen=True)
class Tuning:
    """The result of `quant.kernels.autotune`: a table to print, and an entry per choice to iterate over.

    Attributes:
        layers: one entry per choice.
        unseen: names of modules that the example did not reach; their backend is unchanged.
        threads: number of threads during the measurement.
        default: the backend that the dispatcher chooses.
    """

    layers: tuple[Tuned, ...]
    unseen: tuple[str, ...]
    threads: int
    default: str

    def __iter__(self) -> Iterator[Tuned]:
        return iter(self.layers)

    def float_rules(self) -> dict[str, None]:
        """Rules of a `quant.Recipe` for the layers that are faster in float: {} where int8 is faster everywhere."""
        return {one.name or "*": None for one in self.layers if one.slower_than_float}

    def __str__(self) -> str:
        names = sorted({name for one in self.layers for name in one.seconds}, key=lambda name: (name == FLOAT, name))
        header = [
            "layer",
            "type",
            "inputs",
            "parts",
            *(name or f"default ({self.default})" for name in names),
            "chosen",
        ]
        rows = [[one.name or "(root)", one.kind, one.shapes, str(one.parts), *(_cell(one, name) for name in names),
                 one.backend or "default"] for one in self.layers]  # fmt: skip
        lines = [_table([header, *rows]), f"milliseconds of one inference on {self.threads} thread(s); -: cannot"]
        reasons = {f"{name}: {why}" for one in self.layers for name, why in one.cannot.items()}
        lines += sorted(reasons)
        if self.unseen:
            lines.append(f"not reached by the example, left as they were: {', '.join(self.unseen)}")
        rules = self.float_rules()
        if rules:
            lines.append(f"float is faster for {len(rules)}; to leave them so: quant.Recipe({rules!r})")
        return "\n".join(lines)


def _cell(one: Tuned, name: str) -> str:
    return f"{one.seconds[name] * 1e3:.3g}" if name in one.seconds else "-"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
