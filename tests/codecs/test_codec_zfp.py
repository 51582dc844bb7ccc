"""``zfp``: its bytes are zfpy's and the reference's; zfpy never sees a damaged stream."""

from __future__ import annotations

import itertools
import re
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import cswap
from cswap.codecs import gpu, registry
from cswap.errors import ConfigError, CorruptEncodingError
from cswap_kernels import zfp

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE = Path(__file__).parents[2] / "docs" / "format" / "zfp.md"


def read_example() -> bytes:
    block = re.search(r"<!-- example: zfp -->\n```\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert block is not None
    lines = (
        re.match(r" *\d+  ((?:[0-9a-f]{2} )*[0-9a-f]{2})(?:  |$)", line)
        for line in block[1].splitlines()
    )
    return b"".join(bytes.fromhex(line[1]) for line in lines if line)


def make_values(rng: np.random.Generator, n: int) -> list[NDArray[np.float64]]:
    x = rng.standard_normal(n)
    return [
        x,
        np.maximum(x, 0),
        x * (rng.random(n) < 0.1),
        x * np.exp2(rng.integers(-40, 40, n)),
        x * 2.0**-90,
        x * 2.0**122,
        np.full(n, -3.7),
    ]


def test_zfp_worked_example_is_what_the_codec_writes() -> None:
    pytest.importorskip("zfpy")
    x = torch.tensor([1.0, 2, 3, 4, 0, 0, 0, 0])
    encoding = cswap.get_codec("zfp").encode(x)
    assert encoding.payload.numpy().tobytes() == read_example()
    assert zfp.zfp_encode_reference(x.numpy(), 64) == read_example()[16:]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zfp_reference_is_zfpy(dtype: Any) -> None:
    zfpy = pytest.importorskip("zfpy")
    rng = np.random.default_rng(6)
    for n, rate in itertools.product((1, 2, 3, 4, 5, 70), (1, 3, 4, 5, 8, 16, 31, 64)):
        for x in make_values(rng, n):
            values = x.astype(dtype)
            values[np.abs(values) < zfp.SMALLEST[values.itemsize]] = 0
            bits = zfp.block_bits(rate, values.itemsize)
            data = zfpy.compress_numpy(values, rate=bits / 4, write_header=False)
            assert zfp.zfp_encode_reference(values, bits) == data
            expected = zfpy._decompress(data, zfpy.dtype_to_ztype(values.dtype), [n], rate=bits / 4)
            found = zfp.zfp_decode_reference(data, dtype, n, bits)
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rate", [1, 2, 5, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zfp_stream_is_one_though_written_in_pieces(rate: int, dtype: torch.dtype) -> None:
    zfpy = pytest.importorskip("zfpy")
    x = torch.randn((1 << 16) + 77, dtype=dtype)
    bits = zfp.block_bits(rate, dtype.itemsize)
    payload = cswap.get_codec(f"zfp:{rate}").encode(x).payload.numpy()
    whole = zfpy.compress_numpy(x.numpy(), rate=bits / 4, write_header=False)
    assert payload[16:].tobytes() == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_zfp_keeps_what_it_cannot_encode(dtype: torch.dtype) -> None:
    pytest.importorskip("zfpy")
    codec = cswap.get_codec("zfp:8")
    for value in (float("nan"), float("inf"), torch.finfo(dtype).max):
        x = torch.randn(70_000).to(dtype)
        x[-3] = value
        encoding = codec.encode(x)
        assert encoding.nbytes == 16 + encoding.raw_nbytes
        same = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        assert torch.equal(codec.decode(encoding).view(same), x.view(same))


def test_zfp_takes_tiny_magnitudes_for_zero() -> None:
    pytest.importorskip("zfpy")
    codec = cswap.get_codec("zfp")
    x = torch.tensor([2.0**-97, -(2.0**-149), 2.0**-96, 1.0] * 50)
    x[:100] = 2.0**-127
    x_hat = codec.decode(codec.encode(x))
    assert torch.equal(x_hat[:100], torch.zeros(100))
    assert float((x_hat - x).abs().max()) < 2.0**-10


def test_zfp_checks_sizes_before_zfpy_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zfpy")
    codec = cswap.get_codec("zfp:12")
    payload = codec.encode(torch.randn(64)).payload

    def never(*_args: Any, **_options: Any) -> None:
        pytest.fail("zfpy was given a damaged stream")

    monkeypatch.setattr(codec, "_decode_piece", never)
    for damaged, n in (
        (payload[:-1], 64), (payload[:16], 64), (payload[:15], 64), (payload, 65), (payload, 60),
        (torch.cat((payload, payload)), 64), (payload[:0], 64), (payload[:0], 0),
    ):  # fmt: skip
        with pytest.raises(CorruptEncodingError, match="zfp encoding of"):
            codec.decode_flat(damaged, torch.empty(n), stream=None)
    for at in range(16):
        damaged = payload.clone()
        damaged[at] ^= 4
        with pytest.raises(CorruptEncodingError, match="zfp encoding of"):
            codec.decode_flat(damaged, torch.empty(64), stream=None)


def test_zfp_refuses_a_stream_that_no_encoder_keeps() -> None:
    pytest.importorskip("zfpy")
    data = struct.pack("<IIQ", 0, 160, 64) + bytes(zfp.stream_bytes(64, 160))
    payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    with pytest.raises(CorruptEncodingError, match="zfp encoding of"):
        cswap.get_codec("zfp:40").decode_flat(payload, torch.empty(64), stream=None)


@pytest.mark.parametrize("rate", [0, -1, 65])
def test_zfp_refuses_impossible_rates(rate: int) -> None:
    with pytest.raises(ConfigError, match="must be 1 to 64"):
        cswap.get_codec(f"zfp:{rate}")


def test_zfp_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zfpy", None)
    monkeypatch.setattr(gpu, "missing", lambda: "this test")
    monkeypatch.setattr(registry, "_made", {})  # other tests have made codecs of many rates
    with pytest.raises(ConfigError, match=r'pip install "\.\[host\]"'):
        cswap.get_codec("zfp:9")
