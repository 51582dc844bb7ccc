"""Texts for the reasons why saved tensors stay on the device.

The engine counts reasons by name while it runs. This table gives their texts when they are shown.
`docs/troubleshooting.md` has a section for each reason.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Reason(NamedTuple):
    """One name in `Stats.kept_by_reason`.

    Attributes:
        why: the reason in words.
        remedy: a change by which the tensor is swapped.
    """

    why: str
    remedy: str


SMALL: Final = "small"
SUBCLASS: Final = "subclass"

NOT_WORTH_IT: Final = "none: to swap one takes more time than its bytes are worth"
"""Remedy of small tensors for which a lower ``min_bytes`` changes nothing."""

REASONS: Final[dict[str, Reason]] = {
    SMALL: Reason("below min_bytes", "lower min_bytes="),
    "parameter": Reason(
        "weights, buffers, their views and casts", "none: they exist anyway and are never moved"
    ),
    "does_not_pay": Reason(
        "no admitted codec is worth its time", 'allow lossy="int8", or name codec='
    ),
    "budget": Reason(
        "among the newest tensors, which budget= or keep_last= keeps",
        "lower budget= or keep_last=",
    ),
    "wanted_early": Reason(
        "over a link, backward asked before it was out",
        "usual for the tensors saved last; if it is most of them, name a faster codec=",
    ),
    "excluded": Reason(
        "its module or operator is excluded, or not included", "change exclude= or include="
    ),
    "plan": Reason("the plan keeps it", "plan for a smaller budget, or install without plan="),
    "goal": Reason(
        "the memory goal leaves room for it", "ask for less with fit=, or for more time, slowdown="
    ),
    "host_limit": Reason("no room in host memory", "raise host_limit=, or name a spill_dir="),
    "disk": Reason("the disk tier was full or could not be written", "free the disk"),
    "layout": Reason(
        "sparse, quantised, or of a dtype that no codec knows", "none: these are not swapped"
    ),
    SUBCLASS: Reason(
        "of a tensor subclass: an input, or one that does not say what its parts are",
        "none: these are not swapped",
    ),
    "saved_again": Reason(
        "a mask, a table or an input that several layers save: one copy serves all of them",
        "none: an encoding would come on top of the tensor's own memory",
    ),
    "unproven": Reason(
        "expected to be one that backward does not read, by the step before",
        "none: such tensors go the usual way from the next step on",
    ),
    "outlives": Reason(
        "the program holds it while backward runs: a batch, an output",
        "none, or delete the program's reference before backward",
    ),
    "wrapped": Reason("inside of vmap, jvp or another function transform", "none"),
    "storage": Reason(
        "its storage is smaller than its sizes need, as under FSDP", "none: its memory is not there"
    ),
    "device": Reason("neither on a CPU nor on CUDA", "none: other devices are not swapped"),
    "tracing": Reason(
        "saved while operators were being traced", "none: the traced code saves its tensors later"
    ),
    "capturing": Reason(
        "saved while a CUDA graph was being captured", "train without capturing a graph"
    ),
    "memory": Reason("no memory to encode into", "smaller batches, or a codec with less scratch"),
    "raw:encode": Reason("even copying it failed", "see the log of 'cswap'"),
}
"""Every reason that the engine counts, by name."""
