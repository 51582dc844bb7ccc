"""Machines of the twin: rates of a GPU and its link, and costs of its host.

Rates of the H200 are measured (`bench/results/nvidia-h200/`) where no word says otherwise. Those of
other cards are the H200's, scaled by data sheets: products by the dense bf16 peak, memory by its
bandwidth, codecs by the memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

GIB: Final = 1 << 30

LINE_BYTES: Final = 512
"""Sizes that torch's caching allocator rounds to."""


@dataclass(frozen=True, slots=True)
class Host:
    """Seconds of the host; fitted to the rows of GPT-2 small (`python -m bench twin --validate`).

    Attributes:
        operator_s: of an operator below Python: dispatch, autograd, launch.
        view_s: of an operator that only makes a view, with its Python.
        detach_s: of torch's own detaching of a tensor that hooks get. Not fitted: a tensor that
            trivial hooks get costs 0.9 us on a CPU of ours, with the call of the hook.
        python_s: of a call of a Python function, with all that it does itself.
        cuda_s: of an event's record, wait or question, and of a copy's launch.
        launch_s: of a codec's kernels, encode or decode, with their Python.
        wake_s: until a thread that slept on an event runs.
        pin_bytes_per_s: rate at which host memory is pinned.
    """

    operator_s: float = 26e-6
    view_s: float = 19e-6
    detach_s: float = 2e-6
    python_s: float = 2.4e-6
    cuda_s: float = 2e-6
    launch_s: float = 25e-6
    wake_s: float = 1e-4
    pin_bytes_per_s: float = 1e9


CODECS: Final = {
    "zvc": (2031e9, 2059e9),
    "expk": (1162e9, 1434e9),
    "int8": (2027e9, 2487e9),
    "fp8": (1891e9, 2410e9),
}
"""Raw bytes/s of encode and decode, measured on the H200 with 256 MiB."""

OTHER_CODEC: Final = (1162e9, 1434e9)
"""Of codecs that were not measured: the slowest that was."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One machine.

    Attributes:
        name: for tables.
        bf16: FLOP/s of large products in half precision.
        half: least size of a product at which half of that is achieved; fitted to the plain step
            of GPT-2 small.
        tf32: FLOP/s of float32 convolutions; fitted to the plain step of ResNet-50.
        fp32: FLOP/s of float32 products; assumed.
        attention: FLOP/s of fused attention; assumed.
        memory: bytes/s of elementwise kernels, both ways counted.
        out, back: bytes/s of the link, to the host and from it, alone.
        both: the same where the other direction is busy.
        copy_s: latency of a copy.
        kernel_s: least time of a kernel and the gap after it.
        device_bytes: memory of the device.
        codec: rates of codecs over those of the H200.
        overlap: seconds of the computation that a second of a codec's kernel beside it costs;
            assumed: kernels at the speed of memory take turns.
        host: costs of the host.
    """

    name: str
    bf16: float
    half: float
    tf32: float
    fp32: float
    attention: float
    memory: float
    out: float
    back: float
    both: float
    copy_s: float = 8e-6
    kernel_s: float = 2e-6
    device_bytes: int = 140 * GIB
    codec: float = 1.0
    overlap: float = 1.0
    host: Host = Host()

    def codec_rates(self, name: str) -> tuple[float, float]:
        """Raw bytes/s of a codec's encode and decode; of a chain the slowest part's."""
        found = [CODECS.get(part.split("-")[0], OTHER_CODEC) for part in name.split("+")]
        encode, decode = (self.codec * min(rates) for rates in zip(*found, strict=True))
        return encode, decode


H200: Final = Profile(
    name="h200-pcie5",
    bf16=700e12,
    half=900.0,
    tf32=83.6e12,
    fp32=35e12,
    attention=330e12,
    memory=0.8 * 4.3e12,
    out=55.2e9,
    back=55.4e9,
    both=50.5e9,
)

ODD: Final = 0.4
"""Rate of products with a size that is no multiple of 8, of the others; assumed."""


def _scaled(
    name: str,
    peak: float,
    memory: float,
    gib: int,
    link: tuple[float, float, float],
    host: Host = H200.host,
) -> Profile:
    # peak: dense bf16 TFLOP/s; memory: TB/s; link: GB/s out, back, and each with the other busy.
    f, m = peak / 989, memory / 4.8
    out, back, both = (1e9 * rate for rate in link)
    return replace(
        H200,
        name=name,
        bf16=H200.bf16 * f,
        half=H200.half * f,
        tf32=H200.tf32 * f,
        fp32=H200.fp32 * f,
        attention=H200.attention * f,
        memory=H200.memory * m,
        out=out,
        back=back,
        both=both,
        device_bytes=gib * GIB,
        codec=min(m, 1.0),
        host=host,
    )


PROFILES: Final = {
    p.name: p
    for p in (
        H200,
        _scaled("h100-pcie5", 989, 3.35, 80, (55.2, 55.4, 50.5)),
        _scaled("a100-pcie4", 312, 2.0, 80, (25.0, 25.0, 22.5)),
        _scaled("rtx4090-pcie4", 165, 1.0, 24, (25.0, 25.0, 22.5)),
        _scaled("l4-pcie4", 121, 0.3, 24, (25.0, 25.0, 22.5)),
        _scaled("gh200", 989, 4.0, 96, (170.0, 415.0, 170.0)),
    )
}
"""By name. GH200's link: 170 GB/s out and 415 back, as others measured."""
