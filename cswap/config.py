"""`SwapConfig`: every option, parsed once at the edge; below it sizes are integers of bytes."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cswap.display import MOST_SHOWN, short, shown
from cswap.errors import ConfigError
from cswap.log import log
from cswap.selectors import OPERATOR, check_globs, of_operators

if TYPE_CHECKING:
    from cswap.schema.tensor import TensorProfile

MIN_BYTES: Final = {"cpu": 64 << 10, "cuda": 1 << 20}
"""Default of ``min_bytes`` by kind of device."""

ENV_PREFIX: Final = "CSWAP_"

_BINARY: Final = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_DECIMAL: Final = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SHORT: Final = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}  # as of other GPU tools
_FACTORS: Final = _BINARY | _DECIMAL | _SHORT
_SIZE: Final = re.compile(r"\s*([0-9]{1,19})(\.[0-9]{1,19})?\s*([a-z]*)\s*", re.IGNORECASE)
_COUNT: Final = re.compile(r"\s*[0-9]{1,19}\s*")  # str.isdigit() would also take "²"

MOST_COUNT: Final = (1 << 63) - 1
"""Largest number of bytes, tensors or steps: 63 bits."""

LEAST: Final = "min"
"""Value of ``fit`` that asks for the least memory."""

DEVICE: Final = "device"
"""Value of ``fit`` that gives a step the memory of its device."""

SLOWDOWN: Final = 1.1
"""Default of ``slowdown``."""

MOST_NAME: Final = 255
"""Longest name of a codec, in characters: a stream's header has one byte for its length."""

Size = int | str
CodecOption = str | Callable[["TensorProfile"], str] | Mapping[Any, str]


def parse_bytes(value: Size, name: str) -> int:
    """A size in bytes from an int or from text such as "1.5GiB", "2G" (GiB) or "300MB".

    Raises:
        ConfigError: not a size, or negative.

    >>> parse_bytes("1.5KiB", "budget"), parse_bytes("2 MB", "budget"), parse_bytes(7, "budget")
    (1536, 2000000, 7)
    """
    nbytes = -1
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        factor = _FACTORS.get(match[3].lower())
        if factor is not None:
            nbytes = int(match[1]) * factor + int(float(match[2] or 0) * factor)
    if not 0 <= nbytes <= MOST_COUNT:
        raise ConfigError(
            f"{name}={shown(value)}: must be bytes as an int >= 0 (of 63 bits), or text such as "
            '"64KiB", "1.5GiB".'
        )
    return nbytes


def _parse_optional_bytes(value: Any, name: str) -> int | None:
    return None if value is None else parse_bytes(value, name)


def _parse_count(value: Any, name: str) -> int:
    if isinstance(value, str) and _COUNT.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_COUNT:
        raise ConfigError(f"{name}={shown(value)}: must be an integer >= 0.")
    return value


def _parse_bool(value: Any, name: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={shown(value)}: must be True or False.")
    return value


def _parse_lossy(value: Any, name: str) -> str | float:
    if isinstance(value, str):
        text: str = value
        try:
            value = float(text)
        except ValueError:
            if len(text) <= MOST_NAME:
                return text  # a name: checked by cswap.advisor.options, a layer that knows codecs
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ConfigError(
            f'{name}={shown(value)}: must be "off", the name of a lossy codec such as "int8", or a '
            "relative error between 0 and 1. A codec for some modules: codec={...}, from globs."
        )
    return float(value)


def _parse_positive(value: Any, name: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"{name}={shown(value)}: must be a number above 0, such as 0.25.")
    return number


def _parse_fit(value: Any, name: str) -> int | str | None:
    if value is None or value in (LEAST, DEVICE):
        return None if value is None else str(value)
    try:
        nbytes = parse_bytes(value, name)
    except ConfigError:
        nbytes = 0
    if not nbytes:
        raise ConfigError(
            f'{name}={shown(value)}: must be bytes above 0, such as "16GiB", "{LEAST}" for the '
            f'least memory, or "{DEVICE}" for that of the GPU.'
        )
    return nbytes


def _parse_slowdown(value: Any, name: str) -> float | None:
    if value is None:
        return None
    number = _parse_positive(value, name)
    if number < 1:
        raise ConfigError(
            f"{name}={shown(value)}: must be at least 1: a step's time over that without cswap."
        )
    return number


def _parse_codec(value: Any, name: str) -> CodecOption:
    if isinstance(value, str):
        return value
    if callable(value):
        chosen: Callable[[TensorProfile], str] = value
        return chosen
    if isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values()):
        check_globs((key for key in value if isinstance(key, str)), name)
        _check_operators(value, name)
        return dict(value)
    raise ConfigError(
        f"{name}={shown(value)}: must be 'auto', the name of a codec, a function from "
        "TensorProfile to a name, or a dict from dtype, module-path glob or op:GLOB to a name."
    )


def _parse_selectors(value: Any, name: str) -> tuple[Any, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, type):
        value = [value]
    if not isinstance(value, list | tuple | set | frozenset) or not all(
        isinstance(v, str | type) for v in value
    ):
        raise ConfigError(
            f"{name}={shown(value)}: must be module classes, path globs or op:GLOB, or a list."
        )
    check_globs((v for v in value if isinstance(v, str)), name)
    _check_operators(value, name)
    return tuple(value)


def _check_operators(selectors: Iterable[object], name: str) -> None:
    chosen = of_operators(selectors)
    if chosen and name == "recompute":
        raise ConfigError(
            f"{name}={shown(OPERATOR + chosen[0])}: names an operator; whole modules run again. "
            "Name a module's class or path. Single operators are computed again by remat=True, "
            "the default, or by a goal, fit=."
        )
    if "" in chosen:
        raise ConfigError(f'{name}="{OPERATOR}": names no operator. Write op:softmax, say.')


def _parse_directory(value: Any, name: str) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{name}={shown(value)}: must be a path to a directory.")
    path = Path(os.fsdecode(value))
    try:
        usable = path.is_dir() and os.access(path, os.W_OK | os.X_OK)
    except (OSError, ValueError):  # too long for a path, or with a NUL
        usable = False
    if not usable:
        raise ConfigError(f"{name}={shown(str(path))}: must be an existing, writable directory.")
    return path


def _parse_policy(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name}={shown(value)}: must be the name of a policy.")
    return value  # checked by cswap.advisor.options, a layer that knows the names


def _parse_plan(value: Any, _name: str) -> Any:
    return value  # read by cswap.schema.plan and cswap.fit.schedule, which know the formats


_PARSERS: Final[dict[str, Callable[[Any, str], Any]]] = {
    "codec": _parse_codec,
    "lossy": _parse_lossy,
    "min_bytes": _parse_optional_bytes,
    "budget": _parse_optional_bytes,
    "host_limit": _parse_optional_bytes,
    "spill_dir": _parse_directory,
    "keep_last": _parse_count,
    "exclude": _parse_selectors,
    "include": _parse_selectors,
    "recompute": _parse_selectors,
    "seed": _parse_count,
    "remat": _parse_bool,
    "verify": _parse_bool,
    "guard_every": _parse_count,
    "guard_error": _parse_positive,
    "policy": _parse_policy,
    "plan": _parse_plan,
    "fit": _parse_fit,
    "schedule": _parse_plan,
    "slowdown": _parse_slowdown,
}


@dataclass(frozen=True, slots=True)
class SwapConfig:
    """The options of `cswap.install` and `cswap.swapping`.

    Sizes are given as an int of bytes or as text ("1.5GiB") and are ints afterwards.

    Attributes:
        codec: ``"auto"`` lets the advisor choose per tensor; or one codec for all tensors that it
            supports (`cswap.list_codecs`); or a function from `TensorProfile` to a name, "auto" or
            "keep"; or a dict from dtype name, module-path glob or ``"op:GLOB"`` to a name ("auto"
            where nothing matches). Operators come before modules, and these before dtypes.
        lossy: ``"off"`` (default): every bit comes back. The name of a lossy codec: the advisor may
            use it. A number: the advisor may use every lossy codec whose relative error (root mean
            square, on normally distributed values) is at most that. No codec for inputs and outputs
            of norms is coarser than ``fp16``; some tensors stay exact (docs/lossy.md).
        min_bytes: smaller tensors stay in place; default 64 KiB on a CPU, 1 MiB on CUDA.
        budget: bytes of device memory that saved tensors may keep; the tensors saved last stay.
            Default: no such bound; a goal or prices decide alone.
        host_limit: bytes of host memory for encodings. Beyond it, encodings go to ``spill_dir``, or
            the tensor stays. Default: no limit.
        spill_dir: existing directory for the disk tier; default: no disk tier.
        keep_last: number of the tensors saved last that stay on the device: backward needs them
            first, before a copy could be back.
        exclude: module classes, globs on module paths, or ``"op:GLOB"`` for operators, whose saved
            tensors stay: ``"op:softmax"`` are results of softmax, ``"op:gelu"`` inputs of gelu
            (docs/options.md).
        include: if given, only tensors saved in these modules or by these operators are swapped.
        recompute: module classes, or globs on module paths, that run again in backward as a whole
            instead of saving tensors, as torch's checkpointing does it; of modules within each
            other, the outermost. Their forwards may only compute: one that changes a buffer or an
            attribute is an error in the first steps. Needs a model. cswap itself recomputes single
            operators only (``remat``).
        seed: of stochastic rounding; the same seed gives the same bytes.
        remat: compute a saved tensor again instead of storing it, where a cheap operator made it
            from tensors that are held anyway. Every bit is the same. Not with another ``policy``
            than "auto" or with ``verify``; with a plan, only the tensors that it says.
        verify: checksum every round trip; costs a pass over each tensor on both ways.
        guard_every: interval of the accuracy guard, in steps; its first check is in the second
            step; 0: never. A check computes the gradients of one module with lossy and with exact
            saved tensors, which costs about two forwards and backwards of that module. It needs a
            model, and a lossy codec that may be used.
        guard_error: relative error of these gradients above which tensors of that class (module
            class and codec) use the next milder codec from then on.
        policy: how ``codec="auto"`` chooses: ``"auto"`` by predicted cost; ``"raw"`` never
            compresses; ``"static:CODEC"`` always does; ``"cswap+"`` by the rule of the paper.
        plan: a plan (path, JSON text, dict or `Plan`) with a decision for each tensor.
        fit: bytes of device memory that a step may take, parameters and optimizer state included:
            each tensor is kept, encoded or computed again, as that asks for and with the least
            time; ``"min"``: the least memory; ``"device"``: that of the GPU, so nothing moves while
            all fits. Needs a model (docs/fit.md).
        schedule: path or text of a schedule that a run with the same goal has saved (docs/fit.md):
            it is obeyed from the first step on, and no step is explored. Needs a goal.
        slowdown: longest step, over that without cswap; default 1.1. With ``fit="min"``: the goal's
            limit, as it is of a model without ``fit`` (docs/fit.md). If ``policy``, ``codec``,
            ``plan``, ``budget``, ``host_limit`` or ``spill_dir`` says what has to leave, there is
            none; nor with ``lossy`` by default. Without a model on a CPU, a higher one is a higher
            price of a byte: codecs that take more time for fewer bytes are chosen.

    Raises:
        ConfigError: an option has a wrong value.
    """

    codec: CodecOption = "auto"
    lossy: str | float = "off"
    min_bytes: Size | None = None
    budget: Size | None = None
    host_limit: Size | None = None
    spill_dir: str | os.PathLike[str] | None = None
    keep_last: int = 0
    exclude: Any = ()
    include: Any = ()
    recompute: Any = ()
    seed: int = 0
    remat: bool = True
    verify: bool = False
    guard_every: int = 100
    guard_error: float = 0.25
    policy: str = "auto"
    plan: Any = None
    fit: Size | None = None
    schedule: Any = None
    slowdown: float | None = None

    def __post_init__(self) -> None:
        for name, parse in _PARSERS.items():
            object.__setattr__(self, name, parse(getattr(self, name), name))

    @staticmethod
    def resolve(base: SwapConfig | None = None, **options: Any) -> SwapConfig:
        """Explicit options, completed from ``base``; without it, from environment and defaults.

        ``CSWAP_BUDGET=2GiB`` and the like override defaults, never explicit arguments. In the
        environment, ``plan`` is a path and ``codec`` is a name.

        Raises:
            ConfigError: an unknown option or a wrong value. The message names the environment
                variable that the value came from.
        """
        for name in options:
            if name not in _PARSERS:
                close = difflib.get_close_matches(name[:MOST_SHOWN], _PARSERS, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ConfigError(
                    f"{short(name)}: no such option.{hint} Known: {', '.join(_PARSERS)}."
                )
        if base is not None:
            return dataclasses.replace(base, **options)
        return SwapConfig(**{**_from_environment(skip=options), **options})

    def min_bytes_on(self, kind: str) -> int:
        """Smallest tensor, in bytes, that is swapped on this kind of device ("cpu", "cuda")."""
        if self.min_bytes is None:
            return MIN_BYTES.get(kind, MIN_BYTES["cuda"])
        assert isinstance(self.min_bytes, int)
        return self.min_bytes


OTHER_VARIABLES: Final = frozenset({"CSWAP_CACHE_DIR", "CSWAP_CALIBRATE"})
"""Of the environment, read elsewhere."""

_told: set[str] = set()


def _tell_of_unknown_variables() -> None:
    known = OTHER_VARIABLES | {ENV_PREFIX + name.upper() for name in _PARSERS}
    for variable in os.environ:
        if variable.startswith(ENV_PREFIX) and variable not in known | _told:
            _told.add(variable)
            # Without the prefix, which makes all of them alike.
            names = [name.removeprefix(ENV_PREFIX) for name in known]
            name = variable.removeprefix(ENV_PREFIX)[:MOST_SHOWN]
            close = difflib.get_close_matches(name, names, n=1)
            hint = f" Did you mean {ENV_PREFIX}{close[0]}?" if close else ""
            log.warning("%s is set, and is no option of cswap.%s", short(variable), hint)


def _from_environment(skip: Mapping[str, Any]) -> dict[str, Any]:
    _tell_of_unknown_variables()
    found: dict[str, Any] = {}
    for name, parse in _PARSERS.items():
        variable = ENV_PREFIX + name.upper()
        if name not in skip and variable in os.environ:
            parse(os.environ[variable], variable)  # an error names the variable
            found[name] = os.environ[variable]
    return found
