"""`MultiheadAttention` with int8 projections; also keeps torch's encoders off fused paths that would bypass it."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from quant.nn.base import QuantizedWeight
from quant.nn.linear import Linear
from quant.recipe import QConfig
from quant.runtime.layers.quant_module import QuantModule, frozen


class MultiheadAttention(QuantModule):
    """torch.nn.MultiheadAttention whose input and output projections are int8 (`Linear`).

    `q_proj`, `k_proj`, `v_proj` and `out_proj` are the projections; where query, key and value are one tensor and the
    float module packed its weights, `in_proj` computes all three at once from the same rows.
    """

    __jit_unused_properties__: list[str] = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]  # noqa: RUF012

    def __init__(self, module: nn.MultiheadAttention, qconfig: QConfig) -> None:
        super().__init__()
        self.embed_dim = module.embed_dim
        self.kdim = module.kdim
        self.vdim = module.vdim
        self.num_heads = module.num_heads
        self.head_dim = module.head_dim
        self.dropout = module.dropout
        self.batch_first = module.batch_first
        self.add_zero_attn = module.add_zero_attn
        # torch's encoder layers read this flag; False keeps them from handing float weights to their fused fast path.
        self._qkv_same_embed_dim = False
        weights = _projection_weights(module)
        bias = module.in_proj_bias
        biases = (None, None, None) if bias is None else bias.chunk(3)
        self.packed = module._qkv_same_embed_dim
        if self.packed:
            self.in_proj: Linear | None = Linear(
                QuantizedWeight.of(torch.cat(weights), qconfig), bias, per_row=qconfig.ranges_per_row
            )
            self.q_proj = self.k_proj = self.v_proj = None
        else:
            self.in_proj = None
            self.q_proj, self.k_proj, self.v_proj = (
                Linear(QuantizedWeight.of(weight, qconfig), part, per_row=qconfig.ranges_per_row)
                for weight, part in zip(weights, biases, strict=True)
            )
        self.out_proj = Linear.from_float(module.out_proj, qconfig)
        self.bias_k = frozen(module.bias_k)
        self.bias_v = frozen(module.bias_v)

    # The two that torch's encoder layer reads also where it is scripted, which leaves no room for None in their types.
    @property
    def in_proj_weight(self) -> Tensor:
        """`dtype` (3 * embed_dim, embed_dim): what the packed int8 weight stands for, or None."""
        in_proj = self.in_proj
        if in_proj is not None:
            return in_proj.weight
        return _absent()

    @property
    def in_proj_bias(self) -> Tensor:
        """`dtype` (3 * embed_dim,), or None."""
        parts: list[Tensor] = []
        for projection in (self.in_proj, self.q_proj, self.k_proj, self.v_proj):
            if projection is not None:
                bias = projection.bias
                if bias is not None:
                    parts.append(bias)
        return torch.cat(parts).to(self.dtype) if len(parts) > 0 else _absent()

    @property
    def q_proj_weight(self) -> Tensor | None:
        """`dtype` (embed_dim, embed_dim): what the int8 weight stands for; None where the three are packed."""
        return None if self.q_proj is None else self.q_proj.weight

    @property
    def k_proj_weight(self) -> Tensor | None:
        """`dtype` (embed_dim, kdim): what the int8 weight stands for; None where the three are packed."""
        return None if self.k_proj is None else self.k_proj.weight

    @property
    def v_proj_weight(self) -> Tensor | None:
        """`dtype` (embed_dim, vdim): what the int8 weight stands for; None where the three are packed."""
        return None if self.v_proj is None else self.v_proj.weight

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The arguments, shapes and results of torch.nn.MultiheadAttention."""
        batched = query.dim() == 3
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            raise ValueError(
                f"layer '{self._where()}': query, key and value have {query.dim()}, {key.dim()} and {value.dim()} "
                f"dimensions, expected 3 of each, or 2 of each for an unbatched input"
            )
        if is_causal and attn_mask is None:
            raise ValueError(f"layer '{self._where()}': is_causal is a hint about attn_mask, which must be given too")
        q, k, v = self._project(query, key, value)
        if not batched:
            q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask.unsqueeze(0)
        elif self.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        # From here: (length, batch, embed_dim).
        length, batch = q.size(0), q.size(1)
        self._check_shapes(q, k, v, attn_mask, key_padding_mask)
        mask = self._mask(attn_mask, batch, q)
        k, v, mask, key_padding_mask = self._extend(k, v, mask, key_padding_mask)
        mask = _add_padding(mask, key_padding_mask, q, batch, k.size(0))
        y, weights = self._attend(self._heads(q), self._heads(k), self._heads(v), mask, need_weights)
        y = self.out_proj(y.permute(2, 0, 1, 3).reshape(length, batch, self.embed_dim))
        if not batched:
            y = y.squeeze(1)
        elif self.batch_first:
            y = y.transpose(0, 1)
        if weights is not None:
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        return y, weights

    # torch's encoder layer calls it on a path that is never taken here, but that TorchScript compiles.
    merge_masks = nn.MultiheadAttention.merge_masks

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        in_proj = self.in_proj
        if in_proj is not None:
            if query is key and key is value:
                q, k, v = in_proj(query).chunk(3, dim=-1)
                return q, k, v
            size = self.embed_dim
            if key is value:
                k, v = in_proj.outputs(key, size, 3 * size).chunk(2, dim=-1)
                return in_proj.outputs(query, 0, size), k, v
            return (
                in_proj.outputs(query, 0, size),
                in_proj.outputs(key, size, 2 * size),
                in_proj.outputs(value, 2 * size, 3 * size),
            )
        # Not through local names: TorchScript can call a module that may be None only as an attribute.
        if self.q_proj is not None and self.k_proj is not None and self.v_proj is not None:
            return self.q_proj(query), self.k_proj(key), self.v_proj(value)
        raise AssertionError("neither packed nor separate projections")

    def _check_shapes(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, padding: Tensor | None) -> None:
        """Raise where the scores would broadcast over what does not belong together."""
        if torch.jit.is_tracing():
            return  # a shape check would be a warning and a constant in the graph
        length, batch, source = q.size(0), q.size(1), k.size(0)
        if k.size(1) != batch or v.size(1) != batch or v.size(0) != source:
            raise ValueError(
                f"layer '{self._where()}': query, key and value have batches of {batch}, {k.size(1)} and {v.size(1)} "
                f"and lengths of {length}, {source} and {v.size(0)}, expected one batch and equal lengths of key and "
                f"value"
            )
        if attn_mask is not None:
            self._check_mask(attn_mask, "attn_mask")
            expected = [length, source] if attn_mask.dim() == 2 else [batch * self.num_heads, length, source]
            if list(attn_mask.shape) != expected:
                raise ValueError(
                    f"layer '{self._where()}': attn_mask has shape {list(attn_mask.shape)}, expected "
                    f"{[length, source]} or {[batch * self.num_heads, length, source]} (batch * heads, length, source)"
                )
        if padding is not None:
            self._check_mask(padding, "key_padding_mask")
            if list(padding.shape) != [batch, source]:
                raise ValueError(
                    f"layer '{self._where()}': key_padding_mask has shape {list(padding.shape)}, expected "
                    f"{[batch, source]} (batch, source)"
                )

    def _check_mask(self, mask: Tensor, name: str) -> None:
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(f"layer '{self._where()}': {name} is {mask.dtype}, expected torch.bool or a float type")

    def _mask(self, attn_mask: Tensor | None, batch: int, q: Tensor) -> Tensor | None:
        """attn_mask as float (1 or batch, 1 or heads, length, source), to be added to the scores."""
        if attn_mask is None:
            return None
        mask = _additive(attn_mask, q)
        if mask.dim() == 2:
            return mask.unsqueeze(0).unsqueeze(0)
        return mask.reshape(batch, self.num_heads, mask.size(-2), mask.size(-1))

    def _extend(
        self, k: Tensor, v: Tensor, mask: Tensor | None, padding: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Append the float module's learned key and value (`add_bias_kv`) and zeros (`add_zero_attn`)."""
        batch, extra = k.size(1), 0
        bias_k, bias_v = self.bias_k, self.bias_v
        if bias_k is not None and bias_v is not None:
            more = bias_k.to(k.dtype).repeat(1, batch, 1), bias_v.to(v.dtype).repeat(1, batch, 1)
            k, v = torch.cat([k, more[0]]), torch.cat([v, more[1]])
            extra += 1
        if self.add_zero_attn:
            zero = torch.zeros(1, batch, self.embed_dim, dtype=k.dtype, device=k.device)
            k, v = torch.cat([k, zero]), torch.cat([v, zero])
            extra += 1
        if extra > 0 and mask is not None:
            mask = functional.pad(mask, [0, extra])
        if extra > 0 and padding is not None:
            padding = functional.pad(padding, [0, extra])
        return k, v, mask, padding

    def _heads(self, x: Tensor) -> Tensor:
        """(length, batch, embed_dim) -> (batch, heads, length, head_dim)."""
        return x.reshape(x.size(0), x.size(1), self.num_heads, self.head_dim).permute(1, 2, 0, 3)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout), None
        scores = torch.matmul(q * (1.0 / math.sqrt(self.head_dim)), k.transpose(-2, -1))
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        if dropout > 0.0:
            weights = functional.dropout(weights, p=dropout)
        return torch.matmul(weights, v), weights

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


def _absent() -> Tensor:
    """None; a scripted module, which cannot say so, has no use for it."""
    if torch.jit.is_scripting():
        return torch.empty(0)
    else:  # noqa: RET505 - TorchScript leaves out only what an else excludes
        return None  # type: ignore[return-value]


def leave_fast_paths(model: nn.Module) -> None:
    """Keep torch's encoders off the fused kernel that reads float weights and off the nested tensors that go with it.

    They decide by flags that their constructors set; the positions that a padding mask hides then come out as the
    ordinary path computes them, not as zeros.
    """
    for module in model.modules():
        if any(isinstance(part, QuantModule) for part in module.modules()):
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0
            elif isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False


def _projection_weights(module: nn.MultiheadAttention) -> tuple[Tensor, Tensor, Tensor]:
    if module._qkv_same_embed_dim:
        q, k, v = module.in_proj_weight.chunk(3)
        return q, k, v
    return module.q_proj_weight, module.k_proj_weight, module.v_proj_weight


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as what is added to the scores: a boolean one forbids where it is true."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))
    return mask.to(like.dtype)


def _add_padding(mask: Tensor | None, padding: Tensor | None, q: Tensor, batch: int, source: int) -> Tensor | None:
    if padding is None:
        return mask
    added = _additive(padding, q).reshape(batch, 1, 1, source)
    return added if mask is None else mask + added
