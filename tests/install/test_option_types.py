"""The options by name, as editors and type checkers know them.

Comments ``type: ignore`` are part of these tests: mypy, which runs over this file in `make check`,
says so if one of them ignores nothing.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pydoc
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
from torch import nn

import cswap
from cswap.config import SwapConfig
from cswap.errors import ConfigError
from cswap.option_types import SwapOptions

PACKAGE = Path(cswap.__file__).parent

PARSED = {"exclude", "include", "recompute", "plan", "schedule"}
"""Options of many forms, which a config holds in another one: there, their type is Any."""


def test_the_options_are_those_of_a_config():
    fields = {field.name: field.type for field in dataclasses.fields(SwapConfig)}
    named = {
        name: getattr(kind, "__forward_arg__", kind)
        for name, kind in SwapOptions.__annotations__.items()
    }
    assert list(named) == list(fields)
    assert {name for name, kind in fields.items() if kind == "Any"} == PARSED
    assert {n: kind for n, kind in named.items() if n not in PARSED} == {
        n: kind for n, kind in fields.items() if n not in PARSED
    }
    assert all(named[n] != "Any" for n in PARSED)
    assert not SwapOptions.__required_keys__


@pytest.mark.parametrize("function", [cswap.install, cswap.swapping])
def test_functions_name_them_readably(function):
    options = inspect.signature(function).parameters["options"]
    assert str(options) == "**options: 'Unpack[SwapOptions]'"
    assert "**options: 'Unpack[SwapOptions]'" in pydoc.render_doc(function)
    if sys.version_info >= (3, 11):
        assert get_type_hints(function)["options"].__args__ == (SwapOptions,)


def test_a_misspelt_or_wrong_option_is_an_error_for_checkers_too():
    with pytest.raises(ConfigError, match=r"exclud: no such option\. Did you mean 'exclude'"):
        cswap.install(exclud="head")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="min_byte"):
        cswap.swapping(min_byte=0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="keep_last"):
        cswap.install(nn.ReLU(), keep_last="many")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="exclude"):
        cswap.swapping(exclude=3)  # type: ignore[arg-type]
    options: cswap.SwapOptions = {"lossi": "int8"}  # type: ignore[typeddict-unknown-key]
    with pytest.raises(ConfigError, match="lossi"):
        cswap.swapping(**options)


GOOD: list[cswap.SwapOptions] = [
    {},
    {"codec": "zvc", "min_bytes": "1KiB", "budget": 1 << 30, "seed": 3},
    {"codec": lambda profile: "raw" if profile.nbytes > 9 else "keep"},
    {"codec": {"float32": "zvc", "op:gelu": "raw"}, "lossy": 0.01, "spill_dir": PACKAGE},
    {"exclude": nn.ReLU, "include": ["head", nn.GELU], "recompute": ("0", "blocks.*")},
    {"exclude": "op:softmax", "include": {nn.ReLU, nn.GELU}, "fit": "min", "slowdown": 1.2},
    {"plan": {"version": 1, "decisions": {}}, "keep_last": 2, "verify": True},
    {"plan": PACKAGE / "plan.json", "schedule": "schedule.json", "guard_error": 1},
]


@pytest.mark.parametrize("options", GOOD)
def test_forms_that_checkers_accept_are_accepted(options):
    config = SwapConfig.resolve(**options)
    assert all(getattr(config, name) is not None for name in options)


def test_a_checkers_package_is_not_imported_to_run():
    # typing.Unpack is of Python 3.11, so checkers take it from typing_extensions.
    imported = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text("utf-8")
        if "typing_extensions" not in text:
            continue
        tree = ast.parse(text)
        hidden = {
            id(node)
            for block in ast.walk(tree)
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for statement in block.body
            for node in ast.walk(statement)
        }
        imported += [
            path.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in hidden
            if "typing_extensions" in ast.unparse(node)
        ]
    assert imported == []
