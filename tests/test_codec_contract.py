"""Every codec passes the one battery, and the battery fails codecs that break the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cswap.codecs import registry
from cswap.codecs.raw import Raw
from cswap.codecs.registry import get_codec, list_codecs, register_codec
from cswap.errors import ConfigError, CorruptEncodingError, CswapError
from cswap.testing import check_codec

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", list_codecs())
def test_codec_keeps_the_contract(name):
    try:
        codec = get_codec(name)
    except ConfigError as error:
        if isinstance(error.__cause__, ImportError):
            pytest.skip(str(error))
        raise
    check_codec(codec, error_bound=BOUNDS.get(name), golden=GOLDEN)


@pytest.mark.parametrize("name", list_codecs())
def test_every_lossy_codec_has_its_bound(name):
    try:
        codec = get_codec(name)
    except ConfigError as error:
        pytest.skip(str(error))
    assert codec.lossless == (name not in BOUNDS)


BOUNDS: dict[str, Any] = {}


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
        for _ in range(20):  # long enough for another thread to come in between
            scratch.copy_(x.view(torch.uint8))
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
        if bool(out.isfinite().all()):
            out.round_()


class LossyWithNan(Lossy):
    def decode_flat(self, payload, out, *, stream):
        Broken.decode_flat(self, payload, out, stream=stream)
        out.nan_to_num_()


class LossyAroundNan(Lossy):
    def decode_flat(self, payload, out, *, stream):
        Broken.decode_flat(self, payload, out, stream=stream)
        finite = out.isfinite()
        out[finite] = out[finite].round()


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
    (LossyWithNan, "elements that are not finite differ"),
    (LossyAroundNan, "a tile that is not finite throughout differs"),
]


def close(x, x_hat):
    return bool(((x - x_hat).abs() <= 0.5).all())


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Whatever a test registers is gone afterwards."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_made", dict(registry._made))


@pytest.mark.parametrize("sound", [Broken, Lossy])
def test_sound_codecs_of_others_pass(sound):
    register_codec("broken", sound)
    check_codec(get_codec("broken"), error_bound=close, twin="cpu")


@pytest.mark.parametrize(("breach", "message"), BREACHES, ids=[b.__name__ for b, _ in BREACHES])
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
    from cswap.testing import check_golden, write_golden

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
