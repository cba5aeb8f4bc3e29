"""`StaticQuantModule`: the base of int8 layers of others that have ranges known beforehand as well."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quant.kernels import ACTIVATION_U8, QParams, dispatch
from quant.runtime import nonfinite
from quant.runtime.layers.quant_module import QuantModule
from quant.runtime.layers.sites import add_site, register_sites
from quant.runtime.own_forward import is_falling_back


class StaticQuantModule(QuantModule):
    """An int8 layer for dynamic quantisation, static quantisation and training, of one tensor in and one out.

    It holds the ranges; a subclass has the weights and the arithmetic. It is made of the float module and its
    `QConfig`, as every `QuantModule`, and has

    - `dynamic`, what the layer computes with a range of each call,
    - `static`, what it computes between uint8 values with known ranges,
    - an attribute or property for each parameter of the float module, of the same name and shape: the real values
      that it computes with. Calibration's simulation and training run the float forward on them.

    Buffers: those of `sites.py`, the ranges of the places that call the layer.

    Attributes:
        own: the place whose ranges a call of the layer by itself has.
    """

    input_scale: Tensor
    input_zero_point: Tensor
    output_scale: Tensor
    output_zero_point: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.own = 0
        self._known: list[tuple[QParams, QParams | None]] = []
        register_sites(self)

    def dynamic(self, x: Tensor) -> Tensor:
        """float32 in and out, with a range that is taken of x."""
        raise NotImplementedError

    def static(self, q_x: Tensor, input: QParams, output: QParams | None) -> Tensor:
        """uint8 in, in the range `input`; uint8 out in the range `output`, or float32 where that is None.

        It is `simulated` on the real values of q_x, rounded to `output`: `quant.parity` allows a difference of one
        step, or of float32 sums.
        """
        raise NotImplementedError

    def simulated(self, module: nn.Module, x: Tensor) -> Tensor:
        """What `static` gives before it rounds to its output's range: in float, and differentiable.

        Args:
            module: the float module with this layer's real values for parameters.
            x: rounded to the range of the input.
        """
        y: Tensor = type(module).forward(module, x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        """`dynamic`; with known ranges, and outside of a user's forward that runs as it is, `static` on x rounded."""
        if not self._known or is_falling_back():
            return self.dynamic(x)
        input, output = self._known[self.own]
        operators = dispatch.current(self.backend).operators
        q_x = operators["quantize"](x, float(input.scale), int(input.zero_point))
        y = self.compute(q_x, self.own)
        if output is not None:
            y = operators["dequantize"](y, float(output.scale), int(output.zero_point))
        seen: dict[int, Any] = {}
        nonfinite.note(x, seen)
        spoiled: Tensor = nonfinite.spoiled(y, seen)
        return spoiled

    def compute(self, q_x: Tensor, site: int) -> Tensor:
        """`static` with the ranges of a place.

        Raises:
            TypeError: it gave another type than the place takes.
        """
        input, output = self._known[site]
        y = self.static(q_x, input, output)
        expected = torch.float32 if output is None else torch.uint8
        if y.dtype != expected:
            raise TypeError(f"{type(self).__name__}.static gave {y.dtype}, expected {expected}")
        return y

    @property
    def sites(self) -> int:
        """How many places of a program call the layer."""
        return len(self.input_scale)

    def add_site(self, x: QParams, y: QParams | None) -> int:
        """Take note of one more place that calls the layer; returns its number."""
        return add_site(self, x, y)

    def derive(self) -> None:
        """Read the ranges of all places from the buffers; without values (on the meta device) there are none yet."""
        self._known = []
        if self.input_scale.device.type == "meta":
            return
        for site in range(self.sites):
            scale, zero_point = self.output_scale[site], self.output_zero_point[site]
            output = QParams(scale, zero_point, ACTIVATION_U8) if bool(scale) else None
            self._known.append((QParams(self.input_scale[site], self.input_zero_point[site], ACTIVATION_U8), output))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any, **named: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)
        self.derive()
