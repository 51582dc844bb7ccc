"""Hardware profiles: data files that say how fast a machine computes, encodes and copies."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Final

from cswap.errors import HardwareError

FORMAT: Final = "cswap-hardware"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point rate of one dtype.

    Attributes:
        peak: FLOP/s that the data sheet states.
        achievable: FLOP/s that convolutions and matrix products reach.
    """

    peak: float
    achievable: float


@dataclass(frozen=True, slots=True)
class CodecRate:
    """Speed of one codec on the device, alone.

    Attributes:
        encode_bytes_per_s: raw bytes.
        decode_bytes_per_s: raw bytes.
        overhead_s: added to every encode and to every decode (launches).
    """

    encode_bytes_per_s: float
    decode_bytes_per_s: float
    overhead_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine, checked when it is made.

    Attributes:
        name: of the profile.
        memory_bytes: device memory that a process can use.
        flops: by dtype.
        memory_bytes_per_s: device memory, read plus write.
        d2h_bytes_per_s: device to host, pinned, alone.
        h2d_bytes_per_s: host to device, pinned, alone.
        duplex_factor: share of its rate that each direction keeps while both are busy; 1: both.
        link_latency_s: before the bytes of one copy flow.
        host_memory_bytes: what swapped tensors may take; 0: unlimited.
        codec_tax: share of its speed that computation loses while a codec runs, 0 <= tax < 1.
        codecs: by name; raw is not among them, it costs nothing.
        measured: whether the figures were measured on the machine at hand.
        sources: where each figure comes from, by field.
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, Flops]
    memory_bytes_per_s: float
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    duplex_factor: float = 1.0
    link_latency_s: float = 0.0
    host_memory_bytes: int = 0
    codec_tax: float = 0.0
    codecs: Mapping[str, CodecRate] = field(default_factory=dict)
    measured: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"hardware[{self.name!r}]"
        for name in ("memory_bytes", "memory_bytes_per_s", "d2h_bytes_per_s", "h2d_bytes_per_s"):
            _number(f"{where}.{name}", getattr(self, name), above=0.0)
        for name in ("link_latency_s", "host_memory_bytes"):
            _number(f"{where}.{name}", getattr(self, name), least=0.0)
        _number(f"{where}.duplex_factor", self.duplex_factor, above=0.0, most=1.0)
        _number(f"{where}.codec_tax", self.codec_tax, least=0.0, below=1.0)
        for name in ("memory_bytes", "host_memory_bytes"):
            if not isinstance(getattr(self, name), int):
                raise HardwareError(f"{where}.{name}={getattr(self, name)!r}: must be an integer.")
        for dtype, flops in self.flops.items():
            _number(f"{where}.flops[{dtype!r}].peak", flops.peak, above=0.0)
            _number(f"{where}.flops[{dtype!r}].achievable", flops.achievable, above=0.0)
        for codec, rate in self.codecs.items():
            place = f"{where}.codecs[{codec!r}]"
            _number(f"{place}.encode_bytes_per_s", rate.encode_bytes_per_s, above=0.0)
            _number(f"{place}.decode_bytes_per_s", rate.decode_bytes_per_s, above=0.0)
            _number(f"{place}.overhead_s", rate.overhead_s, least=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"format": FORMAT, "version": VERSION} | asdict(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")


def list_hardware() -> list[str]:
    """Names of the profiles that come with cswap.

    >>> "v100-pcie3" in list_hardware()
    True
    """
    folder = resources.files("cswap.plan") / "profiles"
    names = [entry.name for entry in folder.iterdir()]
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def load_hardware(value: Any) -> Hardware:
    """A profile from a `Hardware`, a dict, the name of one that comes with cswap, or a path.

    Raises:
        HardwareError: no such profile or file, or a wrong field (named).

    >>> load_hardware("v100-pcie3").d2h_bytes_per_s
    11700000000.0
    """
    if isinstance(value, Hardware):
        return value
    data = dict(value if isinstance(value, Mapping) else _load(value))
    if (found := data.pop("format", None)) != FORMAT:
        raise HardwareError(f"hardware.format={found!r}: must be {FORMAT!r}.")
    if (version := data.pop("version", None)) != VERSION:
        raise HardwareError(f"hardware.version={version!r}: unknown; this cswap reads {VERSION}.")
    for name, kind in (("flops", Flops), ("codecs", CodecRate)):
        rows = data.get(name, {})
        if not isinstance(rows, Mapping):
            raise HardwareError(f"hardware.{name}: must map names to objects.")
        data[name] = {k: _record(f"hardware.{name}[{k!r}]", kind, v) for k, v in rows.items()}
    hardware: Hardware = _record("hardware", Hardware, data)
    return hardware


def _load(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, str | os.PathLike):
        raise HardwareError(f"hardware={value!r}: must be a name, a path, a dict or a Hardware.")
    text = os.fspath(value)
    known = list_hardware()
    try:
        if text in known:
            file = resources.files("cswap.plan") / "profiles" / f"{text}.json"
            data = json.loads(file.read_text(encoding="utf-8"))
        else:
            data = json.loads(Path(text).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        close = get_close_matches(text, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise HardwareError(
            f"hardware={text!r}: no such profile or file.{hint} Known: {', '.join(known)}."
        ) from error
    except (OSError, ValueError) as error:
        raise HardwareError(f"hardware={text!r}: cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise HardwareError(f"hardware={text!r}: must be a JSON object.")
    return data


def _record(where: str, kind: Any, value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise HardwareError(f"{where}={value!r}: must be an object.")
    known = [f.name for f in fields(kind)]
    for name in value:
        if name not in known:
            raise HardwareError(f"{where}.{name}: no such field. Known: {', '.join(known)}.")
    try:
        return kind(**value)
    except TypeError as error:  # a field without default is missing
        raise HardwareError(f"{where}: {str(error).split('() ', 1)[-1]}.") from error


def _number(
    where: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value)):
        raise HardwareError(f"{where}={value!r}: must be a finite number.")
    if not (least <= value <= most and above < value < below):
        low = f">= {least}" if above == -math.inf else f"> {above}"
        high = (
            f" and <= {most}" if most < math.inf else f" and < {below}" if below < math.inf else ""
        )
        raise HardwareError(f"{where}={value!r}: must be {low}{high}.")
