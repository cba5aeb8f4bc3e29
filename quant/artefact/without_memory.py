"""A float model on the meta device, as `load` may be given it: memory for what a file holds, and for nothing else.

A layer that the file has as integers gets its float weights for as long as an int8 one is made in its place. They are
zeros, which take memory only where something is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from quant.derived_buffers import NoValues, fill_derived
from quant.runtime.names import full_name


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Let tensors be made on the CPU where the user's own default is the meta device, as within `torch.device`."""
    with torch.device("cpu") if torch.get_default_device().type == "meta" else contextlib.nullcontext():
        yield


def give_memory(modules: Iterable[nn.Module]) -> None:
    """Put zeros on the CPU in place of parameters and persistent buffers on the meta device; tied ones stay one."""
    given: dict[Tensor, Tensor] = {}

    def real(held: Tensor) -> Tensor:
        if held not in given:
            zeros = _zeros(held)
            given[held] = nn.Parameter(zeros, held.requires_grad) if isinstance(held, nn.Parameter) else zeros
        return given[held]

    for module in modules:
        held: list[tuple[dict[str, Tensor | None], set[str]]] = [
            (module._parameters, set()),  # type: ignore[list-item]
            (module._buffers, module._non_persistent_buffers_set),
        ]
        for tensors, but in held:
            for key, one in list(tensors.items()):
                if one is not None and one.is_meta and key not in but:
                    tensors[key] = real(one)
        if isinstance(module, nn.RNNBase) and any(one is not None and one.is_meta for one in module._flat_weights):
            module._init_flat_weights()


def finish(model: nn.Module) -> None:
    """Give memory to what stays float, and let the model compute the buffers that are in no file.

    Raises:
        NoValues: it has no way to, or has a tensor on the meta device for an attribute.
    """
    give_memory(model.modules())
    fill_derived(model)
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise NoValues(
                    f"attribute {full_name(name, key)!r} is a tensor on the meta device, whose values no file has; "
                    "make it on the CPU, or a buffer of the model that is saved"
                )


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, device="cpu")
