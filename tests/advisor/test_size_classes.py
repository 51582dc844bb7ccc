"""Sizes that are close share a choice; tables of bounded size forget what nobody asks for."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from cswap.advisor.advisor import Advisor
from cswap.advisor.call_site import Site
from cswap.codecs.tolerance import EXACT
from cswap.config import SwapConfig
from cswap.recent import CLASSES, Recent, rough_size

N = 1 << 18


def relu(n):
    torch.manual_seed(n)
    return torch.relu(torch.randn(n))


def choose(advisor, x):
    codec = advisor.choose(x, Site(), 0, tolerance=EXACT, may_keep=True).codec
    return None if codec is None else codec.name


def test_sizes_of_a_class_share_a_choice_and_its_row():
    advisor = Advisor(SwapConfig(), None)
    found = {choose(advisor, relu(n)) for n in range(N, N + 64)}
    (explained,) = advisor.explain()
    assert found == {explained.codec}
    assert explained.codec.startswith("zvc")
    for n in (N + N // CLASSES, 2 * N, N // 2):
        choose(advisor, relu(n))
    assert len(advisor.explain()) == 4


def test_a_new_choice_counts_the_bytes_of_this_tensor():
    advisor = Advisor(SwapConfig(), None)
    choose(advisor, relu(N))
    advisor.begin_step(0.0, look=1)
    choose(advisor, relu(N + N // 8))
    (explained,) = advisor.explain()
    kept = next(c for c in explained.candidates if c.codec == "keep")
    assert explained.nbytes == kept.nbytes == 4 * (N + N // 8)


def test_a_users_own_function_is_asked_at_every_size():
    asked = []

    def name(profile):
        asked.append(profile.nbytes)
        return "zvc" if profile.nbytes > 4 * N else "raw"

    advisor = Advisor(SwapConfig(codec=name), None)
    assert [choose(advisor, relu(n)) for n in (N, N + 1, N, N + 1)] == ["raw", "zvc"] * 2
    assert asked == [4 * N, 4 * N + 4]


@given(st.integers(1, 1 << 40))
def test_a_size_is_at_most_a_fifth_smaller_than_any_of_its_class(n):
    rough = rough_size(n)
    assert rough <= n < rough + max(1, rough / CLASSES)
    assert rough_size(rough) == rough


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=200))
def test_a_table_never_says_anything_else_than_a_dict_and_forgets_only_what_is_old(most, steps):
    table: Recent[int, int] = Recent(most)
    known: dict[int, int] = {}
    used: list[int] = []  # the last use of each key is the last in here
    for n, (writes, key) in enumerate(steps):
        among_last = key in list(dict.fromkeys(reversed(used)))[: max(1, most // 2) - 1]
        found: int | None = n
        if writes:
            table[key] = known[key] = n
        else:
            found = table.get(key)
            assert found in (None, known.get(key))
            assert found == known.get(key) or not among_last
        if found is not None:
            used.append(key)
        assert len(table) <= max(2, most)
        assert len(set(table)) == len(table) == len(table.values())
    for key in [*table]:
        assert table.pop(key) == known[key]
    assert not len(table)
