"""cswap in the Trainer of transformers: a small GPT-2 on random tokens.

It needs ``pip install ".[transformers]"``. Run it with
``python with_trainer.py --cswap_lossy int8``.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

from cswap.integrations.transformers import CswapArguments, CswapCallback


def main(words: list[str]) -> Trainer:
    """Train a few steps; options of cswap are arguments such as --cswap_lossy int8."""
    (options,) = HfArgumentParser(CswapArguments).parse_args_into_dataclasses(words)
    config = GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=256, n_positions=128)
    tokens = torch.randint(256, (64, 128))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        max_steps=6,
        logging_steps=2,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
    swaps = CswapCallback(options).attach(trainer)  # the one line
    trainer.train()
    print(swaps.stats)
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
