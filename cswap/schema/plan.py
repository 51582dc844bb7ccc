"""A plan: for each saved tensor of a step, what to do with it. Plain data, JSON on disk."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from cswap.errors import ConfigError

VERSION: Final = 3
READABLE: Final = (1, 2, 3)
ACTIONS: Final = ("keep", "swap", "recompute")

Action = Literal["keep", "swap", "recompute"]


@dataclass(frozen=True, slots=True)
class Decision:
    """One saved tensor's entry.

    Attributes:
        action: leave it on the device, swap it, or drop it and compute it again.
        codec: with which codec to swap; None leaves that to the advisor (a simulation takes raw).
        prefetch: how many saved tensors ahead of its own first backward use, in the order of first
            backward uses, its swap-in may start; 0: on demand. None: as early as memory allows.
        section_bytes: swap it in sections of that many raw bytes; None: in one piece.
        module: path of the smallest module in which it is both made and read by forward: what has
            to be recomputed as a whole if it is not to be held; "": none, or not known.
        nbytes: its raw bytes, by which an engine knows that it is the one; None: not known.
    """

    action: Action
    codec: str | None = None
    prefetch: int | None = None
    section_bytes: int | None = None
    module: str = ""
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions by position among the tensors that a step swaps or could swap.

    Attributes:
        decisions: position to decision. What is not named is left to the advisor by the engine,
            and kept by a simulation.
        policy: what made it.
        budget_bytes: device memory that it was made for; None: unknown.
        hardware: name of the hardware profile that it was made for.
        predicted: what the simulation says of it: ``step_s``, ``peak_bytes``, ...
        trace_fingerprint: of the trace that it was made for.
        order: the trace's operators in the order in which a simulation runs them; empty: the
            trace's own. An engine runs the model's own order.
    """

    decisions: Mapping[int, Decision] = field(default_factory=dict)
    policy: str = ""
    budget_bytes: int | None = None
    hardware: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict)
    trace_fingerprint: str = ""
    order: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; fields with their defaults are left out.

        >>> Plan({3: Decision("swap", "zvc")}).to_dict()
        {'version': 3, 'decisions': {'3': {'action': 'swap', 'codec': 'zvc'}}}
        """
        decisions = {str(position): _entry(d) for position, d in self.decisions.items()}
        about = {
            "policy": self.policy,
            "budget_bytes": self.budget_bytes,
            "hardware": self.hardware,
            "predicted": dict(self.predicted),
            "trace_fingerprint": self.trace_fingerprint,
            "order": list(self.order),
        }
        kept = {name: value for name, value in about.items() if value not in ("", None, {}, [])}
        return {"version": VERSION, "decisions": decisions} | kept

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def parse(value: Any) -> Plan:
        """A plan from a `Plan`, a dict, JSON text, or the path of a JSON file.

        Raises:
            ConfigError: unreadable, of an unknown version, or a wrong entry (named).

        >>> Plan.parse({"version": 1, "decisions": {"0": {"action": "keep"}}}).decisions[0].action
        'keep'
        """
        if isinstance(value, Plan):
            return value
        data = value if isinstance(value, Mapping) else _load(value)
        version = data.get("version")
        if version not in READABLE:
            known = ", ".join(str(v) for v in READABLE)
            raise ConfigError(f"plan.version={version!r}: unknown; this cswap reads {known}.")
        decisions = data.get("decisions", {})
        if not isinstance(decisions, Mapping):
            raise ConfigError("plan.decisions: must map positions to decisions.")
        return Plan(
            {_position(k): _decision(k, v) for k, v in decisions.items()},
            policy=_text(data, "policy"),
            budget_bytes=_count("plan.budget_bytes", data.get("budget_bytes"), 0),
            hardware=_text(data, "hardware"),
            predicted=_figures(data.get("predicted", {})),
            trace_fingerprint=_text(data, "trace_fingerprint"),
            order=_order(data.get("order", ())),
        )


def _entry(decision: Decision) -> dict[str, Any]:
    fields = {
        "action": decision.action,
        "codec": decision.codec or None,
        "prefetch": decision.prefetch,
        "section_bytes": decision.section_bytes,
        "module": decision.module or None,
        "nbytes": decision.nbytes,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _load(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"plan={value!r}: must be a Plan, a dict, JSON text or a path.")
    text = os.fspath(value)
    try:
        if not text.lstrip().startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        data = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"plan={os.fspath(value)!r}: cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"plan={os.fspath(value)!r}: must be a JSON object.")
    return data


def _position(key: Any) -> int:
    try:
        position = int(key)
    except (TypeError, ValueError):
        position = -1
    if position < 0:
        raise ConfigError(f"plan.decisions[{key!r}]: the position must be an integer >= 0.")
    return position


def _decision(key: Any, entry: Any) -> Decision:
    where = f"plan.decisions[{key!r}]"
    entry = entry if isinstance(entry, Mapping) else {}
    action, codec = entry.get("action"), entry.get("codec")
    if action not in ACTIONS:
        raise ConfigError(f"{where}.action={action!r}: must be one of {', '.join(ACTIONS)}.")
    if codec is not None and (action != "swap" or not isinstance(codec, str)):
        raise ConfigError(f"{where}.codec={codec!r}: a name, with 'swap' only.")
    prefetch = _count(f"{where}.prefetch", entry.get("prefetch"), 0)
    section_bytes = _count(f"{where}.section_bytes", entry.get("section_bytes"), 1)
    if action != "swap" and (prefetch is not None or section_bytes is not None):
        raise ConfigError(f"{where}: prefetch and section_bytes go with 'swap' only.")
    module = entry.get("module", "")
    if not isinstance(module, str):
        raise ConfigError(f"{where}.module={module!r}: must be the path of a module.")
    nbytes = _count(f"{where}.nbytes", entry.get("nbytes"), 0)
    return Decision(action, codec, prefetch, section_bytes, module, nbytes)


def _count(where: str, value: Any, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{where}={value!r}: must be an integer >= {least}, or null.")
    return value


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name, "")
    if not isinstance(value, str):
        raise ConfigError(f"plan.{name}={value!r}: must be text.")
    return value


def _order(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"plan.order={value!r}: must be a list of operators.")
    for place, operator in enumerate(value):
        if isinstance(operator, bool) or not isinstance(operator, int):
            raise ConfigError(f"plan.order[{place}]={operator!r}: must be an integer.")
    return tuple(value)


def _figures(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"plan.predicted={value!r}: must map names to numbers.")
    for name, figure in value.items():
        number = isinstance(figure, int | float) and not isinstance(figure, bool)
        if not number or math.isnan(figure):
            raise ConfigError(f"plan.predicted[{name!r}]={figure!r}: must be a number.")
    return dict(value)
