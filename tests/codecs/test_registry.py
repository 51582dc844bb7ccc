"""Names of codecs: built in, registered, and from other distributions."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import cswap
from cswap.codecs import registry
from cswap.codecs.raw import Raw
from cswap.errors import ConfigError, UnknownCodecError


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Whatever a test registers is gone afterwards."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_made", dict(registry._made))
    registry._entry_points.cache_clear()
    yield
    registry._entry_points.cache_clear()


class Rate(Raw):
    """A codec with a parameter."""

    def __init__(self, rate: int = 8) -> None:
        self.name = f"rate:{rate}"


def test_same_name_same_object():
    assert cswap.get_codec("raw") is cswap.get_codec("raw")
    assert repr(cswap.get_codec("raw")) == "get_codec('raw')"


def test_list_is_sorted_and_holds_families_and_composites():
    names = cswap.list_codecs()
    assert names == sorted(names)
    assert {*registry._BUILT_IN, *registry.COMPOSITES} <= set(names)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(UnknownCodecError) as caught:
        cswap.get_codec("zcv")
    assert str(caught.value) == (
        f"codec='zcv': no such codec. Did you mean 'zvc'? Known: {', '.join(cswap.list_codecs())}."
    )
    assert caught.value.name == "zcv"


@pytest.mark.parametrize("name", ["", "RAW", " raw", "raw ", "+", "raw+", "nope+raw", "nope:3"])
def test_malformed_name_is_unknown(name):
    with pytest.raises(ConfigError):
        cswap.get_codec(name)


@pytest.mark.parametrize("name", [None, 7, b"raw", ["raw"]])
def test_name_that_is_no_string_is_refused(name):
    with pytest.raises(ConfigError, match=r"must be a name\. Known: "):
        cswap.get_codec(name)


def test_parameter_reaches_the_factory():
    cswap.register_codec("rate", Rate)
    assert cswap.get_codec("rate").name == "rate:8"
    assert cswap.get_codec("rate:12").name == "rate:12"
    assert cswap.get_codec("rate:-3").name == "rate:-3"


@pytest.mark.parametrize("parameter", ["", "x", "1.5", "08", "0_8", " 8", "٨", "1" * 5000])
def test_parameter_has_one_spelling(parameter):
    cswap.register_codec("rate", Rate)
    with pytest.raises(ConfigError, match="must be an integer"):
        cswap.get_codec(f"rate:{parameter}")


def test_parameter_for_a_codec_without_one_is_refused():
    with pytest.raises(ConfigError, match=r"^codec='raw:3': 'raw' takes no parameter\.$"):
        cswap.get_codec("raw:3")


@pytest.mark.parametrize("name", ["", "a+b", "a:1", "Zvc", " a"])
def test_register_refuses_malformed_names(name):
    with pytest.raises(ConfigError, match="must be lower case"):
        cswap.register_codec(name, Raw)


def test_register_refuses_names_that_are_taken():
    cswap.register_codec("mine", Raw)
    for taken in ("mine", "raw", "zvc"):
        with pytest.raises(ConfigError, match="a codec of that name exists"):
            cswap.register_codec(taken, Raw)


def test_factory_that_makes_no_codec_is_named():
    cswap.register_codec("mine", dict)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"codec='mine': its factory made \{\}, which is no Codec"
    ):
        cswap.get_codec("mine")


PLUGIN = """
from cswap.codecs.raw import Raw

class Mine(Raw):
    name = "mine"
"""


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Another distribution, installed, that offers codecs of three names."""
    info = tmp_path / "other_codecs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-codecs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[cswap.codecs]\nmine = other_codecs:Mine\nraw = other_codecs:Mine\n"
        "broken = other_codecs:Nothing\n"
    )
    (tmp_path / "other_codecs.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("other_codecs", None)


@pytest.mark.usefixtures("distribution")
def test_entry_points_of_other_distributions_are_found():
    assert "mine" in cswap.list_codecs()
    assert "other_codecs" not in sys.modules  # loaded on first use
    codec = cswap.get_codec("mine")
    x = torch.arange(5)
    assert torch.equal(codec.decode(codec.encode(x)), x)


@pytest.mark.usefixtures("distribution")
def test_entry_points_never_replace_built_in_codecs():
    assert type(cswap.get_codec("raw")) is Raw
    with pytest.raises(ConfigError, match="a codec of that name exists"):
        cswap.register_codec("mine", Raw)
    with pytest.raises(ConfigError, match="'other_codecs:Nothing' cannot be loaded"):
        cswap.get_codec("broken")


@pytest.mark.parametrize(("name", "package"), [("lz4", "lz4.block"), ("zstd", "zstandard")])
def test_missing_package_is_named_with_its_remedy(name, package, monkeypatch):
    monkeypatch.delitem(registry._made, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r'pip install "\.\[host\]"'):
        cswap.get_codec(name)


def test_an_array_in_the_place_of_an_encoding_is_refused():
    with pytest.raises(ConfigError, match="encoding=ndarray: must be the result of encode"):
        cswap.get_codec("zvc").decode(np.zeros(4, np.float32))  # type: ignore[arg-type]


def test_an_array_in_the_place_of_the_output_is_refused():
    zvc, out = cswap.get_codec("zvc"), np.zeros(1 << 16, np.uint8)
    for call in (zvc.encode, lambda x, out: zvc.decode(zvc.encode(x), out)):
        with pytest.raises(ConfigError, match=r"out=ndarray: must be a torch\.Tensor"):
            call(torch.zeros(4), out)  # type: ignore[arg-type]
