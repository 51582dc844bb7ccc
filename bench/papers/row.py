"""One figure of a paper beside ours."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Row:
    """A published figure and ours; everything of ours is simulated.

    Attributes:
        system: whose.
        what: which quantity, with model and batch.
        unit: of both figures: ``%``, ``x``, ``GiB``, ``samples/s``, ``batch``, ``points``.
        published: as the paper gives it; None: it gives none.
        ours: simulated; None: not to be had here (``why`` says so).
        protocol: machine, batch, policy and definition.
        why: why the two differ, in words.
        details: more figures of the same cell, for the file.
    """

    system: str
    what: str
    unit: str
    published: float | None
    ours: float | None
    protocol: str
    why: str
    details: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Cell:
    """Work that makes some rows.

    Attributes:
        key: by which a file knows that it is done.
        run: does it.
    """

    key: str
    run: Callable[[], list[Row]]
