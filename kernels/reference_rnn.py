"""The oracle of recurrent layers: one direction of one layer over a whole sequence, in plain torch arithmetic.

The gates and the loop over time are `run_steps`, once, for floats and integers alike. What the two operators differ in
is the product with the state: `rnn_layer` quantises it anew at every step, by the range of each row, `rnn_layer_static`
by a range known beforehand. A caller that brings a float product (fake quantisation) gets the same loop and a
gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from quant.kernels.reference import (
    Product,
    exact_product,
    linear_dynamic,
    linear_of_rows,
    linear_u8s8_f32,
    quantize,
)
from torch import Tensor

MODES = ("lstm", "gru", "rnn_tanh", "rnn_relu")

Step = Callable[[Tensor], Tensor]
"""float32 (rows, K) -> (rows, N): the recurrent product, without bias; or an LSTM's projection; or a rounding."""


def run_steps(
    gates: Tensor,
    sizes: list[int],
    h: Tensor,
    c: Tensor | None,
    bias_hh: Tensor | None,
    mode: str,
    reverse: bool,
    recurrent: Step,
    project: Step | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loop over time; gates as torch.nn.LSTM, GRU and RNN define them.

    Args:
        gates: float32 (rows, gates * H), the input projection of every step with its bias, step after step.
        sizes: rows of each step, never growing.
        h, c: float32 (B, S) and (B, H), the initial state; c for mode "lstm" only.
        bias_hh: float32 (3 * H,) of mode "gru", which multiplies a part of it by a gate; other modes have it in gates.
        recurrent: of the state before, (rows, S) -> (rows, gates * H).
        project: of the LSTM's o * tanh(c), (rows, H) -> (rows, S).

    Returns:
        (y (rows, S), h (B, S), c (B, H), or of shape (0,) where there is none).
    """
    starts = [sum(sizes[:t]) for t in range(len(sizes))]
    outputs: list[Tensor] = [h.new_empty(0)] * len(sizes)
    h, cell = h.clone(), h.new_empty(0) if c is None or mode != "lstm" else c.clone()
    for t in reversed(range(len(sizes))) if reverse else range(len(sizes)):
        rows = sizes[t]
        before = h[:rows]
        product = recurrent(before)
        step = gates[starts[t] : starts[t] + rows]
        if mode == "lstm":
            after, c_after = _lstm_cell(step, product, cell[:rows])
            cell = torch.cat([c_after, cell[rows:]])
        elif mode == "gru":
            after = _gru_cell(step, product, bias_hh, before)
        else:
            after = torch.tanh(step + product) if mode == "rnn_tanh" else torch.relu(step + product)
        if project is not None:
            after = project(after)
        h = torch.cat([after, h[rows:]])
        outputs[t] = after
    return torch.cat(outputs) if outputs else gates.new_empty(0, h.shape[1]), h, cell


def _lstm_cell(step: Tensor, recurrent: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    in_gate, forget, cell, out_gate = (step + recurrent).chunk(4, dim=1)
    c = torch.sigmoid(forget) * c + torch.sigmoid(in_gate) * torch.tanh(cell)
    return torch.sigmoid(out_gate) * torch.tanh(c), c


def _gru_cell(step: Tensor, recurrent: Tensor, bias_hh: Tensor | None, h: Tensor) -> Tensor:
    reset_in, update_in, new_in = step.chunk(3, dim=1)
    reset_h, update_h, new_h = recurrent.chunk(3, dim=1)
    bias_reset, bias_update, bias_new = (0.0, 0.0, 0.0) if bias_hh is None else bias_hh.chunk(3)
    reset = torch.sigmoid(reset_in + reset_h + bias_reset)
    update = torch.sigmoid(update_in + update_h + bias_update)
    new = torch.tanh(new_in + reset * (new_h + bias_new))
    return (1.0 - update) * new + update * h


def input_bias(mode: str, bias_ih: Tensor | None, bias_hh: Tensor | None) -> Tensor | None:
    """What is added to the input projection: both biases, but for the GRU, which multiplies its recurrent one."""
    if mode == "gru" or bias_hh is None:
        return bias_ih
    return bias_hh if bias_ih is None else bias_ih + bias_hh


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
        h, c: float32, (B, S) and (B, H), the initial state; c for mode "lstm" only. S is H, or the projection's size.
        q_weight_ih, scale_ih, columns_ih, activation_bits, per_row: the input projection, as in `linear_dynamic`.
        q_weight_hh, scale_hh: int8 (gates * H, S) and float32 (gates * H,).
        bias_ih, bias_hh: float32 (gates * H,), or None.
        q_weight_hr, scale_hr: int8 (S, H) and float32 (S,), the LSTM's projection, or None.
        mode: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        reverse: run from the last step to the first.

    Returns:
        (y (T, B, S) or (rows, S), h (B, S), c (B, H), or of shape (0,) where there is none).
    """
    sizes = _step_sizes(x, batch_sizes, h, c, q_weight_hh, mode)
    gates = linear_dynamic(
        x,
        q_weight_ih,
        scale_ih,
        input_bias(mode, bias_ih, bias_hh),
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
        gates.reshape(-1, q_weight_ih.shape[0]),
        sizes,
        h,
        c,
        bias_hh,
        mode,
        reverse,
        recurrent,
        None if q_weight_hr is None else project,
    )
    return y.reshape(*x.shape[:-1], q_weight_hh.shape[1]), h, c


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
        m_scale, m_zero_point: of o * tanh(c), which q_weight_hr multiplies; not read without one.
        quantized: give y as the integers of the state, which the next step and the next layer read; else as float32.
        others: as in `rnn_layer`.

    Returns:
        (y uint8 or float32, (T, B, S) or (rows, S); h, c as `rnn_layer`, float32, not rounded).
    """
    sizes = _step_sizes(q_x, batch_sizes, h, c, q_weight_hh, mode)
    gates = linear_u8s8_f32(
        q_x, x_zero_point, q_weight_ih, None, _product_scale(x_scale, scale_ih), product=product
    ).reshape(-1, q_weight_ih.shape[0])
    bias = input_bias(mode, bias_ih, bias_hh)
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
    y, h, c = run_steps(gates, sizes, h, c, bias_hh, mode, reverse, recurrent, last)
    y = quantize(y, h_scale, h_zero_point) if quantized else y
    return y.reshape(*q_x.shape[:-1], q_weight_hh.shape[1]), h, c


def _product_scale(scale: float, weight_scale: Tensor) -> Tensor:
    return torch.tensor(scale, dtype=torch.float32) * weight_scale


def _step_sizes(
    x: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None, q_weight_hh: Tensor, mode: str
) -> list[int]:
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}, expected lstm, gru, rnn_tanh or rnn_relu")
    if batch_sizes is None and x.dim() != 3:
        raise ValueError(f"input has shape {tuple(x.shape)}, expected (time, batch, features)")
    sizes: list[int] = [x.shape[1]] * x.shape[0] if batch_sizes is None else batch_sizes.tolist()
    if h.dim() != 2 or h.shape[1] != q_weight_hh.shape[1] or (sizes and h.shape[0] != sizes[0]):
        batch = sizes[0] if sizes else "batch"
        raise ValueError(f"h has shape {tuple(h.shape)}, expected ({batch}, {q_weight_hh.shape[1]})")
    hidden = q_weight_hh.shape[0] // 4
    if mode == "lstm" and (c is None or c.shape != (h.shape[0], hidden)):
        raise ValueError(f"an LSTM needs c of shape ({h.shape[0]}, {hidden})")
    return sizes


def _check_floats(h: Tensor, c: Tensor | None) -> None:
    for name, given in (("h", h), ("c", c)):
        if given is not None and given.dtype != torch.float32:
            raise TypeError(f"{name} is {given.dtype}, expected torch.float32")
