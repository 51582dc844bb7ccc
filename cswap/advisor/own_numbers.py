"""Random numbers for measurements, which leave the user's alone: `normal`."""

from __future__ import annotations

import torch


def normal(*sizes: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """[sizes] float32 from a standard normal distribution, by a generator of its own.

    Measurements run beside a training, on other threads. A number drawn from torch's generator
    there would change the dropout masks and the batches of the training.
    """
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(*sizes, generator=generator, device=device)
