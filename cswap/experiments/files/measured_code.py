"""Fingerprints of the code that a result file measures.

A result records a digest of every file that its figures depend on, since a measurement may come
before the commit. An interrupted run goes on only with the same code. Comments, docstrings, blank
lines and line breaks do not count: no figure depends on them.
"""

from __future__ import annotations

import hashlib
import io
import tokenize
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ROOT: Final = Path(__file__).resolve().parents[3]
SUFFIXES: Final = (".py", ".json")
"""Suffixes of the files that count in a folder."""

_EVERY_CODEC: Final = ("cswap/codecs", "kernels/cswap_kernels")
_NOT_ON_A_CPU: Final = (
    *("!kernels/cswap_kernels/cuda", "!cswap/codecs/gpu.py", "!cswap/codecs/cubins.py"),
    *("!cswap/codecs/launcher.py", "!cswap/codecs/pinned_sizes.py"),
    *("!cswap/devices/cuda.py", "!cswap/devices/cuda_callbacks.py"),
    *("!cswap/devices/cuda_events.py", "!cswap/devices/pinned.py"),
)
_LOOPS: Final = "kernels/cswap_kernels/uncounted.py"
"""Only the planner's loops import it."""
_CODECS: Final = (*_EVERY_CODEC, f"!{_LOOPS}", *_NOT_ON_A_CPU)
_PROFILER: Final = ("cswap/profiler.py", "cswap/schema/tensor.py")
_METERS: Final = "cswap/experiments/meters"
_WORKLOADS: Final = (
    "cswap/experiments/task.py",
    "cswap/experiments/workloads/data.py",
    "cswap/experiments/workloads/small_models.py",
    "cswap/experiments/workloads/residual.py",
    "cswap/experiments/workloads/tasks.py",
    "cswap/experiments/workloads/vision.py",
)
_ENGINE: Final = (
    *("cswap/engine", "cswap/hooks.py", "cswap/pool.py", "cswap/devices", "cswap/stores"),
    *("cswap/advisor", "cswap/remat", *_CODECS, *_PROFILER),
)
_PLANNER: Final = (
    *("cswap/plan", "cswap/schema/plan.py", "cswap/schema/trace.py", "cswap/advisor/cswap_plus.py"),
    "cswap/schema/executable.py",
    _LOOPS,
    *("bench/sparsity/stored.py", "bench/results/cpu/sparsity.json", "bench/workloads/zoo"),
)
_TRAINED: Final = (
    *("cswap/experiments/accuracy/tasks.py", "cswap/experiments/accuracy/train.py"),
    *_WORKLOADS,
)
_LOSSY: Final = (
    *(*_CODECS, "cswap/guard", "cswap/advisor/lossy_rules.py", "cswap/advisor/lossy_fallback.py"),
    *_TRAINED,
)

MEASURED: Final[dict[str, tuple[str, ...]]] = {
    "codecs": (
        *(*_CODECS, "cswap/experiments/codecs", "cswap/experiments/meters/timing.py"),
        *("!cswap/experiments/codecs/plots.py", "!cswap/experiments/codecs/tables.py"),
        "!cswap/experiments/codecs/totals.py",
    ),
    "swap": (
        *(*_ENGINE, "bench/swap", "!bench/swap/report.py", _METERS, *_WORKLOADS),
        "bench/workloads/methods.py",
    ),
    "workloads": (*_ENGINE, "bench/frameworks", _METERS),
    "fit": (
        *(*_ENGINE, "cswap/fit", "cswap/second_forward.py", "bench/fit", _METERS, *_WORKLOADS),
    ),
    "inlined": ("cswap/compiled", "bench/inlined", *_WORKLOADS),
    "accuracy": (*_LOSSY, "cswap/experiments/accuracy/gradients.py"),
    "accuracy pilot": _TRAINED,
    "accuracy schedule": (*_CODECS, *_TRAINED, "cswap/experiments/accuracy/schedule.py"),
    "demo": (*_ENGINE, "bench/demo", "!bench/demo/pictures.py", _METERS, *_WORKLOADS),
    "advisor": (*_ENGINE, "bench/advisor", "!bench/advisor/report.py", *_WORKLOADS),
    "sparsity": (
        *("cswap/plan/measure.py", "cswap/plan/tensor_values.py", "cswap/plan/tracing"),
        *(*_CODECS, *_PROFILER, "bench/sparsity", "bench/workloads/zoo"),
        "cswap/experiments/workloads/data.py",
    ),
    "papers": (*_PLANNER, "bench/papers", "!bench/papers/report.py"),
    "gpu": (
        *(path for path in _ENGINE if path not in _NOT_ON_A_CPU),
        *("bench/gpu", "bench/workloads/large_models.py", "bench/workloads/zoo"),
    ),
    "twin": (
        *(path for path in _ENGINE if path not in _NOT_ON_A_CPU),
        *("cswap/fit", "bench/twin", "!bench/twin/report.py"),
        *("bench/gpu/training.py", "bench/workloads/large_models.py", "bench/workloads/zoo"),
    ),
    "gpu build": ("kernels/cswap_kernels", f"!{_LOOPS}", "bench/gpu/build.py"),
    "gpu static": ("kernels/cswap_kernels", f"!{_LOOPS}", "bench/ptx", "bench/gpu/static.py"),
}
"""Files and folders that a result's figures depend on, by kind of result
(`cswap.experiments.files.kinds`) or by the first word of the kind. A path after "!" is left out of
a folder named before.

Accuracy depends on the decoded values and on the rules for lossy codecs, not on the engine's moves.
Code that only words, tabulates or draws the figures is not included. A kind whose figures come from
another result file names that file.
"""


def fingerprint(paths: Iterable[str], root: Path = ROOT) -> dict[str, str]:
    """A short digest by file, for the files and the folders' files below the root.

    A path that does not exist is left out: a result that had it differs from now on.
    """
    paths = tuple(paths)
    tops = [_existing(root, path) for path in included(paths)]
    files = {file for top in tops for file in (top, *top.rglob("*"))}
    return digests(
        (name, file.read_text(encoding="utf-8"))
        for file in sorted(files)
        if file.is_file()
        and file.suffix in SUFFIXES
        and is_measured(name := file.relative_to(root).as_posix(), paths)
    )


def _existing(root: Path, path: str) -> Path:
    # An installed package has the kernels beside cswap, not in the checkout's folder.
    found = root / path
    return found if found.exists() else root / path.removeprefix("kernels/")


def included(paths: Iterable[str]) -> list[str]:
    """The paths without those that are left out.

    >>> included(["codecs", "!codecs/gpu.py"])
    ['codecs']
    """
    return [path for path in paths if not path.startswith("!")]


def is_measured(name: str, paths: Iterable[str]) -> bool:
    """Whether no path with a "!" names the file or a folder above it.

    >>> paths = ["codecs", "!codecs/gpu.py", "!codecs/cuda"]
    >>> [is_measured(f"codecs/{name}", paths) for name in ("gpu.py", "cuda/a.py", "cuda2.py")]
    [False, False, True]
    """
    without = [path[1:] for path in paths if path.startswith("!")]
    return not any(name == path or name.startswith(f"{path}/") for path in without)


def digests(texts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Digests by name of the files, given with their texts, that hold more than a docstring."""
    found = {name: digest(name, text) for name, text in texts}
    return {name: one for name, one in found.items() if one != digest("", "")}


def paths_of(kind: str) -> tuple[str, ...]:
    """The paths of `MEASURED` for a kind of result; none for a kind that is not there.

    >>> paths_of("gpu link") == MEASURED["gpu"]
    True
    """
    return MEASURED.get(kind) or MEASURED.get(kind.partition(" ")[0], ())


def measured(kind: str, root: Path = ROOT) -> dict[str, Any]:
    """The record that a result of this kind keeps: its paths, and their files' digests."""
    paths = paths_of(kind)
    return {"paths": list(paths), "files": fingerprint(paths, root)}


@cache
def digest(name: str, text: str) -> str:
    r"""Twelve hexadecimal digits of a file's content; of Python, of the code alone.

    >>> digest("a.py", "x = 1  # one") == digest("b.py", "'Doc.'\n\nx = 1\n")
    True
    >>> digest("a.py", "x = 1") == digest("a.py", "x = 2")
    False
    """
    if name.endswith(".py"):
        text = _code(text)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _code(text: str) -> str:
    # The tokens of the code: how its lines are wrapped does not count either.
    try:
        words = _without_strings_alone(list(_words(text)))
    except (SyntaxError, tokenize.TokenError):
        return text
    kept = [
        word
        for word, following in pairwise([*words, ""])
        if not (word == "," and following in _CLOSING)
    ]
    return "\n".join(kept)


_CLOSING: Final = (")", "]", "}")
_LINE_END: Final = "<newline>"
_BLOCK: Final = ("<indent>", "<dedent>")
_MARKS: Final = {
    tokenize.NEWLINE: _LINE_END,
    tokenize.INDENT: _BLOCK[0],
    tokenize.DEDENT: _BLOCK[1],
    tokenize.COMMENT: "",
    tokenize.NL: "",
    tokenize.ENDMARKER: "",
}


def _words(text: str) -> Iterator[str]:
    # From Python 3.12 on, an f-string is several tokens: its source is taken whole instead.
    lines = text.splitlines(keepends=True)
    depth, start = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            start = start if depth else token.start
            depth += 1
        elif kind == "FSTRING_END":
            depth -= 1
            if not depth:
                yield _source(lines, start, token.end)
        elif not depth and (word := _MARKS.get(token.type, token.string)):
            yield word


def _source(lines: Sequence[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    part = [*lines[start[0] - 1 : end[0]]]
    part[-1] = part[-1][: end[1]]
    part[0] = part[0][start[1] :]
    return "".join(part)


def _without_strings_alone(words: Sequence[str]) -> list[str]:
    # Docstrings, also those of attributes: a string that is a line of its own.
    kept: list[str] = []
    starts = (*_BLOCK, _LINE_END)
    for word, following in pairwise([*words, ""]):
        alone = following == _LINE_END and (not kept or kept[-1] in starts)
        if not (alone and word.lstrip("rR")[:1] in ("'", '"')):
            kept.append(word)
        # the end of its line goes with it
    return [w for w, before in zip(kept, ["", *kept], strict=False) if (w, before) not in _EMPTY]


_EMPTY: Final = {(_LINE_END, start) for start in ("", _LINE_END, *_BLOCK)}
