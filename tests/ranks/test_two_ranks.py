"""Two processes that train together, with gloo on the CPU. The processes run two_ranks.py."""

from __future__ import annotations

import pytest
import torch

import cswap
from cswap.codecs.base import EncodeKey
from cswap.errors import UnsupportedError
from cswap.ranks import are_several, must_agree, without_collectives

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)

QUICK = ("ddp", "lossy, forced", "guarded", "gathered")
"""Cases that share the one pair of processes of `make test`; they import no other wrappers."""

SLOW = (
    "ddp, installed before",
    "ddp, accumulated",
    "ddp, static graph",
    "ddp, unused parameters",
    "fsdp2",
    "fsdp2, installed before",
    "fsdp2, not resharded",
    "tensor parallel",
    "tensor parallel, all DTensors",
    "tensor parallel, installed before",
    "pipeline, 1f1b",
    "pipeline, gpipe",
    "lossy, chosen",
    "rounded alike",
    "rounded by rank",
    "goal, ddp",
    "goal, fsdp2",
    "goal, tensor parallel",
    "schedule, ddp",
)

WRAPPED = ("ddp", "fsdp2", "tensor parallel", "pipeline")


def case(name):
    return pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())


@pytest.fixture
def reports(two_ranks):
    """What both ranks say about a case."""

    def of(name):
        return two_ranks(QUICK if name in QUICK else SLOW, name)

    return of


@pytest.mark.parametrize("name", [case(n) for n in QUICK + SLOW if n.startswith(WRAPPED)])
def test_gradients_and_collectives_are_those_without_cswap(reports, name):
    for report in reports(name):
        assert report["collectives"] > 0
        for options in ("default", "forced"):
            found = report[options]
            assert found["equal"]
            assert found["same_collectives"]
            assert found["fallbacks"] == {}
            assert found["held_bytes"] == 0
        assert report["forced"]["swapped"] > 0
        # Weights are gathered into memory that FSDP takes away again.
        assert report["forced"]["kept"]["parameter"] >= 3 * 4
        assert "storage" not in report["forced"]["kept"]


@pytest.mark.parametrize("name", [case("lossy, chosen"), case("lossy, forced")])
def test_equal_tensors_get_equal_lossy_values_on_uneven_ranks(reports, name):
    first, second = reports(name)
    assert first["gradients"] == second["gradients"]
    assert not first["exact"]


@pytest.mark.slow
def test_stochastic_rounding_is_the_same_on_every_rank_unless_the_seed_differs(reports):
    first, second = reports("rounded alike")
    assert first["gradients"] == second["gradients"]
    first, second = reports("rounded by rank")
    assert first["gradients"] != second["gradients"]
    assert first["gradients"] == reports("rounded alike")[0]["gradients"]


def test_the_guard_starts_no_collective_of_its_own(reports):
    first, second = reports("guarded")
    assert first["fallbacks"] == {"guard": 2}  # both modules: they take part in collectives
    assert second["fallbacks"] == {}
    assert first["collectives"] == second["collectives"]
    assert first["gradients"] == second["gradients"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in SLOW if n.startswith("goal")])
def test_a_goal_of_one_rank_alone_blocks_no_rank(reports, name):
    first, second = reports(name)
    assert first["equal"]
    assert second["equal"]
    assert first["same_collectives"]
    assert second["same_collectives"]
    assert first["phases"] == ["obeying"]
    if name == "goal, ddp":
        assert first["products"]
    if name == "goal, fsdp2":  # a block's parameters are freed meanwhile
        assert not first["products"]


@pytest.mark.slow
def test_every_rank_obeys_the_schedule_of_one_from_the_first_step_on(reports):
    first, second = reports("schedule, ddp")
    assert first["steps"] == second["steps"]
    for phase, plans, actions, left in first["steps"]:
        assert (phase, plans) == ("obeying", 0)
        assert {**left, "keep": actions["keep"]} == actions
        assert left
    for report in (first, second):
        assert report["equal"]
        assert report["fallbacks"] == {}


def test_every_rank_gets_the_statistics_of_all(reports):
    first, second = reports("gathered")
    assert first["mine"]
    assert second["mine"]
    assert first["packed"] == second["packed"]
    assert 2 * first["packed"][0] == first["packed"][1]  # rank 1 has run twice as many steps


@pytest.fixture
def fake_group():
    """This process is rank 0 of two, and its collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("fake_group")
def test_a_plain_tensor_and_the_dtensor_in_its_memory_leave_once():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    ways = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    parallel.parallelize_module(net, init_device_mesh("cpu", (2,)), ways)
    with cswap.install(net, codec="zvc", min_bytes=0, remat=False) as handle:
        for _ in range(4):
            net(torch.randn(32, 64)).sum().backward()
    # The result of the ReLU: it saves that, and so does the last layer, as a DTensor.
    assert (handle.stats.swapped, handle.stats.deduplicated) == (4, 4)
    assert handle.stats.kept_by_reason == {"subclass": 4, "parameter": 4}  # the batch; a weight


@pytest.mark.usefixtures("fake_group")
def test_of_several_ranks_only_those_with_lossy_codecs_have_to_agree():
    assert are_several()
    assert must_agree(lossy=True)
    assert not must_agree(lossy=False)


@pytest.mark.usefixtures("fake_group")
def test_a_collective_is_refused_before_it_starts():
    x = torch.ones(2)
    with without_collectives(), pytest.raises(UnsupportedError, match="allreduce"):
        torch.distributed.all_reduce(x)
    torch.distributed.all_reduce(x)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(("lossy", "told"), [("int8", True), ("off", False)])
def test_a_goal_with_lossy_codecs_says_that_ranks_may_differ(caplog, lossy, told):
    with cswap.install(torch.nn.Linear(64, 64), fit="min", lossy=lossy):
        assert ("several ranks" in caplog.text) == told


def test_one_seed_on_every_rank_leaves_half_of_the_noise_in_a_mean_over_ranks():
    # Computed: with the same random numbers, rounding errors of independent values correlate by
    # 1/2 (docs/ranks.md).
    codec = cswap.get_codec("int4")
    x, y = torch.randn(2, 1 << 16, generator=torch.Generator().manual_seed(0))

    def error(values, seed):
        return codec.decode(codec.encode(values, key=EncodeKey(seed))) - values

    def correlation(seed):
        return float(torch.corrcoef(torch.stack([error(x, 0), error(y, seed)]))[0, 1])

    assert 0.4 < correlation(seed=0) < 0.6
    assert abs(correlation(seed=1)) < 0.05


def test_one_process_is_not_several_ranks():
    assert not are_several()
    assert not must_agree(lossy=True)
