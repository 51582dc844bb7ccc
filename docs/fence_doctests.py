"""Griffe extension: doctests in docstrings become code blocks of the API page."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"(?m)^>>> .*(?:\n.+)*")


class FenceDoctests(griffe.Extension):
    """Put a fence around every run of lines that begins with a prompt."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of one module, class, function or attribute."""
        if obj.docstring is not None:
            text = _DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = text
