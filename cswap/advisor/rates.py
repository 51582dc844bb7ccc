"""Rates of the codecs on a CPU, and the price of a byte, until this machine is calibrated."""

from __future__ import annotations

from math import inf
from typing import Final

from cswap.advisor.cost import Rate

_G: Final = 1e9

CPU_RATES: Final[dict[str, Rate]] = {
    "keep": Rate(inf, inf, 0.0),
    "raw": Rate(24 * _G, 17 * _G),
    "zvc": Rate(20 * _G, 16 * _G),
    "csr": Rate(18 * _G, 10 * _G),
    "rle": Rate(17 * _G, 17 * _G),
    "zvc+expk": Rate(12 * _G, 11 * _G),
    "expk": Rate(10 * _G, 8 * _G),
    "bitpack": Rate(23 * _G, 14 * _G),
    "bf16": Rate(26 * _G, 18 * _G),
    "fp16": Rate(28 * _G, 19 * _G),
    "int8": Rate(19 * _G, 20 * _G),
    "fp8": Rate(14 * _G, 19 * _G),
    "mxfp8": Rate(14 * _G, 13 * _G),
    "int4": Rate(7 * _G, 16 * _G),
    "zvc+int8": Rate(14 * _G, 14 * _G),
    "zvc+fp8": Rate(11 * _G, 13 * _G),
    "zvc+int4": Rate(9 * _G, 20 * _G),
}
"""Of one thread on float32 (int64 for bitpack), as a worker runs them: on ReLU or GELU activations,
whichever is slower; raw at memcpy's.

Source: bench/results/cpu/codecs-worker.json. Only their order of magnitude matters: what they are
weighed against is the price below.
"""

DEFAULT_PRICE_S_PER_BYTE: Final = 2.5e-9
"""What a byte of memory is worth on a CPU: two to three times what torch's checkpointing takes to
save one, since who turns swapping on is short of memory.

Checkpointing's: extra step time over saved bytes in bench/results/cpu/demo.json, 1.3e-9 for the CNN
and 0.8e-9 for the GPT.
"""

CUDA_RATES: Final[dict[str, Rate]] = {
    "raw": Rate(inf, inf),
    "zvc": Rate(1300 * _G, 1500 * _G),
    "csr": Rate(1000 * _G, 1000 * _G),
    "rle": Rate(1000 * _G, 1000 * _G),
    "zvc+expk": Rate(800 * _G, 1000 * _G),
    "expk": Rate(1000 * _G, 1800 * _G),
    "bitpack": Rate(1300 * _G, 1500 * _G),
    "bf16": Rate(1800 * _G, 2000 * _G),
    "fp16": Rate(1800 * _G, 2000 * _G),
    "int8": Rate(1800 * _G, 2000 * _G),
    "fp8": Rate(1800 * _G, 2000 * _G),
    "mxfp8": Rate(1800 * _G, 2000 * _G),
    "int4": Rate(1000 * _G, 2000 * _G),
    "zvc+int8": Rate(1000 * _G, 1000 * _G),
    "zvc+fp8": Rate(1000 * _G, 1000 * _G),
    "zvc+int4": Rate(800 * _G, 1000 * _G),
}
"""What the kernels were designed for, not what was measured: none of it was run on a GPU."""

HOOKS_S: Final = 60e-6
"""What swapping a tensor costs the host beyond kernels and copies, out and back.

Source: bench/results/cpu/overhead.json.
"""

LINK_BYTES_PER_S: Final[dict[str, tuple[float, float] | None]] = {
    "cpu": None,
    "cuda": (25 * _G, 25 * _G),
}
"""Of the link, device to host and back; None where host and device memory are one.

PCIe 4.0 x16: an assumption, too.
"""

CUDA_PRICE_S_PER_BYTE: Final = 2 / (25 * _G)
"""Until it is fitted: as if nothing hid what goes out and comes back over that link."""

HOST_PRICE_S_PER_BYTE: Final = 100 * DEFAULT_PRICE_S_PER_BYTE
"""Highest price of a byte while ``host_limit`` is too small for a step's encodings."""

RATES: Final = {
    "cpu": (CPU_RATES, DEFAULT_PRICE_S_PER_BYTE),
    "cuda": (CUDA_RATES, CUDA_PRICE_S_PER_BYTE),
}
"""Rates and price by kind of device."""
