"""Chrome traces: JSON that chrome://tracing and https://ui.perfetto.dev show.

Callers have seconds; the format has microseconds. Source: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    Event = dict[str, Any]

_US: Final = 1e6


def lane(process: int, number: int, name: str) -> Event:
    """The name of a lane, in which spans are drawn."""
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": name}}


def span(
    process: int,
    number: int,
    name: str,
    start_s: float,
    end_s: float,
    args: Mapping[str, Any],
    category: str = "",
) -> Event:
    """A job in a lane, with the arguments that a click shows."""
    event = {
        "ph": "X",
        "name": name,
        "ts": _US * start_s,
        "dur": _US * (end_s - start_s),
        "pid": process,
        "tid": number,
        "args": args,
    }
    return {**event, "cat": category} if category else event


def count(process: int, name: str, at_s: float, args: Mapping[str, int]) -> Event:
    """Numbers that hold from a time until the next count of the same name."""
    return {"ph": "C", "name": name, "ts": _US * at_s, "pid": process, "args": args}


def document(events: list[Event], about: Mapping[str, Any]) -> dict[str, Any]:
    """The trace as plain data.

    Args:
        events: in any order.
        about: facts on the trace as a whole.
    """
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def save(trace: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a trace.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(json.dumps(trace) + "\n", encoding="utf-8")
