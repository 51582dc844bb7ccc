"""The logger of cswap, ``logging.getLogger("cswap")``: what it passes on has no control characters.

Warnings name modules, files and other libraries' errors. Whoever logs need not think of that.
"""

from __future__ import annotations

import logging
from typing import Final

from cswap.display import visible, visible_lines

_PLAIN: Final = logging.Formatter()


class _Visible(logging.Filter):
    """Replaces a record's message and traceback by their visible forms, where those differ."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if not message.isprintable():
            record.msg, record.args = visible(message), None
        if record.exc_info:
            record.exc_text = visible_lines(_PLAIN.formatException(record.exc_info))
        return True


log: Final = logging.getLogger("cswap")
log.addFilter(_Visible())
