"""Contenders take turns fairly."""

from itertools import pairwise, permutations

from bench.workloads.turns import turns

WAYS = ("off", "checkpoint", "cswap")


def test_each_contender_comes_after_each_other_one_and_the_orders_repeat():
    orders = [turns(WAYS, round_) for round_ in range(30)]
    assert all(sorted(order) == sorted(WAYS) for order in orders)
    assert {pair for order in orders for pair in pairwise(order)} == set(permutations(WAYS, 2))
    assert orders == [turns(WAYS, round_) for round_ in range(30)]
