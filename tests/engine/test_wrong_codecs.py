"""Codecs that lie, interrupts inside of codecs: never stuck, never wrong."""

from __future__ import annotations

from itertools import count

import pytest
import torch

import cswap
from cswap.codecs.base import Codec
from cswap.codecs.registry import get_codec
from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.errors import InternalError, UnsupportedError, to_raise, without_frames
from cswap.hooks import Swapping
from tests.engine.engines import assert_empty

N = 1 << 14


class Raw(Codec):
    """The bytes themselves; subclasses are wrong in one thing."""

    name, lossless, max_ratio = "wrong", True, 1

    def __init__(self):
        self._raw = get_codec("raw")

    def supports(self, dtype, device="cpu"):
        return True

    def bound(self, dtype, numel):
        return self._raw.bound(dtype, numel)

    def encode_flat(self, x, out, *, key, stream):
        return self._raw.encode_flat(x, out, key=key, stream=stream)

    def decode_flat(self, payload, out, *, stream):
        self._raw.decode_flat(payload, out, stream=stream)


def registered(codec):
    """A name under which the engine finds this codec."""
    codec.name = f"wrong-{next(_numbers)}"
    cswap.register_codec(codec.name, lambda: codec)
    return codec.name


_numbers = count()


def engine_with(codec):
    return SwapEngine(SwapConfig(min_bytes=0, codec=registered(codec), remat=False))


def gradient(engine, x):
    with Swapping(engine):
        y = ((x * 2).sin() * (x * 3).cos()).sum()
    return torch.autograd.grad(y, x)[0]


@pytest.fixture
def x():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, generator=generator).requires_grad_()


@pytest.fixture
def expected(x):
    return torch.autograd.grad(((x * 2).sin() * (x * 3).cos()).sum(), x)[0]


# ------------------------------------------------------------- codecs that lie

WRONG_SIZES = [-1, "bound + 1", None, 0.5, "text", 1 << 70]


@pytest.mark.parametrize("size", WRONG_SIZES, ids=str)
def test_a_wrong_size_is_a_failure_of_the_codec(x, expected, size):
    class Wrong(Raw):
        def encode_flat(self, x, out, *, key, stream):
            super().encode_flat(x, out, key=key, stream=stream)
            return self.bound(x.dtype, x.numel()) + 1 if size == "bound + 1" else size

    run_with(Wrong(), x, expected)
    with pytest.raises(InternalError, match="encode_flat gave"):
        Wrong().encode(x.detach())


@pytest.mark.parametrize("bound", [-1, None, 1.5, "much"], ids=str)
def test_a_wrong_bound_is_a_failure_of_the_codec(x, expected, bound):
    class Wrong(Raw):
        def bound(self, dtype, numel):
            return bound

    run_with(Wrong(), x, expected)
    with pytest.raises(InternalError, match="bound gave"):
        Wrong().encode(x.detach())


def run_with(codec, x, expected):
    engine = engine_with(codec)
    assert torch.equal(gradient(engine, x), expected)
    stats = engine.stats
    assert set(stats.fallbacks_by_reason) <= {f"{codec.name}:encode"}
    assert stats.fallbacks >= 4
    assert set(stats.by_codec) <= {"raw"}
    assert_empty(engine)


def test_a_numpy_integer_is_a_size(x):
    import numpy as np

    class Right(Raw):
        def encode_flat(self, x, out, *, key, stream):
            return np.int64(super().encode_flat(x, out, key=key, stream=stream))

    codec = Right()
    assert torch.equal(codec.decode(codec.encode(x.detach())), x.detach())


def test_supports_that_raises_is_a_refusal(x, expected):
    class Picky(Raw):
        def supports(self, dtype, device="cpu"):
            raise RuntimeError("who knows")

    codec = Picky()
    engine = engine_with(codec)
    assert torch.equal(gradient(engine, x), expected)
    assert engine.stats.fallbacks == 0
    assert codec.name not in engine.stats.by_codec
    with pytest.raises(UnsupportedError):
        Picky().encode(x.detach())


# ------------------------------------------------------------- interrupts inside of codecs


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["encode_flat", "decode_flat"])
def test_an_interrupt_in_a_codec_goes_up_and_the_next_step_is_right(x, expected, error, where):
    class Interrupted(Raw):
        due = 4  # after the first use, which is by itself

    def interrupt(self, *args, **more):
        self.due -= 1
        if self.due == 0:
            raise error
        return getattr(Raw, where)(self, *args, **more)

    setattr(Interrupted, where, interrupt)
    engine = engine_with(Interrupted())
    with pytest.raises(error):
        gradient(engine, x)
    assert torch.equal(gradient(engine, x), expected)
    assert engine.stats.fallbacks == 0
    assert_empty(engine)


def test_a_graph_survives_an_interrupt_in_its_backward(x):
    """With retain_graph the same backward can be run again."""

    class Interrupted(Raw):
        due = 2  # after the first use, which is by itself

        def decode_flat(self, payload, out, *, stream):
            self.due -= 1
            if self.due == 0:
                raise KeyboardInterrupt
            super().decode_flat(payload, out, stream=stream)

    engine = engine_with(Interrupted())
    with Swapping(engine):
        y = (x * 2).sin().sum()
    with pytest.raises(KeyboardInterrupt):
        torch.autograd.grad(y, x, retain_graph=True)
    (found,) = torch.autograd.grad(y, x)
    assert torch.equal(found, (x * 2).cos() * 2)
    del y
    assert_empty(engine)


def test_errors_that_are_kept_have_no_frames_and_those_that_are_raised_are_copies():
    try:
        try:
            int("inner")
        except ValueError as inner:
            raise cswap.CorruptEncodingError("outer") from inner
    except cswap.CorruptEncodingError as error:
        kept = without_frames(error)
    assert kept.__traceback__ is None
    assert kept.__cause__ is not None
    assert kept.__cause__.__traceback__ is None
    for _ in range(2):
        with pytest.raises(cswap.CorruptEncodingError, match="outer"):
            raise to_raise(kept)
    assert kept.__traceback__ is None

    class OddError(Exception):
        def __init__(self, one, two):
            super().__init__(one)

    assert "odd" in str(to_raise(OddError("odd", 2)))
