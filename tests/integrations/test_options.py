"""Options of integrations: from arguments, mappings and files."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from cswap import ConfigError, SwapConfig
from cswap.integrations.options import CswapArguments, read_options
from cswap.integrations.session import MIB, Session
from cswap.stats.steps import RECENT


def test_options_come_from_any_source_and_names_override_them():
    expected = SwapConfig(lossy="int8", min_bytes="1KiB")
    options = {"lossy": "int8", "min_bytes": 1024}
    assert read_options(None, options) == expected
    assert read_options(options, {}) == expected
    assert read_options({"cswap": options, "model": "gpt2"}, {}) == expected
    assert read_options(SwapConfig(lossy="fp8", min_bytes=1024), {"lossy": "int8"}) == expected
    arguments = CswapArguments(cswap_lossy="int8", cswap_min_bytes="1KiB")
    assert read_options(arguments, {}) == expected
    arguments = CswapArguments(cswap_fit="16GiB", cswap_slowdown="1.25")
    assert read_options(arguments, {}) == SwapConfig(fit=16 << 30, slowdown=1.25)


def test_options_come_from_files(tmp_path):
    pytest.importorskip("yaml")
    file = tmp_path / "training.yaml"
    file.write_text("model: gpt2\ncswap:\n  lossy: 0.01\n  exclude: [head, 'embed*']\n")
    found = read_options(file, {"keep_last": 2})
    assert (found.lossy, found.exclude, found.keep_last) == (0.01, ("head", "embed*"), 2)
    (tmp_path / "options.json").write_text(json.dumps({"remat": False}))
    assert read_options(str(tmp_path / "options.json"), {}).remat is False


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"bugdet": 1}, "Did you mean 'budget'"),
        ({"cswap": ["int8"]}, "must map names of options"),
        ({1: 2}, "must map names of options"),
        (3, "options=3: must be a SwapConfig"),
        ("no-such-file.yaml", "cannot be read"),
    ],
)
def test_wrong_options_are_named(source, says):
    if isinstance(source, str):
        pytest.importorskip("yaml")
    with pytest.raises(ConfigError, match=says):
        read_options(source, {})


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just words"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    pytest.importorskip("yaml")
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        read_options(tmp_path / "x.yaml", {})


def test_figures_are_of_the_time_since_the_last_look(network, rows, untouched):
    model, batch = network(), rows()
    session = Session(SwapConfig(codec="zvc", min_bytes=0, remat=False))
    assert set(session.figures().values()) == {0.0, 1.0}
    session.start(model)
    model(batch.x, batch.labels)["loss"].backward()
    found = session.figures()
    assert found["cswap/saved_mib"] > 0
    assert found["cswap/ratio"] > 1.2
    assert found["cswap/held_mib"] > 0
    again = session.figures()
    assert again["cswap/exposed_s"] == 0.0
    for name in ("held_mib", "saved_mib", "ratio"):  # of the last step, or since the start
        assert again[f"cswap/{name}"] == found[f"cswap/{name}"]
    swapped = session.stats.swapped
    session.stop()
    session.stop()
    assert session.stats.swapped == swapped > 0
    assert untouched(model)


def test_what_the_first_steps_held_leaves_the_figures():
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU())
    session = Session(SwapConfig(codec="raw", min_bytes=0, remat=False))
    session.start(model)
    held = []
    for n in range(RECENT + 1):
        model(torch.randn(1024 if n == 0 else 32, 8)).sum().backward()
        held.append(session.figures()["cswap/held_mib"])
    session.stop()
    assert set(held[:RECENT]) == {held[0]}
    assert 0 < held[-1] < held[0] / 16
    assert session.stats.peak_saved_bytes >= held[0] * MIB
