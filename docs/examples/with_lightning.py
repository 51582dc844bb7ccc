"""cswap in the Trainer of Lightning: a small network on random data.

It needs ``pip install ".[lightning]"``. Run it with ``python with_lightning.py``.
"""

from __future__ import annotations

import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cswap.integrations.lightning import CswapCallback


class Classifier(LightningModule):
    """Ten classes, two hidden layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of one batch."""
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> CswapCallback:
    """Train a few steps; cswap's figures are in the logger's metrics.csv."""
    data = TensorDataset(torch.randn(2048, 256), torch.randint(10, (2048,)))
    swaps = CswapCallback(lossy="off")  # options as of cswap.install, or a YAML file
    trainer = Trainer(
        max_epochs=1,
        callbacks=[swaps],  # the one line
        logger=CSVLogger(tempfile.mkdtemp()),
        log_every_n_steps=2,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=512))
    print(swaps.stats)
    return swaps


if __name__ == "__main__":
    main()
