"""Copies of an installed model come without cswap; the original keeps it."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import cswap
from cswap.errors import ConfigError
from cswap.module_patch import is_marked
from cswap.schema.plan import Decision, Plan

ALL: dict[str, Any] = {"min_bytes": 0, "codec": "zvc"}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 8)))


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": through_torch_save,
    "AveragedModel": lambda m: torch.optim.swa_utils.AveragedModel(m).module,
    "quantize_dynamic": lambda m: torch.ao.quantization.quantize_dynamic(m, {nn.Linear}),
}


def traces(model):
    """Of cswap, on a model."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    names = {"forward", "__getstate__", "__prepare_scriptable__", "_replicate_for_data_parallel"}
    return hooks, [sorted(names & set(vars(m))) for m in model.modules() if names & set(vars(m))]


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.filterwarnings("ignore:torch.*quantiz")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_copy_has_nothing_of_cswap(how):
    model, x = net(), torch.randn(16, 64)
    expected = model(x)
    with cswap.install(model, **ALL) as handle:
        model(x).sum().backward()  # state that steps leave is copied along, or not at all
        copied = COPIES[how](model)
        packed = handle.stats.packed
        out = copied(x)
        assert handle.stats.packed == packed
        model(x)
        assert handle.stats.packed > packed
    assert traces(copied) == (0, [])
    assert traces(model) == (0, [])
    assert how == "quantize_dynamic" or torch.equal(out, expected)


def test_hooks_and_attributes_of_others_are_copied():
    model = net()
    seen: list[int] = []
    model.register_forward_hook(Seen(seen), always_call=True)
    model[0].register_forward_pre_hook(Seen(seen), with_kwargs=True)
    with cswap.install(model, **ALL):
        copied = copy.deepcopy(model)
    copied(torch.randn(4, 64))
    assert len(copied._forward_hooks) == len(copied._forward_hooks_always_called) == 1
    assert len(copied[0]._forward_pre_hooks) == 1
    assert seen == []
    assert [len(h.calls) for h in copied._forward_hooks.values()] == [2]  # both count on one list


class Seen:
    """A hook that notes its calls in a list."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, *_args):
        self.calls.append(1)


def test_recomputed_modules_are_copied_as_they_were():
    model = net()
    plan = Plan({0: Decision("recompute", module="2")})
    with cswap.install(model, plan=plan, **ALL):
        assert "forward" in vars(model[2])
        copied = copy.deepcopy(model)
    assert traces(copied) == (0, [])
    assert traces(model) == (0, [])


def test_a_pickled_model_is_read_where_cswap_is_not_installed(tmp_path, forked):
    path = tmp_path / "model.pt"
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with cswap.install(model, **ALL):
        torch.save(model, path)
    program = (
        "import sys\n"
        "of_cswap = {n for n in sys.modules if n.partition('.')[0].startswith('cswap')}\n"
        "sys.modules.update(dict.fromkeys({'cswap', *of_cswap}))  # importing them raises\n"
        f"import torch; model = torch.load({str(path)!r}, weights_only=False)\n"
        "print(model(torch.ones(1, 4)).shape)"
    )
    done = forked.run(program)
    assert done.stdout.strip() == "torch.Size([1, 4])", done.stderr


@pytest.mark.slow
def test_an_installed_model_is_an_argument_of_a_spawned_process():
    model = nn.Linear(4, 4)
    context = multiprocessing.get_context("spawn")
    with cswap.install(model, **ALL):
        process = context.Process(target=bool, args=(model,))
        process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripts_are_refused_in_words():
    model = net()
    with cswap.install(model, **ALL):
        with pytest.raises(ConfigError, match=r"torch\.jit\.script: .*remove\(\)"):
            torch.jit.script(model)
        with pytest.raises(ConfigError, match=r"torch\.jit\.script"):
            torch.jit.script(model[2])
    scripted = torch.jit.script(model)
    with pytest.raises(ConfigError, match="a scripted model"):
        cswap.install(scripted)
    with cswap.install(nn.Sequential(nn.Linear(64, 64), scripted), **ALL) as handle:
        pass
    assert handle.stats.packed == 0


class OwnCopy(nn.Sequential):
    """Copies its attributes one by one, as many classes do."""

    def __deepcopy__(self, memo):
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            new.__dict__[name] = copy.deepcopy(value, memo)
        return new


@pytest.mark.parametrize("kind", ["fx", "own"])
def test_classes_that_copy_themselves(kind):
    model: nn.Module = OwnCopy(nn.Linear(64, 64), nn.GELU())
    if kind == "fx":
        model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    x = torch.randn(4, 64)
    with cswap.install(model, **ALL) as handle:
        copied = copy.deepcopy(model)
        assert torch.equal(copied(x), model(x))
        assert not any(is_marked(value) for value in copied.__dict__.values())
        before = handle.stats.packed
        model(x).sum().backward()
        assert handle.stats.packed > before
    assert torch.equal(copy.deepcopy(model)(x), copied(x))
