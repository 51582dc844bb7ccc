"""An installed model with compiled parts, and code around it that is compiled.

The compiler is on while these run, and torch calls cswap's hooks meanwhile: none of them may become
a part of a graph, or a graph of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

import cswap

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIONS = [{}, {"codec": "zvc", "min_bytes": 0}, {"fit": "min"}]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A block that compiles to two graphs, with eager operators between them if ``broken``."""

    def __init__(self, *, broken=False):
        super().__init__()
        self.norm, self.broken = nn.LayerNorm(64), broken
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        """Args: x: [n, 128, 64]."""
        y = torch.relu(self.wide(self.norm(x)))
        if self.broken:
            torch._dynamo.graph_break()
        return x + self.narrow(y)


class CallsCompiled(nn.Module):
    """A module whose forward calls a compiled function."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)
        self.act = torch.compile(lambda x: torch.tanh(x) * x.sigmoid(), backend="aot_eager")

    def forward(self, x):
        """Args: x: [n, 128, 64]."""
        return x + self.b(self.act(self.a(x)))


def in_place(module, backend):
    module.compile(backend=backend)
    return module


def put_back(module, backend):
    return torch.compile(module, backend=backend)


PARTS = {
    "linear": lambda: nn.Linear(64, 64),
    "sequential": lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)),
    "broken": lambda: Block(broken=True),
    "attention": lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True),
    "function": CallsCompiled,
}


CASES = [
    pytest.param(part, compile_, id=f"{part}-{compile_.__name__}")
    for part in PARTS
    for compile_ in (in_place, put_back)
    if (part, compile_) != ("attention", put_back)  # which takes half a minute to trace
]


def built(part, compile_, backend):
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Linear(64, 64)]
    for _ in range(2):
        made = PARTS[part]()
        modules += [made if part == "function" else compile_(made, backend), nn.ReLU()]
    return nn.Sequential(*modules, nn.Linear(64, 64))


def gradients(net, x):
    torch.manual_seed(1)
    net.zero_grad()
    net(x).square().mean().backward()
    return [p.grad.clone() for p in net.parameters()]


def own_graphs():
    """Functions of cswap that were compiled, but for the one where a model's call begins."""
    package = str(Path(cswap.__file__).parent)
    found = {(m.co_filename or "", m.co_name) for m in get_compilation_metrics()}
    return {name for file, name in found if file.startswith(package)} - {"_call"}


# A goal is made of compiled parts in another test: here it takes seconds.
@pytest.mark.sampled
@pytest.mark.parametrize(
    "options", [*OPTIONS[:2], pytest.param(OPTIONS[2], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("part", "compile_"), CASES)
def test_compiled_parts_keep_their_gradients_and_their_graphs(part, compile_, backend, options):
    plain, mine = (built(part, compile_, backend) for _ in range(2))
    inputs = [torch.randn(n, 128, 64) for n in (8, 8, 6, 8)]
    wanted = [gradients(plain, x) for x in inputs]
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    with cswap.install(mine, **options):
        found = [gradients(mine, x) for x in inputs]
    for step, expected in zip(found, wanted, strict=True):
        assert all(map(torch.equal, step, expected))
    assert own_graphs() == set()
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_linear_layer_in_a_default_install_was_compiled():
    torch.manual_seed(0)
    plain, mine = (
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        for _ in range(2)
    )
    mine.load_state_dict(plain.state_dict())
    for net in (plain, mine):
        net[2].compile(backend="eager")
    x = torch.randn(512, 64)
    wanted = gradients(plain, x)
    with cswap.install(mine) as handle:
        for _ in range(3):
            assert all(map(torch.equal, gradients(mine, x), wanted))
        assert handle.stats.packed > 0
    assert own_graphs() == set()


@pytest.mark.parametrize("options", [*OPTIONS, {"lossy": "int8", "guard_every": 2}])
def test_a_compiled_function_that_runs_backward_compiles_nothing_of_cswap(options):
    torch.manual_seed(0)
    plain, mine = Block(broken=True), Block(broken=True)
    mine.load_state_dict(plain.state_dict())
    backward = torch.compile(lambda loss: loss.backward(), backend="eager")
    inputs = [torch.randn(n, 128, 64) for n in (8, 8, 6)]
    error = 0.1 if "lossy" in options else 0.0
    with cswap.install(mine, **options) as handle:
        for x in inputs:
            wanted = gradients(plain, x)
            mine.zero_grad()
            backward(mine(x).square().mean())
            for p, g in zip(mine.parameters(), wanted, strict=True):
                assert (p.grad - g).norm() <= error * g.norm()
    assert own_graphs() == set()
    assert handle.stats.fallbacks == 0
