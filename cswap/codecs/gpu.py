"""Runs the CUDA twin of a format on tensors, on a stream. `launcher` launches its kernels.

The module never waits for the device, with one exception: a decode without a stream waits, because
it has to report damage.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from cswap.codecs.launcher import DEFAULT_SHAPE, Launcher, compiled, launched, pinned_word
from cswap.errors import CorruptEncodingError, UnsupportedError
from cswap.install_hint import to_install
from cswap_kernels.unwatched import unwatched

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cswap.codecs.pinned_sizes import PinnedSize

N_ARGS: Final = 4

_on_stream = torch.cuda.stream

TRIAL: Final = "zvc-4-decode"
"""The kernel that is compiled to test the compiler; most programs need it anyway."""

_NEEDED: Final = ("cuda.core", "numba.cuda.extending", "cswap_kernels.cuda.formats")


@cache
def missing() -> str | None:
    """The reason why kernels cannot run here; None if they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        for module in _NEEDED:
            unwatched(importlib.import_module, module)
    except ImportError as error:
        return f"numba-cuda is missing or too old ({error}); {to_install('cuda13')}"
    return _cannot_compile()


def _cannot_compile() -> str | None:
    # One kernel is a sufficient test: without libnvvm or nvJitLink, every kernel would fail, each
    # after seconds.
    major, minor = torch.cuda.get_device_capability()
    try:
        unwatched(compiled, TRIAL, 10 * major + minor, DEFAULT_SHAPE.threads)
    except Exception as error:
        return (
            f"kernels cannot be compiled here ({type(error).__name__}: {error}); "
            "pip install 'numba-cuda[cu13]', or [cu12] with CUDA 12"
        )
    return None


@cache
def has_kernels(format_name: str, word: int) -> bool:
    """Whether this format's CUDA twin can run here on words of ``word`` bytes."""
    if missing() is not None:
        return False
    from cswap_kernels.cuda.formats import FORMATS

    return word in FORMATS.get(format_name, ())


def encode(
    format_name: str,
    word: int,
    x: torch.Tensor,
    out: torch.Tensor,
    args: Sequence[int],
    stream: torch.cuda.Stream | None,
) -> PinnedSize:
    """Launch an encode of x into out; the size is known when the stream has run it.

    Without a stream, the call waits for that. An encode cannot be part of a CUDA graph, see
    `Launcher.control`.

    Args:
        format_name: a key of `cswap_kernels.cuda.formats.FORMATS`.
        word: bytes per word.
        x: [n] flat, on the device.
        out: uint8, 16-byte aligned, on the device or pinned on the host, of the codec's bound.
        args: the format's parameters, at most four.
        stream: CUDA stream; default: the current stream.

    Raises:
        UnsupportedError: a CUDA graph is being captured, or the kernel cannot be compiled.
    """
    launcher = _launcher(x.device.index)
    size = launcher.sizes.take()
    n_words = x.nbytes // word
    values = (
        x.data_ptr(),
        out.data_ptr(),
        launcher.control(stream).data_ptr(),
        size.address,
        n_words,
        0,
        int(x.data_ptr() % 16 == 0),
        *_padded(args),
    )
    n_tiles = _count_tiles(n_words, word)
    launcher.launch(f"{format_name}-{word}-encode", n_tiles, values, stream)
    if stream is None:
        wait(x.device)
    return size


def decode(
    format_name: str,
    word: int,
    payload: torch.Tensor,
    out: torch.Tensor,
    args: Sequence[int],
    stream: torch.cuda.Stream | None,
) -> None:
    """Launch a decode of payload [nbytes] into out [n].

    Without a stream, the call waits for the decode and raises an error for damage. With a stream,
    it does not wait, and `damage` reports damaged tiles later.

    Raises:
        CorruptEncodingError: a tile is damaged.
    """
    launcher = _launcher(out.device.index)
    n_words = out.nbytes // word
    # Kernels read whole groups of 16 bytes.
    nbytes = payload.numel()
    if payload.data_ptr() % 16 or nbytes % 16:
        payload = _aligned(payload, stream)
    status = launcher.status if stream is not None else pinned_word()
    values = (
        payload.data_ptr(),
        nbytes,
        out.data_ptr(),
        status.data_ptr(),
        n_words,
        int(out.data_ptr() % 16 == 0),
        *_padded(args),
    )
    n_tiles = _count_tiles(n_words, word)
    launcher.launch(f"{format_name}-{word}-decode", n_tiles, values, stream)
    if stream is None:
        wait(out.device)
        bad = int(status.item())
        if bad:
            raise CorruptEncodingError(f"format {format_name!r}: tile {bad - 1} is damaged.")


def wait(device: torch.device) -> None:
    """Block until the device's current stream has run all launched work."""
    torch.cuda.current_stream(device).synchronize()


def damage(index: int) -> Sequence[int]:
    """Indices of damaged tiles that decodes on this device's streams have found in this process.

    The list grows. Decodes that have not run yet are not included. The call never waits.
    """
    launcher = launched.get(index)
    return () if launcher is None else launcher.damage()


def _aligned(payload: torch.Tensor, stream: torch.cuda.Stream | None) -> torch.Tensor:
    # The copy is allocated on the stream that reads it, because it is freed before the kernel runs.
    with _on_stream(stream):
        nbytes = payload.numel()
        padded = torch.zeros(-(-nbytes // 16) * 16, dtype=torch.uint8, device=payload.device)
        padded[:nbytes] = payload
        return padded


@cache
def _launcher(index: int) -> Launcher:
    reason = missing()
    if reason is not None:
        raise UnsupportedError(f"CUDA kernels: {reason}.")
    return Launcher(index)


def _count_tiles(n_words: int, word: int) -> int:
    from cswap_kernels.tiles import count_tiles

    return count_tiles(n_words, word)


def _padded(args: Sequence[int]) -> Iterator[int]:
    yield from args
    yield from [0] * (N_ARGS - len(args))
