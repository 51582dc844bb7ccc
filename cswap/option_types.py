"""`SwapOptions`: the options of `SwapConfig` as keywords, for editors and type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping
    from typing import TypeAlias

    from cswap.config import CodecOption, Size
    from cswap.fit.schedule import Schedule
    from cswap.schema.plan import Plan

    Path: TypeAlias = str | os.PathLike[str]
    Selectors: TypeAlias = str | type[Any] | Collection[str | type[Any]]


class SwapOptions(TypedDict, total=False):
    """The options of `cswap.install` and `cswap.swapping`; `cswap.SwapConfig` describes each.

    It names the type of a dict of options, too: ``options: cswap.SwapOptions = {"lossy": "int8"}``.
    """

    codec: CodecOption
    lossy: str | float
    min_bytes: Size | None
    budget: Size | None
    host_limit: Size | None
    spill_dir: str | os.PathLike[str] | None
    keep_last: int
    exclude: Selectors
    include: Selectors
    recompute: Selectors
    seed: int
    remat: bool
    verify: bool
    guard_every: int
    guard_error: float
    policy: str
    plan: Plan | Mapping[str, Any] | Path | None
    fit: Size | None
    schedule: Schedule | Path | None
    slowdown: float | None
