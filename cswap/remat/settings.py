"""The settings of torch under which an operator gives the same bits as before.

Note [settings that change bits]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
On a CPU an elementwise operator is cut into one piece per thread. Scalar code computes the last
elements of a piece, and vector code computes all others. For sigmoid, SiLU and softplus the two
differ in the last bit. So the number of threads must equal that of the forward. The permission to
use oneDNN decides which kernel of GELU runs. Autocast is off, because autograd's nodes are below
it: every cast that it made is an operator of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from types import TracebackType

_get_onednn = torch._C._get_mkldnn_enabled  # noqa: SLF001
_set_onednn = torch._C._set_mkldnn_enabled  # noqa: SLF001
_set_grad_enabled = torch._C._set_grad_enabled  # noqa: SLF001
_get_threads = torch.get_num_threads
_is_grad_enabled = torch.is_grad_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the calling thread that affect bits.

    Attributes:
        threads: number of threads of one operator on the CPU.
        onednn: whether operators may use oneDNN.
    """

    threads: int
    onednn: bool

    @staticmethod
    def current() -> Settings:
        """The current settings: the same object while they are the same."""
        return _settings(_get_threads(), bool(_get_onednn()))

    def are_set(self) -> bool:
        """Whether operators run under them now, without a history and without autocast."""
        return (
            not _is_grad_enabled()
            and _get_threads() == self.threads
            and _get_onednn() == self.onednn
            and not _is_any_autocast_enabled()
        )

    def apply(self) -> None:
        """Set them for the calling thread."""
        if _get_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if _get_onednn() != self.onednn:
            _set_onednn(self.onednn)


@lru_cache(maxsize=64)
def _settings(threads: int, onednn: bool) -> Settings:
    return Settings(threads, onednn)


class SameBits:
    """A context in which operators run under ``settings``, without a history.

    It changes only settings that differ: in backward, usually none does.
    """

    __slots__ = ("_autocast", "_had_grad", "_outside", "_settings")

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __enter__(self) -> None:
        self._outside = Settings.current()
        self._had_grad = _is_grad_enabled()
        if self._had_grad:
            _set_grad_enabled(False)
        self._autocast = None
        if _is_any_autocast_enabled():
            self._autocast = torch._C._DisableAutocast()  # noqa: SLF001
            self._autocast.__enter__()  # type: ignore[no-untyped-call]
        if self._outside is not self._settings:
            self._settings.apply()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._outside is not self._settings:
            self._outside.apply()
        if self._autocast is not None:
            self._autocast.__exit__(kind, error, traceback)
        if self._had_grad:
            _set_grad_enabled(True)
