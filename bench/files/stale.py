"""`python -m bench stale`: committed results that are older than the code that they measure.

A result names the code that its figures depend on and the digests of its files
(`cswap.experiments.files.measured_code`). Older files have a commit only: the code at that commit
is compared then. Messages to people may be others since then. `make release` refuses results that
are stale.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from cswap.experiments.files.kinds import ResultFileError, kind_of, load
from cswap.experiments.files.measured_code import (
    ROOT,
    SUFFIXES,
    differ_in_messages_alone,
    digest,
    digests,
    fingerprint,
    included,
    is_measured,
    paths_of,
)
from cswap.experiments.files.resumable import SUFFIX
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MOST_NAMED: Final = 4
"""Folders with changed files that are named per result."""


@dataclass(frozen=True, slots=True)
class Check:
    """One result file against today's code.

    Attributes:
        name: name of the file, relative to the repository's root.
        commit: commit of the measurement; "" if unknown.
        command: command that makes the result.
        changed: files that differ, are gone, or are new since then.
        why: the reason why nothing could be compared; "" if something was.
        commits: number of later commits that touch the changed files; None without git.
    """

    name: str
    commit: str
    command: str
    changed: tuple[str, ...]
    why: str = ""
    commits: int | None = None

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
    commit = str(environment.get("cswap_commit") or "")
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
    about = (name, commit, str(environment.get("command") or "an unknown command"))
    record = environment.get("measures")
    today = paths_of(kind_of(document, path).name)
    if isinstance(record, dict) and record.get("paths") and isinstance(record.get("files"), dict):
        paths = (*included(record["paths"]), *(p for p in today if p.startswith("!")))
        before: dict[str, str] | None = {
            n: one for n, one in record["files"].items() if is_measured(n, paths)
        }
    else:
        paths = today
        if environment.get("cswap_modified"):
            return Check(*about, (), "measured with changes that were not committed")
        before = at_commit(commit, paths, root)
    if not paths:
        return Check(*about, (), "nobody has said which code it measures")
    if before is None:
        return Check(*about, (), "its commit is not known here")
    now = fingerprint(paths, root)
    changed = tuple(
        name
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
        and not _is_reworded(commit, name, before.get(name), root)
    )
    return Check(*about, changed, commits=_commits_since(commit, changed, root))


def at_commit(commit: str, paths: Iterable[str], root: Path = ROOT) -> dict[str, str] | None:
    """`fingerprint` of the code at a commit; None without git or for a commit that it lacks."""
    paths = tuple(paths)
    command = ("ls-tree", "-r", "--name-only", commit, "--", *included(paths))
    listed = _git(root, *command) if commit else None
    if listed is None:
        return None
    names = [n for n in listed.splitlines() if n.endswith(SUFFIXES) and is_measured(n, paths)]
    texts = {name: _git(root, "show", f"{commit}:{name}") or "" for name in names}
    return digests(texts.items())


def _is_reworded(commit: str, name: str, digest_then: str | None, root: Path) -> bool:
    # Whether a message alone is another one. The commit must have the text that was measured.
    file = root / name
    if file.suffix != ".py" or not (digest_then and file.is_file()):
        return False
    text = _git(root, "show", f"{commit}:{name}") if commit else None
    if text is None or digest(name, text) != digest_then:
        return False
    return differ_in_messages_alone(text, file.read_text(encoding="utf-8"))


def _commits_since(commit: str, changed: Sequence[str], root: Path) -> int | None:
    if not commit or not changed:
        return None
    listed = _git(root, "log", "--format=%h", f"{commit}..HEAD", "--", *changed)
    return None if listed is None else len(listed.splitlines())


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
    since = "" if one.commits is None else f" in {one.commits} commits"
    why = one.why or f"{len(one.changed)} files changed since{since}: {_by_folder(one.changed)}"
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
