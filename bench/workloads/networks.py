"""The published networks that training on a GPU is measured on: VGG-16, ResNet-50, GPT-2."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

N_CLASSES = 1000
VOCABULARY = 50257
CONTEXT = 1024


class Vgg16(nn.Module):
    """VGG-16 (Simonyan & Zisserman, arXiv:1409.1556, configuration D)."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        c_in = 3
        for c_out, n_convs in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
            for _ in range(n_convs):
                layers += [nn.Conv2d(c_in, c_out, 3, padding=1), _relu()]
                c_in = c_out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            _relu(),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            _relu(),
            nn.Dropout(0.5),
            nn.Linear(4096, N_CLASSES),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits, [batch, N_CLASSES], of images, [batch, 3, 224, 224]."""
        logits: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def _relu() -> nn.Module:
    # In place: as torchvision has it, it needs no map of its own.
    return nn.ReLU(inplace=True)


def _conv_norm(c_in: int, c_out: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    # A convolution that keeps the image's size (but for the stride), and its batch norm.
    conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(c_out)]


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride), 1x1, and a shortcut around them."""

    def __init__(self, c_in: int, width: int, stride: int) -> None:
        super().__init__()
        c_out = 4 * width
        self.body = nn.Sequential(
            *_conv_norm(c_in, width, 1),
            _relu(),
            *_conv_norm(width, width, 3, stride),
            _relu(),
            *_conv_norm(width, c_out, 1),
        )
        same = stride == 1 and c_in == c_out
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_conv_norm(c_in, c_out, 1, stride))
        )
        self.relu = _relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, c_in, h, w] to [batch, 4 * width, h / stride, w / stride]."""
        out = self.body(x)
        out += self.shortcut(x)
        activated: torch.Tensor = self.relu(out)
        return activated


class ResNet50(nn.Module):
    """ResNet-50 (He et al., arXiv:1512.03385, table 1).

    The stride is in the 3x3 convolution, as torchvision has it.
    """

    def __init__(self) -> None:
        super().__init__()
        width = 64
        stem = [*_conv_norm(3, width, 7, 2), _relu(), nn.MaxPool2d(3, 2, 1)]
        c_in = width
        stages: list[nn.Module] = []
        for index, n_blocks in enumerate((3, 4, 6, 3)):
            for block in range(n_blocks):
                stride = 2 if index and not block else 1
                stages.append(Bottleneck(c_in, width << index, stride))
                c_in = 4 * (width << index)
        self.features = nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(c_in, N_CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits, [batch, N_CLASSES], of images, [batch, 3, 224, 224]."""
        logits: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return logits


class GptBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout))
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result are [batch, time, width]."""
        x = x + self.attend(self.norm_attention(x))
        out: torch.Tensor = x + self.mlp(self.norm_mlp(x))
        return out

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Causal self-attention; x and the result are [batch, time, width]."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.n_heads, width // self.n_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, head, time, width / n_heads]
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class Gpt2(nn.Module):
    """GPT-2 (Radford et al. 2019); the output layer is the token embedding again."""

    def __init__(self, n_layers: int, width: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(GptBlock(width, n_heads, dropout) for _ in range(n_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits, [batch, time, 50257], of tokens, [batch, time] int64."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits
