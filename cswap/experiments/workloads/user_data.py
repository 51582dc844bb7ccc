"""Data sets by name that the user has: ``torchvision:CIFAR10[:ROOT]``, ``hf:imdb[:CONFIG]``.

Nothing is ever downloaded. Neither torchvision nor datasets is needed for anything else.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch

from cswap.errors import ConfigError
from cswap.experiments.workloads.data import Images, Text, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

DEFAULT_ROOT: Final = "data"
"""Folder of torchvision's data sets, as in its tutorials."""

LARGEST_SIDE: Final = 64
"""Pixels: larger pictures are scaled down, so that a CPU gets through."""

SIDE_STEP: Final = 8
"""The side is a multiple: three stages halve it, and patches are of four."""

HELD_OUT: Final = ("validation", "valid", "val", "test")
"""Names of the second part, the preferred one first; without any, a tenth of the first part."""

FEWEST_BYTES: Final = 4096
"""Of text, in either part."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a data set is read; a random choice, from seed 0.

    Attributes:
        train: pictures to train on.
        validation: pictures held out.
        train_bytes: bytes of text to train on.
        validation_bytes: bytes of text held out.
    """

    train: int = 8192
    validation: int = 1024
    train_bytes: int = 8 << 20
    validation_bytes: int = 512 << 10


QUICK: Final = Limits(512, 128, 512 << 10, 64 << 10)


def load_data(spec: str, *, quick: bool = False) -> Images | Text:
    """Read a data set that is on this machine.

    Args:
        spec: ``torchvision:CLASS[:ROOT]``, the folder being ``data`` if none is named, or
            ``hf:NAME[:CONFIG]``, from the local cache of datasets.
        quick: read less of it.

    Raises:
        ConfigError: the package, the class or the data is not there, or they are neither pictures
            with one class each nor text.
    """
    kind, _, rest = spec.partition(":")
    name, _, detail = rest.partition(":")
    if kind not in ("torchvision", "hf") or not name:
        raise ConfigError(
            f"--data {spec!r}: must be torchvision:CLASS[:ROOT], such as torchvision:CIFAR10, or "
            "hf:NAME[:CONFIG], such as hf:imdb."
        )
    limits = QUICK if quick else Limits()
    try:
        if kind == "torchvision":
            return _images(spec, *_torchvision(spec, name, detail or DEFAULT_ROOT), limits)
        return _hugging_face(spec, name, detail or None, limits)
    except ConfigError:
        raise
    except Exception as error:  # of a damaged picture, for example, in each package's own way
        raise ConfigError(f"--data {spec!r}: cannot be read ({_first_line(error)}).") from error


def _torchvision(spec: str, name: str, root: str) -> tuple[Any, Any | None]:
    datasets = _imported(spec, "torchvision", "torchvision.datasets")
    kind: Any = getattr(datasets, name, None)
    if not isinstance(kind, type):
        known = [n for n in dir(datasets) if inspect.isclass(getattr(datasets, n))]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"--data {spec!r}: torchvision.datasets has no {name}.{hint}")
    options = inspect.signature(kind).parameters
    fixed: dict[str, Any] = {"download": False} if "download" in options else {}

    def part(**which: Any) -> Any:
        return kind(root, **which, **fixed)

    remedy = f"Name its folder: torchvision:{name}:ROOT."
    if fixed:
        code = f"from torchvision.datasets import {name}; {name}({root!r}, download=True)"
        remedy += f' Or download it once: python -c "{code}"'
    if "train" in options:
        train = _tried(spec, remedy, part, train=True)
        return train, _tried(spec, remedy, part, train=False)
    if "split" in options:
        train = _tried(spec, remedy, part, split="train")
        return train, _first(lambda split: part(split=split))
    return _tried(spec, remedy, part), None


def _imported(spec: str, package: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"--data {spec!r}: pip install {package} ({error})") from error
    except Exception as error:  # a torchvision of another torch raises RuntimeError
        raise ConfigError(
            f"--data {spec!r}: {package} cannot be imported ({_first_line(error)}). Install the "
            f"one that belongs to torch {torch.__version__}: pip install -U {package}"
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def _tried(spec: str, remedy: str, make: Callable[..., Any], **options: Any) -> Any:
    try:
        return make(**options)
    except Exception as error:  # the packages raise whatever they like
        what = _first_line(error)
        raise ConfigError(f"--data {spec!r}: cannot be read ({what}). {remedy}") from error


def _first(make: Callable[[str], Any]) -> Any | None:
    # The first of the parts in HELD_OUT that there is.
    for split in HELD_OUT:
        try:
            return make(split)
        except Exception:  # noqa: PERF203 - no such part, in each class's own words
            continue
    return None


@contextmanager
def _offline() -> Iterator[None]:
    # Read when the packages are imported, which others may have done already.
    with ExitStack() as stack:
        names = ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE")
        stack.enter_context(mock.patch.dict(os.environ, dict.fromkeys(names, "1")))
        for module in ("datasets.config", "huggingface_hub.constants"):
            for name in names:
                if hasattr(sys.modules.get(module), name):
                    stack.enter_context(mock.patch.object(sys.modules[module], name, True))
        yield


@dataclass(frozen=True, slots=True)
class _Columns:
    """Of a row: text, or a picture and its label."""

    text: str | None = None
    image: str = ""
    label: str = ""


def _hugging_face(spec: str, name: str, config: str | None, limits: Limits) -> Images | Text:
    with _offline():
        datasets = _imported(spec, "datasets", "datasets")

        def part(split: str) -> Any:
            return datasets.load_dataset(name, *([config] if config else []), split=split)

        arguments = ", ".join(repr(a) for a in (name, config) if a)
        remedy = (
            "Only the local cache is looked at. Download it once: python -c "
            f'"from datasets import load_dataset; load_dataset({arguments})"'
        )
        train = _tried(spec, remedy, part, split="train")
        validation = _first(part)
    if len(train) == 0:
        raise ConfigError(f"--data {spec!r}: its part 'train' is empty.")
    columns = _columns(spec, train[0])
    if columns.text is not None:
        return _text(spec, train, validation, columns.text, limits)
    pairs = [rows and _Pairs(rows, columns) for rows in (train, validation)]
    return _images(spec, pairs[0], pairs[1], limits)


def _columns(spec: str, row: dict[str, Any]) -> _Columns:
    images = [k for k, value in row.items() if hasattr(value, "convert")]
    labels = [k for k, value in row.items() if isinstance(value, int)]
    texts = [k for k, value in row.items() if isinstance(value, str)]
    if images and labels:
        image = "image" if "image" in images else images[0]
        return _Columns(image=image, label="label" if "label" in labels else labels[0])
    if texts:
        return _Columns(text="text" if "text" in texts else texts[0])
    found = ", ".join(f"{key} ({type(value).__name__})" for key, value in row.items())
    raise ConfigError(
        f"--data {spec!r}: neither a picture with a label nor text in its columns: {found}."
    )


class _Pairs:
    """Rows of a Hugging Face data set as torchvision has them: (picture, label)."""

    def __init__(self, rows: Any, columns: _Columns) -> None:
        self._rows, self._columns = rows, columns

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        row = self._rows[i]
        return row[self._columns.image], row[self._columns.label]


def _chosen(n: int, most: int) -> list[int]:
    order: list[int] = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
    return order[:most]


def _split(train: Any, validation: Any | None, limits: Limits) -> Iterator[tuple[Any, list[int]]]:
    # Without a second part, the last tenth of the shuffled first one is held out.
    if validation is not None and len(validation):
        yield train, _chosen(len(train), limits.train)
        yield validation, _chosen(len(validation), limits.validation)
        return
    order = _chosen(len(train), len(train))
    n_held_out = min(limits.validation, len(order) // 10)
    n_train = len(order) - n_held_out
    yield train, order[: min(n_train, limits.train)]
    yield train, order[n_train:]


def _images(spec: str, train: Any, validation: Any | None, limits: Limits) -> Images:
    parts = list(_split(train, validation, limits))
    if not all(chosen for _, chosen in parts):
        raise ConfigError(f"--data {spec!r}: it has {len(train)} items; too few to hold some out.")
    first = _picture(spec, train[parts[0][1][0]])
    mode = "L" if first.mode in ("1", "L", "I", "I;16", "F", "LA") else "RGB"
    side = min(LARGEST_SIDE, -(-max(first.size) // SIDE_STEP) * SIDE_STEP)
    images, labels = zip(*(_read(spec, d, i, mode, side) for d, i in parts), strict=True)
    return Images(
        f"{spec}, {first.size[0]}x{first.size[1]} scaled to {side}x{side}",
        *(images[0], labels[0], images[1], labels[1]),
        n_classes=int(torch.cat(labels).max()) + 1,
    )


def _picture(spec: str, item: Any) -> Any:
    pair = isinstance(item, tuple) and len(item) == 2
    if not pair or not hasattr(item[0], "convert") or not _is_class(item[1]):
        found = ", ".join(type(x).__name__ for x in item) if isinstance(item, tuple) else item
        raise ConfigError(
            f"--data {spec!r}: its items are ({found}); only pictures with one class each, a "
            "number from 0 on, can be learnt."
        )
    return item[0]


def _is_class(label: Any) -> bool:
    scalar = isinstance(label, Integral) or (isinstance(label, torch.Tensor) and not label.ndim)
    return scalar and int(label) >= 0


def _read(
    spec: str, data: Any, chosen: Sequence[int], mode: str, side: int
) -> tuple[Tensor, Tensor]:
    import numpy as np

    images = np.empty((len(chosen), side, side, len(mode)), dtype=np.uint8)
    labels = torch.empty(len(chosen), dtype=torch.int64)
    for k, i in enumerate(chosen):
        item = data[i]
        picture = _picture(spec, item).convert(mode)
        small = picture if picture.size == (side, side) else picture.resize((side, side))
        images[k] = np.asarray(small, dtype=np.uint8).reshape(side, side, len(mode))
        labels[k] = int(item[1])
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), labels


def _text(spec: str, train: Any, validation: Any | None, column: str, limits: Limits) -> Text:
    most = Limits(len(train), len(train if validation is None else validation))
    parts = [
        _documents(rows, chosen, column, nbytes)
        for (rows, chosen), nbytes in zip(
            _split(train, validation, most),
            (limits.train_bytes, limits.validation_bytes),
            strict=True,
        )
    ]
    for name, part in zip(("train", "held out"), parts, strict=True):
        if sum(map(len, part)) < FEWEST_BYTES:
            raise ConfigError(
                f"--data {spec!r}: less than {FEWEST_BYTES} bytes of text in {column!r}, {name}."
            )
    return text(f"{spec}, bytes of {column!r}", *parts)


def _documents(rows: Any, chosen: Sequence[int], column: str, nbytes: int) -> list[bytes]:
    found, total = [], 0
    for i in chosen:
        document = (rows[i][column] or "").encode() + b"\n"
        found.append(document)
        total += len(document)
        if total >= nbytes:
            break
    return found
