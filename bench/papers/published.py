"""The papers' figures, as they print them or as their bars measure."""

from __future__ import annotations

from typing import Final

MODELS: Final = ("alexnet", "vgg16", "plain20", "mobilenet", "resnet50", "squeezenet1.0")
"""CSwap+'s six, as the zoo has them; the papers give neither ResNet's depth nor SqueezeNet's
version, nor how wide their Plain-20 is."""

GPUS: Final = {"v100": "v100-pcie3-cswap", "2080ti": "rtx2080ti-cswap"}
SIDES: Final = {"cifar10": 32, "imagenet": 224}

BATCHES: Final = {
    ("cifar10", "v100"): dict.fromkeys(MODELS, 2560),
    ("imagenet", "v100"): {
        "alexnet": 512, "vgg16": 128, "mobilenet": 128,
        "plain20": 32, "resnet50": 64, "squeezenet1.0": 512,
    },
    ("cifar10", "2080ti"): {
        "alexnet": 2560, "vgg16": 2560, "mobilenet": 1280,
        "plain20": 1024, "resnet50": 1280, "squeezenet1.0": 1280,
    },
    ("imagenet", "2080ti"): {
        "alexnet": 256, "vgg16": 32, "mobilenet": 32, "resnet50": 16, "squeezenet1.0": 128,
    },
}  # fmt: skip
"""CSwap+, table 3."""


def _by_model(*figures: float | None) -> dict[str, float]:
    pairs = zip(MODELS, figures, strict=True)
    return {model: figure for model, figure in pairs if figure is not None}


VDNN_PER_MS: Final = {
    ("cifar10", "v100"): _by_model(76.99, 4.43, 1.78, 2.22, 1.64, 3.84),
    ("cifar10", "2080ti"): _by_model(64.44, 3.86, 1.77, 1.29, 1.35, 3.30),
    ("imagenet", "v100"): _by_model(2.22, 0.11, 0.03, 0.11, 0.04, 0.36),
    ("imagenet", "2080ti"): _by_model(2.10, 0.10, None, 0.05, 0.03, 0.32),
}
"""CSWAP's vDNN, samples per millisecond, ReLU (bars of figures 6 to 8)."""

SPARSE: Final = {
    ("cifar10", "v100"): _by_model(1.39, 1.18, 1.41, 1.16, 1.25, 1.24),
    ("cifar10", "2080ti"): _by_model(1.20, 1.11, 1.21, 1.11, 1.12, 1.12),
    ("imagenet", "v100"): _by_model(1.45, 1.24, 1.32, 1.23, 1.16, 1.18),
    ("imagenet", "2080ti"): _by_model(1.41, 1.13, None, 1.17, 1.12, 1.16),
}
"""CSWAP over vDNN, ReLU (bars)."""

ORACLE: Final = {
    ("cifar10", "v100"): _by_model(1.68, 1.31, 1.70, 1.41, 1.38, 1.49),
    ("cifar10", "2080ti"): _by_model(1.41, 1.24, 1.40, 1.26, 1.23, 1.41),
    ("imagenet", "v100"): _by_model(1.60, 1.49, 1.64, 1.44, 1.35, 1.46),
    ("imagenet", "2080ti"): _by_model(1.71, 1.31, None, 1.41, 1.25, 1.40),
}
"""The same with codecs that take no time (bars)."""

DENSE: Final = {
    ("cifar10", "v100"): _by_model(1.29, 1.16, 1.32, 1.18, 1.19, 1.22),
    ("cifar10", "2080ti"): _by_model(1.17, 1.10, 1.18, 1.15, 1.11, 1.09),
    ("imagenet", "v100"): _by_model(1.43, 1.21, 1.22, 1.20, 1.14, 1.16),
    ("imagenet", "2080ti"): _by_model(1.38, 1.10, None, 1.18, 1.09, 1.14),
}
"""CSwap+ over vDNN, LeakyReLU (bars)."""

MEAN_GAIN: Final = {
    ("cifar10", "v100", "relu"): 25.0,
    ("cifar10", "v100", "leaky"): 22.5,
    ("cifar10", "2080ti", "leaky"): 13.0,
}
"""Mean gain of throughput over vDNN in per cent, as the texts of CSWAP and CSwap+ give it."""

MOST_OVER_SC: Final = {"relu": (12.5, 10.7), "leaky": (13.0, 12.2)}
"""Largest gain over SC in per cent on V100 and 2080 Ti (ReLU: text; LeakyReLU: bars)."""

OVER_SC: Final = {"relu": (5.5, 5.1), "leaky": (9.0, 8.4)}
"""Mean gain over SC in per cent on V100 and 2080 Ti (text)."""

LATENCY_CUT: Final = {("relu", "v100"): 50.9, ("relu", "2080ti"): 47.6, ("leaky", "v100"): 46.1}
"""Swap latency against vDNN, per cent less: "up to" in the abstract, plain in the conclusion."""

VDNN_AVERAGE: Final = {"alexnet": 89.0, "overfeat": 91.0, "googlenet": 95.0}
"""vDNN, abstract: reduction of the average memory by up to so many per cent; batch 128."""

VDNN_GB: Final = 28.0
"""vDNN, abstract: memory of VGG-16 at batch 256. GB, so 28e9 bytes."""

HOME_BATCHES: Final = {
    "mobilenet": (2012, 3954, 4200),
    "plain20": (1040, 2843, 2926),
    "squeezenet1.0": (1667, 4056, 4347),
    "vgg16": (2759, 4250, 5125),
    "resnet50": (1255, 2014, 2576),
    "inception3": (125, 345, 365),
}
"""HOME, table 2: largest batch of PyTorch, Capuchin and HOME."""

HOME_MEANS: Final = {"none": 2.2, "capuchin": 1.12}
"""HOME, text: its largest batch over PyTorch's and Capuchin's, mean over the networks."""

HOME_MOST: Final = {"none": 2.8, "capuchin": 1.3}
"""The same, "up to"."""

HOME_SPEED: Final = {"vdnn-all": 5.7, "capuchin": 1.3}
"""HOME's throughput over theirs, "up to"."""

DECISION_ACCURACY: Final = 93.5
"""CSwap+: per cent of decisions that the time model takes as measured times would."""

TIME_MODEL_RAE: Final = 2.7
"""CSwap+: relative absolute error of predicted codec times, per cent; no train/test split told."""
