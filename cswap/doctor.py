"""The parts of this machine that cswap can use, and remedies for others: logic of `cswap doctor`.

Also the survey behind `cswap codecs`. Nothing here changes anything; the dearest probe is
importing torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import platform
import stat
import sys
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cswap.cache_folder import danger
from cswap.cores import usable_cores
from cswap.errors import ConfigError, UnknownCodecError
from cswap.install_hint import to_install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cswap.codecs.base import Codec


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding about one part.

    Attributes:
        part: its name, such as ``torch``.
        usable: whether cswap can use it here and now.
        required: whether the CPU path needs it.
        version: of the installed distribution; empty if there is none.
        detail: its version or size, or why it is not usable.
        remedy: a command or an advice; empty if there is nothing to be done.
    """

    part: str
    usable: bool
    required: bool = False
    version: str = ""
    detail: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One codec, as `cswap codecs` lists it.

    Attributes:
        name: as `cswap.get_codec` takes it.
        available: whether it can be made here.
        lossless: whether decode returns every bit; None if not available.
        cpu: dtypes that it takes on a CPU, by torch's names.
        cuda: the same on a CUDA device, whether or not there is one.
        description: first line of the codec's documentation, or why it is not available.
    """

    name: str
    available: bool
    lossless: bool | None
    cpu: tuple[str, ...]
    cuda: tuple[str, ...]
    description: str


def examine() -> tuple[Finding, ...]:
    """Look at every part that cswap needs or can make use of, most important first."""
    return tuple(probe() for probe in _PROBES)


def cpu_usable(findings: Iterable[Finding]) -> bool:
    """Whether everything is there that swapping on a CPU needs."""
    return all(f.usable for f in findings if f.required)


def survey_codecs(names: Iterable[str] = ()) -> tuple[CodecRow, ...]:
    """Describe codecs.

    Args:
        names: which; default: all that `cswap.list_codecs` names.

    Raises:
        UnknownCodecError: one of ``names`` is none.
    """
    from cswap.codecs.registry import list_codecs

    return tuple(_survey_codec(name) for name in names or list_codecs())


def _survey_codec(name: str) -> CodecRow:
    from cswap.codecs.registry import get_codec

    try:
        codec = get_codec(name)
    except UnknownCodecError:
        raise
    except (ConfigError, ImportError) as error:
        return CodecRow(name, False, None, (), (), str(error))
    lines = (inspect.getdoc(type(codec)) or "").splitlines()
    return CodecRow(
        name=name,
        available=True,
        lossless=codec.lossless,
        cpu=_dtypes(codec, "cpu"),
        cuda=_dtypes(codec, "cuda"),
        description=lines[0] if lines else "",
    )


def _dtypes(codec: Codec, device: str) -> tuple[str, ...]:
    import torch

    from cswap.codecs.base import takes

    return tuple(n for n in _known_dtypes() if takes(codec, getattr(torch, n), device))


def _known_dtypes() -> tuple[str, ...]:
    import torch

    from cswap.schema.tensor import DTYPES

    return tuple(n for n in DTYPES if hasattr(torch, n))  # an older torch lacks the youngest


def abbreviate(dtypes: Iterable[str]) -> str:
    """Name dtypes in few words: ``all``, or whole groups by the group's name.

    >>> abbreviate(["int8", "int16", "int32", "int64", "float32", "complex64"])
    'float32, complex64, int'
    """
    left, known = set(dtypes), _known_dtypes()
    if left == set(known):
        return "all"
    words: list[str] = []
    for name in known:
        group = next((g for g, members in _GROUPS.items() if name in members), name)
        whole = {n for n in known if n in _GROUPS.get(group, ())}
        if name in left and whole and whole <= left:
            words.append(group)
            left -= whole
        elif name in left:
            words.append(name)
    return ", ".join(words)


def _python() -> Finding:
    machine = f"{platform.system()} {platform.machine()}, {usable_cores()} cores"
    return Finding("python", True, True, platform.python_version(), machine)


def _torch() -> Finding:
    problem = _import_problem("torch")
    if problem:
        return Finding("torch", False, True, _version("torch"), problem, "pip install torch")
    import torch

    from cswap.remat.reads import CAN_READ

    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    if CAN_READ:
        return Finding("torch", True, True, torch.__version__, build)
    lacks = f"{build}; too old to compute tensors again (remat)"
    return Finding("torch", True, True, torch.__version__, lacks, "pip install 'torch>=2.8'")


def _numba() -> Finding:
    problem = _import_problem("numba")
    remedy = "pip install 'numba>=0.60'" if problem else ""
    detail = problem or "compiles the CPU kernels"
    return Finding("numba", not problem, True, _version("numba"), detail, remedy)


def _kernels() -> Finding:
    """Whether kernels were compiled before: the first use of one takes seconds otherwise."""
    spec = importlib.util.find_spec("cswap_kernels")
    if spec is None or not spec.submodule_search_locations:
        remedy = "install cswap with pip, or put kernels/ on PYTHONPATH"
        return Finding("kernels", False, True, "", "package cswap_kernels not found", remedy)
    folder = Path(next(iter(spec.submodule_search_locations)))
    modules = [path for path in folder.glob("*.py") if "@njit" in path.read_text("utf-8")]
    if _import_problem("numba"):
        return Finding("kernels", False, True, "", "need numba")
    from cswap_kernels.jit import numba_folder

    cache = numba_folder()
    if cache is None:
        detail = "cannot be kept: every process compiles them anew, which takes seconds"
        return Finding("kernels", True, True, "", detail, f"set NUMBA_CACHE_DIR {_PRIVATE}")
    # Numba names its files <module>.<function>-<line>.py<version>.nbi.
    tag = f"py{sys.version_info.major}{sys.version_info.minor}"
    cached = sum(_is_cached(module, cache, tag) for module in modules)
    detail = f"{cached} of {len(modules)} files compiled and in the cache"
    remedy = "" if cached == len(modules) else "nothing: the first use compiles, once"
    return Finding("kernels", True, True, "", detail, _dangers(cache) or remedy)


def _dangers(cache: Path) -> str:
    # Numba keeps pickles and machine code: whoever can write them has this user run his code.
    folders = {cache: cache.stat()}
    above = Path(os.environ.get("NUMBA_CACHE_DIR") or cache)
    if above in cache.parents and not (status := above.stat()).st_mode & stat.S_ISVTX:
        folders[above] = status  # in /tmp, which is sticky, nobody moves others' folders
    for folder, status in folders.items():
        if found := danger(status):
            remedy = f"chmod go-w it, or set NUMBA_CACHE_DIR {_PRIVATE}"
            return f"{folder} {found}, who can run code as you: {remedy}"
    return ""


def _is_cached(module: Path, cache: Path, tag: str) -> bool:
    # Older than its source, a cache entry is compiled anew.
    written = [p.stat().st_mtime for p in cache.glob(f"**/{module.stem}.*.{tag}*.nbi")]
    return bool(written) and max(written) >= module.stat().st_mtime


def _host(module: str, what: str) -> Callable[[], Finding]:
    def probe() -> Finding:
        problem = _import_problem(module)
        remedy = f"pip install {module}" if problem else ""
        return Finding(module, not problem, False, _version(module), problem or what, remedy)

    return probe


def _cuda_device() -> Finding:
    part = "CUDA device"
    if _import_problem("torch"):
        return Finding(part, False, detail="needs torch")
    import torch

    if torch.version.cuda is None:
        remedy = "with an NVIDIA GPU: a CUDA build of torch, see https://pytorch.org/get-started"
        return Finding(part, False, detail="this torch is built without CUDA", remedy=remedy)
    try:
        device = torch.cuda.get_device_properties(0)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition(". ")[0]
        remedy = "check the driver with nvidia-smi, and CUDA_VISIBLE_DEVICES"
        return Finding(part, False, detail=reason, remedy=remedy)
    n = torch.cuda.device_count()
    memory_gib = device.total_memory / 2**30
    detail = f"{n} x {device.name}, {memory_gib:.0f} GiB, sm_{device.major}{device.minor}"
    return Finding(part, True, detail=detail)


def _pinned_memory() -> Finding:
    part = "pinned memory"
    if not _has_cuda():
        return Finding(part, False, detail="needs a CUDA device; the host pool is pageable")
    import torch

    try:
        torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return Finding(part, False, detail=reason, remedy="check the limits of the container")
    return Finding(part, True, detail="1 MiB allocated and freed")


def _cuda_package(part: str, module: str, prefix: str, what: str) -> Callable[[], Finding]:
    """Probe of a package that comes in one distribution per major version of CUDA."""

    def probe() -> Finding:
        # The distributions are called cupy-cuda12x, nvidia-nvcomp-cu13, numba-cuda, ...
        found = [n for suffix in ("", "12x", "13x", "12", "13") if _version(n := prefix + suffix)]
        problem = _import_problem(module) if found else "not installed"
        remedy = to_install(_cuda_extra()) if problem and _has_cuda() else ""
        version = _version(found[0]) if found else ""
        if not problem and not _has_cuda():
            problem = "installed, but there is no CUDA device"
        return Finding(part, not problem, False, version, problem or what, remedy)

    return probe


def _numba_cuda() -> Finding:
    found = _cuda_package("numba-cuda", "numba.cuda", "numba-cuda", "compiles the CUDA kernels")()
    if not found.usable:
        return found
    from cswap.codecs.gpu import missing

    reason = missing()  # compiles a kernel
    return found if reason is None else replace(found, usable=False, detail=reason)


def _nvcomp() -> Finding:
    found = _cuda_package("nvCOMP", "nvidia.nvcomp", "nvidia-nvcomp-cu", "codecs nvcomp-*")()
    if not found.usable:
        return found
    from cswap.codecs.nvcomp_library import missing

    reason = missing()  # the version may be another
    return found if reason is None else replace(found, usable=False, detail=reason)


def _has_cuda() -> bool:
    if _import_problem("torch"):
        return False
    import torch

    return torch.version.cuda is not None and torch.cuda.is_available()


def _cuda_extra() -> str:
    import torch

    major = (torch.version.cuda or "13").partition(".")[0]
    return f"cuda{major}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _import_problem(module: str) -> str:
    """Why a module cannot be imported; empty if it can."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            return "not installed"
        return f"import fails: {error}"
    except Exception as error:  # a foreign package may fail to load in any way; that is the finding
        return f"import fails: {type(error).__name__}: {error}".splitlines()[0]
    return ""


_GROUPS: Final = {
    "float": ("float64", "float32", "float16", "bfloat16"),
    "float8": ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    "complex": ("complex128", "complex64", "complex32"),
    "int": ("int8", "int16", "int32", "int64"),
    "uint": ("uint8", "uint16", "uint32", "uint64"),
}

_PRIVATE: Final = "to a folder that you can write, and nobody else"

_PROBES: Final[tuple[Callable[[], Finding], ...]] = (
    _python,
    _torch,
    _numba,
    _kernels,
    _host("lz4", "codec lz4"),
    _host("zstandard", "codec zstd"),
    _host("zfpy", "codec zfp"),
    _cuda_device,
    _pinned_memory,
    _cuda_package("cupy", "cupy", "cupy-cuda", "pinned memory without rounding; nvCOMP"),
    _numba_cuda,
    _nvcomp,
)
