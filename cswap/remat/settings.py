"""The settings of torch under which an operator gives the same bits as before.

Note [settings that change bits]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
On a CPU an elementwise operator is cut into one piece per thread. Scalar code computes the last
elements of a piece, and vector code computes all others. For sigmoid, SiLU and softplus the two
differ in the last bit. So the number of threads must equal that of the forward. The permission to
use oneDNN decides which kernel of GELU runs. Autocast is off, because autograd's nodes are below
it: every cast that it made is an operator of its own.

A matrix product of float32 is also computed by kernels of lower precision, if
`torch.set_float32_matmul_precision` allows that. So this setting is restored for products.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from cswap.remat.reads import NotFoundError

if TYPE_CHECKING:
    from types import TracebackType

_get_onednn = torch._C._get_mkldnn_enabled  # noqa: SLF001
_get_precision = torch._C._get_float32_matmul_precision  # noqa: SLF001
_set_precision = torch._C._set_float32_matmul_precision  # noqa: SLF001
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
        precision: of products of float32; None: there is no product.
    """

    threads: int
    onednn: bool
    precision: str | None = None

    @staticmethod
    def current(*, product: bool = False) -> Settings:
        """The current settings: the same object while they are the same.

        Args:
            product: whether an operator is a matrix product or a convolution.

        Raises:
            NotFoundError: two interfaces of torch have set the precision of products, which torch
                does not tell then.
        """
        try:
            precision = _get_precision() if product else None
        except RuntimeError:
            raise NotFoundError from None
        return _settings(_get_threads(), bool(_get_onednn()), precision)

    def are_set(self) -> bool:
        """Whether operators run under them now, without a history and without autocast."""
        return (
            not _is_grad_enabled()
            and _get_threads() == self.threads
            and _get_onednn() == self.onednn
            and not _is_any_autocast_enabled()
            and (self.precision is None or _get_precision() == self.precision)
        )

    def apply(self) -> None:
        """Set them for the calling thread."""
        if _get_threads() != self.threads:
            torch.set_num_threads(self.threads)
        if _get_onednn() != self.onednn:
            _set_onednn(self.onednn)
        if self.precision is not None and _get_precision() != self.precision:
            _set_precision(self.precision)


@lru_cache(maxsize=64)
def _settings(threads: int, onednn: bool, precision: str | None) -> Settings:
    return Settings(threads, onednn, precision)


class SameBits:
    """A context in which operators run under ``settings``, without a history.

    It changes only settings that differ: in backward, usually none does.
    """

    __slots__ = ("_autocast", "_had_grad", "_outside", "_settings")

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __enter__(self) -> None:
        self._outside = Settings.current(product=self._settings.precision is not None)
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
