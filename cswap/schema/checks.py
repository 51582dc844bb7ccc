"""Checks of single values that all records share, with uniform error messages."""

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
"""The largest integer that the arrays hold (64 bits)."""

MOST_BYTES: Final = 1 << 48
"""Largest sum of the bytes of all tensors of a step. Multiples of it, such as the bytes moved in
both directions, still fit into `MOST_COUNT`."""

MOST_MEMORY: Final = 1 << 60
"""Largest number of bytes of a machine's memory, or of a budget."""

MOST_SECONDS: Final = 1e9
"""Largest time: about thirty years. Sums of such times, and quotients with any rate, are finite."""

MOST_RATE: Final = 1e30
LEAST_RATE: Final = 1e-6
"""Smallest rate in bytes or operations per second; `MOST_RATE` is the largest."""


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks that raise one class of errors; ``where`` names the field.

    Attributes:
        error: the class of the errors.

    >>> from cswap.errors import ConfigError
    >>> Checks(ConfigError).count("plan.budget_bytes", -1)
    Traceback (most recent call last):
    ...
    cswap.errors.ConfigError: plan.budget_bytes=-1: must be an integer >= 0.
    """

    error: type[ConfigError]

    def count(self, where: str, value: Any, least: int = 0, most: int = MOST_COUNT) -> int:
        """Check an integer against bounds; True and False are not integers here."""
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            bounds = f">= {least}" if most == MOST_COUNT else f"from {least} to {most}"
            raise self.error(f"{where}={shown(value)}: must be an integer {bounds}.")
        return value

    def number(
        self, where: str, value: Any, least: float = -LARGEST, most: float = LARGEST
    ) -> float:
        """Check a finite number against bounds; True and False are not numbers here."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{where}={shown(value)}: must be a number.")
        # Comparisons of integers with floats are exact: they do not overflow as conversions do.
        if not least <= value <= most:  # NaN is not between any two
            bounded = least > -LARGEST or most < LARGEST
            must = f"a number from {least:g} to {most:g}" if bounded else "a finite number"
            raise self.error(f"{where}={shown(value)}: must be {must}.")
        return value

    def seconds(self, where: str, value: Any) -> float:
        """Check a time in seconds, from 0 to `MOST_SECONDS`."""
        return self.number(where, value, 0.0, MOST_SECONDS)

    def text(self, where: str, value: Any) -> str:
        """Check that the value is text."""
        if not isinstance(value, str):
            raise self.error(f"{where}={shown(value)}: must be text.")
        return value

    def flag(self, where: str, value: Any) -> bool:
        """Check that the value is True or False."""
        if not isinstance(value, bool):
            raise self.error(f"{where}={shown(value)}: must be true or false.")
        return value

    def one_of(self, where: str, value: Any, known: Iterable[str]) -> str:
        """Check that the value is one of the known words."""
        if not isinstance(value, str) or value not in known:
            raise self.error(f"{where}={shown(value)}: must be one of {', '.join(known)}.")
        return value

    def items(self, where: str, value: Any) -> tuple[Any, ...]:
        """Check that the value is a list or a tuple; return its items."""
        if not isinstance(value, list | tuple):
            raise self.error(f"{where}={shown(value)}: must be a list.")
        return tuple(value)

    def mapping(self, where: str, value: Any, of: str = "") -> dict[str, Any]:
        """Check an object whose keys are text; ``of`` names its values in the message."""
        if not isinstance(value, Mapping):
            must = f"must map names to {of}" if of else "must be an object"
            raise self.error(f"{where}={shown(value)}: {must}.")
        for name in value:
            if not isinstance(name, str):
                raise self.error(f"{where}: the name {shown(name)} must be text.")
        return dict(value)

    def numbers(self, where: str, value: Any) -> dict[str, float]:
        """Check an object that maps names to finite numbers."""
        found = self.mapping(where, value, "numbers")
        return {k: self.number(f"{where}[{shown(k)}]", v) for k, v in found.items()}

    def record(self, where: str, value: Any, kind: type) -> dict[str, Any]:
        """Check an object against a dataclass: no unknown field, every required field is there."""
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
