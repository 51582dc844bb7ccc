"""Figures without a display: matplotlib, if it is installed."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from cswap.errors import UnsupportedError
from cswap.install_hint import to_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            f"pictures need matplotlib ({error}): {to_install('bench')}"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png_of(figure: Figure) -> bytes:
    """The figure as a PNG."""
    return image_of(figure, "png")


def image_of(figure: Figure, kind: str, texts: dict[str, str] | None = None) -> bytes:
    """The figure as a file.

    Args:
        figure: to be written.
        kind: "png" or "svg".
        texts: kept in the file by name, and not shown.
    """
    out = io.BytesIO()
    figure.savefig(out, dpi=120, format=kind, metadata=texts)
    return out.getvalue()
