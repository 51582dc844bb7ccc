"""The callback in Lightning's Trainer: the same weights, figures in its loggers, nothing left."""

from __future__ import annotations

import csv

import pytest
import torch

try:
    from lightning import pytorch as lightning
except ImportError:
    lightning = pytest.importorskip("pytorch_lightning")

from cswap.advisor.rates import PRICES_S_PER_BYTE
from cswap.errors import ConfigError
from cswap.integrations.lightning import CswapCallback

OPTIONS = {"codec": "zvc", "min_bytes": 0}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework's own


@pytest.fixture
def module(network):
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch, index):
            return self.network(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module


def fit(tmp_path, module, data, *callbacks, **options):
    logger = lightning.loggers.CSVLogger(tmp_path, name="", version="")
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=logger, callbacks=list(callbacks),
        log_every_n_steps=2, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(data, batch_size=64)
    trainer.fit(module, loader)


def test_fitting_is_the_same_and_figures_are_logged(tmp_path, module, rows, untouched):
    plain, swapped, callback = module(), module(), CswapCallback(OPTIONS)
    fit(tmp_path / "plain", plain, rows())
    fit(tmp_path / "swapped", swapped, rows(), callback)
    pairs = zip(plain.parameters(), swapped.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert untouched(swapped)
    assert callback.stats.swapped > 0
    with (tmp_path / "swapped" / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [int(line["step"]) for line in lines if line["cswap/ratio"]] == [2, 4]
    assert all(float(line["cswap/saved_mib"]) > 0 for line in lines if line["cswap/saved_mib"])


def test_modules_are_known_inside_of_a_training_step(tmp_path, module, rows):
    callback = CswapCallback(OPTIONS, exclude="network.layers.0")
    fit(tmp_path, module(), rows(), callback)
    assert callback.stats.kept_by_reason["excluded"] > 0


def test_a_misspelt_option_is_an_error_for_checkers_too():
    with pytest.raises(ConfigError, match="Did you mean 'lossy'"):
        CswapCallback(losy="int8")  # type: ignore[call-arg]


def test_an_exception_leaves_nothing_on_the_model(tmp_path, module, rows, untouched):
    model = module()
    with pytest.raises(RuntimeError, match="broken example"):
        fit(tmp_path, model, rows(broken=70), CswapCallback(OPTIONS))
    assert untouched(model)


def test_lossy_codecs_and_their_guard_work(tmp_path, module, rows, untouched, monkeypatch):
    monkeypatch.setitem(PRICES_S_PER_BYTE, "cpu", 1e-6)  # these tensors are small
    model, callback = module(), CswapCallback(lossy="int8", min_bytes=0)
    fit(tmp_path, model, rows(), callback)
    assert any("int8" in name for name in callback.stats.by_codec)
    assert untouched(model)
