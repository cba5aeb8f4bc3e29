"""The integer operators, one file per family.

A family's file defines the operator as a frozen dataclass with its traits, the calls of torch that it stands for
(`recognises`), and the kernel that computes it (`lower`). All files of this folder are imported here, so that an
operator is added by one new file.
"""

from __future__ import annotations

import importlib
import pkgutil

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
