"""The timeline of a simulated step: jobs and memory, as a Chrome trace (Perfetto) or a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cswap import chrome_trace
from cswap.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY
from cswap.plan.simulator.state import R_RECOMPUTE, RESOURCES

if TYPE_CHECKING:
    import os

    from cswap.plan.simulator.simulator import Record, Simulator

_ROWS: Final = {"compute": 0, "recompute": 0, "encode": 1, "decode": 1, "d2h": 2, "h2d": 3}
_LANES: Final = ("compute", "codec", "D2H", "H2D")
_COLOURS: Final = {
    "compute": GREY,
    "recompute": PURPLE,
    "encode": BLUE,
    "decode": GREEN,
    "d2h": ORANGE,
    "h2d": SKY,
}


@dataclass(frozen=True, slots=True)
class Span:
    """One job on one resource.

    Attributes:
        resource: ``compute``, ``recompute``, ``encode``, ``decode``, ``d2h`` or ``h2d``.
        name: name of the operator or tensor.
        index: index into the trace's operators (compute, recompute) or tensors.
        start_s: seconds since the step's start.
        end_s: seconds since the step's start.
        nbytes: raw bytes (encode, decode) or copied bytes (d2h, h2d); 0 for operators.
    """

    resource: str
    name: str
    index: int
    start_s: float
    end_s: float
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """One simulated step.

    Attributes:
        spans: jobs, sorted by start.
        times_s: times of the memory samples, ascending.
        device_bytes: device memory from each time until the next.
        host_bytes: host memory from each time until the next.
        budget_bytes: the device memory budget.
        name: names of the trace and the policy.
    """

    spans: tuple[Span, ...]
    times_s: tuple[float, ...]
    device_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    budget_bytes: int
    name: str = ""

    def chrome_trace(self) -> dict[str, Any]:
        """The timeline in the format of chrome://tracing and Perfetto; times in microseconds."""
        events = [chrome_trace.lane(0, row, lane) for row, lane in enumerate(_LANES)]
        for span in self.spans:
            about = {"index": span.index, "nbytes": span.nbytes}
            times = span.start_s, span.end_s
            row = _ROWS[span.resource]
            events.append(chrome_trace.span(0, row, span.name, *times, about, span.resource))
        for place, values in (("device", self.device_bytes), ("host", self.host_bytes)):
            for time_s, nbytes in zip(self.times_s, values, strict=True):
                about = {"bytes": nbytes}
                events.append(chrome_trace.count(0, f"{place} memory", time_s, about))
        return chrome_trace.document(events, {"name": self.name})

    def save_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write the Chrome trace as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        chrome_trace.save(self.chrome_trace(), path)

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draw device and host bytes over time, and the jobs of each resource.

        Raises:
            ImportError: matplotlib is not installed.
            OSError: the file cannot be written.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 6), layout="constrained")
        memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        _draw_memory(memory, self)
        _draw_lanes(lanes, self)
        figure.suptitle(f"{self.name} (simulated)" if self.name else "simulated step")
        canvas: Any = FigureCanvasAgg(figure)
        canvas.print_png(str(path))


def from_record(simulator: Simulator, record: Record, name: str = "") -> Timeline:
    """The timeline of a recorded run."""
    spans = [_span(simulator, *row) for row in record.spans.tolist()]
    samples = record.samples
    return Timeline(
        spans=tuple(sorted(spans, key=lambda span: span.start_s)),
        times_s=tuple(samples["now_s"].tolist()),
        device_bytes=tuple(samples["device_bytes"].tolist()),
        host_bytes=tuple(samples["host_bytes"].tolist()),
        budget_bytes=simulator.budget_bytes,
        name=name,
    )


def _span(simulator: Simulator, code: int, at: int, start_s: float, end_s: float) -> Span:
    resource, trace = RESOURCES[code], simulator.trace
    if code <= R_RECOMPUTE:
        operator = trace.operators[at]
        return Span(resource, operator.name or operator.kind, at, start_s, end_s)
    index = simulator.swappable[at]
    tensor = trace.tensors[index]
    return Span(resource, tensor.name or f"tensor {index}", index, start_s, end_s, tensor.nbytes)


def _draw_memory(axes: Any, timeline: Timeline) -> None:
    times = [*timeline.times_s, max((s.end_s for s in timeline.spans), default=0.0)]
    held = (("device", timeline.device_bytes, GREY), ("host", timeline.host_bytes, SKY))
    for label, values, colour in held:
        steps = [value / 2**30 for value in values]
        axes.step(
            times, [*steps, steps[-1] if steps else 0.0], where="post", color=colour, label=label
        )
    if timeline.budget_bytes <= 2 * max(timeline.device_bytes, default=0):
        axes.axhline(timeline.budget_bytes / 2**30, color=BLACK, ls="--", lw=1, label="budget")
    axes.set_ylabel("GiB")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")


def _draw_lanes(axes: Any, timeline: Timeline) -> None:
    for resource, row in _ROWS.items():
        bars = [(s.start_s, s.end_s - s.start_s) for s in timeline.spans if s.resource == resource]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=_COLOURS[resource], label=resource)
    axes.set_yticks(range(len(_LANES)), _LANES)
    axes.invert_yaxis()
    axes.set_xlabel("s")
    axes.legend(loc="upper right", ncols=3, fontsize="small")
