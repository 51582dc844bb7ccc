"""What the engine counts, and the snapshot of it that users see."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cswap.display import visible
from cswap.engine.handle import ON_DEVICE
from cswap.log import log

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cswap.engine.handle import Handle
    from cswap.engine.timeline import Timeline

_UNITS = ("B", "KiB", "MiB", "GiB")


@dataclass(slots=True)
class CodecStats:
    """Totals of one codec.

    Attributes:
        count: encodes.
        raw: bytes before.
        encoded: bytes after.
        encode_s: seconds of encodes on the device; on a CPU of one core.
        decode_s: the same of decodes.
    """

    count: int = 0
    raw: int = 0
    encoded: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.count} tensors, {show_bytes(self.raw)} -> {show_bytes(self.encoded)}, "
            f"encode {self.encode_s:.3f} s, decode {self.decode_s:.3f} s"
        )


@dataclass(frozen=True, slots=True)
class Stats:
    """Snapshot of what an engine has done. Prints as a table.

    Attributes:
        packed: tensors that autograd saved.
        swapped: of these, encoded and moved out.
        deduplicated: of these, served by a tensor already held (same storage, same version).
        kept_by_reason: of these, left where they were, by reason (`cswap.engine.reasons`).
        kept_bytes_by_reason: bytes of those; a tensor that is saved twice counts twice.
        raw_bytes: bytes of the swapped ones before encoding.
        encoded_bytes: and after.
        by_codec: totals per codec.
        device_bytes: bytes of device memory held now for saved tensors (small ones and parameters
            not counted).
        host_bytes: bytes of host memory held now for encodings.
        peak_device_bytes: most of the first at any time.
        peak_host_bytes: most of the second at any time.
        peak_saved_bytes: most of their sum at any time.
        disk_bytes: bytes on disk now.
        host_is_device: whether tensors were swapped where host memory is the device's own (a CPU):
            there only what codecs take off is gained.
        prefetch_hits: unpacks that found their tensor decoded, or under way.
        prefetch_misses: unpacks that had to fetch.
        exposed_s: seconds that the computing thread spent encoding, decoding or waiting for it, and
            that a GPU's computation waited for swaps.
        compile_s: seconds spent compiling kernels or loading them from the disk cache; in no other
            figure.
        guard_checks: modules whose gradients were compared, lossy against exact.
        guard_worst_error: largest relative error found; infinite if it was no number.
        guard_worst_cosine: smallest cosine between the two.
        guard_fallbacks: classes of tensors that went to a milder codec: "Linear: int4 -> fp8".
        fallbacks: times that a slower but correct path was taken after a failure.
        fallbacks_by_reason: the same, by what failed.
    """

    packed: int = 0
    swapped: int = 0
    deduplicated: int = 0
    kept_by_reason: dict[str, int] = field(default_factory=dict)
    kept_bytes_by_reason: dict[str, int] = field(default_factory=dict)
    raw_bytes: int = 0
    encoded_bytes: int = 0
    by_codec: dict[str, CodecStats] = field(default_factory=dict)
    device_bytes: int = 0
    host_bytes: int = 0
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    peak_saved_bytes: int = 0
    disk_bytes: int = 0
    host_is_device: bool = False
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    exposed_s: float = 0.0
    compile_s: float = 0.0
    guard_checks: int = 0
    guard_worst_error: float = 0.0
    guard_worst_cosine: float = 1.0
    guard_fallbacks: dict[str, int] = field(default_factory=dict)
    fallbacks: int = 0
    fallbacks_by_reason: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Raw bytes over encoded bytes of what was swapped; 1.0 if nothing was."""
        return self.raw_bytes / self.encoded_bytes if self.encoded_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**dataclasses.asdict(self), "ratio": self.ratio}

    def notes(self) -> list[str]:
        """Why little memory was saved, largest reason first, and what to do; empty if much was."""
        from cswap.engine.reasons import notes

        return notes(self)

    def __str__(self) -> str:
        rows = [(k, _show(k, v)) for k, v in self.to_dict().items() if not isinstance(v, dict)]
        sizes = {why: show_bytes(n) for why, n in sorted(self.kept_bytes_by_reason.items())}
        rows += [(f"kept: {why}", f"{self.kept_by_reason[why]}, {n}") for why, n in sizes.items()]
        rows += [(f"codec {name}", str(c)) for name, c in sorted(self.by_codec.items())]
        rows += [(f"guard: {what}", str(n)) for what, n in sorted(self.guard_fallbacks.items())]
        fallbacks = sorted(self.fallbacks_by_reason.items())
        rows += [(f"fallback: {what}", str(n)) for what, n in fallbacks]
        rows = [(visible(name), visible(value)) for name, value in rows]
        width = max(len(name) for name, _ in rows)
        return "\n".join([*(f"{name:<{width}}  {value}" for name, value in rows), *self.notes()])


def show_bytes(n: float) -> str:
    """Bytes for a reader.

    >>> show_bytes(1536)
    '1.5 KiB'
    """
    power = 0
    while n >= 1024 and power < len(_UNITS) - 1:
        n, power = n / 1024, power + 1
    return f"{n:.{min(power, 1)}f} {_UNITS[power]}"


def _show(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return show_bytes(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


class Counters:
    """The running counts behind `Stats`. Thread-safe.

    Attributes:
        kept: tensors left where they are, by reason: how many, and their bytes.
        host_is_device: see `Stats`.
        timeline: to draw what happens on; None: nobody looks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.kept: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.host_is_device = False
        self.fallbacks: Counter[str] = Counter()
        self.by_codec: defaultdict[str, CodecStats] = defaultdict(CodecStats)
        self.packed = 0
        self.deduplicated = 0
        self.swapped = 0
        self.prefetch_hits = 0
        self.prefetch_misses = 0
        self.exposed_s = 0.0
        self.compile_s = 0.0
        self.guard_checks = 0
        self.guard_worst_error = 0.0
        self.guard_worst_cosine = 1.0
        self.guard_fallbacks: Counter[str] = Counter()
        self.timeline: Timeline | None = None
        self._device_bytes = 0
        self._host_bytes = 0
        self._peak_device = 0
        self._peak_host = 0
        self._peak_saved = 0

    def keep(self, reason: str, nbytes: int) -> None:
        """A tensor was saved and left where it is."""
        with self._lock:
            self.packed += 1
            entry = self.kept[reason]
            entry[0] += 1
            entry[1] += nbytes

    def stay(self, reason: str, nbytes: int, by: int = 1) -> None:
        """A tensor that was packed stays where it is after all (or ``by=-1``: does not)."""
        with self._lock:
            entry = self.kept[reason]
            entry[0] += by
            entry[1] += by * nbytes

    def share(self) -> None:
        """A tensor was saved that the engine holds already."""
        with self._lock:
            self.packed += 1
            self.deduplicated += 1

    def admit(self, nbytes: int) -> None:
        """A tensor was saved and is the engine's now."""
        with self._lock:
            self.packed += 1
            self._device_bytes += nbytes
            self._note_peaks()
        self._draw()

    def hold(self, *, device: int = 0, host: int = 0) -> None:
        """The engine holds that many bytes more (or fewer)."""
        with self._lock:
            self._device_bytes += device
            self._host_bytes += host
            if device > 0 or host > 0:
                self._note_peaks()
        self._draw()

    def recount(self, handles: Iterable[Handle]) -> None:
        """After an interrupt: add up again the bytes of these handles, all that there are."""
        device = host = 0
        for handle in handles:
            device += handle.raw_nbytes if handle.state in ON_DEVICE else 0
            host += sum(part.host.numel() for part in handle.parts if part.host is not None)
        with self._lock:
            self._device_bytes, self._host_bytes = device, host

    def _draw(self) -> None:
        if self.timeline is not None:
            now_s = time.perf_counter()
            self.timeline.count(now_s, device=self._device_bytes, host=self._host_bytes)

    def _note_peaks(self) -> None:
        device, host = self._device_bytes, self._host_bytes
        if device > self._peak_device:
            self._peak_device = device
        if host > self._peak_host:
            self._peak_host = host
        if device + host > self._peak_saved:
            self._peak_saved = device + host

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the engine holds now."""
        return self._device_bytes

    def encoded(self, codec: str, raw: int, encoded: int, encode_s: float, *, whole: bool) -> None:
        """A part of a tensor is out; ``whole``: the last of it."""
        with self._lock:
            self.swapped += whole
            entry = self.by_codec[codec]
            entry.count += whole
            entry.raw += raw
            entry.encoded += encoded
            entry.encode_s += encode_s

    def decoded(self, codec: str, decode_s: float) -> None:
        """A part of a tensor was decoded."""
        with self._lock:
            self.by_codec[codec].decode_s += decode_s

    def compiled(self, seconds: float) -> None:
        """Kernels took that long to be compiled or loaded."""
        with self._lock:
            self.compile_s += seconds

    def fetched(self, *, hit: bool) -> None:
        """An unpack found its tensor ready (or under way), or did not."""
        with self._lock:
            self.prefetch_hits += hit
            self.prefetch_misses += not hit

    def fall_back(self, what: str, why: object, then: str = "taking a slower path") -> None:
        """Another, correct path is taken; said once in the log, counted always."""
        with self._lock:
            self.fallbacks[what] += 1
            first = self.fallbacks[what] == 1
        if first:
            log.warning("%s failed (%s); %s from here on.", what, why, then)

    def guarded(self, error: float, cosine: float) -> None:
        """A module's gradients were compared: their relative error, and their cosine."""
        with self._lock:
            self.guard_checks += 1
            self.guard_worst_error = max(self.guard_worst_error, error)
            self.guard_worst_cosine = min(self.guard_worst_cosine, cosine)

    def grow_milder(self, what: str) -> None:
        """A class of tensors went to a milder codec."""
        with self._lock:
            self.guard_fallbacks[what] += 1

    def exposed(self, seconds: float) -> None:
        """The computing thread encoded, decoded or waited that long."""
        with self._lock:
            self.exposed_s += seconds

    def snapshot(self, disk_bytes: int = 0) -> Stats:
        """The counts as they stand."""
        with self._lock:
            return Stats(
                packed=self.packed,
                swapped=self.swapped,
                deduplicated=self.deduplicated,
                kept_by_reason={why: n for why, (n, _) in self.kept.items() if n},
                kept_bytes_by_reason={why: nbytes for why, (n, nbytes) in self.kept.items() if n},
                raw_bytes=sum(c.raw for c in self.by_codec.values()),
                encoded_bytes=sum(c.encoded for c in self.by_codec.values()),
                by_codec={name: dataclasses.replace(c) for name, c in self.by_codec.items()},
                device_bytes=self._device_bytes,
                host_bytes=self._host_bytes,
                peak_device_bytes=self._peak_device,
                peak_host_bytes=self._peak_host,
                peak_saved_bytes=self._peak_saved,
                disk_bytes=disk_bytes,
                host_is_device=self.host_is_device,
                prefetch_hits=self.prefetch_hits,
                prefetch_misses=self.prefetch_misses,
                exposed_s=self.exposed_s,
                compile_s=self.compile_s,
                guard_checks=self.guard_checks,
                guard_worst_error=self.guard_worst_error,
                guard_worst_cosine=self.guard_worst_cosine,
                guard_fallbacks=dict(self.guard_fallbacks),
                fallbacks=sum(self.fallbacks.values()),
                fallbacks_by_reason=dict(self.fallbacks),
            )
