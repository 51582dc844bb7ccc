"""The price of a byte over a link where there is nothing to choose from."""

from __future__ import annotations

from cswap.advisor.live_costs import LiveCosts


def test_bytes_of_a_named_codec_are_not_free():
    """No call site has candidates then; its bytes cross the link all the same."""
    costs = LiveCosts("cuda", adapt=True)
    before = costs.price_s_per_byte
    assert before > 0
    for step in range(8):
        costs.begin_step(float(step), 0.0)
        costs.look_back(())
    assert costs.price_s_per_byte == before
