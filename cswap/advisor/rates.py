"""Rates of the codecs on a CPU, and the price of a byte, until this machine is calibrated."""

from __future__ import annotations

from math import inf
from typing import Final

from cswap.advisor.cost import Rate

_G: Final = 1e9

CPU_RATES: Final[dict[str, Rate]] = {
    "keep": Rate(inf, inf, 0.0),
    "raw": Rate(20 * _G, 20 * _G),
    "zvc": Rate(10 * _G, 10 * _G),
    "zvc+expk": Rate(3 * _G, 3 * _G),
    "expk": Rate(5 * _G, 5 * _G),
    "bitpack": Rate(5 * _G, 5 * _G),
    "rle": Rate(2 * _G, 4 * _G),
    "csr": Rate(2 * _G, 4 * _G),
    "bf16": Rate(10 * _G, 10 * _G),
    "fp16": Rate(10 * _G, 10 * _G),
    "int8": Rate(10 * _G, 10 * _G),
    "fp8": Rate(5 * _G, 5 * _G),
    "mxfp8": Rate(5 * _G, 5 * _G),
    "int4": Rate(2 * _G, 5 * _G),
    "zvc+int8": Rate(4 * _G, 5 * _G),
    "zvc+fp8": Rate(3 * _G, 4 * _G),
    "zvc+int4": Rate(2 * _G, 4 * _G),
}
DEFAULT_PRICE_S_PER_BYTE: Final = 4e-9
