"""A small ResNet with batch norms: the demo's models have none."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from bench.workloads.small_models import Net


class BasicBlock(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))) (He et al. 2015, section 4.2)."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(c_out),
            nn.ReLU(),
            nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(c_out),
        )
        self.skip = nn.Sequential()
        if stride > 1 or c_in != c_out:
            self.skip = nn.Sequential(
                nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, [batch, c_out, height / stride, width / stride]."""
        return functional.relu(self.skip(x) + self.body(x))


class ResNet(Net):
    """ResNet for small images (He et al. 2015, section 4.2) with 3 stages of ``n`` blocks."""

    def __init__(self, width: int, n: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.ModuleList()
        c_in = width
        for stage in range(3):
            for i in range(n):
                stride = 2 if stage and not i else 1
                self.blocks.append(BasicBlock(c_in, width << stage, stride))
                c_in = width << stage
        self.head = nn.Linear(c_in, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, [batch, 10], of images, [batch, 1, side, side]."""
        with self.probe():
            x = self.stem(images)
            for block in self.blocks:
                x = self.run_block(block, x)
            logits: Tensor = self.head(x.mean((2, 3)))
            return logits
