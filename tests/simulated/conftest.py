"""Kernels in Numba's CUDA simulator. Run by tests/kernels/test_cuda_simulated.py, in a
process of its own: NUMBA_ENABLE_CUDASIM must be set before Numba is imported.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    from numba import cuda

    from cswap_kernels.cuda.container import CONTROL_WORDS, decode_kernel, encode_kernel
    from cswap_kernels.tile_calls import tile_decoder, tile_encoder
    from cswap_kernels.tiles import SLACK, decode_range, directory_bytes, encode_range


def pytest_itemcollected(item: pytest.Item) -> None:
    """A case takes a second: by default, one for each value of each parameter."""
    item.add_marker(pytest.mark.sampled)


SMALL_TILE = 128
"""Words per tile here: the simulator runs every CUDA thread as a Python thread."""


def _padded(nbytes):
    return -(-nbytes // 16) * 16


class Twins:
    """One format's CUDA twin in the simulator and its CPU twin, on containers of small tiles.

    Args of the methods: words [n] unsigned; args: the format's parameters, at most 4.
    """

    def __init__(self, make_tile, encode_cpu, decode_cpu, word, tile=SMALL_TILE, threads=32):
        self.word, self.tile, self.threads = word, tile, threads
        self._encode = cuda.jit(encode_kernel(make_tile, word, tile))
        self._decode = cuda.jit(decode_kernel(make_tile, word, tile))
        self._encode_cpu = tile_encoder(encode_cpu, word).address
        self._decode_cpu = tile_decoder(decode_cpu, word).address

    def n_tiles(self, n):
        return -(-n // self.tile)

    def encode(self, words, args=(), *, grid=2, stride=0, aligned=1):
        """The container that the CUDA twin makes, [nbytes] u8."""
        n_tiles = self.n_tiles(words.size)
        room = 16 * n_tiles + n_tiles * (self.tile * self.word + 16 + stride) + 16
        out = np.full(room, 0xAA, np.uint8)
        control, size = np.zeros(CONTROL_WORDS, np.uint64), np.zeros(1, np.uint64)
        four = [np.uint64(a) for a in (*args, 0, 0, 0, 0)[:4]]
        self._encode[grid, self.threads](
            words, out, control, size, words.size, stride, aligned, *four
        )
        assert not control.any()
        return out[: int(size[0])].copy()

    def decode(self, payload, n, args=(), *, grid=2, aligned=1):
        """(words [n], status) that the CUDA twin makes of a container."""
        words = np.full(n, 0x5A, f"u{self.word}")
        status = np.zeros(1, np.uint32)
        four = [np.uint64(a) for a in (*args, 0, 0, 0, 0)[:4]]
        data = np.zeros(_padded(payload.size), np.uint8)
        data[: payload.size] = payload
        self._decode[grid, self.threads](data, payload.size, words, status, n, aligned, *four)
        return words, int(status[0])

    def encode_cpu(self, words, args=()):
        """The container that the CPU twin makes, [nbytes] u8."""
        n_tiles = self.n_tiles(words.size)
        start = directory_bytes(n_tiles)
        out = np.zeros(start + n_tiles * (self.tile * self.word + 16) + SLACK, np.uint8)
        directory = out[: 8 * n_tiles].view(np.uint32)
        given = np.array(args, np.uint64)
        end = encode_range(
            self._encode_cpu, words, out, directory, given, 0, n_tiles, self.tile, start
        )
        return out[:end].copy()

    def decode_cpu(self, payload, n, args=()):
        """(words [n], first corrupt tile or -1) that the CPU twin makes of a container."""
        words = np.full(n, 0x5A, f"u{self.word}")
        given = np.array(args, np.uint64)
        done = decode_range(self._decode_cpu, payload, words, given, 0, self.n_tiles(n), self.tile)
        return words, done

    def segments(self, payload, n):
        """[(raw?, bytes of the segment)] per tile: what is the same whatever the order."""
        n_tiles = self.n_tiles(n)
        directory = payload[: 8 * n_tiles].view(np.uint32).reshape(n_tiles, 2).astype(np.int64)
        found = []
        for start, entry in directory:
            nbytes = entry & 0x7FFFFFFF
            found.append((bool(entry >> 31), payload[16 * start : 16 * start + nbytes].tobytes()))
        return found

    def agree(self, words, args=(), decode_args=None, expected=None, **options):
        """Assert that the twins make the same segments, and read each other's."""
        theirs = self.encode_cpu(words, args)
        ours = self.encode(words, args, **options)
        assert self.segments(ours, words.size) == self.segments(theirs, words.size)
        args = args if decode_args is None else decode_args
        want, done = self.decode_cpu(theirs, words.size, args)
        assert done == -1
        if expected is not None:
            assert np.array_equal(want, expected)
        crossed, done = self.decode_cpu(ours, words.size, args)
        assert done == -1
        assert np.array_equal(crossed, want)
        back, status = self.decode(theirs, words.size, args)
        assert status == 0
        assert np.array_equal(back, want)


@pytest.fixture
def twins():
    """The class `Twins`."""
    return Twins
