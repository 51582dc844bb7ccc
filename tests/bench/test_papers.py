"""`python -m bench papers`: the definitions behind its rows, by hand, and the command."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from itertools import count

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

from bench.__main__ import app
from bench.papers import (
    command,
    cswap,
    home,
    published,
    vdnn,
)
from bench.papers.cudnn import as_cudnn
from bench.papers.networks import step
from bench.papers.report import figure
from bench.papers.row import Cell, Row
from cswap.plan.hardware import CodecRate, Hardware, load_hardware
from cswap.plan.policies import cswap_plus, sc
from cswap.plan.policy_tools.layerwise import layerwise, swaps
from cswap.plan.policy_tools.problem import Problem
from cswap.plan.policy_tools.zfp_rate import rate_of
from cswap.plan.simulate import Simulator
from cswap.plan.simulator.lifetimes import live_bytes
from cswap.plan.tensor_values import with_fixed_rates
from cswap.schema.trace import Trace, TraceOperator, TraceTensor

MB = 10**6
MACHINE = Hardware(
    "test",
    1 << 40,
    {},
    1e12,
    1e9,  # 1 MB takes 1 ms
    1e9,
    codecs={"zvc": CodecRate(1e10, 1e10), "zfp": CodecRate(1e10, 1e10)},
)


def chain(sizes_mb, forward_ms, backward_ms, zeros):
    """Convolutions, each with an input of its own that is saved."""
    n = len(sizes_mb)
    tensors = [
        TraceTensor(
            size * MB,
            name=f"t{i}",
            shape=(4, size * MB // 16),
            saved=i,
            role="activation" if i else "input",
            profile={"zero_fraction": z},
            ratios={"zvc": 1 / (1 - z)} if z else {},
        )
        for i, (size, z) in enumerate(zip(sizes_mb, zeros, strict=True))
    ] + [TraceTensor(0, name="out")]
    operators = [
        TraceOperator(f"f{i}", "conv", "forward", forward_ms[i] / 1e3, (i,), (i + 1,))
        for i in range(n)
    ] + [
        TraceOperator(f"b{i}", "conv", "backward", backward_ms[i] / 1e3, (i,), ())
        for i in reversed(range(n))
    ]
    return Trace(tuple(operators), tuple(tensors), batch=4)


def chosen(trace, solve):
    simulator = Problem(trace, MACHINE, 1 << 40).simulator
    action, codec, _ = simulator.from_plan(solve(Problem(trace, MACHINE, 1 << 40)))
    return simulator, action, codec


# ------------------------------------------------------------ layer by layer


def test_each_transfer_hides_behind_its_own_layer_only():
    trace = chain([4, 10, 6], [10, 3, 9], [5, 20, 8], [0, 0, 0])
    simulator = Simulator(trace, MACHINE, 1 << 40)
    ways = swaps(simulator, np.ones(3, bool))
    # Out: the operator that reads it last. Back: backward of the layer before, none before the
    # first one of backward.
    assert [round(1e3 * w.forward_s) for w in ways.values()] == [10, 3, 9]
    assert [round(1e3 * w.backward_s) for w in ways.values()] == [20, 8, 0]
    moved = np.ones(3, np.int8)
    found = layerwise(simulator, moved, 0 * moved)
    assert found.exposed_s == pytest.approx(1e-3 * ((0 + 7 + 0) + (0 + 2 + 6)))
    assert found.codec_s == 0
    assert found.swap_s == pytest.approx(2 * 20e-3)
    assert found.step_s == pytest.approx(55e-3 + 15e-3)


def test_what_moves_is_away_between_its_layers_and_memory_is_averaged_over_time():
    trace = chain([4, 10, 6], [10, 10, 10], [10, 10, 10], [0, 0, 0])
    simulator = Simulator(trace, MACHINE, 1 << 40)
    moved = np.ones(3, np.int8)
    found = layerwise(simulator, moved, 0 * moved)
    # f0: 0, 1; f1: 1, 2; f2: 2; then fetched while the layer before it runs.
    live = [14, 16, 6, 6 + 10, 10 + 4, 4]
    stretched = [10, 10, 10 + 6, 10, 10, 10]  # the first of backward has nothing to hide behind
    mean = sum(b * s for b, s in zip(live, stretched, strict=True)) / sum(stretched)
    assert found.peak_bytes == 16 * MB
    assert found.average_bytes == pytest.approx(mean * MB)
    kept = layerwise(simulator, 0 * moved, 0 * moved)
    assert kept.peak_bytes == max(live_bytes(trace))
    assert kept.step_s == kept.compute_s == pytest.approx(60e-3)


def test_sc_compresses_everything_and_cswap_plus_only_what_pays():
    # The first is hidden, the second is not: 10 ms each way beyond 1 ms.
    trace = chain([4, 10], [10, 1], [1, 10], [0.5, 0.5])
    simulator, action, codec = chosen(trace, sc.solve)
    assert [simulator.codecs[c] for c in codec] == ["zvc", "zvc"]
    static = layerwise(simulator, action, codec)
    simulator, action, codec = chosen(trace, cswap_plus.solve)
    assert [simulator.codecs[c] for c in codec] == ["raw", "zvc"]
    ours = layerwise(simulator, action, codec)
    assert static.step_s - ours.step_s == pytest.approx(2 * 4 * MB / 1e10)


# ------------------------------------------------------------- dense tensors


def test_dense_tensors_have_one_rate_that_slides_down():
    trace = with_fixed_rates(chain([10, 10], [1, 1], [1, 1], [0, 0]))
    problem = Problem(trace, MACHINE, 1 << 40)
    ways = swaps(problem.simulator, np.ones(2, bool))
    rates = [rate_of(problem.simulator, ways, epoch, 10) for epoch in range(11)]
    numbers = [int(str(name).partition(":")[2]) for name in rates]
    assert numbers[0] > numbers[-1] == 3  # below 3, zfp's exponents alone take more
    assert numbers == sorted(numbers, reverse=True)
    made = cswap_plus.solve_epoch(problem, 5, 10)
    assert {d.codec for d in made.decisions.values()} == {rates[5]}


def test_without_fixed_rates_dense_tensors_go_raw():
    made = cswap_plus.solve(Problem(chain([10], [1], [1], [0]), MACHINE, 1 << 40))
    assert [d.codec for d in made.decisions.values()] == ["raw"]


def test_sparse_tensors_are_not_made_lossy():
    trace = with_fixed_rates(chain([10, 10], [1, 1], [1, 1], [0.5, 0.0]))
    made = sc.solve_epoch(Problem(trace, MACHINE, 1 << 40), 0, 10)
    assert made.decisions[0].codec == "zvc"
    assert str(made.decisions[1].codec).startswith("zfp:")


# ----------------------------------------------------------- what is compared


def test_cudnns_step_has_no_indices_and_no_copies_for_joined_branches():
    tensors = (
        TraceTensor(8, dtype="int64"),
        TraceTensor(16),
        TraceTensor(16),
        TraceTensor(32, name="joined"),
    )
    operators = (
        TraceOperator("pool", "pool", "forward", 1.0, (), (0, 1)),
        TraceOperator("conv", "conv", "forward", 1.0, (), (2,)),
        TraceOperator("block.cat", "other", "forward", 1.0, (1, 2), (3,)),
        TraceOperator("b", "other", "backward", 1.0, (0, 3), ()),
    )
    assert [t.nbytes for t in as_cudnn(Trace(operators, tensors)).tensors] == [0, 0, 0, 32]


def test_the_largest_batch_is_bisected(monkeypatch):
    monkeypatch.setattr(home, "step_s", lambda *a: None if a[-1] > 1234 else 1.0)
    found = home.largest_batch("vgg16", load_hardware(home.MACHINE), "none", 100)
    assert 1234 * (1 - home.PRECISION) <= found <= 1234


def test_the_tuned_codec_takes_what_the_paper_says_on_vgg():
    hardware = cswap.tuned("v100")
    rate = hardware.codecs["zvc"]
    nbytes = cswap._vgg_moved_bytes()
    both = nbytes / rate.encode_bytes_per_s + nbytes / rate.decode_bytes_per_s
    assert both == pytest.approx(cswap.VGG_CODEC_S)
    assert cswap.tuned("2080ti").codecs["zvc"].encode_bytes_per_s < rate.encode_bytes_per_s


def test_epochs_that_stand_for_others_have_their_rates_and_the_oracles():
    hardware = cswap.tuned("v100")
    trace = step("alexnet", "cifar10", 2560, hardware, nn.LeakyReLU)
    states = cswap._states(trace, hardware, "alexnet", "leaky")
    assert sum(weight for _, weight, _ in states) == cswap.EPOCHS
    machines = (hardware, cswap._instant(hardware))

    def rates(epoch):
        problems = (Problem(states[0][0], machine, 1 << 42) for machine in machines)
        return tuple(sc.rate(problem, epoch, cswap.EPOCHS) for problem in problems)

    stand_in: Counter[tuple[str | None, ...]] = Counter()
    for _, weight, epoch in states:
        stand_in[rates(epoch)] += int(weight)
    assert stand_in == Counter(map(rates, range(cswap.EPOCHS)))
    assert len({ours for ours, _ in stand_in}) > 1
    assert any(ours != oracles for ours, oracles in stand_in)


@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=() if m == "alexnet" else pytest.mark.slow) for m in published.MODELS],
)
def test_every_network_has_a_step_with_feature_maps_that_move(model):
    trace = step(model, "cifar10", 4, load_hardware(published.GPUS["v100"]), min_bytes=0)
    moved = [d for d in sc.solve(Problem(trace, MACHINE, 1 << 40)).decisions.values() if d.codec]
    assert len(moved) >= 5


# ---------------------------------------------------------------- the command


@pytest.fixture
def papers(tmp_path, monkeypatch):
    """Runs the command with systems of a few cells each; the file after it, and the cells made."""
    out, made, values = tmp_path / "papers.json", [], count()

    def system(quick_keys=(), more_keys=()):
        def rows(key):
            made.append(key)
            return [Row("a system", key, "%", None, next(values), "protocol", "why")]

        def cells(*, quick):
            keys = quick_keys if quick else (*quick_keys, *more_keys)
            return [Cell(key, partial(rows, key)) for key in keys]

        return cells

    for name in command.SYSTEMS:
        monkeypatch.setitem(command.SYSTEMS, name, system())
    monkeypatch.setitem(command.SYSTEMS, "vdnn", system(["vdnn a"], ["vdnn b", "vdnn c"]))
    monkeypatch.setitem(command.SYSTEMS, "home", system([], ["home a", "home b"]))

    def run(*options):
        made.clear()
        done = CliRunner().invoke(app, ["papers", "--out", str(out), *options])
        assert done.exit_code == 0, done.output
        return json.loads(out.read_text())["cells"], list(made)

    return run


ALL = ["vdnn a", "vdnn b", "vdnn c", "home a", "home b"]


def test_quick_makes_its_cells_anew_and_no_other(papers):
    before, made = papers()
    assert made == list(before) == ALL
    assert papers() == (before, [])
    after, made = papers("--quick")
    assert made == ["vdnn a"]
    assert list(after) == ALL
    assert [key for key in ALL if after[key] != before[key]] == ["vdnn a"]
    assert papers("--quick", "--systems", "home") == (after, [])


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ((), ALL),
        (("--systems", "vdnn"), ALL[:3]),
        (("--systems", "home"), ALL[3:]),
        (("--quick",), ALL[:1]),
        (("--quick", "--systems", "vdnn"), ALL[:1]),
    ],
)
def test_again_replaces_the_cells_that_it_makes_and_keeps_all_others(papers, options, keys):
    before, _ = papers()
    after, made = papers("--again", *options)
    assert made == keys
    assert list(after) == ALL
    assert [key for key in ALL if after[key] != before[key]] == keys


def test_what_its_systems_no_longer_have_is_dropped(papers, tmp_path):
    papers()
    out = tmp_path / "papers.json"
    document = json.loads(out.read_text())
    document["cells"] |= {"vdnn old": [], "home old": [], "gone a": []}
    out.write_text(json.dumps(document))
    assert list(papers("--again", "--quick")[0]) == [*ALL, "vdnn old", "home old"]
    assert list(papers("--again", "--systems", "vdnn")[0]) == [*ALL, "home old"]


def test_the_command_fills_a_file(tmp_path, monkeypatch):
    cells = cswap.cells
    monkeypatch.setitem(command.SYSTEMS, "cswap", lambda *, quick: cells(quick=quick)[:1])
    out = tmp_path / "papers.json"
    arguments = ["papers", "--quick", "--systems", "vdnn,cswap", "--out", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    first = json.loads(out.read_text())
    keys = [c.key for c in (*vdnn.cells(quick=True), *cells(quick=True)[:1])]
    assert list(first["cells"]) == keys
    rows = [row for cell in first["cells"].values() for row in cell]
    assert all(row["why"] and row["protocol"] for row in rows)
    assert rows[0]["published"] == 89.0
    assert first["means"]
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    wrong = CliRunner().invoke(app, ["papers", "--systems", "vdn", "--out", str(out)])
    assert wrong.exit_code == 2
    assert "vdn" in wrong.output


def test_figures_have_their_units():
    assert figure(1.234, "x") == "1.23 x"
    assert figure(0.05 * 1000, "samples/s") == "50.0 samples/s"
    assert figure(None, "%") == "-"
    assert figure(2012, "batch") == "2012"
