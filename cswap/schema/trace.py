"""A trace: the operators and tensors of one training step. Plain data, JSON on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from cswap.display import shown
from cswap.errors import TraceError
from cswap.schema.checks import MOST_BYTES, MOST_RATE, MOST_SECONDS, Checks
from cswap.schema.reading import read_object

FORMAT: Final = "cswap-trace"
VERSION: Final = 1
PHASES: Final = ("forward", "backward", "optimizer")
KINDS: Final = (
    *("conv", "pool", "activation", "norm", "linear", "attention"),
    *("loss", "elementwise", "optimizer", "other"),
)
ROLES: Final = ("activation", "gradient", "parameter", "optimizer", "input")
SOURCES: Final = ("measured", "estimated", "synthetic")

LEAST_RATIO: Final = 2.0**-12
MOST_RATIO: Final = 1e12
"""Bounds of the ratio of raw to encoded bytes. `LEAST_RATIO` allows a single element to become some
kilobytes."""

_CHECK: Final = Checks(TraceError)


@dataclass(frozen=True, slots=True)
class TraceTensor:
    """One tensor of the step.

    Attributes:
        nbytes: raw bytes.
        name: a name for display, such as ``features.0.input``.
        module: path of the module that produced or saved the tensor.
        dtype: torch's name without the prefix ``torch.``.
        shape: in elements; may be empty.
        role: one of `ROLES`.
        saved: position among the swappable tensors that autograd saved, in pack order. Plans use
            it as their key. -1: not saved.
        profile: fields of `TensorProfile`, such as ``zero_fraction``; may be empty.
        ratios: raw bytes over encoded bytes by codec, measured or predicted; 1 for a codec that is
            missing.
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
        name: a name for display, such as ``features.0``.
        kind: one of `KINDS`.
        phase: one of `PHASES`; the loss belongs to forward.
        duration_s: seconds on a device that runs nothing else.
        inputs: indices into `Trace.tensors` of the tensors that the operator reads.
        outputs: indices into `Trace.tensors` of the tensors that the operator produces.
        workspace_bytes: device memory that the operator holds while it runs, besides its inputs
            and outputs.
        module: path of the operator's module.
        flops: floating-point operations.
        bytes_moved: bytes of device memory read and written.
        writes: those of ``inputs`` that the operator changes in place.
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
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """One whole training step. The constructor checks it.

    A tensor lives from the start of its producer to the end of its last user. A tensor without a
    producer lives from the start of the step.

    Attributes:
        operators: operators in execution order.
        tensors: the tensors that the operators read and produce.
        resident_bytes: device memory that is held during the whole step and is not among
            ``tensors``: parameters, their gradients, optimizer state.
        name: name of the model.
        batch: samples of the step; 0: not known.
        source: one of `SOURCES`.
        hardware: name of the hardware that the durations are valid for.

    Raises:
        TraceError: the trace contradicts itself (an index out of range, a use before production).
    """

    operators: tuple[TraceOperator, ...]
    tensors: tuple[TraceTensor, ...]
    resident_bytes: int = 0
    name: str = ""
    batch: int = 0
    source: str = "synthetic"
    hardware: str = ""

    def __post_init__(self) -> None:
        _CHECK.count("trace.resident_bytes", self.resident_bytes, most=MOST_BYTES)
        _CHECK.count("trace.batch", self.batch)
        _CHECK.one_of("trace.source", self.source, SOURCES)
        for name in ("name", "hardware"):
            _CHECK.text(f"trace.{name}", getattr(self, name))
        for index, tensor in enumerate(self.tensors):
            _check_tensor(f"trace.tensors[{index}]", tensor)
        for index, operator in enumerate(self.operators):
            _check_operator(f"trace.operators[{index}]", operator, len(self.tensors))
        _check_sums(self)
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
            TraceError: the trace cannot be read, has another format or version, or a field is
                wrong (the message names it).

        >>> forward = TraceOperator("f", "other", "forward", 1.0, (), (0,))
        >>> trace = Trace((forward,), (TraceTensor(8),))
        >>> Trace.parse(trace.to_dict()) == trace
        True
        """
        if isinstance(value, Trace):
            return value
        if not isinstance(value, Mapping | str | os.PathLike):
            raise TraceError(f"trace={shown(value)}: must be a Trace, a dict, JSON text or a path.")
        data = dict(
            value if isinstance(value, Mapping) else read_object(value, "trace", TraceError)
        )
        if (found := data.pop("format", None)) != FORMAT:
            raise TraceError(f"trace.format={shown(found)}: must be {FORMAT!r}.")
        version = data.pop("version", None)
        if isinstance(version, bool) or version != VERSION:
            raise TraceError(
                f"trace.version={shown(version)}: unknown; this cswap reads {VERSION}."
            )
        data = _CHECK.record("trace", data, Trace)
        data["operators"] = _rows("trace.operators", TraceOperator, data["operators"])
        data["tensors"] = _rows("trace.tensors", TraceTensor, data["tensors"])
        return Trace(**data)


_R = TypeVar("_R", TraceOperator, TraceTensor)


def _rows(where: str, kind: type[_R], value: Any) -> tuple[_R, ...]:
    rows = _CHECK.items(where, value)
    return tuple(_row(f"{where}[{i}]", kind, row) for i, row in enumerate(rows))


def _row(where: str, kind: type[_R], value: Any) -> _R:
    found = _CHECK.record(where, value, kind)
    for name in ("inputs", "outputs", "writes", "shape"):
        if name in found:
            found[name] = _CHECK.items(f"{where}.{name}", found[name])
    return kind(**found)


def _slim(data: dict[str, Any], kind: type) -> dict[str, Any]:
    """Leave out fields that have their default value. In a long trace most fields do."""
    defaults = {f.name: f.default for f in fields(kind)}
    return {k: v for k, v in data.items() if v != {} and (v != defaults[k] or k == "nbytes")}


def _check_tensor(where: str, tensor: TraceTensor) -> None:
    _CHECK.count(f"{where}.nbytes", tensor.nbytes, most=MOST_BYTES)
    _CHECK.count(f"{where}.saved", tensor.saved, -1)
    _CHECK.one_of(f"{where}.role", tensor.role, ROLES)
    for name in ("name", "module", "dtype"):
        _CHECK.text(f"{where}.{name}", getattr(tensor, name))
    for index, extent in enumerate(tensor.shape):
        _CHECK.count(f"{where}.shape[{index}]", extent)
    _CHECK.numbers(f"{where}.profile", tensor.profile)
    for codec, ratio in _CHECK.mapping(f"{where}.ratios", tensor.ratios, "numbers").items():
        _CHECK.number(f"{where}.ratios[{shown(codec)}]", ratio, LEAST_RATIO, MOST_RATIO)


def _check_operator(where: str, operator: TraceOperator, n_tensors: int) -> None:
    _CHECK.one_of(f"{where}.kind", operator.kind, KINDS)
    _CHECK.one_of(f"{where}.phase", operator.phase, PHASES)
    for name in ("name", "module"):
        _CHECK.text(f"{where}.{name}", getattr(operator, name))
    _CHECK.seconds(f"{where}.duration_s", operator.duration_s)
    for name in ("flops", "bytes_moved"):
        _CHECK.number(f"{where}.{name}", getattr(operator, name), 0.0, MOST_RATE)
    _CHECK.count(f"{where}.workspace_bytes", operator.workspace_bytes, most=MOST_BYTES)
    for name in ("inputs", "outputs", "writes"):
        seen: set[int] = set()
        for place, tensor in enumerate(getattr(operator, name)):
            _CHECK.count(f"{where}.{name}[{place}]", tensor)
            if tensor >= n_tensors:
                raise TraceError(
                    f"{where}.{name}[{place}]={tensor}: there are only {n_tensors} tensors."
                )
            if tensor in seen:
                raise TraceError(f"{where}.{name}[{place}]={tensor}: is listed twice.")
            if name == "writes" and tensor not in operator.inputs:
                raise TraceError(f"{where}.{name}[{place}]={tensor}: is not among the inputs.")
            seen.add(tensor)


def _check_sums(trace: Trace) -> None:
    held = trace.resident_bytes + sum(tensor.nbytes for tensor in trace.tensors)
    if held + sum(operator.workspace_bytes for operator in trace.operators) > MOST_BYTES:
        raise TraceError(f"trace: its tensors and workspaces have more than {MOST_BYTES} bytes.")
    if sum(operator.duration_s for operator in trace.operators) > MOST_SECONDS:
        raise TraceError(f"trace: its operators take more than {MOST_SECONDS:g} seconds.")


def _check_positions(tensors: tuple[TraceTensor, ...]) -> None:
    seen: dict[int, int] = {}
    for index, tensor in enumerate(tensors):
        if tensor.saved >= 0 and seen.setdefault(tensor.saved, index) != index:
            raise TraceError(
                f"trace.tensors[{index}].saved={tensor.saved}: is also the position of "
                f"trace.tensors[{seen[tensor.saved]}]."
            )


def _check_order(trace: Trace) -> None:
    """Check that each tensor is used or produced, by one producer at most, before its first use."""
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
