"""Classifiers of pictures, of transformers and timm."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bench.frameworks.models.workload import (
    N_CLASSES,
    Batch,
    OwnLoss,
    Scale,
    WithLoss,
    Workload,
    generator,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def _vision(net: nn.Module, scale: Scale, recompute: Callable[[], object]) -> Workload:
    def batch(step: int) -> Batch:
        of_step = generator(step)
        shape = (scale.batch, 3, scale.side, scale.side)
        labels = torch.randint(N_CLASSES, (scale.batch,), generator=of_step)
        return {"target": labels, "x": torch.randn(shape, generator=of_step)}

    return Workload(WithLoss(net), batch, recompute)


def vit(scale: Scale) -> Workload:
    """ViT of transformers."""
    from transformers import ViTConfig, ViTForImageClassification

    net = ViTForImageClassification(
        ViTConfig(
            num_hidden_layers=scale.layers,
            hidden_size=scale.width,
            intermediate_size=4 * scale.width,
            num_attention_heads=scale.width // 32,
            image_size=scale.side,
            num_labels=N_CLASSES,
        )
    )

    def batch(step: int) -> Batch:
        of_step = generator(step)
        shape = (scale.batch, 3, scale.side, scale.side)
        labels = torch.randint(N_CLASSES, (scale.batch,), generator=of_step)
        return {"pixel_values": torch.randn(shape, generator=of_step), "labels": labels}

    return Workload(OwnLoss(net), batch, net.gradient_checkpointing_enable)


def _timm(name: str, scale: Scale, **options: Any) -> Workload:
    import timm

    net = timm.create_model(name, num_classes=N_CLASSES, **options)
    return _vision(net, scale, net.set_grad_checkpointing)


def resnet18(scale: Scale) -> Workload:
    """ResNet-18 of timm."""
    return _timm("resnet18", scale)


def convnext(scale: Scale) -> Workload:
    """ConvNeXt of timm, its smallest."""
    return _timm("convnext_atto", scale)


def timm_vit(scale: Scale) -> Workload:
    """ViT of timm, its smallest."""
    return _timm("vit_tiny_patch16_224", scale, img_size=scale.side, depth=scale.layers)


def efficientnet(scale: Scale) -> Workload:
    """EfficientNet-b0 of timm."""
    return _timm("efficientnet_b0", replace(scale, batch=scale.batch // 2))


def mobilenet(scale: Scale) -> Workload:
    """MobileNetV3 of timm, the large one."""
    return _timm("mobilenetv3_large_100", scale)


def densenet(scale: Scale) -> Workload:
    """DenseNet-121 of timm."""
    return _timm("densenet121", replace(scale, batch=scale.batch // 2))
