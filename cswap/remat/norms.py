"""Norms, computed again by the statistics that autograd has saved.

Note [the epsilon of a norm]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
LayerNorm, the fused RMSNorm and, from torch 2.14 on, GroupNorm save their input, weights and
statistics, but not epsilon. A norm with the right epsilon gives the saved statistics, bit by bit.
The converse holds as well: the output is a function of input, statistics and weights, element by
element. So equal statistics mean an equal output, even if another epsilon gave them. This needs
statistics of full precision: norms whose statistics are rounded to 16 bits do not run again.

The last right epsilon is tried first, then the usual ones. If none of them is right, bisection
finds one, because in every row the reciprocal deviation falls as epsilon rises. On a GPU a
comparison waits for the device. So there the epsilon of a weight is compared a few times and then
taken as known.

Note [a batch norm without its sums]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
torch's kernel for the CPU makes two numbers per channel, ``alpha = invstd * weight`` and
``beta = bias - mean * alpha``, and then the output, ``x * alpha + beta``. In evaluation it takes
mean and variance from the running statistics. So with the saved mean, a variance of 1, no epsilon
and the weight ``invstd * weight``, the kernel makes the same two numbers, and so the same output,
but reads the input once and adds nothing up. This takes a sixth of the time. It needs statistics of
full precision; kernels of GPUs compute in another order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cswap.errors import InternalError
from cswap.recent import Recent
from cswap.remat.record import same_bits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Norm: TypeAlias = Callable[[float], "tuple[torch.Tensor, ...]"]
"""A function of epsilon that returns the output, the means if there are any, and the reciprocal
deviations."""

USUAL: Final = (1e-5, 1e-6, 1e-12, 1e-8, 2.0**-23, 2.0**-52, 2.0**-7, 2.0**-10, 0.0)
"""Epsilons of LayerNorm; of ViT and Llama; of BERT; others; and the machine epsilons, which are
RMSNorm's default."""

MOST_REMEMBERED: Final = 8
"""Number of remembered epsilons besides those in `USUAL`."""

_Weight = tuple[int, int, int]
"""Of a weight: its storage, and where in that it lies."""

TIMES_TO_COMPARE: Final = 4
"""On a GPU, a weight's epsilon is taken as known after this number of comparisons."""

FULL: Final = frozenset({torch.float32, torch.float64})
"""Dtypes in which statistics are not rounded."""

_CHANNELS_LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}

MOST_ONES: Final = 64
"""Numbers of channels whose ones are kept."""

_ONES: Final[dict[tuple[torch.Size, torch.dtype], torch.Tensor]] = {}

MOST_WEIGHTS: Final = 1 << 12
"""Weights whose epsilons are kept: a model may make its weights anew in each step."""

LARGEST: Final = 1e300
"""Upper end of the bisection, which starts from 0."""


class Epsilons:
    """Epsilons in the order of trial; the last right one comes first."""

    def __init__(self) -> None:
        self._recent: tuple[float, ...] = USUAL
        self._of_weights: Recent[_Weight, tuple[StorageWeakRef, float, int]] = Recent(MOST_WEIGHTS)

    def learn(self, values: Iterable[float]) -> None:
        """Add the epsilons of a model, to be tried first."""
        for value in values:
            self.found(value)

    def found(self, value: float, weight: torch.Tensor | None = None) -> None:
        """Note a right epsilon. Args: weight: the norm's weight; None: do not remember it."""
        recent = self._recent
        if recent[0] != value:
            others = [v for v in recent if v != value]
            self._recent = (value, *others[: len(USUAL) + MOST_REMEMBERED])
        if weight is not None:
            storage, key = weight.untyped_storage(), _key(weight)
            weak, known, times = self._of_weights.get(key) or (None, value, 0)
            if weak is None:  # the reference prevents reuse of the key for another storage
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._of_weights[key] = (weak, value, times + 1 if known == value else 1)

    def known(self, weight: torch.Tensor | None) -> float | None:
        """The epsilon of this weight's norm, if it was right `TIMES_TO_COMPARE` times."""
        if weight is None:
            return None
        found = self._of_weights.get(_key(weight))
        return found[1] if found is not None and found[2] >= TIMES_TO_COMPARE else None

    def __iter__(self) -> Iterator[float]:
        return iter(self._recent)


def _key(weight: torch.Tensor) -> _Weight:
    # Weights of several norms may lie in one storage, flat.
    storage = weight.untyped_storage()
    return storage._cdata, int(weight.storage_offset()), weight.numel()  # noqa: SLF001


EPSILONS: Final = Epsilons()
"""The epsilons of all norms of this process."""


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    normalized_shape: Sequence[int],
) -> torch.Tensor:
    """LayerNorm with the epsilon that gives these statistics.

    Args:
        x: [..., *normalized_shape].
        weight: [*normalized_shape], or None.
        bias: [*normalized_shape], or None.
        mean: saved mean of each row.
        rstd: saved reciprocal standard deviation of each row.
        normalized_shape: sizes of a row.

    Raises:
        InternalError: no epsilon gives these statistics.
    """

    def run(eps: float) -> tuple[torch.Tensor, ...]:
        return torch.native_layer_norm(x, normalized_shape, weight, bias, eps)

    return _output(run, (mean, rstd), weight)


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """BatchNorm in training; see Note [a batch norm without its sums].

    Args:
        x: [n, channels, ...].
        weight: [channels].
        bias: [channels].
        mean: saved mean of each channel.
        invstd: saved reciprocal standard deviation of each channel.
        eps: of the norm.
    """
    full = invstd.dtype in FULL and weight.dtype in FULL
    if x.device.type != "cpu" or not full or not _are_dense(x, weight, bias):
        return torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]
    return torch.native_batch_norm(x, invstd * weight, bias, mean, _ones(mean), False, 0.0, 0.0)[0]


def cudnn_batch_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """BatchNorm in training by cuDNN, the same kernel as before; no running statistics change.

    Args:
        x: [n, channels, ...], on a GPU.
        weight: [channels].
        bias: [channels].
        eps: of the norm.
    """
    return torch.cudnn_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor, normalized_shape: list[int]
) -> torch.Tensor:
    """The fused RMSNorm with the epsilon that gives these statistics; see `layer_norm`."""

    def run(eps: float) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten._fused_rms_norm(x, normalized_shape, weight, eps)  # type: ignore[no-any-return]  # noqa: SLF001

    return _output(run, (rstd,), weight)


def group_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    n: int,
    c: int,
    hxw: int,
    group: int,
) -> torch.Tensor:
    """GroupNorm with the epsilon that gives these statistics; see `layer_norm`.

    Args:
        x: [n, c, ...].
        weight: [c].
        bias: [c].
        mean: [n, group], saved.
        rstd: [n, group], saved reciprocal standard deviations.
        n: size of the batch.
        c: number of channels.
        hxw: elements of a channel.
        group: number of groups.

    Raises:
        InternalError: no epsilon gives these statistics.
    """

    def run(eps: float) -> tuple[torch.Tensor, ...]:
        return torch.native_group_norm(x, weight, bias, n, c, hxw, group, eps)

    return _output(run, (mean, rstd), weight)


def layer_norm_of_statistics(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    normalized_shape: Sequence[int],
) -> torch.Tensor:
    """LayerNorm of a lossy input, computed from the saved statistics; see `layer_norm`."""
    out = (x.contiguous() - mean).mul_(rstd)
    if weight is not None:
        out = out.mul_(weight) if bias is None else torch.addcmul(bias, out, weight)
    elif bias is not None:
        out = out.add_(bias)
    return out.to(x.dtype)


def group_norm_of_statistics(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    n: int,
    c: int,
    hxw: int,
    group: int,
) -> torch.Tensor:
    """GroupNorm of a lossy input, computed from the saved statistics; see `group_norm`."""
    of_channels = [1, c] + [1] * (x.dim() - 2)
    means, rstds = (
        s.reshape(n, group).repeat_interleave(c // group, 1).reshape(n, *of_channels[1:])
        for s in (mean, rstd)
    )
    out = (x - means).mul_(rstds)
    scaled = torch.addcmul(bias.reshape(of_channels), out, weight.reshape(of_channels))
    return scaled.to(x.dtype)


def rms_norm_of_statistics(
    x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor, normalized_shape: list[int]
) -> torch.Tensor:
    """RMSNorm of a lossy input, computed from the saved statistics; see `layer_norm`."""
    out = x * rstd
    return (out if weight is None else out * weight).to(x.dtype)


def _are_dense(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> bool:
    # Other layouts have a kernel that subtracts the mean first.
    if not (weight.is_contiguous() and bias.is_contiguous()):
        return False
    order = _CHANNELS_LAST.get(x.dim())
    return x.is_contiguous() or (order is not None and x.is_contiguous(memory_format=order))


def _ones(like: torch.Tensor) -> torch.Tensor:
    # Made once for all norms of that many channels: to make them takes 15 us, with cold caches.
    key = like.shape, like.dtype
    found = _ONES.get(key)
    if found is None:
        found = torch.ones_like(like)
        if type(found) is torch.Tensor and not found.is_inference():
            if len(_ONES) >= MOST_ONES:
                _ONES.clear()
            _ONES[key] = found
    return found


def _are_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or same_bits(a, b)  # the second if there are NaNs


def _output(
    run: Norm, saved: tuple[torch.Tensor, ...], weight: torch.Tensor | None
) -> torch.Tensor:
    # With the epsilon that gives the saved statistics, of which the last are the deviations.
    waits = saved[-1].device.type != "cpu"
    known = EPSILONS.known(weight) if waits else None
    if known is not None:
        return run(known)[0]
    for eps in EPSILONS:
        out, *again = run(eps)
        if not all(map(_are_equal, again[:-1], saved[:-1])):
            raise InternalError("norm: the means of the same input differ")
        if _are_equal(again[-1], saved[-1]):
            EPSILONS.found(eps, weight if waits else None)
            return out
        del out, again
    return _bisect(run, saved[-1])


def _bisect(run: Norm, rstd: torch.Tensor) -> torch.Tensor:
    # Positive floats have the same order as their bits: bisection needs at most 64 rounds.
    low, high = _bits(0.0), _bits(LARGEST)
    while low <= high:
        middle = (low + high) // 2
        eps = _number(middle)
        out, *_, again = run(eps)
        too_small, too_large = bool((again > rstd).any()), bool((again < rstd).any())
        if too_small == too_large:
            if too_small or not same_bits(again, rstd):
                break
            EPSILONS.found(eps)
            return out
        if too_small:
            low = middle + 1
        else:
            high = middle - 1
        del out
    raise InternalError("norm: no epsilon gives the statistics that were saved")


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _number(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
