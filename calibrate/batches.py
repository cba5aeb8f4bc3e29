"""The rule by which a model is called with a batch, the number of samples in it, and its description in messages.

The rule, from the parameters that the model's own forward requires (`type(model).forward`):

    tensor, or any other object    forward(batch)
    tuple or list                  as many of its first elements as forward requires, and at least one; the rest are
                                   labels. So of an (input, label) pair the input is used, and an optional parameter
                                   is never filled by what may be a label.
    mapping                        forward(**batch), without the keys that forward does not take; forward(batch) where
                                   it takes none of them

`forward=lambda model, batch: ...` of `run` decides otherwise.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""

SAMPLED = 4096
"""Number of values of each tensor or array that a fingerprint covers."""


@dataclass
class Signature:
    """The parameters of a forward.

    Attributes:
        required: names of the positional parameters without a default.
        optional: names of those with one.
        keywords: every parameter that can be passed by name.
        more, any_keyword: whether it takes *args, **kwargs.
    """

    required: list[str] = field(default_factory=list)
    optional: list[str] = field(default_factory=list)
    keywords: set[str] = field(default_factory=set)
    more: bool = False
    any_keyword: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> Signature:
        """The signature of the class's forward; a forward set on the instance may take any arguments."""
        while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        signature = cls()
        first, *others = inspect.signature(type(model).forward).parameters.values()
        for parameter in [first, *others] if first.kind is first.VAR_POSITIONAL else others:  # forward(*args)
            kind = parameter.kind
            if kind is parameter.VAR_POSITIONAL:
                signature.more = True
            elif kind is parameter.VAR_KEYWORD:
                signature.any_keyword = True
            else:
                if kind is not parameter.POSITIONAL_ONLY:
                    signature.keywords.add(parameter.name)
                if kind is not parameter.KEYWORD_ONLY:
                    has_default = parameter.default is not parameter.empty
                    (signature.optional if has_default else signature.required).append(parameter.name)
        return signature


class Caller:
    """Calls one model with batches, by the rule of this file.

    Attributes:
        doubts: warnings of cases in which the rule may not be what the user meant, each once.
    """

    def __init__(self, model: nn.Module) -> None:
        self.signature = Signature.of(model)
        self.doubts: list[str] = []

    def arguments(self, batch: Any) -> Arguments:
        """The arguments that `batch` stands for.

        Raises:
            TypeError: a model cannot take it: None, a string, a number, a numpy array.
            ValueError: it has fewer elements than forward requires.
        """
        if isinstance(batch, Mapping):
            return self._of_mapping(batch)
        if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence):
            return self._of_sequence(batch)
        if batch is None or isinstance(batch, (str, bytes, int, float)) or type(batch).__module__ == "numpy":
            raise TypeError(
                f"the batch is a {type(batch).__name__}, expected a tensor, a tuple or a dict (torch.as_tensor makes a "
                "tensor)"
            )
        return (batch,), {}

    def _of_sequence(self, batch: tuple[Any, ...] | list[Any]) -> Arguments:
        if len(batch) == 2 and isinstance(batch[0], Mapping) and batch[0] and set(batch[0]) <= self.signature.keywords:
            return (), dict(batch[0])  # a dict of the inputs, and labels
        required = self.signature.required
        used = max(len(required), 1)
        if len(batch) < used:
            raise ValueError(
                f"the batch has {len(batch)} elements, and the model's forward requires {', '.join(required)}"
            )
        spare = self.signature.optional[max(1 - len(required), 0) :]
        if len(batch) > used and (spare or self.signature.more):
            self._doubt(
                f"batches have {len(batch)} elements and forward requires {used}: the rest counts as labels and is not "
                f"used; if it is meant for {', '.join(spare) or '*args'}, give dicts or forward="
            )
        return tuple(batch[:used]), {}

    def _of_mapping(self, batch: Mapping[Any, Any]) -> Arguments:
        if self.signature.any_keyword:
            return (), dict(batch)
        inputs = {key: value for key, value in batch.items() if key in self.signature.keywords}
        if not inputs:
            return (batch,), {}
        left = [str(key) for key in batch if key not in inputs]
        if left:
            self._doubt(f"batches have {', '.join(left)}, which forward does not take: not used")
        return (), inputs

    def _doubt(self, text: str) -> None:
        if text not in self.doubts:
            self.doubts.append(text)


def check_batches(batches: object, who: str, argument: str = "batches") -> None:
    """Raise TypeError for a value that is not an iterable of batches: a single batch, a path, None.

    Args:
        argument: what the caller calls it.
    """
    is_iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if isinstance(batches, (Tensor, Mapping, str)) or not is_iterable:
        raise TypeError(
            f"{who}: {argument} is a {type(batches).__name__}, expected an iterable of batches, as a DataLoader is; "
            "put a single batch in a list"
        )


def check_limit(limit: int | None, who: str) -> None:
    """Raise TypeError or ValueError for a number of batches that is none."""
    if isinstance(limit, bool) or not (limit is None or hasattr(limit, "__index__")):
        raise TypeError(f"{who}: limit is {limit!r}, expected a whole number of batches, or None")
    if limit is not None and limit < 1:
        raise ValueError(f"{who}: limit is {limit}, expected at least 1 batch, or None")


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors(inner)


def _others(value: Any) -> Iterator[Any]:
    """Everything but tensors in nested tuples, lists and mappings, in order; a list of texts is one value."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _others(inner)
    elif isinstance(value, (tuple, list)) and not _are_texts(value):
        for inner in value:
            yield from _others(inner)
    elif not isinstance(value, Tensor):
        yield value


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def count_samples(batch: Any) -> int:
    """Size of the first dimension of the first tensor that has one; sequences in a PackedSequence.

    Without such tensors, that of the first array, or the length of the first list of texts; else 1.
    """
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    of_tensors = (tensor.shape[0] for tensor in tensors(batch) if tensor.dim())
    of_others = (_length(value) for value in _others(batch))
    return next(itertools.chain(of_tensors, (length for length in of_others if length is not None)), 1)


def _length(value: Any) -> int | None:
    """The samples that an array or a list of texts is; None of other values."""
    if _are_texts(value):
        return len(value)
    return int(value.shape[0]) if isinstance(value, numpy.ndarray) and value.ndim else None


def describe(batch: Any) -> str:
    """Shapes and dtypes in a line: `(float32 [8, 3, 32, 32], int64 [8])`."""
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {list(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, (tuple, list)):
        return "(" + ", ".join(map(describe, batch)) + ")"
    return type(batch).__name__


def fingerprint(batch: Any) -> bytes:
    """A hash of a batch that covers SAMPLED values of each tensor, so unequal batches have equal ones only rarely.

    Of what is no tensor it covers arrays in the same way, texts and numbers; of other objects the class.
    """
    own, others = fingerprint_of_tensors(batch), value_bytes(batch)
    return hashlib.sha256(own + others).digest() if others else own


def fingerprint_of_tensors(batch: Any) -> bytes:
    """As `fingerprint`, of the tensors and of what `describe` says; all that earlier versions looked at."""
    seen = hashlib.sha256(describe(batch).encode())
    for tensor in tensors(batch):
        seen.update(sample_bytes(tensor))
    return seen.digest()


def value_bytes(batch: Any) -> bytes:
    """What stands for the arrays, texts and numbers of a batch, in order; empty where it has none."""
    found = []
    for value in _others(batch):
        if isinstance(value, (numpy.ndarray, numpy.generic)) and not value.dtype.hasobject:
            found.append(f"{value.dtype} {list(value.shape)} ".encode() + _array_bytes(numpy.asarray(value)))
        elif isinstance(value, numpy.ndarray):
            found.append(value_bytes(value.tolist()))
        elif isinstance(value, (str, bytes, bool, int, float, complex)) or _are_texts(value):
            found.append(repr(value).encode("utf-8", "surrogatepass"))
    return b"".join(len(one).to_bytes(8, "little") + one for one in found)


def _array_bytes(array: numpy.ndarray[Any, Any]) -> bytes:
    """Up to SAMPLED values at even distances, and the last, as bytes."""
    if not array.size:
        return b""
    flat = array.reshape(-1)
    step = -(-flat.size // SAMPLED)
    return numpy.concatenate((flat[::step], flat[-1:])).tobytes()


def sample_bytes(tensor: Tensor) -> bytes:
    """Up to SAMPLED values at even distances, and the last, as bytes; nothing of a tensor without plain storage."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0:
        return b""
    flat = tensor.detach().reshape(-1)
    step = -(-flat.numel() // SAMPLED)
    chosen = torch.cat((flat[::step], flat[-1:])).cpu().contiguous()
    return chosen.view(torch.uint8).numpy().tobytes()
