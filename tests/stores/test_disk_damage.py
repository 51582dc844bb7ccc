"""Bytes that changed on the disk are found before a codec is given them."""

from __future__ import annotations

import os

import pytest
import torch

import cswap
from cswap.codecs.registry import get_codec
from cswap.errors import CorruptEncodingError


def change(descriptor, nbytes):
    at = nbytes // 2
    os.pwrite(descriptor, bytes([os.pread(descriptor, 1, at)[0] ^ 1]), at)


def remove(descriptor, _):
    os.ftruncate(descriptor, 0)


@pytest.mark.parametrize("harm", [change, remove])
@pytest.mark.parametrize("name", ["raw", "zvc"])
def test_what_changed_on_the_disk_is_not_decoded(tmp_path, monkeypatch, name, harm):
    decoded = []
    codec = type(get_codec(name))
    original = codec.decode_flat

    def note(self, payload, out, *, stream):
        decoded.append(payload.numel())
        original(self, payload, out, stream=stream)

    x = torch.linspace(0, 1, 100_000, requires_grad=True)
    options = {"codec": name, "min_bytes": 0, "host_limit": 0, "spill_dir": tmp_path}
    with cswap.swapping(**options) as engine:
        loss = (x.clone() ** 2).sum()
        store = engine._state.disk
        assert store is not None
        assert store._spill is not None
        assert engine.stats.disk_bytes > 1000
        harm(store._spill.descriptor, engine.stats.disk_bytes)
        monkeypatch.setattr(codec, "decode_flat", note)
        with pytest.raises(CorruptEncodingError, match=str(tmp_path)):
            loss.backward()
    assert decoded == []
