"""The ways to train with less memory that are compared, each as what it changes about a model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch.autograd.graph import save_on_cpu

import cswap

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.gpu.models import BlockModel
    from cswap.api import InstallHandle

Context = AbstractContextManager[object]


class NotInstalledError(RuntimeError):
    """A peer is not there to be compared with."""


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train.

    Attributes:
        name: for tables.
        checkpointed: blocks are recomputed in backward.
        offloaded: what the checkpoints keep goes to the host.
        around: makes what is entered around each forward of the model; told whether host memory
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
        return None if self.options is None else cswap.install(model, **self.options)


def _save_on_cpu(pins: bool) -> Context:
    return save_on_cpu(pin_memory=pins)


def _trl(pins: bool) -> Context:
    try:
        from trl.models.activation_offloading import OffloadActivations
    except ImportError as error:
        raise NotInstalledError(f"trl is not installed ({error})") from error
    made: Context = OffloadActivations(use_pin_memory=pins, use_streams=pins)
    return made


ORACLE: Final = "no swapping"

METHODS: Final = (
    Method(ORACLE),
    Method("checkpoint", checkpointed=True),
    Method("checkpoint + save_on_cpu", checkpointed=True, offloaded=True),
    Method("save_on_cpu", around=_save_on_cpu),
    Method("TRL OffloadActivations", around=_trl),
    Method("cswap raw", options={"codec": "raw"}),
    Method("cswap lossless", options={}),
    Method("cswap fp8", options={"lossy": "fp8"}),
    Method("cswap int8", options={"lossy": "int8"}),
    Method("cswap int4", options={"lossy": "int4"}),
)
"""The oracle, peers, and cswap. "checkpoint + save_on_cpu" is what transformers >= 5.17 does."""
