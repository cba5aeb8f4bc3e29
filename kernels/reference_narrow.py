"""The oracle of products with weights whose inputs have scales by group (equation 11)."""

from __future__ import annotations

import torch
from quant.kernels import narrow
from torch import Tensor


def group_products(q_x: Tensor, zero_point: Tensor, q_weight: Tensor, scale: Tensor) -> Tensor:
    """The real products of integer rows with a narrow weight, without the rows' scales.

    Args:
        q_x: uint8 (rows, K), or int32 of the same range.
        zero_point: int32 (rows, 1), of each row.
        q_weight, scale: a narrow weight (N, K) with scales by group (`narrow`).

    Returns:
        float32 (rows, N). The sums of a group are exact int32; groups are added in their order, in float32.
    """
    by = narrow.groups_of(q_weight, scale)
    groups = by.scale.shape[1]
    # float64 holds these integers, and its matmul is far faster than that of integers.
    weight = narrow.unpack(q_weight).to(torch.float64).unflatten(1, (groups, -1)) - by.zero_point.unsqueeze(2)
    rows = (q_x.to(torch.float64) - 128.0).unflatten(1, (groups, -1))
    products = torch.zeros(q_x.shape[0], q_weight.shape[0])
    row_reals = torch.zeros(q_weight.shape[0])
    for group in range(groups):
        factor = by.scale[:, group]
        products = products + (rows[:, group] @ weight[:, group].t()).to(torch.float32) * factor
        row_reals = row_reals + weight[:, group].sum(dim=1).to(torch.float32) * factor
    return products - (zero_point - 128).to(torch.float32) * row_reals
