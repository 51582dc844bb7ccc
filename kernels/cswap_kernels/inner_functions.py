"""Inner functions: kernels as compiled callers link them, without machine code of their own.

Note [inner functions]
~~~~~~~~~~~~~~~~~~~~~~
Numba compiles a function that a kernel calls as if Python called it: it optimises the function with
everything that the function calls in turn, makes machine code of it, and two wrappers. Then it
links the function into its caller and does the same there. On kernels of many small functions, that
was two fifths of the time to compile. So a compiled caller gets the function from a second
dispatcher, the inner one, which leaves the module as it was lowered. The caller's module is then
optimised as a whole, as a C compiler does with a file of static functions.

An inner function is not in the disk cache: its caller's entry holds its code. Its environment (the
constants that Numba's object mode, `print` and exceptions with computed arguments read) is never
set. Kernels use none of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

if TYPE_CHECKING:
    from collections.abc import Callable

_STEPS: Final = ("_optimize_final_module", "_finalize_final_module", "_finalize_dynamic_globals")
SUPPORTED: Final = all(hasattr(JITCodeLibrary, step) for step in _STEPS)
"""Whether this Numba has the steps that are left out here. One without them compiles every function
in full."""


class _LinkedOnly(JITCodeLibrary):  # type: ignore[misc] # Numba is not annotated
    """A module that others link; it is not optimised, and the execution engine never sees it."""

    def _optimize_final_module(self) -> None:
        pass  # the caller's module is optimised as a whole

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _InnerLowering(NativeLowering):  # type: ignore[misc] # Numba is not annotated
    _name = "cswap_inner_lowering"

    def run_pass(self, state: Any) -> bool:
        flags = state.flags
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        state.library = _LinkedOnly(state.targetctx.codegen(), state.func_id.func_qualname)
        super().run_pass(state)
        # What callers know the function by, in place of the Python function that a full compilation
        # makes.
        known_by = object()
        lowered = state["cr"]
        state.targetctx.insert_user_function(known_by, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=known_by)
        return True


class _InnerCompiler(CompilerBase):  # type: ignore[misc] # Numba is not annotated
    def define_pipelines(self) -> list[Any]:
        pipeline = DefaultPassBuilder.define_nopython_pipeline(self.state)
        pipeline.passes = [
            (_InnerLowering if step is NativeLowering else step, text)
            for step, text in pipeline.passes
        ]
        pipeline.finalize()
        return [pipeline]


def attach(compiled: Any, function: Callable[..., Any], options: Any) -> None:
    """Attach its inner function to a kernel: compiled callers link that from now on.

    Args:
        compiled: the kernel, as `numba.njit` returned it. Calls from Python still go to it.
        function: the Python function that it was made of.
        options: Numba's options.
    """
    inner = numba.njit(pipeline_class=_InnerCompiler, **options)(function)  # noqa: TID251 see jit.py
    # Numba would also enter it in a table of functions that Python can call.
    inner.add_overload = lambda made: inner.overloads.update({tuple(made.signature.args): made})
    compiled.get_call_template = inner.get_call_template
    compiled.get_overload = inner.get_overload
