"""From strided tensors to flat elements and back: every pattern of strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from cswap.codecs.layout import (
    bytes_of,
    copy_bytes,
    empty_strided,
    first_bytes,
    flat_numel,
    flatten,
    has_gaps,
    meta_of,
    restore,
    unflatten_into,
    words_of,
)
from cswap.errors import UnsupportedError
from cswap.schema.tensor import DTYPES, TensorMeta
from cswap.testing import TensorSpec, specs
from cswap.testing.buffers import bits, memory_of

base = torch.arange(240, dtype=torch.float32)

# Name: tensor, and how many elements its encoding holds.
PATTERNS = {
    "contiguous": (base.view(4, 60), 240),
    "0-d": (base[7], 1),
    "zero-size": (base[:0].view(0, 5), 0),
    "zero-size, strided": (base.view(4, 60)[2:2, ::7], 0),
    "transposed": (base.view(4, 60).t(), 240),
    "channels_last": (base.view(2, 3, 4, 10).contiguous(memory_format=torch.channels_last), 240),
    "offset": (base[40:100], 60),
    "expanded": (base[:5].view(5, 1).expand(5, 9), 5),
    "expanded everywhere": (base[3].expand(6, 7), 1),
    "expanded, zero-size": (base[:1].view(1, 1).expand(3, 1)[:, :0], 0),
    "overlapping windows": (base[:50].unfold(0, 8, 2), 50),
    "windows that leave gaps": (base[:50].unfold(0, 2, 6), 18),
    "every third": (base[::3], 80),
    "part of each row": (base.view(4, 60)[:, 10:12], 8),
    "one column": (base.view(4, 60)[:, :1], 4),
    "one row of many": (base.view(4, 60)[1:2], 60),
    "gaps, expanded": (base.view(4, 60)[:, :2].unsqueeze(1).expand(4, 3, 2), 8),
    "size 1 of a wide stride": (base.as_strided((1, 5), (200, 1)), 5),
    "gaps, permuted": (base.view(4, 3, 20)[::2, :, ::5].permute(2, 0, 1), 24),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_comes_back_with_its_strides(name):
    x, n_flat = PATTERNS[name]
    meta = meta_of(x)
    flat = flatten(x)
    y = restore(flat.clone(), meta)
    assert flat.shape == (n_flat,)
    assert flat_numel(meta) == n_flat
    assert flat.is_contiguous()
    assert flat.stride() == (1,)
    assert (y.shape, y.stride(), y.storage_offset()) == (x.shape, x.stride(), 0)
    assert torch.equal(y, x)


@pytest.mark.parametrize("name", ["contiguous", "transposed", "offset", "overlapping windows"])
def test_flat_elements_without_gaps_are_a_view(name):
    x, _ = PATTERNS[name]
    assert flatten(x).data_ptr() == x.data_ptr()


@given(specs(max_numel=300))
def test_any_tensor_comes_back_bit_by_bit(spec: TensorSpec):
    x = spec.build()
    y = restore(flatten(x), meta_of(x))
    assert (y.dtype, y.shape, y.stride()) == (x.dtype, x.shape, x.stride())
    assert torch.equal(bits(y), bits(x))


complexes = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))

LAZY = {
    "conj": complexes.conj(),
    "conj, transposed": complexes.t().conj(),
    "conj, gaps": complexes[:, ::2].conj(),
    "conj, expanded": complexes[:1].expand(5, 4).conj(),
    "neg": complexes.conj().imag,
    "neg, expanded": complexes[:1].expand(5, 4).conj().imag,
    "conj and neg": torch._neg_view(complexes[:, :3].conj()),
}


@pytest.mark.parametrize("name", LAZY)
def test_lazy_views_are_encoded_as_their_values(name):
    x = LAZY[name]
    before = memory_of(x)
    flat = flatten(x)
    y = restore(flat, meta_of(x))
    assert x.is_conj() or x.is_neg()
    assert not y.is_conj()
    assert not y.is_neg()
    assert flat.shape == (flat_numel(meta_of(x)),)
    assert y.stride() == x.stride()
    assert torch.equal(y, x)
    assert torch.equal(memory_of(x), before)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("same_strides", [True, False])
def test_unflatten_writes_the_elements_and_nothing_between(name, same_strides):
    x, _ = PATTERNS[name]
    meta = meta_of(x)
    if same_strides:
        out = empty_strided(meta, x.device)
        memory = torch.empty(0).set_(out.untyped_storage())
        memory.fill_(-1.0)
    else:
        out = torch.full(x.shape, -1.0)
    assert unflatten_into(flatten(x), meta, out) is out
    assert torch.equal(out, x)
    if same_strides:
        assert out.stride() == x.stride()
        assert memory.numel() == meta.span
        assert int((memory == -1.0).sum()) == meta.span - len({*_places(meta)})


def _places(meta: TensorMeta) -> list[int]:
    places = torch.arange(max(meta.span, 1)).as_strided(meta.sizes, meta.strides)
    return [int(i) for i in places.reshape(-1)]


def test_meta_knows_nothing_of_the_storage():
    x = base.view(4, 60)[1:, 5:9]
    assert meta_of(x) == TensorMeta("float32", (3, 4), (60, 1), 0, "cpu")
    assert has_gaps(meta_of(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_words_share_the_memory_of_any_dtype(dtype):
    x = flatten(TensorSpec(dtype, (6,), values="constant").build())
    words = words_of(x)
    assert words.itemsize == DTYPES[dtype].word
    assert words.nbytes == x.nbytes
    words[:] = 0
    assert bits(x).tolist() == [0] * x.nbytes


def test_tensor_at_an_odd_address_is_copied_to_an_even_one():
    x = torch.frombuffer(bytearray(range(41)), dtype=torch.float32, offset=1, count=10)
    flat = flatten(x)
    assert x.data_ptr() % 4 == 1
    assert words_of(flat).tolist() == words_of(x.clone()).tolist()
    with pytest.raises(UnsupportedError, match="and aligned to 4 bytes"):
        words_of(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    ],
)
def test_what_is_not_plainly_strided_is_refused(make):
    with pytest.raises(UnsupportedError, match="only strided tensors"):
        meta_of(make())


def test_arrays_of_no_elements():
    empty = torch.empty(0)
    assert bytes_of(empty).dtype == "u1"
    assert words_of(empty).dtype == "u4"
    assert bytes_of(empty).size == words_of(empty).size == 0


def test_first_bytes_of_a_tensor():
    x = torch.arange(4, dtype=torch.int32)
    assert first_bytes(x, 16).tolist() == x.view(torch.uint8).tolist()
    assert first_bytes(x, 5).tolist() == [0, 0, 0, 0, 1]
    memory = x.view(torch.uint8)
    assert first_bytes(memory, 16) is memory


def test_bytes_are_copied_on_a_device():
    # Of the device "meta" nothing is copied, but sizes have to fit.
    target = torch.empty(64, dtype=torch.uint8, device="meta")
    copy_bytes(target, torch.empty(10, device="meta"), 40)
    with pytest.raises(RuntimeError):
        copy_bytes(target, torch.empty(10, device="meta"), 65)
