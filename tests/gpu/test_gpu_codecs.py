"""Kernels against their CPU twins, both ways: each decodes what the other encoded."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from cswap.codecs import gpu
from cswap.codecs.base import DEFAULT_KEY, EncodeKey, Encoding
from cswap.codecs.layout import torch_dtype
from cswap.codecs.registry import get_codec, list_codecs
from cswap.codecs.tiled import tile_numel
from cswap.errors import CorruptEncodingError, CswapError
from cswap.profiler import LateProfile
from cswap.schema.tensor import DTYPES
from cswap.testing import TensorSpec, check_codec
from cswap.testing.buffers import bits, moved
from cswap.testing.strategies import values_for

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:ComplexHalf")]

HOST_ONLY = {"lz4", "zstd"}
GUARD = 0xC3
KEY = EncodeKey(seed=3, tensor_id=5, step=7)


def dtypes_of(codec):
    return [d for d in DTYPES if codec.supports(torch_dtype(d), "cuda")]


def pairs():
    """Codecs and the dtypes that they take on a CPU: their twins should take them, too."""
    for name in list_codecs():
        with contextlib.suppress(CswapError):  # its package is not installed
            codec = get_codec(name)
            yield from ((name, d) for d in DTYPES if codec.supports(torch_dtype(d)))


PAIRS = list(pairs())


def sizes_of(dtype):
    tile = tile_numel(torch_dtype(dtype))
    return (0, 1, 2, 63, 1000, tile - 1, tile, tile + 1, 3 * tile + 17)


def value(size):
    return size if isinstance(size, int) else size.value()


def assert_twins_agree(codec, x, device):
    """x is on the CPU."""
    here = codec.encode(x, key=KEY)
    there = codec.encode(x.to(device), key=KEY)
    assert there.payload.device == device
    expected = bits(codec.decode(here))
    if codec.lossless:
        assert torch.equal(expected, bits(x))
    to_host = Encoding(codec.name, here.meta, there.payload.cpu())
    to_device = Encoding(codec.name, here.meta, here.payload.to(device))
    assert torch.equal(bits(codec.decode(to_host)), expected), "the CPU decodes the GPU's wrong"
    assert torch.equal(bits(codec.decode(to_device).cpu()), expected), "the GPU decodes it wrong"
    assert torch.equal(bits(codec.decode(there).cpu()), expected), "the GPU decodes its own wrong"


def test_kernels_can_run_here():
    assert gpu.missing() is None


@pytest.mark.parametrize("name", sorted(set(list_codecs()) - HOST_ONLY))
def test_every_format_has_a_twin(codec_on_gpu, name):
    assert dtypes_of(codec_on_gpu(name))


@pytest.mark.parametrize(("name", "dtype"), PAIRS)
def test_twins_agree_for_every_dtype_tail_and_kind_of_values(codec_on_gpu, device, name, dtype):
    codec = codec_on_gpu(name)
    if dtype not in dtypes_of(codec):
        pytest.skip(f"{name} does not take {dtype} on a GPU")
    for i, numel in enumerate(sizes_of(dtype)):
        for values in values_for(dtype):  # non-finite ones and payloads of NaN among them
            x = TensorSpec(dtype, (numel,), values=values, seed=i).build()
            assert_twins_agree(codec, x, device)


@pytest.mark.parametrize("name", list_codecs())
def test_the_battery_with_the_gpu_as_twin(codec_on_gpu, name):
    check_codec(codec_on_gpu(name), examples=15, twin="cuda")


@pytest.mark.parametrize("offset", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", list_codecs())
def test_views_that_are_not_aligned(codec_on_gpu, device, name, offset):
    """Source, result and payload may begin anywhere; around a result nothing is written."""
    codec = codec_on_gpu(name)
    for dtype in dtypes_of(codec):
        numel = tile_numel(torch_dtype(dtype)) + 63
        sizes, values = (offset + numel,), values_for(dtype)[-1]
        base = TensorSpec(dtype, sizes, values=values, seed=offset).build()
        x, base = base[offset:].clone(), base.to(device)
        there = codec.encode(base[offset:], key=KEY)
        shifted = torch.empty(there.nbytes + offset, dtype=torch.uint8, device=device)
        shifted[offset:] = there.payload
        around = torch.full(((numel + 2 * offset) * x.itemsize,), GUARD, dtype=torch.uint8)
        around = around.to(device)
        out = around.view(x.dtype)[offset : offset + numel]
        codec.decode_flat(shifted[offset:], out, stream=None)
        expected = bits(codec.decode(codec.encode(x, key=KEY)))
        found = around.cpu()
        margin = offset * x.itemsize
        assert torch.equal(found[margin:-margin], expected)
        assert bool((found[:margin] == GUARD).all())
        assert bool((found[-margin:] == GUARD).all())


@pytest.mark.parametrize("name", list_codecs())
def test_an_encode_stays_within_its_bound_and_on_its_stream(codec_on_gpu, device, name):
    codec = codec_on_gpu(name)
    stream = torch.cuda.Stream(device)
    noted = len(gpu.damage(device.index))
    for dtype in dtypes_of(codec):
        for values in values_for(dtype):
            numel = 2 * tile_numel(torch_dtype(dtype)) + 5
            x = TensorSpec(dtype, (numel,), values=values).build()
            bound = codec.bound(x.dtype, numel)
            whole = torch.full((bound + 128,), GUARD, dtype=torch.uint8, device=device)
            source = x.to(device)
            stream.wait_stream(torch.cuda.current_stream())
            size = codec.encode_flat(source, whole[64 : 64 + bound], key=KEY, stream=stream)
            stream.synchronize()
            nbytes = value(size)
            assert nbytes <= bound
            assert bool((whole[:64] == GUARD).all())
            assert bool((whole[64 + bound :] == GUARD).all())
            for fill in (0xA5, 0x5A):  # what is not written differs
                out = torch.full((x.nbytes,), fill, dtype=torch.uint8, device=device)
                stream.wait_stream(torch.cuda.current_stream())
                codec.decode_flat(whole[64 : 64 + nbytes], out.view(x.dtype), stream=stream)
                stream.synchronize()
                expected = bits(codec.decode(codec.encode(x, key=KEY)))
                assert torch.equal(out.cpu(), expected)
    assert len(gpu.damage(device.index)) == noted


@pytest.mark.parametrize("name", ["zvc", "int8", "expk"])
def test_an_encode_may_write_into_pinned_memory(codec_on_gpu, device, name):
    codec = codec_on_gpu(name)
    x = torch.randn(1 << 20, device=device).relu_()
    stream = torch.cuda.current_stream()
    out = torch.empty(codec.bound(x.dtype, x.numel()), dtype=torch.uint8, pin_memory=True)
    size = codec.encode_flat(x, out, key=DEFAULT_KEY, stream=stream)
    stream.synchronize()
    back = torch.empty(x.shape, dtype=x.dtype)
    codec.decode_flat(out[: value(size)], back, stream=None)
    assert torch.equal(back, codec.decode(codec.encode(x, key=DEFAULT_KEY)).cpu())


@pytest.mark.parametrize("layout", ["permuted", "expanded", "gaps", "channels_last", "windows"])
@pytest.mark.parametrize("name", ["raw", "zvc", "expk"])
def test_a_tensor_comes_back_with_its_strides(codec_on_gpu, device, name, layout):
    codec = codec_on_gpu(name)
    spec = TensorSpec("float32", (6, 5, 33, 9), layout, "sparse")
    x = spec.build()
    there = moved(x, device)
    encoding = codec.encode(there)
    back = codec.decode(encoding)
    assert (back.shape, back.stride(), back.device) == (x.shape, x.stride(), device)
    assert torch.equal(back.cpu(), x)
    again = Encoding.from_bytes(encoding.to_bytes())
    assert torch.equal(codec.decode(again), x)  # a stream is read into host memory


@pytest.mark.parametrize("name", list_codecs())
def test_damage_is_refused_or_harmless(codec_on_gpu, device, name):
    codec = codec_on_gpu(name)
    dtype = dtypes_of(codec)[0]
    x = TensorSpec(dtype, (2 * tile_numel(torch_dtype(dtype)),), values="sparse").build()
    encoding = codec.encode(x.to(device), key=KEY)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        damaged = encoding.payload.clone()
        at = int(torch.randint(min(damaged.numel(), 256), (1,), generator=generator))
        damaged[at] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        with contextlib.suppress(CorruptEncodingError):
            codec.decode(Encoding(codec.name, encoding.meta, damaged))
        torch.cuda.synchronize()  # an access out of bounds would show here
    with pytest.raises(CorruptEncodingError):
        codec.decode(Encoding(codec.name, encoding.meta, encoding.payload[:3]))
    expected = bits(codec.decode(codec.encode(x, key=KEY)))
    assert torch.equal(bits(codec.decode(encoding).cpu()), expected)


def test_damage_is_noted_where_nobody_waits(codec_on_gpu, device):
    codec = codec_on_gpu("zvc")
    x = torch.randn(1 << 14, device=device)
    encoding = codec.encode(x)
    torch.cuda.synchronize(device)
    noted = len(gpu.damage(device.index))
    damaged = torch.full_like(encoding.payload, 0xFF)
    codec.decode_flat(damaged, x, stream=torch.cuda.current_stream())
    torch.cuda.synchronize(device)
    assert len(gpu.damage(device.index)) == noted + 1


def test_many_streams_and_threads_at_once(codec_on_gpu, device):
    names = ("zvc", "int8", "expk")
    codecs = [codec_on_gpu(name) for name in names]
    inputs = [torch.randn(100_000 + 77 * i, device=device).relu_() for i in range(6)]
    expected = [[codec.decode(codec.encode(x, key=KEY)) for x in inputs] for codec in codecs]
    torch.cuda.synchronize()
    start, wrong = threading.Barrier(4), []

    def work(first):
        stream = torch.cuda.Stream(device)
        start.wait()
        with torch.cuda.stream(stream):
            for i in range(60):
                j, k = (first + i) % len(codecs), (first * i) % len(inputs)
                encoding = codecs[j].encode(inputs[k], key=KEY, stream=stream)
                back = codecs[j].decode(encoding, stream=stream)
                if not torch.equal(back, expected[j][k]):
                    wrong.append((names[j], k))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_a_late_profile_is_that_of_the_same_values_on_the_cpu(device, dtype):
    x = TensorSpec(dtype, (1 << 18,), values="sparse").build()
    late = LateProfile(x.to(device))
    torch.cuda.synchronize()
    assert late.get() == LateProfile(x).get()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("zvc", torch.float32),
        ("expk", torch.bfloat16),
        ("bitpack", torch.bool),
        ("raw", torch.int8),
    ],
)
def test_more_than_4_gib(codec_on_gpu, device, name, dtype):
    codec = codec_on_gpu(name)
    numel = (4 << 30) // dtype.itemsize + 4097
    x = torch.zeros(numel, dtype=dtype, device=device)
    places = torch.randint(numel, (100_000,), device=device)
    x[places] = 1
    x[0] = x[-1] = 1
    encoding = codec.encode(x)
    assert torch.equal(codec.decode(encoding), x)
