"""The cases, by kind; importing this registers them all."""

from __future__ import annotations

import importlib
import pkgutil

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
