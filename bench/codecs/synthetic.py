"""Synthetic test data for codecs, by sparsity, values and size.

A case makes its tensor when its turn comes, from a seed of its own. So earlier or omitted cases do
not change its bytes.
"""

from __future__ import annotations

import zlib
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from cswap.experiments.codecs.case import Case
from cswap.schema.tensor import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    _Draw = Callable[[int, np.random.Generator], np.ndarray]
    _Mask = Callable[[int, float, np.random.Generator], Tensor]

KIB: Final = 1 << 10
MIB: Final = 1 << 20

FAMILIES: Final = ("recorded", "sparsity", "values", "sizes")

SHARES: Final = tuple(i / 10 for i in range(11))
"""Shares of zeros in the sparsity sweep; quick takes every fifth."""

RUN: Final = 64
"""Mean length, in elements, of runs of whichever is rarer, zeros or values."""

SIZES: Final = tuple(4 * KIB * 4**i for i in range(10))
"""Bytes: 4 KiB to 1 GiB in powers of four."""

QUICK_LARGEST: Final = MIB
N_DISTINCT: Final = 16
DEGREES: Final = 3
"""Degrees of freedom of Student's t: finite variance, infinite kurtosis."""

VOCABULARY: Final = 50257
"""Token ids: as many as GPT-2 has."""

SPARSE_CODECS: Final = ("zvc", "csr", "rle", "zvc+expk", "lz4")
FLOAT_SIZE_CODECS: Final = ("raw", "zvc", "int8")
TOKEN_SIZE_CODECS: Final = ("raw", "bitpack")

_FLOATS: Final = (torch.float32, torch.bfloat16)


def synthetic(family: str, *, quick: bool) -> list[Case]:
    """The cases of one of FAMILIES but "recorded"."""
    return list({"sparsity": _sparsity, "values": _values, "sizes": _sizes}[family](quick))


def _sparsity(quick: bool) -> Iterator[Case]:
    nbytes = 256 * KIB if quick else 16 * MIB
    for dtype in _FLOATS:
        for data, where in (("random zeros", random_zeros), ("zeros in runs", runs_of_zeros)):
            for share in SHARES[::5] if quick else SHARES:
                make = partial(_sparse, nbytes // dtype.itemsize, share, dtype, where)
                yield Case("sparsity", data, nbytes, make, SPARSE_CODECS, share)


def _sparse(n: int, share: float, dtype: torch.dtype, where: _Mask) -> Tensor:
    source = _source(f"{where.__name__} {share}")
    x = torch.from_numpy(source.standard_normal(n, dtype=np.float32))
    x = torch.where(x.abs() < 1e-6, 1e-6, x).to(dtype)  # no zero but those that are asked for
    return x.masked_fill_(where(n, share, source), 0)


def random_zeros(n: int, share: float, source: np.random.Generator) -> Tensor:
    """[n] bool, of which exactly round(n * share) are true, at random places."""
    mask = np.zeros(n, dtype=bool)
    mask[source.permutation(n)[: round(n * share)]] = True
    return torch.from_numpy(mask)


def runs_of_zeros(n: int, share: float, source: np.random.Generator) -> Tensor:
    """[n] bool, of which exactly round(n * share) are true, in runs.

    There are as many runs as make those of the rarer kind `RUN` long on average; they are cut at
    random places: their lengths are nearly geometric.
    """
    n_zeros = round(n * share)
    n_runs = max(1, min(n_zeros, n - n_zeros) // RUN)
    lengths = np.empty(2 * n_runs, dtype=np.int64)
    lengths[0::2] = _cut(n - n_zeros, n_runs, source)
    lengths[1::2] = _cut(n_zeros, n_runs, source)
    return torch.from_numpy(np.repeat(np.arange(2 * n_runs) % 2 == 1, lengths))


def _cut(total: int, n_parts: int, source: np.random.Generator) -> np.ndarray:
    # Random lengths of n_parts that add up to total.
    ends = np.sort(source.integers(0, total + 1, n_parts - 1))
    return np.diff(ends, prepend=0, append=total)


def _normal(n: int, source: np.random.Generator) -> np.ndarray:
    return source.standard_normal(n, dtype=np.float32)


def _distinct(n: int, source: np.random.Generator) -> np.ndarray:
    return source.standard_normal(N_DISTINCT, dtype=np.float32)[source.integers(0, N_DISTINCT, n)]


def zipf(n: int, source: np.random.Generator) -> np.ndarray:
    """[n] int64 below `VOCABULARY`: id k with a probability in proportion to 1 / (k + 1)."""
    cumulative = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
    found: np.ndarray = np.searchsorted(cumulative, source.random(n) * cumulative[-1], side="right")
    return found


_DISTRIBUTIONS: Final[dict[str, _Draw]] = {
    "normal": _normal,
    "log-normal": lambda n, source: source.lognormal(size=n),
    "uniform": lambda n, source: source.random(n, dtype=np.float32),
    f"Student t, {DEGREES}": lambda n, source: source.standard_t(DEGREES, n),
    "constant": lambda n, _: np.full(n, 0.7),
    f"{N_DISTINCT} values": _distinct,
}
"""Of floating-point values."""

_OTHERS: Final[dict[str, tuple[torch.dtype, _Draw]]] = {
    "Zipf token": (torch.int64, zipf),
    "mask 50 %": (torch.bool, lambda n, source: source.random(n) < 0.5),
    "mask 90 %": (torch.bool, lambda n, source: source.random(n) < 0.9),
}


def _values(quick: bool) -> Iterator[Case]:
    nbytes = 256 * KIB if quick else 16 * MIB
    floats = [(name, t, draw) for name, draw in _DISTRIBUTIONS.items() for t in _FLOATS]
    for data, dtype, draw in (*floats, *((k, *v) for k, v in _OTHERS.items())):
        yield Case("values", data, nbytes, partial(_drawn, nbytes, data, dtype, draw))


def _drawn(nbytes: int, data: str, dtype: torch.dtype, draw: _Draw) -> Tensor:
    found = draw(nbytes // dtype.itemsize, _source(f"{data} {dtype_name(dtype)}"))
    return torch.from_numpy(found).to(dtype)


def _sizes(quick: bool) -> Iterator[Case]:
    for nbytes in SIZES:
        if quick and nbytes > QUICK_LARGEST:
            return
        yield Case("sizes", "half zeros", nbytes, partial(_half_zeros, nbytes), FLOAT_SIZE_CODECS)
        yield Case("sizes", "token", nbytes, partial(_ids, nbytes), TOKEN_SIZE_CODECS)


def _half_zeros(nbytes: int) -> Tensor:
    # As ReLU leaves normal values.
    source = _source(f"half zeros {nbytes}")
    x = torch.from_numpy(source.standard_normal(nbytes // 4, dtype=np.float32))
    return x.relu_()


def _ids(nbytes: int) -> Tensor:
    return torch.from_numpy(_source(f"token {nbytes}").integers(0, VOCABULARY, nbytes // 8))


def _source(seed: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(seed.encode()))
