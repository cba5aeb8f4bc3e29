"""How much memory packed weights take: of the compiled kernels, which say it themselves (csrc/torch/packed.h)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from quant.kernels import ops
from torch import Tensor


def packed_bytes(weights: Iterable[Tensor]) -> int:
    """Bytes of the packed forms, each once, that compiled kernels hold in this process for int8 weights on the CPU.

    0 for what no kernel has read yet, and where no extension is. What oneDNN keeps is not known.
    """
    known = list(weights)
    return 0 if not known or ops.extension_problem() else int(torch.ops.octet_native.packed_bytes(known))
