"""Hardware profiles: data files with the rates at which a machine computes, encodes and copies."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Final

from cswap.codecs.traits import CodecRate
from cswap.display import MOST_SHOWN, shown
from cswap.errors import HardwareError
from cswap.schema.checks import LEAST_RATE, MOST_MEMORY, MOST_RATE, Checks
from cswap.schema.reading import parse_object, read_object

FORMAT: Final = "cswap-hardware"
VERSION: Final = 1

LEAST_SHARE: Final = 1e-6
"""Smallest allowed share of a link's or of computation's speed that other work leaves."""

MOST_FILE_BYTES: Final = 4 << 20

_CHECK: Final = Checks(HardwareError)


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
class Hardware:
    """One machine. The constructor checks the values.

    Attributes:
        name: name of the profile.
        memory_bytes: device memory that a process can use.
        flops: floating-point rates by dtype.
        memory_bytes_per_s: rate of device memory, reads plus writes.
        d2h_bytes_per_s: rate of copies from device to pinned host memory, in one direction only.
        h2d_bytes_per_s: rate of copies from pinned host memory to device, in one direction only.
        duplex_factor: share of its rate that each direction keeps while both are busy; 1: full
            rate in both.
        link_latency_s: seconds before the bytes of one copy flow.
        host_memory_bytes: host memory that swapped tensors may use; 0: unlimited.
        codec_tax: share of its speed that computation loses while a codec runs, 0 <= tax < 1.
        codecs: codec rates by name; raw has no entry, because it costs nothing.
        unified: whether host memory is the device's own, as on a CPU. Encodings then count as
            device memory, nothing is copied, and a raw swap would free nothing.
        measured: whether the figures were measured on this machine.
        sources: the source of each figure, by field.
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
    unified: bool = False
    measured: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"hardware[{shown(_CHECK.text('hardware.name', self.name))}]"
        for name, least in (("memory_bytes", 1), ("host_memory_bytes", 0)):
            _CHECK.count(f"{where}.{name}", getattr(self, name), least, MOST_MEMORY)
        for name in ("memory_bytes_per_s", "d2h_bytes_per_s", "h2d_bytes_per_s"):
            _rate(f"{where}.{name}", getattr(self, name))
        _CHECK.seconds(f"{where}.link_latency_s", self.link_latency_s)
        _CHECK.number(f"{where}.duplex_factor", self.duplex_factor, LEAST_SHARE, 1.0)
        _CHECK.number(f"{where}.codec_tax", self.codec_tax, 0.0, 1.0 - LEAST_SHARE)
        _CHECK.flag(f"{where}.unified", self.unified)
        _CHECK.flag(f"{where}.measured", self.measured)
        for dtype, flops in self.flops.items():
            _rate(f"{where}.flops[{shown(dtype)}].peak", flops.peak)
            _rate(f"{where}.flops[{shown(dtype)}].achievable", flops.achievable)
        for codec, rate in self.codecs.items():
            _codec_rate(f"{where}.codecs[{shown(codec)}]", asdict(rate))
        for name, source in self.sources.items():
            _CHECK.text(f"{where}.sources[{shown(name)}]", source)

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
    """A profile from a `Hardware`, a dict, the name of a profile in cswap, or a path.

    Raises:
        HardwareError: the profile or file does not exist, or a field is wrong (the message names
            it).

    >>> load_hardware("v100-pcie3").d2h_bytes_per_s
    11700000000.0
    """
    if isinstance(value, Hardware):
        return value
    data = dict(value if isinstance(value, Mapping) else _load(value))
    if (found := data.pop("format", None)) != FORMAT:
        raise HardwareError(f"hardware.format={shown(found)}: must be {FORMAT!r}.")
    version = data.pop("version", None)
    if isinstance(version, bool) or version != VERSION:
        raise HardwareError(
            f"hardware.version={shown(version)}: unknown; this cswap reads {VERSION}."
        )
    data = _CHECK.record("hardware", data, Hardware)
    for name, read in (("flops", _flops), ("codecs", _codec_rate)):
        rows = _CHECK.mapping(f"hardware.{name}", data.get(name, {}), "objects")
        data[name] = {k: read(f"hardware.{name}[{shown(k)}]", v) for k, v in rows.items()}
    data["sources"] = _CHECK.mapping("hardware.sources", data.get("sources", {}), "text")
    return Hardware(**data)


def _load(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, str | os.PathLike):
        raise HardwareError(
            f"hardware={shown(value)}: must be a name, a path, a dict or a Hardware."
        )
    text, known = os.fspath(value), list_hardware()
    if text in known:
        file = resources.files("cswap.plan") / "profiles" / f"{text}.json"
        return parse_object(file.read_bytes(), f"hardware={text!r}", HardwareError)
    try:
        return read_object(text, "hardware", HardwareError, most=MOST_FILE_BYTES)
    except HardwareError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        close = _similar(text, known)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise HardwareError(
            f"hardware={shown(text)}: no such profile or file.{hint} Known: {', '.join(known)}."
        ) from error


def _similar(text: str, known: list[str]) -> list[str]:
    # Names that begin with it ("v100"), else the one that is spelled most like it.
    plain = re.sub(r"[^a-z0-9]", "", text[:MOST_SHOWN].lower().removeprefix("nvidia"))
    begun = [name for name in known if plain and name.replace("-", "").startswith(plain)]
    return begun or get_close_matches(text[:MOST_SHOWN].lower(), known, n=1)


def _flops(where: str, value: Any) -> Flops:
    return Flops(**_CHECK.record(where, value, Flops))


def _codec_rate(where: str, value: Any) -> CodecRate:
    found = _CHECK.record(where, value, CodecRate)
    for name in ("encode_bytes_per_s", "decode_bytes_per_s"):
        _rate(f"{where}.{name}", found[name])
    _CHECK.seconds(f"{where}.overhead_s", found.get("overhead_s", 0.0))
    _CHECK.flag(f"{where}.assumed", found.get("assumed", False))
    return CodecRate(**found)


def _rate(where: str, value: Any) -> None:
    _CHECK.number(where, value, LEAST_RATE, MOST_RATE)
