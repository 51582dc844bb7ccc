"""A plan: for each saved tensor of a step, what to do with it. Plain data, JSON on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from cswap.errors import ConfigError

VERSION: Final = 1
ACTIONS: Final = ("keep", "swap")

Action = Literal["keep", "swap"]


@dataclass(frozen=True, slots=True)
class Decision:
    """One saved tensor's entry.

    Attributes:
        action: leave it on the device, or swap it.
        codec: with which codec; None leaves that to the advisor.
    """

    action: Action
    codec: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions by position among the tensors that a step swaps or could swap.

    Attributes:
        decisions: position to decision; what is not named is left to the advisor.
    """

    decisions: Mapping[int, Decision] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON.

        >>> Plan({3: Decision("swap", "zvc")}).to_dict()
        {'version': 1, 'decisions': {'3': {'action': 'swap', 'codec': 'zvc'}}}
        """
        decisions = {
            str(position): {"action": d.action, **({"codec": d.codec} if d.codec else {})}
            for position, d in self.decisions.items()
        }
        return {"version": VERSION, "decisions": decisions}

    @staticmethod
    def parse(value: Any) -> Plan:
        """A plan from a `Plan`, a dict, JSON text, or the path of a JSON file.

        Raises:
            ConfigError: unreadable, of an unknown version, or a wrong entry (named).
        """
        if isinstance(value, Plan):
            return value
        data = value if isinstance(value, Mapping) else _load(value)
        version = data.get("version")
        if version != VERSION:
            raise ConfigError(f"plan.version={version!r}: unknown; this cswap reads {VERSION}.")
        decisions = data.get("decisions", {})
        if not isinstance(decisions, Mapping):
            raise ConfigError("plan.decisions: must map positions to decisions.")
        return Plan({_position(k): _decision(k, v) for k, v in decisions.items()})


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
    action = entry.get("action") if isinstance(entry, Mapping) else None
    codec = entry.get("codec") if isinstance(entry, Mapping) else None
    if action not in ACTIONS:
        raise ConfigError(
            f"plan.decisions[{key!r}].action={action!r}: must be one of {', '.join(ACTIONS)}."
        )
    if codec is not None and (action != "swap" or not isinstance(codec, str)):
        raise ConfigError(f"plan.decisions[{key!r}].codec={codec!r}: a name, with 'swap' only.")
    return Decision(action, codec)
