"""Which of nvCOMP's codecs there are, and what nvCOMP is told: against a fake of the library."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

import cswap
from cswap.advisor import options
from cswap.codecs import nvcomp_library
from cswap.codecs.layout import torch_dtype
from cswap.codecs.registry import NVCOMP, get_codec
from cswap.config import SwapConfig
from cswap.errors import ConfigError, UnsupportedError
from cswap.schema.tensor import DTYPES
from tests.codecs.nvcomp_stand_in import forgotten

# Keywords of nvidia.nvcomp.Codec 6.0.0 by its docstring; it refuses others with ValueError.
KEYWORDS = {
    *("algorithm", "device_id", "cuda_stream", "uncomp_chunk_size", "bitstream_kind"),
    *("execution_policy", "checksum_policy", "decompress_backend", "use_de_sort", "data_type"),
    *("bitshuffle_mode", "algorithm_type", "mode", "delta", "states_per_lane"),
    *("histogram_reduction_log2", "max_sub_chunk_count", "skip_validate", "compression_level"),
    *("terminal_codecs", "fine_grained_encodings", "coarse_grained_encodings"),
}
STREAM = 0x5EED


class FakeLibrary(types.ModuleType):
    """What of nvidia.nvcomp is used before anything is encoded."""

    __version__ = "6.0.0"

    def __init__(self):
        super().__init__("nvidia.nvcomp")
        self.made = []
        self.BitstreamKind = types.SimpleNamespace(NVCOMP_NATIVE="native")
        self.BitcompMode = types.SimpleNamespace(BITCOMP_LOSSY_FP_TO_SIGNED="signed")
        self.CascadedFineGrainedEncoding = types.SimpleNamespace(DELTA=1, RLE=2, FOR=4)

    def Codec(self, **options):  # noqa: N802 (nvCOMP's name)
        unknown = set(options) - KEYWORDS
        if unknown:
            raise ValueError(f'Unsupported argument: "{unknown.pop()}".')
        self.made.append(options)

    def set_device_allocator(self, allocator=None):
        self.allocate = allocator


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    """What was found out and made in a test holds for that test."""
    with forgotten(monkeypatch):
        yield


@pytest.fixture
def installed(monkeypatch):
    """The fake, found by import, on a machine that has a GPU."""
    library = FakeLibrary()
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return library


# Selecting one


@pytest.mark.parametrize("name", NVCOMP)
def test_without_the_package_the_message_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.nvcomp", None)
    with pytest.raises(ConfigError) as caught:
        get_codec(name)
    assert str(caught.value).startswith(f"codec={name!r}: needs nvCOMP (it is not installed)")
    assert 'Install it: pip install ".[cuda1' in str(caught.value)
    assert isinstance(caught.value.__cause__, ImportError)
    assert name not in cswap.list_codecs()


@pytest.mark.parametrize("version", ["5.1.0", "6.1.0", "60.0"])
def test_another_version_is_refused(installed, version):
    installed.__version__ = version
    with pytest.raises(
        ConfigError, match=rf"needs nvCOMP 6\.0\.\*, but {version} is installed\. Replace it: pip "
    ):
        get_codec("nvcomp-lz4")
    assert set(cswap.list_codecs()).isdisjoint(NVCOMP)


def test_without_a_gpu_the_message_says_so(installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="needs a CUDA device, and torch sees none"):
        get_codec("nvcomp-lz4")
    assert set(cswap.list_codecs()).isdisjoint(NVCOMP)


def test_a_refusal_of_nvcomp_itself_is_passed_on(installed, monkeypatch):
    def refuse(**_options):
        raise RuntimeError("CUDA driver version is insufficient : code=1000.")

    monkeypatch.setattr(installed, "Codec", refuse)
    with pytest.raises(ConfigError, match=r"insufficient : code=1000\. Update the driver"):
        get_codec("nvcomp-lz4")


def test_a_library_that_does_not_load_is_named(monkeypatch):
    class Broken:
        def find_spec(self, name, _path=None, _target=None):
            if name == "nvidia.nvcomp":
                raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "nvidia.nvcomp", raising=False)
    monkeypatch.setitem(sys.modules, "nvidia", types.ModuleType("nvidia"))
    sys.modules["nvidia"].__path__ = []
    with pytest.raises(ConfigError, match=r"needs nvCOMP \(libcudart\.so\.13"):
        get_codec("nvcomp-zstd")


def test_where_it_can_run_all_are_listed(installed):
    assert set(NVCOMP) <= set(cswap.list_codecs())
    assert [get_codec(name).name for name in NVCOMP] == list(NVCOMP)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nvcomp-lz4:3", "'nvcomp-lz4' takes no parameter"),
        ("nvcomp-ans:2", "1, bytes for every dtype, is all there is"),
        ("nvcomp-bitcomp-lossy:200", "must be one of a normal float32"),
        ("zvc+nvcomp-lz4", "'nvcomp-lz4' does not encode by tiles"),
    ],
)
def test_wrong_parameters_are_refused(installed, name, message):
    with pytest.raises(ConfigError, match=message):
        get_codec(name)


@pytest.mark.usefixtures("installed")
def test_options_of_swapping_may_name_them():
    options.check(SwapConfig(codec="nvcomp-bitcomp-lossy", lossy="int8"), None)
    options.check(SwapConfig(codec={torch.float32: "nvcomp-lz4"}), None)
    with pytest.raises(ConfigError, match="is lossy: never for integers"):
        options.check(SwapConfig(codec={torch.int64: "nvcomp-bitcomp-lossy"}), None)


# What they take, and what nvCOMP is told


@pytest.mark.parametrize("name", NVCOMP)
def test_tensors_of_the_host_are_refused(installed, name):
    codec = get_codec(name)
    assert not any(codec.supports(torch_dtype(d), "cpu") for d in DTYPES)
    with pytest.raises(UnsupportedError, match="does not take float32 on cpu"):
        codec.encode(torch.zeros(100))


@pytest.mark.parametrize("name", sorted(set(NVCOMP) - {"nvcomp-bitcomp-lossy"}))
def test_lossless_ones_take_every_dtype(installed, name):
    codec = get_codec(name)
    assert codec.lossless
    assert all(codec.supports(torch_dtype(d), "cuda") for d in DTYPES)


def test_the_lossy_one_takes_floats_that_have_its_step(installed):
    def takes(name):
        return [d for d in DTYPES if get_codec(name).supports(torch_dtype(d), "cuda")]

    assert not get_codec("nvcomp-bitcomp-lossy").lossless
    assert takes("nvcomp-bitcomp-lossy") == ["float64", "float32", "float16"]
    assert takes("nvcomp-bitcomp-lossy:-14") == ["float64", "float32", "float16"]
    assert takes("nvcomp-bitcomp-lossy:-15") == ["float64", "float32"]
    assert takes("nvcomp-bitcomp-lossy:16") == ["float64", "float32"]


OPTIONS: dict[tuple[str, str], dict[str, object]] = {
    ("nvcomp-ans", "bfloat16"): {"data_type": "<f2"},
    ("nvcomp-ans", "float16"): {"data_type": "<f2"},
    ("nvcomp-ans", "float32"): {"data_type": "<f4"},
    ("nvcomp-ans", "complex64"): {"data_type": "<f4"},
    ("nvcomp-ans", "float8_e4m3fn"): {"data_type": "|f1"},
    ("nvcomp-ans", "float8_e5m2"): {"data_type": "|u1"},
    ("nvcomp-ans", "int16"): {"data_type": "|u1"},
    ("nvcomp-ans", "float64"): {"data_type": "|u1"},
    ("nvcomp-ans:1", "bfloat16"): {"data_type": "|u1"},
    ("nvcomp-bitcomp", "bfloat16"): {"data_type": "<u2", "algorithm_type": 0},
    ("nvcomp-bitcomp-sparse", "complex128"): {"data_type": "<u8", "algorithm_type": 1},
    ("nvcomp-cascaded", "int64"): {"data_type": "<u8", "fine_grained_encodings": 7},
    ("nvcomp-lz4", "float64"): {"data_type": "<u4"},
    ("nvcomp-lz4", "bool"): {"data_type": "|u1"},
    ("nvcomp-zstd", "float32"): {},
    ("nvcomp-bitcomp-lossy:-3", "float32"): {
        "data_type": "<f4",
        "algorithm_type": 0,
        "mode": "signed",
        "delta": 0.125,
    },
}


@pytest.mark.parametrize(("name", "dtype"), OPTIONS)
def test_options_by_dtype(installed, name, dtype):
    x = torch.zeros(16, dtype=torch.uint8).view(torch_dtype(dtype))
    codec: Any = get_codec(name)
    installed.made.clear()
    codec._coder(x, types.SimpleNamespace(cuda_stream=STREAM))
    assert installed.made == [
        {
            "algorithm": codec.algorithm,
            **OPTIONS[name, dtype],
            "device_id": 0,
            "cuda_stream": STREAM,
            "uncomp_chunk_size": 65536,
            "bitstream_kind": "native",
        }
    ]


class FakeStream:
    """One of torch's; its address is 0 if it is the default one."""

    def __init__(self, name, log, address):
        self.name, self._log, self.cuda_stream = name, log, address

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch):
    """Whatever is asked of torch's streams, in order; the current one is the default."""
    log: list[str] = []

    @contextlib.contextmanager
    def entered(stream):
        log.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "device", lambda _index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda: FakeStream("own", log, 7))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _d: FakeStream("default", log, 0))
    nvcomp_library._own_stream.cache_clear()
    yield log
    nvcomp_library._own_stream.cache_clear()


def test_a_stream_with_an_address_is_used_itself(streams):
    given: Any = FakeStream("given", streams, 5)
    with nvcomp_library.running_on(given, torch.device("cuda", 0)) as own:
        assert own is given
    assert streams == ["on given"]


@pytest.mark.parametrize("is_given", [True, False])
def test_the_default_stream_has_a_stand_in_between_its_past_and_its_future(streams, is_given):
    given: Any = torch.cuda.current_stream(None) if is_given else None
    with nvcomp_library.running_on(given, torch.device("cuda", 0)) as own:
        assert own.cuda_stream == 7
    assert streams == ["own waits for default", "on own", "default waits for own"]


def test_the_library_itself_knows_every_option(monkeypatch):
    """Needs nvCOMP, but no GPU: it refuses unknown keywords before it looks for one."""
    real = pytest.importorskip("nvidia.nvcomp")
    with pytest.raises(ValueError, match="Unsupported argument"):
        real.Codec(algorithm="LZ4", no_such_option=1)
    monkeypatch.setattr(nvcomp_library, "require", lambda _name: None)
    for name in (*NVCOMP, "nvcomp-ans:1", "nvcomp-bitcomp-lossy:-3"):
        codec: Any = get_codec(name)
        for dtype in DTYPES.values():
            options = codec.options(dtype)
            if options is not None:
                try:
                    nvcomp_library.Coder({"algorithm": codec.algorithm, **options}, 0, STREAM)
                except RuntimeError as error:
                    assert "CUDA" in str(error)  # noqa: PT017 (there may be a GPU, too)


def test_a_process_that_used_the_library_ends_well():
    """Needs nvCOMP, but no GPU. It must not be left with an allocator of Python's at the end."""
    pytest.importorskip("nvidia.nvcomp")
    code = "from cswap.codecs.nvcomp_library import library; library()"
    paths = os.pathsep.join(sys.path)
    ended = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, check=False
    )
    assert ended.returncode == 0
