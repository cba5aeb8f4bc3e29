"""`export_executorch`: a quantised model as a `.pte` program, its integer layers by XNNPACK."""

from __future__ import annotations

import collections
import importlib
import operator
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.calibrate.whole_files import replace_file
from quant.export.qdq import to_qdq


@dataclass(frozen=True)
class ExecuTorchReport:
    """What became of a model.

    Attributes:
        size: bytes of the file.
        delegates: how many parts XNNPACK computes.
        portable: operator -> how often it stayed with ExecuTorch's portable kernels, which are slow.
    """

    size: int
    delegates: int
    portable: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self)

    def __str__(self) -> str:
        others = ", ".join(f"{count} {name}" for name, count in self.portable.items()) or "nothing"
        parts = "1 part" if self.delegates == 1 else f"{self.delegates} parts"
        return f"{self.size} bytes; {parts} by XNNPACK, outside of them {others}"


def export_executorch(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: tuple[Any, ...],
    *,
    dynamic_shapes: dict[str, Any] | tuple[Any, ...] | None = None,
) -> ExecuTorchReport:
    """Write a quantised model for ExecuTorch, which runs on phones.

    Args:
        model: from `quant.quantize_static`, `quant.convert`, `quant.quantize_dynamic` or `quant.load`.
        path: of the file, usually `.pte`.
        example: positional arguments of a call.
        dynamic_shapes: as torch.export's; sizes that are not named are those of the example.

    Raises:
        ImportError: the package executorch is not installed.
        ExportError: as `to_qdq`.
    """
    tools = _tools()
    plain = to_qdq(model, operators="quantized_decomposed")
    with torch.no_grad():
        exported = torch.export.export(plain, example, dynamic_shapes=dynamic_shapes, strict=False)
    # The check refuses int8 operators that nobody has lowered yet.
    config = tools.exir.EdgeCompileConfig(_check_ir_validity=False)
    lowered = tools.exir.to_edge_transform_and_lower(exported, partitioner=[tools.partitioner()], compile_config=config)
    report = _counted(lowered.exported_program().graph, tools.delegate)
    content = bytes(lowered.to_executorch().buffer)
    replace_file(Path(path), content, "quant.export_executorch")
    return ExecuTorchReport(len(content), *report)


@dataclass(frozen=True)
class _Tools:
    """What is used of the package: its lowering, XNNPACK's partitioner, and the call of a delegate."""

    exir: Any
    partitioner: Any
    delegate: Any


def _tools() -> _Tools:
    try:
        exir = importlib.import_module("executorch.exir")
        partition = importlib.import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
        delegate = importlib.import_module("executorch.exir.delegate")
        importlib.import_module("executorch.kernels.quantized")  # the portable form of what XNNPACK leaves
    except ImportError as error:
        raise ImportError(
            f"export_executorch needs the package executorch ({error}): pip install 'octet-quant[executorch]'"
        ) from error
    return _Tools(exir, partition.XnnpackPartitioner, delegate.executorch_call_delegate)


def _counted(graph: torch.fx.Graph, delegate: Any) -> tuple[int, dict[str, int]]:
    """The number of delegates, and what is outside of them."""
    calls = [node.target for node in graph.nodes if not isinstance(node.target, str)]
    outside = [one for one in calls if one is not operator.getitem and one is not delegate]
    names = collections.Counter(str(getattr(one, "_op", one)) for one in outside)
    return sum(one is delegate for one in calls), dict(names.most_common())
