"""Language models of transformers in tiny configurations, their weights random and loud enough to matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant

from ...zoo.language import TINY, TINY_GPT2, TINY_T5, TINY_WHISPER, WORDS
from ...zoo.torchvision_ops import import_library

LENGTH = 9

_TINY = {**TINY, "bos_token_id": 1, "eos_token_id": 2}
_SHARED = {**_TINY, "num_key_value_heads": 2}
_EXPERTS = {**_SHARED, "head_dim": 16, "num_experts_per_tok": 2}

FOUR_BITS = quant.QConfig(weight_bits=4, group_size=64)


def transformers() -> Any:
    """The package; skips where it is not installed."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    return import_library("transformers")


@dataclass(frozen=True)
class Subject:
    """A model, and the classes of it that stay float: none but these.

    Attributes:
        model, config: names of classes of transformers.
        reads: "text" at its decoder alone; "both" text at an encoder and a decoder; "sound".
    """

    model: str
    config: str
    options: dict[str, Any]
    floats: frozenset[str]
    reads: str = "text"

    def make(self, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
        """The model, its weights the same each time."""
        library = transformers()
        torch.manual_seed(0)
        model: nn.Module = getattr(library, self.model)(getattr(library, self.config)(**{**self.options, **options}))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.15)
        return model.eval().to(dtype)

    def prompt(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Two prompts of `generate`."""
        torch.manual_seed(1)
        if self.reads == "sound":
            return {"input_features": torch.randn(2, 16, 64).to(dtype)}
        return {"input_ids": torch.randint(3, WORDS, (2, LENGTH))}

    def recipe(self, bits: int) -> quant.Recipe:
        """Of 8 bits, or of 4 in groups. T5's table of relative positions has a column for each head, and no groups."""
        rules = {"*relative_attention_bias": None} if bits == 4 and self.reads == "both" else {}
        return quant.Recipe(rules, default=quant.QConfig() if bits == 8 else FOUR_BITS)

    def batch(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """The arguments of a call."""
        prompt = self.prompt(dtype)
        return prompt if self.reads == "text" else {**prompt, "decoder_input_ids": torch.randint(3, WORDS, (2, LENGTH))}


def _subject(name: str, floats: str, reads: str = "text", *, model: str = "", **options: Any) -> Subject:
    return Subject(model or f"{name}ForCausalLM", f"{name}Config", options, frozenset(floats.split()), reads)


SUBJECTS: dict[str, Subject] = {
    "llama": _subject("Llama", "LlamaRMSNorm LlamaRotaryEmbedding", **_SHARED),
    "llama_tied": _subject("Llama", "LlamaRMSNorm LlamaRotaryEmbedding", **_SHARED, tie_word_embeddings=True),
    "qwen2": _subject("Qwen2", "Qwen2RMSNorm Qwen2RotaryEmbedding", **_SHARED),
    "qwen3": _subject("Qwen3", "Qwen3RMSNorm Qwen3RotaryEmbedding", **_SHARED, head_dim=16),
    "gemma2": _subject(
        "Gemma2",
        "Gemma2RMSNorm Gemma2RotaryEmbedding Gemma2TextScaledWordEmbedding",
        **_SHARED,
        head_dim=16,
        sliding_window=16,
    ),
    "gpt2": _subject(
        "GPT2",
        "LayerNorm",
        model="GPT2LMHeadModel",
        **TINY_GPT2,
        pad_token_id=0,
    ),
    "mixtral": _subject(
        "Mixtral", "MixtralRMSNorm MixtralRotaryEmbedding MixtralTopKRouter", **_EXPERTS, num_local_experts=4
    ),
    "qwen3_moe": _subject(
        "Qwen3Moe",
        "Qwen3MoeRMSNorm Qwen3MoeRotaryEmbedding Qwen3MoeTopKRouter",
        **_EXPERTS,
        num_experts=4,
        moe_intermediate_size=64,
    ),
    "gpt_oss": _subject(
        "GptOss",
        "GptOssAttention GptOssRMSNorm GptOssRotaryEmbedding GptOssTopKRouter",
        **_EXPERTS,
        num_local_experts=4,
    ),
    "t5": _subject(
        "T5",
        "T5LayerNorm Embedding",
        "both",
        model="T5ForConditionalGeneration",
        **TINY_T5,
    ),
    "whisper": _subject(
        "Whisper",
        "Conv1d LayerNorm WhisperPositionalEmbedding",
        "sound",
        model="WhisperForConditionalGeneration",
        **TINY_WHISPER,
    ),
}

EACH: Callable[[Any], Any] = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=list(SUBJECTS))
EACH_BITS: Callable[[Any], Any] = pytest.mark.parametrize("bits", [8, 4])


def relative_error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.float() - expected.float()).norm() / expected.float().norm())
