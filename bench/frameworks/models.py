"""Eleven models as their packages make them, with data of random values.

A builder makes a `Workload` of a `Scale`; it raises ImportError where its package is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Batch = dict[str, Any]

VOCABULARY: Final = 4096
N_CLASSES: Final = 10


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of a run.

    Attributes:
        layers: of transformers.
        width: of transformers, a multiple of 32.
        tokens: of a sequence.
        batch: sequences, pictures.
        side: of pictures, in pixels; a multiple of 32.
        nodes: of a graph.
    """

    layers: int
    width: int
    tokens: int
    batch: int
    side: int
    nodes: int


FULL: Final = Scale(layers=4, width=256, tokens=256, batch=8, side=160, nodes=20_000)
QUICK: Final = Scale(layers=2, width=64, tokens=64, batch=4, side=64, nodes=1_000)


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its training data.

    Attributes:
        model: takes a batch's entries by name and returns the loss.
        batch: of a step, by the step's number.
        recompute: switches the package's own gradient checkpointing on.
    """

    model: nn.Module
    batch: Callable[[int], Batch]
    recompute: Callable[[], object]


class _WithLoss(nn.Module):
    """A model whose loss is the cross entropy, or another one, of its result."""

    def __init__(
        self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    ) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, target: Tensor, **inputs: Any) -> Tensor:
        """The loss of the net's output, or of its ``.sample``."""
        found = self.net(*inputs.values())
        return self.loss(getattr(found, "sample", found), target)


class _OwnLoss(nn.Module):
    """A model of transformers: it returns its loss itself."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **inputs: Any) -> Tensor:
        """The loss."""
        loss: Tensor = self.net(**inputs).loss
        return loss


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def _language(net: Any, scale: Scale) -> Workload:
    def batch(step: int) -> Batch:
        shape = (scale.batch, scale.tokens)
        tokens = torch.randint(VOCABULARY, shape, generator=_generator(step))
        return {"input_ids": tokens, "labels": tokens}

    return Workload(_OwnLoss(net), batch, net.gradient_checkpointing_enable)


def _vision(net: nn.Module, scale: Scale, recompute: Callable[[], object]) -> Workload:
    def batch(step: int) -> Batch:
        generator = _generator(step)
        shape = (scale.batch, 3, scale.side, scale.side)
        labels = torch.randint(N_CLASSES, (scale.batch,), generator=generator)
        return {"target": labels, "x": torch.randn(shape, generator=generator)}

    return Workload(_WithLoss(net), batch, recompute)


def gpt2(scale: Scale) -> Workload:
    """GPT-2 of transformers."""
    return _language(_gpt2(scale), scale)


def _gpt2(scale: Scale, dropout: float = 0.1) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=scale.layers,
            n_embd=scale.width,
            n_head=scale.width // 32,
            n_positions=scale.tokens,
            vocab_size=VOCABULARY,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout),
        )
    )


def llama(scale: Scale) -> Workload:
    """Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=scale.layers,
        hidden_size=scale.width,
        intermediate_size=scale.width * 8 // 3 // 32 * 32,
        num_attention_heads=scale.width // 32,
        max_position_embeddings=scale.tokens,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return _language(LlamaForCausalLM(config), scale)


def bert(scale: Scale) -> Workload:
    """BERT of transformers, filling in words."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=scale.layers,
        hidden_size=scale.width,
        intermediate_size=4 * scale.width,
        num_attention_heads=scale.width // 32,
        max_position_embeddings=scale.tokens,
        vocab_size=VOCABULARY,
    )
    return _language(BertForMaskedLM(config), scale)


def vit(scale: Scale) -> Workload:
    """ViT of transformers."""
    from transformers import ViTConfig, ViTForImageClassification

    net = ViTForImageClassification(
        ViTConfig(
            num_hidden_layers=scale.layers,
            hidden_size=scale.width,
            intermediate_size=4 * scale.width,
            num_attention_heads=scale.width // 32,
            image_size=scale.side,
            num_labels=N_CLASSES,
        )
    )

    def batch(step: int) -> Batch:
        generator = _generator(step)
        shape = (scale.batch, 3, scale.side, scale.side)
        labels = torch.randint(N_CLASSES, (scale.batch,), generator=generator)
        return {"pixel_values": torch.randn(shape, generator=generator), "labels": labels}

    return Workload(_OwnLoss(net), batch, net.gradient_checkpointing_enable)


def _timm(name: str, scale: Scale, **options: Any) -> Workload:
    import timm

    net = timm.create_model(name, num_classes=N_CLASSES, **options)
    return _vision(net, scale, net.set_grad_checkpointing)


def resnet18(scale: Scale) -> Workload:
    """ResNet-18 of timm."""
    return _timm("resnet18", scale)


def convnext(scale: Scale) -> Workload:
    """ConvNeXt of timm, its smallest."""
    return _timm("convnext_atto", scale)


def timm_vit(scale: Scale) -> Workload:
    """ViT of timm, its smallest."""
    return _timm("vit_tiny_patch16_224", scale, img_size=scale.side, depth=scale.layers)


class _Gcn(nn.Module):
    """Three graph convolutions with ReLU and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        from torch_geometric.nn import GCNConv

        sizes = (width, width, width, N_CLASSES)
        self.layers = nn.ModuleList(GCNConv(a, b) for a, b in pairwise(sizes))
        self.checkpointed = False

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Scores of each node's classes."""
        for layer in self.layers[:-1]:
            if self.checkpointed:
                x = checkpoint(self._hidden, layer, x, edges, use_reentrant=False)
            else:
                x = self._hidden(layer, x, edges)
        found: Tensor = self.layers[-1](x, edges)
        return found

    def _hidden(self, layer: nn.Module, x: Tensor, edges: Tensor) -> Tensor:
        return functional.dropout(layer(x, edges).relu(), 0.5, self.training)


def gcn(scale: Scale) -> Workload:
    """A graph network of PyG's layers."""
    net = _Gcn(scale.width)

    def batch(step: int) -> Batch:
        generator = _generator(step)
        labels = torch.randint(N_CLASSES, (scale.nodes,), generator=generator)
        x = torch.randn(scale.nodes, scale.width, generator=generator)
        edges = torch.randint(scale.nodes, (2, 8 * scale.nodes), generator=generator)
        return {"target": labels, "x": x, "edges": edges}

    def recompute() -> None:
        net.checkpointed = True

    return Workload(_WithLoss(net), batch, recompute)


def unet(scale: Scale) -> Workload:
    """UNet of diffusers: the noise in a noisy picture of an eighth of the side."""
    from diffusers import UNet2DModel

    channels = (scale.width // 4, scale.width // 2, scale.width // 2)
    side = scale.side // 8 // 4 * 4
    net = UNet2DModel(
        sample_size=side,
        block_out_channels=channels,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )

    def batch(step: int) -> Batch:
        generator = _generator(step)
        shape = (scale.batch, 3, side, side)
        noise, noisy = (torch.randn(shape, generator=generator) for _ in range(2))
        times = torch.randint(1000, (scale.batch,), generator=generator)
        return {"target": noise, "sample": noisy, "timestep": times}

    model = _WithLoss(net, functional.mse_loss)
    return Workload(model, batch, net.enable_gradient_checkpointing)


def lora(scale: Scale) -> Workload:
    """GPT-2 with LoRA of PEFT: its own weights stay as they are."""
    from peft import LoraConfig, get_peft_model

    net: Any = get_peft_model(_gpt2(scale), LoraConfig(r=8, task_type="CAUSAL_LM"))
    made = _language(net, scale)

    def recompute() -> None:
        net.enable_input_require_grads()  # or nothing in a checkpointed block would need a gradient
        net.gradient_checkpointing_enable()

    return Workload(made.model, made.batch, recompute)


def compiled(scale: Scale) -> Workload:
    """GPT-2 of transformers under torch.compile; without dropout, which each graph draws anew."""
    made = _language(_gpt2(scale, dropout=0.0), scale)
    made.model.compile()
    return made


WORKLOADS: Final[dict[str, tuple[str, Callable[[Scale], Workload]]]] = {
    "gpt2": ("transformers", gpt2),
    "llama": ("transformers", llama),
    "bert": ("transformers", bert),
    "vit": ("transformers", vit),
    "resnet18": ("timm", resnet18),
    "convnext": ("timm", convnext),
    "timm-vit": ("timm", timm_vit),
    "gcn": ("torch_geometric", gcn),
    "unet": ("diffusers", unet),
    "lora": ("peft", lora),
    "compile": ("transformers", compiled),
}
"""By name: the package that it needs, and its builder."""
