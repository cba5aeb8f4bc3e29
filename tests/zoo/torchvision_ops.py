"""torchvision where its compiled extension does not load: its two detection operators in plain torch.

The wheels of the package index are built against CUDA, so beside a CPU torch `import torchvision` ends with "operator
torchvision::nms does not exist". The models need nothing of that extension but `nms` and `roi_align`. They are defined
here as operators of the same names and signatures, `roi_align` by the reference that torchvision itself carries. Where
the extension loads, nothing is changed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")


def import_torchvision() -> ModuleType:
    """`torchvision`, with its own operators or with those below."""
    if "torchvision" in sys.modules:
        return sys.modules["torchvision"]
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _define()
    torchvision = importlib.import_module("torchvision")
    for name in ("boxes", "roi_align"):
        module = importlib.import_module(f"torchvision.ops.{name}")
        module._assert_has_ops = lambda: None
        module._has_ops = lambda: True
    return torchvision


def import_library(name: str) -> ModuleType:
    """A library that imports torchvision where it finds one: timm, transformers, diffusers."""
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()
    return importlib.import_module(name)


def _define() -> None:
    _LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # torchvision says its shape
    _LIBRARY.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor"
    )
    _LIBRARY.impl("nms", nms, "CPU")
    _LIBRARY.impl("roi_align", roi_align, "CompositeImplicitAutograd")


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Indices of the boxes that no box of a higher score overlaps by more than the threshold, highest score first.

    Args:
        dets: (N, 4), corners x1, y1, x2, y2.
        scores: (N,).
    """
    area = (dets[:, 2] - dets[:, 0]) * (dets[:, 3] - dets[:, 1])
    order = scores.argsort(descending=True, stable=True)
    kept = []
    while len(order):
        best, order = order[0], order[1:]
        kept.append(best)
        low = torch.maximum(dets[best, :2], dets[order, :2])
        high = torch.minimum(dets[best, 2:], dets[order, 2:])
        shared = (high - low).clamp(min=0).prod(dim=1)
        order = order[shared / (area[best] + area[order] - shared) <= iou_threshold]
    return torch.stack(kept) if kept else torch.empty(0, dtype=torch.int64)


def roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Features of each region, (K, C, pooled_height, pooled_width); `rois` is (K, 5): image, x1, y1, x2, y2."""
    reference = importlib.import_module("torchvision.ops.roi_align")._roi_align.__wrapped__  # as it is, not compiled
    pooled: Tensor = reference(input, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned)
    return pooled
