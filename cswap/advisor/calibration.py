"""What was measured on this machine: codecs and link, kept in the user's cache folder.

A file that is damaged, or of another machine, driver or version, is ignored with a notice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cswap.advisor.fit import TimeModel
from cswap.advisor.link import Link

if TYPE_CHECKING:
    from cswap.schema.tensor import TensorProfile

_log = logging.getLogger("cswap")

VERSION: Final = 2

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
    """How long a codec takes on this machine.

    Attributes:
        encode: model of the encode, one worker thread on a CPU.
        decode: the same of the decode.
        scratch_per_byte: bytes of working memory per raw byte.
    """

    encode: TimeModel
    decode: TimeModel
    scratch_per_byte: float = 1.0

    def device_s(self, profile: TensorProfile) -> float:
        """Seconds of encode and decode together."""
        return self.encode.seconds(profile) + self.decode.seconds(profile)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Everything measured on one kind of device of one machine.

    Attributes:
        machine: what the figures hold for; another machine, another calibration.
        times: by codec.
        link: out and back; None: not measured yet.
        left_out: codecs that gave no usable figures, and why.
        complete: whether everything was measured; else a run was interrupted, and may go on.
    """

    machine: dict[str, str]
    times: dict[str, CodecTimes]
    link: Link | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    complete: bool = True

    def save(self) -> Path:
        """Write to the cache folder, whole or not at all; the file.

        Raises:
            OSError: the folder cannot be written to.
        """
        path = path_of(self.machine)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        record = {"version": VERSION, **asdict(self)}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(json.dumps(record, indent=1) + "\n")
        Path(file.name).replace(path)
        _read.cache_clear()
        return path


def machine_of(kind: str) -> dict[str, str]:
    """What a calibration of this kind of device ("cpu", "cuda") holds for."""
    import torch

    import cswap

    found = {"kind": kind, "cswap": cswap.__version__, "cpu": _cpu_name()}
    if kind == "cuda" and torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found | {p: v for p in _PACKAGES if (v := _version(p))}


def folder() -> Path:
    """Where calibrations are kept."""
    own = os.environ.get("CSWAP_CACHE_DIR")
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return (Path(own) if own else base / "cswap") / "calibration"


def path_of(machine: dict[str, str]) -> Path:
    """Where the calibration of that machine is kept."""
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"{machine['kind']}-{digest}.json"


def stored(kind: str, *, partial: bool = False) -> Calibration | None:
    """This machine's calibration for that kind of device, if there is one that can be used.

    Args:
        kind: of device.
        partial: also one that was interrupted.
    """
    found = _read(kind, folder())
    return found if found is None or found.complete or partial else None


@cache
def _read(kind: str, _folder: Path) -> Calibration | None:
    machine = machine_of(kind)
    path = path_of(machine)
    try:
        text = path.read_text()
    except OSError:
        return None
    try:
        return _parsed(json.loads(text), machine)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning(
            "%s is no calibration of this machine (%s) and is ignored; `cswap calibrate` makes a "
            "new one.",
            path,
            error,
        )
        return None


def _parsed(record: dict[str, Any], machine: dict[str, str]) -> Calibration:
    if record["version"] != VERSION or record["machine"] != machine:
        raise ValueError("made by another version or on another machine")
    times = {
        str(name): CodecTimes(
            _model(entry["encode"]), _model(entry["decode"]), float(entry["scratch_per_byte"])
        )
        for name, entry in record["times"].items()
    }
    left_out = {str(name): str(why) for name, why in record["left_out"].items()}
    return Calibration(machine, times, _link(record["link"]), left_out, bool(record["complete"]))


def _link(entry: dict[str, Any] | None) -> Link | None:
    if entry is None:
        return None
    link = Link(**{name: float(value) for name, value in entry.items()})
    shares = (link.duplex_factor, link.loaded_factor)
    fine = 1e6 < min(link.d2h_bytes_per_s, link.h2d_bytes_per_s) < 1e14 and 0 <= link.latency_s < 1
    if not fine or not all(0 < share <= 1 for share in shares) or not 0 <= link.codec_tax < 1:
        raise ValueError(f"a link that cannot be: {link}")
    return link


def _model(entry: dict[str, Any]) -> TimeModel:
    model = TimeModel(**{name: float(value) for name, value in entry.items()})
    terms = (
        *(model.overhead_s, model.s_per_byte),
        *(model.s_per_nonzero_byte, model.s_per_mixed_byte),
    )
    if not all(0 <= t < 1e6 for t in terms) or not any(terms):  # NaN fails every comparison
        raise ValueError(f"a time that cannot be: {model}")
    return model


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
