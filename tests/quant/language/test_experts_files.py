"""Files of models with experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import quant

from .models import FOUR_BITS, SUBJECTS

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of on its own account


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "gpt2", "llama_tied"])
@torch.inference_mode()
def test_a_file_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    subject = SUBJECTS[name]
    q = quant.quantize_dynamic(subject.make(torch.bfloat16), quant.Recipe(default=FOUR_BITS))
    quant.save(q, tmp_path / "model.safetensors")
    again = quant.load(tmp_path / "model.safetensors", model=subject.make(torch.bfloat16))
    assert torch.equal(again(**subject.batch()).logits, q(**subject.batch()).logits)
