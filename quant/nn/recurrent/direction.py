"""One direction of one layer of a recurrent network with int8 weights: one operator call over the whole sequence.

The input projection is one product outside the time loop, and the loop itself runs in the kernel.
"""

import dataclasses
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels import Backend, dispatch
from quant.kernels.recurrent.kind import RecurrentKind
from quant.nn.base import QuantizedWeight, as_float32, check_groups, takes_half
from quant.recipe import QConfig
from quant.recurrent_layers import Tensors
from quant.runtime.layers.quant_module import REFUSALS
from quant.runtime.layers.recurrent_module import Int8Direction, Int8Tensors


class Direction(Int8Direction):
    """The dynamic form of one direction of a layer, which `torch.jit.script` can compile.

    Attributes:
        per_row: whether each row of the input has its own range.
        activation_bits: 8 or 16, for the input.
        described: for the report, the form of its weights where it is not the default; else ''.
    """

    # As in the class above: TorchScript reads them of a module's very class.
    q_weight_ih: Tensor
    scale_ih: Tensor
    columns_ih: Tensor | None
    q_weight_hh: Tensor
    scale_hh: Tensor
    q_weight_hr: Tensor | None
    scale_hr: Tensor | None

    def __init__(
        self,
        kind: RecurrentKind,
        tensors: Tensors,
        qconfig: QConfig,
        *,
        reverse: bool = False,
        fine_input: bool = False,
    ) -> None:
        inputs = (QuantizedWeight.in_two_terms if fine_input else QuantizedWeight.of)(tensors.weight_ih, qconfig)
        # The state is quantised per row and, but for ReLU, lies in (-1, 1): 8 bits hold it.
        state = dataclasses.replace(qconfig, activation_bits=8)
        check_groups(tensors.weight_hh.shape[1], state)
        hidden = QuantizedWeight.of(tensors.weight_hh, state)
        projection = None if tensors.weight_hr is None else QuantizedWeight.of(tensors.weight_hr, state)
        held = Int8Tensors(
            inputs.q_weight,
            inputs.scale,
            hidden.q_weight,
            hidden.scale,
            tensors.bias_ih,
            tensors.bias_hh,
            inputs.columns,
            None if projection is None else projection.q_weight,
            None if projection is None else projection.scale,
        )
        super().__init__(kind, held, reverse=reverse, terms=inputs.terms)
        self.per_row = qconfig.ranges_per_row
        self.activation_bits = inputs.activation_bits
        self.described = inputs.described

    def forward(
        self, input: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(time, batch, input), or (rows, input) with batch_sizes -> (y, h, c) as `reference_rnn.rnn_layer` says.

        What comes out is float32 whatever `dtype` is: it may be the next layer's input.
        """
        half = self.dtype != torch.float32
        if not torch.jit.is_scripting():
            half = half or takes_half(input) or takes_half(h) or takes_half(c)
        if half:
            input, h = as_float32(input), as_float32(h)
            c = None if c is None else as_float32(c)
        if self.terms == 2:
            input = torch.cat([input, input], dim=-1)
        if torch.jit.is_scripting():
            return torch.ops.octet.rnn_layer(  # type: ignore[no-any-return]
                input,
                batch_sizes,
                h,
                c,
                self.q_weight_ih,
                self.scale_ih,
                self.columns_ih,
                self.activation_bits,
                self.per_row,
                self.q_weight_hh,
                self.scale_hh,
                self.bias_ih,
                self.bias_hh,
                self.q_weight_hr,
                self.scale_hr,
                self.mode,
                self.reverse,
                self.backend,
            )
        return self._dispatch(input, batch_sizes, h, c)

    @torch.jit.unused
    def _where(self) -> str:
        return "(root)" if re.fullmatch(r"direction|directions\.\d+", self.layer_name) else super()._where()

    @torch.jit.unused
    def _dispatch(
        self, input: Tensor, batch_sizes: Tensor | None, h: Tensor, c: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Tensors not by attribute: nn.Module takes half a microsecond for each, which a cell's step would notice.
        buffers: dict[str, Any] = self._buffers
        parameters = self._parameters
        try:
            backend = dispatch.current(self.backend)
            # Without a kernel for the kind, the reference around the backend's products.
            layer = backend.rnn_layer if self._kind.native else partial(Backend.rnn_layer, backend)
            return layer(
                input,
                batch_sizes,
                h,
                c,
                buffers["q_weight_ih"],
                buffers["scale_ih"],
                buffers["columns_ih"],
                self.activation_bits,
                self.per_row,
                buffers["q_weight_hh"],
                buffers["scale_hh"],
                parameters["bias_ih"],
                parameters["bias_hh"],
                buffers["q_weight_hr"],
                buffers["scale_hr"],
                self.mode,
                self.reverse,
            )
        except REFUSALS as error:
            raise self._named(error) from error


def interpreted_steps(layer: nn.Module) -> str:
    """For the report: which steps of a recurrent layer no compiled kernel computes; '' of any other layer."""
    modes = {one.mode for one in layer.modules() if isinstance(one, Int8Direction) and not one._kind.native}
    return f"steps of {', '.join(sorted(modes))} in torch arithmetic around int8 products" if modes else ""
