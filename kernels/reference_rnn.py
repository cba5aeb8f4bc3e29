"""The oracle of recurrent layers: one direction of one layer over a whole sequence, in plain torch arithmetic.

What is computed at a step is the kind's (`recurrent/`), and the loop over time is `run_steps`, once, for floats and
integers alike. What the two operators differ in is the product with the state: `rnn_layer` quantises it anew at every
step, by the range of each row, `rnn_layer_static` by a range known beforehand. A caller that brings a float product
(fake quantisation) gets the same loop and a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from quant.kernels import narrow
from quant.kernels.recurrent.kind import RecurrentKind, find
from quant.kernels.reference import (
    Product,
    exact_product,
    linear_dynamic,
    linear_of_rows,
    linear_u8s8_f32,
    quantize,
)
from torch import Tensor

Step = Callable[[Tensor], Tensor]
"""float32 (rows, K) -> (rows, N): the recurrent product, without bias; or a projection; or a rounding."""


def run_steps(
    kind: RecurrentKind,
    gates: Tensor,
    sizes: list[int],
    h: Tensor,
    c: Tensor | None,
    bias_hh: Tensor | None,
    reverse: bool,
    recurrent: Step,
    project: Step | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loop over time, with the steps of a kind.

    Args:
        gates: float32 (rows, gates * H), the input projection of every step with `kind.input_bias`, step after step.
        sizes: rows of each step, never growing.
        h, c: float32 (B, S) and (B, H), the initial state; c where the kind has one.
        bias_hh: float32 (gates * H,), or None; read where the kind does not sum biases.
        recurrent: of the state before, (rows, S) -> (rows, gates * H).
        project: of what a step gives, (rows, H) -> (rows, S).

    Returns:
        (y (rows, S), h (B, S), c (B, H), or of shape (0,) where there is none).
    """
    starts = [sum(sizes[:t]) for t in range(len(sizes))]
    outputs: list[Tensor] = [h.new_empty(0)] * len(sizes)
    h, cell = h.clone(), h.new_empty(0) if c is None or not kind.has_cell else c.clone()
    bias = None if kind.sums_biases else bias_hh
    for t in reversed(range(len(sizes))) if reverse else range(len(sizes)):
        rows = sizes[t]
        before = h[:rows]
        product = recurrent(before)
        step = gates[starts[t] : starts[t] + rows]
        after, c_after = kind.step(step, product, bias, before, cell[:rows] if kind.has_cell else None)
        if c_after is not None:
            cell = torch.cat([c_after, cell[rows:]])
        if project is not None:
            after = project(after)
        h = torch.cat([after, h[rows:]])
        outputs[t] = after
    return torch.cat(outputs) if outputs else gates.new_empty(0, h.shape[1]), h, cell


def rnn_layer(
    x: Tensor,
    batch_sizes: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    q_weight_ih: Tensor,
    scale_ih: Tensor,
    columns_ih: Tensor | None,
    activation_bits: int,
    per_row: bool,
    q_weight_hh: Tensor,
    scale_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    q_weight_hr: Tensor | None,
    scale_hr: Tensor | None,
    mode: str,
    reverse: bool,
    *,
    product: Product = exact_product,
) -> tuple[Tensor, Tensor, Tensor]:
    """One direction of one recurrent layer over a whole sequence, in and out in float32.

    The input projection is one product for all time steps; the state is quantised anew, per row, at every step.

    Args:
        x: float32, (T, B, I), or (rows, I) with batch_sizes.
        batch_sizes: int64 (T,), rows of each step, never growing (torch's PackedSequence); None: B rows at each.
        h, c: float32, (B, S) and (B, H), the initial state; c where the kind has one. S is H, or the projection's size.
        q_weight_ih, scale_ih, columns_ih, activation_bits, per_row: the input projection, as in `linear_dynamic`.
        q_weight_hh, scale_hh: int8 (gates * H, S) and float32 (gates * H,).
        bias_ih, bias_hh: float32 (gates * H,), or None.
        q_weight_hr, scale_hr: int8 (S, H) and float32 (S,), the projection of a kind that has one, or None.
        mode: the name of the kind.
        reverse: run from the last step to the first.

    Returns:
        (y (T, B, S) or (rows, S), h (B, S), c (B, H), or of shape (0,) where there is none).
    """
    kind = find(mode)
    sizes = _step_sizes(kind, x, batch_sizes, h, c, q_weight_hh, q_weight_hr)
    gates = linear_dynamic(
        x,
        q_weight_ih,
        scale_ih,
        kind.input_bias(bias_ih, bias_hh),
        columns_ih,
        activation_bits,
        per_row,
        False,
        product=product,
    )
    _check_floats(h, c)

    def recurrent(before: Tensor) -> Tensor:
        return linear_of_rows(before, q_weight_hh, scale_hh, 8, product=product)

    def project(after: Tensor) -> Tensor:
        assert q_weight_hr is not None
        assert scale_hr is not None
        return linear_of_rows(after, q_weight_hr, scale_hr, 8, product=product)

    y, h, c = run_steps(
        kind,
        gates.reshape(-1, q_weight_ih.shape[0]),
        sizes,
        h,
        c,
        bias_hh,
        reverse,
        recurrent,
        None if q_weight_hr is None else project,
    )
    return y.reshape(*x.shape[:-1], narrow.columns_of(q_weight_hh)), h, c


def rnn_layer_static(
    q_x: Tensor,
    x_scale: float,
    x_zero_point: int,
    batch_sizes: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    q_weight_ih: Tensor,
    scale_ih: Tensor,
    q_weight_hh: Tensor,
    scale_hh: Tensor,
    bias_ih: Tensor | None,
    bias_hh: Tensor | None,
    h_scale: float,
    h_zero_point: int,
    q_weight_hr: Tensor | None,
    scale_hr: Tensor | None,
    m_scale: float,
    m_zero_point: int,
    mode: str,
    reverse: bool,
    quantized: bool,
    *,
    product: Product = exact_product,
) -> tuple[Tensor, Tensor, Tensor]:
    """`rnn_layer` with ranges known beforehand (equation 9): of the input, the state, and what a projection reads.

    Args:
        q_x: uint8, (T, B, I), or (rows, I) with batch_sizes; x_scale and x_zero_point are its.
        h, c: float32, the initial state. It is quantised as every later one is, so a sequence in two calls gives what
            it gives in one.
        h_scale, h_zero_point: of the state, the same at every step.
        m_scale, m_zero_point: of what q_weight_hr multiplies; not read without one.
        quantized: give y as the integers of the state, which the next step and the next layer read; else as float32.
        others: as in `rnn_layer`.

    Returns:
        (y uint8 or float32, (T, B, S) or (rows, S); h, c as `rnn_layer`, float32, not rounded).
    """
    kind = find(mode)
    sizes = _step_sizes(kind, q_x, batch_sizes, h, c, q_weight_hh, q_weight_hr)
    gates = linear_u8s8_f32(
        q_x, x_zero_point, q_weight_ih, None, _product_scale(x_scale, scale_ih), product=product
    ).reshape(-1, q_weight_ih.shape[0])
    bias = kind.input_bias(bias_ih, bias_hh)
    if bias is not None:
        gates = gates + bias
    _check_floats(h, c)

    def recurrent(before: Tensor) -> Tensor:
        q_h = quantize(before, h_scale, h_zero_point)
        factors = _product_scale(h_scale, scale_hh)
        return linear_u8s8_f32(q_h, h_zero_point, q_weight_hh, None, factors, product=product)

    def project(after: Tensor) -> Tensor:
        assert q_weight_hr is not None
        assert scale_hr is not None
        q_m = quantize(after, m_scale, m_zero_point)
        factors = _product_scale(m_scale, scale_hr)
        return linear_u8s8_f32(q_m, m_zero_point, q_weight_hr, None, factors, product=product)

    last = None if q_weight_hr is None else project
    y, h, c = run_steps(kind, gates, sizes, h, c, bias_hh, reverse, recurrent, last)
    y = quantize(y, h_scale, h_zero_point) if quantized else y
    return y.reshape(*q_x.shape[:-1], narrow.columns_of(q_weight_hh)), h, c


def _product_scale(scale: float, weight_scale: Tensor) -> Tensor:
    return torch.tensor(scale, dtype=torch.float32) * weight_scale


def _step_sizes(
    kind: RecurrentKind,
    x: Tensor,
    batch_sizes: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    q_weight_hh: Tensor,
    q_weight_hr: Tensor | None,
) -> list[int]:
    if q_weight_hr is not None and not kind.projects:
        raise ValueError(f"mode {kind.name!r} has no projection, expected no q_weight_hr")
    if batch_sizes is None and x.dim() != 3:
        raise ValueError(f"input has shape {tuple(x.shape)}, expected (time, batch, features)")
    sizes: list[int] = [x.shape[1]] * x.shape[0] if batch_sizes is None else batch_sizes.tolist()
    if batch_sizes is not None and (x.dim() != 2 or sum(sizes) != x.shape[0]):
        raise ValueError(f"input has shape {tuple(x.shape)}, expected ({sum(sizes)}, features) by batch_sizes")
    if batch_sizes is not None and sizes != sorted((one for one in sizes if one > 0), reverse=True):
        raise ValueError("batch_sizes must be positive and never grow")
    state = narrow.columns_of(q_weight_hh)
    if h.dim() != 2 or h.shape[1] != state or (sizes and h.shape[0] != sizes[0]):
        batch = sizes[0] if sizes else "batch"
        raise ValueError(f"h has shape {tuple(h.shape)}, expected ({batch}, {state})")
    hidden = q_weight_hh.shape[0] // kind.gates
    if kind.has_cell and (c is None or c.shape != (h.shape[0], hidden)):
        raise ValueError(f"mode {kind.name!r} needs c of shape ({h.shape[0]}, {hidden})")
    return sizes


def _check_floats(h: Tensor, c: Tensor | None) -> None:
    for name, state in (("h", h), ("c", c)):
        if state is not None and state.dtype != torch.float32:
            raise TypeError(f"{name} is {state.dtype}, expected torch.float32")
