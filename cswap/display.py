"""How names and values from outside are shown: nothing that steers a terminal, nothing endless."""

from __future__ import annotations

import reprlib
from typing import Final

MOST_SHOWN: Final = 200
"""Characters of a value that a message repeats."""


class _Short(reprlib.Repr):
    """``repr`` of bounded depth and length; of integers too, which Python may refuse to print."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxstring = self.maxother = MOST_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return repr(x) if bits <= 128 else f"<integer of {bits} bits>"


_SHORT: Final = _Short()


def visible(text: str) -> str:
    r"""The text with every character that does not print as itself written as its escape.

    Control characters (ESC among them), line breaks, marks that change the direction of writing
    and halves of surrogate pairs do not print. Names of modules, files and messages may hold any.

    >>> visible("conv\x1b[31m"), visible("a\nb"), visible("naïve 层")
    ('conv\\x1b[31m', 'a\\nb', 'naïve 层')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def visible_lines(text: str) -> str:
    r"""The same line by line; breaks between lines stay.

    >>> visible_lines("a\x1b\nb")
    'a\\x1b\nb'
    """
    return "\n".join(visible(line) for line in text.split("\n"))


def short(name: str) -> str:
    """A name as part of a message: visible, and cut.

    >>> len(short("x" * 1000))
    203
    """
    return visible(name if len(name) <= MOST_SHOWN else name[:MOST_SHOWN] + "...")


def shown(value: object) -> str:
    """A value as part of a message: its ``repr``, shortened where that is long or deep.

    >>> shown("zvc"), shown([1, [2, [3]]]), shown(10**5000)
    ("'zvc'", '[1, [2, [...]]]', '<integer of 16610 bits>')
    >>> len(shown(["x" * 1000] * 1000))
    203
    """
    return short(_SHORT.repr(value))
