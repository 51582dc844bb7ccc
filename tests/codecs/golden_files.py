"""Golden files: streams that every version of a codec must decode and, mostly, encode again.

The folder ``<root>/<codec>/<dtype>/`` holds three files. ``input.npy`` (``input.bin`` for dtypes
that numpy lacks) has the flat elements. ``stream.bin`` has their stream. ``config.json`` has the
layout, the key, the SHA-256 of the decoded elements, and the versions of the packages that wrote
the bytes, if any. ``python -m tests.codecs.golden_files tests/golden [codec ...]`` writes missing
ones. A golden file is never deleted. A change of its bytes needs a new version of the
format. If only the encoder changes, the old file moves to a folder of its own, with ``"superseded":
true``, and must be decoded only.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

import numpy as np
import torch

from cswap.codecs.base import Codec, EncodeKey, Encoding
from cswap.codecs.layout import flatten, restore, torch_dtype
from cswap.codecs.registry import get_codec, list_codecs
from cswap.schema.reading import read_object
from cswap.schema.tensor import DTYPES, TensorMeta
from cswap.testing.buffers import bits, fail_unless
from cswap.testing.strategies import TensorSpec

DTYPES_KEPT: Final = ("float32", "bfloat16", "float16", "int64", "bool")
"""One dtype of each kind: all files together stay below 200 KB. A codec that takes none of them has
files of the first dtype that it takes."""

PACKAGES: Final = {"lz4": ("lz4",), "zstd": ("zstandard",), "zfp": ("zfpy",)}
"""Distributions that write a codec's bytes: another version may write others."""

_KEY: Final = EncodeKey(seed=1, tensor_id=2, step=3)


def write_golden(codec: Codec, root: Path) -> list[Path]:
    """Write those golden files of a codec that do not exist yet.

    Returns:
        The folders that were written.
    """
    written = []
    for dtype in _dtypes(codec):
        folder = _folder(codec, root) / dtype
        if folder.exists():
            continue
        x = TensorSpec(dtype, (13, 21), "permuted", "sparse", seed=5).build()
        encoding = codec.encode(x, key=_KEY)
        folder.mkdir(parents=True)
        _write_input(flatten(x), folder)
        (folder / "stream.bin").write_bytes(encoding.to_bytes())
        config = {
            "codec": codec.name,
            "dtype": dtype,
            "sizes": encoding.meta.sizes,
            "strides": encoding.meta.strides,
            "key": {"seed": _KEY.seed, "tensor_id": _KEY.tensor_id, "step": _KEY.step},
            "decoded_sha256": _sha256(codec.decode(encoding)),
            "packages": _versions(codec),
        }
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
        written.append(folder)
    return written


def check_golden(codec: Codec, root: Path) -> None:
    """Decode every golden file of a codec, and encode its input again.

    The encoded bytes must equal the file's. Exceptions: the file is superseded, or another version
    of a package in `PACKAGES` wrote it.

    Raises:
        AssertionError: bytes or elements differ, or there are no files.
    """
    folders = sorted(p.parent for p in _folder(codec, root).glob("*/config.json"))
    fail_unless(bool(folders), f"{_folder(codec, root)}: no golden files")
    for folder in folders:
        _check_folder(codec, folder)


def _check_folder(codec: Codec, folder: Path) -> None:
    config = read_object(folder / "config.json", "golden")
    stream = (folder / "stream.bin").read_bytes()
    meta = TensorMeta(config["dtype"], tuple(config["sizes"]), tuple(config["strides"]))
    encoding = Encoding.from_bytes(stream)
    fail_unless(
        (encoding.codec, encoding.meta) == (codec.name, meta), f"{folder}: header reads {encoding}"
    )
    x, x_hat = restore(_read_input(folder, meta.dtype), meta), codec.decode(encoding)
    fail_unless(_sha256(x_hat) == config["decoded_sha256"], f"{folder}: decodes to other elements")
    if codec.lossless:
        fail_unless(torch.equal(bits(x), bits(x_hat)), f"{folder}: input and decoded bits differ")
    if config["packages"] == _versions(codec) and not config.get("superseded", False):
        again = codec.encode(x, key=EncodeKey(**config["key"])).to_bytes()
        fail_unless(again == stream, f"{folder}: encodes to other bytes")


def _dtypes(codec: Codec) -> list[str]:
    usual = [name for name in DTYPES_KEPT if codec.supports(torch_dtype(name))]
    known = (name for name in DTYPES if hasattr(torch, name))  # older ones of torch lack some
    return usual or [name for name in known if codec.supports(torch_dtype(name))][:1]


def _folder(codec: Codec, root: Path) -> Path:
    return root / codec.name.replace(":", "_")  # not every system takes ':' in file names


def _versions(codec: Codec) -> dict[str, str]:
    return {package: metadata.version(package) for package in PACKAGES.get(codec.name, ())}


def _sha256(x: torch.Tensor) -> str:
    return hashlib.sha256(bits(flatten(x)).numpy().data).hexdigest()


def _write_input(x: torch.Tensor, folder: Path) -> None:
    try:
        array = x.numpy()
    except TypeError:  # bfloat16 and others, which numpy lacks
        (folder / "input.bin").write_bytes(bits(x).numpy().tobytes())
    else:
        np.save(folder / "input.npy", array)


def _read_input(folder: Path, dtype: str) -> torch.Tensor:
    plain = folder / "input.npy"
    if plain.exists():
        return torch.from_numpy(np.load(plain))
    data = bytearray((folder / "input.bin").read_bytes())
    return torch.frombuffer(data, dtype=torch_dtype(dtype))


if __name__ == "__main__":
    for codec_name in sys.argv[2:] or list_codecs():
        for made in write_golden(get_codec(codec_name), Path(sys.argv[1])):
            sys.stdout.write(f"{made}\n")
