"""One side of a comparison: converts networks, one line of JSON each. Started by run.py, which sets the import path."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import quant

sys.path.append(str(Path(__file__).resolve().parents[1]))  # tests/, where `golden` is a package

from golden.hashing import digest
from golden.networks import outputs


def main() -> None:
    """Arguments: a folder for the values themselves or "", then names of networks."""
    keep, *names = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # ranges of random networks are poor at times
    print(json.dumps(versions()), flush=True)
    for name in names:
        values: dict[str, Tensor] = {}
        try:
            values = {place: value.contiguous() for place, value in outputs(name)}
            result = digest(values)
        except Exception as error:
            result = f"error: {type(error).__qualname__}"
            print(f"{name}: {error!r}", file=sys.stderr)
        if keep:
            save_file({place: value.clone() for place, value in values.items()}, Path(keep) / f"{name}.safetensors")
        print(json.dumps([name, result]), flush=True)


def versions() -> dict[str, str]:
    return {
        "octet": quant.__version__,
        "torch": torch.__version__,
        "instruction set of torch": torch.backends.cpu.get_cpu_capability(),
        "backends": ", ".join(name for name, reason in quant.kernels.available().items() if not reason),
    }


if __name__ == "__main__":
    main()
