"""Storages can be resized as without cswap: a numpy array of a tensor would forbid it for ever."""

import pytest
import torch

import cswap
from cswap.codecs.base import takes
from cswap.codecs.registry import get_codec, list_codecs
from cswap.profiler import profile


def tensor(dtype=torch.float32):
    return torch.relu(torch.randn(1 << 12, generator=torch.Generator().manual_seed(0))).to(dtype)


@pytest.mark.parametrize("codec", list_codecs())
@pytest.mark.parametrize("verify", [False, True])
def test_after_a_swap(codec, verify):
    x = tensor()
    if not takes(get_codec(codec), x.dtype, "cpu"):
        x = tensor(torch.bool)
    with cswap.swapping(codec=codec, min_bytes=0, verify=verify) as engine:
        for _ in range(3):  # with a handle, and without
            engine.begin_step()
            back = engine.unpack(engine.pack(x))
            assert back.untyped_storage().resizable()
    assert x.untyped_storage().resizable()


def test_after_a_swap_to_the_disk(tmp_path):
    x = tensor()
    options = {"codec": "raw", "min_bytes": 0, "host_limit": 0, "spill_dir": tmp_path}
    with cswap.swapping(**options) as engine:
        packed = engine.pack(x)
        assert engine.stats.disk_bytes
        engine.unpack(packed)
    assert x.untyped_storage().resizable()


def test_after_a_choice():
    x = tensor()
    with cswap.swapping(min_bytes=0) as engine:
        engine.unpack(engine.pack(x))
    assert x.untyped_storage().resizable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_after_a_look_at_its_values(dtype):
    x = tensor(dtype)
    assert profile(x).nbytes == x.nbytes
    assert x.untyped_storage().resizable()
