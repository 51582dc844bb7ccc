"""Makes rows and one JSON file from the logs of the demo's runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.workloads.turns import of_like_steps

if TYPE_CHECKING:
    from bench.workloads.lockstep import Lockstep, Log, Replica
    from bench.workloads.saved_bytes import Curve

N_SETTLING_TIMES = 3  # the first steps of a run meet cold caches and are not timed

HOW_MEASURED = {
    "peak_saved_bytes": (
        "Largest number of bytes that saved tensors held at one moment of a step: the storages of "
        "all tensors passed to autograd's pack or returned by its unpack (model and loss, "
        "recomputation included), each counted once at full size from then until its last owner "
        "drops it, followed by weak references, plus the encodings the engine holds. Parameters, "
        "buffers and the batch are left out. Measured in extra steps before and after training; "
        "the largest counts."
    ),
    "ratio": (
        "Raw bytes of all tensors that the model's forward saved (parameters left out, a storage "
        "saved several times counted once) / the same bytes with every encoded tensor at its "
        "encoded size. What stays as it is counts fully on both sides. Of one step after training."
    ),
    "encoded_ratio": ("Raw / encoded bytes of the encoded tensors alone, over all training steps."),
    "held_bytes": (
        "As peak_saved_bytes, but of the model only, between forward and backward, when all "
        "encodes had finished; after training."
    ),
    "peak_ratio, held_ratio": "off's peak_saved_bytes or held_bytes / this mode's",
    "heap": (
        "Cross-check on one more step after training: bytes allocated with malloc (torch, numpy, "
        "Numba, Python; glibc's mallinfo2), as growth over the moment before the mode was "
        "switched on; scratch buffers that earlier engines of the process left to this one count "
        "as growth. Holds temporaries and gradients in flight too."
    ),
    "step_time_rel": (
        "Median over the steps of (this mode's time / off's time for the same step); forward, "
        "backward and optimizer; the modes take turns, so that noise on the machine meets all of "
        "them. No measuring hooks are on in timed steps."
    ),
    "bit_equal": "Loss and every gradient had the bits of off in every step.",
    "max_grad_diff": (
        "Largest absolute difference of a gradient element from off's, over all steps and "
        "parameters."
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One model in one mode. None: not known, because the run was interrupted before."""

    model: str
    mode: str
    peak_saved_bytes: int | None
    ratio: float | None
    step_time_rel: float | None
    final_loss: float | None
    accuracy: float | None
    bit_equal: bool | None
    max_grad_diff: float | None
    peak_ratio: float | None
    encoded_ratio: float | None
    held_bytes: int | None
    held_ratio: float | None
    fallbacks: int
    n_steps: int
    step_ms: float | None
    step_time_rel_quartiles: tuple[float, float] | None
    train_loss: float | None
    heap_peak_bytes: int | None
    heap_after_forward_bytes: int | None


def rows(run: Lockstep) -> list[Row]:
    """Return one row per mode of a run, finished or not."""
    off = run.replicas[0].log
    return [_row(run.task.name, replica, off) for replica in run.replicas]


def _row(model: str, replica: Replica, off: Log) -> Row:
    log = replica.log
    peak, off_peak = _peak_saved(log), _peak_saved(off)
    held, off_held = _held(log), _held(off)
    stats = log.cswap["stats"] if log.cswap else {}
    n = min(len(log.step_s), len(off.step_s))  # an interrupted round has not all of its steps
    counted = slice(max(0, min(N_SETTLING_TIMES, n - 1)), n)
    relative, quartiles = (
        of_like_steps(log.step_s[counted], off.step_s[counted]) if n else (None, None)
    )
    last = log.validations[-1] if log.validations else None
    heap = log.memories[-1] if log.memories else None
    return Row(
        model=model,
        mode=replica.mode,
        peak_saved_bytes=peak,
        ratio=_ratio(log, off),
        step_time_rel=relative,
        final_loss=last.loss if last else None,
        accuracy=last.accuracy if last else None,
        bit_equal=all(log.same_bits) if log.same_bits else None,
        max_grad_diff=max(log.grad_diffs, default=None),
        peak_ratio=off_peak / peak if peak and off_peak else None,
        encoded_ratio=stats.get("ratio"),
        held_bytes=held,
        held_ratio=off_held / held if held and off_held else None,
        fallbacks=int(stats.get("fallbacks", 0)),
        n_steps=len(log.same_bits),
        step_ms=median(log.step_s) * 1e3 if log.step_s else None,
        step_time_rel_quartiles=quartiles,
        train_loss=log.losses[-1] if log.losses else None,
        heap_peak_bytes=heap.heap.peak if heap and heap.heap.nbytes else None,
        heap_after_forward_bytes=heap.heap_after_forward if heap else None,
    )


def _peak_saved(log: Log) -> int | None:
    return max((memory.saved.peak for memory in log.memories), default=None)


def _held(log: Log) -> int | None:
    return log.memories[-1].between.held_bytes if log.memories else None


def _ratio(log: Log, off: Log) -> float | None:
    if not log.memories or not off.memories:
        return None
    raw_bytes, mine = off.memories[-1].between.raw_bytes, log.memories[-1].between
    return raw_bytes / (raw_bytes - mine.swapped_bytes + mine.encoded_bytes)


def curves(run: Lockstep) -> dict[str, Any]:
    """Return everything a run logged, per mode."""
    return {
        replica.mode: {
            "train_loss": replica.log.losses,
            "step_s": replica.log.step_s,
            "bit_equal": replica.log.same_bits,
            "max_grad_diff": replica.log.grad_diffs,
            "validation": [asdict(validation) for validation in replica.log.validations],
            "memory": [
                {
                    "n_steps": memory.n_steps,
                    "saved": _curve(memory.saved),
                    "between": asdict(memory.between),
                    "heap": _curve(memory.heap),
                }
                for memory in replica.log.memories
            ],
            "cswap": replica.log.cswap,
        }
        for replica in run.replicas
    }


def _curve(curve: Curve) -> dict[str, list[float] | list[int]]:
    return {"ms": [round(at_s * 1e3, 3) for at_s in curve.at_s], "bytes": curve.nbytes}
