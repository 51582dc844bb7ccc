"""Values of a short real run, given to the trace of a large step that nobody has run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cswap.errors import TraceError
from cswap.plan.estimate import estimate
from cswap.plan.measure import measure
from cswap.plan.planner import plan
from cswap.plan.tensor_values import Values, values_of, with_values

MACHINE = "v100-pcie3-cswap"


def network(n_blocks=2):
    layers = []
    for block in range(n_blocks):
        layers += [nn.Conv2d(3 if not block else 8, 8, 3, padding=1), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Conv2d(8, 4, 3))


def measured(n_blocks=2, side=16):
    torch.manual_seed(0)
    return measure(
        network(n_blocks),
        torch.randn(4, 3, side, side),
        torch.sum,
        warm_up=0,
        repeats=1,
        min_bytes=0,
        codecs=("zvc", "int8", "bitpack"),
    )


def estimated(n_blocks=2, side=16):
    inputs = torch.empty(64, 3, side, side, device="meta")
    net = network(n_blocks).to("meta")
    return estimate(net, inputs, torch.sum, hardware=MACHINE, min_bytes=0)


def saved(trace):
    return sorted((t for t in trace.tensors if t.saved >= 0), key=lambda t: t.saved)


def test_the_same_network_takes_values_by_name():
    small, large = measured(), estimated()
    assert not any(t.ratios for t in saved(large))
    filled = with_values(large, values_of(small))
    assert [t.name for t in saved(filled)] == [t.name for t in saved(small)]
    for mine, its in zip(saved(filled), saved(small), strict=True):
        assert dict(mine.ratios) == dict(its.ratios)
        assert mine.profile["zero_fraction"] == its.profile["zero_fraction"]
        assert mine.nbytes == 16 * its.nbytes


def test_a_deeper_network_takes_the_relatively_nearest_of_its_kind():
    known = values_of(measured(2))
    filled = values_of(with_values(estimated(4), known))
    maps = [v for v in filled if v.signature.startswith("float32 conv > activation")]
    of_two = [v for v in known if v.signature.startswith("float32 conv > activation")]
    # three before a convolution, one before the pool, against one and one
    assert [v.ratios["zvc"] for v in maps] == [
        of_two[0].ratios["zvc"],
        of_two[0].ratios["zvc"],
        of_two[0].ratios["zvc"],
        of_two[1].ratios["zvc"],
    ]


def test_integers_keep_their_ratios_only_at_the_same_size():
    known = values_of(measured(side=16))
    assert any(v.signature.startswith("int64") for v in known)
    for side, expected in ((16, True), (32, False)):
        filled = with_values(estimated(side=side), known)
        assert [bool(t.ratios) for t in saved(filled) if t.dtype == "int64"] == [expected]
        assert all(t.ratios for t in saved(filled) if t.dtype == "float32")


def test_only_the_codecs_asked_for_are_taken():
    filled = with_values(estimated(), values_of(measured()), codecs=("zvc",))
    assert {c for t in saved(filled) for c in t.ratios} == {"zvc"}


def test_another_models_values_are_refused():
    with pytest.raises(TraceError, match="none of its"):
        with_values(estimated(), [Values("x", "float32 attention >")])


def test_codec_policies_compress_only_what_has_values():
    large = estimated()
    filled = with_values(large, values_of(measured()), codecs=("zvc",))
    made = [plan(t, MACHINE, policy="sc") for t in (large, filled)]
    chosen = [{d.codec for d in p.decisions.values() if d.action == "swap"} for p in made]
    assert chosen == [{"zvc"}, {"zvc"}]  # static: whatever it costs
    moved = [filled_t for filled_t in saved(filled) if made[1].decisions[filled_t.saved].codec]
    assert made[0].predicted["link_bytes"] == 2 * sum(t.nbytes for t in moved)
    encoded = [-(-t.nbytes // t.ratios["zvc"]) for t in moved]
    assert made[1].predicted["link_bytes"] == pytest.approx(2 * sum(encoded), abs=2 * len(moved))
