"""A plan: one decision for each saved tensor of a step. Plain data, JSON on disk."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from cswap.display import shown
from cswap.errors import ConfigError
from cswap.schema.checks import MOST_COUNT, MOST_MEMORY, Checks
from cswap.schema.reading import read_object

VERSION: Final = 3
READABLE: Final = (1, 2, 3)
ACTIONS: Final = ("keep", "swap", "recompute")

_POSITION: Final = re.compile("0|[1-9][0-9]{0,17}")
_CHECK: Final = Checks(ConfigError)

Action = Literal["keep", "swap", "recompute"]


@dataclass(frozen=True, slots=True)
class Decision:
    """One saved tensor's entry.

    Attributes:
        action: "keep" leaves the tensor on the device, "swap" swaps it, "recompute" drops it and
            computes it again.
        codec: codec of the swap; None: the advisor chooses (a simulation takes raw).
        prefetch: the swap-in may start this many saved tensors before the tensor's own first
            backward use, in the order of first backward uses; 0: on demand. None: as early as
            memory allows.
        section_bytes: raw bytes of a section of the swap; None: the tensor is swapped in one piece.
        module: path of the smallest module whose forward both makes and reads the tensor. To drop
            the tensor, this whole module must be recomputed. "": none, or not known.
        nbytes: raw bytes. An engine compares them with the tensor that it meets; None: not known.
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
        decisions: decision by position. For a position without a decision, an engine asks the
            advisor, and a simulation keeps the tensor.
        policy: name of the policy that made the plan.
        budget_bytes: device memory that the plan was made for; None: unknown.
        hardware: name of the hardware profile that the plan was made for.
        predicted: figures of the plan's simulation: ``step_s``, ``peak_bytes``, ...
        trace_fingerprint: fingerprint of the trace that the plan was made for.
    """

    decisions: Mapping[int, Decision] = field(default_factory=dict)
    policy: str = ""
    budget_bytes: int | None = None
    hardware: str = ""
    predicted: Mapping[str, float] = field(default_factory=dict)
    trace_fingerprint: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; fields with their defaults are left out.

        >>> Plan({3: Decision("swap", "zvc")}).to_dict()
        {'version': 3, 'decisions': {'3': {'action': 'swap', 'codec': 'zvc'}}}
        """
        decisions = {str(position): _entry(d) for position, d in self.decisions.items()}
        about = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "decisions"}
        about["predicted"] = dict(self.predicted)
        kept = {name: value for name, value in about.items() if value not in ("", None, {})}
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
            ConfigError: the plan cannot be read, its version is unknown, or an entry is wrong (the
                message names it).

        >>> Plan.parse({"version": 1, "decisions": {"0": {"action": "keep"}}}).decisions[0].action
        'keep'
        """
        if isinstance(value, Plan):
            return value
        if not isinstance(value, Mapping | str | os.PathLike):
            raise ConfigError(f"plan={shown(value)}: must be a Plan, a dict, JSON text or a path.")
        data = dict(value if isinstance(value, Mapping) else read_object(value, "plan"))
        version = data.pop("version", None)
        if isinstance(version, bool) or version not in READABLE:
            known = ", ".join(str(v) for v in READABLE)
            raise ConfigError(f"plan.version={shown(version)}: unknown; this cswap reads {known}.")
        data = _CHECK.record("plan", data, Plan)
        for name in ("policy", "hardware", "trace_fingerprint"):
            _CHECK.text(f"plan.{name}", data.get(name, ""))
        budget_bytes = data.get("budget_bytes")
        if budget_bytes is not None:
            _CHECK.count("plan.budget_bytes", budget_bytes, most=MOST_MEMORY)
        data["decisions"] = _decisions(data.get("decisions", {}))
        data["predicted"] = _CHECK.numbers("plan.predicted", data.get("predicted", {}))
        return Plan(**data)


def _entry(decision: Decision) -> dict[str, Any]:
    return {name: value for name, value in asdict(decision).items() if value not in (None, "")}


def _decisions(value: Any) -> dict[int, Decision]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"plan.decisions={shown(value)}: must map positions to decisions.")
    found = {_position(key): _decision(key, entry) for key, entry in value.items()}
    if len(found) < len(value):
        raise ConfigError("plan.decisions: a position occurs twice, as a number and as text.")
    return found


def _position(key: Any) -> int:
    # One spelling per position: int() would also take " 3", "0_3", 3.7 and digits of other scripts.
    if isinstance(key, str) and _POSITION.fullmatch(key):
        return int(key)
    if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key <= MOST_COUNT:
        raise ConfigError(
            f"plan.decisions[{shown(key)}]: the position must be an integer >= 0, such as 3."
        )
    return key


def _decision(key: Any, value: Any) -> Decision:
    where = f"plan.decisions[{shown(key)}]"
    entry = _CHECK.record(where, value, Decision)
    swap = _CHECK.one_of(f"{where}.action", entry["action"], ACTIONS) == "swap"
    codec, module = entry.get("codec"), entry.get("module", "")
    if codec is not None and not (swap and codec and isinstance(codec, str)):
        raise ConfigError(f"{where}.codec={shown(codec)}: must be a name, with 'swap' only.")
    for name, least in (("prefetch", 0), ("section_bytes", 1), ("nbytes", 0)):
        if entry.get(name) is not None:
            _CHECK.count(f"{where}.{name}", entry[name], least)
    if not swap and (entry.get("prefetch"), entry.get("section_bytes")) != (None, None):
        raise ConfigError(f"{where}: prefetch and section_bytes go with 'swap' only.")
    if not isinstance(module, str):
        raise ConfigError(f"{where}.module={shown(module)}: must be the path of a module.")
    return Decision(**entry)
