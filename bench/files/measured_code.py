"""The code that a kind of result depends on; `bench.files.stale` looks whether it has changed."""

from __future__ import annotations

from typing import Final

_EVERY_CODEC: Final = ("cswap/codecs", "kernels/cswap_kernels")
_NOT_ON_A_CPU: Final = (
    *("!kernels/cswap_kernels/cuda", "!cswap/codecs/gpu.py", "!cswap/codecs/cubins.py"),
    *("!cswap/codecs/launcher.py", "!cswap/codecs/pinned_sizes.py"),
    *("!cswap/devices/cuda.py", "!cswap/devices/cuda_callbacks.py"),
    *("!cswap/devices/cuda_events.py", "!cswap/devices/pinned.py"),
)
_LOOPS: Final = "kernels/cswap_kernels/uncounted.py"
"""Only the planner's loops import it."""
_CODECS: Final = (*_EVERY_CODEC, f"!{_LOOPS}", *_NOT_ON_A_CPU)
_PROFILER: Final = ("cswap/profiler.py", "cswap/schema/tensor.py")
_METERS: Final = ("bench/workloads/saved_bytes.py", "cswap/experiments/timing.py")
_WORKLOADS: Final = (
    "cswap/experiments/task.py",
    "bench/workloads/data.py",
    "bench/workloads/small_models.py",
    "bench/workloads/residual.py",
    "bench/workloads/tasks.py",
    "bench/workloads/vision.py",
)
_ENGINE: Final = (
    *("cswap/engine", "cswap/hooks.py", "cswap/pool.py", "cswap/devices", "cswap/stores"),
    *("cswap/advisor", "cswap/remat", *_CODECS, *_PROFILER),
)
_PLANNER: Final = (
    *("cswap/plan", "cswap/schema/plan.py", "cswap/schema/trace.py", "cswap/advisor/cswap_plus.py"),
    *("cswap/schema/executable.py", "!cswap/plan/simulator/timeline.py"),
    _LOOPS,
    *("bench/sparsity/stored.py", "bench/results/cpu/sparsity.json", "bench/workloads/zoo"),
)
_TRAINED: Final = (
    *("bench/accuracy/tasks.py", "cswap/experiments/accuracy/train.py"),
    *_WORKLOADS,
)
_LOSSY: Final = (
    *(*_CODECS, "cswap/guard", "cswap/advisor/lossy_rules.py", "cswap/advisor/lossy_fallback.py"),
    *_TRAINED,
)

MEASURED: Final[dict[str, tuple[str, ...]]] = {
    "codecs": (
        *(*_CODECS, "cswap/experiments/codecs/contenders.py", "cswap/experiments/timing.py"),
        *("bench/codecs/recorded.py", "bench/codecs/synthetic.py"),
    ),
    "swap": (
        *(*_ENGINE, "bench/swap", "!bench/swap/report.py", *_METERS, *_WORKLOADS),
        "bench/workloads/methods.py",
    ),
    "workloads": (*_ENGINE, "bench/frameworks", *_METERS),
    "fit": (
        *(*_ENGINE, "cswap/fit", "cswap/second_forward.py", "bench/fit", *_METERS, *_WORKLOADS),
    ),
    "alone": (
        *(*_ENGINE, "bench/alone", "!bench/alone/report.py", "bench/fit/models.py", *_WORKLOADS),
        "bench/workloads/methods.py",
    ),
    "inlined": ("cswap/compiled", "bench/inlined", *_WORKLOADS),
    "overhead": (*_ENGINE, "bench/overhead"),
    "accuracy": (*_LOSSY, "cswap/experiments/accuracy/gradients.py"),
    "accuracy pilot": _TRAINED,
    "accuracy schedule": (*_CODECS, *_TRAINED, "bench/accuracy/schedule.py"),
    "demo": (*_ENGINE, "bench/demo", "!bench/demo/pictures.py", *_METERS, *_WORKLOADS),
    "advisor": (*_ENGINE, "bench/advisor", "!bench/advisor/report.py", *_WORKLOADS),
    "plans": (*_PLANNER, "bench/plans"),
    "sparsity": (
        *("cswap/plan/measure.py", "cswap/plan/tensor_values.py", "cswap/plan/tracing"),
        *(*_CODECS, *_PROFILER, "bench/sparsity", "bench/workloads/zoo"),
        "bench/workloads/data.py",
    ),
    "papers": (*_PLANNER, "bench/papers", "!bench/papers/report.py"),
    "gpu": (
        *(path for path in _ENGINE if path not in _NOT_ON_A_CPU),
        *("bench/gpu", "!bench/gpu/pictures.py", "bench/workloads/large_models.py"),
        "bench/workloads/zoo",
    ),
    "twin": (
        *(path for path in _ENGINE if path not in _NOT_ON_A_CPU),
        *("cswap/fit", "bench/twin", "!bench/twin/report.py"),
        *("bench/gpu/training.py", "bench/workloads/large_models.py", "bench/workloads/zoo"),
    ),
    "gpu build": ("kernels/cswap_kernels", f"!{_LOOPS}", "bench/gpu/build.py"),
    "gpu static": ("kernels/cswap_kernels", f"!{_LOOPS}", "bench/ptx", "bench/gpu/static.py"),
}
"""Files and folders that a result's figures depend on, by kind of result
(`bench.files.kinds`) or by the first word of the kind. A path after "!" is left out of
a folder named before.

Accuracy depends on the decoded values and on the rules for lossy codecs, not on the engine's moves.
Code that only words, tabulates or draws the figures is not included. A kind whose figures come from
another result file names that file.
"""


def paths_of(kind: str) -> tuple[str, ...]:
    """The paths of `MEASURED` for a kind of result; none for a kind that is not there.

    >>> paths_of("gpu link") == MEASURED["gpu"]
    True
    """
    return MEASURED.get(kind) or MEASURED.get(kind.partition(" ")[0], ())
