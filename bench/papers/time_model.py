"""CSwap+'s model of codec times, fitted here and judged on measurements that it has not seen.

The paper predicts the times of its GPU kernels and reports the relative absolute error and the
share of right decisions. It does not say whether the measurements were part of the fit. Here
encodes and decodes of ZVC are measured on this CPU; every third measurement is held out.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import torch

from bench.papers.published import DECISION_ACCURACY, TIME_MODEL_RAE
from bench.papers.row import ONE, Cell, Row
from cswap.advisor.cswap_plus import Swap, fit_times, relative_absolute_error, sparse_bytes
from cswap.codecs.base import DEFAULT_KEY
from cswap.codecs.registry import get_codec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cswap.advisor.cswap_plus import TimeModels

CODEC: Final = "zvc"
SIZES_MIB: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
ZEROS: Final = tuple(0.2 + 0.025 * i for i in range(25))
"""Shares of zeros, over the range that the paper fits (`cswap.advisor.cswap_plus.SPARSITIES`)."""

REPEATS: Final = 5
"""Repetitions of each measurement; the fastest counts, because others use the machine, too."""

HELD_OUT: Final = 3
"""Every so many measurements, one is not used for the fit."""

LINKS: Final = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Rates of the link that decisions are made for, over the rate at which a tensor with half zeros
breaks even. Far from that rate every model decides rightly."""

PROTOCOL: Final = (
    f"ZVC on this CPU, {len(SIZES_MIB)} sizes of {SIZES_MIB[0]} to {SIZES_MIB[-1]} MiB, "
    f"{len(ZEROS)} shares of zeros from {ZEROS[0]:.0%} to {ZEROS[-1]:.0%}; fastest of {REPEATS}; "
    f"every {HELD_OUT}rd measurement held out"
)
WHY: Final = (
    "the paper's are GPU kernels and, for all that it says, the measurements that were fitted; "
    "ours are of a CPU that other processes use, too"
)

Measured = tuple[float, float, float]
"""Bytes, share of zeros, seconds."""


def cells(*, quick: bool) -> list[Cell]:
    """The work: one cell; quick: none, since it measures times."""
    return [] if quick else [Cell("decisions zvc", _rows)]


def _rows() -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        encodes, decodes = measured(SIZES_MIB, ZEROS)
    finally:
        torch.set_num_threads(threads)
    models, errors = [], []
    for samples in (encodes, decodes):
        fitted, held_out = split(samples)
        models.append(fit_times(fitted))
        errors.append(error_percent(models[-1], held_out))
    pairs = list(zip(split(encodes)[1], split(decodes)[1], strict=True))
    right = decision_percent(models, pairs)
    kinds = ("encode", "decode")
    return [
        *(
            Row(
                "CSwap+",
                f"time model, {kind}: relative absolute error",
                "%",
                TIME_MODEL_RAE,
                error,
                PROTOCOL,
                WHY,
                ONE,
                "measured",
                details={"quantity": f"{kind} error"},
            )
            for kind, error in zip(kinds, errors, strict=True)
        ),
        Row(
            "CSwap+",
            "decisions that predicted and measured times share",
            "%",
            DECISION_ACCURACY,
            right,
            f"{PROTOCOL}; links of {LINKS[0]:g} to {LINKS[-1]:g} times the rate at which half "
            "zeros break even; nothing hidden",
            WHY,
            ONE,
            "computed from measured times",
            details={"quantity": "decisions", "tensors": len(pairs)},
        ),
    ]


def measured(
    sizes_mib: Sequence[int], zeros: Sequence[float]
) -> tuple[list[Measured], list[Measured]]:
    """Encode and decode times of float32 values with zeros at random places."""
    random = torch.Generator().manual_seed(0)
    encodes, decodes = [], []
    for mib in sizes_mib:
        values = torch.randn(mib << 18, generator=random)
        places = torch.rand(mib << 18, generator=random)
        for share in zeros:
            data = torch.where(places < share, 0.0, values)
            encode_s, decode_s = _times(data)
            encodes.append((float(data.nbytes), share, encode_s))
            decodes.append((float(data.nbytes), share, decode_s))
    return encodes, decodes


def split(samples: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """The measurements for the fit, and those that are held out.

    >>> split([(1.0, 0.2, 1.0), (1.0, 0.3, 2.0), (1.0, 0.4, 3.0)])[1]
    [(1.0, 0.2, 1.0)]
    """
    held_out = [s for i, s in enumerate(samples) if i % HELD_OUT == 0]
    return [s for i, s in enumerate(samples) if i % HELD_OUT], held_out


def error_percent(model: TimeModels, held_out: Sequence[Measured]) -> float:
    """Relative absolute error of the model on measurements, in per cent."""
    predicted = [model.seconds(nbytes, zeros) for nbytes, zeros, _ in held_out]
    return 100 * relative_absolute_error(predicted, [seconds for *_, seconds in held_out])


def decision_percent(
    models: Sequence[TimeModels], pairs: Sequence[tuple[Measured, Measured]]
) -> float:
    """Share of decisions that are the same with the models' times as with the measured ones."""
    encode, decode = models
    right = 0
    rate = _break_even(models)
    for (nbytes, zeros, encode_s), (*_, decode_s) in pairs:
        encoded = sparse_bytes(nbytes, zeros, "exact")
        guess = (encode.seconds(nbytes, zeros), decode.seconds(nbytes, zeros))
        for link in LINKS:
            swap = Swap(nbytes, link * rate, link * rate)
            right += swap.pays(encoded, encode_s, decode_s) == swap.pays(encoded, *guess)
    return 100 * right / (len(LINKS) * len(pairs))


def _break_even(models: Sequence[TimeModels]) -> float:
    # Rate of a link at which compressing 16 MiB with half zeros gains and costs the same.
    nbytes = float(16 << 20)
    codec_s = sum(model.seconds(nbytes, 0.5) for model in models)
    return 2 * (nbytes - sparse_bytes(nbytes, 0.5, "exact")) / codec_s


def _times(values: torch.Tensor) -> tuple[float, float]:
    # Fastest encode and decode, in seconds, on one thread.
    codec = get_codec(CODEC)
    out = torch.empty(codec.bound(values.dtype, values.numel()), dtype=torch.uint8)
    encoding = codec.encode(values)
    back = torch.empty_like(values)
    return (
        _fastest(lambda: codec.encode_flat(values, out, key=DEFAULT_KEY, stream=None)),
        _fastest(lambda: codec.decode_flat(encoding.payload, back, stream=None)),
    )


def _fastest(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
