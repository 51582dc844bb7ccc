"""What is installed, under which names, and what importing it costs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import cswap

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cswap", "cswap_kernels")


def run_python(code: str, cwd: Path = ROOT) -> str:
    """Run code in a fresh interpreter that finds both packages, installed or not."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    return subprocess.check_output(
        [sys.executable, "-c", code], cwd=cwd, text=True, env={**os.environ, "PYTHONPATH": path}
    )


def package_inits() -> list[Path]:
    # All but two: cswap.testing is public under that name, and was cut up for its length only;
    # cswap.plan can be called.
    found = {*ROOT.glob("cswap/*/**/__init__.py"), *ROOT.glob("kernels/**/__init__.py")}
    return sorted(found - {ROOT / "cswap/testing/__init__.py", ROOT / "cswap/plan/__init__.py"})


# The folder kernels/ must never answer to `import kernels` (kernels/README.md).


def test_folder_kernels_is_not_a_package():
    assert list((ROOT / "kernels").glob("*.py")) == []


def test_installed_cswap_adds_no_module_called_kernels(tmp_path):
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else '')"
    found = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    assert str(ROOT) not in found


def test_kernels_resolve_to_the_checkout():
    spec = importlib.util.find_spec("cswap_kernels")
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).is_relative_to(ROOT)


def test_every_kernel_module_has_one_name():
    importlib.import_module("cswap_kernels.tiles")
    here = str(ROOT / "kernels")
    names = [n for n, m in sys.modules.items() if here in str(getattr(m, "__file__", None))]
    assert names
    assert [n for n in names if n.partition(".")[0] != "cswap_kernels"] == []


# What importing drags in; import-linter does not see what a package's __init__ imports.


def test_kernels_import_neither_torch_nor_cswap():
    code = (
        "import sys, importlib\n"
        "from pkgutil import walk_packages as walk\n"
        "import cswap_kernels as k\n"
        "names = [m.name for m in walk(k.__path__, 'cswap_kernels.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names), sorted({'torch', 'cupy', 'cswap'} & set(sys.modules)))"
    )
    count, _, foreign = run_python(code).strip().partition(" ")
    assert int(count) > 0
    assert foreign == "[]"


@pytest.mark.parametrize("module", ["cswap", "cswap.errors", "cswap.config", "cswap.schema.tensor"])
def test_lower_layers_import_without_torch(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'numba', 'numpy'}} & set(sys.modules)))"
    assert run_python(code).strip() == "[]"


def test_package_inits_hold_a_docstring_only():
    bodies = {p: ast.parse(p.read_text("utf-8")).body for p in package_inits()}
    assert len(bodies) > 2
    for path, body in bodies.items():
        assert [type(node).__name__ for node in body] == ["Expr"], path


# The public names.


@pytest.mark.parametrize("name", cswap.__all__)
def test_public_name_resolves(name):
    value = getattr(cswap, name)
    if name not in ("__version__", "plan"):
        assert value.__name__ == name


def test_the_package_plan_can_be_called():
    with pytest.raises(cswap.ConfigError, match="trace"):
        cswap.plan("no such file", "v100-pcie3")  # type: ignore[operator]
    assert cswap.plan.planner is not None  # and is still a package


def test_public_names_are_sorted_and_complete():
    assert list(cswap.__all__) == sorted(cswap.__all__)
    assert sorted([*cswap._EXPORTS, "plan", "__version__"]) == cswap.__all__
    assert dir(cswap) == cswap.__all__


def test_type_checkers_see_the_same_names():
    tree = ast.parse((ROOT / "cswap/__init__.py").read_text("utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If) and "not" not in ast.unparse(n.test))
    imports = [n for n in block.body if isinstance(n, ast.ImportFrom)]
    assert {i.names[0].asname: i.module for i in imports} == {**cswap._EXPORTS, "plan": "cswap"}


def test_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'cswap' has no attribute 'swaping'"):
        _ = cswap.swaping  # type: ignore[attr-defined]


# Files that must agree with one another.


def make_targets() -> dict[str, str]:
    text = (ROOT / "Makefile").read_text("utf-8")
    return dict(re.findall(r"^([a-z][a-z-]*):.*## (.+)$", text, re.MULTILINE))


def test_makefile_is_short_and_every_target_is_explained():
    text = (ROOT / "Makefile").read_text("utf-8")
    phony = re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE)[0].split()
    assert set(phony) == set(make_targets())
    assert len(phony) <= 14


@pytest.mark.parametrize("text", [".ci/run", "README.md", "CONTRIBUTING.md", "tests/README.md"])
def test_make_targets_that_texts_name_exist(text):
    named = set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)*)`", (ROOT / text).read_text("utf-8")))
    named |= set(re.findall(r"^make ([a-z-]+)", (ROOT / text).read_text("utf-8"), re.MULTILINE))
    assert named
    assert named <= set(make_targets())


def test_constraints_pin_every_direct_dependency():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["host"], *extras["bench"], *extras["dev"]]
    for extra in ("docs", "transformers", "lightning", "accelerate", "peers", "tune"):
        wanted += extras[extra]
    names = {re.split(r"[<>=!\[; ]", requirement)[0] for requirement in wanted}
    pins = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    assert names - set(pins) == set()


@pytest.mark.slow
def test_wheel_holds_two_packages_and_nothing_else(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    pytest.importorskip("pip")
    # A copy: a build leaves a folder behind that would slip deleted files into the next wheel.
    for folder in ("cswap", "kernels"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / "source" / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path / "source")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", tmp_path, tmp_path / "source"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    info = f"cswap-{cswap.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, info}
    in_checkout = {
        *(str(p.relative_to(ROOT)) for p in ROOT.glob("cswap/**/*.py")),
        *(str(p.relative_to(ROOT / "kernels")) for p in ROOT.glob("kernels/**/*.py")),
    }
    assert {name for name in names if name.endswith(".py")} == in_checkout
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert f"{info}/licenses/LICENSE" in names
