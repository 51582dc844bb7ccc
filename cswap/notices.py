"""Options that are valid and yet mean nothing here: said in the log, with the nearest name."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from cswap.display import MOST_SHOWN, shown
from cswap.log import log
from cswap.schema.tensor import DTYPES
from cswap.selectors import of_modules, unmatched

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from cswap.config import SwapConfig

MOST_TOLD: Final = 3
"""Selectors of one option that are named."""

MOST_NAMES: Final = 2000
"""Modules among which the nearest name is looked for."""


def tell_of_options(config: SwapConfig, model: nn.Module | None) -> None:
    """Log which options have no effect on this model.

    Args:
        config: of the engine.
        model: that it is installed on; None: everything that the thread saves.
    """
    _tell_of_budget(config, model)
    paths = dict(() if model is None else model.named_modules())
    for name, selectors in _selectors(config):
        if model is None:
            log.warning("%s has no effect without a model: call install(model, ...).", name)
        else:
            _tell_of_selectors(name, selectors, paths)


def _tell_of_budget(config: SwapConfig, model: nn.Module | None) -> None:
    kinds = set() if model is None else {x.device.type for x in model.parameters()}
    if config.budget is not None and kinds == {"cpu"}:
        log.warning(
            "budget=%s on a CPU: host memory is device memory there, so tensors within the budget "
            "stay that codecs would make smaller, and no others gain. Remedy: fit=, or no budget.",
            config.budget,
        )


def _selectors(config: SwapConfig) -> Iterator[tuple[str, tuple[str | type, ...]]]:
    for name in ("exclude", "include"):
        if found := of_modules(getattr(config, name)):
            yield name, tuple(found)
    if isinstance(config.codec, dict):
        dtypes = {*DTYPES, *(f"torch.{dtype}" for dtype in DTYPES)}
        names = [k for k in config.codec if isinstance(k, str) and k not in dtypes]
        globs = tuple(of_modules(names))
        if globs:
            yield "codec", globs


def _tell_of_selectors(
    name: str, selectors: Iterable[str | type], paths: dict[str, nn.Module]
) -> None:
    chosen = list(selectors)
    kinds = {type(module).__name__ for module in paths.values()}
    lost = unmatched((s for s in chosen if isinstance(s, str)), paths.keys())
    told = [f"{name}={shown(glob)} matches no module.{_hint(glob, paths, kinds)}" for glob in lost]
    told += [
        f"{name}={shown(kind.__name__)}: the model has no module of that class."
        for kind in chosen
        if isinstance(kind, type) and not any(isinstance(m, kind) for m in paths.values())
    ]
    for line in told[:MOST_TOLD]:
        log.warning("%s", line)
    if len(told) > MOST_TOLD:
        log.warning("%s: %d more match no module.", name, len(told) - MOST_TOLD)


def _hint(glob: str, paths: Iterable[str], kinds: set[str]) -> str:
    if glob in kinds:
        return f" {glob} is a class: name the class itself, without quotation marks."
    known = [*list(paths)[:MOST_NAMES], *DTYPES]
    close = get_close_matches(glob[:MOST_SHOWN], known, n=1)
    return f" Did you mean {shown(close[0])}?" if close else ""
