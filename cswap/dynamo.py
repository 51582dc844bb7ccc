"""An installed model, as torch.compile's frontend sees it.

Note [a model that is compiled]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The hooks are Python: they run between compiled graphs. Where the installed model's call is the
first frame that the compiler sees, as after ``torch.compile(model)`` and ``model.compile()``, it is
told to begin below the wrapper of ``forward``, so the hooks are on around the graphs, and none of
our code is traced. Where a larger function is compiled, the wrapper is traced with it, and can only
warn.

torch calls the hooks in the middle of a program's code: from operators of a part that is compiled
by itself and runs eagerly, and from a backward between graphs. The compiler is on then, and would
look into every frame below: so it leaves all of these functions alone, too.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any, Final, TypeVar, cast

from torch._C._dynamo import eval_frame
from torch.compiler import is_compiling

from cswap.log import log

_F = TypeVar("_F")

set_compiler: Final[Any] = eval_frame.set_eval_frame
"""Sets this thread's compiler of frames; None: none. Returns the one before."""


def begin_below(function: Any) -> None:
    """Leave the frame of a Python function to the interpreter; the frames below may be compiled.

    `torch._dynamo` has the same, but its import takes seconds.
    """
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT  # noqa: SLF001
        strategy = eval_frame._FrameExecStrategy(skip, default)  # noqa: SLF001
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    elif hasattr(eval_frame, "skip_code"):  # torch 2.6
        eval_frame.skip_code(function.__code__)


def leave_alone(function: _F) -> _F:
    """Leave the frame of a Python function, and all frames below it, to the interpreter.

    For functions that torch calls in the middle of a program's code, such as autograd's hooks. What
    they read changes from call to call, so a graph of them would be wrong, or made anew each time.

    Returns:
        The function; for torch 2.6, one around it.
    """
    plain: Any = function
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP  # noqa: SLF001
        strategy = eval_frame._FrameExecStrategy(skip, skip)  # noqa: SLF001
        eval_frame.set_code_exec_strategy(plain.__code__, strategy)
        return function

    @wraps(plain)
    def alone(*args: Any) -> Any:
        if is_compiling():  # a module's hook as a part of a graph; it returns at once
            return plain(*args)
        compiler = set_compiler(None)
        try:
            return plain(*args)
        finally:
            set_compiler(compiler)

    begin_below(alone)
    return cast("_F", alone)


def warn_of_tracing() -> bool:
    """Say once that the compiler traces an installed model inside of a larger graph; True."""
    _warn()
    return True


@cache
def _warn() -> None:
    log.warning(
        "install: torch.compile traces the model as a part of something larger; tensors that it "
        "saves stay. Install on the compiled model: cswap.install(torch.compile(model))."
    )


# While it traces, the compiler calls such a function and takes its result for a constant.
warn_of_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
