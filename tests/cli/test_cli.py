"""The command line, and what `cswap doctor` finds out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cswap
from cswap import cli, doctor
from cswap.doctor import CodecRow, Finding

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `cswap` with arguments; return exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["cswap", *arguments])
        code: int | str | None = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = leaving.code
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_help_needs_no_torch():
    code = (
        "import sys; sys.argv = ['cswap', '--help']\n"
        "from cswap.cli import main\n"
        "try: main()\n"
        "except SystemExit as e: print('left', e.code)\n"
        "print(sorted({'torch', 'numba', 'numpy'} & set(sys.modules)))"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    out = subprocess.check_output(
        [sys.executable, "-c", code], text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert "doctor" in out
    assert out.splitlines()[-2:] == ["left 0", "[]"]


def test_version(run):
    assert run("--version") == (0, f"cswap {cswap.__version__}\n", "")


def test_cswap_error_is_one_line_on_stderr(run):
    code, out, err = run("codecs", "zcv")
    assert (code, out) == (2, "")
    assert err.startswith("cswap: codec='zcv': no such codec. Did you mean 'zvc'? Known: ")
    assert err.count("\n") == 1


def test_codecs_as_json(run):
    code, out, err = run("codecs", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert (code, err) == (0, "")
    assert list(rows) == cswap.list_codecs()
    assert rows["raw"]["available"] is True
    assert rows["raw"]["lossless"] is True
    assert {"float32", "bool", "int64"} <= set(rows["raw"]["cpu"])


def test_every_available_codec_has_a_description_and_takes_something():
    rows = [row for row in doctor.survey_codecs() if row.available]
    assert rows
    assert [row.name for row in rows if not row.description or not (row.cpu or row.cuda)] == []


def test_codec_that_cannot_be_made_says_why(monkeypatch, run):
    def broken(name: str) -> object:
        raise cswap.ConfigError(f"codec={name!r}: needs lz4: pip install lz4.")

    monkeypatch.setattr("cswap.codecs.registry.get_codec", broken)
    why = "codec='lz4': needs lz4: pip install lz4."
    assert doctor.survey_codecs(["lz4"]) == (CodecRow("lz4", False, None, (), (), why),)
    code, out, _ = run("codecs", "lz4")
    assert code == 0
    assert "needs lz4" in " ".join(out.split())


def test_doctor_as_json_lists_every_part(run):
    code, out, err = run("doctor", "--json")
    report = json.loads(out)
    parts = {f["part"]: f for f in report["findings"]}
    assert (code, err, report["cpu_usable"]) == (0, "", True)
    assert list(parts) == [
        *("python", "torch", "numba", "kernels", "lz4", "zstandard", "zfpy"),
        *("CUDA device", "pinned memory", "cupy", "numba-cuda", "nvCOMP"),
    ]
    assert {n for n, f in parts.items() if f["required"]} == {"python", "torch", "numba", "kernels"}
    assert parts["torch"]["usable"] is True


def test_doctor_table_and_exit_code_when_something_required_is_missing(monkeypatch, run):
    missing = Finding("torch", False, True, "", "not installed", "pip install torch")
    extra = Finding("lz4", False, False, "", "not installed", "'cswap[host]'")
    monkeypatch.setattr(doctor, "_PROBES", (lambda: missing, lambda: extra))
    code, out, _ = run("doctor")
    assert code == 1
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [["torch", "NO"], ["lz4", "no"]]
    assert "cswap[host]" in out  # not eaten as markup
    assert out.splitlines()[-1] == "Swapping on the CPU: does not work; see NO above."


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("", ""),
        ("raise OSError('libcudart.so.13: not found')", "OSError: libcudart.so.13: not found"),
        ("import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
    ],
)
def test_a_package_that_does_not_load_is_reported(tmp_path, monkeypatch, source, problem):
    name = f"cswap_probe_{len(problem)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    expected = f"import fails: {problem}" if problem else ""
    assert doctor._import_problem(name) == expected


def test_a_package_that_is_not_there_is_not_installed():
    assert doctor._import_problem("cswap_no_such_package") == "not installed"
    assert doctor._import_problem("cswap_no_such_package.part") == "not installed"


def test_kernel_cache_counts_only_fresh_entries_of_this_python(tmp_path):
    module = tmp_path / "zvc.py"
    module.write_text("")
    os.utime(module, (1000, 1000))
    assert not doctor._is_cached(module, tmp_path, "py311")
    for name, written in [("zvc.f-1.py311.nbi", 999), ("zvc.f-1.py312.nbi", 1001)]:
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (written, written))
    assert not doctor._is_cached(module, tmp_path, "py311")
    assert doctor._is_cached(module, tmp_path, "py312")


def test_dtypes_are_abbreviated_by_group():
    everything = doctor._known_dtypes()
    assert doctor.abbreviate(everything) == "all"
    assert doctor.abbreviate(n for n in everything if n != "bfloat16").startswith("float64, ")
    assert doctor.abbreviate(["float64", "float32", "float16", "bfloat16"]) == "float"
    assert doctor.abbreviate([]) == ""


# cswap bench: the package's experiments.


def test_bench_writes_into_the_current_folder(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    torch.save(torch.arange(1 << 10), "mine.pt")
    code, out, _ = run("bench", "codecs", "--tensors", "mine.pt", "--codecs", "bitpack")
    assert code == 0, out
    found = json.loads((tmp_path / "cswap-results" / "codecs-own.json").read_text())
    assert found["environment"]["command"].startswith("cswap bench codecs --tensors mine.pt")
    code, out, err = run("bench", "report")
    assert code == 0, err
    page = (tmp_path / "cswap-results" / "report.html").read_text("utf-8")
    assert "bitpack" in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cswap-results", "mine.pt"]


def test_bench_imports_experiments_when_they_run():
    code = (
        "import sys, cswap.cli\n"
        "print([n for n in sys.modules if n.startswith('cswap.experiments')])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    found = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert found.strip() == "[]"


def test_bench_says_where_the_other_benchmarks_are(run):
    code, out, err = run("bench", "demo")
    assert (code, out) == (2, "")
    assert err.startswith("cswap: bench 'demo': the package has codecs, accuracy, report.")
    assert err.count("\n") == 1
    assert "`python -m bench`" in err


@pytest.mark.parametrize(("command", "option"), [("accuracy", "--task"), ("codecs", "--record")])
def test_bench_says_which_option_it_cannot_do_without(run, command, option):
    code, out, err = run("bench", command)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert option in err
