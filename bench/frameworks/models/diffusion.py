"""Diffusion models of diffusers."""

from __future__ import annotations

import torch
from torch.nn import functional

from bench.frameworks.models.workload import N_CLASSES, Batch, Scale, WithLoss, Workload, generator


def unet(scale: Scale) -> Workload:
    """UNet of diffusers: the noise in a noisy picture of an eighth of the side."""
    from diffusers import UNet2DModel

    channels = (scale.width // 4, scale.width // 2, scale.width // 2)
    side = scale.side // 8 // 4 * 4
    net = UNet2DModel(
        sample_size=side,
        block_out_channels=channels,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )

    def batch(step: int) -> Batch:
        of_step = generator(step)
        shape = (scale.batch, 3, side, side)
        noise, noisy = (torch.randn(shape, generator=of_step) for _ in range(2))
        times = torch.randint(1000, (scale.batch,), generator=of_step)
        return {"target": noise, "sample": noisy, "timestep": times}

    model = WithLoss(net, functional.mse_loss)
    return Workload(model, batch, net.enable_gradient_checkpointing)


def dit(scale: Scale) -> Workload:
    """DiT of diffusers: the noise in a noisy latent picture of a class."""
    from diffusers import DiTTransformer2DModel

    side = scale.side // 4 // 2 * 2
    net = DiTTransformer2DModel(
        num_attention_heads=scale.width // 32,
        attention_head_dim=32,
        out_channels=4,
        num_layers=scale.layers,
        sample_size=side,
        num_embeds_ada_norm=N_CLASSES,
    )

    def batch(step: int) -> Batch:
        of_step = generator(step)
        shape = (scale.batch, 4, side, side)
        noise, noisy = (torch.randn(shape, generator=of_step) for _ in range(2))
        times = torch.randint(1000, (scale.batch,), generator=of_step)
        labels = torch.randint(N_CLASSES, (scale.batch,), generator=of_step)
        return {"target": noise, "sample": noisy, "times": times, "labels": labels}

    model = WithLoss(net, functional.mse_loss)
    return Workload(model, batch, net.enable_gradient_checkpointing)
