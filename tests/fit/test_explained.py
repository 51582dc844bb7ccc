"""Reasons of the ways that a goal's plan has chosen."""

from __future__ import annotations

import pytest
import torch

from cswap.fit import explained as why
from cswap.fit.explained import explained
from cswap.fit.link_rates import LinkRates
from cswap.fit.saved import Decided, Key, Way

KEY = Key("a", torch.float32, 0)
KEEP = Way("keep", 100, 0.0)
FAST, SMALL, WORSE = Way("zvc", 50, 1e-3), Way("remat", 0, 2e-3), Way("rle", 60, 3e-3)
RAW, AGAIN = Way("raw", 0, 0.0, link_bytes=10**6), Way("remat", 0, 1e-4)
LINK = LinkRates(1e9, 1e9, 1e9)


@pytest.mark.parametrize(
    ("action", "ways", "link", "reason"),
    [
        ("keep", [KEEP], None, why.NO_OTHER),
        ("keep", [KEEP, Way("zvc", 100, 1e-3)], None, why.NO_OTHER),
        ("keep", [KEEP, FAST], None, why.FREE),
        ("zvc", [KEEP, FAST, SMALL], None, why.FASTEST),
        ("remat", [KEEP, FAST, SMALL], None, why.SMALLER),
        ("rle", [KEEP, FAST, WORSE], None, why.WHOLE),
        ("zvc", [KEEP, Way("zvc", 100, 1e-3)], None, why.WHOLE),  # it has grown since
        ("raw", [KEEP, RAW], LINK, why.FASTEST),
        ("raw", [KEEP, RAW, AGAIN], LINK, why.HIDDEN),
        ("remat", [KEEP, RAW, AGAIN], LINK, why.FASTEST),
        ("raw", [], LINK, why.FROM_FILE),
    ],
)
def test_a_reason_compares_a_way_with_the_others_of_its_tensor(action, ways, link, reason):
    (row,) = explained({KEY: Decided(action, 0, 100)}, lambda _key: ways, {}, link)
    assert (row.codec, row.reason) == (action, reason)
