"""All checks of one codec and dtype in the interpreter: data, launch shapes, orders, damage."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from bench.ptx.check import Checker, MismatchError
from bench.ptx.data import ANY, FLOATS, INTEGERS, cases
from bench.ptx.device import interpreted
from bench.ptx.faults import DeadlockError, MemoryFaultError, UndefinedError
from bench.ptx.launch import Options
from cswap.codecs.launcher import SHAPES, LaunchShape
from cswap.codecs.registry import get_codec
from cswap_kernels.tiles import TILE_WORDS

if TYPE_CHECKING:
    from bench.ptx.device import Interpreted, Kernels
    from bench.ptx.launch import Order, Schedule

TARGETS: Final[dict[str, tuple[torch.dtype, ...]]] = {
    **dict.fromkeys(("zvc", "csr", "rle"), ANY),
    "bitpack": INTEGERS,
    "expk": FLOATS[:3],
    "zvc+expk": FLOATS[:3],
    "expk:3": (torch.bfloat16,),
    "expk:4": (torch.float32,),
    **dict.fromkeys(("bf16", "fp16"), FLOATS[2:]),
    **dict.fromkeys(("int8", "fp8", "mxfp8", "int4", "zfp"), FLOATS),
    "zfp:3": FLOATS[::2],
    **dict.fromkeys(("zfp:9", "zfp:1"), FLOATS[2:]),
    "zvc+rle": ANY,
    "zvc+bitpack": INTEGERS[1:],
    **dict.fromkeys(("zvc+bf16", "zvc+fp16"), FLOATS[2:]),
    **dict.fromkeys(("zvc+fp8", "zvc+int8", "zvc+mxfp8", "zvc+int4"), FLOATS),
}
"""Every codec with kernels of ours, by name, and dtypes that together need all of them."""

ORDERS: Final[tuple[Order, ...]] = ("sequential", "shuffled", "interleaved")
THREADS: Final = (32, 64, 128, 512, 1024)
"""Blocks of other sizes than the usual 256."""

DAMAGED: Final = (
    *("sparse 60", "sparse 97", "runs", "relu", "normal", "small signed", "5 bits", "wide"),
)
"""Cases whose payloads are damaged."""

FAULTS: Final = (MismatchError, MemoryFaultError, DeadlockError, UndefinedError)
BAD_NOTES: Final = ("RACE", "unwritten", "another block", "what this launch wrote")
"""Parts of the interpreter's notes that are errors.

Of ``zfp`` only the first is one: its last block may write a tensor anew that the others have
encoded, and it reads words behind a short stream, whose bits it does not use. Damaged payloads that
are refused may let two threads store different words at one place: nobody reads them.
"""


@dataclass(slots=True)
class Outcome:
    """The findings of the checks of one codec and dtype.

    Attributes:
        round_trips: that agreed.
        damaged: payloads that both twins refused or decoded alike.
        failures: the others, and races; empty if all is well.
    """

    round_trips: int = 0
    damaged: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is checked.

    Attributes:
        full: every kind of data and of damage; else the usual ones.
        shapes: whether blocks of every size are launched, too.
        damage: payloads of each kind of damage.
        only: names of the cases; empty for all.
    """

    full: bool = False
    shapes: bool = True
    damage: int = 2
    only: tuple[str, ...] = ()


def check(
    kernels: Kernels, name: str, dtype: torch.dtype, effort: Effort = Effort(), seed: int = 0
) -> Outcome:
    """Run a codec's kernels on a dtype, with ``seed`` for everything that is random."""
    with interpreted(kernels) as device:
        return _Run(device, name, dtype, effort, seed).all()


class _Run:
    def __init__(
        self, device: Interpreted, name: str, dtype: torch.dtype, effort: Effort, seed: int
    ) -> None:
        self._device, self._name, self._dtype, self._effort = device, name, dtype, effort
        self._checker = Checker(device, get_codec(name), dtype)
        self._rng = np.random.default_rng(seed)
        self._tile = TILE_WORDS[dtype.itemsize]
        self._data = cases(dtype, self._tile, self._rng, full=effort.full)
        self._kept: dict[str, Any] = {}
        self._outcome = Outcome()

    def all(self) -> Outcome:
        """Everything, one after the other."""
        for number, (case, words) in enumerate(self._data.items()):
            if not self._effort.only or case in self._effort.only:
                self._one_case(number, case, words)
        if self._effort.shapes:
            self._all_shapes()
        if self._effort.damage:
            self._all_damage()
        self._outcome.round_trips = self._checker.n_checked["round trips"]
        self._outcome.damaged = self._checker.n_checked["damaged"]
        for direction, notes in self._checker.notes.items():
            bad = BAD_NOTES[: 1 if self._name.startswith("zfp") else None]
            self._outcome.failures += [
                f"{direction}: {note} ({count} times)"
                for note, count in notes.items()
                if direction != "refused" and any(part in note for part in bad)
            ]
        return self._outcome

    def _one_case(self, number: int, case: str, words: Any) -> None:
        # Launch shapes, orders and alignments take turns, in steps that have no common factor.
        shape = LaunchShape(256, 1 + 3 * (number % 2))
        if number % 5 == 1:
            shape = LaunchShape(THREADS[number // 5 % 5], 2)
        schedule: Schedule = "warp" if number % 7 == 3 else "block"
        races = self._effort.full or number % 4 == 0
        self._device.options = Options(ORDERS[number % 3], schedule, number, races)
        offset, shift = (words.itemsize if number % 3 == 2 else 0), 4 * (number % 2)
        how = f"{case}, {words.size} words, {shape}, offset {offset}, {self._device.options}"
        self._attempt(how, shape, case, words, offset, shift)

    def _all_shapes(self) -> None:
        case = next(k for k in ("normal", "5 bits", "runs") if k in self._data)
        words = self._data[case][-(self._tile + 33) :]
        runs = [*product(THREADS, ["block"], [words])]
        runs += [(256, "warp", words), (256, "block", words[:0])]
        for number, (threads, schedule, given) in enumerate(runs):
            self._device.options = Options("interleaved", schedule, number)  # type: ignore[arg-type]
            how = f"{case}, {given.size} words, {threads} threads, {schedule}"
            self._attempt(how, LaunchShape(threads, 2), "", given, 0, 0)

    def _attempt(
        self, how: str, shape: LaunchShape, case: str, words: Any, offset: int, shift: int
    ) -> None:
        for direction in ("encode", "decode"):
            SHAPES[self._checker.kernel(direction)] = shape
        try:
            payload = self._checker.round_trip(words, offset=offset, shift=shift)
        except FAULTS as error:
            self._outcome.failures.append(f"{how}: {error!r}")
        else:
            self._kept[case] = payload, words.size

    def _all_damage(self) -> None:
        SHAPES.clear()
        shown = [case for case in DAMAGED if case in self._kept]
        for number, case in enumerate(shown if self._effort.full else shown[:3]):
            payload, n = self._kept[case]
            self._device.options = Options(seed=number, races=number == 0)
            try:
                self._checker.damage(payload, n, self._rng, self._effort.damage)
            except FAULTS as error:
                self._outcome.failures.append(f"damaged {case}: {error!r}")
