"""Checks of single values: what every record's fields have in common, with one way to say it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from cswap.display import short, shown

if TYPE_CHECKING:
    from cswap.errors import ConfigError

LARGEST: Final = sys.float_info.max

MOST_COUNT: Final = (1 << 63) - 1
"""What arrays hold: integers of 64 bits."""

MOST_BYTES: Final = 1 << 48
"""Of all tensors of a step. Encoded and moved both ways they still fit into `MOST_COUNT`."""

MOST_MEMORY: Final = 1 << 60
"""Bytes of a machine's memory, or of a budget."""

MOST_SECONDS: Final = 1e9
"""Thirty years. Sums of such times, and their quotients with any rate, are finite."""

MOST_RATE: Final = 1e30
LEAST_RATE: Final = 1e-6
"""Of bytes or operations per second."""


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks that raise one class of errors; ``where`` names the field.

    Attributes:
        error: the class.

    >>> from cswap.errors import ConfigError
    >>> Checks(ConfigError).count("plan.order[1]", -1)
    Traceback (most recent call last):
    ...
    cswap.errors.ConfigError: plan.order[1]=-1: must be an integer >= 0.
    """

    error: type[ConfigError]

    def count(self, where: str, value: Any, least: int = 0, most: int = MOST_COUNT) -> int:
        """An integer in these bounds; True and False are none."""
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            bounds = f">= {least}" if most == MOST_COUNT else f"from {least} to {most}"
            raise self.error(f"{where}={shown(value)}: must be an integer {bounds}.")
        return value

    def number(
        self, where: str, value: Any, least: float = -LARGEST, most: float = LARGEST
    ) -> float:
        """A finite number in these bounds; True and False are none."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{where}={shown(value)}: must be a number.")
        # Comparisons of integers with floats are exact: they do not overflow as conversions do.
        if not least <= value <= most:  # NaN is not between any two
            bounded = least > -LARGEST or most < LARGEST
            must = f"a number from {least:g} to {most:g}" if bounded else "a finite number"
            raise self.error(f"{where}={shown(value)}: must be {must}.")
        return value

    def seconds(self, where: str, value: Any) -> float:
        """A time."""
        return self.number(where, value, 0.0, MOST_SECONDS)

    def text(self, where: str, value: Any) -> str:
        """A text."""
        if not isinstance(value, str):
            raise self.error(f"{where}={shown(value)}: must be text.")
        return value

    def flag(self, where: str, value: Any) -> bool:
        """True or False."""
        if not isinstance(value, bool):
            raise self.error(f"{where}={shown(value)}: must be true or false.")
        return value

    def one_of(self, where: str, value: Any, known: Iterable[str]) -> str:
        """One of the known words."""
        if not isinstance(value, str) or value not in known:
            raise self.error(f"{where}={shown(value)}: must be one of {', '.join(known)}.")
        return value

    def items(self, where: str, value: Any) -> tuple[Any, ...]:
        """A list's items."""
        if not isinstance(value, list | tuple):
            raise self.error(f"{where}={shown(value)}: must be a list.")
        return tuple(value)

    def mapping(self, where: str, value: Any, of: str = "") -> dict[str, Any]:
        """An object whose keys are text; ``of``: what it maps names to, for the message."""
        if not isinstance(value, Mapping):
            must = f"must map names to {of}" if of else "must be an object"
            raise self.error(f"{where}={shown(value)}: {must}.")
        for name in value:
            if not isinstance(name, str):
                raise self.error(f"{where}: the name {shown(name)} must be text.")
        return dict(value)

    def numbers(self, where: str, value: Any) -> dict[str, float]:
        """Names and finite numbers."""
        found = self.mapping(where, value, "numbers")
        return {k: self.number(f"{where}[{shown(k)}]", v) for k, v in found.items()}

    def record(self, where: str, value: Any, kind: type) -> dict[str, Any]:
        """The object's fields, named as those of the dataclass ``kind``; all without a default."""
        found = self.mapping(where, value)
        known = {f.name: f for f in fields(kind)}
        for name in found:
            if name not in known:
                raise self.error(
                    f"{where}.{short(name)}: no such field. Known: {', '.join(known)}."
                )
        for name, field in known.items():
            required = field.default is MISSING and field.default_factory is MISSING
            if required and name not in found:
                raise self.error(f"{where}.{name}: is missing.")
        return found
