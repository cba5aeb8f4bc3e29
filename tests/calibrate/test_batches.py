"""Which part of a batch reaches forward: the rule of calibrate/batches.py, case by case."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from quant.calibrate.batches import Caller, count_samples, describe, fingerprint, fingerprint_of_tensors
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

X, Y, Z = torch.zeros(4, 3), torch.ones(4, dtype=torch.int64), torch.full((4, 2), 2.0)


class One(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class OneAndOptional(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x


class Two(nn.Module):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x


class OnlyOptional(nn.Module):
    def forward(self, input_ids: Tensor | None = None, embeds: Tensor | None = None) -> None:
        return None


class Anything(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> None:
        return None


class ItselfToo(nn.Module):
    def forward(*args: Any, **kwargs: Any) -> None:
        return None


class ByName(nn.Module):
    def forward(self, x: Tensor, /, *, scale: float = 1.0) -> Tensor:
        return x * scale


PACKED = pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)])

CASES = {
    "a tensor": (One(), X, (X,), {}, 0),
    "an input and a label": (One(), (X, Y), (X,), {}, 0),
    "a list, as DataLoader collates": (One(), [X, Y], (X,), {}, 0),
    "an input in a tuple": (One(), (X,), (X,), {}, 0),
    "two inputs and a label": (Two(), (X, Y, Z), (X, Y), {}, 0),
    "a label never fills an optional parameter": (OneAndOptional(), (X, Y), (X,), {}, 1),
    "the only parameters are optional": (OnlyOptional(), (X, Y), (X,), {}, 1),
    "the only parameters are optional, one tensor": (OnlyOptional(), (X,), (X,), {}, 0),
    "a forward that takes anything": (Anything(), (X, Y), (X,), {}, 1),
    "a forward that takes itself among its arguments": (ItselfToo(), (X, Y), (X,), {}, 1),
    "a packed sequence is one input": (One(), PACKED, (PACKED,), {}, 0),
    "a nested input": (One(), ([X, Z], Y), ([X, Z],), {}, 0),
    "a dict": (Two(), {"x": X, "lengths": Y}, (), {"x": X, "lengths": Y}, 0),
    "a dict with a label": (One(), {"x": X, "label": Y}, (), {"x": X}, 1),
    "a dict for optional parameters": (OneAndOptional(), {"x": X, "mask": Z}, (), {"x": X, "mask": Z}, 0),
    "a dict that is no dict": (OnlyOptional(), UserDict(input_ids=X), (), {"input_ids": X}, 0),
    "a dict for a forward that takes anything": (Anything(), {"a": X}, (), {"a": X}, 0),
    "a dict as the one argument": (One(), {"image": X}, ({"image": X},), {}, 0),
    "a positional-only parameter is no keyword": (ByName(), {"x": X}, ({"x": X},), {}, 0),
}


@pytest.mark.parametrize(("model", "batch", "args", "kwargs", "doubts"), CASES.values(), ids=CASES.keys())
def test_the_rule(model: nn.Module, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any], doubts: int) -> None:
    caller = Caller(model)
    for _ in range(2):
        found_args, found_kwargs = caller.arguments(batch)
    assert [identity(value) for value in found_args] == [identity(value) for value in args]
    assert {key: id(value) for key, value in found_kwargs.items()} == {key: id(value) for key, value in kwargs.items()}
    assert len(caller.doubts) == doubts


def identity(value: Any) -> Any:
    return id(value) if isinstance(value, Tensor) else [id(part) for part in value]


def test_a_replaced_forward_does_not_hide_the_class_s() -> None:
    model = Two()
    model.forward = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    assert Caller(model).arguments((X, Y, Z)) == ((X, Y), {})


def test_data_parallel_does_not_hide_the_model_s_forward() -> None:
    caller = Caller(nn.DataParallel(Two()))
    assert caller.arguments((X, Y, Z)) == ((X, Y), {})
    assert caller.doubts == []


def test_too_few_elements_say_what_forward_requires() -> None:
    with pytest.raises(ValueError, match="has 1 elements, and the model's forward requires x, lengths"):
        Caller(Two()).arguments((X,))


@pytest.mark.parametrize("batch", [None, "photos/", 3, np.zeros(3)], ids=["None", "a string", "a number", "numpy"])
def test_what_is_no_batch_is_refused(batch: Any) -> None:
    with pytest.raises(TypeError, match=f"the batch is a {type(batch).__name__}, expected a tensor"):
        Caller(One()).arguments(batch)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (X, 4),
        ((X[:2], Y), 2),
        ({"a": torch.tensor(1.0), "b": X}, 4),
        (PACKED, 2),
        (torch.tensor(1.0), 1),
        ([], 1),
        (np.zeros((5, 2)), 5),
        ((np.float32(1), {"x": np.zeros((6, 2))}), 6),
        (np.zeros((5, 2)).tolist(), 1),
        (["a", "b", "c"], 3),
        (({"text": ["a", "b", "c"]}, [1, 2]), 3),
        (({"text": ["a", "b"]}, X), 4),
        ("abc", 1),
    ],
    ids=[
        *("tensor", "pair", "after a scalar", "packed", "scalar", "nothing", "array", "array in a dict", "numbers"),
        *("texts", "texts in a dict", "texts beside a tensor", "a text"),
    ],
)
def test_count_samples(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples


def test_describe() -> None:
    assert describe((X, {"y": Y}, None)) == "(float32 [4, 3], {y: int64 [4]}, NoneType)"


def test_a_fingerprint_tells_batches_apart() -> None:
    big = torch.arange(100_000.0)
    last = torch.cat((big[:-1], torch.zeros(1)))  # falls between those that are looked at
    batches: list[Any] = [
        X,
        Y,
        (X, Y),
        (Y, X),
        X.double(),
        X.reshape(3, 4),
        big,
        big.flip(0),
        big[:-1],
        last,
        -big,
        PACKED,
    ]
    batches += [torch.zeros(0), torch.tensor(1.0), torch.zeros(2, dtype=torch.bfloat16), torch.eye(3).to_sparse()]
    assert len({fingerprint(batch) for batch in batches}) == len(batches)
    assert fingerprint((X.clone(), Y.clone())) == fingerprint((X, Y))
    assert fingerprint(big.reshape(2, -1).t()) == fingerprint(big.reshape(2, -1).t().contiguous())


def test_a_fingerprint_tells_arrays_texts_and_numbers_apart() -> None:
    array = np.arange(100_000.0)
    batches: list[Any] = [array, array[::-1], array.astype(np.float32), array.reshape(2, -1), array + 1, np.zeros(0)]
    batches += [["ab", "c"], ["a", "bc"], ["ab"], "ab", b"ab", [["ab"], ["c"]], {"text": ["ab", "c"]}]
    batches += [1, 2, True, 1.0, np.float32(1), (X, 1), (X, 2), X, [1, 2], [12], np.array(["ab", "c"], dtype=object)]
    assert len({fingerprint(batch) for batch in batches}) == len(batches)
    assert fingerprint((array.copy(), ["ab", "c"], 3)) == fingerprint((array, ["ab", "c"], 3))


def test_a_fingerprint_of_tensors_is_that_of_earlier_versions() -> None:
    assert fingerprint((X, {"y": Y}, None)) == fingerprint_of_tensors((X, {"y": Y}, None))
