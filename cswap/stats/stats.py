"""`Stats`: a snapshot of an engine's counts, and notes on why little memory was saved."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from cswap.display import visible
from cswap.stats.keep_reasons import REASONS
from cswap.units import show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True)
class CodecStats:
    """Totals of one codec.

    Attributes:
        count: encodes.
        raw: bytes before encoding.
        encoded: bytes after encoding.
        encode_s: seconds that encodes took on the device; on a CPU, seconds of one core.
        decode_s: the same for decodes.
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
    """A snapshot of an engine's counts. Prints as a table.

    Attributes:
        packed: tensors that autograd saved, but for parameters and small ones in modules that run
            without hooks, since nothing leaves there.
        swapped: packed tensors that were encoded and moved out.
        deduplicated: packed tensors served by a tensor already held (same storage and version).
        kept_by_reason: packed tensors that stayed on the device, by reason
            (`cswap.stats.keep_reasons`).
        kept_bytes_by_reason: bytes of these tensors; a tensor that is saved twice counts twice.
        raw_bytes: bytes of the swapped tensors before encoding.
        encoded_bytes: bytes of the swapped tensors after encoding.
        by_codec: totals per codec.
        device_bytes: bytes of device memory held now for saved tensors. Not counted are small ones,
            parameters, and tensors that stay as they did in the step before.
        host_bytes: bytes of host memory held now for encodings.
        peak_device_bytes: maximum of ``device_bytes``, and of the tensors that stay as before.
        peak_host_bytes: maximum of ``host_bytes``.
        peak_saved_bytes: maximum of their sum, likewise, over all steps: the first ones, in which
            choices are learned, may hold more than a step without cswap.
        step_gained_bytes: bytes of device memory by which the saved tensors of the last step whose
            backward has ended took less than without cswap; negative: they took more.
        disk_bytes: bytes on disk now.
        peak_disk_bytes: maximum of ``disk_bytes``.
        host_is_device: whether tensors were swapped on a CPU, where host memory is also the
            device's memory. There the gain is only the bytes that codecs remove.
        prefetch_hits: unpacks whose tensor was already decoded, or on its way.
        prefetch_misses: unpacks that had to fetch their tensor.
        exposed_s: seconds that the computing thread spent encoding, decoding or waiting for them,
            plus seconds that a GPU's computation waited for swaps.
        compile_s: seconds spent compiling kernels or loading them from the disk cache. No other
            figure includes them.
        guard_checks: modules whose lossy gradients were compared with exact gradients.
        guard_worst_error: largest relative error found; infinite if a gradient was not finite.
        guard_worst_cosine: smallest cosine between exact and lossy gradients.
        guard_fallbacks: classes of tensors that moved to a milder codec: "Linear: int4 -> fp8".
        fallbacks: number of failures after which a slower, correct path was taken.
        fallbacks_by_reason: the same number for each part that failed.
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
    step_gained_bytes: int = 0
    disk_bytes: int = 0
    peak_disk_bytes: int = 0
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
        """Raw bytes over encoded bytes of the swapped tensors; 1.0 if none was swapped."""
        return self.raw_bytes / self.encoded_bytes if self.encoded_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**dataclasses.asdict(self), "ratio": self.ratio}

    def notes(self) -> list[str]:
        """Reasons and remedies if little memory was saved, largest first; else empty."""
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


def _show(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return show_bytes(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


NOTHING: Final = (
    "Autograd has saved nothing under these hooks: was forward run after install, in this thread, "
    "with gradients enabled?"
)

LITTLE: Final = 0.25
"""If the gain is below this share of the saved tensors' bytes, notes give the reasons."""

MOST_SHOWN: Final = 3
"""The largest number of reasons that notes name."""

WORTH_SAYING: Final = 0.05
"""A reason for less than this share of the bytes is not named."""


def gained_bytes(raw: int, encoded: int, *, host_is_device: bool) -> int:
    """Bytes by which swapping reduces device memory.

    On a CPU, host memory is device memory: only the bytes that codecs removed count. Elsewhere all
    bytes that were moved out count.

    Args:
        raw: bytes of the swapped tensors.
        encoded: bytes of their encodings.
        host_is_device: see `Stats`.
    """
    return raw - encoded if host_is_device else raw


def notes(stats: Stats) -> list[str]:
    """Reasons why little memory was saved, each with a remedy; one line per reason.

    Args:
        stats: the statistics of an engine.

    Returns:
        No lines if the gain is a quarter or more of the saved tensors' bytes. Bytes are sums over
        all steps, without parameters.
    """
    if not stats.packed:
        return [NOTHING]
    kept = stats.kept_bytes_by_reason
    whole = stats.raw_bytes + sum(kept.values()) - kept.get("parameter", 0)
    gained = gained_bytes(stats.raw_bytes, stats.encoded_bytes, host_is_device=stats.host_is_device)
    if whole and gained >= LITTLE * whole:
        return []
    share = gained / whole if whole else 0.0
    head = f"Little was saved: {show_bytes(gained)} of {show_bytes(whole)} ({share:.0%}). Most of "
    reasons = sorted(_reasons(stats, whole), reverse=True)
    shown = [(n, text) for n, text in reasons if n > WORTH_SAYING * whole][:MOST_SHOWN]
    if not shown:
        return [head + "the rest is still on its way."]
    return [head + "the rest:", *(f"  {show_bytes(n)} {text}" for n, text in shown)]


def _reasons(stats: Stats, whole: int) -> Iterator[tuple[int, str]]:
    # Pairs of bytes and text. Parameters are named only if they are more than all other bytes.
    for name, nbytes in stats.kept_bytes_by_reason.items():
        reason = REASONS[name]
        if name == "parameter" and nbytes <= whole:
            continue
        yield nbytes, f"kept: {name} ({reason.why}). Remedy: {reason.remedy}."
    if stats.host_is_device and stats.encoded_bytes:
        why = f"ratio {stats.ratio:.2f}; on a CPU the gain is only the bytes that codecs remove"
        remedy = 'lossy="int8"; see engine.explain() for ratios'
        yield stats.encoded_bytes, f"encoded ({why}). Remedy: {remedy}."
