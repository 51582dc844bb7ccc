"""The values that tensors of the twin would have: their profiles, and the sizes of encodings.

Memory of the twin has no values. A tensor's profile is that of a sample, made at random for its
dtype and for the operator that made it; an encoding has the size that the codec predicts for that
profile.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.advisor.candidates import foretold_ratio
from cswap.codecs.registry import compositions, get_codec, installed_codecs
from cswap.profiler import profile

if TYPE_CHECKING:
    from bench.twin.cuda import ClockedCuda
    from bench.twin.profiles import Profile
    from cswap.schema.tensor import TensorProfile

ZEROS: Final = {"relu": 0.5, "add>relu": 0.25, "native_dropout": 0.1, "relu-85": 0.85}
"""Share of zeros in the results of operators; assumed, for networks as they are initialised."""

N_SAMPLE: Final = 1 << 16
"""Elements of a sample."""


@cache
def samples() -> dict[tuple[torch.dtype, str], TensorProfile]:
    """Profiles by dtype and operator; call it before the process becomes the twin."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N_SAMPLE, generator=generator)
    drawn = torch.rand(N_SAMPLE, generator=generator)
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for maker, zeros in {"": 0.0, **ZEROS}.items():
            found[dtype, maker] = profile(torch.where(drawn < zeros, 0.0, x).to(dtype))
    found[torch.bool, ""] = profile(drawn < 0.9)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        found[dtype, ""] = profile((100 * drawn).to(dtype))
    return found


def profile_for(cuda: ClockedCuda, x: torch.Tensor) -> TensorProfile:
    """The profile of a tensor of the twin."""
    known = samples()
    found = known.get((x.dtype, cuda.maker(x))) or known.get((x.dtype, ""))
    if found is None:
        raise NotImplementedError(f"no sample of {x.dtype}")
    return replace(found, nbytes=x.nbytes)


def late_profile(cuda: ClockedCuda) -> type:
    """`cswap.profiler.LateProfile` of the twin."""

    class LateProfile:
        def __init__(self, x: torch.Tensor) -> None:
            cuda.cost("launch")
            cuda.stream_now().work(cuda.profile.kernel_s, "profile")
            self._found = profile_for(cuda, x)
            self._copied = cuda.Event()
            self._copied.record(cuda.stream_now())

        def get(self) -> TensorProfile | None:
            return self._found if self._copied.query() else None

        def wait(self) -> TensorProfile:
            self._copied.synchronize()
            return self._found

    return LateProfile


def replace_codecs(cuda: ClockedCuda) -> None:
    """Codecs of this process take the profile's time, and make encodings of the foretold size."""

    def encode(self: Any, x: torch.Tensor, out: torch.Tensor, *, key: Any, stream: Any) -> Any:
        cuda.touch(x, writes=False, text="encode")
        cuda.touch(out, writes=True, text="encode")
        _run(cuda, self.name, x.nbytes, encodes=True)
        ratio = foretold_ratio(self, profile_for(cuda, x)) or 1.0
        return cuda.late_size(min(int(x.nbytes / ratio), out.numel()))

    def decode(self: Any, payload: torch.Tensor, out: torch.Tensor, *, stream: Any) -> None:
        cuda.touch(payload, writes=False, text="decode")
        cuda.touch(out, writes=True, text="decode")
        _run(cuda, self.name, out.nbytes, encodes=False)

    codecs = [c for c in installed_codecs() if not c.verbatim]
    kinds: set[Any] = {type(c) for c in (*codecs, *map(get_codec, compositions(codecs)))}
    for kind in kinds:
        kind.encode_flat, kind.decode_flat = encode, decode


def _run(cuda: ClockedCuda, name: str, nbytes: int, *, encodes: bool) -> None:
    cuda.cost("launch")
    p: Profile = cuda.profile
    rate = p.codec_rates(name)[0 if encodes else 1]
    seconds = p.kernel_s + nbytes / rate
    stream = cuda.stream_now()
    stream.work(seconds, f"{'encode' if encodes else 'decode'} {name}")
    if stream is not cuda.default:
        cuda.compute.delay(p.overlap * seconds)
