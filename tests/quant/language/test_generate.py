"""Language models as they are downloaded: half types, tied tables, experts, and `generate()` with its caches."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant

from .models import EACH, EACH_BITS, FOUR_BITS, SUBJECTS, Subject, relative_error

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers warns of on its own account

STEPS = 8


def generated(model: nn.Module, prompt: dict[str, Tensor], **options: object) -> Any:
    fixed = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
    return model.generate(**prompt, **fixed, **options)  # type: ignore[operator]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
@EACH
@torch.inference_mode()
def test_a_checkpoint_of_any_float_type_is_near_its_float_model(subject: Subject, dtype: torch.dtype) -> None:
    model = subject.make(dtype)
    q = quant.quantize_dynamic(model)
    found = q(**subject.batch(dtype)).logits
    assert found.dtype is dtype
    # Rounding may send a token to another expert, and then its output is another one.
    assert relative_error(found, model(**subject.batch(dtype)).logits) < (
        0.35 if "Router" in str(subject.floats) else 0.12
    )


@EACH_BITS
@EACH
def test_the_report_names_every_class_that_stays_float(subject: Subject, bits: int) -> None:
    report = quant.summary(quant.quantize_dynamic(subject.make(torch.bfloat16), subject.recipe(bits)))
    left = {entry.type for entry in report if entry.outcome == "float"}
    assert left <= subject.floats
    assert all(entry.detail for entry in report)


def assert_same_tokens(model: nn.Module, prompt: dict[str, Tensor], *options: dict[str, object]) -> None:
    """Greedy tokens are the same in two ways of calling, up to the first near tie of a text.

    Attention adds up in another order with another cache, and its last bit may move a value of the next layer by one
    step of 8 bits. Two words whose scores lie within a few such steps are then taken either way.
    """
    both = [generated(model, prompt, output_logits=True, return_dict_in_generate=True, **each) for each in options]
    words = [one.sequences[:, -STEPS:] for one in both]
    for text in range(len(words[0])):
        different = (words[0][text] != words[1][text]).nonzero()
        if not len(different):
            continue
        step = int(different[0])
        scores = both[0].logits[step][text]
        gap = scores[words[0][text, step]] - scores[words[1][text, step]]
        assert step > 0
        assert 0 <= gap <= 0.02 * scores.abs().max()


@EACH_BITS
@EACH
@torch.inference_mode()
def test_greedy_tokens_are_those_of_one_shot(subject: Subject, bits: int) -> None:
    """With a cache each token is a call of one row; without, of all of them."""
    q = quant.quantize_dynamic(subject.make(), subject.recipe(bits))
    assert_same_tokens(q, subject.prompt(), {}, {"use_cache": False})


@EACH_BITS
@EACH
@torch.inference_mode()
def test_a_static_cache_gives_the_same_tokens(subject: Subject, bits: int) -> None:
    q = quant.quantize_dynamic(subject.make(), subject.recipe(bits))
    assert_same_tokens(q, subject.prompt(), {}, {"cache_implementation": "static"})


@EACH
@torch.inference_mode()
def test_beams_reorder_the_cache(subject: Subject) -> None:
    q = quant.quantize_dynamic(subject.make())
    prompt = subject.prompt()
    assert torch.equal(generated(q, prompt, num_beams=3), generated(q, prompt, num_beams=3, use_cache=False))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt2", "mixtral"])
@torch.inference_mode()
def test_a_padded_prompt_gives_the_tokens_that_it_gives_alone(name: str) -> None:
    """Each row of activations has a range of its own, so that no row feels its neighbours or padding."""
    subject = SUBJECTS[name]
    q = quant.quantize_dynamic(subject.make(), quant.Recipe(default=FOUR_BITS))
    ids = subject.prompt()["input_ids"].clone()
    ids[1, :3] = 0
    mask = (torch.arange(ids.shape[1]) >= 3).long().expand_as(ids).clone()
    mask[0] = 1
    together = generated(q, {"input_ids": ids, "attention_mask": mask})
    assert torch.equal(together[:1], generated(q, {"input_ids": ids[:1]}))
    assert torch.equal(together[1:, 3:], generated(q, {"input_ids": ids[1:, 3:]}))


@pytest.mark.filterwarnings("error::quant.types.UncapturedCall")
@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "gpt2", "gemma2", "mixtral"])
def test_programs_of_a_dynamic_decoder_generate_its_tokens(name: str) -> None:
    """What was loaded as int4 is prepared as it is; a call that no program stands for would be an error."""
    subject = SUBJECTS[name]
    q, prompt = quant.quantize_dynamic(subject.make(), quant.Recipe(default=FOUR_BITS)), subject.prompt()
    prepared = quant.prepare(q, prompt, recipe=quant.Recipe(default=None))
    with torch.no_grad():
        for length in (prompt["input_ids"].shape[1], 5):
            generated(prepared, {**prompt, "input_ids": prompt["input_ids"][:, :length]})
    programs = quant.convert(prepared)
    with torch.inference_mode():
        assert torch.equal(generated(programs, prompt), generated(q, prompt))
    [*_, step] = [entry.detail for entry in quant.summary(programs) if entry.name.startswith("(planned run")]
    if name not in ("gemma2", "mixtral"):  # a scaled table and windows, and a choice of experts, are torch's
        assert int(re.findall(r"native calls: (\d+)", step)[0]) <= 3


def test_int8_modules_alone_are_not_trained() -> None:
    q = quant.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    with pytest.raises(quant.types.NothingQuantized, match="no layer can be quantised"):
        quant.prepare_qat(q, torch.randn(2, 8), recipe=quant.Recipe(default=None))


def test_weights_of_a_half_type_have_the_integers_of_their_float_values() -> None:
    subject = SUBJECTS["llama"]
    half = subject.make(torch.bfloat16)
    recipe = quant.Recipe(default=FOUR_BITS)
    q, exact = (
        quant.quantize_dynamic(model, recipe).state_dict()
        for model in (half, subject.make().to(torch.bfloat16).float())
    )
    names = [name for name in q if name.endswith(("q_weight", "rows", ".scale"))]
    assert len(names) > 20
    assert all(torch.equal(q[name], exact[name]) for name in names)


def test_a_tied_table_is_stored_once() -> None:
    q = quant.quantize_dynamic(SUBJECTS["llama_tied"].make(torch.bfloat16), quant.Recipe(default=FOUR_BITS))
    table, head = q.get_submodule("model.embed_tokens"), q.get_submodule("lm_head")
    assert table.q_weight is head.q_weight
    report = quant.summary(q)
    assert (
        sum(entry.bytes_after for entry in report if entry.name in ("model.embed_tokens", "lm_head"))
        < 0.29 * WORDS_BYTES
    )


WORDS_BYTES = 128 * 64 * 2
"""Of the table in bfloat16."""


@torch.inference_mode()
def test_experts_are_int8_layers_each() -> None:
    subject = SUBJECTS["gpt_oss"]  # with biases, and its weights the other way round
    model = subject.make()
    q = quant.quantize_dynamic(model)
    entry = quant.summary(q)["model.layers.0.mlp.experts"]
    assert entry.outcome == "int8"
    assert entry.bytes_after < 0.3 * entry.bytes_before
    experts, own = q.get_submodule("model.layers.0.mlp.experts"), model.get_submodule("model.layers.0.mlp.experts")
    x = torch.randn(6, 64)
    index = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [1, 3]])
    weights = torch.rand(6, 2)
    assert relative_error(experts(x, index, weights), own(x, index, weights)) < 0.03
