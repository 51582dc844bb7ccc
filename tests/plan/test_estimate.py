"""Estimated and measured traces: exact where a hand can reckon, the engine's where it decides."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import cswap
from bench.workloads import networks
from bench.workloads.small_models import CnnShape, Gpt, GptShape, VggNet
from cswap.advisor.site_history import Explanation
from cswap.errors import TraceError
from cswap.plan.estimate import estimate
from cswap.plan.hardware import Flops, Hardware
from cswap.plan.measure import measure
from cswap.plan.simulator.lifetimes import fingerprint, lifetimes
from cswap.schema.plan import Decision, Plan
from cswap.schema.tensor import TensorProfile
from cswap.schema.trace import Trace

MACHINE = Hardware(
    name="test",
    memory_bytes=16 << 30,
    flops={"float32": Flops(peak=2e12, achievable=1e12), "float16": Flops(8e12, 4e12)},
    memory_bytes_per_s=1e11,
    d2h_bytes_per_s=1e10,
    h2d_bytes_per_s=1e10,
)


Case = tuple[nn.Module, torch.Tensor, Callable[..., torch.Tensor], Any]


def cnn() -> Case:
    images, classes = torch.randn(4, 1, 32, 32), torch.zeros(4, dtype=torch.int64)
    return VggNet(CnnShape()), images, functional.cross_entropy, classes


def gpt() -> Case:
    tokens = torch.randint(0, 256, (4, 128))
    return Gpt(GptShape(n_layers=2)), tokens, functional.cross_entropy, tokens


def encoder() -> Case:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return layer, torch.randn(4, 16, 64), torch.Tensor.sum, ()


class Lstm(nn.Module):
    """An LSTM of one layer over the steps, in elementary operators; logits of the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.head = nn.Linear(32 + 64, 4 * 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = cell = x.new_zeros(x.shape[0], 64)
        for step in x.unbind(1):
            enter, forget, new, leave = self.gates(torch.cat([step, hidden], 1)).chunk(4, 1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            hidden = leave.sigmoid() * cell.tanh()
        logits: torch.Tensor = self.head(hidden)
        return logits


def lstm() -> Case:
    classes = torch.zeros(4, dtype=torch.int64)
    return Lstm(), torch.randn(4, 5, 32), functional.cross_entropy, classes


class Branches(nn.Module):
    """Convolutions side by side over one input, in place and depthwise ones, and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace=True))
        self.one = nn.Sequential(nn.Conv2d(16, 32, 1), nn.ReLU(inplace=True))
        self.three = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(inplace=True))
        self.depthwise = nn.Sequential(
            nn.Conv2d(64, 64, 3, 2, 1, groups=64, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
        )
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Conv2d(64, 10, 1), nn.AdaptiveAvgPool2d(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        x = functional.max_pool2d(torch.cat([self.one(x), self.three(x)], 1), 3, 2, ceil_mode=True)
        logits: torch.Tensor = self.head(self.depthwise(x)).flatten(1)
        return logits


def branches() -> Case:
    classes = torch.zeros(2, dtype=torch.int64)
    return Branches(), torch.randn(2, 3, 32, 32), functional.cross_entropy, classes


SMALL: dict[str, Callable[[], Case]] = {
    "cnn": cnn,
    "gpt": gpt,
    "encoder": encoder,
    "lstm": lstm,
    "branches": branches,
}


def saved_by(trace: Trace) -> dict[int, int]:
    return {t.saved: t.nbytes for t in trace.tensors if t.saved >= 0}


def saved_by_engine(explained: list[Explanation]) -> dict[int, int]:
    return {e.position: e.profile.nbytes for e in explained if e.profile is not None}


def profiled(_profile: TensorProfile) -> str:
    """A codec option that makes the advisor profile what it swaps."""
    return "raw"


def operators(trace: Trace, phase: str) -> list[str]:
    return [o.name for o in trace.operators if o.phase == phase]


def names(trace: Trace, indices: tuple[int, ...]) -> list[str]:
    return [trace.tensors[i].name for i in indices]


# ------------------------------------------------------------------ by hand


def test_trace_of_two_layers_is_the_one_reckoned_by_hand():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True))
    trace = estimate(
        model, torch.empty(4, 8), torch.sum, hardware=MACHINE, min_bytes=0, launch_s=0.5
    )
    weights, x, hidden = 4 * (8 * 16 + 16), 4 * 4 * 8, 4 * 4 * 16
    rows = [
        (o.name, o.kind, o.phase, names(trace, o.inputs), names(trace, o.outputs), o.bytes_moved)
        for o in trace.operators
    ]
    assert rows == [
        ("0.addmm", "linear", "forward", ["input.0"], ["0.addmm"], weights + x + hidden),
        ("1.relu_", "activation", "forward", ["0.addmm"], [], 2 * hidden),
        ("sum", "other", "forward", ["0.addmm"], ["sum"], hidden + 4),
        ("ones_like", "other", "backward", ["sum"], ["ones_like"], 4 + 4),
        (
            *("1.threshold_backward", "activation", "backward"),
            *(["ones_like", "0.addmm"], ["1.threshold_backward"], 4 + 2 * hidden),
        ),
        (
            *("0.mm", "linear", "backward"),
            *(["1.threshold_backward", "input.0"], ["0.weight.grad"], hidden + x + 4 * 8 * 16),
        ),
        ("0.sum", "other", "backward", ["1.threshold_backward"], ["0.bias.grad"], hidden + 4 * 16),
        (
            *("optimizer", "optimizer", "optimizer"),
            *(["0.weight.grad", "0.bias.grad"], [], 3 * weights),
        ),
    ]
    assert [trace.tensors[i].name for i in lifetimes(trace).swappable] == ["input.0", "0.addmm"]
    assert Trace.parse(json.dumps(trace.to_dict())) == trace
    assert trace.operators[0].flops == 2 * 4 * 8 * 16
    assert trace.operators[0].duration_s == (weights + x + hidden) / 1e11 + 0.5
    assert trace.resident_bytes == weights
    assert (trace.batch, trace.source, trace.hardware) == (4, "estimated", "test")


def test_large_product_takes_as_long_as_its_arithmetic():
    with torch.device("meta"):
        model, x = nn.Linear(4096, 4096, bias=False).half(), torch.empty(4096, 4096).half()
    trace = estimate(model, x, torch.sum, hardware=MACHINE, launch_s=0.0)
    assert trace.operators[0].duration_s == 2 * 4096**3 / 4e12


@pytest.mark.parametrize(
    ("optimizer", "n_states", "accesses"), [("none", 0, 0), ("momentum", 1, 5), ("adam", 2, 7)]
)
def test_optimizer_state_is_resident_and_its_traffic_counted(optimizer, n_states, accesses):
    model = nn.Linear(8, 8, bias=False)
    trace = estimate(model, torch.empty(2, 8), torch.sum, hardware=MACHINE, optimizer=optimizer)
    assert trace.resident_bytes == (1 + n_states) * 4 * 64
    assert trace.operators[-1].bytes_moved == accesses * 4 * 64
    assert names(trace, trace.operators[-1].inputs) == ["weight.grad"]


def test_saved_tensor_lives_until_its_node_has_run_even_if_no_operator_reads_it():
    class Careless(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            kept = x * 2
            ctx.save_for_backward(kept)
            return x + 1

        @staticmethod
        def backward(ctx, grad):
            ctx.saved_tensors  # noqa: B018 - what a node asks for it has held so far
            return grad * 3

    class Model(nn.Module):
        def forward(self, x):
            return Careless.apply(x)

    x = torch.empty(8, requires_grad=True)
    trace = estimate(Model(), x, torch.sum, hardware=MACHINE, min_bytes=0)
    (kept,) = lifetimes(trace).swappable
    last = trace.operators[lifetimes(trace).last_use[kept]]
    assert (trace.tensors[kept].name, last.name, last.phase) == ("mul", "mul", "backward")


def test_memory_made_without_values_is_produced_by_who_writes_it_first():
    model, x = nn.Dropout(0.5), torch.empty(8, requires_grad=True)
    trace = estimate(model, x, torch.sum, hardware=MACHINE, device="cpu", min_bytes=0)
    mask = trace.operators[0]
    assert (mask.name, mask.inputs, names(trace, mask.outputs)) == (
        *("bernoulli_", ()),
        ["bernoulli_"],
    )


def test_parts_of_one_storage_that_are_saved_apart_are_tensors_apart():
    class Steps(nn.Module):
        def forward(self, x):
            return sum((step * step).sum() for step in x.unbind(0))

    x = torch.empty(6, 1000, requires_grad=True)
    trace = estimate(Steps(), x, lambda y: y, hardware=MACHINE, min_bytes=0)
    parts = [t for t in trace.tensors if t.role == "input"]
    assert [(t.nbytes, t.saved) for t in parts] == [(4000, n) for n in range(6)]
    squares = [o for o in trace.operators if o.name == "mul" and o.phase == "forward"]
    assert [names(trace, o.inputs) for o in squares] == [[t.name] for t in parts]


def test_gpus_own_operators_are_taken_for_a_gpu():
    with torch.device("meta"):
        model = Gpt(GptShape(n_layers=1))
        model.add_module("dropout", nn.Dropout(0.1))
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    taken = {
        device: set(
            operators(
                estimate(
                    *(model, tokens, functional.cross_entropy, tokens),
                    hardware=MACHINE,
                    device=device,
                ),
                "forward",
            )
        )
        for device in ("cuda", "cpu")
    }
    assert taken["cuda"] - taken["cpu"] == {
        "dropout.native_dropout",
        "blocks.0._scaled_dot_product_efficient_attention",
    }
    assert taken["cpu"] - taken["cuda"] == {
        *("dropout.bernoulli_", "dropout.div_", "dropout.mul"),
        "blocks.0._scaled_dot_product_flash_attention_for_cpu",
    }


# ------------------------------------------------------------ what it leaves


def test_model_is_not_changed():
    model = VggNet(CnnShape())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    images, classes = torch.randn(2, 1, 32, 32), torch.zeros(2, dtype=torch.int64)
    estimate(model, images, functional.cross_entropy, classes, hardware=MACHINE)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_tied_weights_are_resident_once():
    with torch.device("meta"):
        model = networks.Gpt2(2, 64, 2, 0.1)
    tokens = torch.empty(1, 64, dtype=torch.int64, device="meta")
    trace = estimate(
        *(model, tokens, torch.Tensor.sum), hardware=MACHINE, optimizer="none", device="cpu"
    )
    assert trace.resident_bytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lion"}, "optimizer='lion'"),
        ({"device": "tpu"}, "device='tpu'"),
    ],
)
def test_wrong_option_is_named(options, message):
    with pytest.raises(TraceError, match=message):
        estimate(nn.Linear(2, 2), torch.empty(1, 2), torch.sum, hardware=MACHINE, **options)


def test_model_that_looks_at_values_is_refused():
    class Looks(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 if x.sum().item() > 0 else 1)

    with pytest.raises(TraceError, match="model=Looks: this step depends on the values"):
        estimate(Looks(2, 2), torch.empty(1, 2), torch.sum, hardware=MACHINE)


# ---------------------------------------------------------------- the engine


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name",
    SMALL,
)
@pytest.mark.parametrize("min_bytes", [0, 4096, 65536])
def test_positions_and_bytes_are_the_engines(name, min_bytes):
    # Note [positions are the engine's]
    model, x, loss, target = SMALL[name]()
    trace = estimate(model, x, loss, target, hardware=MACHINE, device="cpu", min_bytes=min_bytes)
    targets = target if isinstance(target, tuple) else (target,)
    with cswap.install(model, min_bytes=min_bytes, codec=profiled, remat=False) as handle:
        loss(model(x), *targets).backward()
    assert saved_by_engine(handle.engine.explain()) == saved_by(trace)


def test_casts_of_parameters_have_no_positions():
    # Note [positions are the engine's]
    model, x, loss, target = gpt()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trace = estimate(model, x, loss, target, hardware=MACHINE, device="cpu", min_bytes=0)
        with cswap.install(model, min_bytes=0, codec=profiled, remat=False) as handle:
            loss(model(x), target).backward()
    assert saved_by_engine(handle.engine.explain()) == saved_by(trace)
    assert {t.dtype for t in trace.tensors if t.saved >= 0} >= {"bfloat16"}


def test_what_the_loss_saves_has_positions_if_everything_is_swapped():
    model, x, loss, target = cnn()
    trace = estimate(
        *(model, x, loss, target),
        hardware=MACHINE,
        device="cpu",
        min_bytes=0,
        swap_loss=True,
    )
    with cswap.install(min_bytes=0, codec=profiled, remat=False) as handle:
        loss(model(x), target).backward()
    assert saved_by_engine(handle.engine.explain()) == saved_by(trace)
    assert "_log_softmax" in {t.name for t in trace.tensors if t.saved >= 0}


def test_engine_does_what_a_plan_made_from_an_estimate_says():
    model, x, loss, target = cnn()
    trace = estimate(model, x, loss, target, hardware=MACHINE, device="cpu", min_bytes=4096)
    codecs = {
        trace.tensors[i].saved: "bitpack" if trace.tensors[i].dtype == "bool" else "zvc"
        for i in lifetimes(trace).swappable
    }
    plan = Plan({position: Decision("swap", codec) for position, codec in codecs.items()})
    with cswap.install(model, plan=plan, min_bytes=4096) as handle:
        loss(model(x), target).backward()
    done = {e.position: (e.codec, e.reason) for e in handle.engine.explain()}
    assert done == {p: (codec, "the plan says so") for p, codec in codecs.items()}


# ------------------------------------------------------------------- measured


@pytest.mark.parametrize("name", ["cnn", "gpt", "lstm"])
def test_measured_step_has_the_structure_of_the_estimated_one(name):
    model, x, loss, target = SMALL[name]()
    measured = measure(
        *(model, x, loss, target), min_bytes=4096, warm_up=0, repeats=1, profiles=False
    )
    estimated = estimate(
        *(model, x, loss, target),
        hardware=MACHINE,
        device="cpu",
        min_bytes=4096,
        optimizer="none",
    )
    assert fingerprint(measured) == fingerprint(estimated)
    assert measured.resident_bytes == estimated.resident_bytes
    assert [o.flops for o in measured.operators] == [o.flops for o in estimated.operators]
    assert all(o.duration_s > 0 for o in measured.operators)


def test_measuring_trains_and_profiles_what_is_saved():
    model, x, loss, target = cnn()
    before = [p.clone() for p in model.parameters()]
    trace = measure(
        *(model, x, loss, target),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        min_bytes=4096,
        warm_up=1,
        repeats=1,
        codecs=("zvc", "bitpack"),
    )
    assert all(p.grad is None for p in model.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert trace.resident_bytes == 2 * sum(p.nbytes for p in model.parameters())
    saved = [t for t in trace.tensors if t.saved >= 0]
    assert {t.dtype: set(t.ratios) for t in saved} == {
        "float32": {"zvc"},
        "bool": {"zvc", "bitpack"},
        "int64": {"zvc", "bitpack"},
    }
    after_relu = next(t for t in saved if t.name == "stages.0.1.relu")
    zeros = after_relu.profile["zero_fraction"]
    assert 0.2 < zeros < 0.8
    assert after_relu.ratios["zvc"] == pytest.approx(1 / (1 - zeros + 1 / 32), rel=0.1)


def test_steps_that_differ_are_refused():
    class Fickle(nn.Linear):
        n_calls = 0

        def forward(self, x):
            self.n_calls += 1
            out = super().forward(x)
            return out.relu() if self.n_calls % 2 else out

    model = Fickle(2, 2)
    with pytest.raises(TraceError, match="measure: steps differ"):
        measure(model, torch.ones(1, 2), torch.sum)
    with pytest.raises(TraceError, match="repeats=0"):
        measure(model, torch.ones(1, 2), torch.sum, repeats=0)


# ------------------------------------------------------------------ published

GIB = 1 << 30
MULTIPLICATIONS = {networks.Vgg16: 15.47, networks.ResNet50: 4.09}
"""Per image of a forward pass, in 1e9: torchvision's tables."""


def of_images(build: Callable[[], nn.Module], batch: int) -> Trace:
    with torch.device("meta"):
        model, x = build(), torch.empty(batch, 3, 224, 224)
    classes = torch.empty(batch, dtype=torch.int64)
    return estimate(model, x, functional.cross_entropy, classes, hardware=MACHINE)


@pytest.mark.parametrize("build", MULTIPLICATIONS)
def test_arithmetic_is_the_published_amount(build):
    operators = of_images(build, 8).operators
    kinds = ("conv", "linear")
    flops = sum(o.flops for o in operators if o.phase == "forward" and o.kind in kinds)
    assert flops / 8 / 2e9 == pytest.approx(MULTIPLICATIONS[build], rel=0.015)


def test_vgg16_offloads_the_sixteen_gigabytes_that_vdnn_says():
    trace = of_images(networks.Vgg16, 256)
    features = [
        t
        for i in lifetimes(trace).swappable
        if (t := trace.tensors[i]).dtype == "float32" and not t.module.startswith("classifier")
    ]
    assert sum(t.nbytes for t in features) / GIB == pytest.approx(16, rel=0.1)


def test_an_array_in_the_place_of_a_tensor_is_named():
    with pytest.raises(TraceError, match=r"argument=ndarray: must be a torch\.Tensor"):
        estimate(nn.Linear(4, 4), torch.zeros(4).numpy(), torch.mean, hardware="v100-pcie3")
