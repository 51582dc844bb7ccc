"""The ways to train with less memory that are compared, each as a change of a model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from torch import nn
from torch.autograd.graph import save_on_cpu

import cswap

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.api import InstallHandle

Context = AbstractContextManager[object]


class BlockModel(Protocol):
    """The parts of a model that a method needs.

    Attributes:
        checkpointed: recompute each block in backward instead of saving its tensors.
        around_checkpoint: entered around every checkpointed block, where it saves its inputs.
    """

    checkpointed: bool
    around_checkpoint: Callable[[], Context]


class NotInstalledError(RuntimeError):
    """A peer is not there to be compared with."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train.

    Attributes:
        name: for tables.
        checkpointed: blocks are recomputed in backward.
        offloaded: the checkpoints' inputs go to the host.
        around: makes the context around each forward of the model; told whether host memory
            can be pinned.
        options: of `cswap.install`; None does without.
    """

    name: str
    checkpointed: bool = False
    offloaded: bool = False
    around: Callable[[bool], Context] = field(default=lambda _pins: nullcontext())
    options: dict[str, Any] | None = None

    def switch_on(self, model: BlockModel, *, pins: bool) -> InstallHandle | None:
        """Change a model; return cswap's handle where there is one."""
        model.checkpointed = self.checkpointed
        if self.offloaded:
            model.around_checkpoint = partial(_save_on_cpu, pins)
        if self.options is None:
            return None
        assert isinstance(model, nn.Module)
        return cswap.install(model, **self.options)


def _save_on_cpu(pins: bool) -> Context:
    return save_on_cpu(pin_memory=pins)


def why_missing(package: str, error: ImportError) -> str:
    """Why a package cannot be measured, in a few words."""
    if error.name == package:
        return f"{package} is not installed"
    return f"{package} cannot be imported ({(str(error).splitlines() or [''])[0]})"


def _trl(pins: bool) -> Context:
    try:
        from trl.models.activation_offloading import OffloadActivations
    except ImportError as error:
        raise NotInstalledError(why_missing("trl", error)) from error
    made: Context = OffloadActivations(use_pin_memory=pins, use_streams=pins)
    return made


def _torchtune(pins: bool) -> Context:
    try:
        from torchtune.training import OffloadActivations
    except ImportError as error:
        raise NotInstalledError(why_missing("torchtune", error)) from error
    made: Context = OffloadActivations(use_pin_memory=pins, use_streams=pins)
    return made


ORACLE: Final = "no swapping"

METHODS: Final = (
    Method(ORACLE),
    Method("checkpoint", checkpointed=True),
    Method("checkpoint + save_on_cpu", checkpointed=True, offloaded=True),
    Method("save_on_cpu", around=_save_on_cpu),
    Method("TRL OffloadActivations", around=_trl),
    Method("torchtune OffloadActivations", around=_torchtune),
    Method("cswap raw", options={"codec": "raw"}),
    Method("cswap lossless", options={}),
    Method("cswap fp8", options={"lossy": "fp8"}),
    Method("cswap int8", options={"lossy": "int8"}),
    Method("cswap int4", options={"lossy": "int4"}),
)
"""The oracle, peers, and cswap. "checkpoint + save_on_cpu" is the way of transformers >= 5.17."""

OFF: Final = "off"
"""The oracle's name where everything is measured on the CPU."""

UNLIMITED: Final = Method("cswap lossless slowdown=10", options={"slowdown": 10.0})
"""The least memory without loss that ten times the time of a step allows."""

ON_CPU: Final = {
    OFF: replace(METHODS[0], name=OFF),
    **{m.name: m for m in METHODS if m.name not in (ORACLE, "cswap fp8", "cswap int4")},
    UNLIMITED.name: UNLIMITED,
}
"""The methods that `python -m bench swap` compares, by name."""

DEMO: Final = {
    OFF: ON_CPU[OFF],
    "lossless": Method("cswap lossless, no remat", options={"remat": False}),
    "remat": ON_CPU["cswap lossless"],
    "int8": ON_CPU["cswap int8"],
    "checkpoint": ON_CPU["checkpoint"],
}
"""The demo's modes, by its names. "lossless" has codecs alone; "remat" is the one line."""
