"""A user's own task, from a function in a Python file: ``--task my.py:make_task``."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from cswap.display import short, shown
from cswap.errors import ConfigError
from cswap.experiments.accuracy.train import SETTLING
from cswap.experiments.task import Task

if TYPE_CHECKING:
    from types import ModuleType

_NAME = re.compile(r"[\w][\w.-]{0,63}")
_EXAMPLE = "--task my.py:make_task"


def load(spec: str, n_steps: int | None) -> Task:
    """Import the file, call the function, and try its task once.

    Args:
        spec: ``FILE.py:FUNCTION``.
        n_steps: in the place of the task's own number of steps; None keeps that.

    Raises:
        ConfigError: no such file or function, one of them fails, the function returns no `Task`, or
            the task's parts do not fit together.
    """
    file, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier() or not file.endswith(".py"):
        raise _wrong(spec, f"must be FILE.py:FUNCTION, such as {_EXAMPLE}.")
    make = _function(spec, _imported(spec, Path(file)), name)
    task = _called(spec, f"{name}()", make)
    if not isinstance(task, Task):
        raise _wrong(
            spec,
            f"{name}() returns {_a(task)}; return a cswap.experiments.task.Task.",
        )
    if n_steps is not None and isinstance(task.n_steps, Integral):
        task = replace(task, n_steps=n_steps)
    _check_fields(spec, task)
    _try(spec, task)
    return task


@dataclass(frozen=True, slots=True)
class OwnTask:
    """Where a user's task comes from, for processes that train: each loads it once.

    Attributes:
        spec: ``FILE.py:FUNCTION``.
        n_steps: as of `load`.
        sha256: start of the file's digest. An unfinished run of another content is not continued.
    """

    spec: str
    n_steps: int | None
    sha256: str

    @classmethod
    def of(cls, spec: str, n_steps: int | None) -> OwnTask:
        """The task that the file defines now."""
        return cls(spec, n_steps, _digest(spec))

    def __call__(self, _model: str = "") -> Task:
        """The task.

        Raises:
            ConfigError: as `load`, or the file has another content in this process.
        """
        return _loaded(self)


@cache
def _loaded(source: OwnTask) -> Task:
    task = load(source.spec, source.n_steps)
    if _digest(source.spec) != source.sha256:
        raise _wrong(source.spec, "it is another file here; copy it to every machine.")
    return task


def _digest(spec: str) -> str:
    try:
        return hashlib.sha256(Path(spec.rpartition(":")[0]).read_bytes()).hexdigest()[:12]
    except (OSError, ValueError):
        return ""  # `load` says what is wrong with it


def _imported(spec: str, file: Path) -> ModuleType:
    try:
        known = file.is_file()
    except (OSError, ValueError):
        known = False
    if not known:
        raise _wrong(spec, f"there is no file {short(str(file))}. Name a Python file.")
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as for a script: its neighbours can be imported
    found = importlib.util.spec_from_file_location("cswap_own_task", file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # dataclasses and pickle look there
    _called(spec, f"import of {file.name}", lambda: found.loader.exec_module(module))  # type: ignore[union-attr]
    return module


def _function(spec: str, module: ModuleType, name: str) -> Callable[[], Any]:
    make = getattr(module, name, None)
    if callable(make):
        return make  # type: ignore[no-any-return]
    known = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
    near = difflib.get_close_matches(name, known, 1)
    hint = f" Did you mean {near[0]}?" if near else " Define it; it takes no arguments."
    raise _wrong(spec, f"no function {name} in it.{hint}")


def _check_fields(spec: str, task: Any) -> None:
    # A dataclass does not check the types of its fields.
    numbers: dict[str, Any] = {"n_steps": Integral, "peak_lr": (int, float)}
    functions = ("build", "optimizer", "batch", "loss", "right")
    wrong = [
        *(f for f, kind in numbers.items() if not isinstance(getattr(task, f), kind)),
        *(f for f in functions if not callable(getattr(task, f))),
        *([] if isinstance(task.facts, dict) else ["facts"]),
    ]
    for name in wrong:
        raise _wrong(
            spec, f"its Task has {name}={shown(getattr(task, name))}; see Task's docstring."
        )
    if not isinstance(task.name, str) or not _NAME.fullmatch(task.name):
        raise _wrong(
            spec, f"its Task has name={shown(task.name)}; take letters, digits, '.', '_', '-'."
        )
    if task.n_steps <= SETTLING:
        raise _wrong(
            spec, f"its Task has n_steps={task.n_steps}; the first {SETTLING} are not counted."
        )
    margin = task.margin
    if margin is not None and not (isinstance(margin, int | float) and 0 < margin < float("inf")):
        raise _wrong(spec, f"its Task has margin={margin!r}; it must be above 0, or None.")
    _called(spec, "JSON of the Task's facts", lambda: json.dumps(task.facts))
    if not isinstance(task.validation, Sequence) or not task.validation:
        raise _wrong(spec, "its Task has no batches in validation; give a tuple of at least one.")


def _try(spec: str, task: Task) -> None:
    # One forward pass of a training batch and of a validation batch: errors come before the runs.
    torch.manual_seed(0)
    model = _called(spec, "build()", task.build)
    if not isinstance(model, torch.nn.Module):
        raise _wrong(spec, f"build() returns {_a(model)}; return a torch.nn.Module.")
    optimizer = _called(spec, "optimizer(model)", lambda: task.optimizer(model))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _wrong(
            spec, f"optimizer(model) returns {_a(optimizer)}; return a torch.optim.Optimizer."
        )
    first = _called(spec, "batch(0, 0)", lambda: task.batch(0, 0))
    for what, batch in (("batch(0, 0)", first), ("validation[0]", task.validation[0])):
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise _wrong(spec, f"{what} is {_a(batch)}; it must be (inputs, targets).")
        _check_loss(spec, task, model, what, batch)


def _check_loss(spec: str, task: Task, model: torch.nn.Module, what: str, batch: Any) -> None:
    inputs, targets = batch
    with torch.no_grad():
        outputs = _called(spec, f"the model on {what}", lambda: model(inputs))
        loss = _called(spec, f"loss on {what}", lambda: task.loss(outputs, targets))
        right = _called(spec, f"right on {what}", lambda: task.right(outputs, targets))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise _wrong(spec, f"loss on {what} is {_a(loss)}; return a mean.")
    if not isinstance(right, torch.Tensor) or right.shape != targets.shape:
        raise _wrong(spec, f"right on {what} is {_a(right)}; its shape must be the targets'.")


def _called(spec: str, what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (Exception, SystemExit) as error:  # the user's code may raise any error
        lines = str(error).splitlines()
        raise _wrong(
            spec, f"{what} fails: {type(error).__name__}: {short(lines[0] if lines else '')}"
        ) from error


def _a(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _wrong(spec: str, why: str) -> ConfigError:
    return ConfigError(f"--task {short(spec)}: {why}")
