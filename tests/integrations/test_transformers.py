"""The callback in the Trainer of transformers: equal weights, figures in every log, no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from cswap.errors import ConfigError
from cswap.integrations.transformers import CswapArguments, CswapCallback

OPTIONS: dict[str, Any] = {"codec": "zvc", "min_bytes": 0}
FIGURES = {f"cswap/{name}" for name in ("held_mib", "saved_mib", "ratio", "remat_mib", "exposed_s")}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks' own


class Taken(transformers.TrainerCallback):  # type: ignore[misc]
    """Stands for TensorBoard: takes down what it is given."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **others):
        self.logs.append(dict(logs))


def make(tmp_path, model, data, callbacks=(), **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=64, max_steps=3, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, seed=3, **options,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks))


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def test_training_is_the_same_and_figures_are_in_the_logs(tmp_path, network, rows, untouched):
    plain = network()
    make(tmp_path, plain, rows()).train()
    model, taken, callback = network(), Taken(), CswapCallback(OPTIONS)
    trainer = make(tmp_path, model, rows(), [taken])
    callback.attach(trainer)
    trainer.train()
    assert all(map(torch.equal, weights(model), weights(plain)))
    assert untouched(model)
    steps = [entry for entry in taken.logs if "loss" in entry]
    assert len(steps) == 3
    assert all(entry.keys() >= FIGURES for entry in steps)
    assert all(entry["cswap/saved_mib"] > 0 for entry in steps)
    assert next(e for e in trainer.state.log_history if "loss" in e).keys() >= FIGURES
    assert callback.stats.swapped > 0


def test_a_callback_that_is_only_given_works_too(tmp_path, network, rows, untouched):
    model, callback = network(), CswapCallback(**OPTIONS)
    trainer = make(tmp_path, model, rows(), [callback])
    trainer.train()
    assert trainer.state.log_history[0].keys() >= FIGURES
    assert untouched(model)
    before = callback.stats.packed
    trainer.train()  # a second training installs anew
    assert 0 < callback.stats.packed <= before


def test_an_exception_leaves_nothing_on_the_model(tmp_path, network, rows, untouched):
    model = network()
    trainer = make(tmp_path, model, rows(broken=7))
    CswapCallback(OPTIONS).attach(trainer)
    with pytest.raises(RuntimeError, match="broken example"):
        trainer.train()
    assert untouched(model)
    model, callback = network(), CswapCallback(OPTIONS)
    with pytest.raises(RuntimeError, match="broken example"), callback:
        make(tmp_path, model, rows(broken=7), [callback]).train()
    assert untouched(model)


def test_options_are_command_line_arguments():
    parser = transformers.HfArgumentParser(CswapArguments)
    words = ["--cswap_fit", "16GiB", "--cswap_slowdown", "1.25"]
    (found,) = parser.parse_args_into_dataclasses(words)
    config = CswapCallback(found)._session.config
    assert (config.fit, config.slowdown) == (16 << 30, 1.25)
    words = ["--cswap_lossy", "int8", "--cswap_budget", "2GiB", "--cswap_remat", "no"]
    (found,) = parser.parse_args_into_dataclasses(words)
    config = CswapCallback(found)._session.config
    assert (config.lossy, config.budget, config.remat) == ("int8", 2 << 30, False)
    (found,) = parser.parse_args_into_dataclasses([])
    assert CswapCallback(found)._session.config.lossy == "off"


def test_a_misspelt_option_is_an_error_for_checkers_too():
    with pytest.raises(ConfigError, match="Did you mean 'lossy'"):
        CswapCallback(losy="int8")  # type: ignore[call-arg]


def test_gradient_checkpointing_is_spoken_of(tmp_path, rows, caplog):
    caplog.set_level("INFO", "cswap")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32)
    data = [{"input_ids": torch.arange(32), "labels": torch.arange(32)}] * 8
    found = []
    for swap in (False, True):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        model.gradient_checkpointing_enable()
        trainer = make(tmp_path, model, data)
        if swap:
            CswapCallback(min_bytes=0).attach(trainer)
        trainer.train()
        found.append(weights(model))
    assert all(map(torch.equal, *found))
    assert sum("Gradient checkpointing is on" in line for line in caplog.messages) == 1
