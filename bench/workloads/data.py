"""The demo's data: scikit-learn's handwritten digits, and the Python sources of this machine."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

N_DIGITS_VALIDATION = 360  # a fifth of the 1797 images
VALIDATION_SHARE = 0x1A  # of 256: about a tenth of the source files


@dataclass(frozen=True, slots=True)
class Images:
    """Pictures with a class each, in two parts.

    Attributes:
        source: their origin, for the report.
        train_images: [n, 1, side, side] float32 in 0 ... 1.
        train_labels: [n] int64, 0 ... 9.
        validation_images: as train_images.
        validation_labels: as train_labels.
    """

    source: str
    train_images: Tensor
    train_labels: Tensor
    validation_images: Tensor
    validation_labels: Tensor


def digits(side: int) -> Images:
    """Load scikit-learn's 1797 digits of 8x8 pixels.

    They are enlarged to 3/4 of the side and framed in black, as MNIST frames its own.

    Args:
        side: height and width of the result in pixels, a multiple of 8.
    """
    from sklearn.datasets import load_digits

    bundle = load_digits()
    small = torch.tensor(bundle.images, dtype=torch.float32)[:, None] / 16
    inner = functional.interpolate(small, size=side * 3 // 4, mode="bilinear", align_corners=False)
    images = functional.pad(inner, (side // 8,) * 4)
    labels = torch.tensor(bundle.target, dtype=torch.int64)
    # the file is ordered by writer; the split must not be
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    held_out, rest = order[:N_DIGITS_VALIDATION], order[N_DIGITS_VALIDATION:]
    return Images(
        f"scikit-learn load_digits, 8x8 enlarged to {side * 3 // 4}x{side * 3 // 4} on "
        f"{side}x{side} black",
        *(images[rest], labels[rest], images[held_out], labels[held_out]),
    )


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes of documents, [n] uint8, split by document.

    Attributes:
        source: their origin, for the report.
        train: bytes of the training documents, one after the other.
        validation: bytes of the held-out ones.
        n_files: number of documents in both parts.
        sha256: digest of both parts, so that two runs can be seen to use the same text.
    """

    source: str
    train: Tensor
    validation: Tensor
    n_files: int
    sha256: str


def python_sources() -> Text:
    """Read the top-level modules of this Python's standard library.

    A file's name alone decides which part it belongs to.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for file in sorted(folder.glob("*.py")):
        held_out = hashlib.sha256(file.name.encode()).digest()[0] < VALIDATION_SHARE
        parts[held_out].append(file.read_bytes())
    train, validation = b"".join(parts[False]), b"".join(parts[True])
    return Text(
        "top-level *.py of this Python's standard library, bytes",
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        validation=torch.frombuffer(bytearray(validation), dtype=torch.uint8),
        n_files=len(parts[False]) + len(parts[True]),
        sha256=hashlib.sha256(train + b"\0" + validation).hexdigest(),
    )


def generator_of(seed: int, step: int) -> torch.Generator:
    """Randomness of one step's batch, whatever was drawn before."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def windows(source: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Cut windows out of a text.

    Args:
        source: [n] uint8.
        starts: [batch] int64, each at most n - length - 1.
        length: bytes per window.

    Returns:
        Tokens and, one byte later, targets; both [batch, length] int64.
    """
    cut = source[starts[:, None] + torch.arange(length + 1)].long()
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()
