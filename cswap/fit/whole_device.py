"""The device of a model, and the memory of it that a step may take."""

from __future__ import annotations

from typing import Final

import torch

from cswap.config import DEVICE
from cswap.errors import ConfigError

RESERVE: Final = 0.1
"""Share of a device's free memory that is left: for gaps between torch's blocks, and for libraries
that allocate beside torch."""


def one_device(model: torch.nn.Module) -> torch.device | None:
    """The device of a model's parameters and buffers; None: there are several, or none."""
    devices = {x.device for x in (*model.parameters(), *model.buffers())}
    return next(iter(devices)) if len(devices) == 1 else None


def device_of(model: torch.nn.Module) -> torch.device:
    """`one_device`.

    Raises:
        ConfigError: there are several, or none.
    """
    found = one_device(model)
    if found is None:
        devices = {x.device for x in (*model.parameters(), *model.buffers())}
        names = ", ".join(sorted(map(str, devices))) or "none"
        raise ConfigError(
            f"fit: the model's parameters must be on one device, and are on {names}. Use budget=."
        )
    return found


def usable_bytes(device: torch.device) -> int:
    """Bytes of a device that this process holds or could hold, less `RESERVE`.

    Raises:
        ConfigError: it is not a GPU.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"fit={DEVICE!r}: the model is on {device}, whose memory is not the step's alone. Move "
            'the model to a GPU first, or name the bytes: fit="8GiB".'
        )
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    usable = float(free_bytes + torch.cuda.memory_reserved(device))
    # Of newer torch: that of torch.cuda.set_per_process_memory_fraction.
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if fraction is not None:
        usable = min(usable, fraction(device) * total_bytes)
    return int((1 - RESERVE) * usable)
