"""Builds a trace from the data of a recorder.

Note [a storage in pieces]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Memory is freed by storage, so a tensor of a trace is a storage with all its views. Autograd may
save parts of a storage that the engine swaps separately: the time steps of an unbound input, or the
gates of an LSTM cell. Then each part is a tensor of its own, and the rest of the storage is another
tensor. If parts overlap, the largest part stands for the storage, and the other parts have no
tensor. A plan then leaves their positions to the advisor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cswap.schema.trace import Trace, TraceOperator, TraceTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cswap.plan.tracing.positions import SavedRegion
    from cswap.plan.tracing.recorder import RecordedOperator, RecordedStorage, Recorder, Use


class _Pieces:
    """The tensors that one storage becomes."""

    def __init__(self, storage: RecordedStorage) -> None:
        self._storage = storage
        regions = list(zip(storage.regions, storage.samples, strict=True))
        if sum(r.nbytes for r, _ in regions) > storage.nbytes:
            regions = [max(regions, key=lambda pair: pair[0].nbytes)]
            self._places = [(0, storage.nbytes)]
            sizes = [storage.nbytes]
        else:
            self._places = [(r.start, r.span) for r, _ in regions]
            sizes = [r.nbytes for r, _ in regions]
        rest = storage.nbytes - sum(sizes)
        self._n_saved = len(sizes)
        self.tensors = [
            self._tensor(n, region, sample)
            for n, (region, sample) in zip(sizes, regions, strict=True)
        ]
        if rest:
            self.tensors.append(self._tensor(rest, None, None))

    def used(self, start: int, span: int) -> Iterable[int]:
        """Indices of the pieces that a view of these bytes reads."""
        if (start, span) in self._places:
            return (self._places.index((start, span)),)
        touched = [i for i, (s, n) in enumerate(self._places) if s < start + span and start < s + n]
        return (*touched, *range(self._n_saved, len(self.tensors)))

    def _tensor(self, nbytes: int, region: SavedRegion | None, sample: Any) -> TraceTensor:
        storage = self._storage
        profile, ratios = sample or ({}, {})
        part = nbytes < storage.nbytes and region is not None
        return TraceTensor(
            nbytes=nbytes,
            name=f"{storage.name}[{region.start}:]" if part and region else storage.name,
            module=storage.module,
            dtype=storage.dtype,
            shape=() if nbytes < storage.nbytes else storage.shape,
            role=storage.role,
            saved=-1 if region is None else region.position,
            profile=profile,
            ratios=ratios,
        )


def assemble(recorder: Recorder, durations_s: Sequence[float], **fields: Any) -> Trace:
    """Build the trace of a recorded step.

    Args:
        recorder: the recorder after the step.
        durations_s: seconds of each operator.
        **fields: fields of `Trace`, except operators and tensors.
    """
    pieces = {key: _Pieces(storage) for key, storage in recorder.storages.items()}
    indices = _Indices(pieces)
    operators = [
        _operator(operator, seconds, indices)
        for operator, seconds in zip(recorder.operators, durations_s, strict=True)
    ]
    return Trace(operators=tuple(operators), tensors=tuple(indices.tensors), **fields)


class _Indices:
    """Indices of tensors in the trace, assigned in the order in which operators first use them."""

    def __init__(self, pieces: dict[int, _Pieces]) -> None:
        self._pieces = pieces
        self._places: dict[tuple[int, int], int] = {}
        self.tensors: list[TraceTensor] = []

    def read(self, uses: Iterable[Use]) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for key, start, span in uses:
            for piece in self._pieces[key].used(start, span):
                found[self._place(key, piece)] = None
        return tuple(found)

    def produced(self, keys: Iterable[int]) -> tuple[int, ...]:
        return tuple(
            self._place(key, piece)
            for key in keys
            for piece in range(len(self._pieces[key].tensors))
        )

    def _place(self, key: int, piece: int) -> int:
        if (key, piece) not in self._places:
            self._places[key, piece] = len(self.tensors)
            self.tensors.append(self._pieces[key].tensors[piece])
        return self._places[key, piece]


def _operator(operator: RecordedOperator, duration_s: float, indices: _Indices) -> TraceOperator:
    name = f"{operator.module}.{operator.name}" if operator.module else operator.name
    inputs = indices.read(operator.reads)
    return TraceOperator(
        name=name,
        kind=operator.kind,
        phase=operator.phase,
        duration_s=duration_s,
        inputs=inputs,
        outputs=indices.produced(operator.produces),
        module=operator.module,
        flops=operator.flops,
        bytes_moved=operator.bytes_moved,
        writes=tuple(t for t in indices.read(operator.writes) if t in inputs),
    )
