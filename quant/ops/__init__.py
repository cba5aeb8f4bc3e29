"""The integer operators, one file per family.

A family's file has the operator as a frozen dataclass with its traits, says which calls of torch are one
(`recognises`), and which kernel computes it (`lower`). Every file of this folder is imported here, so that to add one
is to write one.
"""

from __future__ import annotations

import importlib
import pkgutil

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
