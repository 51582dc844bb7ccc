"""Settings of every test run: property tests, benchmarks off, and what GPU tests need."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    Ended = subprocess.CompletedProcess[str]

# The repository's root is not on the path (see kernels/README.md): once imported, `bench` is found.
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[1]))
    import bench as bench

# Variables are set here and not by a fixture: doctests outside of this folder run engines, too, and
# before any test. Tests neither see nor change this machine's calibration and CUDA kernels.
_CACHE = tempfile.TemporaryDirectory(prefix="cswap-tests-")
os.environ["CSWAP_CACHE_DIR"] = _CACHE.name
os.environ["CSWAP_CALIBRATE"] = "0"

# Compiling makes millions of objects that live: looking for garbage each time that there are 700
# new ones takes a seventh of the tests' time.
gc.set_threshold(50_000, 20, 20)

# Started in the background (nohup, a CI agent), Python ignores Ctrl-C, and so would every program
# that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# All processes of all runs share the compiled CPU kernels. Numba finds them by the source's text.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "numba"))

# Processes of pytest-xdist share the cores: spinning threads would take each other's time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Compilation on first use would break any deadline; CI repeats a red run exactly. The Makefile
# chooses `all` for test-all.
CI = bool(os.environ.get("CI"))
GPU_TESTS = Path(__file__).with_name("gpu")
RANK_TESTS = Path(__file__).with_name("ranks")
settings.register_profile("dev", max_examples=12, deadline=None)
settings.register_profile("ci", max_examples=12, deadline=None, derandomize=True)
settings.register_profile("all", max_examples=50, deadline=None, derandomize=CI)
settings.register_profile("nightly", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if CI else "dev"))


# GPU tests run where nothing is installed but torch, numpy, numba, pytest and hypothesis.
_NEED_TYPER = ["cli/test_cli.py", "advisor/test_calibration.py"]
collect_ignore = _NEED_TYPER if find_spec("typer") is None else []


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Collections look only at what a module's own tests made: with all of PyTorch's operators
    and compiled kernels about, looking at everything takes a third of a second."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def told_of_compiling() -> None:
    """Whether kernels have to be compiled depends on the runs before: tests of logs do not."""
    from cswap_kernels import jit

    jit.told_of_compiling.set()


@pytest.fixture(autouse=True)
def own_codecs() -> Iterator[None]:
    """A codec that a test registers is gone after it: some raise whatever they are asked."""
    registry = sys.modules.get("cswap.codecs.registry")
    before = set() if registry is None else set(registry._registered)
    yield
    registry = sys.modules.get("cswap.codecs.registry")
    if registry is not None and len(registry._registered) > len(before):
        for name in registry._registered.keys() - before:
            del registry._registered[name]
            registry._made.pop(name, None)


class Forked:
    """Programs in processes of their own, without the seconds that importing torch takes.

    They are forked from one process (forks.py), which is started when the first is asked for.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: Any = None
        self._numbers = itertools.count()

    def run_all(
        self, programs: list[tuple[str, list[str]]], *, timeout: float = 120, **environment: str
    ) -> list[Ended]:
        """Run programs (Python text, arguments) at the same time; how each ended."""
        jobs = [self._job(text, arguments, environment) for text, arguments in programs]
        server = self._started()
        server.stdin.write(json.dumps(jobs) + "\n")
        server.stdin.flush()
        pids = json.loads(server.stdout.readline())
        late = threading.Timer(timeout, _kill, (pids,))
        late.daemon = True
        late.start()
        try:
            codes = json.loads(server.stdout.readline())
        except BaseException:  # its answers are not to be taken for those to the next jobs
            _kill([*pids, server.pid])
            self._server = None
            raise
        finally:
            late.cancel()
        return [
            subprocess.CompletedProcess(
                job["arguments"], code, *(Path(file).read_text("utf-8") for file in job["files"])
            )
            for job, code in zip(jobs, codes, strict=True)
        ]

    def run(self, text: str, *arguments: object, **options: Any) -> Ended:
        """Run one program; how it ended."""
        (done,) = self.run_all([(text, [str(a) for a in arguments])], **options)
        return done

    def _job(self, text, arguments, environment):
        number = next(self._numbers)
        files = [str(self._folder / f"{number}.{name}") for name in ("out", "err")]
        own = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"} | environment
        return {"program": text, "arguments": arguments, "files": files, "environment": own}

    def _started(self):
        if self._server is None:
            command = [sys.executable, str(Path(__file__).with_name("forks.py"))]
            pipe = subprocess.PIPE
            self._server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        return self._server

    def close(self) -> None:
        """End the process that is forked."""
        if self._server is not None:
            self._server.communicate()


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forked]:
    """Runs programs in processes of their own, quickly."""
    made = Forked(tmp_path_factory.mktemp("forked"))
    yield made
    made.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-versions",
        type=Path,
        metavar="FILE",
        help="add the versions of this environment to FILE if all tests pass",
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    file = config.getoption("--record-versions")
    passed, skipped = (len(terminalreporter.getreports(kind)) for kind in ("passed", "skipped"))
    if file is None or exitstatus != 0 or not passed:
        return
    from bench.pages import versions

    versions.record(versions.row(_selection(config), passed, skipped), file)
    terminalreporter.write_line(f"versions recorded in {file}")


def _selection(config: pytest.Config) -> str:
    asked = config.args_source is pytest.Config.ArgsSource.ARGS
    words = config.args if asked else ["all"]
    for option in ("-m", "-k"):
        if value := config.getoption(option):
            words = [*words, f'{option} "{value}"']
    return " ".join(words)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: seconds after which pytest-timeout gives up")
    # Set here because pytest does not start where an option in pyproject.toml is unknown to it.
    if config.pluginmanager.hasplugin("benchmark"):
        asked = config.option.benchmark_enable or config.option.benchmark_only
        config.option.benchmark_disable = not asked
    asked_for_gpu = config.option.markexpr == "gpu" and not config.option.collectonly
    if asked_for_gpu and (reason := missing_for_gpu()):
        pytest.exit(f"GPU tests were asked for, but there is no CUDA device: {reason}", 2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files whose tests all are deselected, and take seconds to import.

    Sweeps make thousands of slow tests of lists; tests of GPUs import torch's lists of operators.
    """
    left_out = config.option.markexpr
    is_sweep = collection_path.name.endswith("_sweeps.py") and "not slow" in left_out
    is_for_gpu = collection_path == GPU_TESTS and "not gpu" in left_out
    return True if is_sweep or is_for_gpu else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported stays: looking for garbage in it, again and again, takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Escape lone surrogates, which tests of hostile names print: pytest-xdist sends UTF-8."""
    return _encodable((yield))


def _encodable(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(data, dict):
        return {_encodable(key): _encodable(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(map(_encodable, data))
    return data


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _mark_combinations_slow(items)
    # Two processes that train together report to all tests of a file. Near the end of the list, an
    # idle process of pytest-xdist would take over some of these tests, and start two more.
    items.sort(key=lambda item: RANK_TESTS not in item.path.parents)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := missing_for_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device: {reason}"))


def _mark_combinations_slow(items: list[pytest.Item]) -> None:
    """Leave each value of each parameter of a `sampled` test in one case that is not slow."""
    cases: dict[str, list[tuple[pytest.Item, set[tuple[str, str]]]]] = {}
    for item in items:
        quick = not item.get_closest_marker("slow")
        if quick and hasattr(item, "callspec") and item.get_closest_marker("sampled"):
            values = {(name, repr(value)) for name, value in item.callspec.params.items()}
            cases.setdefault(item.nodeid.partition("[")[0], []).append((item, values))
    for left in cases.values():
        missing = {value for _, values in left for value in values}
        used: Counter[tuple[str, str]] = Counter()
        while missing:
            best = max(left, key=lambda case: _gain(case[1], missing, used))
            missing -= best[1]
            used.update(best[1])
            left.remove(best)
        for item, _ in left:
            item.add_marker(pytest.mark.slow)


def _gain(
    values: set[tuple[str, str]], missing: set[tuple[str, str]], used: Counter[tuple[str, str]]
) -> tuple[int, int]:
    """How many values a case has that no case had so far, then how rare its values are."""
    return len(values & missing), -sum(used[value] for value in values)


def missing_for_gpu() -> str:
    """What keeps GPU tests from running here; empty if nothing does."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device: check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return ""


@pytest.fixture
def by_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """No goal by default: everything leaves that is worth its time at the usual price of a byte."""
    monkeypatch.setattr("cswap.fit.goal.Asked.without_fit", staticmethod(lambda _config: None))
