"""What commands ask of their options."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence


def names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """The comma-separated names of an option.

    Raises:
        typer.BadParameter: one of them is unknown, or there is none; exit code 2.

    >>> names("--models", "cnn, gpt", ("cnn", "vit", "gpt"))
    ['cnn', 'gpt']
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in found if name not in known]
    if unknown or not found:
        raise typer.BadParameter(
            f"{option} {text!r}: unknown {', '.join(unknown) or 'nothing'}; "
            f"known are {', '.join(known)}."
        )
    return found
