"""State of a module that its forward writes, so that a second forward would be another one."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from cswap.errors import ConfigError
from cswap.module_patch import is_marked

if TYPE_CHECKING:
    from collections.abc import Iterator

_NORMS: Final = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Modules that count batches in their buffers in training."""

_TORCHS: Final = frozenset(vars(nn.Module()))
"""Attributes that torch keeps in every module."""

_DEPTH: Final = 3
"""Containers and objects within each other that are looked into."""

CHECKED: Final = 3
"""Calls of a module whose state is compared: the first ones."""


def counts_batches(module: torch.nn.Module) -> bool:
    """Whether a module's buffers are a norm's statistics, which it writes in this mode."""
    return isinstance(module, _NORMS) and module.training


class StateCheck:
    """Compares the state of one module before and after each of its first calls."""

    def __init__(self, path: str, module: torch.nn.Module) -> None:
        """Args: path: of the module, for the error; module: it."""
        self._path, self._module = path, module
        self._left = CHECKED

    def before(self) -> dict[str, object] | None:
        """The state, to be compared after the call; None: enough calls were compared."""
        if not self._left:
            return None
        self._left -= 1
        return dict(_state_of(self._module))

    def after(self, before: dict[str, object] | None) -> None:
        """A forward has run.

        Raises:
            ConfigError: it has changed something that a second forward would read or change again.
        """
        if before is None:
            return
        now = dict(_state_of(self._module))
        changed = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
        if changed:
            raise ConfigError(
                f"recompute: the forward of module {self._path!r} changes its {min(changed)}, so "
                "a second forward would compute something else. Leave the module out, or name "
                "modules in it that only compute."
            )


def _state_of(module: torch.nn.Module) -> Iterator[tuple[str, object]]:
    for path, m in module.named_modules():
        owner = f"{path}." if path else ""
        if not counts_batches(m):
            for name, buffer in m._buffers.items():  # noqa: SLF001
                yield f"buffer {owner}{name}", _value_of(buffer, 0)
        for name, value in vars(m).items():
            if name not in _TORCHS and not is_marked(value):
                yield f"attribute {owner}{name}", _value_of(value, _DEPTH)


def _value_of(value: Any, depth: int) -> object:
    # Something that compares equal as long as nothing in the value has changed.
    if isinstance(value, torch.Tensor):
        return id(value), _bits(value)
    if isinstance(value, torch.Generator):
        return _bits(value.get_state())
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    if isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)  # nan is equal to nan then
    if depth and isinstance(value, list | tuple | deque | set | frozenset):
        return tuple(_value_of(x, depth - 1) for x in value)
    if depth and isinstance(value, dict):
        return tuple((repr(k), _value_of(x, depth - 1)) for k, x in value.items())
    own = getattr(value, "__dict__", None)
    if depth and own and not isinstance(value, nn.Module | type) and not callable(value):
        return id(value), tuple((k, _value_of(x, depth - 1)) for k, x in own.items())
    return id(value)


def _bits(x: torch.Tensor) -> object:
    if type(x) not in (torch.Tensor, nn.Parameter) or x.layout is not torch.strided or x.is_meta:
        return None if x.is_inference() else x._version  # noqa: SLF001
    flat = x.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=16).digest()
