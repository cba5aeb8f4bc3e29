"""Valid calls of every operator of `torch.ops.octet`, drawn at random, from plain to adversarial.

`CALLS` has a function for each; a test fails when an operator has none. Activations lie at the edge of memory that may
be read (`guarded`), as slices, transposed, expanded or channels last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from quant.kernels import narrow, ops, reference, tables
from quant.kernels.recurrent.kind import kinds
from quant.observers.one_pass import contracts
from torch import Tensor

from tests.kernels.fuzzing import Draws
from tests.kernels.guarded import Guarded

MEMORY = Guarded()
SIZES = (1, 2, 3, 0, 4, 5, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33, 61, 63, 64, 65, 127, 128, 129, 191, 251, 257)
DEEP = (reference.MAX_K, reference.MAX_K - 1, 33025, 32768, 4099)
INT32 = 2**31 - 1


def size(draws: Draws, most: int) -> int:
    return draws.choice([one for one in SIZES if one <= most])


def _most(draws: Draws, small: int = 17, medium: int = 65, large: int = 257) -> int:
    """The bound of a case's sizes: small for most."""
    return (small, medium, large)[max(0, draws.below(20) - 17)]


def operand(draws: Draws, values: Tensor, *, whole: bool = False) -> Tensor:
    """The values at the edge of memory, in one of several layouts; contiguous where they are to be `whole`."""
    how = draws.below(3 if whole else 8)
    if how <= 1 or values.dim() == 0:
        return MEMORY.copy(values, at_end=how == 0)
    if how == 2:  # behind one more value: misaligned, for all but the narrowest vectors
        behind = MEMORY.copy(torch.cat([values.reshape(-1)[:1], values.reshape(-1)]))
        return behind[min(1, values.numel()) :].view(values.shape)
    dim = draws.below(values.dim())
    if how == 3:
        return MEMORY.copy(values.transpose(dim, -1).contiguous()).transpose(dim, -1)
    if how == 4:
        return MEMORY.copy(values.repeat_interleave(2, dim))[(slice(None),) * dim + (slice(None, None, 2),)]
    if how == 5:
        wide = MEMORY.copy(torch.cat([values, values.flip(dim)], dim), at_end=False)
        return wide.narrow(dim, 0, values.shape[dim])
    if how == 6 and values.dim() > 2:
        return MEMORY.copy(values.movedim(1, -1).contiguous()).movedim(-1, 1)
    if how == 7 and values.shape[dim]:
        return MEMORY.copy(values.narrow(dim, 0, 1)).expand(values.shape)
    return MEMORY.copy(values)


def byte(draws: Draws) -> int:
    return draws.choice((0, 128, 255, 1, 254, draws.below(256)))


def activations(draws: Draws, shape: Sequence[int]) -> Tensor:
    """uint8, random or at the ends."""
    g, how = draws.generator(), draws.below(5)
    if how == 1:
        return operand(draws, torch.full(tuple(shape), 255, dtype=torch.uint8))
    if how == 2:
        return operand(draws, torch.randint(0, 2, tuple(shape), dtype=torch.uint8, generator=g) * 255)
    return operand(draws, torch.randint(0, 256, tuple(shape), dtype=torch.uint8, generator=g))


def integer_weight(draws: Draws, shape: Sequence[int]) -> Tensor:
    """int8, of all routes that products have: any, without -128, pairs that fit 16 bits, and the ends alone."""
    g, how = draws.generator(), draws.below(8)
    low, high = ((-128, 128), (-127, 128), (-64, 65), (-1, 2), (-128, 128), (0, 2), (127, 128), (-128, -127))[how]
    values = torch.randint(low, high, tuple(shape), generator=g).to(torch.int8)
    if how == 5:
        values = torch.where(values > 0, torch.tensor(127, dtype=torch.int8), torch.tensor(-127, dtype=torch.int8))
    return values


def linear_weight(draws: Draws, n: int, k: int) -> Tensor:
    """int8 (n, k), or narrow where k allows it."""
    if draws.one_in(4) and narrow.fits(k, 4):
        bits = draws.choice(narrow.NARROW_BITS)
        u = torch.randint(0, 2**bits, (n, k), generator=draws.generator())
        return operand(draws, narrow.pack(u, bits), whole=True)
    return operand(draws, integer_weight(draws, (n, k)), whole=True)


def bias32(draws: Draws, n: int) -> Tensor | None:
    how = draws.below(4)
    if how == 0:
        return None
    most = (9999, 9999, 2**30, 0)[how]
    values = torch.randint(-most, most + 1, (n,), generator=draws.generator()).to(torch.int32)
    return operand(draws, values.sign() * 2**30 if how == 2 else values)


MULTIPLIERS = (0.002, 1.0, 0.5, 2.0**-126, 1e-38, 2.0**-31, 1e30, 3.0e38, 1.1754942e-38, 1e-45, 0.99999994)


def multiplier(draws: Draws, shape: Sequence[int]) -> Tensor:
    """float32, finite: such as layers have, extreme ones, and of either sign."""
    values = torch.rand(tuple(shape), generator=draws.generator()).clamp(min=1e-6) / draws.choice((500, 2, 10**5))
    if draws.one_in(3):
        values.fill_(draws.choice(MULTIPLIERS))
    if draws.one_in(8):
        values *= torch.randint(0, 2, values.shape, generator=draws.generator()) * 2 - 1
    return operand(draws, values)


def ordered(draws: Draws) -> tuple[int, int]:
    low, high = sorted((draws.choice((0, byte(draws))), draws.choice((255, byte(draws)))))
    return low, high


SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-40, 3.4e38, -3.4e38, 0.5, 1.5, -0.5)


def reals(draws: Draws, shape: Sequence[int], *, special: bool = True) -> Tensor:
    """float32, some with values that no integer stands for, halves, or of one value."""
    return operand(draws, real_values(draws, shape, special=special))


def real_values(draws: Draws, shape: Sequence[int], *, special: bool = True) -> Tensor:
    g, how = draws.generator(), draws.below(6)
    values = torch.randn(tuple(shape), generator=g) * draws.choice((1.0, 1e-3, 100.0, 1e20, 1e-30))
    if how == 1:
        values = torch.randint(-600, 600, tuple(shape), generator=g) / 2
    elif how == 2:
        values = torch.full(tuple(shape), draws.choice((1.0, 0.0, -3.0, -0.0)))
    elif how == 3:
        values = values.abs()
    if special and values.numel() and draws.one_in(4):
        flat = values.view(-1)
        for _ in range(1 + draws.below(3)):
            flat[draws.below(flat.numel())] = draws.choice(SPECIAL)
    return values


def real_vector(draws: Draws, n: int) -> Tensor | None:
    if draws.below(2) == 0:
        return None
    return operand(draws, torch.randn(n, generator=draws.generator()) * draws.choice((1.0, 1e-6, 1e6)))


SCALES = (0.02, 1.0, 2.0**-126, 1e-10, 1e30, 3e38, 0.1, 127.0)


def scale(draws: Draws) -> float:
    return draws.choice(SCALES)


def shape_of(draws: Draws, most: int, ranks: Sequence[int] = (2, 1, 3, 4, 0, 5)) -> list[int]:
    """A shape of no more values than a small case has."""
    shape, left = [], most * most
    for _ in range(draws.choice(ranks)):
        shape.append(size(draws, min(most, max(left, 1))))
        left //= max(shape[-1], 1)
    return shape


def leading(draws: Draws, most: int) -> list[int]:
    """The dimensions before a linear layer's features: rows, none, or a batch of sequences."""
    return [[size(draws, most)], [], [size(draws, 5), size(draws, min(most, 17))]][draws.below(3)]


def linear(draws: Draws) -> list[Any]:
    most = _most(draws)
    deep = draws.one_in(100)
    k, n = draws.choice(DEEP) if deep else size(draws, most), size(draws, 5 if deep else most)
    q_x = activations(draws, [*(leading(draws, 3 if deep else most)), k])
    return [q_x, byte(draws), linear_weight(draws, n, k), bias32(draws, n)]


def outputs_of(weight: Tensor) -> int:
    return int(weight.shape[0])


def conv(draws: Draws) -> list[Any]:
    dims = draws.choice((2, 2, 2, 1, 3))
    wide = draws.one_in(12)
    groups = draws.choice((1, 1, 1, 2, 3, 0))
    depth = size(draws, 65 if wide else 17)
    if groups == 0:  # depthwise
        groups, channels, outputs = depth, 1, depth
    else:
        channels, outputs = depth, groups * size(draws, 65 if wide else 17)
    if channels == 0 or outputs == 0:
        groups = 1
    kernel = [draws.choice((1, 3, 2, 5, 7)[: 3 if dims == 3 else 5]) for _ in range(dims)]
    stride, dilation = ([1 + draws.below(3) // 2 for _ in range(dims)] for _ in range(2))
    padding = [draws.choice((0, 1, 2, 3)) for _ in range(dims)]
    reach = [apart * (taps - 1) + 1 - 2 * pad for apart, taps, pad in zip(dilation, kernel, padding, strict=True)]
    spatial = [max(least, size(draws, 8 if dims == 3 else 33 if wide else 13)) for least in reach]
    q_x = activations(draws, [draws.choice((1, 2, 3, 0)), channels * groups, *spatial])
    weight = operand(draws, integer_weight(draws, (outputs, channels, *kernel)))
    return [q_x, byte(draws), weight, bias32(draws, outputs), stride, padding, dilation, groups]


def to_f32(call: Callable[[Draws], list[Any]]) -> Callable[[Draws], list[Any]]:
    def made(draws: Draws) -> list[Any]:
        arguments = call(draws)
        return [*arguments, multiplier(draws, [outputs_of(arguments[2])])]

    return made


def to_u8(call: Callable[[Draws], list[Any]]) -> Callable[[Draws], list[Any]]:
    def made(draws: Draws) -> list[Any]:
        return [*to_f32(call)(draws), byte(draws), *ordered(draws)]

    return made


def quantize(draws: Draws) -> list[Any]:
    by = scale(draws)
    x = real_values(draws, shape_of(draws, _most(draws)))
    return [operand(draws, x * by if draws.below(2) else x), by, byte(draws)]


def dequantize(draws: Draws) -> list[Any]:
    return [activations(draws, shape_of(draws, _most(draws))), scale(draws), byte(draws)]


def requantize(draws: Draws) -> list[Any]:
    shape = shape_of(draws, _most(draws))
    most = draws.choice((2**16, INT32, 300))
    sums = torch.randint(-most - 1, most + 1, tuple(shape), generator=draws.generator()).to(torch.int32)
    by = multiplier(draws, [shape[-1]] if shape and draws.below(2) else [])
    return [operand(draws, sums), by, byte(draws), *ordered(draws)]


def dynamic_operands(draws: Draws, n: int, k: int) -> list[Any]:
    """Weight and scale; by group too."""
    weight = linear_weight(draws, n, k)
    if narrow.is_narrow(weight) and draws.below(2):
        group = draws.choice([one for one in narrow.GROUP_SIZES if k % one == 0])
        shape = (n, k // group)
        by = torch.rand(shape, generator=draws.generator()) / 50
        if draws.below(2):
            top = 2 ** weight.shape[1]
            points = torch.randint(0, top, shape, generator=draws.generator()).to(torch.float32)
            by = torch.stack([by, points], dim=2)
        return [weight, operand(draws, by.to(draws.choice((torch.float32, torch.float16))), whole=True)]
    return [weight, operand(draws, torch.rand(n, generator=draws.generator()) / 50)]


def linear_dynamic_plain(draws: Draws) -> list[Any]:
    most = _most(draws)
    k, n = size(draws, most), size(draws, most)
    x = reals(draws, [*leading(draws, most), k])
    return [x, *dynamic_operands(draws, n, k), real_vector(draws, n)]


def linear_dynamic(draws: Draws) -> list[Any]:
    arguments = linear_dynamic_plain(draws)
    columns = real_vector(draws, arguments[0].shape[-1])
    return [*arguments, columns, draws.choice((8, 16)), bool(draws.below(2) == 0), bool(draws.below(2))]


def _recurrent(draws: Draws, static: bool) -> dict[str, Any]:
    kind = draws.choice([one for one in kinds() if one.native])
    wide = draws.one_in(30)
    steps, batch = size(draws, 5), size(draws, 9)
    features, hidden = (max(1, size(draws, 129 if wide else 17)) for _ in range(2))
    projects = kind.projects and draws.below(3) == 2
    state = max(1, size(draws, hidden)) if projects else hidden
    width = kind.gates * hidden
    sizes = None
    shape: list[int] = [steps, batch, features]
    if draws.below(3) == 2 and batch and steps:
        counts = sorted((1 + draws.below(batch) for _ in range(steps - 1)), reverse=True)
        sizes = torch.tensor([batch, *counts])
        shape = [int(sizes.sum()), features]

    def weight(n: int, k: int) -> tuple[Tensor, Tensor]:
        q = operand(draws, integer_weight(draws, (n, k)), whole=True)
        return q, operand(draws, torch.rand(n, generator=draws.generator()) / (127 * max(k, 1)) + 1e-5)

    g = draws.generator()
    ih, hh = weight(width, features), weight(width, state)
    hr = weight(state, hidden) if projects else (None, None)
    x = activations(draws, shape) if static else operand(draws, torch.randn(shape, generator=g))
    return {
        "x": x,
        "batch_sizes": sizes,
        "h": operand(draws, torch.rand(batch, state, generator=g) * 2 - 1),
        "c": operand(draws, torch.randn(batch, hidden, generator=g)) if kind.has_cell else None,
        "ih": ih,
        "hh": hh,
        "hr": hr,
        "bias_ih": real_vector(draws, width),
        "bias_hh": real_vector(draws, width),
        "columns": None if draws.below(2) == 0 else operand(draws, torch.rand(features, generator=g) + 0.5),
        "mode": kind.name,
        "reverse": bool(draws.below(2)),
    }


def rnn_layer(draws: Draws) -> list[Any]:
    of = _recurrent(draws, False)
    settings = [draws.choice((8, 16)), bool(draws.below(2) == 0)]
    head = [of["x"], of["batch_sizes"], of["h"], of["c"], *of["ih"], of["columns"], *settings]
    return [*head, *of["hh"], of["bias_ih"], of["bias_hh"], *of["hr"], of["mode"], of["reverse"]]


def rnn_layer_static(draws: Draws) -> list[Any]:
    of = _recurrent(draws, True)
    head = [of["x"], 0.02, byte(draws), of["batch_sizes"], of["h"], of["c"], *of["ih"], *of["hh"]]
    middle = [of["bias_ih"], of["bias_hh"], 1 / 127, byte(draws), *of["hr"], 1 / 127, byte(draws)]
    return [*head, *middle, of["mode"], of["reverse"], bool(draws.below(2))]


def fake_quantize(draws: Draws) -> list[Any]:
    shape = shape_of(draws, _most(draws))
    axis = draws.below(len(shape)) if shape and draws.below(2) else None
    count: tuple[int, ...] = () if axis is None else (shape[axis],)
    low, high = draws.choice(((0, 255), (-127, 127), (-8, 7), (0, 65535)))
    by = torch.rand(count, generator=draws.generator()).clamp(min=1e-3) * draws.choice((0.05, 1.0, 1e-20))
    point = torch.randint(low, high + 1, count, generator=draws.generator()).to(torch.int32)
    ends = draws.choice(((-math.inf, math.inf), (0.0, 6.0), (-1.0, 1.0)))
    if axis is not None and draws.below(2):
        axis -= len(shape)
    return [
        reals(draws, shape),
        operand(draws, by),
        operand(draws, point),
        axis,
        low,
        high,
        *ends,
        bool(draws.below(2)),
    ]


def masked_gradient(draws: Draws) -> list[Any]:
    shape = shape_of(draws, _most(draws))
    mask = torch.rand(tuple(shape), generator=draws.generator()) < 0.5
    return [reals(draws, shape), operand(draws, mask)]


def _kept(values: float, dtype: torch.dtype, shape: Sequence[int] = ()) -> Tensor:
    return MEMORY.copy(torch.full(tuple(shape), values, dtype=dtype))


def follow_range(draws: Draws) -> list[Any]:
    low, high = draws.choice(((0, 255), (-127, 127)))
    middle = None if draws.below(2) == 0 else (128 if low == 0 else 0)
    begun = draws.below(2)
    ends = draws.choice(((-math.inf, math.inf), (0.0, 6.0)))
    state = [_kept(-1.5 if begun else math.inf, torch.float32), _kept(2.5 if begun else -math.inf, torch.float32)]
    counts = [_kept(begun, torch.int64), _kept(0, torch.int64), _kept(0, torch.int64)]
    scales = [_kept(1, torch.float32), _kept(0, torch.int32)]
    momentum = draws.choice((0.1, 1.0, 0.01))
    return [reals(draws, shape_of(draws, _most(draws))), momentum, *ends, low, high, middle, *state, *counts, *scales]


def round_weight(draws: Draws) -> list[Any]:
    shape = shape_of(draws, _most(draws), (2, 4, 1, 3))
    rows = shape[0]
    gain = real_vector(draws, rows)
    with_bias = draws.below(2)
    bias = operand(draws, torch.randn(rows, generator=draws.generator())) if with_bias else None
    weight = reals(draws, shape, special=False)
    return [weight, gain, bias, _kept(0.02, torch.float32) if with_bias else None, 2.0**30, draws.choice((127, 7, 1))]


def batch_statistics(draws: Draws) -> list[Any]:
    shape = [max(1, one) for one in shape_of(draws, _most(draws), (2, 4, 3, 5))]
    return [reals(draws, shape, special=False)]


BINS = (2048, 8, 254, 32768)
WIDTHS = (2.0**-7, 1.0, 2.0**-126, 2.0**126, 2.0**-30)


def histogram(draws: Draws) -> list[Any]:
    return [reals(draws, [size(draws, _most(draws))]), draws.choice(WIDTHS), draws.choice(BINS)]


def _observed(draws: Draws, rows: int) -> list[Tensor]:
    """low, high, nan_count, inf_count, counts; as they are before anything is seen."""
    bins = draws.choice(BINS)
    ends = [_kept(math.inf, torch.float32, [rows]), _kept(-math.inf, torch.float32, [rows])]
    return [*ends, _kept(0, torch.int64), _kept(0, torch.int64), _kept(0, torch.int64, [rows, bins])]


def observe_histogram(draws: Draws) -> list[Any]:
    rows, n = size(draws, 9), size(draws, _most(draws))
    return [reals(draws, [rows, n]), *_observed(draws, rows)]


def channel_sums(draws: Draws) -> list[Any]:
    shape = shape_of(draws, _most(draws), (2, 1, 3, 4))
    axis = draws.below(len(shape))
    x = operand(draws, _summed(real_values(draws, shape)))
    return [x, axis - len(shape) if draws.below(2) else axis]


def _summed(x: Tensor) -> Tensor:
    """The largest values of one sign: what is left where they cancel depends on the order of the sum."""
    return torch.where((x.abs() > 1e38) & x.isfinite(), x.abs(), x)


def _means(draws: Draws, channels: int) -> list[Tensor]:
    means = []
    for _ in range(draws.below(3)):
        means += [_kept(0, torch.float64, [channels]), _kept(0, torch.int64)]
        means += [_kept(math.inf, torch.float32, [1]), _kept(-math.inf, torch.float32, [1])]
    return means


def depthwise_f32(draws: Draws) -> list[Any]:
    """Of one sign: what is left where products cancel depends on the order of the sum, and on what is fused."""
    wide = draws.one_in(12)
    channels = size(draws, 65 if wide else 9)
    kernel = [draws.choice((3, 1, 2, 5, 7)) for _ in range(2)]
    stride, dilation = ([1 + draws.below(4) // 2 for _ in range(2)] for _ in range(2))
    padding = [draws.choice((1, 0, 2, 3)) for _ in range(2)]
    reach = [apart * (taps - 1) + 1 - 2 * pad for apart, taps, pad in zip(dilation, kernel, padding, strict=True)]
    spatial = [max(least, 1, size(draws, 65 if wide else 17)) for least in reach]
    x = operand(draws, real_values(draws, [draws.choice((1, 2, 3, 0)), channels, *spatial]).abs())
    weight = operand(draws, torch.randn(channels, 1, *kernel, generator=draws.generator()).abs())
    bias = real_vector(draws, channels)
    return [x, weight, None if bias is None else MEMORY.copy(bias.abs()), stride, padding, dilation]


def _byte_cache(
    draws: Draws, *, blocked: bool, batch: int, heads: int, blocks: int, width: int
) -> tuple[Tensor, Tensor]:
    sizes = (batch, heads, blocks, width, 16) if blocked else (batch, heads, blocks * 16, width)
    q = torch.randint(-127, 128, sizes, dtype=torch.int8, generator=draws.generator())
    return MEMORY.copy(q), MEMORY.copy(torch.rand(batch, heads, blocks * 16, generator=draws.generator()))


def write_byte_cache(draws: Draws) -> list[Any]:
    batch, heads, blocks, width = draws.choice((1, 2, 0)), 1 + draws.below(3), 1 + draws.below(3), size(draws, 40)
    cache, scale = _byte_cache(draws, blocked=not draws.below(2), batch=batch, heads=heads, blocks=blocks, width=width)
    tokens = draws.below(blocks * 16 + 1)
    x = operand(draws, real_values(draws, [batch, heads, tokens, width]))
    return [x, draws.below(blocks * 16 - tokens + 1), cache, scale]


def attend_byte_cache(draws: Draws) -> list[Any]:
    """Of values of one sign: what is left where they cancel depends on the order of the sum."""
    batch, heads, blocks = draws.choice((1, 2, 0)), 1 + draws.below(3), 1 + draws.below(9)
    width, mixed, queries = 1 + size(draws, 70), size(draws, 140), draws.choice((1, 2, 5, 0))
    keys, key_scale = _byte_cache(draws, blocked=True, batch=batch, heads=heads, blocks=blocks, width=width)
    values, value_scale = _byte_cache(draws, blocked=False, batch=batch, heads=heads, blocks=blocks, width=mixed)
    length = max(1, queries, 1 + draws.below(blocks * 16))
    q = operand(
        draws, torch.randn(batch, heads * (1 + draws.below(5)), queries, width, generator=draws.generator()) / 100
    )
    causal = draws.one_in(3)
    mask = None
    if not causal and draws.one_in(2):
        mask = torch.randn(batch, 1, queries, length, generator=draws.generator())
        mask = operand(draws, mask.masked_fill(mask > 1, -torch.inf))
    return [q, keys, key_scale, MEMORY.copy(values.abs()), value_scale, length, 0.1, causal, mask]


def observe_activation(draws: Draws) -> list[Any]:
    x, axis = channel_sums(draws)
    return [x, axis, *_observed(draws, 1), _means(draws, x.shape[axis])]


def observe_normalized(draws: Draws) -> list[Any]:
    shape = shape_of(draws, _most(draws), (4, 3, 5))
    channels = shape[1] = max(1, shape[1])
    by: list[Tensor | None] = [None, None, None, None]
    if draws.below(2):
        g = draws.generator()
        by = [torch.randn(channels, generator=g), torch.rand(channels, generator=g) + 0.1, real_vector(draws, channels)]
        by = [one if one is None else MEMORY.copy(one) for one in (*by, real_vector(draws, channels))]
    x = MEMORY.copy(_summed(real_values(draws, shape)), at_end=bool(draws.below(2) == 0))
    ends = draws.choice(((-math.inf, math.inf), (0.0, 6.0)))
    return [x, *by, 1e-5, bool(contracts()), *ends, *_observed(draws, 1), _means(draws, channels)]


def _table(draws: Draws) -> tuple[Tensor, int, int]:
    bits, dim = draws.choice(tables.TABLE_BITS), max(1, size(draws, 129))
    count = max(1, size(draws, 33))
    group = None
    if bits < 8 and draws.below(3) == 2:
        group = draws.choice([one for one in range(1, dim + 1) if dim % one == 0])
    weight = torch.randn(count, dim, generator=draws.generator()) * draws.choice((1.0, 100.0, 1e-3))
    return operand(draws, tables.pack_table(weight, bits, group), whole=True), bits, dim


def _indices(draws: Draws, count: int, shape: Sequence[int]) -> Tensor:
    dtype = draws.choice((torch.int64, torch.int32))
    return operand(draws, torch.randint(0, count, tuple(shape), dtype=dtype, generator=draws.generator()))


def embedding(draws: Draws) -> list[Any]:
    rows, bits, dim = _table(draws)
    return [rows, _indices(draws, rows.shape[0], shape_of(draws, 9)), bits, dim]


def embedding_bag(draws: Draws) -> list[Any]:
    rows, bits, dim = _table(draws)
    mode = draws.choice(("sum", "mean", "max"))
    count, bags, last = size(draws, 129), size(draws, 33), bool(draws.below(2))
    offsets = [0] if bags or last else []
    for _ in range(bags - 1 + (last and bags > 0)):
        offsets.append(offsets[-1] + draws.below(min(count - offsets[-1], 9) + 1))
    if not offsets:
        count = 0
    indices = _indices(draws, rows.shape[0], [count])
    weights = (
        operand(draws, torch.randn(count, generator=draws.generator())) if mode == "sum" and draws.below(2) else None
    )
    starts = operand(draws, torch.tensor(offsets, dtype=indices.dtype))
    return [rows, indices, starts, weights, bits, dim, mode, last, draws.choice((-1, 0, rows.shape[0] - 1))]


def run_plan(draws: Draws) -> list[Any]:
    """One of the plans that tests have; random programs are those of fuzz_plans.py."""
    from tests.kernels.plan_mutations import EXTRA
    from tests.kernels.test_plan import CASES, network

    inputs, constants, program = draws.choice([*CASES.values(), *EXTRA.values(), network()])
    return [[operand(draws, one) for one in inputs], [operand(draws, one, whole=True) for one in constants], program]


CALLS: dict[str, Callable[[Draws], list[Any]]] = {
    "quantize": quantize,
    "dequantize": dequantize,
    "requantize": requantize,
    "linear_u8s8_s32": linear,
    "linear_u8s8_f32": to_f32(linear),
    "linear_u8s8_u8": to_u8(linear),
    "conv_u8s8_s32": conv,
    "conv_u8s8_f32": to_f32(conv),
    "conv_u8s8_u8": to_u8(conv),
    "run_plan": run_plan,
    "run_plan_of_finite": run_plan,
    "linear_dynamic": linear_dynamic,
    "linear_dynamic_plain": linear_dynamic_plain,
    "rnn_layer": rnn_layer,
    "fake_quantize": fake_quantize,
    "masked_gradient": masked_gradient,
    "follow_range": follow_range,
    "round_weight": round_weight,
    "batch_statistics": batch_statistics,
    "histogram": histogram,
    "observe_histogram": observe_histogram,
    "channel_sums": channel_sums,
    "depthwise_f32": depthwise_f32,
    "write_byte_cache": write_byte_cache,
    "attend_byte_cache": attend_byte_cache,
    "observe_activation": observe_activation,
    "observe_normalized": observe_normalized,
    "rnn_layer_static": rnn_layer_static,
    "embedding": embedding,
    "embedding_bag": embedding_bag,
}
"""Operator -> its arguments, less the backend."""


def reference_of(name: str) -> Callable[..., Any]:
    """The reference of an operator, which takes no backend."""
    module = next((module for kind, module in ops.ELSEWHERE.items() if name.startswith(kind)), reference)
    function: Callable[..., Any] = getattr(module, name)
    return function


def words(value: Any) -> str:
    """An argument in a failure's message."""
    if isinstance(value, Tensor):
        at = f", strides {value.stride()}" if value.layout == torch.strided and not value.is_contiguous() else ""
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {tuple(value.shape)}{at}{'' if value.device.type == 'cpu' else f' on {value.device}'}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(words, value))}]"
    return repr(value)


def described(name: str, arguments: Sequence[Any]) -> str:
    """A call in words, an argument a line."""
    names = (
        [one.name for one in torch._C.parse_schema(name + ops.SCHEMAS[name]).arguments] if name in ops.SCHEMAS else []
    )
    named = [*names, *[""] * len(arguments)]
    return "\n".join([name, *(f"    {one}: {words(value)}" for one, value in zip(named, arguments, strict=False))])
