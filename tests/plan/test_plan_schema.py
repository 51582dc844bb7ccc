"""The plan's file: version 2 there and back, version 1 still read, wrong entries named."""

import json

import pytest

from cswap.errors import ConfigError
from cswap.schema.plan import Decision, Plan


def test_everything_reads_back(tmp_path):
    plan = Plan(
        {0: Decision("keep"), 1: Decision("swap", "zvc", 0, 4096), 7: Decision("recompute")},
        policy="joint",
        budget_bytes=1 << 30,
        hardware="v100-pcie3",
        predicted={"step_s": 0.25, "peak_bytes": 17},
        trace_fingerprint="0123456789abcdef",
    )
    assert Plan.parse(json.loads(json.dumps(plan.to_dict()))) == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.parse(tmp_path / "plan.json") == plan
    assert plan.to_dict()["version"] == 3


def test_version_1_is_still_read():
    old = {"version": 1, "decisions": {"3": {"action": "swap", "codec": "zvc"}}}
    assert Plan.parse(old) == Plan({3: Decision("swap", "zvc")})


WRONG = [
    ({"version": 4}, "plan.version=4"),
    ({"decisions": []}, "plan.decisions=[]: must map"),
    ({"decisions": {"0": {"action": "burn"}}}, "keep, swap, recompute"),
    ({"decisions": {"0": 7}}, "plan.decisions['0']=7: must be an object"),
    ({"decisions": {"0": {"action": "swap", "prefetch": -1}}}, "plan.decisions['0'].prefetch=-1"),
    ({"decisions": {"0": {"action": "swap", "prefetch": True}}}, "prefetch=True"),
    ({"decisions": {"0": {"action": "swap", "section_bytes": 0}}}, "section_bytes=0"),
    ({"decisions": {"0": {"action": "keep", "prefetch": 1}}}, "go with 'swap' only"),
    ({"decisions": {"0": {"action": "recompute", "codec": "zvc"}}}, "with 'swap' only"),
    ({"budget_bytes": "2GiB"}, "plan.budget_bytes='2GiB'"),
    ({"policy": 3}, "plan.policy=3"),
    ({"predicted": {"step_s": "soon"}}, "plan.predicted['step_s']='soon'"),
    ({"predicted": [1]}, "plan.predicted=[1]"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[row[1] for row in WRONG])
def test_a_wrong_entry_is_named(change, message):
    with pytest.raises(ConfigError) as caught:
        Plan.parse({"version": 2} | change)
    assert message in str(caught.value)
