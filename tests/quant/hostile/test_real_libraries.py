"""The real models behind the small ones of the catalogue; skipped where their library is not installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant

# What the libraries warn of on their own account.
pytestmark = [
    pytest.mark.usefixtures("seeded_on_one_thread", "torchvision_loads"),
    pytest.mark.filterwarnings("ignore"),
]

SIZES = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


@torch.no_grad()
def decibels(expected: Tensor, found: Tensor) -> float:
    assert expected.shape == found.shape
    error = (expected.double() - found.double()).square().sum().clamp(min=1e-30)
    return float(10 * torch.log10(expected.double().square().sum() / error))


def static(model: nn.Module, batches: list[dict[str, Any]]) -> nn.Module:
    return quant.quantize_static(model.eval(), batches, forward=lambda m, b: m(**b), progress=False)


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(5, 200, (rows, length))


def padded(rows: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[1:, length - 3 :] = 0
    return {"input_ids": tokens(rows, length), "attention_mask": mask}


def llama(library: Any) -> nn.Module:
    config = library.LlamaConfig(**SIZES, intermediate_size=128, num_key_value_heads=2, pad_token_id=0)
    return library.LlamaForCausalLM(config).eval()


def gpt2(library: Any) -> nn.Module:
    return library.GPT2LMHeadModel(library.GPT2Config(vocab_size=200, n_embd=64, n_layer=2, n_head=4)).eval()


def mixtral(library: Any) -> nn.Module:
    config = library.MixtralConfig(**SIZES, intermediate_size=64, num_key_value_heads=2, num_local_experts=4)
    return library.MixtralForCausalLM(config).eval()


def bert(library: Any) -> nn.Module:
    return library.BertModel(library.BertConfig(**SIZES, intermediate_size=128)).eval()


@torch.no_grad()
@pytest.mark.parametrize("make", [llama, gpt2, mixtral])
def test_a_decoder_on_a_padded_batch_with_its_own_cache(library: Any, make: Callable[[Any], nn.Module]) -> None:
    model = make(library)
    q = static(model, [padded(4, 16) for _ in range(3)])
    for batch in (padded(4, 16), padded(2, 10), {"input_ids": tokens(2, 12)}):
        expected, found = model(**batch), q(**batch)
        assert type(found) is type(expected)
        assert found.past_key_values.get_seq_length() == batch["input_ids"].shape[1]
        assert decibels(expected.logits, found.logits) > (15 if make is not mixtral else 10)


@torch.no_grad()
@pytest.mark.parametrize("make", [llama, gpt2])
def test_generate_grows_the_cache_step_by_step(library: Any, make: Callable[[Any], nn.Module]) -> None:
    model = make(library)
    q = static(model, [padded(2, 16) for _ in range(2)])
    prompt = tokens(2, 8)
    out = q.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    again = prompt
    for _ in range(6):
        again = torch.cat([again, q(input_ids=again, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    assert out.shape == again.shape
    assert (out == again).float().mean() > 0.7


@torch.no_grad()
def test_hidden_states_of_an_encoder(library: Any) -> None:
    model = bert(library)
    batch = {"input_ids": tokens(2, 16), "output_hidden_states": True}
    q = static(model, [batch] * 2)
    expected, found = model(**batch).hidden_states, q(**batch).hidden_states
    assert len(found) == len(expected) == 3
    assert all(decibels(one, other) > 20 for one, other in zip(expected, found, strict=True))


@torch.no_grad()
def test_an_unpadded_batch_after_padded_ones(library: Any) -> None:
    model = bert(library)
    q = static(model, [padded(2, 16)] * 2)
    batch = {"input_ids": tokens(2, 16), "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    assert decibels(model(**batch).last_hidden_state, q(**batch).last_hidden_state) > 20


def test_the_trainer_with_its_callback(library: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from quant.integrations.transformers import QATCallback

    model = library.BertForSequenceClassification(library.BertConfig(**SIZES, intermediate_size=128))
    mask = torch.tensor([1] * 12 + [0] * 4)
    data = [
        {"input_ids": tokens(1, 16)[0], "attention_mask": mask, "labels": torch.tensor(index % 2)}
        for index in range(64)
    ]
    p = quant.prepare_qat(model, {key: torch.stack([row[key] for row in data[:4]]) for key in data[0]})
    arguments = library.TrainingArguments(
        str(tmp_path), max_steps=3, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    library.Trainer(p, arguments, train_dataset=data, callbacks=[QATCallback()]).train()
    assert "logits" in quant.convert(p.eval())(input_ids=tokens(2, 16), attention_mask=mask.expand(2, -1))


@torch.no_grad()
def test_the_share_of_float_of_a_decoder_counts_its_own_layers(library: Any) -> None:
    model = gpt2(library)
    total = sum(parameter.numel() * 4 for parameter in model.parameters())
    report = quant.summary(quant.quantize_dynamic(model))
    line = next(line for line in str(report).splitlines() if "of float" in line)
    assert f"{total / 1024:.1f} KiB" in line, line


def test_from_pretrained_does_not_load_random_weights(library: Any, tmp_path: Path) -> None:
    """What Hugging Face's own methods cannot bring back is an error, or is brought back."""
    model = bert(library)
    q = quant.quantize_dynamic(model)
    x = tokens(2, 8)
    with torch.no_grad():
        expected = q(input_ids=x).last_hidden_state
    try:
        q.save_pretrained(tmp_path)
        restored = library.BertModel.from_pretrained(tmp_path).eval()
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        assert "quant" in str(error)  # noqa: PT017
        return
    with torch.no_grad():
        assert decibels(expected, restored(input_ids=x).last_hidden_state) > 20


@torch.no_grad()
def test_a_detector_unedited() -> None:
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    from torchvision.models import detection

    model = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4).eval()
    batches = [([torch.rand(3, 80, 96), torch.rand(3, 64, 64)],) for _ in range(2)]
    q = quant.quantize_static(model, batches, forward=lambda m, b: m(*b), progress=False)
    convolutions = [entry for entry in quant.summary(q) if "Conv2d" in entry.type]
    assert sum(entry.outcome == "int8" for entry in convolutions) > 0.9 * len(convolutions)
    for images in ([torch.rand(3, 80, 96)], [torch.rand(3, 64, 96)] * 3):
        found = q(images)
        assert [set(one) for one in found] == [{"boxes", "scores", "labels"}] * len(images)
