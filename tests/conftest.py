"""What all tests share: registries that are as they were after a test has added to them."""

from __future__ import annotations

import pytest
from quant.kernels import dispatch
from quant.observers import registry as observers

from quant import leaves
from quant.nn import registry as layers


@pytest.fixture
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries only grow, so a test that adds to them has copies."""
    for registry in (dispatch._BACKENDS, observers._REGISTRY, leaves._REGISTERED, layers._LAYERS):
        monkeypatch.setattr(registry, "_known", dict(registry._known))
    monkeypatch.setattr(dispatch, "_usable", dict(dispatch._usable))
