"""One figure of a paper beside ours."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

ONE: Final = "one figure"
MEAN: Final = "mean"
MAXIMUM: Final = "maximum"
UP_TO: Final = "up to"
BAR: Final = "bar, read off"
NONE: Final = "-"
"""Words for the kind of a published figure (`Row.published_is`)."""

SIMULATED: Final = "simulated"
"""The usual kind of ours (`Row.ours_is`)."""


@dataclass(frozen=True, slots=True)
class Row:
    """A published figure and ours.

    Attributes:
        system: the paper's system.
        what: the quantity, with model and batch.
        unit: unit of both: ``%``, ``x``, ``GB``, ``GiB``, ``samples/s``, ``batch``, ``rho``.
        published: the paper's figure; None: the paper gives none.
        ours: our figure; None: it cannot be had here (``why`` gives the reason).
        protocol: machine, batch, policy and definition.
        why: why the two differ, in words.
        published_is: the kind of the published figure: a mean, a maximum, "up to", one figure.
        ours_is: the kind of ours, and whether it is simulated, computed or measured.
        fitted: values of ours that were chosen to come near a published figure; "" for none.
        details: more figures of the same cell, for the file.
    """

    system: str
    what: str
    unit: str
    published: float | None
    ours: float | None
    protocol: str
    why: str
    published_is: str = ONE
    ours_is: str = SIMULATED
    fitted: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Cell:
    """Work that makes some rows.

    Attributes:
        key: key under which a file stores the finished work.
        run: does it.
    """

    key: str
    run: Callable[[], list[Row]]
