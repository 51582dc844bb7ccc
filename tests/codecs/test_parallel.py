"""Ranges of tiles on threads."""

from __future__ import annotations

import threading
import time

import pytest

from cswap.codecs.parallel import MAX_RANGES, MIN_RANGE_TILES, run_ranges, split


@pytest.mark.parametrize("n_tiles", [0, 1, 31, 64, 95, 96, 1000, 4097])
@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_split_covers_every_tile_once(n_tiles, threads):
    ranges = split(n_tiles, threads)
    assert [tile for first, last in ranges for tile in range(first, last)] == [*range(n_tiles)]
    assert len(ranges) <= min(threads, MAX_RANGES)
    assert len(ranges) == 1 or all(last - first >= MIN_RANGE_TILES for first, last in ranges)


def test_results_come_in_the_order_of_the_ranges():
    assert run_ranges(lambda i, first, last: (i, first, last), [(0, 5), (5, 6), (6, 9)]) == [
        (0, 0, 5),
        (1, 5, 6),
        (2, 6, 9),
    ]


@pytest.mark.parametrize("failing", [0, 1])
def test_error_of_one_range_waits_for_the_others(failing):
    ended = threading.Event()

    def job(index: int, _first: int, _last: int) -> None:
        if index == failing:
            raise ValueError(f"range {index}")
        time.sleep(0.05)
        ended.set()

    with pytest.raises(ValueError, match=f"range {failing}"):
        run_ranges(job, [(0, 1), (1, 2)])
    assert ended.is_set()
