"""What a backend is: a name, a reason when it cannot be used, and the operators.

A new backend is one file with a subclass that brings `product`, the exact int32 product of u8 activations and s8
weights, and one line of registration in `dispatch.py`; every operator then exists, in the reference's arithmetic around
that product. A backend that can do better overrides the operators themselves.
"""

from __future__ import annotations

import torch
from quant.kernels import reference, reference_rnn, tables
from torch import Tensor


class Backend:
    """The operators of `quant.kernels`, with the signatures and meaning of `reference.py` and `tables.py`."""

    name: str

    def why_not(self) -> str:
        """'' where the backend can be used on this machine, else the reason it cannot."""
        return ""

    def product(self, q_x: Tensor, q_weight: Tensor) -> Tensor:
        """uint8 (rows, K), int8 (N, K) -> int32 (rows, N), exact whatever the values (equation 5)."""
        raise NotImplementedError(f"backend {self.name!r} brings no product")

    def route(self, q_weight: Tensor) -> str:
        """How the products with this weight are formed here, for the report."""
        return "exact"

    def linear_u8s8_s32(self, q_x: Tensor, zero_point: int, q_weight: Tensor, q_bias: Tensor | None) -> Tensor:
        return reference.linear_u8s8_s32(q_x, zero_point, q_weight, q_bias, product=self.product)

    def linear_u8s8_f32(
        self, q_x: Tensor, zero_point: int, q_weight: Tensor, q_bias: Tensor | None, multiplier: Tensor
    ) -> Tensor:
        return reference.linear_u8s8_f32(q_x, zero_point, q_weight, q_bias, multiplier, product=self.product)

    def linear_u8s8_u8(
        self,
        q_x: Tensor,
        zero_point: int,
        q_weight: Tensor,
        q_bias: Tensor | None,
        multiplier: Tensor,
        output_zero_point: int,
        quant_min: int,
        quant_max: int,
    ) -> Tensor:
        return reference.linear_u8s8_u8(
            q_x,
            zero_point,
            q_weight,
            q_bias,
            multiplier,
            output_zero_point,
            quant_min,
            quant_max,
            product=self.product,
        )

    @torch.no_grad()  # as the compiled operators: no gradient goes through integers
    def linear_dynamic(
        self,
        x: Tensor,
        q_weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        columns: Tensor | None,
        activation_bits: int,
        per_row: bool,
        relu: bool,
    ) -> Tensor:
        return reference.linear_dynamic(
            x, q_weight, scale, bias, columns, activation_bits, per_row, relu, product=self.product
        )

    @torch.no_grad()
    def rnn_layer(
        self,
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        return reference_rnn.rnn_layer(
            x,
            batch_sizes,
            h,
            c,
            q_weight_ih,
            scale_ih,
            columns_ih,
            activation_bits,
            per_row,
            q_weight_hh,
            scale_hh,
            bias_ih,
            bias_hh,
            q_weight_hr,
            scale_hr,
            mode,
            reverse,
            product=self.product,
        )

    @torch.no_grad()
    def rnn_layer_static(
        self,
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        return reference_rnn.rnn_layer_static(
            q_x,
            x_scale,
            x_zero_point,
            batch_sizes,
            h,
            c,
            q_weight_ih,
            scale_ih,
            q_weight_hh,
            scale_hh,
            bias_ih,
            bias_hh,
            h_scale,
            h_zero_point,
            q_weight_hr,
            scale_hr,
            m_scale,
            m_zero_point,
            mode,
            reverse,
            quantized,
            product=self.product,
        )

    def embedding(self, rows: Tensor, indices: Tensor, bits: int, dim: int) -> Tensor:
        return tables.embedding(rows, indices, bits, dim)

    @torch.no_grad()
    def embedding_bag(
        self,
        rows: Tensor,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        bits: int,
        dim: int,
        mode: str,
        include_last_offset: bool,
        padding_idx: int,
    ) -> Tensor:
        return tables.embedding_bag(rows, indices, offsets, weights, bits, dim, mode, include_last_offset, padding_idx)
