"""The kinds of recurrent layers: what each computes at a time step, one file a kind.

Every file of this folder is imported here, so that to add a kind is to write one. Which classes of float layers are of
which kind stands in `quant/recurrent_layers.py`.
"""

from __future__ import annotations

import importlib
import pkgutil

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
