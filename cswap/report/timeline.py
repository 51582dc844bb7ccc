"""`cswap report`: a recorded timeline as a table by module.

The file is a Chrome trace: https://ui.perfetto.dev draws it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

from cswap.display import shown
from cswap.errors import ConfigError
from cswap.schema.checks import MOST_BYTES, MOST_SECONDS, Checks
from cswap.schema.reading import read_object
from cswap.stats.step_trace import FORMAT, TRACKS, VERSION

NAMES: Final = ("encode", "decode", "copy out", "copy in", "wait")
"""Of events that last."""

COLUMNS: Final = ("saved in", "tensors", "MiB", "encode ms", "decode ms", "copies ms", "waited ms")

MOST_US: Final = 1e6 * MOST_SECONDS

_CHECK: Final = Checks(ConfigError)


@dataclass(frozen=True, slots=True)
class Recording:
    """A timeline that was read.

    Attributes:
        events: of Chrome's trace format.
        block_us: microseconds of the block in which it was recorded; None: an older file.
    """

    events: list[dict[str, Any]]
    block_us: float | None = None

    @property
    def spans(self) -> list[dict[str, Any]]:
        """The events that last."""
        return [event for event in self.events if event["ph"] == "X"]

    @property
    def swapping_us(self) -> float:
        """Microseconds from the first to the last swap event."""
        spans = self.spans
        begin: float = min(event["ts"] for event in spans)
        end: float = max(event["ts"] + event["dur"] for event in spans)
        return end - begin


@dataclass(slots=True)
class ModuleTotals:
    """Totals of one module's tensors, in seconds and bytes."""

    tensors: int = 0
    nbytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    copy_s: float = 0.0
    wait_s: float = 0.0


def load(path: str | os.PathLike[str]) -> Recording:
    """Read a file that `Timeline.save` wrote.

    Raises:
        ConfigError: the file cannot be read, has another format, or a field is wrong (the message
            names it).
    """
    where = f"file={shown(os.fspath(path))}"
    trace = read_object(path, "file")
    about = trace.get("otherData")
    found = (about.get("format"), about.get("version")) if isinstance(about, dict) else ()
    if found != (FORMAT, VERSION):
        raise ConfigError(f"{where}: not written by SwapEngine.trace (version {VERSION}).")
    events = _CHECK.items(f"{where}: traceEvents", trace.get("traceEvents"))
    for i, event in enumerate(events):
        _check_event(f"{where}: traceEvents[{i}]", event)
    recording = Recording(list(events), _block_us(where, trace["otherData"]))
    if not recording.spans:
        raise ConfigError(f"{where}: nothing was swapped while it was recorded.")
    return recording


def _block_us(where: str, about: dict[str, Any]) -> float | None:
    if "recorded_us" not in about:
        return None
    span = _CHECK.items(f"{where}: recorded_us", about["recorded_us"])
    _CHECK.count(f"{where}: len(recorded_us)", len(span), 2, 2)
    begin = _CHECK.number(f"{where}: recorded_us[0]", span[0], 0.0, MOST_US)
    return _CHECK.number(f"{where}: recorded_us[1]", span[1], begin, MOST_US) - begin


def _check_event(where: str, value: Any) -> None:
    event = _CHECK.mapping(where, value)
    kind = _CHECK.one_of(f"{where}.ph", event.get("ph"), ("X", "C", "M"))
    if kind == "M":
        return
    about = _CHECK.mapping(f"{where}.args", event.get("args"))
    _CHECK.number(f"{where}.ts", event.get("ts"), 0.0, MOST_US)
    if kind == "C":
        for name in ("device", "host"):
            _CHECK.count(f"{where}.args.{name}", about.get(name), most=MOST_BYTES)
        return
    _CHECK.number(f"{where}.dur", event.get("dur"), 0.0, MOST_US)
    _CHECK.count(f"{where}.tid", event.get("tid"), 1, len(TRACKS))
    _CHECK.text(f"{where}.args['saved in']", about.get("saved in"))
    if _CHECK.one_of(f"{where}.name", event.get("name"), NAMES) == "encode":
        _CHECK.count(f"{where}.args.bytes", about.get("bytes"), most=MOST_BYTES)


def by_module(recording: Recording) -> dict[str, ModuleTotals]:
    """Totals by the module, operator or node that saved the tensors, longest wait first."""
    found: dict[str, ModuleTotals] = {}
    for event in recording.spans:
        about, seconds = event["args"], event["dur"] / 1e6
        totals = found.setdefault(about["saved in"] or "-", ModuleTotals())
        if event["name"] == "wait":
            totals.wait_s += seconds
        elif event["name"] == "decode":
            totals.decode_s += seconds
        elif event["name"] == "encode":
            totals.encode_s += seconds
            totals.tensors += 1
            totals.nbytes += about["bytes"]
        else:
            totals.copy_s += seconds
    return dict(sorted(found.items(), key=lambda item: -item[1].wait_s))


def summary(recording: Recording) -> str:
    """One line: duration, busy time of each track, and the most bytes held."""
    spans, length_us = recording.spans, recording.block_us
    what = "Recorded"
    if length_us is None:
        length_us = recording.swapping_us
        what = "From the first to the last swap event"
    parts = []
    for i, track in enumerate(TRACKS, 1):
        busy_us = _union([(e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == i])
        if busy_us:
            verb = "swapped or waited" if track == "compute" else "busy"
            parts.append(f"{track} {verb} {busy_us / 1e3:.1f} ms ({busy_us / length_us:.0%})")
    held = (e["args"]["device"] + e["args"]["host"] for e in recording.events if e["ph"] == "C")
    peak = f"at most {max(held, default=0) / 2**20:.1f} MiB held"
    return f"{what}: {length_us / 1e3:.1f} ms; {', '.join(parts)}; {peak}."


def _union(spans: list[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def rows(recording: Recording) -> list[tuple[str, ...]]:
    """A row per module, of `COLUMNS`."""
    return [
        (
            module,
            str(t.tensors),
            f"{t.nbytes / 2**20:.2f}",
            *(f"{1e3 * seconds:.2f}" for seconds in (t.encode_s, t.decode_s, t.copy_s, t.wait_s)),
        )
        for module, t in by_module(recording).items()
    ]


def record(recording: Recording) -> dict[str, Any]:
    """JSON-ready: seconds of the recorded block and of its swap events, and a row per module.

    ``recorded_s`` is null for a file that an older cswap has written.
    """
    block_us = recording.block_us
    return {
        "recorded_s": None if block_us is None else block_us / 1e6,
        "swapping_s": recording.swapping_us / 1e6,
        "rows": [dict(zip(COLUMNS, row, strict=True)) for row in rows(recording)],
    }
