"""Defaults until this machine is calibrated: prices of a byte, the link, codecs without rates.

The default rates of a codec stand with the codec (`CodecTraits.rates`).
"""

from __future__ import annotations

from typing import Final

from cswap.codecs.traits import CodecRate

_G: Final = 1e9

UNKNOWN_RATES: Final = {
    "cpu": CodecRate(3 * _G, 3 * _G),
    "cuda": CodecRate(50 * _G, 50 * _G),
}
"""By kind of device, of codecs that declare no rates: assumed, not measured. Slow on purpose: the
advisor takes such a codec only where its ratio is worth it, until measurements correct the rate.
At the price of a byte below, one that halves its tensors is not worth its time on a CPU."""

DEFAULT_PRICE_S_PER_BYTE: Final = 1.35e-9
"""Worth of a byte of memory on a CPU: the seconds that torch's checkpointing takes for it.

The median over the eleven models of `bench workloads`: extra time of a step over the bytes that are
held less. Three runs on one machine: docs/decisions.md.
"""

HOOKS_S: Final = {"cpu": 100e-6, "cuda": 60e-6}
"""Host time of swapping a tensor out and back, besides kernels and copies, by kind of device.

On a CPU with cold caches, as a model leaves them (measured at commit af369bf). On a GPU the
host works ahead of the device, so it counts with warm caches.
"""

LINK_BYTES_PER_S: Final[dict[str, tuple[float, float] | None]] = {
    "cpu": None,
    "cuda": (25 * _G, 25 * _G),
}
"""Rate of the link, device to host and back, by kind of device; None where host and device memory
are one. PCIe 4.0 x16: assumed, not measured.
"""

CUDA_PRICE_S_PER_BYTE: Final = 2 / (25 * _G)
"""Price on a GPU until it is fitted: as if no computation hid the transfers over that link."""

HOST_PRICE_S_PER_BYTE: Final = 100 * DEFAULT_PRICE_S_PER_BYTE
"""Highest price of a byte while ``host_limit`` is too small for a step's encodings."""

PRICES_S_PER_BYTE: Final = {"cpu": DEFAULT_PRICE_S_PER_BYTE, "cuda": CUDA_PRICE_S_PER_BYTE}
"""Price of an encoded byte by kind of device, before any step was seen."""
