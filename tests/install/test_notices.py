"""Options that mean nothing on a model are said in the log, with the nearest name."""

from __future__ import annotations

import logging

import pytest
from torch import nn

import cswap


def model():
    return nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "head": nn.ReLU()})


SILENT = [
    {"exclude": ["encoder.*", nn.ReLU]},
    {"include": "head"},
    {"codec": {"float32": "zvc", "torch.int64": "bitpack", "head": "zvc", "encoder.?": "raw"}},
]
TOLD = [
    ({"exclude": "haed"}, "exclude='haed' matches no module. Did you mean 'head'?"),
    ({"exclude": "decoder.*"}, "exclude='decoder.*' matches no module."),
    ({"include": ["head", "Linear"]}, "include='Linear' matches no module. Linear is a class"),
    ({"include": nn.GELU}, "include='GELU': the model has no module of that class."),
    ({"codec": {"flaot32": "zvc"}}, "codec='flaot32' matches no module. Did you mean 'float32'?"),
]


@pytest.mark.parametrize("options", SILENT)
def test_options_that_match_are_not_spoken_of(options, caplog):
    cswap.install(model(), **options).remove()
    assert caplog.messages == []


@pytest.mark.parametrize(("options", "says"), TOLD)
def test_options_without_effect_are_said_once(options, says, caplog):
    cswap.install(model(), **options).remove()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert caplog.messages[0].startswith(says)


def test_of_many_selectors_few_are_named(caplog):
    cswap.install(model(), exclude=[f"layer{i}" for i in range(10)]).remove()
    assert len(caplog.messages) == 4
    assert caplog.messages[-1] == "exclude: 7 more match no module."


def test_modules_cannot_be_selected_without_a_model(caplog):
    cswap.install(exclude="head").remove()
    with cswap.swapping(codec={"head": "zvc", "float32": "zvc"}):
        pass
    assert caplog.messages == [
        "exclude has no effect without a model: call install(model, ...).",
        "codec has no effect without a model: call install(model, ...).",
    ]


def test_names_with_control_characters_do_not_reach_the_terminal(caplog):
    cswap.install(model(), exclude="\x1b[31mhead").remove()
    assert caplog.messages[0].isprintable()


def test_a_second_install_replaces_the_first_with_one_notice(caplog):
    net = model()
    first = cswap.install(net)
    second = cswap.install(net)
    assert caplog.messages == ["install: this model was installed before; that is removed."]
    first.remove()
    assert "forward" in net.__dict__  # the second one is still on
    second.remove()
    assert "forward" not in net.__dict__
