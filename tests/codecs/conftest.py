"""A shorter battery for the quick tests of codecs."""

from __future__ import annotations

import pytest

from cswap.schema.tensor import DTYPES
from cswap.testing import battery, hostile
from cswap.testing.strategies import values_for

WITHOUT = {("float", 8), ("int", 2), ("uint", 2)}
"""Kinds and bytes of words that slow tests have: kernels of a word size take seconds to compile."""


@pytest.fixture
def shortened(monkeypatch):
    """Makes the battery shorter: of damaged values and of dtypes with equal words, one in turn."""

    def shorten(turn=0):
        def some_values(dtype):
            return values_for(dtype)[turn % 4 :: 4]

        by_word: dict[tuple[int, bool], list[str]] = {}
        for name, dtype in DTYPES.items():
            if (dtype.kind, dtype.word) not in WITHOUT:
                by_word.setdefault((dtype.word, dtype.kind == "float"), []).append(name)
        kept = {names[turn % len(names)] for names in by_word.values()} | {"bfloat16"}
        some = {name: dtype for name, dtype in DTYPES.items() if name in kept}
        monkeypatch.setattr(battery, "DTYPES", some)
        monkeypatch.setattr(hostile, "values_for", some_values)
        monkeypatch.setattr(hostile, "N_MUTATIONS", 8)

    return shorten
