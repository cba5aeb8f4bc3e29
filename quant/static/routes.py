"""The route by which this machine computes the products of a static layer, for the report."""

from __future__ import annotations

import torch
from torch import nn

from quant.kernels import dispatch, narrow
from quant.runtime.layers.weighted import StaticLayer


def routes(layer: nn.Module, backend: str | None) -> str:
    """The backend of a static layer with its routes, as in "native (vnni)"; the reference where it has no kernel.

    Args:
        layer: a `StaticLayer` with a site, a static recurrent layer, or a registered one.
        backend: the backend that the model is converted for; None for the dispatcher's choice.
    """
    used = dispatch.current(backend)
    if not isinstance(layer, StaticLayer):
        weights = [one for name, one in layer.named_buffers() if name.rpartition(".")[2].startswith("q_weight")]
        weights = [one for one in weights if narrow.is_narrow(one) or (one.dtype == torch.int8 and one.dim() == 2)]
        products = sorted({used.route(one) for one in weights})
        return f"{used.name} ({', '.join(products)})" if products else "no product of a backend's"
    phases = None if used.transposes else layer.site(0).phases
    product, q_weight = (layer.product, layer.q_weight) if phases is None else (phases.product, phases.q_weight)
    missing = product.why_not(used, q_weight)
    if not missing:
        return f"{used.name} ({product.route(used, q_weight)})"
    reference = dispatch.find("reference")
    return f"reference ({product.route(reference, q_weight)}), as {used.name} has no kernel for {missing}"
