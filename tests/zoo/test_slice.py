"""A slice of the zoo, in every run of the tests: small models of our own, and of transformers where it is installed.

`make test-zoo` runs all of it.
"""

from __future__ import annotations

import warnings

import pytest

from .catalogue import CATALOGUE
from .measure import measure

OWN = (
    "own_conformer",
    "own_crnn_ctc",
    "own_early_exit",
    "own_flow_gridsample",
    "own_kan_custom",
    "own_moe",
    "own_nn_transformer",
    "own_pyg_gcn",
    "own_rl_atari",
    "own_spectral_fno",
    "own_tabnet_like",
    "own_unet_odd",
)
TRANSFORMERS = ("hf_bert", "hf_dinov2", "hf_wav2vec2")


@pytest.mark.parametrize("mode", ["static", "qat"])
@pytest.mark.parametrize("name", OWN)
def test_own(name: str, mode: str) -> None:
    check(name, mode)


@pytest.mark.parametrize("mode", ["static", "qat"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str, mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library's own imports
        pytest.importorskip("transformers", reason="transformers is not installed: pip install 'octet-quant[zoo]'")
    check(name, mode)


def check(name: str, mode: str) -> None:
    row = measure(CATALOGUE[name], mode)
    assert row["verdict"] == "ok", row.get("traceback", row)
    assert row["int8"] == row["weighted"], row["float_layers"]
