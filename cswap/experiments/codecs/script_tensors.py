"""The tensors that a script's autograd saves in its first step.

A step is over when a backward begins after a tensor of `MIN_BYTES` or more was saved. The script
is stopped where the next step saves its first tensor: a training would go on for hours.
"""

from __future__ import annotations

import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from cswap.engine.saved.eligibility import OwnedStorages, reason_to_keep
from cswap.errors import ConfigError
from cswap.experiments.codecs.case import Case, case_of
from cswap.experiments.codecs.user_tensors import first_line, usable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from torch import Tensor

MIN_BYTES: Final = 64 << 10
"""Smaller saved tensors are not recorded: cswap leaves them alone."""

ROW_LIMIT: Final = 16 << 20
"""Bytes that are kept of a row's tensors, the first ones: codecs are measured on these."""

_CALL: Final = nn.Module._call_impl.__code__  # noqa: SLF001 - runs each module's forward


def record(script: str, arguments: Sequence[str] = ()) -> list[Case]:
    """Run a script as ``python SCRIPT ARGUMENTS`` would; the tensors that its first step saves.

    Tensors of `MIN_BYTES` or more, parameters and buffers left out. Those of one module, shape and
    dtype are one case; modules that differ by a number in their path count as one.

    Raises:
        ConfigError: there is no such file, the script fails, or it saves nothing large enough.
    """
    if not Path(script).is_file():
        raise ConfigError(f"--record {script!r}: no such file.")
    recorder = _Recorder()
    before = sys.argv, sys.path
    sys.argv, sys.path = [script, *arguments], [str(Path(script).resolve().parent), *sys.path]
    try:
        with saved_tensors_hooks(recorder.pack, recorder.unpack):
            runpy.run_path(script, run_name="__main__")
    except _StepIsOver:
        pass
    except SystemExit as error:
        if error.code not in (None, 0):
            raise ConfigError(f"--record {script!r}: it exits with {error.code!r}.") from error
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"--record {script!r}: {what}") from error
    finally:
        sys.argv, sys.path = before
    if not recorder.rows:
        raise ConfigError(
            f"--record {script!r}: its autograd saved no tensor of {MIN_BYTES} bytes or more."
        )
    return recorder.cases()


class _StepIsOver(BaseException):
    pass


@dataclass(slots=True)
class _Row:
    n_tensors: int = 0
    nbytes: int = 0
    kept: list[Tensor] = field(default_factory=list)


class _Recorder:
    # Counts the saved tensors of one step by row, and copies the first ones of each.

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str, torch.dtype], _Row] = {}
        self._seen: dict[tuple[int, int, int], Tensor] = {}  # held: no address is reused
        self._names: dict[nn.Module, dict[nn.Module, str]] = {}
        self._owned = OwnedStorages()
        self._over = self._stopped = False

    def cases(self) -> list[Case]:
        """A case per row, in the order of the forward."""
        return [
            case_of(f"{module}: {row.n_tensors} of {shape}", torch.cat(row.kept), row.nbytes)
            for (module, shape, _), row in self.rows.items()
        ]

    def unpack(self, x: Tensor) -> Tensor:
        """Autograd's unpack hook: a backward has begun."""
        self._over = bool(self.rows)
        return x

    def pack(self, x: Tensor) -> Tensor:
        """Autograd's pack hook: returns x unchanged."""
        in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        if self._over and not in_backward and not self._stopped:
            self._stopped = True  # a script that catches even this runs on
            raise _StepIsOver
        if self._over or not usable(x) or x.nbytes < MIN_BYTES:
            return x
        modules = _modules()
        if modules and modules[-1] not in self._names:
            self._enter(modules[-1])
        key = x.data_ptr(), x.nbytes, x._version  # noqa: SLF001
        if key in self._seen or _is_parameter(x) or x in self._owned:
            return x
        self._seen[key] = x
        shape = "x".join(map(str, x.shape)) or "1"
        row = self.rows.setdefault((self._label(modules, x), shape, x.dtype), _Row())
        row.n_tensors += 1
        row.nbytes += x.nbytes
        room = ROW_LIMIT // x.element_size() - sum(part.numel() for part in row.kept)
        if room > 0:
            row.kept.append(x.detach().reshape(-1)[:room].to("cpu", copy=True))
        return x

    def _enter(self, root: nn.Module) -> None:
        # A module that the script calls itself: its parameters and buffers are no activations.
        self._names[root] = {module: name for name, module in root.named_modules()}
        self._owned.refresh(x for r in self._names for x in (*r.parameters(), *r.buffers()))

    def _label(self, modules: list[nn.Module], x: Tensor) -> str:
        if not modules:
            return "leaf" if x.grad_fn is None else x.grad_fn.name()
        path = self._names[modules[-1]].get(modules[0], "")
        parts = ("*" if part.isdigit() else part for part in path.split("."))
        return f"{'.'.join(parts)} {type(modules[0]).__name__}".lstrip()


def _modules() -> list[nn.Module]:
    # The modules whose forward runs, innermost first. Hooks for this would break compiled graphs.
    found: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_code is _CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found


def _is_parameter(x: Tensor) -> bool:
    # Or a view or a cast of one, or of a leaf that a script trains in its place.
    owner = x if x._base is None else x._base  # noqa: SLF001
    trained = owner.is_leaf and owner.requires_grad
    return trained or isinstance(owner, nn.Parameter) or reason_to_keep(x) == "parameter"
