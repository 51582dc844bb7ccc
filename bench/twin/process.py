"""Makes this process one on a GPU with a clock, for good: `become`.

Torch's own functions are replaced, so tensors of the stand-in's memory say that they are on CUDA,
`torch.cuda` is the stand-in, and `time` tells virtual time. cswap is imported after that, and takes
the ways of a GPU by itself. A process is needed for each run.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional

from bench.twin.cuda import ClockedCuda, ClockedStream
from bench.twin.operators import Operators

if TYPE_CHECKING:
    from bench.twin.profiles import Profile

DEVICE: Final = torch.device("cuda", 0)

STAND_IN: Final = (
    "Event", "Stream", "current_stream", "device", "empty_cache", "get_device_properties",
    "is_current_stream_capturing", "max_memory_allocated", "mem_get_info", "memory_allocated",
    "memory_reserved", "reset_peak_memory_stats", "set_device", "stream", "synchronize",
)  # fmt: skip
"""Functions of `torch.cuda` that the stand-in has."""

ROOT: Final = Path(__file__).resolve().parents[2]

COUNTED: Final = (
    f"{ROOT / 'cswap'}/",
    f"{ROOT / 'bench' / 'workloads'}/",
    f"{ROOT / 'bench' / 'twin' / 'm'}",  # the models, and the methods of others
    f"{Path(torch.__file__).parent}/",
)
"""Beginnings of paths of Python code whose calls take the host's time."""

FREE: Final = (
    "/_pytree",
    "_meta_registrations",
    "flop_counter",
    "_python_dispatch",
)
"""Parts of those whose calls only the twin makes."""

OF_MODES: Final = (
    "torch/_library/simple_registry",
    "torch/_compile.py",
    "torch/_dynamo/eval_frame",
    "torch/compiler/",
)
"""Parts of those that torch calls around each operator that a dispatch mode sees, with that mode
off. They count for a mode of the program, as selective checkpointing has one, and not for the
twin's."""


MANY: Final = 1 << 30
"""More modes than there ever are."""


def become(profile: Profile) -> ClockedCuda:
    """Replace torch's functions and the clock. Args: profile: the machine.

    Returns:
        The stand-in; its operators are recorded from here on, and its host's time counted where
        ``counting`` is set.
    """
    from bench.twin import values

    values.samples()
    cuda = ClockedCuda(profile)
    _tell_virtual_time(cuda)
    _replace_tensors(cuda)
    _replace_functional()
    _put(torch.cuda, **{name: getattr(cuda, name) for name in STAND_IN})
    _put(
        torch.cuda,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _lazy_init=lambda: None,
        get_rng_state=lambda *_: torch.empty(16, dtype=torch.uint8),
        set_rng_state=lambda *_: None,
        get_device_capability=lambda *_: (9, 0),
        get_device_name=lambda *_: profile.name,
        get_per_process_memory_fraction=lambda *_: 1.0,
    )
    _replace_engine(cuda)
    Operators(cuda).__enter__()
    _count_calls(cuda)
    return cuda


def _tell_virtual_time(cuda: ClockedCuda) -> None:
    def now() -> float:
        return cuda.now_s

    def sleep(seconds: float) -> None:
        cuda.wait_until(cuda.now_s + seconds)

    clocks = dict.fromkeys(("perf_counter", "monotonic", "thread_time", "process_time"), now)
    own = [getattr(time, name) for name in clocks]
    _put(time, sleep=sleep, **clocks)
    # Modules that were imported before have names of their own for the clock.
    for path, module in list(sys.modules.items()):
        if path.startswith("cswap."):
            names = [n for n, value in vars(module).items() if any(value is one for one in own)]
            _put(module, **dict.fromkeys(names, now))


def _put(owner: Any, **functions: Any) -> None:
    # In the place of an owner's own.
    for name, function in functions.items():
        setattr(owner, name, function)


def _replace_tensors(cuda: ClockedCuda) -> None:
    own: Any = torch._C.TensorBase.device  # noqa: SLF001

    def device(x: torch.Tensor) -> torch.device:
        found: torch.device = own.__get__(x)
        return DEVICE if found.type == "cpu" and cuda.is_device(x) else found

    _put(
        torch.Tensor,
        device=property(device),
        is_cuda=property(lambda x: device(x).type == "cuda"),
        is_cpu=property(lambda x: device(x).type == "cpu"),
        record_stream=lambda x, stream: cuda.record_stream(x, stream),
    )


def _replace_functional() -> None:
    # The operators that torch picks on a GPU, where a CPU has others.
    attend, entropy = functional.scaled_dot_product_attention, functional.cross_entropy

    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(x, p, True)[0] if training and p else x

    def attention(
        q: Any,
        k: Any,
        v: Any,
        mask: Any = None,
        p: float = 0.0,
        is_causal: bool = False,
        **rest: Any,
    ) -> Any:
        if mask is not None or q.dtype == torch.float32:
            return attend(q, k, v, mask, p, is_causal, **rest)
        if rest.get("enable_gqa"):
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        fused = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
        return fused(q, k, v, p, is_causal)[0]

    def cross_entropy(x: Any, y: Any, **rest: Any) -> Any:
        if x.dtype not in (torch.bfloat16, torch.float16):
            return entropy(x, y, **rest)
        return functional.nll_loss(_LogSoftmax.apply(x), y, **rest)

    def batch_norm(
        x: Any,
        mean: Any,
        var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        return torch.cudnn_batch_norm(x, weight, bias, mean, var, training, momentum, eps)[0]

    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]  # noqa: SLF001

    _put(functional, dropout=dropout, cross_entropy=cross_entropy, rms_norm=rms_norm)
    _put(functional, scaled_dot_product_attention=attention, batch_norm=batch_norm)


class _LogSoftmax(torch.autograd.Function):
    """log_softmax of half-precision logits to float32, in one kernel as on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, dtype=torch.float32).copy_(x)
        ctx.save_for_backward(out)
        ctx.dtype = x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return torch.empty_like(out, dtype=ctx.dtype).copy_(grad)


def _replace_engine(cuda: ClockedCuda) -> None:
    # The parts of cswap's engine that are not torch: copies, kernels, values, threads.
    from bench.twin import values
    from bench.twin.lagging_device import streams_of
    from cswap import cuda_streams
    from cswap.advisor import advisor
    from cswap.codecs import gpu
    from cswap.devices import cuda as device_module
    from cswap.engine import packer
    from cswap.engine.saved import reclaim
    from cswap.fit import controller
    from cswap.remat import search

    _put(cuda_streams, **vars(streams_of(cuda)))

    def memcpy(target: int, source: int, nbytes: int, _direction: int, handle: int) -> None:
        cuda.cost("cuda")
        stream = next(s for s in cuda.streams if s.cuda_stream == handle)
        assert isinstance(stream, ClockedStream)
        with cuda.stream(stream):
            cuda.copy_at(target, source, nbytes)

    _put(device_module, memcpy_async=lambda: memcpy)
    _put(device_module.CudaDevice, host_memory=lambda _device, nbytes: cuda.pinned(nbytes))
    # Threads would come at other moments in another process.
    with suppress(ImportError):  # of the engine that was measured on an H200
        from cswap.devices import cuda_callbacks  # type: ignore[attr-defined] # it has gone

        _put(cuda_callbacks.Callbacks, _start=lambda _: None)
    _put(reclaim._thread, awake=True)  # noqa: SLF001 - so nobody wakes it
    _put(controller, Background=_AtOnce)
    _put(gpu, missing=lambda: None, damage=lambda _: (), has_kernels=lambda _name, _word: True)
    _put(packer, _len_dispatch_modes=int)  # 0: the one is the GPU
    with suppress(ImportError):  # of the engine that was measured on an H200
        from cswap.engine.replay import replay

        _put(replay, _len_dispatch_modes=int)
    _put(advisor, LateProfile=values.late_profile(cuda))
    # Autograd's nodes say that all is on the CPU.
    _put(search.Search, _device_below=lambda _search, _node: DEVICE)
    values.replace_codecs(cuda)


class _AtOnce:
    """`cswap.fit.background.Background` without a thread: the result is there at once."""

    done = True

    def __init__(self, work: Any) -> None:
        self._result = work()

    def result(self) -> Any:
        """The work's result."""
        return self._result


def _count_calls(cuda: ClockedCuda) -> None:
    known: dict[str, int] = {}  # least number of other dispatch modes with which calls count
    main = threading.get_ident()
    n_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001

    def count(frame: Any, event: str, _argument: Any) -> None:
        if event != "call" or not cuda.counting:
            return
        path = frame.f_code.co_filename
        least = known.get(path)
        if least is None:
            counts = path.startswith(COUNTED) and not any(p in path for p in FREE)
            least = (1 if any(p in path for p in OF_MODES) else 0) if counts else MANY
            known[path] = least
        if (not least or n_modes() >= least) and threading.get_ident() == main:
            cuda.cost("python")

    sys.setprofile(count)
