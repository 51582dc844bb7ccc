"""The arguments of a checkpointed function are, in its second forward, the objects they were.

Note [arguments of a second forward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Without hooks, `torch.utils.checkpoint` gives its function the very tensors that it was given the
first time. Under any saved-tensor hooks, torch makes a new tensor each time that one is unpacked,
so an argument that was given twice comes back as two tensors. A function that asks whether they are
one (`nn.MultiheadAttention` does) takes another branch then: torch raises an error, or, if what is
saved there has the same sizes, gradients are silently wrong.

So the arguments are noted by weak references, which hold no memory. An argument that somebody else
still holds, such as the caller's list, is given itself, unless it was modified: other libraries'
hooks may have a copy of before. The others are gone, and can be compared with each other only: of
those that were one object, the first one that is unpacked is given for all. Views of one memory
were different objects, and stay such. Each is unpacked all the same, which finds those that were
modified in place.

torch keeps the arguments by methods of two private classes, of which a version has one.
"""

from __future__ import annotations

import weakref
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import checkpoint

from cswap import hook_stack

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Arguments:
    # Of one call, in order.

    __slots__ = ("_first", "_originals", "_versions")

    def __init__(self, args: Sequence[Any]) -> None:
        numbers: dict[int, int] = {}
        self._first = [numbers.setdefault(id(x), n) for n, x in enumerate(args)]
        self._originals = [weakref.ref(x) if isinstance(x, torch.Tensor) else None for x in args]
        self._versions = [_version(x) for x in args]

    def restored(self, found: Sequence[Any]) -> list[Any]:
        # Args: found: the arguments as torch has unpacked them.
        restored: list[Any] = []
        known = zip(self._first, self._originals, self._versions, strict=True)
        for x, (first, reference, version) in zip(found, known, strict=True):
            original = None if reference is None else reference()
            if version is not None and original is not None and _version(original) == version:
                restored.append(original)
            elif first < len(restored):
                restored.append(restored[first])
            else:
                restored.append(x)
        return restored


def _version(x: Any) -> int | None:
    # None: no tensor, or one without a version, inside of vmap or jvp.
    try:
        return x._version if isinstance(x, torch.Tensor) else None  # noqa: SLF001
    except RuntimeError:
        return None


def _watch_frames(frames: Any) -> None:
    # From torch 2.13 on.
    save, get = frames.save_inputs, frames.get_inputs

    @wraps(save)
    def save_inputs(frame: Any, *args: Any) -> None:
        save(frame, *args)
        if hook_stack.top(True) is not None:
            frame.cswap_arguments = _Arguments(args)

    @wraps(get)
    def get_inputs(frame: Any) -> Any:
        arguments = getattr(frame, "cswap_arguments", None)
        return get(frame) if arguments is None else arguments.restored(get(frame))

    frames.save_inputs, frames.get_inputs = save_inputs, get_inputs


def _watch_nodes(nodes: Any) -> None:
    # Before torch 2.13.
    set_up = nodes.setup_context

    @wraps(set_up)
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        set_up(ctx, inputs, output)
        if hook_stack.top(True) is not None:
            # The first input is a tensor of torch's own, which is not given back.
            arguments, get_args = _Arguments(inputs[1:]), ctx.get_args
            ctx.get_args = lambda tensors: arguments.restored(get_args(tensors))

    nodes.setup_context = staticmethod(setup_context)


def _watch() -> None:
    frames = getattr(checkpoint, "_CheckpointFrame", None)
    nodes = getattr(checkpoint, "_NoopSaveInputs", None)
    if hasattr(frames, "save_inputs") and hasattr(frames, "get_inputs"):
        _watch_frames(frames)
    elif nodes is not None:
        _watch_nodes(nodes)


_watch()
