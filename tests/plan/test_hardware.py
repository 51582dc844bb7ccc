"""Hardware profiles: those that come along, files of one's own, and wrong ones."""

import json

import pytest

from cswap.errors import ConfigError, HardwareError
from cswap.plan.hardware import Hardware, list_hardware, load_hardware

EXPECTED = {
    *("v100-pcie3", "titan-x-maxwell", "rtx2080ti", "a100-pcie4", "h100-pcie5", "h200-pcie5"),
    *("gh200-c2c", "b200-pcie5", "t4", "l4", "a10", "l40s", "rtx3090", "rtx4090", "rtx5090"),
}


def test_every_profile_loads_under_its_own_name_and_says_where_its_figures_come_from():
    assert set(list_hardware()) >= EXPECTED
    for name in list_hardware():
        hardware = load_hardware(name)
        assert hardware.name == name
        assert "float32" in hardware.flops
        assert "zvc" in hardware.codecs
        assert not hardware.measured
        no_figures = {"format", "version", "name", "measured", "sources", "unified"}
        sources = hardware.to_dict().keys() - no_figures
        named = {field.split(".")[0] for field in hardware.sources}
        assert sources == named, name
        assert all(hardware.sources.values())


def test_link_rates_are_those_that_cswap_plus_measured():
    v100, turing = load_hardware("v100-pcie3"), load_hardware("rtx2080ti")
    assert (v100.d2h_bytes_per_s, v100.h2d_bytes_per_s) == (11.7e9, 10.6e9)
    assert (turing.d2h_bytes_per_s, turing.h2d_bytes_per_s) == (12.9e9, 11.8e9)


def test_file_and_dict_read_back_equal(tmp_path):
    hardware = load_hardware("a100-pcie4")
    hardware.save(tmp_path / "own.json")
    assert load_hardware(tmp_path / "own.json") == hardware
    assert load_hardware(hardware.to_dict()) == hardware
    assert load_hardware(hardware) is hardware


WRONG = [
    ({"format": "x"}, "hardware.format='x'"),
    ({"version": 9}, "hardware.version=9"),
    ({"memory_bytes": 0}, "memory_bytes=0: must be an integer from 1 to"),
    ({"memory_bytes": 1.5}, "memory_bytes=1.5: must be an integer"),
    ({"d2h_bytes_per_s": -1}, "d2h_bytes_per_s=-1"),
    ({"h2d_bytes_per_s": float("nan")}, "h2d_bytes_per_s=nan"),
    ({"memory_bytes_per_s": "fast"}, "memory_bytes_per_s='fast'"),
    ({"duplex_factor": 1.5}, "duplex_factor=1.5: must be a number from 1e-06 to 1"),
    ({"codec_tax": 1.0}, "codec_tax=1.0: must be a number from 0 to 0.999999"),
    ({"link_latency_s": -1e-6}, "link_latency_s=-1e-06"),
    ({"host_memory_bytes": -1}, "host_memory_bytes=-1"),
    ({"flops": {"float32": {"peak": 0, "achievable": 1}}}, "flops['float32'].peak=0"),
    ({"flops": [1]}, "hardware.flops=[1]: must map"),
    (
        {"codecs": {"zvc": {"encode_bytes_per_s": 1.0}}},
        "hardware.codecs['zvc'].decode_bytes_per_s: is missing",
    ),
    ({"codecs": {"zvc": 3}}, "hardware.codecs['zvc']=3"),
    (
        {"codecs": {"zvc": {"encode_bytes_per_s": "1", "decode_bytes_per_s": 1.0}}},
        "hardware.codecs['zvc'].encode_bytes_per_s='1'",
    ),
    (
        {"codecs": {"zvc": {"encode_bytes_per_s": 1.0, "decode_bytes_per_s": -1.0}}},
        "hardware.codecs['zvc'].decode_bytes_per_s=-1.0",
    ),
    ({"colour": "green"}, "hardware.colour: no such field"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[row[1] for row in WRONG])
def test_a_wrong_field_is_named(change, message):
    with pytest.raises(HardwareError) as caught:
        load_hardware(load_hardware("v100-pcie3").to_dict() | change)
    assert message in str(caught.value)
    assert isinstance(caught.value, ConfigError)


def test_a_missing_field_is_named():
    data = load_hardware("v100-pcie3").to_dict()
    del data["d2h_bytes_per_s"]
    with pytest.raises(HardwareError, match="d2h_bytes_per_s"):
        load_hardware(data)


def test_an_unknown_profile_gets_a_suggestion(tmp_path):
    with pytest.raises(HardwareError, match="Did you mean 'v100-pcie3'"):
        load_hardware("v100-pcie")
    for text in ("v100", "V100", "NVIDIA V100"):
        with pytest.raises(HardwareError, match="Did you mean 'v100-pcie3' or 'v100-pcie3-cswap'"):
            load_hardware(text)
    with pytest.raises(HardwareError, match=r"Did you mean 'rtx4090'\?"):
        load_hardware("RTX 4090")
    (tmp_path / "list.json").write_text(json.dumps([1]))
    with pytest.raises(HardwareError, match="must be a JSON object"):
        load_hardware(tmp_path / "list.json")
    with pytest.raises(HardwareError, match="hardware=7"):
        load_hardware(7)


def test_defaults_are_an_independent_link_and_free_codecs():
    plain = Hardware("plain", 1, {}, 1.0, 1.0, 1.0)
    assert (plain.duplex_factor, plain.codec_tax, plain.host_memory_bytes) == (1.0, 0.0, 0)
