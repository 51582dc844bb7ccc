"""The running counts of an engine, behind `Stats`."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter, defaultdict, deque
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

from cswap.log import log
from cswap.stats.stats import CodecStats, Stats, gained_bytes
from cswap.stats.steps import BY_GOAL, PARAMETER, Kept, Steps, Totals, together

if TYPE_CHECKING:
    from cswap.stats.step_trace import Timeline

Moved: TypeAlias = tuple[int, int, int, str, int, int, float]
"""Bytes of device memory and of host memory that are held from now on (negative: no more); 1 if a
tensor was saved. If one has left: its codec (or `REMAT`, `UNREAD`), its bytes, those of the
encoding, and the seconds that the computing thread spent on that; else "" and zeros."""

NO_TENSOR: Final = (0, "", 0, 0, 0.0)
"""The rest of a `Moved` by which no tensor was saved or encoded."""

SAVED: Final = (1, "", 0, 0, 0.0)
"""The rest of a `Moved` by which a tensor was saved."""


class Counters:
    """The running counts behind `Stats`. Thread-safe.

    Attributes:
        kept: number and bytes of the tensors that stay on the device, by reason, counted wherever
            they are saved.
        kept_once: the same of those of which each memory is counted once.
        kept_early: the same of those that were counted as gone before.
        subclasses: number of the tensors that stay since they are of a subclass, by its name.
        host_is_device: see `Stats`.
        interrupted: an interrupt came while bytes were added up: `recount` has to be called.
        timeline: the timeline that records events; None: nothing is recorded.
        moves: bytes held and given free, in order. Appended to without the lock, like the next
            eight, and counted later: where caches are cold, a lock takes as long as a small copy.
        decodes: codec and seconds of each decode by the computing thread.
        parameters: bytes of each parameter that was saved and stays.
        small: bytes of each small tensor that was saved and stays.
        by_goal: bytes of each saved tensor that stays by a goal's plan.
        by_goal_once: the same, each memory once; only in steps that a goal looks at.
        kept_sizes: the last three by reason: these tensors are not among the bytes held.
        stayed: reason and bytes of each tensor that was saved where the last one stayed
            (engine/order/looks.py).
        hits: for each tensor that was asked for first, whether it was ready or on its way.
        held_at_backward: bytes of device and host memory held when the last backward began.
    """

    def __init__(self) -> None:
        # Backward threads and the computing thread count at the same time.
        self._lock = threading.Lock()
        self.moves: deque[Moved] = deque()
        self.decodes: deque[tuple[str, float]] = deque()
        self.parameters: deque[int] = deque()
        self.small: deque[int] = deque()
        self.by_goal: deque[int] = deque()
        self.by_goal_once: deque[int] = deque()
        self.kept_sizes = {
            PARAMETER: self.parameters,
            "small": self.small,
            BY_GOAL: self.by_goal,
        }
        self.stayed: deque[tuple[str, int]] = deque()
        self.hits: deque[int] = deque()
        self.held_at_backward = 0
        self.kept = _no_tensors()
        self.kept_once, self.kept_early = _no_tensors(), _no_tensors()
        self.subclasses: Counter[str] = Counter()
        self.host_is_device = self.interrupted = False
        self.fallbacks: Counter[str] = Counter()
        self.by_codec: defaultdict[str, CodecStats] = defaultdict(CodecStats)
        self.packed = 0
        self.deduplicated = 0
        self.swapped = 0
        self.prefetch_hits = 0
        self.prefetch_misses = 0
        self.exposed_s = 0.0
        self.compile_s = 0.0
        self.guard_checks = 0
        self.guard_worst_error = 0.0
        self.guard_worst_cosine = 1.0
        self.guard_fallbacks: Counter[str] = Counter()
        self.timeline: Timeline | None = None
        self._device_bytes = 0
        self._host_bytes = 0
        self._peak_device = 0
        self._peak_host = 0
        self._peak_saved = 0
        self._peak_since = 0
        self._steps = Steps()
        self._used_bytes = 0  # of the bytes on the device: in use by autograd, and not held by us
        # Since these were counted: at the beginning of the step, at its end, and where the last
        # number changes; and their largest values before, since tensors that stay were counted.
        self._step_peak_device = self._step_peak_saved = 0
        self._before_device = self._before_saved = 0

    def keep(self, reason: str, nbytes: int) -> None:
        """Count a tensor that was saved and stays on the device."""
        with self._lock:
            self.packed += 1
            entry = self.kept[reason]
            entry[0] += 1
            entry[1] += nbytes

    def count_subclass(self, name: str) -> None:
        """Count a saved tensor of a subclass that stays, besides `keep`. Args: name: its class."""
        with self._lock:
            self.subclasses[name] += 1

    def begin_step(self) -> None:
        """A forward begins, and maybe a step."""
        self.count_kept()
        with self._lock:
            held = self._device_bytes + self.host_is_device * self._host_bytes - self._used_bytes
            self._steps.begin(self._totals(), held)

    def begin_backward(self) -> None:
        """A backward begins."""
        with self._lock:
            if self.moves:
                self._count_moves()
            self.held_at_backward = self._device_bytes + self._host_bytes
            self._steps.begin_backward()

    def _totals(self) -> Totals:
        codecs = self.by_codec.values()
        raw, encoded = sum(one.raw for one in codecs), sum(one.encoded for one in codecs)
        gained = gained_bytes(raw, encoded, host_is_device=self.host_is_device)
        once, by_save, early = map(_copied, (self.kept_once, self.kept, self.kept_early))
        return Totals(raw, gained, encoded, once, by_save, early)

    def count_kept(self) -> None:
        """Count the tensors that were saved since the last call without being counted then."""
        with self._lock:
            if self.moves or self.decodes:
                self._count_moves()
            for reason, saved in self.kept_sizes.items():
                if not saved:  # as in most calls
                    continue
                n, nbytes = _take_all(saved)
                self.packed += n
                entry = self.kept[reason]
                entry[0] += n
                entry[1] += nbytes
            if self.by_goal_once:
                self._steps.goal_once_bytes += _take_all(self.by_goal_once)[1]
            stayed_bytes = self._count_stayed() if self.stayed else 0
            self._steps.stayed_bytes += stayed_bytes
            self._note_peaks()
            # Nobody has noticed when these tensors were freed. They were there at the end of
            # the forward, where most steps have their peak.
            device = self._before_device + stayed_bytes
            if device > self._peak_device:
                self._peak_device = device
            saved_bytes = self._before_saved + stayed_bytes
            if saved_bytes > self._peak_saved:
                self._peak_saved = saved_bytes
            if saved_bytes > self._peak_since:
                self._peak_since = saved_bytes
            self._before_device = self._before_saved = 0
            if self.hits:
                n, hits = _take_all(self.hits)
                self.prefetch_hits += hits
                self.prefetch_misses += n - hits

    def _note_peaks(self) -> None:
        # Under the lock: those since the last call, and begin anew.
        device, saved = self._step_peak_device, self._step_peak_saved
        if device > self._before_device:
            self._before_device = device
        if saved > self._before_saved:
            self._before_saved = saved
        held = (saved if self.host_is_device else device) - self._used_bytes
        if held > self._steps.peak_bytes:
            self._steps.peak_bytes = held
        self._step_peak_device = self._device_bytes
        self._step_peak_saved = self._device_bytes + self._host_bytes

    def _count_moves(self) -> None:
        # Under the lock.
        try:
            self._count_all_moves()
        except BaseException:  # an interrupt: some are lost
            self.interrupted = True
            raise

    def _count_all_moves(self) -> None:
        # One loop for all, without calls.
        moves = self.moves
        device, host = self._device_bytes, self._host_bytes
        for move in islice(iter(moves.popleft, None), len(moves)):  # others may append meanwhile
            device_bytes, host_bytes, n_saved, codec, raw, encoded, encode_s = move
            device += device_bytes
            host += host_bytes
            if device > self._step_peak_device:
                self._step_peak_device = device
            if host > self._peak_host:
                self._peak_host = host
            if device + host > self._step_peak_saved:
                self._step_peak_saved = device + host
            self.packed += n_saved
            if codec:
                self.swapped += 1
                self.exposed_s += encode_s
                entry = self.by_codec[codec]
                entry.count += 1
                entry.raw += raw
                entry.encoded += encoded
                entry.encode_s += encode_s
        self._device_bytes, self._host_bytes = device, host
        self._draw()
        while self.decodes:
            codec, decode_s = self.decodes.popleft()
            self.by_codec[codec].decode_s += decode_s
            self.exposed_s += decode_s

    def _count_stayed(self) -> int:
        # Returns their bytes.
        stayed_bytes, n = 0, len(self.stayed)  # others may append meanwhile
        self.packed += n
        for reason, nbytes in islice(iter(self.stayed.popleft, None), n):
            entry = self.kept_once[reason]
            entry[0] += 1
            entry[1] += nbytes
            stayed_bytes += nbytes
        return stayed_bytes

    def stay(self, reason: str, nbytes: int, by: int = 1) -> None:
        """Count a packed tensor that stays on the device after all; ``by=-1`` takes this back."""
        with self._lock:
            entry = self.kept_once[reason]
            entry[0] += by
            entry[1] += by * nbytes

    def stay_early(self, reason: str, nbytes: int) -> None:
        """Count a tensor that stays on the device, and has been counted as gone."""
        with self._lock:
            entry = self.kept_early[reason]
            entry[0] += 1
            entry[1] += nbytes

    def share(self) -> None:
        """Count a saved tensor that the engine already holds."""
        with self._lock:
            self.packed += 1
            self.deduplicated += 1

    def admit(self, nbytes: int) -> None:
        """Count a saved tensor that the engine takes over."""
        with self._lock:
            self.packed += 1
            self._hold(nbytes, 0)

    def hold(self, *, device: int = 0, host: int = 0) -> None:
        """Add to the bytes that the engine holds; negative numbers subtract."""
        with self._lock:
            self._hold(device, host)

    def use(self, nbytes: int) -> None:
        """Add to the bytes that autograd uses and the engine does not hold; negative: subtract.

        They are among ``device_bytes``, and not among those that `Steps` compares.
        """
        with self._lock:
            if self.moves:
                self._count_moves()
            self._note_peaks()
            self._used_bytes += nbytes
            self._device_bytes += nbytes
            self._step_peak_device = self._device_bytes
            self._step_peak_saved = self._device_bytes + self._host_bytes
            self._draw()

    def recount(self, *, device: int, host: int) -> None:
        """Set the bytes that the engine holds, as added up again after an interrupt."""
        with self._lock:
            if self.moves:
                self._count_moves()
            self._device_bytes, self._host_bytes = device + self._used_bytes, host
            self.interrupted = False

    def _draw(self) -> None:
        if self.timeline is not None:
            now_s = time.perf_counter()
            self.timeline.count(now_s, device=self._device_bytes, host=self._host_bytes)

    def _hold(self, device_bytes: int, host_bytes: int) -> None:
        # Under the lock: see `hold`.
        if self.moves:
            self._count_moves()
        device = self._device_bytes = self._device_bytes + device_bytes
        host = self._host_bytes = self._host_bytes + host_bytes
        if device > self._step_peak_device:
            self._step_peak_device = device
        if host > self._peak_host:
            self._peak_host = host
        if device + host > self._step_peak_saved:
            self._step_peak_saved = device + host
        if self.timeline is not None:
            self._draw()

    def take_peak(self) -> int:
        """Most bytes of device and host together since this was called last."""
        self.count_kept()
        with self._lock:
            found, self._peak_since = self._peak_since, self._step_peak_saved
        return found

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the engine holds now."""
        with self._lock:
            if self.moves:
                self._count_moves()
            return self._device_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of device and host memory that the engine holds now."""
        with self._lock:
            if self.moves:
                self._count_moves()
            return self._device_bytes + self._host_bytes

    def took(self, codec: str, *, encode_s: float = 0.0, decode_s: float = 0.0) -> None:
        """Add seconds of a codec's encodes and decodes."""
        with self._lock:
            entry = self.by_codec[codec]
            entry.encode_s += encode_s
            entry.decode_s += decode_s

    def compiled(self, seconds: float) -> None:
        """Add the time that compiling or loading kernels took."""
        with self._lock:
            self.compile_s += seconds

    def fall_back(self, what: str, why: object, then: str = "taking a slower path") -> None:
        """Count a failure after which a slower, correct path is taken; log the first of a kind."""
        with self._lock:
            self.fallbacks[what] += 1
            first = self.fallbacks[what] == 1
        if first:
            # The text, not the error: a handler that keeps the record would keep the error's
            # frames.
            log.warning("%s failed (%s); %s from here on.", what, str(why), then)

    def guarded(self, error: float, cosine: float) -> None:
        """Add the result of one gradient comparison: relative error and cosine."""
        with self._lock:
            self.guard_checks += 1
            self.guard_worst_error = max(self.guard_worst_error, error)
            self.guard_worst_cosine = min(self.guard_worst_cosine, cosine)

    def grow_milder(self, what: str) -> None:
        """Count a class of tensors that moved to a milder codec."""
        with self._lock:
            self.guard_fallbacks[what] += 1

    def exposed(self, seconds: float) -> None:
        """Add the time that the computing thread spent encoding, decoding or waiting."""
        with self._lock:
            self.exposed_s += seconds

    def snapshot(self) -> Stats:
        """A snapshot of the current counts."""
        self.count_kept()
        with self._lock:
            totals = self._totals()
            kept = together(totals.once, totals.by_save, totals.early)
            step, recent_peak_bytes = self._steps.last(totals)
            return Stats(
                packed=self.packed,
                swapped=self.swapped,
                deduplicated=self.deduplicated,
                kept_by_reason={why: n for why, (n, _) in kept.items()},
                kept_bytes_by_reason={why: nbytes for why, (_, nbytes) in kept.items()},
                subclasses=dict(self.subclasses),
                raw_bytes=totals.raw_bytes,
                encoded_bytes=totals.encoded_bytes,
                by_codec={name: dataclasses.replace(c) for name, c in self.by_codec.items()},
                device_bytes=self._device_bytes,
                host_bytes=self._host_bytes,
                peak_device_bytes=self._peak_device,
                peak_host_bytes=self._peak_host,
                peak_saved_bytes=self._peak_saved,
                steps=self._steps.n,
                step_peak_bytes=step.peak_bytes,
                step_plain_bytes=step.plain_bytes,
                step_gained_bytes=step.gained_bytes,
                step_encoded_bytes=step.encoded_bytes,
                step_kept_by_reason={why: n for why, (n, _) in step.kept.items()},
                step_kept_bytes_by_reason={why: nbytes for why, (_, nbytes) in step.kept.items()},
                recent_peak_bytes=recent_peak_bytes,
                host_is_device=self.host_is_device,
                prefetch_hits=self.prefetch_hits,
                prefetch_misses=self.prefetch_misses,
                exposed_s=self.exposed_s,
                compile_s=self.compile_s,
                guard_checks=self.guard_checks,
                guard_worst_error=self.guard_worst_error,
                guard_worst_cosine=self.guard_worst_cosine,
                guard_fallbacks=dict(self.guard_fallbacks),
                fallbacks=sum(self.fallbacks.values()),
                fallbacks_by_reason=dict(self.fallbacks),
            )


def _take_all(saved: deque[int]) -> tuple[int, int]:
    # Number and sum, of those that are there now: other threads may append meanwhile.
    n = len(saved)
    return n, sum(islice(iter(saved.popleft, None), n))


def _no_tensors() -> defaultdict[str, list[int]]:
    return defaultdict(lambda: [0, 0])


def _copied(kept: dict[str, list[int]]) -> Kept:
    return {reason: (n, nbytes) for reason, (n, nbytes) in kept.items()}
