"""`python -m bench stale`: committed results that are older than the code that they measure.

A kind of result names the code that its figures depend on (`bench.files.measured_code`). That code
is compared with its state at the result's commit. Comments, docstrings, line breaks and messages to
people do not count: no figure depends on them. `make release` refuses results that are stale.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from bench.files.kinds import kind_of
from bench.files.measured_code import paths_of
from cswap.experiments.files.environment import ROOT
from cswap.experiments.files.reading import ResultFileError, load
from cswap.experiments.files.resumable import SUFFIX
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_NAMED: Final = 4
"""Folders with changed files that are named per result."""

SUFFIXES: Final = (".py", ".json")
"""Suffixes of the files that count."""

_SENTENCE: Final = re.compile(r"[A-Z].* .*\.")
"""A string that is read by people."""


@dataclass(frozen=True, slots=True)
class Check:
    """One result file against today's code.

    Attributes:
        name: name of the file, relative to the repository's root.
        commit: commit whose code was measured; "" if unknown.
        command: command that makes the result.
        changed: files that differ, are gone, or are new since then.
        why: the reason why nothing could be compared; "" if something was.
        commits: number of later commits that touch the changed files.
    """

    name: str
    commit: str
    command: str
    changed: tuple[str, ...]
    why: str = ""
    commits: int = 0

    @property
    def is_stale(self) -> bool:
        """Whether the result must be measured again, or confirmed."""
        return bool(self.changed or self.why)


def check(path: Path, root: Path = ROOT) -> Check:
    """Compare the code that a result file measures with the code below the root.

    Raises:
        ResultFileError: the file is none that the benchmarks write.
    """
    document = load(path)
    environment = document["environment"]
    paths = paths_of(kind_of(document, path).name)
    commit = _measured_at(environment, path, root)
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
    about = (name, commit, str(environment.get("command") or "an unknown command"))
    if not paths:
        return Check(*about, (), "nobody has said which code it measures")
    if not commit:
        return Check(*about, (), "measured with changes that were not committed")
    changed = changed_code(commit, paths, root)
    if changed is None:
        return Check(*about, (), "its commit is not known here")
    since = changed and _git(root, "log", "--format=%h", f"{commit}..HEAD", "--", *changed)
    return Check(*about, changed, commits=len((since or "").splitlines()))


def _measured_at(environment: dict[str, Any], path: Path, root: Path) -> str:
    # The commit that was measured, or confirmed; changes of it were committed with the result.
    found = environment.get("confirmed") or environment
    if isinstance(found, dict) and not found.get("cswap_modified"):
        return str(found.get("cswap_commit") or "")
    return (_git(root, "log", "-1", "--format=%H", "--", str(path)) or "").strip()


def changed_code(commit: str, paths: Sequence[str], root: Path) -> tuple[str, ...] | None:
    """The files whose code is another one than at a commit; None without git or that commit.

    Args:
        commit: a commit.
        paths: files and folders; those after "!" are left out.
        root: of the repository.
    """
    where = [f":(exclude){path[1:]}" if path.startswith("!") else path for path in paths]
    differ = _git(root, "diff", "--name-only", "--no-renames", commit, "--", *where)
    if differ is None:
        return None
    new = _git(root, "ls-files", "--others", "--exclude-standard", "--", *where) or ""
    return tuple(
        name
        for name in sorted({*differ.splitlines(), *new.splitlines()})
        if name.endswith(SUFFIXES)
        and code_of(name, _text_at(commit, name, root)) != code_of(name, _text(root / name))
    )


@cache
def _text_at(commit: str, name: str, root: Path) -> str:
    return _git(root, "show", f"{commit}:{name}") or ""


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


@cache
def code_of(name: str, text: str) -> str:
    r"""What counts of a file: of Python, the syntax without docstrings and messages to people.

    >>> code_of("a.py", "x = 1  # one") == code_of("b.py", "'Doc.'\n\nx = 1\n")
    True
    >>> code_of("a.py", "raise E('It is bad.')") == code_of("a.py", "raise E('It is no file.')")
    True
    >>> code_of("a.py", "get('zvc')") == code_of("a.py", "get('csr')")
    False
    """
    if not name.endswith(".py"):
        return text
    try:
        return ast.dump(_Code().visit(ast.parse(text)))
    except SyntaxError:
        return text


class _Code(ast.NodeTransformer):
    # Strings that are a statement of their own go; sentences are all alike.

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        alone = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if alone else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        is_said = isinstance(node.value, str) and _SENTENCE.fullmatch(node.value)
        return ast.Constant("") if is_said else node


def _git(root: Path, *arguments: str) -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    done = subprocess.run([git, *arguments], cwd=root, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def result_files(folder: Path) -> list[Path]:
    """The result files of a folder and its subfolders, without those of unfinished runs."""
    return [path for path in sorted(folder.rglob("*.json")) if not path.name.endswith(SUFFIX)]


def _lines(one: Check) -> list[str]:
    # The state of a result, and the command that makes it again.
    since = f"{len(one.changed)} files changed since in {one.commits} commits"
    why = one.why or f"{since}: {_by_folder(one.changed)}"
    measured = f"{one.name}, measured at {one.commit[:7] or 'an unknown commit'}"
    return [measured, why, f"again: {one.command}"]


def _by_folder(files: Sequence[str]) -> str:
    """The files' folders with their number of files, those with the most first.

    >>> _by_folder(["a/x.py", "b/y.py", "a/z.py"])
    'a (2), b (1)'
    """
    counts = Counter(PurePosixPath(file).parent.as_posix() for file in files)
    named = ", ".join(f"{folder} ({n})" for folder, n in counts.most_common(MOST_NAMED))
    return f"{named}, ..." if len(counts) > MOST_NAMED else named


def main(
    folder: Annotated[
        Path, typer.Argument(help="Folder of result files, with its subfolders.")
    ] = ROOT / "bench" / "results",
) -> None:
    """List results that are older than the code that they measure; exit 1 if there are any."""
    files = result_files(folder)
    if not files:
        raise ResultFileError(f"{folder}: holds no result files. Name a folder of results.")
    stale = [one for one in map(check, files) if one.is_stale]
    console = Console()
    for one in stale:
        first, *rest = _lines(one)
        console.print(literal(first, "bold"), soft_wrap=True)
        for line in rest:
            console.print(literal(f"    {line}"), soft_wrap=True)
    if stale:
        console.print(f"{len(stale)} of {len(files)} results are stale.")
        raise typer.Exit(1)
    console.print(f"{len(files)} results measure the code as it is.")
