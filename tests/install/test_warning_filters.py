"""Python's filters of warnings belong to the program: installing and removing cswap leaves them."""

from __future__ import annotations

from importlib.util import find_spec

TRAINING = """
import ast
import sys
import warnings

import torch
from torch import nn

import cswap

torch.manual_seed(0)
layers = [nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 1)]
model, x = nn.Sequential(*layers), torch.randn(256, 96)
optimizer = torch.optim.SGD(model.parameters(), 0.01)  # imports sympy, which adds a filter
warnings.filterwarnings("ignore", "of the program", UserWarning)
before = list(warnings.filters)
handle = cswap.install(model, min_bytes=1024, **ast.literal_eval(sys.argv[1]))
for number in range(400):
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    goal = handle.goal
    if number >= 11 and (goal is None or goal.plans):
        break
planned = goal is not None and goal.plans > 0
handle.remove()
assert warnings.filters == before, [f for f in warnings.filters if f not in before]
print("solved" if planned and "scipy.optimize" in sys.modules else "not solved")
"""


def test_installing_training_and_removing_leave_the_filters(forked):
    done = forked.run(TRAINING, {"fit": "min", "lossy": "int8"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("not solved\n" if find_spec("scipy") is None else "solved\n")
