"""What the tests on a GPU share. All of them carry the marker `gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cswap.codecs.registry import NVCOMP, get_codec
from cswap.errors import CswapError
from cswap.schema.tensor import DTYPES


@pytest.fixture
def device():
    """The GPU; at the end everything on it must have gone well."""
    yield torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize()


@pytest.fixture
def codec_on_gpu():
    """Returns a codec by name, or skips the test if it is not for GPUs."""

    def find(name: str) -> Any:
        if name in NVCOMP:
            pytest.skip(f"codec {name!r} has no twin on a CPU: see test_nvcomp_gpu.py")
        try:
            codec = get_codec(name)
        except CswapError as error:
            pytest.skip(str(error))
        if not any(codec.supports(getattr(torch, d), "cuda") for d in DTYPES if hasattr(torch, d)):
            pytest.skip(f"codec {name!r} is not for GPUs")
        if not codec.supports(torch.float32):  # zfp without zfpy: see test_gpu_zfp.py
            pytest.skip(f"codec {name!r} has no twin on this CPU")
        return codec

    return find


@pytest.fixture
def layers():
    """Makes n pairs of nn.Linear and nn.ReLU on the GPU, the same ones every time."""

    def make(n: int, width: int = 1024, device: torch.device | str = "cuda") -> nn.Sequential:
        torch.manual_seed(0)
        pairs = (m for _ in range(n) for m in (nn.Linear(width, width), nn.ReLU()))
        return nn.Sequential(*pairs).to(device)

    return make


@pytest.fixture
def gradients():
    """Returns a model's gradients for one input, and leaves the model without."""

    def of(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        net(x).square().sum().backward()
        found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad(set_to_none=True)
        return found

    return of


@pytest.fixture
def slow(monkeypatch):
    """Makes a codec busy on its stream before it works: whoever does not wait for it is early."""

    def patch(name: str, *, cycles: int = 2_000_000) -> None:
        codec = get_codec(name)
        for method in ("encode_flat", "decode_flat"):
            monkeypatch.setattr(codec, method, _delayed(getattr(codec, method), cycles))

    return patch


def _delayed(method: Any, cycles: int) -> Any:
    def run(*args: Any, stream: Any, **options: Any) -> Any:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
        return method(*args, stream=stream, **options)

    return run
