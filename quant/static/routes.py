"""By which route the products of a static layer are formed on this machine, for the report."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from quant.kernels import dispatch
from quant.kernels.backend import Backend
from quant.static import ops
from quant.static.layers import StaticLayer
from quant.static.phases import Phases


def routes(layer: nn.Module, backend: str | None) -> str:
    """The backend that computes a static layer, and its routes: "native (vnni)".

    A depthwise convolution multiplies by a kernel of its own, exact for every weight.

    Args:
        layer: a `StaticLayer` with a site, or a static recurrent layer.
        backend: that the model is converted for; None for the dispatcher's choice.
    """
    used = dispatch.current(backend or "")
    if isinstance(layer, StaticLayer):
        used = used if ops.compiled(backend) else dispatch.find("reference")
        found = _of_layer(layer, used)
    else:
        weights = (one for name, one in layer.named_buffers() if name.rpartition(".")[2].startswith("q_weight"))
        found = {used.route(weight) for weight in weights}
    return f"{used.name} ({', '.join(sorted(found))})"


def _of_layer(layer: StaticLayer, used: Backend) -> set[str]:
    q_weight, groups = layer.q_weight, layer.settings.get("groups", 1)
    if used.name == "reference" or layer.op == "linear":
        return {used.route(q_weight)}
    phases: Phases | None = layer.site(0).phases
    if layer.op == "conv_transpose" and phases is None:  # of a dilation that has no phases, by the reference
        return {dispatch.find("reference").route(q_weight)}
    q_weight = q_weight if phases is None else phases.q_weight
    if groups > 1 and groups == q_weight.shape[0] == q_weight.shape[1] * groups:
        return {"depthwise"}
    return {used.route(_rows(part, groups)) for part in q_weight.chunk(groups)}


def _rows(q_weight: Tensor, groups: int) -> Tensor:
    """A convolution's weight (out, in, *kernel) in the order in which csrc/torch/packed.cpp multiplies it.

    Whether neighbours overflow 16 bits depends on who they are: channels last, each row of the kernel filled up to a
    multiple of four where there is one group.
    """
    width = q_weight.shape[-1] * q_weight.shape[1]
    by_row = q_weight.movedim(1, -1).reshape(q_weight.shape[0], -1, width)
    return F.pad(by_row, (0, -width % 4 if groups == 1 else 0)).flatten(1).contiguous()
