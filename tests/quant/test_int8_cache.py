"""Keys and values of transformers' decoders as int8."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import EncoderDecoderCache

from quant.integrations.int8_cache import Held, Int8Cache, Int8CacheLayer, octet_attention, octet_mask

SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""The argument, whose name transformers has changed."""
implementations = pytest.mark.parametrize("attention", ["octet", "sdpa"])


def llama(attention: str = "sdpa", dtype: torch.dtype = torch.float32, **other: Any) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, **other)
    model: Any = LlamaForCausalLM(config).eval().to(dtype)
    model.set_attn_implementation(attention)
    return model  # type: ignore[no-any-return]


def db(y: Tensor, expected: Tensor) -> float:
    return 20 * math.log10(float(expected.norm() / (y - expected).norm()))


def steps(model: Any, cache: Any, tokens: Tensor, at: tuple[int, ...], **call: Any) -> Tensor:
    """The logits of tokens that come in parts."""
    with torch.no_grad():
        parts = tokens.split(at, 1)
        return torch.cat([model(part, use_cache=True, **{CACHE: cache}, **call).logits for part in parts], 1)


@implementations
@pytest.mark.parametrize("parts", [(20, *(1,) * 10), (1,) * 30, (9, 21), (10, 15, 5), (30,)], ids=str)
def test_logits_are_those_of_a_float_cache(attention: str, parts: tuple[int, ...]) -> None:
    tokens = torch.randint(97, (3, 30), generator=torch.Generator().manual_seed(1))
    model = llama(attention)
    expected = steps(model, DynamicCache(), tokens, (30,))
    cache = Int8Cache(model)
    y = steps(model, cache, tokens, parts)
    assert cache.get_seq_length() == 30
    assert db(y, expected) > 38 if len(parts) > 1 else torch.equal(y, expected)


@pytest.mark.parametrize("parts", [(20, *(1,) * 10), (1,) * 30], ids=str)
def test_both_attentions_read_the_same_numbers(parts: tuple[int, ...]) -> None:
    tokens = torch.randint(97, (2, 30), generator=torch.Generator().manual_seed(2))
    one, other = (steps(model, Int8Cache(model), tokens, parts) for model in (llama("octet"), llama("sdpa")))
    torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


@implementations
@pytest.mark.parametrize("how", [{"num_beams": 3}, {"do_sample": False}], ids=["beams", "greedy"])
def test_generate(attention: str, how: dict[str, Any]) -> None:
    """Of random weights the best token is far enough from the next for most of these."""
    model: Any = llama(attention)
    prompt = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(3))
    padding = torch.ones_like(prompt)
    padding[1, :5] = 0
    more = {"attention_mask": padding, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None, **how}
    expected = model.generate(prompt, **more)
    found = model.generate(prompt, **{CACHE: Int8Cache(model)}, **more)
    assert found.shape == expected.shape
    assert float((found == expected).float().mean()) > 0.8


def test_a_padded_batch_has_the_logits_of_its_rows() -> None:
    model = llama("octet")
    tokens = torch.randint(3, 97, (1, 14), generator=torch.Generator().manual_seed(4))
    alone = steps(model, Int8Cache(model), tokens, (10, 1, 1, 1, 1))
    both, mask = torch.zeros(2, 20, dtype=torch.long), torch.ones(2, 20, dtype=torch.long)
    both[0], both[1, 6:], mask[1, :6] = torch.arange(3, 23), tokens[0], 0
    cache, places, found = Int8Cache(model), (mask.cumsum(1) - 1).clamp(min=0), []
    for start, end in ((0, 16), (16, 17), (17, 18), (18, 19), (19, 20)):
        call = {"attention_mask": mask[:, :end], "position_ids": places[:, start:end]}
        found.append(steps(model, cache, both[:, start:end], (end - start,), **call))
    torch.testing.assert_close(torch.cat(found, 1)[1:, 6:], alone, rtol=0, atol=1e-4)


def test_bytes() -> None:
    model = llama("octet")
    tokens = torch.randint(97, (4, 800))
    cache, of_reals = Int8Cache(model), DynamicCache()
    steps(model, cache, tokens, (800,))
    steps(model, of_reals, tokens, (800,))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in of_reals.layers)
    # A quarter, a scale for each 16 values, and room for a quarter of the tokens and 64.
    assert cache.nbytes < held * (0.25 + 1 / 16) * (1.25 + 64 / 800)


@implementations
def test_half_types_and_int4_layers(attention: str) -> None:
    model = llama(attention, torch.bfloat16)
    recipe = quant.Recipe(default=quant.QConfig(weight_bits=4, group_size=32))
    q = quant.quantize_dynamic(model, recipe)
    tokens = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(5))
    expected = steps(q, DynamicCache(), tokens, (16, *(1,) * 8))
    y = steps(q, Int8Cache(q), tokens, (16, *(1,) * 8))
    assert y.dtype == torch.bfloat16
    assert db(y.float(), expected.float()) > 25


def test_crop_reorder_and_reset() -> None:
    model = llama("octet")
    tokens = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(6))
    cache = Int8Cache(model)
    steps(model, cache, tokens, (15, 5))
    cache.crop(-5)
    assert cache.get_seq_length() == 15
    again = steps(model, cache, tokens[:, 15:], (5,))
    fresh = Int8Cache(model)
    expected = steps(model, fresh, tokens, (15, 5))[:, 15:]
    assert torch.equal(again, expected)
    cache.reorder_cache(torch.tensor([1, 0]))
    for one, other in zip(cache.layers, fresh.layers, strict=True):
        assert torch.equal(one.keys, other.keys.flip(0))
        assert torch.equal(one.values, other.values.flip(0))
    cache.batch_repeat_interleave(2)
    assert cache.layers[0].keys.shape[0] == 4
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(steps(model, cache, tokens, (15, 5))[:, 15:], expected)


def test_gpt2() -> None:
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=4)).eval()
    model.set_attn_implementation("octet")
    tokens = torch.randint(97, (2, 20))
    assert db(steps(model, Int8Cache(model), tokens, (12, *(1,) * 8)), steps(model, DynamicCache(), tokens, (20,))) > 38


def test_layers_with_a_window_keep_theirs() -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 4},
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    model: Any = Gemma3ForCausalLM(config).eval()
    model.set_attn_implementation("octet")
    cache = Int8Cache(model)
    assert [isinstance(layer, Int8CacheLayer) for layer in cache.layers] == [False, True] * 2
    tokens = torch.randint(97, (2, 20))
    expected = steps(model, DynamicCache(config=config), tokens, (12, *(1,) * 8))
    assert db(steps(model, cache, tokens, (12, *(1,) * 8)), expected) > 35


@implementations
def test_an_encoder_and_a_decoder(attention: str) -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=97,
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    model: Any = T5ForConditionalGeneration(config).eval()
    model.set_attn_implementation(attention)
    prompt = torch.randint(3, 97, (2, 9))
    cache = EncoderDecoderCache(Int8Cache(model), Int8Cache(model))
    more: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    expected, found = model.generate(prompt, **more), model.generate(prompt, **{CACHE: cache}, **more)
    assert db(found.logits[0], expected.logits[0]) > 30


def test_what_else_computes_with_the_keys_gets_reals() -> None:
    layer = Int8Cache(llama("octet")).layers[0]
    layer.update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16))
    keys, values = layer.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16))
    assert isinstance(keys, Held)
    assert keys.shape == (1, 2, 4, 16)
    doubled, mixed = keys * 2, torch.cat([keys, values], 1)
    assert type(doubled) is Tensor
    assert torch.equal(doubled, 2 * layer.keys)
    assert torch.equal(mixed, torch.cat([layer.keys, layer.values], 1))
    q = torch.randn(1, 2, 1, 16)
    y = nn.functional.scaled_dot_product_attention(q, keys, values)
    assert torch.equal(y, nn.functional.scaled_dot_product_attention(q, layer.keys, layer.values))


def test_a_copied_cache_follows_no_later_attention_and_is_right() -> None:
    model: Any = llama("octet")
    tokens = torch.randint(97, (1, 12), generator=torch.Generator().manual_seed(7))
    cache = Int8Cache(model)
    steps(model, cache, tokens[:, :8], (8,))
    copied = copy.deepcopy(cache)
    expected = steps(model, cache, tokens[:, 8:], (1,) * 4)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(steps(model, copied, tokens[:, 8:], (1,) * 4), expected, rtol=0, atol=2e-5)


def test_several_tokens_see_those_before_them_without_a_mask_too() -> None:
    model = llama("octet")
    layer, module = Int8Cache(model).layers[0], model.get_submodule("model.layers.0.self_attn")
    layer.update(torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16))
    held, q = layer.update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)), torch.randn(1, 4, 3, 16)
    one, _ = octet_attention(module, q, *held, None)
    other, _ = octet_attention(module, q.clone().requires_grad_(), *held, None)
    torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-5)
    for queries in (3, 1):
        mask = octet_mask(batch_size=1, q_length=queries, kv_length=12, q_offset=12 - queries, kv_offset=0)
        assert (mask is None) == (queries == 1)


def test_gradients_are_an_error() -> None:
    model: Any = llama("octet")
    with pytest.raises(ValueError, match="keys or values have a gradient, which integers have not"):
        model(torch.randint(97, (1, 4)), use_cache=True, **{CACHE: Int8Cache(model)})


def test_a_mask_of_integers_is_an_error() -> None:
    model = llama("octet")
    layer, module = Int8Cache(model).layers[0], model.get_submodule("model.layers.0.self_attn")
    layer.update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16))
    held = layer.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16))
    with pytest.raises(TypeError, match=r"attention_mask is torch.int64, expected bool"):
        octet_attention(module, torch.randn(1, 4, 1, 16), *held, torch.ones(1, 1, 1, 4, dtype=torch.int64))


@pytest.mark.parametrize("name", ["indices", "block_indices", "s_aux"])
def test_keys_that_a_model_chooses_are_refused(name: str) -> None:
    q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 3, 16)
    with pytest.raises(ValueError, match=f"the attention 'octet' has no '{name}', which Identity asks for"):
        octet_attention(nn.Identity(), q, k, k, None, **{name: torch.zeros(1)})


def test_scores_that_are_bent_want_another_attention() -> None:
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Gemma2Config(**SMALL, **heads, layer_types=["full_attention"] * 2)
    model: Any = Gemma2ForCausalLM(config).eval()
    model.set_attn_implementation("octet")
    tokens = torch.randint(97, (2, 12))
    with pytest.raises(ValueError, match="the attention 'octet' has no 'softcap', which Gemma2Attention asks for"):
        steps(model, Int8Cache(model), tokens, (12,))
    model.set_attn_implementation("eager")
    expected = steps(model, DynamicCache(), tokens, (8, *(1,) * 4))
    assert db(steps(model, Int8Cache(model), tokens, (8, *(1,) * 4)), expected) > 38


def test_a_decoder_of_more_layers_than_its_encoder() -> None:
    assert len(Int8Cache(T5Config(num_layers=1, num_decoder_layers=3)).layers) == 3


def test_another_batch_is_an_error() -> None:
    layer = Int8Cache(llama()).layers[0]
    layer.update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16))
    with pytest.raises(ValueError, match=r"the cache is of 1 samples and 2 heads; begin with a new cache"):
        layer.update(torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16))


def test_a_model_without_such_a_layer_is_an_error() -> None:
    with pytest.raises(ValueError, match="no layer of LlamaConfig attends to all earlier tokens"):
        Int8Cache(LlamaConfig(**{**SMALL, "num_hidden_layers": 0}, num_attention_heads=4))


def test_another_device_is_an_error() -> None:
    layer = Int8Cache(llama()).layers[0]
    with pytest.raises(ValueError, match="keys are on meta, expected the CPU"):
        layer.update(torch.randn(1, 2, 3, 16, device="meta"), torch.randn(1, 2, 3, 16, device="meta"))
