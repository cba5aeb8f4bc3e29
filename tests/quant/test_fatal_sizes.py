"""Sizes that end the process in torch are not tried: a model that the user can call can be prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quant
from quant.capture.fatal_sizes import FatalSize, refuse_fatal


class Images(nn.Module):
    """Reads a size, so that sizes of 1 are tried."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1, stride=2, padding=1, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x).relu()
        return y.reshape(y.size(0), y.size(1), -1)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_that_torch_may_not_survive_is_not_tried(
    memory: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random network 243 of tests/golden: its prepare ended the process, where torch has kernels for AVX-512."""
    computed, own = [], torch.conv2d

    def noting(x: Tensor, *args: Any) -> Tensor:
        y = own(x, *args)
        computed.append(x.shape[-1])
        return y

    monkeypatch.setattr(torch.nn.functional, "conv2d", noting)
    model = Images().eval()
    x = torch.randn(2, 4, 5, 4).contiguous(memory_format=memory)
    q = quant.quantize_static(model, [x], progress=False)
    assert set(computed) >= {4, 8}  # others were tried
    assert min(computed) > 1
    with torch.no_grad():
        assert float((q(x) - model(x)).abs().max()) < 0.05
    assert quant.summary(q)["conv"].outcome == "int8"


@pytest.mark.parametrize(
    "call",
    [
        lambda conv, x, w: conv(x, w, None, 2, 1, 2),
        lambda conv, x, w: conv(x, w, None, [1, 2], (0, 1), [1, 2]),
        lambda conv, x, w: conv(input=x, weight=w, stride=(3,), padding=5, dilation=(3,)),
    ],
)
def test_it_is_known_however_it_is_written(call: Callable[..., None]) -> None:
    w = torch.ones(4, 4, 1, 1)

    def asked(*args: Any, **kwargs: Any) -> None:
        refuse_fatal(torch.conv2d, args, kwargs)

    with pytest.raises(FatalSize, match="dilated convolution"):
        call(asked, torch.ones(2, 4, 5, 1), w)
    call(asked, torch.ones(2, 4, 1, 3), w)  # as long as the dilation


@pytest.mark.parametrize(
    "kwargs",
    [
        {"stride": 2, "padding": 1},
        {"stride": 2, "dilation": 2},
        {"padding": 1, "dilation": 2},
        {"padding": "same", "dilation": 2},
        {"padding": "valid", "dilation": 2, "stride": 2},
    ],
    ids=str,
)
def test_others_are_tried(kwargs: dict[str, Any]) -> None:
    x, w = torch.ones(2, 4, 5, 1), torch.ones(4, 4, 1, 1)
    refuse_fatal(torch.conv2d, (x, w), kwargs)
    refuse_fatal(torch.conv_transpose2d, (x, w), {"stride": 2, "padding": 1, "dilation": 2})
