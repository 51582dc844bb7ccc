"""The rates of a GPU's link, for a goal: `link_rates`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from cswap.advisor.calibration import stored
from cswap.advisor.link import measure_rates
from cswap.advisor.rates import LINK_BYTES_PER_S
from cswap.errors import CswapError
from cswap.log import log

KIND = "cuda"


class LinkRates(NamedTuple):
    """Bytes/s of a link.

    Attributes:
        out, back: to the host and from it, alone.
        both: each way, while the other one is busy.
    """

    out: float
    back: float
    both: float


@functools.cache
def link_rates(index: int) -> LinkRates:
    """Of a GPU: by this machine's calibration (`cswap calibrate`), else measured, once.

    Args:
        index: of the device.
    """
    known = stored(KIND)
    if known is not None and known.link is not None:
        link = known.link
        out, back = link.d2h_bytes_per_s, link.h2d_bytes_per_s
        return LinkRates(out, back, link.duplex_factor * min(out, back))
    try:
        with torch.cuda.device(index):
            return LinkRates(*measure_rates())
    except (RuntimeError, CswapError) as error:
        rates = LINK_BYTES_PER_S[KIND]
        assert rates is not None  # a GPU's link has some
        log.warning("The link could not be measured (%s); defaults are used.", error)
        return LinkRates(*rates, min(rates))
