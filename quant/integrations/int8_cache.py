"""`Int8Cache`: keys and values of transformers' decoders as int8, a quarter of float32's bytes and half of bfloat16's.

    from quant.integrations.int8_cache import Int8Cache

    model.set_attn_implementation("octet")  # attention reads the integers; without it they become reals at each step
    tokens = model.generate(prompt, cache=Int8Cache(model))  # past_key_values= in older versions

Importing this file registers the attention "octet" with transformers, by its own `AttentionInterface`. It is "sdpa"
wherever no `Int8Cache` is. Each token and head has a scale of its own; a first call attends to its own keys and values
as they are, and what is kept of them is rounded.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from quant.kernels.reference_cache import BLOCK, empty_cache, read_byte_cache

NAME = "octet"
"""Of the attention, in `set_attn_implementation`."""

ATTENTIONS = AttentionInterface()

MOST_QUERIES = 16
"""Up to so many new tokens attention reads the integers; a product of more is faster over reals."""


FURTHER = ("softcap", "s_aux", "sinks", "indices", "block_indices")
"""What some models do to their scores beside scaling and masking them, and which keys they choose, by the arguments'
names."""


class Int8Cache(Cache):  # type: ignore[misc]
    """A cache of keys and values as int8, for a decoder's call or `generate`.

    Layers that do not attend to all earlier tokens (sliding windows, linear attention) keep what `DynamicCache` gives
    them.

    Args:
        model: the decoder, or its configuration.

    Raises:
        ValueError: no layer of the model attends to all earlier tokens.
    """

    def __init__(self, model: Any) -> None:
        config: Any = model.config if isinstance(model, nn.Module) else model
        self._config = config.get_text_config(decoder=True)
        layers = [
            Int8CacheLayer(self._config) if type(layer) is DynamicLayer else layer
            for layer in DynamicCache(config=config).layers
        ]
        missing = getattr(self._config, "num_decoder_layers", None) or 0  # of a T5 with fewer layers in its encoder
        layers += [Int8CacheLayer(self._config) for _ in range(missing - len(layers))]
        if not any(isinstance(layer, Int8CacheLayer) for layer in layers):
            raise ValueError(
                f"Int8Cache: no layer of {type(config).__name__} attends to all earlier tokens, so nothing would be "
                "int8; use transformers' DynamicCache"
            )
        super().__init__(layers=layers)

    @property
    def nbytes(self) -> int:
        """Bytes of the int8 layers, their scales and the room for tokens to come among them."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, Int8CacheLayer))


class Int8CacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer as int8, on the CPU.

    Args:
        config: of the decoder; its attention decides what `update` returns.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, config: Any) -> None:
        self._config = config
        self._length = 0
        self._parts: tuple[Tensor, ...] = ()  # keys, their scale, values, their scale
        self.dtype = torch.float32
        self.is_initialized = False

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(part.nbytes for part in self._parts)

    @property
    def keys(self) -> Tensor | None:
        """The keys as reals, (batch, heads, tokens, width), computed at each read; None before the first token."""
        return self._reals(0) if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        """The values, likewise."""
        return self._reals(2) if self.is_initialized else None

    def _reals(self, part: int, length: int | None = None) -> Tensor:
        length = self._length if length is None else length
        return read_byte_cache(self._parts[part], self._parts[part + 1], length).to(self.dtype)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Called by `update`."""
        if not key_states.is_cpu:
            raise ValueError(f"Int8Cache: keys are on {key_states.device}, expected the CPU; use DynamicCache there")
        self.dtype, self.is_initialized = key_states.dtype, True
        self._allocate(key_states, value_states, 0)

    def _allocate(self, key_states: Tensor, value_states: Tensor, capacity: int) -> None:
        batch, heads = key_states.shape[:2]
        old = self._parts
        self._parts = (
            *empty_cache(batch, heads, capacity, key_states.shape[3], blocked=True),
            *empty_cache(batch, heads, capacity, value_states.shape[3], blocked=False),
        )
        for mine, before in zip(self._parts, old, strict=False):
            mine[:, :, : before.shape[2]] = before

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keep new tokens, (batch, heads, tokens, width).

        Returns:
            keys and values of all tokens: reals; or a `Held` of each with the attention "octet", which reads integers.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError(
                "Int8Cache: keys or values have a gradient, which integers have not; call the model in "
                "torch.inference_mode() or no_grad(), or train with a DynamicCache"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, heads, new = key_states.shape[:3]
        if self._parts[0].shape[:2] != (batch, heads):
            raise ValueError(
                f"Int8Cache: keys have shape {tuple(key_states.shape)}, and the cache is of {self._parts[0].shape[0]} "
                f"samples and {self._parts[0].shape[1]} heads; begin with a new cache, or reset() this one"
            )
        start, needed = self._length, self._length + new
        if needed > self._parts[1].shape[2]:
            roomy = needed + needed // 4 + 4 * BLOCK
            self._allocate(key_states, value_states, roomy - roomy % BLOCK)
        keys, key_scale, values, value_scale = self._parts
        torch.ops.octet.write_byte_cache(key_states.float(), start, keys, key_scale)
        torch.ops.octet.write_byte_cache(value_states.float(), start, values, value_scale)
        self._length = needed
        if start == 0:
            return key_states, value_states
        reads_integers = ATTENTIONS.get(self._config._attn_implementation) is octet_attention
        if reads_integers and new <= MOST_QUERIES:
            return _held(self, 0, keys), _held(self, 2, values)
        return self._reals(0), self._reals(2)

    def attend(self, q: Tensor, scale: float, mask: Tensor | None, *, causal: bool) -> Tensor:
        """(batch, heads, queries, width) -> (batch, heads, queries, width of the values), over all that is kept."""
        y: Tensor = torch.ops.octet.attend_byte_cache(
            q.float(), *self._parts, self._length, scale, causal, _added(mask, self._length)
        )
        return y.to(q.dtype)

    def get_seq_length(self) -> int:
        """Tokens that are kept."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask for so many new tokens."""
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        """-1: there is no most."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget all tokens."""
        self._length, self._parts, self.is_initialized = 0, (), False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: so many where the number is negative, as transformers asks for it."""
        if tokens_to_remove > 0:
            raise ValueError(f"Int8Cache: crop({tokens_to_remove}) is positive, expected minus the tokens to forget")
        self._length = max(0, self._length + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the samples of the beams that go on."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these samples, in this order."""
        self._parts = tuple(part[indices] for part in self._parts)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each sample so many times."""
        self._parts = tuple(part.repeat_interleave(repeats, 0) for part in self._parts)

    def offload(self) -> None:
        """Nothing: it is on the CPU."""

    def prefetch(self) -> None:
        """Nothing: it is on the CPU."""


class Held(Tensor):
    """Keys or values of a layer, of their shape and without numbers, for the attention "octet".

    Anything else that computes with them gets reals: a model that works on keys between cache and attention, or one
    whose attention was changed since.
    """

    layer: Int8CacheLayer
    part: int

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Held{tuple(self.shape)}"

    @classmethod
    def __torch_function__(cls, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, types.MethodWrapperType):  # that reads an attribute: its shape, its dtype
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*tree_map(_as_reals, args), **tree_map(_as_reals, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"Int8Cache: {func} reads keys or values that are int8, and only the attention {NAME!r} can; "
            "model.set_attn_implementation('sdpa') gives it reals, and a cache that is made after that"
        )


def _as_reals(one: Any) -> Any:
    return one.layer._reals(one.part, one.shape[2]) if isinstance(one, Held) else one


def _held(layer: Int8CacheLayer, part: int, kept: Tensor) -> Held:
    sizes = (*kept.shape[:2], layer.get_seq_length(), kept.shape[3])
    held: Held = torch.Tensor._make_wrapper_subclass(Held, sizes, dtype=layer.dtype, device=torch.device("cpu"))
    held.layer, held.part = layer, part
    return held


def octet_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention over an `Int8Cache`; over anything else transformers' "sdpa", whose arguments and results it has."""
    for name in FURTHER:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"the attention {NAME!r} has no {name!r}, which {type(module).__name__} asks for; "
                "model.set_attn_implementation('eager') computes it, over an Int8Cache too"
            )
    if not isinstance(key, Held):
        return _over_reals(module, query, key, value, attention_mask, **kwargs)
    layer = key.layer
    scaling, causal = kwargs.get("scaling"), kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    queries = query.shape[2]
    if kwargs.get("dropout") or kwargs.get("position_bias") is not None or query.requires_grad:
        if attention_mask is None and causal and queries > 1:  # "sdpa" would take the first keys for the queries' own
            attention_mask = torch.ones(queries, key.shape[2], dtype=torch.bool).tril(key.shape[2] - queries)
        return _over_reals(module, query, layer._reals(0), layer._reals(2), attention_mask, **kwargs)
    y = layer.attend(
        query,
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        attention_mask,
        causal=bool(causal) and attention_mask is None and queries > 1,
    )
    return y.transpose(1, 2).contiguous(), None


def _over_reals(*arguments: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    outcome: tuple[Tensor, Tensor | None] = sdpa_attention_forward(*arguments, **kwargs)
    return outcome


def _added(mask: Tensor | None, length: int) -> Tensor | None:
    """A mask as what is added to scores."""
    if mask is None:
        return None
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attention_mask is {mask.dtype}, expected bool, or real values to add")
    mask = mask[..., :length]
    return torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask.float()


def octet_mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor | None:
    """transformers' mask for "sdpa", and one for several queries always: some models cut queries off behind it."""
    if q_length > 1:
        kwargs["allow_is_causal_skip"] = False
    mask: Tensor | None = sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **kwargs)
    return mask


AttentionInterface.register(NAME, octet_attention)
AttentionMaskInterface.register(NAME, octet_mask)
