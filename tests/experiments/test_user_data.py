"""`python -m bench accuracy --data`: data sets by name, of stand-ins for torchvision and datasets.

They have the signatures, items and errors of torchvision 0.28 and datasets 5.2.
"""

from __future__ import annotations

import json
import os
import sys
import types

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")
pytest.importorskip("PIL")

from PIL import Image
from typer.testing import CliRunner

from bench.__main__ import app
from cswap.errors import ConfigError
from cswap.experiments.workloads.data import Images, Text
from cswap.experiments.workloads.tasks import fitting, make_task
from cswap.experiments.workloads.user_data import QUICK, load_data

N_TRAIN, N_TEST = 700, 200


def picture(i, size=(28, 20), mode="RGB"):
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    return Image.fromarray(np.full(shape, i % 256, dtype=np.uint8))


class Pictures:
    """torchvision's: (picture, label) by index."""

    def __init__(self, root, n, mode="RGB"):
        if root not in ("data", "elsewhere"):
            raise RuntimeError("Dataset not found or corrupted.\nYou can use download=True")
        self.n, self.mode = n, mode

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return picture(i, mode=self.mode), i % 7


class CIFAR10(Pictures):
    def __init__(self, root, train=True, transform=None, target_transform=None, download=False):
        assert not download
        super().__init__(root, N_TRAIN if train else N_TEST)


class SVHN(Pictures):
    def __init__(self, root, split="train", transform=None, target_transform=None, download=False):
        assert not download
        if split not in ("train", "test", "extra"):
            raise ValueError(f"Unknown value '{split}' for argument split.")
        super().__init__(root, {"train": N_TRAIN, "test": N_TEST}[split], mode="L")


class Caltech101(Pictures):
    def __init__(self, root, transform=None):
        super().__init__(root, 50)


class CelebA(CIFAR10):
    def __getitem__(self, i):
        return picture(i), torch.zeros(40)


class Damaged(CIFAR10):
    def __getitem__(self, i):
        raise OSError("image file is truncated")


class Rows:
    """Those of datasets: dicts by index."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def texts(n, word):
    return Rows([{"id": i, "text": f"{word} {i} ünï " * 20, "label": i % 2} for i in range(n)])


HUB = {
    ("imdb",): {"train": texts(300, "train"), "test": texts(100, "test")},
    ("glue", "sst2"): {"train": texts(300, "train"), "validation": texts(100, "validation")},
    ("photos",): {"train": Rows([{"img": picture(i), "label": i % 3} for i in range(100)])},
    ("tiny",): {"train": texts(3, "short"), "test": texts(3, "short")},
    ("empty",): {"train": Rows([])},
    ("numbers",): {"train": Rows([{"x": 1.0, "y": [2]}])},
}


def load_dataset(path, name=None, *, split=None):
    import datasets

    assert os.environ["HF_DATASETS_OFFLINE"] == os.environ["HF_HUB_OFFLINE"] == "1"
    assert datasets.config.HF_HUB_OFFLINE is True
    parts = HUB.get((path, name) if name else (path,))
    if parts is None:
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub (OfflineModeIsEnabled)")
    if split not in parts:
        raise ValueError(f'Unknown split "{split}". Should be one of {list(parts)}.')
    return parts[split]


def module(monkeypatch, name, **content):
    made = types.ModuleType(name)
    made.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    kinds = {k.__name__: k for k in (CIFAR10, SVHN, Caltech101, CelebA, Damaged)}
    vision = module(monkeypatch, "torchvision.datasets", **kinds)
    module(monkeypatch, "torchvision", datasets=vision)
    config = module(monkeypatch, "datasets.config", HF_HUB_OFFLINE=False)
    module(monkeypatch, "datasets", config=config, load_dataset=load_dataset)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)


def test_pictures_of_torchvision_are_scaled_and_chosen_alike_each_time():
    data = load_data("torchvision:CIFAR10", quick=True)
    assert isinstance(data, Images)
    assert data.train_images.shape == (QUICK.train, 3, 32, 32)
    assert data.validation_images.shape == (QUICK.validation, 3, 32, 32)
    assert data.train_images.dtype == torch.uint8
    assert (data.n_classes, data.source) == (7, "torchvision:CIFAR10, 28x20 scaled to 32x32")
    # a picture's shade is its index, its label the index modulo 7
    shades = data.train_images[:, 0, 0, 0]
    assert torch.equal(data.train_images, shades[:, None, None, None].expand_as(data.train_images))
    assert len(shades.unique()) > 200
    again = load_data("torchvision:CIFAR10:elsewhere", quick=True)
    assert isinstance(again, Images)
    assert torch.equal(again.train_images, data.train_images)
    assert torch.equal(again.train_labels, data.train_labels)


def test_parts_by_the_name_of_a_split_and_grey_pictures():
    data = load_data("torchvision:SVHN", quick=True)
    assert isinstance(data, Images)
    assert data.train_images.shape[1:] == (1, 32, 32)
    assert len(data.validation_labels) == QUICK.validation


def test_without_a_second_part_a_tenth_is_held_out():
    for spec, n, colours in (("torchvision:Caltech101", 50, 3), ("hf:photos", 100, 3)):
        data = load_data(spec)
        assert isinstance(data, Images)
        assert data.train_images.shape[:2] == (n - n // 10, colours)
        shades = torch.cat([data.train_images, data.validation_images])[:, 0, 0, 0]
        assert sorted(shades.tolist()) == list(range(n))


def test_text_of_hugging_face_is_read_from_the_cache_only(monkeypatch):
    data = load_data("hf:imdb", quick=True)
    assert isinstance(data, Text)
    assert sys.modules["datasets.config"].__dict__["HF_HUB_OFFLINE"] is False
    assert "HF_DATASETS_OFFLINE" not in os.environ
    assert bytes(data.train.tolist()).decode().count("train ") == 300 * 20
    assert "train" not in bytes(data.validation.tolist()).decode()
    assert data.source == "hf:imdb, bytes of 'text'"
    other = load_data("hf:glue:sst2")
    assert isinstance(other, Text)
    assert "validation 1 " in bytes(other.validation.tolist()).decode()


def test_models_adapt_to_side_colours_and_classes():
    images = load_data("hf:photos")
    assert fitting(images) == ("cnn", "vit", "mlp", "resnet")
    for name in fitting(images):
        task = make_task(name, quick=True, n_steps=1, data=images)
        inputs, _ = task.batch(0, 0)
        assert inputs.shape == (32, 3, 32, 32)
        assert 0 < float(inputs.max()) <= 1
        assert task.build()(inputs).shape == (32, 3)
    assert fitting(load_data("hf:imdb")) == ("gpt",)
    with pytest.raises(ConfigError, match="'gpt' does not learn from hf:photos"):
        make_task("gpt", quick=True, n_steps=1, data=images)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("CIFAR10", "must be torchvision:CLASS"),
        ("hf:", "must be torchvision:CLASS"),
        ("torchvision:CIFR10", "Did you mean 'CIFAR10'"),
        ("torchvision:CIFAR10:nowhere", "CIFAR10('nowhere', download=True)"),
        ("torchvision:Caltech101:nowhere", "Name its folder"),
        ("torchvision:CelebA", "(Image, Tensor)"),
        ("torchvision:Damaged", "image file is truncated"),
        ("hf:unknown", "load_dataset('unknown')"),
        ("hf:glue:unknown", "load_dataset('glue', 'unknown')"),
        ("hf:tiny", "less than 4096 bytes"),
        ("hf:empty", "is empty"),
        ("hf:numbers", "x (float), y (list)"),
    ],
)
def test_wrong_data_are_refused_with_one_line_and_exit_code_2(tmp_path, spec, message):
    result = CliRunner().invoke(app, ["accuracy", "--data", spec, "--out", str(tmp_path)])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert result.output.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("spec", "package"), [("torchvision:X", "torchvision"), ("hf:x", "datasets")]
)
def test_a_missing_package_is_named(monkeypatch, spec, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torchvision.datasets")
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        load_data(spec)


def test_a_torchvision_of_another_torch_is_told(monkeypatch):
    def broken(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(ConfigError, match=r"nms does not exist.*belongs to torch"):
        load_data("torchvision:CIFAR10")


def test_models_that_do_not_fit_and_results_without_a_folder_are_refused(tmp_path):
    for arguments, message in (
        (["--models", "gpt", "--out", str(tmp_path)], "unknown gpt; known are cnn, resnet, vit"),
        ([], "give --out FOLDER"),
    ):
        result = CliRunner().invoke(app, ["accuracy", "--data", "hf:photos", *arguments])
        assert result.exit_code == 2
        assert message in result.output


@pytest.mark.parametrize(
    ("spec", "model"),
    [("torchvision:CIFAR10", "vit"), pytest.param("hf:imdb", "gpt", marks=pytest.mark.slow)],
)
def test_data_of_ones_own_are_trained_on(tmp_path, spec, model):
    options = ["--quick", "--models", model, "--policies", "off", "--seeds", "1", "--steps", "5"]
    arguments = ["accuracy", "--data", spec, "--out", str(tmp_path), *options]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["settings"]["data"] == spec
    assert found["models"][model]["data"].startswith(spec)
    assert [row["policy"] for row in found["summary"]] == ["off"]
