"""The models of the twin, at full size: their memory is never touched."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.gpu import training
from bench.gpu.training import Task
from bench.workloads.large_models import BlockModel

VOCABULARY: Final = 32000
"""Of Llama."""

PASSES: Final = {"adamw": 20.0, "sgd": 8.0}
"""Reads and writes of all parameters' bytes by torch's foreach optimizers."""

STATES: Final = {"adamw": 2, "sgd": 1}
"""Tensors of an optimizer's state for each parameter."""


def optimizer(task: Task) -> str:
    """Key of `PASSES` and `STATES`."""
    return "adamw" if task.tokens or task.adamw else "sgd"


class _Denoising(Task):
    """A task whose targets are images like the inputs."""

    @property
    def target_sizes(self) -> tuple[int, ...]:
        """See `Task.target_sizes`."""
        return (self.batch, *self.input_sizes)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """See `Task.loss`."""
        return functional.mse_loss(logits, targets)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, head = heads, kv_heads, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * head, bias=False)
        self.v = nn.Linear(width, kv_heads * head, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = (batch, time, -1, width // self.heads)
        q, k, v = (m(x).view(split).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = (y * cos + _rotated(y) * sin for y in (q, k))
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class _SwiGlu(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class _Experts(nn.Module):
    """Each token goes to two of the experts; here in equal numbers, as if it were balanced."""

    def __init__(self, width: int, hidden: int, n: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, n, bias=False)
        self.experts = nn.ModuleList(_SwiGlu(width, hidden) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        n = len(self.experts)
        rows = x.flatten(0, 1)
        weight = functional.softmax(self.router(rows).float(), -1).to(x.dtype)
        order = torch.arange(2 * rows.shape[0], device=x.device) // 2
        parts = order.chunk(n)
        out = torch.zeros_like(rows)
        for i, (expert, of) in enumerate(zip(self.experts, parts, strict=True)):
            taken = rows.index_select(0, of)
            out = out.index_add(0, of, expert(taken) * weight.index_select(0, of)[:, i : i + 1])
        return out.view_as(x)


class LlamaBlock(nn.Module):
    """A block of Llama: RMS norms, rotary positions, grouped queries, SwiGLU or experts."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.attention = _Attention(width, heads, kv_heads)
        self.mlp = _Experts(width, hidden, experts) if experts else _SwiGlu(width, hidden)
        self.head = width // heads

    def forward(self, x: Tensor) -> Tensor:
        """x and the result are [batch, time, width]."""
        turn = torch.zeros(x.shape[1], self.head, dtype=x.dtype, device=x.device)
        x = x + self.attention(self.norm_attention(x), turn.cos(), turn.sin())
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class Llama(BlockModel):
    """A stack of blocks between a token embedding and logits."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        vocabulary: int,
        experts: int = 0,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        sizes = (width, heads, kv_heads, hidden, experts)
        self.blocks = nn.ModuleList(LlamaBlock(*sizes) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, 1e-5), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, [batch, vocabulary, time]."""
        x = self.token(tokens)
        for block in self.blocks:
            x = self.run_block(block, x)
        logits: Tensor = self.head(self.norm(x)).transpose(1, 2)
        return logits


class _VitBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out


class Vit(BlockModel):
    """ViT-L/16 (Dosovitskiy et al. 2021)."""

    def __init__(self, layers: int = 24, width: int = 1024, heads: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.position = nn.Parameter(torch.empty(1, 197, width))
        self.token = nn.Parameter(torch.empty(1, 1, width))
        self.blocks = nn.ModuleList(_VitBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, [batch, classes], of images, [batch, 3, 224, 224]."""
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.position
        for block in self.blocks:
            x = self.run_block(block, x)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits


class _Residual(nn.Module):
    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(32, c_in), nn.SiLU(), nn.Conv2d(c_in, c_out, 3, padding=1)
        )
        self.second = nn.Sequential(
            nn.GroupNorm(32, c_out), nn.SiLU(), nn.Conv2d(c_out, c_out, 3, padding=1)
        )
        self.skip = nn.Identity() if c_in == c_out else nn.Conv2d(c_in, c_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.skip(x) + self.second(self.first(x))
        return out


class Unet(BlockModel):
    """The residual blocks of a U-Net of latent diffusion (Rombach et al. 2022), no attention."""

    def __init__(self, width: int = 320, factors: tuple[int, ...] = (1, 2, 4, 4)) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        widths = [width * f for f in factors]
        befores = [width, *widths[:-1]]
        self.down = nn.ModuleList(map(_Residual, befores, widths))
        self.middle = _Residual(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            _Residual(2 * w, b) for w, b in zip(widths[::-1], befores[::-1], strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, 4, side, side], as x."""
        x = self.first(x)
        kept = []
        for i, block in enumerate(self.down):
            x = self.run_block(block, functional.avg_pool2d(x, 2) if i else x)
            kept.append(x)
        x = self.run_block(self.middle, x)
        for i, block in enumerate(self.up):
            x = functional.interpolate(x, scale_factor=2) if i else x
            x = self.run_block(block, torch.cat((x, kept.pop()), 1))
        out: Tensor = self.last(x)
        return out


def _llama(name: str, batch: int, layers: int, hidden: int, experts: int = 0) -> Task:
    build = partial(Llama, layers, 4096, 32, 8, hidden, VOCABULARY, experts)
    return Task(name, build, batch, (4096,), VOCABULARY, tokens=True, weights=torch.bfloat16)


_HALF: Final[dict[str, Any]] = {"autocast": torch.bfloat16, "adamw": True}

MODELS: Final = {
    "gpt2-small": training.SMALL,
    "gpt2-small-b4": replace(training.SMALL, name="GPT-2 small, batch 4", batch=4),
    "gpt2-medium": training.MEDIUM,
    "gpt2-large": training.LARGE,
    "resnet50": training.RESNET,
    "vit-l16": Task("ViT-L/16", Vit, 64, **_HALF),
    "llama": _llama("Llama blocks, d = 4096", 2, 8, 11008),
    "moe": _llama("mixture of experts, d = 4096", 2, 4, 4096, 8),
    "unet": _Denoising("U-Net of diffusion", Unet, 64, (4, 64, 64), **_HALF),
}
"""By name; those of `bench gpu` are the tasks that it measures."""

TINY: Final = "tiny"
"""Name of a model for tests, which no command trains unless it is asked to."""

ALL: Final = {
    **MODELS,
    TINY: training.gpt2("GPT-2 of two blocks", (2, 256, 4), 4, autocast=torch.bfloat16),
}
