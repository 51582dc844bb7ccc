"""The plugin in a loop of accelerate's: the same weights, figures in its trackers, nothing left."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("accelerate")

import accelerate
from accelerate.tracking import GeneralTracker

from cswap import ConfigError
from cswap.integrations.accelerate import CswapPlugin

OPTIONS = {"codec": "zvc", "min_bytes": 0}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework's own


class Taken(GeneralTracker):  # type: ignore[misc]
    """Takes down what it is given."""

    name = "taken"
    requires_logging_directory = False
    tracker = None

    def __init__(self):
        super().__init__()
        self.logs = []

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **others):
        self.logs.append((step, values))


def loop(network, rows, swaps=None, accelerator=None):
    accelerator = accelerator or accelerate.Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(rows, batch_size=64)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    if swaps is not None:
        swaps.install(model)
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        if swaps is not None:
            swaps.log(step)
    return accelerator.unwrap_model(model)


def test_the_loop_gives_the_same_and_figures_are_tracked(network, rows, untouched):
    plain = loop(network, rows())
    taken = Taken()
    accelerator = accelerate.Accelerator(cpu=True, log_with=taken)
    accelerator.init_trackers("test")
    with CswapPlugin(accelerator, OPTIONS) as swaps:
        model = loop(network, rows(), swaps, accelerator)
        assert swaps.stats.swapped > 0
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert untouched(model)
    assert [step for step, _ in taken.logs] == [0, 1, 2, 3]
    assert all(values["cswap/saved_mib"] > 0 for _, values in taken.logs)


def test_an_exception_leaves_nothing_on_the_model(network, rows, untouched):
    accelerator = accelerate.Accelerator(cpu=True)
    models = []

    def made():
        models.append(network())
        return models[-1]

    with (
        pytest.raises(RuntimeError, match="broken example"),
        CswapPlugin(accelerator, OPTIONS) as swaps,
    ):
        loop(made, rows(broken=70), swaps, accelerator)
    assert untouched(models[0])


def test_a_misspelt_option_is_an_error_for_checkers_too():
    with pytest.raises(ConfigError, match="Did you mean 'lossy'"):
        CswapPlugin(accelerate.Accelerator(cpu=True), losy="int8")  # type: ignore[call-arg]


def test_something_else_than_an_accelerator_is_refused():
    with pytest.raises(ConfigError, match="accelerator=str"):
        CswapPlugin("cpu")
