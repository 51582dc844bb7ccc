"""Why a saved tensor stays where it is, in words; and what that means for memory.

The engine counts reasons by name while it runs; words are found for them when somebody looks.
`docs/troubleshooting.md` has a section for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from cswap.engine.stats import show_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cswap.engine.stats import Stats


class Reason(NamedTuple):
    """One name in `Stats.kept_by_reason`.

    Attributes:
        why: in words.
        remedy: what to change for it to be swapped.
    """

    why: str
    remedy: str


REASONS: Final[dict[str, Reason]] = {
    "small": Reason("below min_bytes", "lower min_bytes=, if they are many"),
    "parameter": Reason(
        "weights, buffers, their views and casts", "none: they exist anyway and are never moved"
    ),
    "does_not_pay": Reason(
        "no codec admitted makes it small enough for its time", 'allow lossy="int8", or name codec='
    ),
    "budget": Reason(
        "among the newest, which budget= or keep_last= let stay", "lower budget= or keep_last="
    ),
    "wanted_early": Reason(
        "backward asked before its encode was done",
        "usual for what was saved last; if it is most, raise workers=",
    ),
    "excluded": Reason("its module is excluded, or not included", "change exclude= or include="),
    "plan": Reason("the plan keeps it", "plan for a smaller budget, or install without plan="),
    "host_limit": Reason("no room in host memory", "raise host_limit=, or name a spill_dir="),
    "disk": Reason(
        "the disk tier was full or could not be written", "raise spill_limit=, or free the disk"
    ),
    "modified": Reason(
        "changed in place after it was saved", "replace the in-place operator, if it matters"
    ),
    "dropped": Reason(
        "let go before its encode was done", "none: no backward wanted it (use torch.no_grad())"
    ),
    "layout": Reason(
        "sparse, quantised, or of a dtype that no codec knows", "none: these are not swapped"
    ),
    "subclass": Reason("of a tensor subclass, such as DTensor", "none: these are not swapped"),
    "saved_again": Reason(
        "a mask, a table or an input that several layers save: one copy serves all of them",
        "none: an encoding would come on top of the tensor's own memory",
    ),
    "wrapped": Reason("inside of vmap, jvp or another function transform", "none"),
    "storage": Reason(
        "its storage is smaller than it says, as FSDP leaves it", "none: its memory is not there"
    ),
    "device": Reason("neither on a CPU nor on CUDA", "none: other devices are not swapped"),
    "tracing": Reason(
        "saved while operators were being traced", "none: what the traced code saves later counts"
    ),
    "capturing": Reason(
        "saved while a CUDA graph was being captured", "train without capturing a graph"
    ),
    "memory": Reason("no memory to encode into", "smaller batches, or a codec with less scratch"),
    "raw:encode": Reason("even copying it failed", "see the log of 'cswap'"),
}
"""Every reason that the engine counts, by name."""

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
