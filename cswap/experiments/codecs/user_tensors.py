"""The user's own tensors: from a file, or those that a script's autograd saves."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.graph import saved_tensors_hooks

from cswap.errors import ConfigError
from cswap.experiments.codecs.recorded import DataSet
from cswap.schema.tensor import DTYPES, dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

MIN_BYTES: Final = 64 << 10
"""Smaller saved tensors are not recorded: cswap leaves them alone."""

RECORD_LIMIT: Final = 256 << 20
"""Bytes of recorded tensors after which the script runs on unrecorded."""


def load(path: str) -> list[DataSet]:
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
        raise ConfigError(f"--tensors {path!r}: cannot be read: {_first_line(error)}") from error
    if not found:
        raise ConfigError(f"--tensors {path!r}: no tensor in it.")
    return [_data_set(name, x, path) for name, x in found]


def _first_line(error: BaseException) -> str:
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


def _data_set(name: str, x: Tensor, path: str) -> DataSet:
    if x.numel() == 0:
        raise ConfigError(f"--tensors {path!r}: {name} is empty.")
    if not _usable(x):
        raise ConfigError(
            f"--tensors {path!r}: {name} is {x.dtype} {x.layout} on {x.device}: no codec takes it."
        )
    return DataSet(name, x.detach().contiguous().view(-1))


def _usable(x: Tensor) -> bool:
    return x.layout is torch.strided and dtype_name(x.dtype) in DTYPES and not x.is_meta


def record(script: str, arguments: Sequence[str] = ()) -> list[DataSet]:
    """Run a script as ``python SCRIPT ARGUMENTS`` would, and keep its saved tensors.

    Each storage of `MIN_BYTES` or more once per version, parameters left out, up to `RECORD_LIMIT`
    bytes.

    Raises:
        ConfigError: there is no such file, the script fails, or it saves nothing large enough.
    """
    if not Path(script).is_file():
        raise ConfigError(f"--record {script!r}: no such file.")
    recorder = _Recorder()
    before = sys.argv, sys.path
    sys.argv, sys.path = [script, *arguments], [str(Path(script).resolve().parent), *sys.path]
    try:
        with saved_tensors_hooks(recorder.pack, lambda x: x):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            raise ConfigError(f"--record {script!r}: it exits with {error.code!r}.") from error
    except Exception as error:
        what = f"{type(error).__name__}: {_first_line(error)}"
        raise ConfigError(f"--record {script!r}: {what}") from error
    finally:
        sys.argv, sys.path = before
    if not recorder.found:
        raise ConfigError(
            f"--record {script!r}: its autograd saved no tensor of {MIN_BYTES} bytes or more."
        )
    return recorder.found


class _Recorder:
    """Keeps copies of saved tensors."""

    def __init__(self) -> None:
        self.found: list[DataSet] = []
        self._nbytes = 0
        self._seen: dict[tuple[int, int], Tensor] = {}  # held: no address is reused

    def pack(self, x: Tensor) -> Tensor:
        """Autograd's pack hook: returns x unchanged."""
        owned = isinstance(x, torch.nn.Parameter) or (x.is_leaf and x.requires_grad)
        if owned or not _usable(x):
            return x
        fits = x.nbytes >= MIN_BYTES and self._nbytes + x.nbytes <= RECORD_LIMIT
        key = (x.untyped_storage().data_ptr(), x._version)  # noqa: SLF001
        if fits and key not in self._seen:
            self._seen[key] = x
            self._nbytes += x.nbytes
            producer = "leaf" if x.grad_fn is None else x.grad_fn.name()
            name = f"{len(self.found)} {producer}"
            self.found.append(DataSet(name, x.detach().cpu().contiguous().view(-1).clone()))
        return x
