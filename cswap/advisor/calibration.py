"""Measured times of this machine's codecs and link, stored in the user's cache folder.

A file that is damaged, or of another machine, driver or version, is ignored with a warning.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cswap import cache_folder
from cswap.advisor.fit import TimeModel
from cswap.codecs.launcher import LaunchShape
from cswap.codecs.parallel import RangeShape
from cswap.display import shown
from cswap.errors import ConfigError
from cswap.log import log
from cswap.schema.checks import Checks
from cswap.schema.reading import parse_object

if TYPE_CHECKING:
    from cswap.schema.tensor import TensorProfile

_CHECK: Final = Checks(ConfigError)

VERSION: Final = 3

SHAPE_OF: Final[dict[str, type[RangeShape | LaunchShape]]] = {
    "cpu": RangeShape,
    "cuda": LaunchShape,
}
"""Launch shapes by kind of device."""

MOST_OF_SHAPE: Final = 1024
"""Largest number in one."""

MOST_BYTES_PER_S: Final = 1e14
"""Of a link: more is an error of the measurement."""

_PACKAGES: Final = (
    "torch",
    "numba",
    "numpy",
    "numba-cuda",
    "nvidia-nvcomp-cu12",
    "nvidia-nvcomp-cu13",
)


@dataclass(frozen=True, slots=True)
class CodecTimes:
    """Times of a codec on this machine.

    Attributes:
        encode: model of the encode's time; on a CPU, by one thread.
        decode: model of the decode's time.
    """

    encode: TimeModel
    decode: TimeModel

    def device_s(self, profile: TensorProfile) -> float:
        """Seconds of encode and decode together."""
        return self.encode.seconds(profile) + self.decode.seconds(profile)


@dataclass(frozen=True, slots=True)
class Link:
    """Measured rates of a link.

    Attributes:
        d2h_bytes_per_s: rate out, alone.
        h2d_bytes_per_s: rate back, alone.
        latency_s: time of a copy before its bytes flow.
        duplex_factor: share of its rate that each direction keeps while both are busy.
    """

    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    latency_s: float
    duplex_factor: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measurements of one kind of device of one machine.

    Attributes:
        machine: hardware and versions that the figures hold for.
        times: by codec.
        link: out and back; None: not measured yet.
        left_out: reason by codec that gave no usable figures.
        shapes: launch shape by codec that was tuned (tuner.py).
    """

    machine: dict[str, str]
    times: dict[str, CodecTimes]
    link: Link | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, dict[str, int]] = field(default_factory=dict)

    def save(self) -> Path:
        """Write to the cache folder, whole or not at all; returns the path.

        Raises:
            OSError: the folder cannot be written to.
        """
        path = path_of(self.machine)
        record = {"version": VERSION, **asdict(self)}
        cache_folder.write(path, (json.dumps(record, indent=1) + "\n").encode())
        _read.cache_clear()
        return path


def machine_of(kind: str) -> dict[str, str]:
    """Hardware and versions that a calibration of this kind of device ("cpu", "cuda") holds for."""
    import torch

    import cswap

    found = {"kind": kind, "cswap": cswap.__version__, "cpu": _cpu_name()}
    if kind == "cuda" and torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found | {p: v for p in _PACKAGES if (v := _version(p))}


def folder() -> Path:
    """Folder of the calibrations."""
    return cache_folder.root() / "calibration"


def path_of(machine: dict[str, str]) -> Path:
    """File of the calibration of that machine."""
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"{machine['kind']}-{digest}.json"


def stored(kind: str) -> Calibration | None:
    """This machine's calibration for that kind of device; None if there is none."""
    return _read(kind, folder())


@cache
def _read(kind: str, _folder: Path) -> Calibration | None:
    machine = machine_of(kind)
    path = path_of(machine)
    text = cache_folder.read(path)
    if text is None:
        return None
    try:
        return _parsed(parse_object(text, "calibration"), machine)
    except ConfigError as error:
        log.warning(
            "%s is no calibration of this machine (%s) and is ignored; `cswap calibrate` makes a "
            "new one.",
            path,
            error,
        )
        return None


def _parsed(record: dict[str, Any], machine: dict[str, str]) -> Calibration:
    if record.get("version") != VERSION or record.get("machine") != machine:
        raise ConfigError("made by another version or on another machine")
    times = {}
    for name, value in _CHECK.mapping("times", record.get("times"), "objects").items():
        where = f"times[{shown(name)}]"
        entry = _CHECK.record(where, value, CodecTimes)
        encode = _model(f"{where}.encode", entry["encode"])
        times[name] = CodecTimes(encode, _model(f"{where}.decode", entry["decode"]))
    left_out = _CHECK.mapping("left_out", record.get("left_out"), "text")
    for name, why in left_out.items():
        _CHECK.text(f"left_out[{shown(name)}]", why)
    link = None if record.get("link") is None else _link(record["link"])
    shapes = _CHECK.mapping("shapes", record.get("shapes"), "launch shapes")
    for name, shape in shapes.items():
        _shape(f"shapes[{shown(name)}]", shape, SHAPE_OF[machine["kind"]])
    return Calibration(machine, times, link, left_out, shapes)


def _shape(where: str, value: Any, kind: type[RangeShape | LaunchShape]) -> None:
    shape = _CHECK.record(where, value, kind)
    for name, number in shape.items():
        _CHECK.count(f"{where}.{name}", number, 1, MOST_OF_SHAPE)
    kind(**shape)  # which refuses other values


def _link(value: Any) -> Link:
    entry = _CHECK.record("link", value, Link)
    for name in ("d2h_bytes_per_s", "h2d_bytes_per_s"):
        _CHECK.number(f"link.{name}", entry[name], 1e6, MOST_BYTES_PER_S)
    _CHECK.number("link.duplex_factor", entry["duplex_factor"], 1e-6, 1.0)
    _CHECK.number("link.latency_s", entry["latency_s"], 0.0, 1.0)
    return Link(**entry)


def _model(where: str, value: Any) -> TimeModel:
    entry = _CHECK.record(where, value, TimeModel)
    for name, number in entry.items():
        _CHECK.number(f"{where}.{name}", number, 0.0, 1e6)
    if not any(number for name, number in entry.items() if name != "residual"):
        raise ConfigError(f"{where}: all terms are 0, so every time would be 0.")
    return TimeModel(**entry)


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@cache
def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
