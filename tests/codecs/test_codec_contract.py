"""Every codec passes the one battery, and the battery fails codecs that break the contract."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings

from cswap.codecs import registry
from cswap.codecs.raw import Raw
from cswap.codecs.registry import get_codec, list_codecs, register_codec
from cswap.codecs.traits import CodecTraits
from cswap.errors import ConfigError, CorruptEncodingError, CswapError, UnsupportedError
from cswap.testing import check_codec
from tests.codecs.golden_files import check_golden, write_golden

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Floats = NDArray[Any]

GOLDEN = Path(__file__).parents[1] / "golden"

ON_A_CPU = sorted(set(list_codecs()) - set(registry.NVCOMP))
"""Where nvCOMP's codecs can run, they are listed, but take nothing on a CPU."""


LIKE_OTHERS = ("fp16", "lz4", "zvc+fp8")
"""Left to the slow tests: they share their code with bf16, zstd, and zvc+int8."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in LIKE_OTHERS else ()) for n in ON_A_CPU],
)
def test_codec_keeps_the_contract(name, shortened):
    shortened(ON_A_CPU.index(name))
    keeps_the_contract(name, examples=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_A_CPU)
def test_codec_keeps_the_contract_at_length(name):
    keeps_the_contract(name, examples=100)


def keeps_the_contract(name, examples):
    try:
        codec = get_codec(name)
    except ConfigError as error:
        if isinstance(error.__cause__, ImportError):
            pytest.skip(str(error))
        raise
    check_codec(codec, examples=examples, error_bound=BOUNDS.get(name))
    check_golden(codec, GOLDEN)


@pytest.mark.parametrize("name", ON_A_CPU)
def test_every_lossy_codec_has_its_bound(name):
    try:
        codec = get_codec(name)
    except ConfigError as error:
        pytest.skip(str(error))
    assert codec.lossless == (name not in BOUNDS)


# What each lossy codec promises, as its page under docs/format/ has it: by how much a word may be
# off. A word counts as one of the group of words that it shares a scale with.


def within(allowed: Callable[[Floats], Floats]) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """An error bound for `check_codec`: |x - x_hat| <= allowed(x), and the dtype's own rounding."""

    def holds(x: torch.Tensor, x_hat: torch.Tensor) -> bool:
        if x.numel() == 0:
            return x_hat.numel() == 0
        exact, found = x.double().numpy(), x_hat.double().numpy()
        # Computed in float32, at best; the scale of a group is at least its smallest normal number.
        unit = max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps) / 2
        least = max(torch.finfo(x.dtype).smallest_normal * unit, 2.0**-126)
        rounding = unit * np.maximum(np.abs(exact), np.abs(found)) + least
        with np.errstate(over="ignore"):  # float64 has ranges that are no float64
            return bool((np.abs(exact - found) <= allowed(exact) + rounding).all())

    return holds


def groups(x: Floats, size: int) -> Floats:
    return np.pad(x, (0, -x.size % size)).reshape(-1, size)


def span(x: Floats, size: int) -> Floats:
    """Of each word: from the lowest to the highest of its group, 0 among them."""
    g = groups(x, size)
    found = g.max(1, initial=0) - g.min(1, initial=0)
    return np.repeat(found, size)[: x.size]


def largest(x: Floats, size: int) -> Floats:
    """Of each word: the largest magnitude of its group."""
    return np.repeat(np.abs(groups(x, size)).max(1), size)[: x.size]


def int8_error(x: Floats, size: int) -> Floats:
    """Half a step; what is not 0 but less than that may become a whole one, instead of 0."""
    step = span(x, size) / 255 * ROUNDED
    return np.maximum(step / 2, np.where(x == 0, 0, step - np.abs(x)))


def int4_step(x: Floats) -> Floats:
    g = np.pad(x, (0, -x.size % 32), mode="edge").reshape(-1, 32)
    step = (g.max(1) - g.min(1)) / 14
    step = np.maximum(step, np.maximum(np.abs(g).max(1) * 2.0**-14, 2.0**-100))
    return np.repeat(step, 32)[: x.size]


ROUNDED = 1 + 2.0**-10
"""Scales are rounded up, to 16 bits or to 24."""

TILE = 8192
"""Words; no tile is longer. Survivors of zvc share their scale with any others of their tile."""

BOUNDS = {
    "bf16": within(lambda x: np.abs(x) * 2.0**-8),
    "fp16": within(lambda x: np.maximum(np.abs(x) * 2.0**-11, 2.0**-25)),
    "int8": within(lambda x: int8_error(x, 128)),
    "fp8": within(lambda x: np.abs(x) / 16 + largest(x, 128) / 448 / 1024 * ROUNDED),
    # The scale is a power of two: quotients of 448 to 512 come down to 448, by an eighth at most.
    "mxfp8": within(lambda x: np.abs(x) / 8 + largest(x, 32) / 256 / 1024 * ROUNDED),
    # Stochastic: off by a step at most. The step is rounded up to a bfloat16.
    "int4": within(lambda x: int4_step(x) * (1 + 2.0**-7) * ROUNDED),
    # Nothing is promised of a single value; this is what 16 bits do with four of a block.
    "zfp": within(lambda x: np.maximum(largest(x, 4) * 2.0**-8, 2.0**-96)),
    "zvc+int8": within(lambda x: int8_error(x, TILE)),
    "zvc+fp8": within(lambda x: np.abs(x) / 16 + largest(x, TILE) / 448 / 1024 * ROUNDED),
}


def test_golden_files_are_small():
    assert sum(p.stat().st_size for p in GOLDEN.rglob("*") if p.is_file()) < 200_000


# Codecs that break the contract, one promise each. Each must be found out, and for that reason.


class Broken(Raw):
    """Raw, with one more byte in front, so that there is something to break."""

    name = "broken"

    def bound(self, dtype, numel):
        return numel * dtype.itemsize + 1

    def encode_flat(self, x, out, *, key, stream):
        out[0] = 7
        super().encode_flat(x, out[1:], key=key, stream=stream)
        return 1 + x.nbytes

    def decode_flat(self, payload, out, *, stream):
        if payload.numel() == 0 or payload[0] != 7:
            raise CorruptEncodingError("no 7")
        super().decode_flat(payload[1:], out, stream=stream)


class ForgetsTheLastElement(Broken):
    def decode_flat(self, payload, out, *, stream):
        last = out[-1:].clone()
        super().decode_flat(payload, out, stream=stream)
        out[-1:] = last


class WritesBeyondItsBound(Broken):
    def encode_flat(self, x, out, *, key, stream):
        memory = torch.empty(0, dtype=torch.uint8)
        memory.set_(out.untyped_storage())
        memory[out.storage_offset() + out.numel() : out.storage_offset() + out.numel() + 1] = 0
        return super().encode_flat(x, out, key=key, stream=stream)


class IsLongerThanItsBound(Broken):
    def bound(self, dtype, numel):
        return max(numel * dtype.itemsize - 1, 0)

    def encode_flat(self, x, out, *, key, stream):
        return int(x.nbytes) + 1


class ChangesItsInput(Broken):
    def encode_flat(self, x, out, *, key, stream):
        size = super().encode_flat(x, out, key=key, stream=stream)
        x.view(torch.uint8).zero_()
        return size


class LeavesStaleBytes(Broken):
    def bound(self, dtype, numel):
        return numel * dtype.itemsize + 16

    def encode_flat(self, x, out, *, key, stream):
        super().encode_flat(x, out, key=key, stream=stream)
        return 4 + x.nbytes

    def decode_flat(self, payload, out, *, stream):
        super().decode_flat(payload[: 1 + out.nbytes], out, stream=stream)


class DropsNanPayloads(Broken):
    def supports(self, dtype, device="cpu"):
        return dtype == torch.float32

    def decode_flat(self, payload, out, *, stream):
        super().decode_flat(payload, out, stream=stream)
        out.masked_fill_(out.isnan(), float("nan"))


class DropsTheSignOfZero(DropsNanPayloads):
    def decode_flat(self, payload, out, *, stream):
        Broken.decode_flat(self, payload, out, stream=stream)
        out.masked_fill_(out == 0, 0.0)


class DiffersWithTheThreads(Broken):
    def encode_flat(self, x, out, *, key, stream):
        size = super().encode_flat(x, out, key=key, stream=stream)
        out[0] = 7 if stream is None or stream.threads == 1 else 8
        return size

    def decode_flat(self, payload, out, *, stream):
        Raw.decode_flat(self, payload[1:], out, stream=stream)


class IsNotReentrant(Broken):
    def __init__(self):
        self._scratch = torch.empty(1 << 22, dtype=torch.uint8)

    def encode_flat(self, x, out, *, key, stream):
        scratch = self._scratch[: x.nbytes]
        scratch.copy_(x.view(torch.uint8))
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.002)  # another thread comes in between
        return super().encode_flat(scratch, out, key=key, stream=stream)


class CrashesOnShortPayloads(Broken):
    def decode_flat(self, payload, out, *, stream):
        out.view(torch.uint8).copy_(payload[1 : 1 + out.nbytes])


class ReadsBehindItsPayload(Broken):
    def decode_flat(self, payload, out, *, stream):
        memory = torch.empty(0, dtype=torch.uint8)
        memory.set_(payload.untyped_storage())
        first = payload.storage_offset() + 1
        found = memory[first : first + out.nbytes]
        out.view(torch.uint8)[: found.numel()] = found


class ClaimsAnyRatio(Broken):
    max_ratio = 1 << 40


class ClaimsTooLittleRatio(Broken):
    """Encodes zeros to nothing, and forgets to say so."""

    def encode_flat(self, x, out, *, key, stream):
        if x.numel() and not bool(x.view(torch.uint8).any()):
            out[0] = 9
            return 1
        return super().encode_flat(x, out, key=key, stream=stream)

    def decode_flat(self, payload, out, *, stream):
        if payload.numel() == 1 and payload[0] == 9:
            out.view(torch.uint8).zero_()
        else:
            super().decode_flat(payload, out, stream=stream)


class TakesWhatItDoesNotSupport(Broken):
    def supports(self, dtype, device="cpu"):
        return dtype == torch.float32

    def encode(self, tensor, out=None, **options):
        return get_codec("raw").encode(tensor)


class Lossy(Broken):
    """Rounds to integers, and keeps what is not finite."""

    lossless = False

    def supports(self, dtype, device="cpu"):
        return dtype in (torch.float32, torch.float64)

    def decode_flat(self, payload, out, *, stream):
        super().decode_flat(payload, out, stream=stream)
        values = out.numpy()
        if np.isfinite(values).all():
            np.rint(values, out=values)


class LossyWithNan(Lossy):
    def decode_flat(self, payload, out, *, stream):
        Broken.decode_flat(self, payload, out, stream=stream)
        out.nan_to_num_()


class LossyAroundNan(Lossy):
    def decode_flat(self, payload, out, *, stream):
        Broken.decode_flat(self, payload, out, stream=stream)
        finite = out.isfinite()
        out[finite] = out[finite].round()


class UnderstatesItsError(Lossy):
    """Is wrong by a quarter, and says a millionth."""

    traits = CodecTraits(relative_error=1e-6)


class PredictsNoRatio(Broken):
    traits = CodecTraits(predicted_ratio=lambda profile: float("nan"))


BREACHES = [
    (ForgetsTheLastElement, "decode left elements unwritten"),
    (WritesBeyondItsBound, "encode wrote outside its bound"),
    (IsLongerThanItsBound, "are its bound"),
    (ChangesItsInput, "encode changed its input"),
    (LeavesStaleBytes, "two encodes, different bytes"),
    (DiffersWithTheThreads, "two encodes, different bytes"),
    (DropsNanPayloads, "bits differ"),
    (DropsTheSignOfZero, "bits differ"),
    (IsNotReentrant, "threads at once"),
    (CrashesOnShortPayloads, "must match the size|size of tensor"),
    (ReadsBehindItsPayload, "what follows a payload"),
    (ClaimsAnyRatio, "max_ratio"),
    (ClaimsTooLittleRatio, "more than codec 'broken' can reach"),
    (TakesWhatItDoesNotSupport, "which it does not support"),
    (LossyWithNan, "words that are not finite differ"),
    (LossyAroundNan, "a tile that is not finite throughout differs"),
    (UnderstatesItsError, r"relative error 0\.2\d of normal values, declared 1e-06"),
    (PredictsNoRatio, "predicted ratio nan"),
]


def close(x, x_hat):
    return bool(((x - x_hat).abs() <= 0.5).all())


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Whatever a test registers is gone afterwards."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_made", dict(registry._made))


@pytest.fixture
def unshrunk():
    """A failure that is expected need not be made smaller, which takes seconds."""
    usual = settings.default
    settings.register_profile("unshrunk", usual, phases=[Phase.generate])
    settings.load_profile("unshrunk")
    yield
    settings.register_profile("usual", usual)
    settings.load_profile("usual")


@pytest.mark.parametrize("sound", [Broken, Lossy])
def test_sound_codecs_of_others_pass(sound, shortened):
    shortened()
    register_codec("broken", sound)
    check_codec(get_codec("broken"), examples=8, error_bound=close, twin="cpu")


@pytest.mark.parametrize(("breach", "message"), BREACHES, ids=[b.__name__ for b, _ in BREACHES])
@pytest.mark.usefixtures("unshrunk")
def test_breach_is_found_and_named(breach, message):
    register_codec("broken", breach)
    with pytest.raises((AssertionError, CswapError, RuntimeError), match=message):
        check_codec(get_codec("broken"), error_bound=close)


def test_error_beyond_the_bound_is_found():
    register_codec("broken", Lossy)
    with pytest.raises(AssertionError, match="beyond the codec's error bound"):
        check_codec(get_codec("broken"), error_bound=lambda x, x_hat: torch.equal(x, x_hat))


def test_codec_that_is_not_registered_is_told_how():
    with pytest.raises(ConfigError, match=r"call cswap\.register_codec first"):
        check_codec(Broken())


@pytest.mark.parametrize("damage", ["input", "stream", "decoded", "gone"])
def test_golden_files_that_differ_are_found(damage, tmp_path):
    codec = get_codec("raw")
    folders = write_golden(codec, tmp_path)
    assert len(folders) == 5
    assert write_golden(codec, tmp_path) == []
    check_golden(codec, tmp_path)
    if damage == "gone":
        codec = get_codec("lz4") if "lz4" in registry._made else Lossy()
    elif damage == "decoded":
        config = folders[0] / "config.json"
        config.write_text(config.read_text("utf-8").replace('256": "', '256": "0'), "utf-8")
    else:
        path = next(folders[0].glob(f"{damage}.*"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
    with pytest.raises((AssertionError, CorruptEncodingError)):
        check_golden(codec, tmp_path)


@pytest.mark.parametrize("dtype", ["float64", "float8_e5m2", "complex64"])
def test_a_codec_of_other_dtypes_has_golden_files_of_its_first(dtype, tmp_path):
    class Other(Broken):
        def supports(self, given, device="cpu"):
            return given in (getattr(torch, dtype), torch.uint8)

    register_codec("broken", Other)
    codec = get_codec("broken")
    assert write_golden(codec, tmp_path) == [tmp_path / "broken" / dtype]
    assert write_golden(codec, tmp_path) == []
    check_golden(codec, tmp_path)


def test_arrays_of_other_libraries_are_encoded_where_they_are():
    array = np.arange(5000, dtype=np.float32).reshape(50, 100)
    codec = get_codec("zvc")
    encoding = codec.encode(array)
    assert encoding.meta == codec.encode(torch.from_numpy(array)).meta
    assert np.array_equal(codec.decode(encoding).numpy(), array)
    raw = get_codec("raw")
    out = torch.empty(array.nbytes, dtype=torch.uint8)
    assert raw.encode(array, out).payload.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("wrong", [[1.0, 2.0], "text", None, np.array(["text"])])
def test_what_does_not_share_its_memory_is_refused(wrong):
    with pytest.raises(UnsupportedError, match="tensor="):
        get_codec("zvc").encode(wrong)
