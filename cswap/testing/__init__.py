"""Tests that every codec must pass, cswap's own and those of other packages: see `check_codec`.

>>> import cswap
>>> from cswap.testing import check_codec
>>> check_codec(cswap.get_codec("raw"), examples=2)
"""

from __future__ import annotations

from cswap.testing.battery import check_codec
from cswap.testing.strategies import TensorSpec, specs, tensors

__all__ = ["TensorSpec", "check_codec", "specs", "tensors"]
