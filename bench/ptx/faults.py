"""Errors of the interpreter: a program does something that no program may do."""

from __future__ import annotations


class UnsupportedError(Exception):
    """The PTX holds an opcode, an operand or a directive that the interpreter does not know."""


class MemoryFaultError(Exception):
    """An access is out of bounds or misaligned."""


class DeadlockError(Exception):
    """No thread of a block can go on, or the block takes too many steps."""


class UndefinedError(Exception):
    """The program does something that PTX leaves undefined."""
