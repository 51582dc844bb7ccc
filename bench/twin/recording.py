"""One plain step of a model on the twin, as data: `python -m bench.twin.recording JSON` prints it.

"ops" are the device's work in order: the storages of this step that it reads and writes, and the
allocator's bytes meanwhile. "storages" have operators, by index: of birth ("born"); before which
they were "freed", or "saved" by the model; of forward, with the loss, that have "written" them, and
the last that has "read" them; the first of backward that "used" them. Large saved ones have the
lossless codec of the smallest encoding, and its ratio.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bench.twin import worker
from bench.twin.operators import changed_by

LARGE_BYTES: Final = 1 << 20
CODECS: Final = ("zvc", "expk", "zvc+expk", "bitpack")


class _Recorder(TorchDispatchMode):
    def __init__(self, cuda: Any) -> None:
        super().__init__()
        self._cuda = cuda
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self.ops: list[dict[str, Any]] = []
        self.storages: list[dict[str, Any]] = []
        self._known = dict.fromkeys(cuda._blocks.values(), -1)  # noqa: SLF001 - resident memory
        self._given: list[int] = []  # storages that backward was given since the last operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        n_spans, kwargs = len(self._cuda.spans), kwargs or {}
        found = func(*args, **kwargs)
        if len(self._cuda.spans) > n_spans:  # no view
            phase = "forward" if torch._C._current_autograd_node() is None else "backward"  # noqa: SLF001
            changed = (found, changed_by(func, args, kwargs))
            self.add(phase, self._of((args, kwargs)), self._of(changed))
        return found

    def add(self, phase: str, reads: list[int], writes: list[int]) -> None:
        """Record the work that was issued last."""
        at, blocks = len(self.ops), self._cuda._blocks  # noqa: SLF001
        for block in [b for b in self._known if blocks.get(b.start) is not b]:
            if (i := self._known.pop(block)) >= 0:
                self.storages[i]["freed"] = at
        if phase == "forward":
            for i in reads + writes:
                self.storages[i]["read"] = at
            for i in writes:
                self.storages[i]["written"].append(at)
        while self._given:
            self.storages[self._given.pop()].setdefault("used", at)
        _, name, began_s, ended_s = self._cuda.spans[-1]
        seconds = round(ended_s - began_s, 12)  # the clock's last digits depend on its past
        op = {"name": name, "seconds": seconds, "reads": reads}
        self.ops.append({**op, "writes": writes, "live_bytes": self._cuda.allocated_bytes})

    def _pack(self, x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        from bench.twin.values import profile_for  # imports cswap, which the twin has to precede
        from cswap.advisor.candidates import predicted_ratio

        of = self._of(x)
        for s in (self.storages[i] for i in of):
            if s.setdefault("saved", len(self.ops)) == len(self.ops) and s["nbytes"] >= LARGE_BYTES:
                known = profile_for(self._cuda, x)
                s["ratio"], s["codec"] = max((predicted_ratio(c, known), c) for c in CODECS)
        return x if x.is_leaf else x.detach(), of

    def _unpack(self, packed: tuple[torch.Tensor, list[int]]) -> torch.Tensor:
        self._given += packed[1]
        return packed[0]

    def _of(self, tensors: object) -> list[int]:
        found = set()
        for x in pytree.tree_leaves(tensors):
            block = self._cuda._find(x) if isinstance(x, torch.Tensor) else None  # noqa: SLF001
            if block is not None and block not in self._known:
                self._known[block] = len(self.storages)
                s = {"nbytes": self._cuda.rounded(x.untyped_storage().nbytes()), "written": []}
                self.storages.append({**s, "dtype": str(x.dtype)[6:], "born": len(self.ops)})
            found.add(self._known.get(block, -1))
        return sorted(found - {-1})


def record(model: str, profile: str) -> dict[str, Any]:
    """Train a model by name on the profile of that name; a process does so once."""
    found: dict[str, Any] = {}

    class Step(worker.Step):
        def __call__(self) -> dict[str, Any]:
            recorder, net = _Recorder(self._cuda), self._net

            def hooked(x: torch.Tensor) -> Any:
                with recorder.hooks:
                    return net(x)

            self._net = hooked
            with recorder:
                row = super().__call__()
            self._net = net
            recorder.add("optimizer", [], [])
            found.update(ops=recorder.ops, storages=recorder.storages)
            return row

    # The first step makes the states of the optimizer.
    worker.run(model, "plain", profile, n_steps=3, step_type=Step)
    return found


if __name__ == "__main__":
    print(json.dumps(record(**json.loads(sys.argv[1]))))
