"""Tunes launch shapes by Bayesian optimisation: how kernels start; their output stays the same.

A GPU's kernels have threads per block and blocks per multiprocessor (`cswap.codecs.launcher`), a
CPU's ranges of tiles per tensor (`cswap.codecs.parallel`). The result is stored with the
calibration and used from then on. It replaces the default only if it beats it in a comparison in
turns.

Source: CSWAP (IEEE Cluster 2021, section IV-D and Algorithm 1): the sum of compression and
decompression time over grid and block, 10 random and 25 guided samples. The paper names neither
surrogate nor acquisition; here both are optuna's tree-structured Parzen estimator.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from cswap.advisor.calibration import SHAPE_OF, Calibration, machine_of, stored
from cswap.advisor.round_trip import round_trip
from cswap.codecs import gpu, launcher, parallel
from cswap.codecs.base import takes, word_dtype
from cswap.codecs.registry import get_codec
from cswap.display import shown
from cswap.errors import ConfigError, UnsupportedError
from cswap.install_hint import to_install

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cswap.codecs.base import Codec

RANDOM_SAMPLES: Final = 10
GUIDED_SAMPLES: Final = 25
BUDGET: Final = RANDOM_SAMPLES + GUIDED_SAMPLES

ROUNDS: Final = 7
"""Rounds of the comparison between the best shape and the default, in turns."""

GAIN: Final = 0.03
"""Share by which the best shape must be faster than the default to be used."""

NBYTES: Final = {"cpu": 16 << 20, "cuda": 64 << 20}
"""Bytes of the tensor that is encoded and decoded, by kind of device."""

Shape = dict[str, int]

SPACES: Final[dict[str, dict[str, tuple[int, ...]]]] = {
    "cpu": {
        "ranges": tuple(range(1, parallel.MAX_RANGES + 1)),
        "least": (8, 16, 32, 64, 128, 256, 512, 1024),
    },
    "cuda": {"threads": (64, 128, 256, 512, 1024), "blocks_per_sm": tuple(range(1, 33))},
}
"""Values of each parameter, by kind of device."""


@dataclass(frozen=True, slots=True)
class TuneResult:
    """Result of tuning one codec.

    Attributes:
        codec: its name.
        kind: kind of device.
        shape: the shape to use: the best one, or the default if that is about as fast.
        seconds: seconds of encode and decode with ``shape``, in the last comparison.
        default: the default shape.
        default_s: seconds with ``default``, in the same comparison.
        guided_s: fewest seconds in the search.
    """

    codec: str
    kind: str
    shape: Shape
    seconds: float
    default: Shape
    default_s: float
    guided_s: float


def tune(
    codec: str,
    kind: str,
    *,
    budget: int = BUDGET,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> TuneResult:
    """Search the fastest launch shape of a codec on this machine, and store it.

    Args:
        codec: name of a tiled codec.
        kind: kind of device, "cpu" or "cuda".
        budget: number of samples; the first `RANDOM_SAMPLES` are random, the default among them.
        seed: seed of the search.
        progress: called with the number of samples taken.

    Raises:
        UnsupportedError: optuna is missing, or there is no such device here.
        ConfigError: the codec has no launch shape on that device.
    """
    measure, default = _measurer(codec, kind), default_of(kind)
    best, guided_s = search(measure, SPACES[kind], default, budget, seed, progress)
    shape, seconds, default_s = _compare(measure, best, default)
    before = stored(kind) or Calibration(machine_of(kind), {})
    replace(before, shapes={**before.shapes, codec: shape}).save()
    return TuneResult(codec, kind, shape, seconds, default, default_s, guided_s)


def default_of(kind: str) -> Shape:
    """The default launch shape on that kind of device."""
    return asdict(SHAPE_OF[kind]())


def search(
    measure: Callable[[Shape], float],
    space: Mapping[str, tuple[int, ...]],
    default: Shape,
    budget: int,
    seed: int,
    progress: Callable[[int], object] | None = None,
) -> tuple[Shape, float]:
    """(shape, seconds) of the fastest of ``budget`` samples, one of which is the default.

    Raises:
        UnsupportedError: optuna is missing.
    """
    try:
        import optuna
    except ImportError as error:
        raise UnsupportedError(f"tuning needs optuna ({error}): {to_install('tune')}") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=RANDOM_SAMPLES)
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial({name: space[name].index(value) for name, value in default.items()})
    for n in range(budget):
        trial = study.ask()
        shape = {
            name: values[trial.suggest_int(name, 0, len(values) - 1)]
            for name, values in space.items()
        }
        study.tell(trial, measure(shape))
        if progress is not None:
            progress(n + 1)
    found = {name: space[name][index] for name, index in study.best_params.items()}
    return found, float(study.best_value)


def apply_tuned(kind: str) -> None:
    """Start kernels on that kind of device with the shapes tuned on this machine."""
    found = stored(kind)
    for codec, shape in ({} if found is None else found.shapes).items():
        _use(codec, kind, shape)


def _use(codec: str, kind: str, shape: Shape) -> None:
    if kind == "cpu":
        for direction in ("encode", "decode"):
            parallel.SHAPES[f"{codec}-{direction}"] = parallel.RangeShape(**shape)
    else:
        for word in (1, 2, 4, 8):
            for direction in ("encode", "decode"):
                launcher.SHAPES[f"{codec}-{word}-{direction}"] = launcher.LaunchShape(**shape)


def _measurer(name: str, kind: str) -> Callable[[Shape], float]:
    codec = get_codec(name)
    if kind not in SPACES or (kind == "cuda" and not torch.cuda.is_available()):
        raise UnsupportedError(f"device={shown(kind)}: not here; known are {', '.join(SPACES)}.")
    x = _tensor(codec, kind)
    if kind == "cuda" and not gpu.has_kernels(name, word_dtype(x.dtype).word):
        raise ConfigError(f"codec={name!r}: has no kernel of its own on a GPU.")
    round_trip(codec, x, repeat=1, all_threads=True)

    def measure(shape: Shape) -> float:
        ranges, launches = dict(parallel.SHAPES), dict(launcher.SHAPES)
        _use(name, kind, shape)
        try:
            took = [round_trip(codec, x, repeat=1, all_threads=True)[1:] for _ in range(3)]
        finally:
            parallel.SHAPES.clear()
            parallel.SHAPES.update(ranges)
            launcher.SHAPES.clear()
            launcher.SHAPES.update(launches)
        return statistics.median(sum(both) for both in took)

    return measure


def _tensor(codec: Codec, kind: str) -> torch.Tensor:
    from cswap.codecs.tiled import TiledCodec

    if not isinstance(codec, TiledCodec):
        raise ConfigError(f"codec={codec.name!r}: has no launch shape; tiled codecs have.")
    generator, nbytes = torch.Generator().manual_seed(0), NBYTES[kind]
    if takes(codec, torch.float32, kind):
        return torch.randn(nbytes // 4, generator=generator).relu().to(kind)
    return torch.randint(0, 1000, (nbytes // 8,), generator=generator).to(kind)


def _compare(
    measure: Callable[[Shape], float], best: Shape, default: Shape
) -> tuple[Shape, float, float]:
    # In turns. The default wins unless the other shape is clearly faster.
    took: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS):
        for is_best in (False, True):
            took[is_best].append(measure(best if is_best else default))
    best_s, default_s = statistics.median(took[True]), statistics.median(took[False])
    if best_s < (1 - GAIN) * default_s:
        return best, best_s, default_s
    return default, default_s, default_s
