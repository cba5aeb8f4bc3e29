"""Detectors of torchvision as they are, SSDLite and Faster R-CNN: their boxes in float and in int8.

    python tutorials/gallery/detector.py [--images N] [--out FILE.png]

Both have random weights, since no trained ones come with a package: what can be said is whether int8 finds float's
boxes, not whether these are right. Faster R-CNN has the FrozenBatchNorm2d that torchvision and Detectron2 ship theirs
with; each is folded into its convolution. So is the norm inside a convolution class of one's own, written as
Detectron2's. It ends in asserts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, ssdlite320_mobilenet_v3_large
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import FrozenBatchNorm2d, box_iou

import quant

OUT = Path(__file__).parents[1] / "out" / "detector.png"
SIDE, CLASSES = 160, 3
BEST, AMONG = 10, 50
"""Float's best boxes of an image, which are looked up among so many of int8's."""

Boxes: TypeAlias = dict[str, Tensor]
"""`boxes` (n, 4), corners x1, y1, x2, y2 in pixels; `labels` (n,) and `scores` (n,), the highest first."""


def scenes(count: int, seed: int) -> list[Tensor]:
    """Images (3, SIDE, SIDE) of four discs before noise."""
    draws = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    images = 0.3 * torch.rand(count, 3, SIDE, SIDE, generator=draws)
    for image in images:
        for _ in range(4):
            column, row, radius = (torch.rand(3, generator=draws) * torch.tensor([SIDE, SIDE, SIDE / 5])).tolist()
            image[:, (x - column) ** 2 + (y - row) ** 2 <= radius**2] = torch.rand(3, 1, generator=draws)
    return list(images)


def settled(model: nn.Module, heads: nn.Module, last: Iterable[nn.Module]) -> nn.Module:
    """A random detector that tells images apart: its norms hold the statistics of some, its last layers are wide."""
    norms = [one for one in model.modules() if isinstance(one, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # the mean of all that is seen
    with torch.no_grad():
        for layer in last:
            layer.weight.normal_(0, 2 / layer.weight[0].numel() ** 0.5)
        batch, _ = model.transform(scenes(8, seed=0))
        heads(list(model.train().backbone(batch.tensors).values()))
    return model.eval()


def ssdlite() -> nn.Module:
    """SSDLite with a MobileNetV3, which sees images of 320 pixels."""
    model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=CLASSES)
    classes = model.head.classification_head
    return settled(model, classes, [level[1] for level in classes.module_list])


def faster_rcnn() -> nn.Module:
    """Faster R-CNN with a ResNet-18 and a feature pyramid, its norms frozen."""
    few = {"rpn_pre_nms_top_n_test": 200, "rpn_post_nms_top_n_test": 50}

    def with_norms(kind: Callable[..., nn.Module]) -> nn.Module:
        backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, norm_layer=kind)
        return FasterRCNN(backbone, CLASSES, min_size=SIDE, max_size=SIDE, **few)

    model = with_norms(nn.BatchNorm2d)
    last = [model.rpn.head.cls_logits, model.roi_heads.box_predictor.cls_score]
    frozen = with_norms(FrozenBatchNorm2d)
    frozen.load_state_dict(settled(model, model.rpn.head, last).state_dict())
    return frozen.eval()


class WrappedConv(nn.Conv2d):
    """A convolution with its norm and activation, as `detectron2.layers.Conv2d` is written."""

    def __init__(self, *args: Any, norm: nn.Module | None = None, activation: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norm, self.activation = norm, activation

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.activation is None else self.activation(x)


def stem_of_wrapped() -> nn.Module:
    """Two of them, their statistics no identity."""
    norms = [FrozenBatchNorm2d(16), FrozenBatchNorm2d(32)]
    for one in norms:
        one.running_mean.normal_(0, 0.1)
        one.running_var.uniform_(0.5, 2.0)
    return nn.Sequential(
        WrappedConv(3, 16, 3, stride=2, padding=1, bias=False, norm=norms[0], activation=nn.functional.relu),
        WrappedConv(16, 32, 3, stride=2, padding=1, bias=False, norm=norms[1], activation=nn.functional.relu),
        nn.Conv2d(32, 8, 1),
    ).eval()


def int8(model: nn.Module, images: Sequence[Tensor]) -> nn.Module:
    """Static int8; the whole list of images is one argument of a detector."""
    batches = [[image] for image in images]
    return quant.quantize_static(model, batches, forward=lambda detector, batch: detector(batch), progress=False)


def detected(model: nn.Module, images: Sequence[Tensor], count: int) -> list[Boxes]:
    """The boxes of each image that have the highest scores."""
    with torch.inference_mode():
        return [{name: value[:count] for name, value in model([image])[0].items()} for image in images]


def shared(found: Boxes, wanted: Boxes) -> Tensor:
    """The overlap (intersection over union) of each wanted box with each found one of its label, (wanted, found)."""
    return box_iou(wanted["boxes"], found["boxes"]) * (wanted["labels"][:, None] == found["labels"][None])


def overlaps(found: Sequence[Boxes], wanted: Sequence[Boxes]) -> list[float]:
    """For each wanted box the overlap with the nearest box of its label; 0 without one."""
    nearest: list[float] = []
    for mine, theirs in zip(found, wanted, strict=True):
        both = shared(mine, theirs)
        nearest += torch.cat((both, torch.zeros(len(both), 1)), 1).amax(1).tolist()
    return nearest


@dataclass(frozen=True)
class Outcome:
    """One detector on images that calibration has not seen.

    Attributes:
        images, float, int8: the images, and the boxes in them.
        again: share of float's boxes with which one of int8's, of the same label, overlaps by more than half.
        chance: the same share with int8's boxes of the next image: what boxes all over an image give.
        overlap: the median overlap of float's boxes with int8's.
        folded, norms: how many norms are folded into their convolutions, and how many there are.
    """

    images: list[Tensor]
    float: list[Boxes]
    int8: list[Boxes]
    again: float
    chance: float
    overlap: float
    folded: int
    norms: int


def run(name: str, model: nn.Module, count: int = 20) -> Outcome:
    """Both forms of a detector, on new images."""
    q = int8(model, scenes(16, seed=1))
    images = scenes(count, seed=2)
    float_, int8_ = detected(model, images, BEST), detected(q, images, AMONG)
    nearest = overlaps(int8_, float_)
    elsewhere = overlaps([*int8_[1:], int8_[0]], float_)
    norms = [entry for entry in quant.summary(q) if "BatchNorm" in entry.type]
    outcome = Outcome(
        images,
        float_,
        int8_,
        sum(one > 0.5 for one in nearest) / len(nearest),
        sum(one > 0.5 for one in elsewhere) / len(elsewhere),
        statistics.median(nearest),
        sum("folded into" in entry.detail for entry in norms),
        len(norms),
    )
    print(
        f"{name:13} int8 has {100 * outcome.again:.1f} % of float's {len(nearest)} boxes, where chance gives "
        f"{100 * outcome.chance:.1f} %; median overlap {outcome.overlap:.3f}; "
        f"{outcome.folded} of {outcome.norms} norms folded"
    )
    assert outcome.folded == outcome.norms > 0
    return outcome


def run_wrapped() -> None:
    """The class of one's own needs nothing: its forward is seen through, norm and activation are folded."""
    torch.manual_seed(0)
    model, images = stem_of_wrapped(), torch.stack(scenes(16, seed=0))
    q = quant.quantize_static(model, [images[:8]], progress=False)
    print(quant.summary(q))
    details = {entry.name: entry.detail for entry in quant.summary(q)}
    assert details["0.norm"].startswith("folded into 0.")
    assert details["1.norm"].startswith("folded into 1.")
    with torch.inference_mode():
        error = (q(images[8:]) - model(images[8:])).norm() / model(images[8:]).norm()
    assert error < 0.05, error


def draw(path: Path, outcomes: Mapping[str, Outcome], shown: int = 4, boxes: int = 5) -> None:
    """The first images: float's best boxes wide and white, and upon them the nearest of int8's, thin and red."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    shown = min(shown, *(len(one.images) for one in outcomes.values()))
    figure = Figure(figsize=(1.8 * shown, 2.0 * len(outcomes)), dpi=120, layout="constrained")
    panels = figure.subplots(len(outcomes), shown, squeeze=False)
    for row, (name, outcome) in zip(panels, outcomes.items(), strict=True):
        row[0].set_ylabel(name)
        for index, axes in enumerate(row):
            axes.imshow(outcome.images[index].permute(1, 2, 0).numpy())
            best = {key: value[:boxes] for key, value in outcome.float[index].items()}
            near = outcome.int8[index]["boxes"][shared(outcome.int8[index], best).argmax(1)]
            for drawn, colour, width in ((best["boxes"], "white", 3.5), (near, "#c1440e", 1.2)):
                for left, top, right, bottom in drawn.tolist():
                    size = (right - left, bottom - top)
                    axes.add_patch(Rectangle((left, top), *size, fill=False, edgecolor=colour, linewidth=width))
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--images", type=int, default=20, help="to find boxes in (default 20)")
    parser.add_argument("--out", type=Path, default=OUT, help="the plot (default tutorials/out)")
    options = parser.parse_args(arguments)
    run_wrapped()
    torch.manual_seed(0)
    outcomes = {
        "Faster R-CNN": run("Faster R-CNN", faster_rcnn(), options.images),
        "SSDLite": run("SSDLite", ssdlite(), options.images),
    }
    for outcome in outcomes.values():
        assert outcome.again > outcome.chance
    draw(options.out, outcomes)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
