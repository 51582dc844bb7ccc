"""A goal's plan in a file, so that the next run begins as the last one ended: `Schedule`.

A schedule names tensors by module, dtype and order, as a plan does. So it holds for another run of
the same program, on any rank. Where a step saves other tensors, it is explored as without a
schedule. A schedule decides nothing about values: codecs that are not lossless have to be admitted
by the options again, and each tensor's dtype and tolerance are checked when it is encoded.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.advisor.candidates import lossy_by_tolerance
from cswap.advisor.live_costs import KEEP, REMAT
from cswap.codecs.registry import get_codec
from cswap.display import shown
from cswap.errors import ConfigError
from cswap.fit.problem import FitPlan
from cswap.fit.saved import Decided, Key
from cswap.schema.checks import MOST_BYTES, MOST_SECONDS, Checks
from cswap.schema.reading import read_object
from cswap.units import show_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from cswap.config import SwapConfig
    from cswap.fit.goal import Asked

KIND: Final = "cswap schedule"
VERSION: Final = 1

_OPTIONS: Final = ("codec", "lossy", "min_bytes", "exclude", "include", "recompute", "remat")
"""Options that decide which ways a tensor has."""

_CHECK: Final = Checks(ConfigError)
_BYTES: Final = ("peak_bytes", "under_way_bytes", "other_bytes")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A plan, and the goal, the device and the options that it was made for; prints as one line.

    Attributes:
        made_for: the goal, the kind of device, and options, each as text.
        plan: a decision for each saved tensor.
        other_bytes: of a step, that are no saved tensors'.
        plain_s: seconds of a step without cswap; None: not known.
    """

    made_for: Mapping[str, str]
    plan: FitPlan
    other_bytes: int
    plain_s: float | None

    def __str__(self) -> str:
        plan = self.plan
        ways = ", ".join(f"{count} {name}" for name, count in sorted(plan.counts.items()))
        text = f"schedule for fit={self.made_for.get('fit')}: {ways}"
        found = plan.searches or {"predicted": (plan.peak_bytes, plan.added_s)}
        for name, (peak_bytes, added_s) in found.items():
            text += f"; {name} {show_bytes(peak_bytes)}, {1e3 * added_s:.2f} ms"
        return text

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON, for ``cswap.install(model, schedule=path)``.

        Raises:
            OSError: the file cannot be written.
        """
        plan = self.plan
        saves: dict[int, list[list[str | int]]] = {}
        for key, decided in plan.decided.items():
            name: list[str | int] = [key.scope, str(key.dtype).removeprefix("torch."), key.nth]
            saves.setdefault(decided.number, []).append(name)
        ways = {one.number: one for one in plan.decided.values()}
        found = {
            "kind": KIND,
            "version": VERSION,
            "made_for": dict(self.made_for),
            "plain_s": self.plain_s,
            "added_s": plan.added_s,
            "other_bytes": self.other_bytes,
            **{name: getattr(plan, name) for name in _BYTES if name != "other_bytes"},
            "tensors": {
                str(number): {"action": one.action, "nbytes": one.nbytes, "saves": saves[number]}
                for number, one in sorted(ways.items())
            },
        }
        Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def read(source: object, config: SwapConfig) -> Schedule:
        """The schedule in a file, or in JSON text.

        Args:
            source: path or text, or a schedule.
            config: the options of today.

        Raises:
            ConfigError: it cannot be read, an entry is wrong (the message names it), or it has a
                codec that is not there, or that the options do not admit.
        """
        if isinstance(source, Schedule):
            _check_codecs(source.plan, config)
            return source
        data = read_object(source, "schedule")
        version = data.get("version")
        if data.get("kind") != KIND or isinstance(version, bool) or version != VERSION:
            raise ConfigError(
                f"schedule={shown(source)}: is no schedule of version {VERSION}. Remedy: "
                "handle.schedule.save(path) writes one."
            )
        made_for = _CHECK.mapping("schedule.made_for", data.get("made_for"), "texts")
        for name, text in made_for.items():
            _CHECK.text(f"schedule.made_for[{shown(name)}]", text)
        nbytes = {
            name: _CHECK.count(f"schedule.{name}", data.get(name), most=MOST_BYTES)
            for name in _BYTES
        }
        plain_s = data.get("plain_s")
        if plain_s is not None:
            plain_s = _CHECK.number("schedule.plain_s", plain_s, 1e-9, MOST_SECONDS)
        added_s = _CHECK.seconds("schedule.added_s", data.get("added_s"))
        decided = _tensors(data.get("tensors"))
        tensors = {one.number: one for one in decided.values()}.values()
        plan = FitPlan(
            decided,
            nbytes["peak_bytes"],
            added_s,
            sum(one.nbytes for one in tensors),
            Counter(one.action for one in tensors),
            nbytes["under_way_bytes"],
        )
        _check_codecs(plan, config)
        return Schedule(made_for, plan, nbytes["other_bytes"], plain_s)

    def other_than(self, made_for: Mapping[str, str]) -> str | None:
        """The first thing, in words, for which it was not made; None: it was made for this."""
        for name, now in made_for.items():
            before = self.made_for.get(name, "")
            if before != now:
                return f"{name}={before or '?'}, not {now}"
        return None


def made_for(asked: Asked, kind: str, config: SwapConfig) -> dict[str, str]:
    """The goal, the kind of device, and the options that a plan depends on, each as text."""
    limit = "device" if asked.of_device else asked.limit_bytes
    goal = f"min at {asked.slowdown}" if limit is None else str(limit)
    options = {name: _text_of(getattr(config, name)) for name in _OPTIONS}
    return {"fit": goal, "device": kind, **options}


def _text_of(value: Any) -> str:
    # The same in another process: no addresses.
    if isinstance(value, dict):
        return ", ".join(sorted(f"{_text_of(k)}: {_text_of(v)}" for k, v in value.items()))
    if isinstance(value, list | tuple | set | frozenset):
        return ", ".join(sorted(map(_text_of, value)))
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return str(value)


def _check_codecs(plan: FitPlan, config: SwapConfig) -> None:
    lossy = [
        name for name in plan.counts if name not in (KEEP, REMAT) and not get_codec(name).lossless
    ]
    admitted = {*chain.from_iterable(lossy_by_tolerance(config.lossy).values())} if lossy else ()
    for name in lossy:
        if name not in admitted:
            raise ConfigError(
                f"schedule: has the lossy codec {name!r}, which lossy={shown(config.lossy)} does "
                "not admit. Remedy: the option with which it was made."
            )


def _tensors(value: Any) -> dict[Key, Decided]:
    decided: dict[Key, Decided] = {}
    entries = _CHECK.mapping("schedule.tensors", value, "tensors")
    for n, (number, found) in enumerate(entries.items()):
        where = f"schedule.tensors[{shown(number)}]"
        entry = _CHECK.mapping(where, found)
        action = _CHECK.text(f"{where}.action", entry.get("action"))
        if action not in (KEEP, REMAT):
            get_codec(action)  # an error names the codecs that there are
        nbytes = _CHECK.count(f"{where}.nbytes", entry.get("nbytes"), most=MOST_BYTES)
        for save in _CHECK.items(f"{where}.saves", entry.get("saves")):
            key = _key(f"{where}.saves", save)
            if key in decided:
                raise ConfigError(f"{where}.saves: {shown(save)} is saved twice.")
            decided[key] = Decided(action, n, nbytes)
    return decided


def _key(where: str, save: Any) -> Key:
    parts = _CHECK.items(where, save)
    if len(parts) != len(Key._fields):
        raise ConfigError(f"{where}={shown(save)}: must be a module's path, a dtype and a number.")
    scope, name, nth = parts
    dtype = getattr(torch, _CHECK.text(where, name), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{where}={shown(name)}: is no dtype of torch.")
    return Key(_CHECK.text(where, scope), dtype, _CHECK.count(where, nth))
