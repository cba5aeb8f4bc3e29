"""The base class of backends: a name, whether it can be used here, its capabilities, and the operators.

A new backend is one file with a subclass that defines `product`, the exact int32 product of u8 activations and s8
weights, and registers itself (`dispatch.register_backend`). All operators then exist, as the reference's arithmetic
around that product. A backend with better implementations overrides single operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from quant.kernels import in_graphs, product_conv, reference, reference_conv, reference_rnn, tables
from quant.kernels.product_conv import Matrices
from quant.kernels.reference import Product
from quant.kernels.reference_ops import OPS, OpTable
from torch import Tensor


class Backend:
    """The operators of `quant.kernels`, with the signatures and meaning of their references.

    Attributes:
        name: the name by which users choose it.
        plans: whether neighbouring steps of a static model run as one call of `torch.ops.octet.run_plan`, which takes
            the name; otherwise they run one by one.
        computes_reals: whether it has kernels for float steps (layer norms, attention). They then compute all such
            steps, inside regions and outside, because their last bits differ from torch's.
        transposes: whether its transposed convolutions are faster than ordinary ones over phases
            (`runtime/layers/polyphase.py`).
    """

    name: str
    plans: ClassVar[bool] = False
    computes_reals: ClassVar[bool] = False
    transposes: ClassVar[bool] = False
    _operators: OpTable = MappingProxyType({})
    _matrices: Matrices | None = None

    def why_not(self) -> str:
        """'' where the backend can be used on this machine; else the reason that it cannot."""
        return ""

    @property
    def operators(self) -> OpTable:
        """Every integer operator that a static model calls, by name, with the arguments of `reference_ops`.

        An operator is the method of its name where there is one, else the reference.
        """
        known = self._operators
        if len(known) != len(OPS):  # the first time, or an operator was added
            known = self._operators = self._table()
        return known

    def _table(self) -> dict[str, Callable[..., Tensor]]:
        return {name: getattr(self, name, ref) for name, ref in OPS.items()}

    def product(self, q_x: Tensor, q_weight: Tensor) -> Tensor:
        """uint8 (rows, K), int8 (N, K) -> int32 (rows, N), exact for all values (equation 5)."""
        raise NotImplementedError(f"backend {self.name!r} brings no product")

    @property
    def _product(self) -> Product:
        """`product`; an operator of torch while a graph is traced."""
        return functools.partial(torch.ops.octet.product, backend=self.name) if in_graphs.is_made() else self.product

    def route(self, q_weight: Tensor) -> str:
        """The route by which products with this weight (N, K) are computed here, for the report."""
        return "exact"

    def conv_route(self, q_weight: Tensor, groups: int) -> str:
        """The same for a convolution's weight (out, in / groups, kernel...)."""
        return ", ".join(sorted({self.route(rows) for rows in self._rows_of(q_weight, groups)}))

    def why_not_conv(self, q_weight: Tensor, groups: int) -> str:
        """'' where the backend computes a convolution with this weight; else the reason that the reference does."""
        return product_conv.why_not(q_weight, groups)

    def linear_u8s8_s32(self, q_x: Tensor, zero_point: int, q_weight: Tensor, q_bias: Tensor | None) -> Tensor:
        return reference.linear_u8s8_s32(q_x, zero_point, q_weight, q_bias, product=self._product)

    def linear_u8s8_f32(
        self, q_x: Tensor, zero_point: int, q_weight: Tensor, q_bias: Tensor | None, multiplier: Tensor
    ) -> Tensor:
        return reference.linear_u8s8_f32(q_x, zero_point, q_weight, q_bias, multiplier, product=self._product)

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
            product=self._product,
        )

    def conv_u8s8_s32(
        self,
        q_x: Tensor,
        zero_point: int,
        q_weight: Tensor,
        q_bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Tensor:
        arguments: tuple[Any, ...] = (q_x, zero_point, q_weight, q_bias, stride, padding, dilation, groups)
        reference_conv.check_conv(q_x, q_weight, stride, padding, dilation, groups)
        if self.why_not_conv(q_weight, groups):
            return reference_conv.conv_u8s8_s32(*arguments)
        if in_graphs.is_made():
            return torch.ops.octet.conv_by_product(*arguments, self.name)  # type: ignore[no-any-return]
        return product_conv.conv_u8s8_s32(*arguments, rows=self._rows_of(q_weight, groups), product=self.product)

    def conv_u8s8_f32(
        self,
        q_x: Tensor,
        zero_point: int,
        q_weight: Tensor,
        q_bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        multiplier: Tensor,
    ) -> Tensor:
        sums = self.conv_u8s8_s32(q_x, zero_point, q_weight, q_bias, stride, padding, dilation, groups)
        return reference_conv.scale_channels(sums, multiplier)

    def conv_u8s8_u8(
        self,
        q_x: Tensor,
        zero_point: int,
        q_weight: Tensor,
        q_bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        multiplier: Tensor,
        output_zero_point: int,
        quant_min: int,
        quant_max: int,
    ) -> Tensor:
        sums = self.conv_u8s8_s32(q_x, zero_point, q_weight, q_bias, stride, padding, dilation, groups)
        return reference_conv.requantize_channels(sums, multiplier, output_zero_point, quant_min, quant_max)

    def _rows_of(self, q_weight: Tensor, groups: int) -> list[Tensor]:
        matrices = self._matrices
        if matrices is None:
            matrices = self._matrices = Matrices()
        return matrices.of(q_weight, groups)

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
            x, q_weight, scale, bias, columns, activation_bits, per_row, relu, product=self._product
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
            product=self._product,
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
            product=self._product,
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
