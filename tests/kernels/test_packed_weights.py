"""The packed form of a weight: found by the plain tensor, made anew when that is written to, gone when it is gone."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable

import pytest
import torch
from quant.kernels.backend import Backend
from quant.kernels.packed import packed_bytes
from torch import Tensor

X = torch.full((1, 64), 255, dtype=torch.uint8)


def weight_of(value: int) -> Tensor:
    return torch.full((20, 64), value, dtype=torch.int8)


def total(backend: Backend, weight: Tensor) -> int:
    sums = backend.linear_u8s8_s32(X, 0, weight, None)
    assert bool((sums == sums[0, 0]).all())
    return int(sums[0, 0])


def replace_data(weight: Tensor) -> None:
    weight.data = weight_of(2)


def write_in_inference_mode(weight: Tensor) -> None:
    with torch.inference_mode():
        weight.fill_(2)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "fill_": lambda weight: weight.fill_(2),
    "copy_": lambda weight: weight.copy_(weight_of(2)),
    "index": lambda weight: weight.__setitem__(slice(None), 2),
    "through a view": lambda weight: weight.view(-1).fill_(2),
    "through detach": lambda weight: weight.detach().fill_(2),
    "add_": lambda weight: weight.add_(1),
    "data replaced": replace_data,
    "in inference mode": write_in_inference_mode,
}


@pytest.mark.parametrize("how", list(WRITES))
def test_a_weight_that_was_written_to_is_packed_anew(backend: Backend, how: str) -> None:
    weight = weight_of(1)
    assert total(backend, weight) == 255 * 64
    WRITES[how](weight)
    assert total(backend, weight) == 255 * 64 * 2


def test_a_loaded_state_is_seen(backend: Backend) -> None:
    module = torch.nn.Module()
    module.register_buffer("weight", weight_of(1))
    assert total(backend, module.weight) == 255 * 64
    module.load_state_dict({"weight": weight_of(3)})
    assert total(backend, module.weight) == 255 * 64 * 3


@pytest.mark.parametrize("duplicate", [copy.deepcopy, Tensor.clone, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_copy_has_a_life_of_its_own(backend: Backend, duplicate: Callable[[Tensor], Tensor]) -> None:
    weight = weight_of(1)
    total(backend, weight)
    other = duplicate(weight)
    other.fill_(5)
    assert total(backend, other) == 255 * 64 * 5
    assert total(backend, weight) == 255 * 64


def test_parts_of_one_storage_are_packed_apart(backend: Backend) -> None:
    both = torch.cat([weight_of(1), weight_of(4)])
    first, second = both[:20], both[20:]
    assert [total(backend, part) for part in (first, second, both[:20])] == [255 * 64, 255 * 64 * 4, 255 * 64]
    narrow = both.view(80, 32)
    assert torch.equal(backend.linear_u8s8_s32(X[:, :32], 0, narrow, None)[0, :40].unique(), torch.tensor([255 * 32]))


def packed_count() -> int:
    gc.collect()
    return int(torch.ops.octet_native.packed_count())


def test_a_weight_is_packed_once_and_dropped_with_its_tensor(compiled: Backend) -> None:
    before = packed_count()
    weight = weight_of(1)
    for _ in range(3):
        total(compiled, weight)
    assert packed_count() == before + 1
    weight.fill_(2)
    total(compiled, weight)
    assert packed_count() == before + 1, "the stale form was kept beside the new one"
    alias = weight[:]
    del weight
    total(compiled, alias)
    assert packed_count() == before + 1, "the storage still lives"
    del alias
    assert packed_count() == before


def test_bytes_of_a_packed_weight(compiled: Backend) -> None:
    both = torch.cat([weight_of(1), weight_of(4)])
    weight, other = both[:20], both[20:]
    assert packed_bytes([both]) == 0
    total(compiled, weight)
    held = packed_bytes([weight])
    assert weight.nbytes + 20 * 4 <= held <= 4 * weight.nbytes + 65536  # FBGEMM's blocks are large
    assert packed_bytes([weight, both, weight.view(-1)]) == held, "one form counts once"
    assert packed_bytes([other]) == packed_bytes([]) == 0
    assert packed_bytes([weight.clone(), torch.empty(20, 64, dtype=torch.int8, device="meta")]) == 0
    total(compiled, other)
    assert packed_bytes([both]) == 2 * held
    weight.fill_(2)
    total(compiled, weight)
    assert packed_bytes([weight]) == held, "the stale form counts"


def test_what_is_not_packed_has_no_bytes(interpreted: Backend) -> None:
    weight = weight_of(1)
    total(interpreted, weight)
    assert packed_bytes([weight]) == 0


def test_onednn_drops_a_packed_weight_with_its_tensor() -> None:
    from quant.kernels.backends.onednn import OneDnnBackend

    backend = OneDnnBackend()
    if backend.why_not():
        pytest.skip(backend.why_not())
    weight = weight_of(1)
    total(backend, weight)
    assert len(backend._packed) == 1
    del weight
    gc.collect()
    assert not backend._packed


def test_an_address_that_is_used_again_is_another_weight(backend: Backend) -> None:
    # Most allocators give a freed block back at once, so that 50 weights live in one or two places.
    places = set()
    for value in range(1, 51):
        weight = weight_of(value)
        places.add(weight.data_ptr())
        assert total(backend, weight) == 255 * 64 * value
        del weight
    if len(places) == 50:
        pytest.skip("this allocator used no address twice")


def test_eight_threads_meet_one_weight_that_no_one_has_packed(backend: Backend) -> None:
    for value in range(1, 6):
        weight, barrier, totals = weight_of(value), threading.Barrier(8), []

        def work(weight: Tensor = weight, barrier: threading.Barrier = barrier, totals: list[int] = totals) -> None:
            barrier.wait(30)
            totals.extend(total(backend, weight) for _ in range(10))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert totals == [255 * 64 * value] * 80


def test_threads_that_pack_while_others_drop(backend: Backend) -> None:
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(40):
                value = (seed * 40 + step) % 100 + 1
                assert total(backend, weight_of(value)) == 255 * 64 * value
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_inference_tensors_serve_as_weights_and_inputs(backend: Backend) -> None:
    with torch.inference_mode():
        weight, x = weight_of(3), X.clone()
        inside = backend.linear_u8s8_s32(x, 0, weight, None)
    assert torch.equal(inside.clone(), backend.linear_u8s8_s32(X, 0, weight, None))
    assert total(backend, weight) == 255 * 64 * 3


def test_a_forked_child_computes_with_what_its_parent_packed(run_python: Callable[..., str]) -> None:
    code = """
import os, torch
from quant.kernels import current
torch.set_num_threads(1)
weight, x = torch.ones(20, 64, dtype=torch.int8), torch.full((1, 64), 255, dtype=torch.uint8)
run = lambda w: int(current().linear_u8s8_s32(x, 0, w, None)[0, 0])
run(weight)
child = os.fork()
if child == 0:
    os._exit(0 if run(weight) == 255 * 64 and run(weight * 2) == 255 * 128 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(code).strip() == "0"
