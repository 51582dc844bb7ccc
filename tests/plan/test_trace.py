"""Traces: JSON there and back, and every contradiction named by its field."""

import json
from copy import deepcopy

import pytest

from cswap.errors import ConfigError, TraceError
from cswap.plan.simulator.lifetimes import fingerprint, lifetimes, live_bytes
from cswap.schema.trace import Trace, TraceOperator, TraceTensor


def small():
    """conv (x -> y), relu (y -> z), loss (z -> g), relu' (z, g -> h), conv' (x, h)."""
    tensors = (
        TraceTensor(100, "x", role="input", saved=0, ratios={"zvc": 1.5}),
        TraceTensor(200, "y", shape=(5, 10)),
        TraceTensor(300, "z", saved=1, profile={"zero_fraction": 0.5}),
        TraceTensor(300, "g", role="gradient"),
        TraceTensor(200, "h", role="gradient"),
    )
    operators = (
        TraceOperator("conv", "conv", "forward", 1.0, (0,), (1,), 64, "net.0", 1e9, 300.0),
        TraceOperator("relu", "activation", "forward", 0.5, (1,), (2,)),
        TraceOperator("loss", "loss", "forward", 0.1, (2,), (3,)),
        TraceOperator("relu'", "activation", "backward", 0.5, (2, 3), (4,)),
        TraceOperator("conv'", "conv", "backward", 2.0, (0, 4), ()),
    )
    return Trace(operators, tensors, 1000, "small", 4, "measured", "v100-pcie3")


def test_json_text_file_and_dict_all_read_back_equal(tmp_path):
    trace = small()
    trace.save(tmp_path / "trace.json")
    assert Trace.parse(tmp_path / "trace.json") == trace
    assert Trace.parse(str(tmp_path / "trace.json")) == trace
    assert Trace.parse(json.dumps(trace.to_dict())) == trace
    assert Trace.parse(trace.to_dict()) == trace
    assert Trace.parse(trace) is trace


def changed(*path, value):
    data = json.loads(json.dumps(small().to_dict()))
    at = data
    for step in path[:-1]:
        at = at[step]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return data


WRONG = [
    (("format",), "other", "trace.format='other'"),
    (("version",), 2, "trace.version=2"),
    (("operators",), {}, "trace.operators="),
    (("operators",), KeyError, "trace.operators: is missing"),
    (("tensors", 1), 7, "trace.tensors[1]=7: must be an object"),
    (("tensors", 1, "nbytes"), -1, "trace.tensors[1].nbytes=-1"),
    (("tensors", 1, "nbytes"), 1.5, "trace.tensors[1].nbytes=1.5"),
    (("tensors", 1, "nbytes"), True, "trace.tensors[1].nbytes=True"),
    (("tensors", 1, "nbytes"), KeyError, "trace.tensors[1].nbytes: is missing"),
    (("tensors", 1, "colour"), "red", "trace.tensors[1].colour: no such field"),
    (("tensors", 1, "role"), "king", "trace.tensors[1].role='king'"),
    (("tensors", 1, "shape"), [2, -1], "trace.tensors[1].shape[1]=-1"),
    (("tensors", 0, "ratios"), {"zvc": 0.0}, "trace.tensors[0].ratios['zvc']=0.0"),
    (("tensors", 0, "ratios"), {"zvc": float("nan")}, "trace.tensors[0].ratios['zvc']=nan"),
    (("tensors", 0, "ratios"), [1], "trace.tensors[0].ratios"),
    (
        ("tensors", 2, "saved"),
        0,
        "trace.tensors[2].saved=0: is also the position of",
    ),
    (("tensors", 2, "saved"), -2, "trace.tensors[2].saved=-2"),
    (("operators", 3, "inputs"), [17], "trace.operators[3].inputs[0]=17"),
    (("operators", 3, "inputs"), [2, 2, 3], "trace.operators[3].inputs[1]=2: is listed twice"),
    (("operators", 3, "inputs"), 2, "trace.operators[3].inputs=2"),
    (("operators", 0, "inputs"), [2], "trace.operators[0].inputs[0]=2: is used before"),
    (("operators", 4, "outputs"), [1], "trace.operators[4].outputs[0]=1: was already produced"),
    (("operators", 1, "duration_s"), -0.5, "trace.operators[1].duration_s=-0.5"),
    (("operators", 1, "duration_s"), float("nan"), "trace.operators[1].duration_s=nan"),
    (("operators", 1, "duration_s"), float("inf"), "trace.operators[1].duration_s=inf"),
    (("operators", 1, "duration_s"), "1", "trace.operators[1].duration_s='1'"),
    (("operators", 1, "workspace_bytes"), -8, "trace.operators[1].workspace_bytes=-8"),
    (("operators", 1, "phase"), "sideways", "trace.operators[1].phase='sideways'"),
    (("operators", 1, "kind"), "magic", "trace.operators[1].kind='magic'"),
    (("resident_bytes",), -1, "trace.resident_bytes=-1"),
    (("source",), "dreamt", "trace.source='dreamt'"),
    (("extra",), 1, "trace.extra: no such field"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG, ids=[row[2] for row in WRONG])
def test_a_contradiction_is_named_by_its_field(path, value, message):
    with pytest.raises(TraceError) as caught:
        Trace.parse(changed(*path, value=value))
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("value", [7, None, "/nowhere/trace.json", "{", "[]", b"x"])
def test_what_is_no_trace_is_refused(value):
    with pytest.raises(TraceError, match="trace="):
        Trace.parse(value)


def test_a_file_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(TraceError, match="must be a JSON object"):
        Trace.parse(tmp_path / "list.json")


def test_lifetimes_gaps_and_positions():
    life = lifetimes(small())
    assert life.producer == (-1, 0, 1, 2, 3)
    assert life.users == ((0, 4), (1,), (2, 3), (3,), (4,))
    assert life.last_use == (4, 1, 3, 3, 4)
    assert life.forward[0] == 0
    assert life.backward[0] == 4
    assert (life.forward[2], life.backward[2]) == (2, 3)
    assert life.swappable == (0, 2)


def test_a_forward_use_after_backward_began_is_not_the_last_before_the_gap():
    tensors = (TraceTensor(8, saved=0),)
    phases = ("forward", "backward", "forward", "backward")
    operators = tuple(
        TraceOperator(phase, "other", phase, 1.0, (0,) if i else (), () if i else (0,))
        for i, phase in enumerate(phases)
    )
    life = lifetimes(Trace(operators, tensors))
    assert (life.forward[0], life.backward[0], life.last_use[0]) == (0, 1, 3)


def test_what_may_not_leave_is_not_swappable():
    data = small().to_dict()
    for change in ({"role": "parameter"}, {"nbytes": 0}, {"saved": -1}):
        other = deepcopy(data)
        other["tensors"][0] |= change
        assert lifetimes(Trace.parse(other)).swappable == (2,)


def test_live_bytes_count_outputs_workspace_and_what_lives():
    assert live_bytes(small()) == [
        1000 + 100 + 200 + 64,
        1000 + 100 + 200 + 300,
        1000 + 100 + 300 + 300,
        1000 + 100 + 300 + 300 + 200,
        1000 + 100 + 200,
    ]


def test_fingerprint_sees_structure_and_not_durations():
    trace = small()
    slower = changed("operators", 0, "duration_s", value=9.0)
    larger = changed("tensors", 0, "nbytes", value=101)
    assert fingerprint(Trace.parse(slower)) == fingerprint(trace)
    assert fingerprint(Trace.parse(larger)) != fingerprint(trace)


def test_a_tensor_that_nobody_touches_is_refused():
    with pytest.raises(TraceError, match=r"trace\.tensors\[0\]: no operator reads or produces it"):
        Trace((), (TraceTensor(8),))
