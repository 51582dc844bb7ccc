"""The networks are the published ones: parameter counts, and logits of their usual inputs."""

import pytest
import torch

from bench.workloads import large_models, networks

# torchvision's table of weights, and the checkpoints of huggingface.co/openai-community.
IMAGES = {large_models.vgg16: 138_357_544, large_models.resnet50: 25_557_032}
GPT2 = {
    large_models.GPT2_SMALL: 124_439_808,
    large_models.GPT2_MEDIUM: 354_823_168,
    large_models.GPT2_LARGE: 774_030_080,
}


@pytest.mark.parametrize(("build", "published"), IMAGES.items())
def test_image_models_are_the_published_ones(build, published):
    with torch.device("meta"):
        model, images = build(), torch.empty(2, 3, 224, 224)
        assert model(images).shape == (2, networks.N_CLASSES)
    assert large_models.count_parameters(model) == published


@pytest.mark.parametrize(("sizes", "published"), GPT2.items())
def test_language_models_are_the_published_ones(sizes, published):
    with torch.device("meta"):
        model = large_models.gpt2(*sizes)
        tokens = torch.empty(2, 64, dtype=torch.int64)
        assert model(tokens).shape == (2, networks.VOCABULARY, 64)
    assert large_models.count_parameters(model) == published
