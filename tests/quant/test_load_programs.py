"""Files of models with several programs: each is made again from what the file says of it, or from an example."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.runtime.programs import RESERVED
from quant.types import ArtefactError


class Cache:
    """Keys of all calls so far; none at first."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None

    def update(self, k: Tensor) -> Tensor:
        self.keys = k if self.keys is None else torch.cat([self.keys, k], 1)
        return self.keys


class Decoder(nn.Module):
    """Prefill and step, each with a mask or without."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, cache: Cache | None = None, mask: Tensor | None = None) -> tuple[Tensor, Cache]:
        cache = Cache() if cache is None else cache
        k = cache.update(self.k(x))
        y = self.q(x) @ k.transpose(1, 2)
        if mask is not None:
            y = y + mask
        if x.shape[1] > 40:
            y = y * 0.5
        return self.o(y.softmax(-1) @ k), cache


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return Decoder().eval()


def sequence(length: int = 6) -> Tensor:
    return torch.randn(2, length, 16)


def filled(length: int = 6) -> Cache:
    cache = Cache()
    cache.update(sequence(length))
    return cache


MASK = torch.tensor([0.0])


def answers(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    found = []
    with torch.no_grad():
        for given in (None, MASK):
            for prompt in (6, 50):
                y, cache = model(sequence(prompt), None, given)
                found.append(y)
                for _ in range(3):
                    y, cache = model(sequence(1), cache, given)
                    found += [y, cache.keys.clone()]
    return found


@pytest.fixture
def q() -> nn.Module:
    prepared = quant.prepare(decoder(), sequence())
    for _ in range(4):
        answers(prepared)
    return quant.convert(prepared)


def test_programs_with_objects_come_from_examples(
    q: nn.Module, tmp_path: Path, without_programs: Callable[[Path], None]
) -> None:
    quant.save(q, tmp_path / "model.q8")
    assert all(map(torch.equal, answers(quant.load(tmp_path / "model.q8", model=decoder())), answers(q)))
    without_programs(tmp_path / "model.q8")
    assert len(q._modules[RESERVED].others) >= 5
    examples: list[Any] = [
        {"x": sequence(1), "cache": filled(), "mask": MASK},  # in another order than calibration had
        (sequence(1), filled()),
        (sequence(2), filled()),
    ]
    before = examples[0]["cache"].keys.clone()
    loaded = quant.load(tmp_path / "model.q8", model=decoder(), examples=examples)
    assert all(torch.equal(*pair) for pair in zip(answers(loaded), answers(q), strict=True))
    assert torch.equal(examples[0]["cache"].keys, before), "the caller's objects are left alone"
    assert len(loaded._modules[RESERVED].others) == len(q._modules[RESERVED].others), "what the file lacks is not kept"
    quant.save(loaded, tmp_path / "again.q8")
    again = quant.load(tmp_path / "again.q8", model=decoder(), examples=examples)
    assert all(torch.equal(*pair) for pair in zip(answers(again), answers(q), strict=True))


def test_an_example_that_is_missing_is_asked_for_by_what_its_calls_are(
    q: nn.Module, tmp_path: Path, without_programs: Callable[[Path], None]
) -> None:
    quant.save(q, tmp_path / "model.q8")
    without_programs(tmp_path / "model.q8")
    with pytest.raises(ArtefactError, match=r"program 2 of \(root\) .* \(x: float32\[2, 1, 16\], cache: Cache\(keys="):
        quant.load(tmp_path / "model.q8", model=decoder())
    with pytest.raises(ArtefactError, match=r"cache: Cache\(keys=.*, mask: float32\[1\]\); give examples="):
        quant.load(tmp_path / "model.q8", model=decoder(), examples=[(sequence(1), filled())])


class Held(nn.Module):
    """A loop by a size, so that every size has its own program, and all these have the same calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(16, 16), nn.Linear(16, 16), [0.5, 1.0, 2.0, 4.0]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.first(x)
        y = y[:, : 2 ** (x.shape[1] // 4)].sum(1) if x.shape[1] in (4, 8) else y.sum(1)
        return self.last(y if mask is None else y * mask)


def test_programs_that_differ_in_guards_alone_keep_their_ranges(
    tmp_path: Path, without_programs: Callable[[Path], None]
) -> None:
    torch.manual_seed(0)
    prepared = quant.prepare(Held().eval(), sequence(4))
    with torch.no_grad():
        for _ in range(3):
            for length, size in ((4, 1.0), (8, 10.0), (5, 0.1)):
                prepared(sequence(length) * size)
    q = quant.convert(prepared)
    quant.save(q, tmp_path / "model.q8")
    loaded = [quant.load(tmp_path / "model.q8", model=Held())]
    without_programs(tmp_path / "model.q8")
    loaded.append(quant.load(tmp_path / "model.q8", model=Held()))
    with torch.no_grad():
        for length in (4, 8, 5):
            x = sequence(length)
            assert all(torch.equal(one(x), q(x)) for one in loaded)


def test_a_model_whose_first_program_saw_no_data_loads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    prepared = quant.prepare(Held().eval(), sequence(5))
    with torch.no_grad():
        for _ in range(3):
            prepared(sequence(5), torch.rand(16))
    q, x, mask = quant.convert(prepared), sequence(5), torch.rand(16)
    quant.save(q, tmp_path / "model.q8")
    loaded = quant.load(tmp_path / "model.q8", model=Held())
    with torch.no_grad():
        assert torch.equal(loaded(x, mask), q(x, mask))


def test_programs_of_a_calibrated_model_that_was_trained_load(tmp_path: Path) -> None:
    torch.manual_seed(0)
    prepared, mask = quant.prepare(Held().eval(), sequence(5)), torch.rand(16)
    with torch.no_grad():
        for _ in range(3):
            prepared(sequence(5))
            prepared(sequence(5), mask)
    trained = quant.prepare_qat(prepared)
    trained.train()
    trained(sequence(5)).sum().backward()
    trained(sequence(5), mask).sum().backward()
    q, x = quant.convert(trained), sequence(5)
    quant.save(q, tmp_path / "model.q8")
    loaded = quant.load(tmp_path / "model.q8", model=Held())
    with torch.no_grad():
        assert torch.equal(loaded(x, mask), q(x, mask))
        assert torch.equal(loaded(x), q(x))
