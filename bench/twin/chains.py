"""Saved tensors that the engine can compute again: `python -m bench.twin.chains JSON` prints them.

The engine follows a plan on the twin that computes every tensor again. It finds chains of a few
operators for some; these are the ones that a plan of single tensors may name.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from bench.twin import worker
from bench.twin.methods import PLANNED


def found(model: str, profile: str, positions: list[int]) -> list[int]:
    """Positions of the tensors for which there are chains; once in a process.

    Args:
        model: of `bench.twin.models.ALL`.
        profile: of `PROFILES`.
        positions: of all tensors that a plan may name.
    """
    known: set[int] = set()

    class Step(worker.Step):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            from cswap.engine.transfer.executor import Executor

            lets_go = Executor.recompute_later

            def compute_later(executor: Executor, token: Any) -> None:
                known.add(token.position)
                lets_go(executor, token)

            patched: Any = Executor
            patched.recompute_later = compute_later

    decisions = {str(position): {"action": "recompute"} for position in positions}
    plan = {"version": 3, "decisions": decisions}
    worker.run(model, PLANNED, profile, n_steps=2, step_type=Step, plan=plan)
    return sorted(known)


if __name__ == "__main__":
    print(json.dumps(found(**json.loads(sys.argv[1]))))
