"""Bytes that changed on the disk are found before a codec is given them."""

from __future__ import annotations

import pytest
import torch

import cswap
from cswap.codecs.registry import get_codec
from cswap.errors import CorruptEncodingError


def change(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def remove(path):
    path.unlink()


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
        assert engine.stats.disk_bytes > 0
        files = [p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size > 1000]
        for path in files:
            harm(path)
        monkeypatch.setattr(codec, "decode_flat", note)
        with pytest.raises(CorruptEncodingError, match=str(tmp_path)):
            loss.backward()
    assert files
    assert decoded == []
