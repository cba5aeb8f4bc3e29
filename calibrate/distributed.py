"""Merging the observers of all ranks of torch.distributed's default group: every rank gets the ranges of all data.

The statistics travel as safetensors bytes, one observer at a time, and every rank merges the same states in the same
order: sorted by their bytes, so which rank had which shard does not matter. The outcome is what `Observer.merge`
promises: for min-max, histogram, percentile, entropy, MSE and fixed ranges one process over all data, bit for bit. For
the moving average it is the mean of the ranks' ranges, weighted by their numbers of batches: no order of the batches
over several ranks exists, so no more can be promised than that all ranks agree.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from quant.calibrate import checkpoint
from quant.calibrate.errors import CalibrationError
from quant.observers import Observer
from torch import nn


def world() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) where there is no process group."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def sync(prepared: nn.Module) -> None:
    """Merge the observers of all ranks; every rank must call it. Without a process group it does nothing.

    Where all ranks hold the same statistics nothing is done: they are merged already. So calling it twice is calling
    it once. `calibrate.run` does this by itself.

    Raises:
        CalibrationError: on every rank, when the models differ.
    """
    if world()[1] == 1:
        return
    observers = checkpoint.observers_of(prepared)
    exchange({"identity": checkpoint.identity(prepared)})
    own = checkpoint.digest("", checkpoint.states(observers))
    if len(set(gather(own.encode()))) > 1:
        merge_ranks(observers)


def merge_ranks(observers: Mapping[str, Observer]) -> None:
    """Replace the statistics of each observer by those of all ranks together; all or, on an error, none."""
    merged = {name: _joint(observer) for name, observer in observers.items()}
    for name, observer in observers.items():
        observer.load_state_dict(merged[name].state_dict())


def exchange(mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's plain data, by rank.

    Two keys mean something here: `error` (a text, if that rank failed) and `identity` (of its model).

    Raises:
        CalibrationError: on every rank, when one has failed, or when models differ.
    """
    everyone: list[dict[str, Any]] = [json.loads(data) for data in gather(json.dumps(mine).encode())]
    for rank, theirs in enumerate(everyone):
        if theirs.get("error"):
            raise CalibrationError(f"rank {rank} failed: {theirs['error']}")
    for rank, theirs in enumerate(everyone):
        if theirs.get("identity") != everyone[0].get("identity"):
            raise CalibrationError(
                f"the model of rank {rank} is not that of rank 0: prepare the same model, with the same weights and "
                "recipe, on every rank"
            )
    return everyone


def gather(data: bytes) -> list[bytes]:
    """The bytes of every rank, by rank. Only tensors travel (all_gather_object would unpickle)."""
    dist = torch.distributed
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    ranks = dist.get_world_size()
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.empty_like(size) for _ in range(ranks)]
    dist.all_gather(sizes, size)
    longest = max(int(other) for other in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(ranks)]
    dist.all_gather(parts, padded.to(device))
    return [part[: int(n)].cpu().numpy().tobytes() for part, n in zip(parts, sizes, strict=True)]


def _joint(observer: Observer) -> Observer:
    """A copy of the observer with the statistics of all ranks."""
    state = checkpoint.states({"": observer})
    joint = copy.deepcopy(observer).cpu()
    joint.reset()
    for data in sorted(gather(_packed(state))):
        other = copy.deepcopy(observer).cpu()
        other.load_state_dict({key.removeprefix("."): value for key, value in safetensors.torch.load(data).items()})
        joint.merge(other)
    return joint


def _packed(state: Mapping[str, torch.Tensor]) -> bytes:
    packed: bytes = safetensors.torch.save(dict(state))
    return packed
