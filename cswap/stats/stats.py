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
        kept_by_reason: of these, left where they were, by reason (`cswap.stats.keep_reasons`).
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
"""Share of what autograd saved that has to be gained; below that, notes say why it was not."""

MOST_SHOWN: Final = 3
"""Reasons that notes name at most."""

WORTH_SAYING: Final = 0.05
"""Share of the whole below which a reason is not named."""


def gained_bytes(stats: Stats) -> int:
    """Bytes that swapping took off the device, over all steps.

    Where host memory is the device's own, what codecs took off; else all that was moved out.
    """
    return stats.raw_bytes - (stats.encoded_bytes if stats.host_is_device else 0)


def notes(stats: Stats) -> list[str]:
    """Why little memory was saved, and what to do about it; a line each.

    Args:
        stats: of an engine.

    Returns:
        Nothing if a quarter or more of the bytes that could be saved was. Bytes are sums over all
        steps; parameters are not among what could be saved.
    """
    if not stats.packed:
        return [NOTHING]
    kept = stats.kept_bytes_by_reason
    whole = stats.raw_bytes + sum(kept.values()) - kept.get("parameter", 0)
    gained = gained_bytes(stats)
    if whole and gained >= LITTLE * whole:
        return []
    share = gained / whole if whole else 0.0
    head = f"Little was saved: {show_bytes(gained)} of {show_bytes(whole)} ({share:.0%}). Most of "
    reasons = sorted(_reasons(stats, whole), reverse=True)
    shown = [(n, text) for n, text in reasons if n > WORTH_SAYING * whole][:MOST_SHOWN]
    if not shown:
        return [head + "it is still on its way."]
    return [head + "the rest:", *(f"  {show_bytes(n)} {text}" for n, text in shown)]


def _reasons(stats: Stats, whole: int) -> Iterator[tuple[int, str]]:
    # Bytes, and what is said of them. Of parameters only where they are most of what is there.
    for name, nbytes in stats.kept_bytes_by_reason.items():
        reason = REASONS[name]
        if name == "parameter" and nbytes <= whole:
            continue
        yield nbytes, f"kept: {name} ({reason.why}). Remedy: {reason.remedy}."
    if stats.host_is_device and stats.encoded_bytes:
        why = f"ratio {stats.ratio:.2f}; on a CPU only what codecs take off is gained"
        remedy = 'lossy="int8"; see engine.explain() for ratios'
        yield stats.encoded_bytes, f"encoded ({why}). Remedy: {remedy}."
