"""A trace: what one training step did, operator by operator. Plain data, JSON on disk."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from cswap.errors import TraceError

FORMAT: Final = "cswap-trace"
VERSION: Final = 1
PHASES: Final = ("forward", "backward", "optimizer")
KINDS: Final = (
    *("conv", "pool", "activation", "norm", "linear", "attention"),
    *("loss", "elementwise", "optimizer", "other"),
)
ROLES: Final = ("activation", "gradient", "parameter", "optimizer", "input")
SOURCES: Final = ("measured", "estimated", "synthetic")


@dataclass(frozen=True, slots=True)
class TraceTensor:
    """One tensor of the step.

    Attributes:
        nbytes: raw bytes.
        name: for people, such as ``features.0.input``.
        module: path of the module that produced or saved it.
        dtype: torch's name, without the prefix.
        shape: in elements; may be empty.
        role: one of `ROLES`.
        saved: position among the swappable tensors that autograd saved, in pack order: the key of
            plans. -1: not saved.
        profile: fields of `TensorProfile`, such as ``zero_fraction``; may be empty.
        ratios: raw over encoded bytes by codec, measured or predicted; 1 where a codec is missing.
    """

    nbytes: int
    name: str = ""
    module: str = ""
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    role: str = "activation"
    saved: int = -1
    profile: Mapping[str, float] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TraceOperator:
    """One operator of the step.

    Attributes:
        name: for people, such as ``features.0``.
        kind: one of `KINDS`.
        phase: one of `PHASES`; the loss counts as forward.
        duration_s: seconds on the device, alone.
        inputs: indices into `Trace.tensors` that it reads.
        outputs: indices into `Trace.tensors` that it produces.
        workspace_bytes: device memory that it holds while it runs, besides inputs and outputs.
        module: path of its module.
        flops: floating-point operations.
        bytes_moved: bytes of device memory read and written.
    """

    name: str
    kind: str
    phase: str
    duration_s: float
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    workspace_bytes: int = 0
    module: str = ""
    flops: float = 0.0
    bytes_moved: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """One whole training step, checked when it is made.

    A tensor lives from the start of its producer (of the step, if it has none) to the end of its
    last user.

    Attributes:
        operators: in execution order.
        tensors: what they read and produce.
        resident_bytes: device memory held all step long and not among ``tensors``: parameters,
            their gradients, optimizer state.
        name: of the model.
        batch: samples of the step; 0: not known.
        source: one of `SOURCES`.
        hardware: what the durations hold for.

    Raises:
        TraceError: it contradicts itself (an index out of range, a use before production, ...).
    """

    operators: tuple[TraceOperator, ...]
    tensors: tuple[TraceTensor, ...]
    resident_bytes: int = 0
    name: str = ""
    batch: int = 0
    source: str = "synthetic"
    hardware: str = ""

    def __post_init__(self) -> None:
        _count("trace.resident_bytes", self.resident_bytes)
        _count("trace.batch", self.batch)
        _one_of("trace.source", self.source, SOURCES)
        for index, tensor in enumerate(self.tensors):
            _check_tensor(f"trace.tensors[{index}]", tensor)
        for index, operator in enumerate(self.operators):
            _check_operator(f"trace.operators[{index}]", operator, len(self.tensors))
        _check_positions(self.tensors)
        _check_order(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON.

        >>> Trace((), ()).to_dict()["format"]
        'cswap-trace'
        """
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["operators"] = [_slim(asdict(operator), TraceOperator) for operator in self.operators]
        data["tensors"] = [_slim(asdict(tensor), TraceTensor) for tensor in self.tensors]
        return {"format": FORMAT, "version": VERSION} | data

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(json.dumps(self.to_dict()) + "\n", encoding="utf-8")

    @staticmethod
    def parse(value: Any) -> Trace:
        """A trace from a `Trace`, a dict, JSON text, or the path of a JSON file.

        Raises:
            TraceError: unreadable, of another format or version, or a wrong field (named).

        >>> forward = TraceOperator("f", "other", "forward", 1.0, (), (0,))
        >>> trace = Trace((forward,), (TraceTensor(8),))
        >>> Trace.parse(trace.to_dict()) == trace
        True
        """
        if isinstance(value, Trace):
            return value
        data = dict(value if isinstance(value, Mapping) else _load(value))
        if (found := data.pop("format", None)) != FORMAT:
            raise TraceError(f"trace.format={found!r}: must be {FORMAT!r}.")
        if (version := data.pop("version", None)) != VERSION:
            raise TraceError(f"trace.version={version!r}: unknown; this cswap reads {VERSION}.")
        for name, kind in (("operators", TraceOperator), ("tensors", TraceTensor)):
            rows = _items(f"trace.{name}", data.get(name))
            data[name] = tuple(_record(f"trace.{name}[{i}]", kind, r) for i, r in enumerate(rows))
        return _record("trace", Trace, data)


_R = TypeVar("_R")


def _record(where: str, kind: type[_R], value: Any) -> _R:
    """An instance of the dataclass ``kind``; unknown and missing fields are errors, named."""
    if not isinstance(value, Mapping):
        raise TraceError(f"{where}={value!r}: must be an object.")
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]  # a dataclass, by the callers
    for name in value:
        if name not in known:
            raise TraceError(f"{where}.{name}: no such field. Known: {', '.join(known)}.")
    for name, spec in known.items():
        required = spec.default is MISSING and spec.default_factory is MISSING
        if required and name not in value:
            raise TraceError(f"{where}.{name}: is missing.")
    tuples = ("inputs", "outputs", "shape")
    return kind(**{k: _items(f"{where}.{k}", v) if k in tuples else v for k, v in value.items()})


def _items(where: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise TraceError(f"{where}={value!r}: must be a list.")
    return tuple(value)


def _slim(data: dict[str, Any], kind: type) -> dict[str, Any]:
    """Without the fields that have their default, which most of a long trace's have."""
    defaults = {f.name: f.default for f in fields(kind)}
    return {k: v for k, v in data.items() if v != {} and (v != defaults[k] or k == "nbytes")}


def _load(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, str | os.PathLike):
        raise TraceError(f"trace={value!r}: must be a Trace, a dict, JSON text or a path.")
    text = os.fspath(value)
    name = text if len(text) < 200 else text[:200] + "..."
    try:
        if not text.lstrip().startswith("{"):
            text = Path(text).read_text(encoding="utf-8")
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"trace={name!r}: cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise TraceError(f"trace={name!r}: must be a JSON object.")
    return data


def _count(where: str, value: Any, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise TraceError(f"{where}={value!r}: must be an integer >= {least}.")


def _amount(where: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TraceError(f"{where}={value!r}: must be a number.")
    if not (math.isfinite(value) and value >= 0):
        raise TraceError(f"{where}={value!r}: must be finite and >= 0.")


def _one_of(where: str, value: Any, known: Iterable[str]) -> None:
    if value not in known:
        raise TraceError(f"{where}={value!r}: must be one of {', '.join(known)}.")


def _check_tensor(where: str, tensor: TraceTensor) -> None:
    _count(f"{where}.nbytes", tensor.nbytes)
    _count(f"{where}.saved", tensor.saved, -1)
    _one_of(f"{where}.role", tensor.role, ROLES)
    for index, extent in enumerate(tensor.shape):
        _count(f"{where}.shape[{index}]", extent)
    for name in ("profile", "ratios"):
        if not isinstance(getattr(tensor, name), Mapping):
            raise TraceError(f"{where}.{name}: must map names to numbers.")
    for codec, ratio in tensor.ratios.items():
        _amount(f"{where}.ratios[{codec!r}]", ratio)
        if not ratio > 0:
            raise TraceError(f"{where}.ratios[{codec!r}]={ratio!r}: must be > 0.")


def _check_operator(where: str, operator: TraceOperator, n_tensors: int) -> None:
    _one_of(f"{where}.kind", operator.kind, KINDS)
    _one_of(f"{where}.phase", operator.phase, PHASES)
    for name in ("duration_s", "flops", "bytes_moved"):
        _amount(f"{where}.{name}", getattr(operator, name))
    _count(f"{where}.workspace_bytes", operator.workspace_bytes)
    for name in ("inputs", "outputs"):
        indices = getattr(operator, name)
        for place, tensor in enumerate(indices):
            _count(f"{where}.{name}[{place}]", tensor)
            if tensor >= n_tensors:
                raise TraceError(
                    f"{where}.{name}[{place}]={tensor}: there are only {n_tensors} tensors."
                )
            if tensor in indices[:place]:
                raise TraceError(f"{where}.{name}[{place}]={tensor}: is listed twice.")


def _check_positions(tensors: tuple[TraceTensor, ...]) -> None:
    seen: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        if tensor.saved >= 0 and seen.setdefault(tensor.saved, index) != index:
            raise TraceError(
                f"trace.tensors[{index}].saved={tensor.saved}: is also the position of "
                f"trace.tensors[{seen[tensor.saved]}]."
            )


def _check_order(trace: Trace) -> None:
    """Every tensor has one producer at most, before its first use, and someone touches it."""
    producer: dict[int, int] = {}
    for index, operator in enumerate(trace.operators):
        for place, tensor in enumerate(operator.outputs):
            if producer.setdefault(tensor, index) != index:
                raise TraceError(
                    f"trace.operators[{index}].outputs[{place}]={tensor}: was already produced by "
                    f"trace.operators[{producer[tensor]}]."
                )
    touched = set(producer)
    for index, operator in enumerate(trace.operators):
        for place, tensor in enumerate(operator.inputs):
            touched.add(tensor)
            if producer.get(tensor, -1) >= index:
                raise TraceError(
                    f"trace.operators[{index}].inputs[{place}]={tensor}: is used before "
                    f"trace.operators[{producer[tensor]}] produces it."
                )
    for index in range(len(trace.tensors)):
        if index not in touched:
            raise TraceError(f"trace.tensors[{index}]: no operator reads or produces it.")
