"""The part of a file that the torch-free runner reads (kernels/runner/): the plan of the whole model, as one JSON text.

It stands in the metadata of the safetensors file beside the manifest, with a CRC-32. It names each constant's tensor in
the same file, with dtype, shape and CRC-32, so that C++ derives nothing and checks everything.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quant.artefact.tensor_bytes import tensor_bytes
from quant.export.whole_plan import WholePlan
from quant.runtime.names import dtype_name

VERSION = 1
"""Version of the document, `kFileVersion` of kernels/runner/artefact.h; the runner refuses newer ones."""

DOCUMENT = "octet_runner"
"""The key of the document in the metadata of a safetensors file; that of its CRC-32 ends in `_crc32`."""

CONSTANT = "_quant_runner/"
"""Prefix of the names of the plan's constants; those that are buffers of the model are stored once."""


def named_constants(plan: WholePlan) -> dict[str, Tensor]:
    """The plan's constants by their names in the file."""
    return {f"{CONSTANT}{place}": tensor for place, tensor in enumerate(plan.constants)}


def metadata(plan: WholePlan, same: Mapping[str, str], writer: str) -> dict[str, str]:
    """The document and its checksum.

    Args:
        plan: the model.
        same: name -> the name under which the same tensor is stored.
        writer: the version of this library, for errors.
    """
    document = {
        "version": VERSION,
        "writer": writer,
        "plan": plan.text,
        "steps": plan.steps,
        "constants": [_constant(same.get(name, name), one) for name, one in named_constants(plan).items()],
        "inputs": [dataclasses.asdict(one) for one in plan.inputs],
        "outputs": [dataclasses.asdict(one) for one in plan.outputs],
        "returns": json.dumps(plan.returns),  # for Python alone, whose numbers C++ need not read
    }
    text = json.dumps(document)
    return {DOCUMENT: text, f"{DOCUMENT}_crc32": str(zlib.crc32(text.encode()))}


def _constant(name: str, tensor: Tensor) -> dict[str, Any]:
    return {
        "tensor": name,
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "crc32": zlib.crc32(tensor_bytes(tensor)),
    }
