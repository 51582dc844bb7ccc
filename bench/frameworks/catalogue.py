"""The workloads by name, in two sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from bench.frameworks.models import diffusion, graphs, language, recurrent, tables, vision

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.frameworks.models.workload import Scale, Workload

FIRST: Final[dict[str, tuple[str, Callable[[Scale], Workload]]]] = {
    "gpt2": ("transformers", language.gpt2),
    "llama": ("transformers", language.llama),
    "bert": ("transformers", language.bert),
    "vit": ("transformers", vision.vit),
    "resnet18": ("timm", vision.resnet18),
    "convnext": ("timm", vision.convnext),
    "timm-vit": ("timm", vision.timm_vit),
    "gcn": ("torch_geometric", graphs.gcn),
    "unet": ("diffusers", diffusion.unet),
    "lora": ("peft", language.lora),
    "compile": ("transformers", language.compiled),
}
"""By name: the package that it needs, and its builder."""

SECOND: Final[dict[str, tuple[str, Callable[[Scale], Workload]]]] = {
    "gat": ("torch_geometric", graphs.gat),
    "transformer-conv": ("torch_geometric", graphs.transformer_conv),
    "dlrm": ("torch", tables.dlrm),
    "dgcnn": ("torch_geometric", graphs.dgcnn),
    "efficientnet": ("timm", vision.efficientnet),
    "mobilenet": ("timm", vision.mobilenet),
    "densenet": ("timm", vision.densenet),
    "deberta": ("transformers", language.deberta),
    "mamba": ("transformers", language.mamba),
    "dit": ("diffusers", diffusion.dit),
    "lstm": ("torch", recurrent.lstm),
    "t5": ("transformers", language.t5),
}
"""Models whose operators those of the first set lack."""

SETS: Final = {"first": FIRST, "second": SECOND}

WORKLOADS: Final = FIRST | SECOND
