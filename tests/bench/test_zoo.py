"""The zoo's models are the published ones: parameter counts, shapes, options."""

import pytest
import torch
from torch import nn

from bench.workloads.zoo import catalogue
from bench.workloads.zoo.catalogue import ZOO
from bench.workloads.zoo.classics import vgg16

IMAGES = [name for name, entry in ZOO.items() if entry.kind == "images"]

# Of the CIFAR variants that others have published: AlexNet and VGG-16 in icpm/pytorch-cifar10,
# ResNet-50 and MobileNet in kuangliu/pytorch-cifar, Plain-20 in He et al., table 6 (0.27 million).
CIFAR = {
    "alexnet": 23_272_266,
    "vgg16": 33_638_218,
    "resnet50": 23_520_842,
    "mobilenet": 3_217_226,
    "plain20": 269_722,
}


def n_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ZOO)
def test_parameters_are_the_published_number(name):
    assert n_parameters(catalogue.build(name)) == ZOO[name].parameters


@pytest.mark.parametrize(("name", "expected"), CIFAR.items())
def test_small_images_have_the_usual_network(name, expected):
    assert n_parameters(catalogue.build(name, num_classes=10, side=32)) == expected


LARGE = ("gpt2-medium", "gpt2-large", "gpt2-xl")
"""The code of gpt2, with other numbers."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LARGE else ()) for n in ZOO]
)
def test_example_goes_through_model_and_loss(name):
    inputs, target = catalogue.example(name, 2)
    logits = catalogue.build(name)(inputs)
    assert logits.shape[-1] == ZOO[name].n_classes
    assert catalogue.loss(logits, target).shape == ()


@pytest.mark.parametrize("name", IMAGES)
def test_leaky_relu_takes_every_relus_place(name):
    sparse = catalogue.build(name, num_classes=10, side=32)
    dense = catalogue.build(name, num_classes=10, side=32, relu=nn.LeakyReLU)
    of_kind = [
        sum(isinstance(m, kind) for m in model.modules())
        for model, kind in ((sparse, nn.ReLU), (dense, nn.LeakyReLU), (dense, nn.ReLU))
    ]
    assert of_kind[0] == of_kind[1] > 0
    assert of_kind[2] == 0


def test_vgg416_has_four_hundred_more_convolutions():
    def n_convs(model: nn.Module) -> int:
        return sum(isinstance(m, nn.Conv2d) for m in model.modules())

    with torch.device("meta"):
        assert n_convs(vgg16(extra_per_group=80)) - n_convs(vgg16()) == 400
