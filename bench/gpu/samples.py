"""Made-up tensors as training saves them, made on the device from fixed seeds."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

ROW: Final = 1024
"""Elements that one softmax is taken over."""

VOCABULARY: Final = 50257
KEPT: Final = 0.9
"""Share of ones in a dropout mask."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One kind of values in one dtype.

    Attributes:
        kind: a key of `KINDS`.
        dtype: of the elements.
    """

    kind: str
    dtype: torch.dtype

    def make(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """[nbytes // itemsize] values, the same every time; nbytes a multiple of 8 KiB."""
        generator = torch.Generator(device).manual_seed(sorted(KINDS).index(self.kind))
        numel = nbytes // self.dtype.itemsize
        return KINDS[self.kind](numel, generator, device).to(self.dtype)

    def __str__(self) -> str:
        return f"{self.kind} {str(self.dtype).removeprefix('torch.')}"


def size(nbytes: int) -> str:
    """Bytes for names of measurements.

    >>> size(64 << 10), size(256 << 20)
    ('64 KiB', '256 MiB')
    """
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def _normal(numel: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    return torch.randn(numel, generator=generator, device=device)


def _relu(zeros: float) -> Callable[[int, torch.Generator, torch.device], torch.Tensor]:
    threshold = NormalDist().inv_cdf(zeros)

    def make(numel: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
        return _normal(numel, generator, device).sub_(threshold).relu_()

    return make


def _softmax(numel: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    return _normal(numel, generator, device).view(-1, ROW).softmax(dim=1).view(-1)


def _mask(numel: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    return torch.rand(numel, generator=generator, device=device) < KEPT


def _index(numel: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    return torch.randint(VOCABULARY, (numel,), generator=generator, device=device)


KINDS: Final = {
    "relu-50": _relu(0.50),
    "relu-70": _relu(0.70),
    "relu-85": _relu(0.85),
    "normal": _normal,
    "softmax": _softmax,
    "mask": _mask,
    "index": _index,
}
"""relu-N: N % zeros. normal: as dense as GELU's results."""

RELU_85: Final = Sample("relu-85", torch.float32)
DENSE: Final = Sample("normal", torch.float32)
DENSE_HALF: Final = Sample("normal", torch.bfloat16)

ALL: Final = (
    *(
        Sample(kind, dtype)
        for kind in ("relu-50", "relu-70", "relu-85", "normal", "softmax")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
    Sample("mask", torch.bool),
    Sample("index", torch.int64),
)
