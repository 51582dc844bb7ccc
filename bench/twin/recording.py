"""One plain step of a model on the twin, as data: `python -m bench.twin.recording JSON` prints it.

The argument is that of `record`. "ops" are the device's work in order: name, kind (elementwise,
product, conv, attention), seconds, phase (forward with the loss, backward, optimizer), storages that
it reads and writes, and the allocator's bytes meanwhile. "storages" are the memory allocated in the
step: bytes; dtype; ops by index: of its birth, before which it was freed, of forward that wrote it,
the last of forward that used it, before which the model saved it, the first of backward that was
given it; and if it is large, the lossless codec of the smallest encoding, and its ratio.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bench.twin import operators, worker
from bench.twin.optimum import LEAST_BYTES

if TYPE_CHECKING:
    from bench.twin.cuda import ClockedCuda

N_STEPS: Final = 3
"""The last is recorded; the first makes the optimizer's states."""


class _Recorder(TorchDispatchMode):
    def __init__(self, cuda: ClockedCuda) -> None:
        super().__init__()
        self._cuda: Any = cuda
        self.ops: list[dict[str, Any]] = []
        self.storages: list[dict[str, Any]] = []
        self._known = dict.fromkeys(self._cuda._blocks.values(), -1)  # noqa: SLF001 - resident
        self._given: list[int] = []  # what backward was given since the last operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._sweep()
        n_spans, at = len(self._cuda.spans), len(self.ops)
        found = func(*args, **(kwargs or {}))
        if len(self._cuda.spans) == n_spans:
            return found  # a view
        changed = operators._changed(func, args, kwargs or {})  # noqa: SLF001
        reads, writes = self._of((args, kwargs)), self._of((found, changed))
        backward = torch._C._current_autograd_node() is not None  # type: ignore[attr-defined]  # noqa: SLF001
        if not backward:
            for i in reads + writes:
                self.storages[i]["read"] = at
            for i in writes:
                self.storages[i]["written"].append(at)
        for i in self._given:
            self.storages[i].setdefault("used", at)
        self._given.clear()
        self._add("backward" if backward else "forward", reads, writes)
        return found

    def _add(self, phase: str, reads: list[int], writes: list[int]) -> None:
        # The work that was issued last.
        _, name, began_s, ended_s = self._cuda.spans[-1]
        kind = next((k for k in ("attention", "conv") if k in name), "elementwise")
        self.ops.append({
            "name": name, "kind": "product" if name in operators.PRODUCTS else kind,
            "seconds": round(ended_s - began_s, 12),  # the clock's last digits depend on its past
            "phase": phase, "reads": reads, "writes": writes,
            "live_bytes": self._cuda.allocated_bytes,
        })  # fmt: skip

    def pack(self, x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        of = self._of(x)
        for s in (self.storages[i] for i in of):
            if "saved" not in s and s["nbytes"] >= LEAST_BYTES:
                s["ratio"], s["codec"] = _smallest(self._cuda, x)
            s.setdefault("saved", len(self.ops))
        return x if x.is_leaf else x.detach(), of

    def unpack(self, packed: tuple[torch.Tensor, list[int]]) -> torch.Tensor:
        self._given += packed[1]
        return packed[0]

    def _of(self, tensors: object) -> list[int]:
        # Storages of these tensors, without resident ones.
        found = set()
        for x in pytree.tree_leaves(tensors):
            block = self._cuda._find(x) if isinstance(x, torch.Tensor) else None  # noqa: SLF001
            if block is None or block.stream is None:
                continue
            if block not in self._known:
                self._known[block], dtype = len(self.storages), str(x.dtype)[6:]
                s = {"dtype": dtype, "born": len(self.ops), "written": [], "read": -1}
                s["nbytes"] = self._cuda.rounded(x.untyped_storage().nbytes())
                self.storages.append(s)
            found.add(self._known[block])
        return sorted(found - {-1})

    def _sweep(self) -> None:
        blocks = self._cuda._blocks  # noqa: SLF001
        for block in [b for b in self._known if blocks.get(b.start) is not b]:
            if (i := self._known.pop(block)) >= 0:
                self.storages[i]["freed"] = len(self.ops)

    def end(self) -> dict[str, Any]:
        """The recording, with the optimizer's work."""
        self._sweep()
        self._add("optimizer", [], [])
        for s in self.storages:
            s.setdefault("freed", len(self.ops))
        return {"ops": self.ops, "storages": self.storages}


def _smallest(cuda: ClockedCuda, x: torch.Tensor) -> tuple[float, str]:
    from bench.twin.values import profile_for  # after the process is the twin
    from cswap.advisor.candidates import foretold_ratio
    from cswap.codecs.registry import compositions, get_codec, installed_codecs

    codecs = [c for c in installed_codecs() if not c.verbatim]
    codecs = [c for c in (*codecs, *map(get_codec, compositions(codecs))) if c.lossless]
    return max((foretold_ratio(c, profile_for(cuda, x)) or 1.0, c.name) for c in codecs)


def record(model: str, profile: str) -> dict[str, Any]:
    """Train a model by name on the profile of that name; a process does so once."""
    found: dict[str, Any] = {}

    class Step(worker._Step):  # noqa: SLF001
        def __call__(self) -> dict[str, Any]:
            recorder, net = _Recorder(self._cuda), self._net

            def hooked(x: torch.Tensor) -> Any:
                with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
                    return net(x)

            self._net = hooked
            with recorder:
                row = super().__call__()
            self._net = net
            found.update(recorder.end())
            assert max(op["live_bytes"] for op in found["ops"]) == row["peak_bytes"]
            return row

    worker._Step = Step  # type: ignore[misc]  # noqa: SLF001
    worker.run(model, "plain", profile, n_steps=N_STEPS)
    return found


if __name__ == "__main__":
    print(json.dumps(record(**json.loads(sys.argv[1]))))
