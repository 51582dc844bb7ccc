"""No files import each other in a circle, type-only imports included.

Two drawings of the imports. An import at the top of a file, under ``if TYPE_CHECKING`` or not,
counts among all files of the repository. An import in a function counts among the files of one
folder only: between folders, it is how a command reaches a part that it does not always need.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "cswap": ROOT / "cswap",
    "cswap_kernels": ROOT / "kernels" / "cswap_kernels",
    "bench": ROOT / "bench",
}


def files_by_module():
    found = {}
    for package, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = [package, *file.relative_to(folder).with_suffix("").parts]
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = file
    return found


@cache
def parsed(file):
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports_of(module, file, in_functions):
    """Full names of all that a file imports: modules, and names in modules."""
    found: set[str] = set()
    waiting: list[ast.AST] = [parsed(file)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, file, node)
            found.update(f"{base}.{alias.name}" for alias in node.names)
        elif in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting.extend(ast.iter_child_nodes(node))
    return found


def absolute(module, file, node):
    if not node.level:
        return node.module
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def graph(files, in_functions):
    """Modules by the module that imports them."""
    found = {}
    for module, file in files.items():
        names = imports_of(module, file, in_functions)
        # A name is a module, or in one. A package that a module is in holds a docstring.
        modules = {name if name in files else name.rpartition(".")[0] for name in names}
        found[module] = (modules & files.keys()) - {module}
    return found


def circles(imports):
    """Groups of files of which each imports, over others, each other one."""
    reached = {module: reachable(imports, module) for module in imports}
    groups = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in imports
    }
    return {group for group in groups if group}


def reachable(imports, module):
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        new = imports[waiting.pop()] - seen
        seen |= new
        waiting.extend(new)
    return seen


def test_no_circle_of_imports_at_the_top_of_files():
    assert circles(graph(files_by_module(), in_functions=False)) == set()


def test_no_circle_among_the_files_of_a_folder():
    folders: dict[Path, dict[str, Path]] = {}
    for module, file in files_by_module().items():
        folders.setdefault(file.parent, {})[module] = file
    found = [circle for files in folders.values() for circle in circles(graph(files, True))]
    assert found == []


@pytest.mark.parametrize(
    ("text", "at_the_top", "anywhere"),
    [
        ("import two", {"two"}, {"two"}),
        ("if TYPE_CHECKING:\n from two import X", {"two.X"}, {"two.X"}),
        ("def f():\n import two", set(), {"two"}),
        ("from . import two", {"one.two"}, {"one.two"}),
        ("from .two import X", {"one.two.X"}, {"one.two.X"}),
    ],
)
def test_imports_are_found(text, at_the_top, anywhere, tmp_path):
    file = tmp_path / "a.py"
    file.write_text(text)
    assert imports_of("one.a", file, in_functions=False) == at_the_top
    assert imports_of("one.a", file, in_functions=True) == anywhere


def test_circles_are_found():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f"}, "f": {"e"}}
    assert circles(imports) == {frozenset("abc"), frozenset("ef")}
