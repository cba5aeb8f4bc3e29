"""Images and videos: classifiers of torchvision and timm, segmentation, detection, and video."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .entry import Batch, Entry, images, tensors
from .torchvision_ops import import_library, import_torchvision

SIDE = 64
"""Pixels a side of what takes images of any size: enough that the last features of most are 2 by 2."""


def _torchvision(group: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import_torchvision()
        module = importlib.import_module(f"torchvision.models{group}")
        built: nn.Module = getattr(module, model)(weights=None, **options)
        return built

    return make


def _classifier(model: str, side: int = SIDE, name: str = "", **options: Any) -> Entry:
    return Entry(f"tv_{name or model}", _torchvision("", model, num_classes=50, **options), images(side))


def _inception(name: str, *, aux_logits: bool) -> Callable[[], nn.Module]:
    return _torchvision("", name, num_classes=50, aux_logits=aux_logits, init_weights=False)


ANY_SIZE = """
    convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s mnasnet1_0 mobilenet_v2 mobilenet_v3_large
    mobilenet_v3_small regnet_y_400mf resnet18 resnet50 resnext50_32x4d shufflenet_v2_x1_0 squeezenet1_1 swin_t
    swin_v2_t vgg11_bn
"""
"""Classifiers of torchvision."""


def _maxvit() -> nn.Module:
    """maxvit_t with windows that fit the images."""
    import_torchvision()
    built: nn.Module = importlib.import_module("torchvision.models.maxvit").MaxVit(
        input_size=(SIDE, SIDE),
        stem_channels=64,
        block_channels=[64, 128, 256, 512],
        block_layers=[2, 2, 5, 2],
        head_dim=32,
        stochastic_depth_prob=0.2,
        partition_size=2,
        num_classes=50,
    )
    return built


TORCHVISION = (
    *(_classifier(name) for name in ANY_SIZE.split()),
    _classifier("alexnet", 96),
    Entry("tv_maxvit_t", _maxvit, images(SIDE)),
    _classifier("vit_b_32", image_size=64),
    Entry("tv_googlenet", _inception("googlenet", aux_logits=False), images(SIDE)),
    Entry("tv_googlenet_aux", _inception("googlenet", aux_logits=True), images(SIDE)),
    Entry("tv_inception_v3", _inception("inception_v3", aux_logits=False), images(96)),
)


TIMM_ANY_SIZE = """
    convmixer_768_32 davit_tiny dla34 edgenext_x_small fastvit_t8 focalnet_tiny_srf gernet_s ghostnet_100
    hrnet_w18_small inception_next_tiny lcnet_050 mobilenetv4_conv_small mobilevit_xs nf_resnet50 nfnet_l0
    poolformer_s12 pvt_v2_b0 repghostnet_100 repvgg_a0 res2net50_26w_4s resnet26d rexnet_100 selecsls42b
    skresnet18 starnet_s1 tinynet_a tresnet_m twins_svt_small xcit_nano_12_p16_224
"""
"""Classifiers of timm that take images of any size."""

TIMM_SIZED = """
    beit_base_patch16_224 cait_xxs24_224 coat_tiny deit_tiny_patch16_224 levit_128s mixer_s32_224 resmlp_12_224
    sequencer2d_s visformer_tiny vit_tiny_patch16_224 volo_d1_224
"""
"""Classifiers of timm that are told the size of their images."""


def _timm(name: str, side: int = SIDE, **options: Any) -> Entry:
    def make() -> nn.Module:
        built: nn.Module = import_library("timm").create_model(name, pretrained=False, num_classes=50, **options)
        return built

    return Entry(f"timm_{name}", make, images(side))


TIMM = (
    *(_timm(name) for name in TIMM_ANY_SIZE.split()),
    *(_timm(name, img_size=SIDE) for name in TIMM_SIZED.split()),
    _timm("crossvit_tiny_240", 240),
    _timm("efficientformer_l1", 224),
    _timm("eva02_tiny_patch14_224", 70, img_size=70),
)


def _smp(name: str, architecture: str, encoder: str, **options: Any) -> Entry:
    def make() -> nn.Module:
        library = import_library("segmentation_models_pytorch")
        built: nn.Module = getattr(library, architecture)(encoder, encoder_weights=None, classes=4, **options)
        return built

    return Entry(f"smp_{name}", make, images(SIDE))


SEGMENTATION = (
    *(
        Entry(f"seg_{name}", _torchvision(".segmentation", name, weights_backbone=None, num_classes=8), images(SIDE))
        for name in ("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large")
    ),
    _smp("deeplabv3plus", "DeepLabV3Plus", "resnet18"),
    _smp("fpn", "FPN", "resnet18"),
    _smp("manet", "MAnet", "mobilenet_v2"),
    _smp("pspnet", "PSPNet", "resnet18"),
    _smp("segformer", "Segformer", "mit_b0"),
    _smp("unet", "Unet", "resnet18"),
    _smp("unetplusplus", "UnetPlusPlus", "resnet18"),
)

VIDEO = (
    *(
        Entry(f"vid_{name}", _torchvision(".video", name, num_classes=20), tensors(3, 8, 48, 48), size=2)
        for name in ("mc3_18", "r2plus1d_18", "r3d_18", "swin3d_t")
    ),
    # Its last pooling takes 7 by 7 pixels of two frames, which these sizes give.
    Entry("vid_s3d", _torchvision(".video", "s3d", num_classes=20), tensors(3, 14, 224, 224), size=1, other_size=2),
)


def _photos(side: int) -> Callable[[int], Batch]:
    return lambda size: ([torch.rand(3, side, side - 8 * (i % 2)) for i in range(size)],)


def _with_targets(side: int, *, masks: bool = False, keypoints: bool = False) -> Callable[[int], Batch]:
    def batch(size: int) -> Batch:
        photos = [torch.rand(3, side, side) for _ in range(size)]
        return photos, [_target(side, masks=masks, keypoints=keypoints) for _ in range(size)]

    return batch


def _target(side: int, *, masks: bool, keypoints: bool) -> dict[str, Tensor]:
    """Two boxes."""
    low = torch.rand(2, 2) * side / 2
    boxes = torch.cat((low, low + side / 4 + torch.rand(2, 2) * side / 5), dim=1)
    target = {"boxes": boxes, "labels": torch.ones(2, dtype=torch.int64)}
    if masks:
        target["masks"] = (torch.rand(2, side, side) > 0.5).to(torch.uint8)
    if keypoints:
        middle = ((boxes[:, :2] + boxes[:, 2:]) / 2)[:, None].expand(2, 17, 2)
        target["keypoints"] = torch.cat((middle, torch.ones(2, 17, 1)), dim=2)
    return target


def _detector(name: str, *, side: int = 96, masks: bool = False, keypoints: bool = False, **options: Any) -> Entry:
    """Random detectors are sure of nothing, so every score passes their threshold."""
    return Entry(
        f"det_{name}",
        _torchvision(".detection", name, weights_backbone=None, **options),
        _photos(side),
        training_batch=_with_targets(side, masks=masks, keypoints=keypoints),
        size=2,
        other_size=3,
        detects=True,
    )


SMALL = {"min_size": 96, "max_size": 128}
TWO_STAGES = {
    **SMALL,
    "box_score_thresh": 0.0,
    "box_detections_per_img": 10,
    "rpn_pre_nms_top_n_test": 100,
    "rpn_post_nms_top_n_test": 30,
    "rpn_post_nms_top_n_train": 30,
    "box_batch_size_per_image": 16,
}
DETECTION = (
    _detector(
        "fasterrcnn_mobilenet_v3_large_320_fpn",
        **{**TWO_STAGES, "rpn_score_thresh": 0.0},
        num_classes=5,
    ),
    _detector("fcos_resnet50_fpn", **SMALL, num_classes=5, score_thresh=0.0, topk_candidates=50, detections_per_img=20),
    _detector("keypointrcnn_resnet50_fpn", keypoints=True, **TWO_STAGES, num_classes=2),
    _detector("maskrcnn_resnet50_fpn", masks=True, **TWO_STAGES, num_classes=5),
    _detector(
        "retinanet_resnet50_fpn", **SMALL, num_classes=5, score_thresh=0.0, topk_candidates=50, detections_per_img=20
    ),
    _detector(
        "ssdlite320_mobilenet_v3_large", num_classes=5, score_thresh=0.0, topk_candidates=50, detections_per_img=20
    ),
)

VISION = (*TORCHVISION, *TIMM, *SEGMENTATION, *VIDEO, *DETECTION)
