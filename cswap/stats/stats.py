"""`Stats`: a snapshot of an engine's counts, and notes on why little memory was saved."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cswap.advisor.rates import HOOKS_S, PRICES_S_PER_BYTE
from cswap.display import visible
from cswap.stats.keep_reasons import NOT_WORTH_IT, REASONS, SMALL, SUBCLASS, Reason
from cswap.stats.steps import PARAMETER
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
        subclasses: number of tensors that stayed for the reason "subclass", by class.
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
        recent_peak_bytes: maximum of ``step_peak_bytes`` over the last 16 steps.
        steps: number of steps of which cswap saw a tensor, and whose backward has begun. The last
            of them is meant by ``step_...``, without parameters: a step begins with a forward,
            after a backward, and ends where the next one begins. Of several forwards before a
            backward, those are left out of which the engine holds nothing: all tensors stay.
        step_peak_bytes: most bytes of device memory that saved tensors held at a time; on a CPU,
            with their encodings. Tensors that stay unwatched (small ones, those that stay as they
            did in the step before) count as if they were there then.
        step_plain_bytes: bytes that these tensors hold without cswap, when forward has ended. As in
            ``packed``, small ones in modules that run without hooks are not among them, nor what
            modules that run again as a whole (``recompute``) would save.
        step_gained_bytes: bytes by which tensors that left took less than without cswap; negative:
            they took more.
        step_encoded_bytes: bytes of the encodings.
        step_kept_by_reason: tensors that stayed on the device, by reason.
        step_kept_bytes_by_reason: bytes of these tensors. One that is saved twice counts twice, but
            for those that a goal's plan keeps.
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
    subclasses: dict[str, int] = field(default_factory=dict)
    raw_bytes: int = 0
    encoded_bytes: int = 0
    by_codec: dict[str, CodecStats] = field(default_factory=dict)
    device_bytes: int = 0
    host_bytes: int = 0
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    peak_saved_bytes: int = 0
    recent_peak_bytes: int = 0
    steps: int = 0
    step_peak_bytes: int = 0
    step_plain_bytes: int = 0
    step_gained_bytes: int = 0
    step_encoded_bytes: int = 0
    step_kept_by_reason: dict[str, int] = field(default_factory=dict)
    step_kept_bytes_by_reason: dict[str, int] = field(default_factory=dict)
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

    def gain(self) -> str:
        """Bytes of the last step's saved tensors, at their peak and without cswap, in a line."""
        peak, plain = self.step_peak_bytes, self.step_plain_bytes
        if not self.steps:
            return "no step yet"
        if not plain:
            return "the last step saved nothing but parameters"
        percent = round(100 * (plain - peak) / plain)
        more = "more" if percent < 0 else "less"
        return (
            f"the last step held {show_bytes(peak)} of saved tensors at its peak, "
            f"{show_bytes(plain)} without cswap: {abs(percent)} % {more}"
        )

    def __str__(self) -> str:
        rows = [(k, _show(k, v)) for k, v in self.to_dict().items() if not isinstance(v, dict)]
        sizes = {why: show_bytes(n) for why, n in sorted(self.kept_bytes_by_reason.items())}
        rows += [(f"kept: {why}", f"{self.kept_by_reason[why]}, {n}") for why, n in sizes.items()]
        rows += [(f"subclass {name}", str(n)) for name, n in sorted(self.subclasses.items())]
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

ONLY_PARAMETERS: Final = (
    "Autograd has saved nothing but parameters, buffers, their views and casts: they exist anyway "
    "and are never moved."
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
        No lines if the gain is a quarter or more of the saved tensors' bytes. Bytes are those of
        the last step, without parameters; before the first backward, all so far.
    """
    if not stats.packed:
        return [NOTHING]
    seen = _seen(stats)
    if not seen.whole:
        return [ONLY_PARAMETERS]
    if seen.gained >= LITTLE * seen.whole:
        return []
    gained = max(0, seen.gained)  # `Stats.gain` says how much more it was
    head = (
        f"Little was saved: {show_bytes(gained)} of {show_bytes(seen.whole)} "
        f"({gained / seen.whole:.0%}). Most of "
    )
    reasons = sorted(_reasons(seen, stats), reverse=True)
    shown = [(n, text) for n, text in reasons if n > WORTH_SAYING * seen.whole][:MOST_SHOWN]
    if not shown:
        return [head + "the rest is still on its way."]
    return [head + "the rest:", *(f"  {show_bytes(n)} {text}" for n, text in shown)]


class _Seen(NamedTuple):
    """Bytes of the last step: saved, gained and encoded; number and bytes of those that stay."""

    whole: int
    gained: int
    encoded: int
    n_kept: dict[str, int]
    kept: dict[str, int]


def _seen(stats: Stats) -> _Seen:
    if stats.steps:
        return _Seen(
            stats.step_plain_bytes,
            stats.step_gained_bytes,
            stats.step_encoded_bytes,
            stats.step_kept_by_reason,
            stats.step_kept_bytes_by_reason,
        )
    raw, encoded, kept = stats.raw_bytes, stats.encoded_bytes, stats.kept_bytes_by_reason
    gained = gained_bytes(raw, encoded, host_is_device=stats.host_is_device)
    whole = raw + sum(kept.values()) - kept.get(PARAMETER, 0)
    return _Seen(whole, gained, encoded, stats.kept_by_reason, kept)


def _reasons(seen: _Seen, stats: Stats) -> Iterator[tuple[int, str]]:
    # Pairs of bytes and text. Parameters are not named: of each, all uses in a step are counted.
    for name, nbytes in seen.kept.items():
        if name == PARAMETER:
            continue
        reason, what = REASONS[name], name
        if name == SMALL and nbytes < seen.n_kept.get(name, 0) * _least_bytes(stats):
            mean = show_bytes(nbytes / seen.n_kept[name])
            reason = Reason(f"{reason.why}, {mean} on average", NOT_WORTH_IT)
        elif name == SUBCLASS and stats.subclasses:
            most = sorted(stats.subclasses, key=lambda one: (-stats.subclasses[one], one))
            what = f"{name} ({visible(', '.join(most[:MOST_SHOWN]))})"
        yield nbytes, f"kept: {what} ({reason.why}). Remedy: {reason.remedy}."
    if stats.host_is_device and seen.encoded:
        ratio = (seen.encoded + seen.gained) / seen.encoded
        why = f"ratio {ratio:.2f}; on a CPU the gain is only the bytes that codecs remove"
        remedy = 'lossy="int8"; see engine.explain() for ratios'
        yield seen.encoded, f"encoded ({why}). Remedy: {remedy}."


def _least_bytes(stats: Stats) -> float:
    # Of a tensor whose bytes are worth the time of the hooks alone.
    kind = "cpu" if stats.host_is_device else "cuda"
    return HOOKS_S[kind] / PRICES_S_PER_BYTE[kind]
