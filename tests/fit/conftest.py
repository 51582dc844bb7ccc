"""Models that save much, and a goal's controller whose plans are made at once."""

from __future__ import annotations

import pytest
import torch

import cswap


class AtOnce:
    """In place of `cswap.fit.background.Background`: the work is done where it is asked for."""

    done = True

    def __init__(self, work):
        self.result = work


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch):
    monkeypatch.setattr("cswap.fit.controller.Background", AtOnce)
    monkeypatch.setattr("cswap.engine.trials._timed", lambda *_: 1e-5)
    monkeypatch.setattr("cswap.fit.controller.MOST_REPRICED", 0)
    monkeypatch.setattr("cswap.fit.controller.MOST_OVER_LINK", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


class Block(torch.nn.Module):
    """A residual block: a norm, two products with a GELU between them, dropout."""

    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width),
            torch.nn.GELU(),
            torch.nn.Linear(4 * width, width),
            torch.nn.Dropout(0.1),
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Convolution(torch.nn.Module):
    """A residual block with batch norms."""

    def __init__(self, channels):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(channels),
            torch.nn.ReLU(),
            torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


class Training:
    """A model, and steps of its training."""

    gradients: list[torch.Tensor]

    def __init__(self, kind):
        torch.manual_seed(1)
        self.kind = kind
        if kind == "blocks":
            self.model: torch.nn.Module = torch.nn.Sequential(*(Block(32) for _ in range(4)))
            self.x = torch.randn(128, 32)
        else:
            self.model = torch.nn.Sequential(
                torch.nn.Conv2d(3, 8, 3, padding=1), *(Convolution(8) for _ in range(3))
            )
            self.x = torch.randn(4, 3, 16, 16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)

    def step(self, x=None):
        """One step; its gradients."""
        self.optimizer.zero_grad()
        self.model(self.x if x is None else x).square().mean().backward()
        gradients = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.step()
        return gradients

    def state(self):
        return [x.clone() for x in self.model.state_dict().values()]


@pytest.fixture(params=["blocks", "convolutions"])
def training(request):
    return Training(request.param)


@pytest.fixture
def make_training():
    return Training


_SIZES: dict[str, tuple[int, int]] = {}


@pytest.fixture
def sizes():
    """Of a training: bytes of what is resident, and of all that a step saves."""

    def of(training):
        if training.kind in _SIZES:
            return _SIZES[training.kind]
        another = Training(training.kind)  # steps change the weights
        unlimited = cswap.install(another.model, fit="1TiB", min_bytes=0)
        with unlimited:
            for _ in range(6):
                another.step()
            goal = unlimited.goal
            assert goal is not None
            assert goal.phase == "obeying"
            assert set(goal.actions) == {"keep"}
            assert goal.measured_bytes is not None
            found = goal.resident_bytes, goal.measured_bytes - goal.resident_bytes
        return _SIZES.setdefault(training.kind, found)

    return of


@pytest.fixture
def install():
    handles = []

    def make(model, **options):
        handle = cswap.install(model, **{"min_bytes": 0, **options})
        handles.append(handle)
        return handle

    yield make
    for handle in handles:
        handle.remove()
