"""The user's own tensors, from a file."""

from __future__ import annotations

import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch

from cswap.errors import ConfigError
from cswap.experiments.codecs.case import Case, case_of
from cswap.schema.tensor import DTYPES, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


def load(path: str) -> list[Case]:
    """The tensors of a .pt, .pth, .safetensors, .npy or .npz file.

    Raises:
        ConfigError: the file cannot be read, holds no tensor that can be encoded, or an empty one.
    """
    file = Path(path)
    readers = {".pt": _torch, ".pth": _torch, ".npy": _npy, ".npz": _npy}
    reader = {**readers, ".safetensors": _safetensors}.get(file.suffix)
    if reader is None:
        raise ConfigError(f"--tensors {path!r}: must end in .pt, .pth, .safetensors, .npy or .npz.")
    try:
        found = list(_named(reader(file), file.stem))
    except ConfigError:
        raise
    except UnpicklingError as error:
        raise ConfigError(
            f"--tensors {path!r}: cannot be read: it is damaged, or holds more than tensors, lists "
            "and dicts, and to load that would run its code. Save tensors, or a state_dict."
        ) from error
    except Exception as error:  # readers may raise any error
        raise ConfigError(f"--tensors {path!r}: cannot be read: {first_line(error)}") from error
    if not found:
        raise ConfigError(f"--tensors {path!r}: no tensor in it.")
    return [_case(name, x, path) for name, x in found]


def first_line(error: BaseException) -> str:
    """Of an error's text, or its name."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _torch(file: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings on old formats do not matter; errors do
        return torch.load(file, map_location="cpu", weights_only=True)


def _npy(file: Path) -> Any:
    import numpy as np

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))

    try:
        found = np.load(file, allow_pickle=False)
    except ValueError as error:  # numpy's own words advise to run the file's code
        raise ValueError("it is damaged, or holds objects. Save arrays of numbers.") from error
    if file.suffix == ".npy":
        return tensor(found)
    return {name: tensor(found[name]) for name in found.files}


def _safetensors(file: Path) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ConfigError(f"--tensors {str(file)!r}: pip install safetensors ({error})") from error
    return load_file(file)


def _named(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _named(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _named(item, f"{name}[{i}]")


def _case(name: str, x: Tensor, path: str) -> Case:
    if x.numel() == 0:
        raise ConfigError(f"--tensors {path!r}: {name} is empty.")
    if not usable(x):
        raise ConfigError(
            f"--tensors {path!r}: {name} is {x.dtype} {x.layout} on {x.device}: no codec takes it."
        )
    return case_of(name, x.detach().contiguous().view(-1))


def usable(x: Tensor) -> bool:
    """Whether a codec may take it."""
    return x.layout is torch.strided and dtype_name(x.dtype) in DTYPES and not x.is_meta
