"""`check_codec`: tests every promise of the codec contract."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from cswap.codecs.base import Codec, EncodeKey, Encoding
from cswap.codecs.layout import flatten, torch_dtype
from cswap.codecs.parallel import MIN_RANGE_TILES
from cswap.codecs.registry import get_codec
from cswap.codecs.tiled import tile_numel
from cswap.errors import ConfigError, CswapError, UnsupportedError
from cswap.profiler import profile
from cswap.schema.tensor import DTYPES
from cswap.testing.buffers import Guarded, bits, fail_unless, memory_of, moved
from cswap.testing.hostile import check_hostile, check_streams
from cswap.testing.strategies import TensorSpec, specs, values_for

if TYPE_CHECKING:
    from collections.abc import Callable

MANY_TILES: Final = 3 * MIN_RANGE_TILES
"""Number of tiles that a tiled codec splits over three threads, and a host codec into blocks."""

NORMAL_VALUES: Final = 1 << 14
"""Normally distributed values on which a declared relative error is tested."""

ERROR_MARGIN: Final = 0.05
"""Share by which the measured relative error may exceed the declared one."""


@dataclass(frozen=True, slots=True)
class Threads:
    """A stream of the CPU: a number of threads."""

    threads: int


@dataclass(frozen=True, slots=True)
class Subject:
    """The codec under test, with its promises.

    Attributes:
        codec: the codec.
        error_bound: as in `check_codec`.
        dtypes: names of the dtypes that the codec supports on a CPU.
        twin: kind of a second device, or None.
    """

    codec: Codec
    error_bound: Callable[[torch.Tensor, torch.Tensor], bool] | None
    dtypes: tuple[str, ...]
    twin: str | None


def check_codec(
    codec: Codec,
    *,
    examples: int = 25,
    error_bound: Callable[[torch.Tensor, torch.Tensor], bool] | None = None,
    twin: str | None = None,
) -> None:
    """Check that a codec keeps the contract of `cswap.Codec`; needs hypothesis.

    Tensors of sizes 0, 1, 63, 1000 and around a tile for every dtype come first, then generated
    tensors of any layout and values. Each tensor must come back with equal sizes and strides, bit
    by bit if the codec is lossless. An encoding must keep within its bound, and leave its input and
    the memory behind its output unchanged. Its bytes must be the same for every previous content of
    its buffers and every number of threads. Elements that are not finite must come
    back bit by bit from a lossy codec, too, and so must the whole tile of such an element.
    Truncated, flipped and foreign streams must be refused; damaged payloads must never crash. A
    predicted ratio must be a positive number for every tensor, and the error on normal values at
    most the declared one.

    Args:
        codec: registered under its name (`cswap.register_codec`), so that its streams can be read.
        examples: number of generated tensors. 25 take about a second for a fast codec.
        error_bound: for lossy codecs. Called with the flat words [n] of a tensor before and after
            (a complex element is two words), in the order of memory, non-finite words set to 0 in
            both. Returns whether the error is within the codec's promise.
        twin: kind of device ("cuda") whose encodings must be interchangeable with the CPU's.

    Raises:
        AssertionError: the codec breaks its contract; the message has the tensor's `TensorSpec`.
        ConfigError: the codec is not registered under its name.
    """
    _require_registered(codec)
    dtypes = tuple(d for d in DTYPES if codec.supports(torch_dtype(d)))
    subject = Subject(codec, error_bound, dtypes, twin)
    fail_unless(bool(dtypes), f"{codec!r} supports no dtype on the CPU")
    fail_unless(1 <= codec.max_ratio <= 1 << 16, f"{codec!r}.max_ratio={codec.max_ratio}")
    _check_unsupported(codec)
    _check_error(codec)
    _check_sizes(subject)
    _check_generated(subject, examples)
    _check_many_tiles(subject)
    _check_concurrency(subject)
    for dtype in {dtypes[0], dtypes[-1]}:
        check_hostile(codec, dtype)
    small = TensorSpec(_narrowest(dtypes), (2, 9), "permuted", "sparse")
    check_streams(codec.encode(small.build()))


def _require_registered(codec: Codec) -> None:
    try:
        found = get_codec(codec.name).name
    except CswapError as error:
        raise ConfigError(
            f"codec={codec!r}: not to be found by its name; call cswap.register_codec first."
        ) from error
    fail_unless(found == codec.name, f"get_codec({codec.name!r}).name is {found!r}")


def _check_unsupported(codec: Codec) -> None:
    for dtype in DTYPES:
        if codec.supports(torch_dtype(dtype)):
            continue
        x = torch.zeros(16, dtype=torch.uint8).view(torch_dtype(dtype))
        try:
            codec.encode(x)
        except UnsupportedError:
            continue
        raise AssertionError(f"{codec!r} encoded {dtype}, which it does not support")


def _check_error(codec: Codec) -> None:
    # The error that the codec declares, by which tolerances admit it.
    declared = codec.traits.relative_error
    if declared is None:
        return
    fail_unless(not codec.lossless, f"{codec!r} is lossless, and declares relative_error")
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    dtype = next((d for d in kinds if codec.supports(d)), None)
    if dtype is None:
        return
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NORMAL_VALUES, generator=generator).to(dtype)
    error = (codec.decode(codec.encode(x)).double() - x.double()).norm() / x.double().norm()
    fail_unless(
        float(error) <= (1 + ERROR_MARGIN) * declared,
        f"{codec!r}: relative error {float(error):.2g} of normal values, declared {declared:g}",
    )


def _check_sizes(subject: Subject) -> None:
    for dtype in subject.dtypes:
        tile = tile_numel(torch_dtype(dtype))
        kinds = values_for(dtype)
        for i, numel in enumerate((0, 1, 63, 1000, tile - 1, tile, tile + 1)):
            spec = TensorSpec(dtype, (numel,), values=kinds[i % len(kinds)], seed=i)
            check_one(subject, spec, threads=1, seed=i)


def _check_generated(subject: Subject, examples: int) -> None:
    import hypothesis.strategies as st
    from hypothesis import HealthCheck, given, settings

    @settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        spec=specs(subject.dtypes), threads=st.sampled_from((1, 3)), seed=st.integers(0, 2**63 - 1)
    )
    def run(spec: TensorSpec, threads: int, seed: int) -> None:
        check_one(subject, spec, threads=threads, seed=seed)

    run()


def check_one(subject: Subject, spec: TensorSpec, *, threads: int, seed: int) -> None:
    """Encode and decode one tensor in every way, and compare."""
    codec = subject.codec
    x = spec.build()
    key = EncodeKey(seed=seed, tensor_id=seed % 7, step=seed % 5)
    encoding = _encode_twice(codec, x, key, threads, str(spec))

    # Flat, into memory full of two different bytes: elements that decode skips then differ.
    flat = [_decode_into(codec, encoding, x, fill, str(spec)) for fill in (0xA5, 0x5A)]
    fail_unless(torch.equal(*flat), f"{spec}: decode left elements unwritten")
    x_hat = codec.decode(encoding, stream=Threads(threads))
    layout = (x_hat.dtype, x_hat.shape, x_hat.stride())
    fail_unless(layout == (x.dtype, x.shape, x.stride()), f"{spec}: came back as {layout}")
    fail_unless(torch.equal(bits(flatten(x_hat)), flat[0]), f"{spec}: decode differs from flat")
    _compare(subject, x, x_hat, str(spec))
    _check_prediction(codec, x, str(spec))

    given = torch.full((x.numel() * x.itemsize,), 0xA5, dtype=torch.uint8)
    out = given.view(x.dtype).view(x.shape)
    fail_unless(codec.decode(encoding, out) is out, f"{spec}: decode did not return its out")
    fail_unless(torch.equal(bits(out), bits(x_hat)), f"{spec}: decode into out differs")

    again = Encoding.from_bytes(encoding.to_bytes())
    same = (again.codec, again.meta) == (encoding.codec, encoding.meta)
    same = same and torch.equal(again.payload, encoding.payload)
    fail_unless(same, f"{spec}: {again} was read from the stream of {encoding}")
    if subject.twin is not None and codec.supports(x.dtype, subject.twin):
        _check_twin(codec, x, encoding, key, subject.twin, str(spec))


def _encode_twice(
    codec: Codec, x: torch.Tensor, key: EncodeKey, threads: int, what: str
) -> Encoding:
    # Other contents of the buffers and another number of threads must give the same bytes.
    bound = codec.bound(x.dtype, flatten(x).numel())
    before = memory_of(x)
    first, second = Guarded(bound, 0xA5), Guarded(bound, 0x5A)
    encoding = codec.encode(x, first.inside, key=key, stream=Threads(1))
    other = codec.encode(x, second.inside, key=key, stream=Threads(threads))
    for guarded in (first, second):
        fail_unless(guarded.intact, f"{what}: encode wrote outside its bound of {bound} bytes")
    fail_unless(torch.equal(memory_of(x), before), f"{what}: encode changed its input")
    fail_unless(encoding.codec == codec.name, f"{what}: encoding says {encoding.codec!r}")
    fail_unless(
        torch.equal(encoding.payload, other.payload), f"{what}: two encodes, different bytes"
    )
    return encoding


def _decode_into(
    codec: Codec, encoding: Encoding, x: torch.Tensor, fill: int, what: str
) -> torch.Tensor:
    # Bytes of the flat elements, decoded into memory full of ``fill``.
    guarded = Guarded(encoding.raw_nbytes, fill)
    codec.decode_flat(encoding.payload, guarded.inside.view(x.dtype), stream=Threads(1))
    fail_unless(guarded.intact, f"{what}: decode wrote outside its output")
    return guarded.inside


def _compare(subject: Subject, x: torch.Tensor, x_hat: torch.Tensor, what: str) -> None:
    if subject.codec.lossless:
        fail_unless(torch.equal(bits(x), bits(x_hat)), f"{what}: bits differ")
        return
    flat, flat_hat = flatten(x), flatten(x_hat)
    words, words_hat = _real_words(flat), _real_words(flat_hat)
    finite = torch.isfinite(words)
    exact = (bits(words) == bits(words_hat)).view(words.numel(), words.itemsize).all(dim=1)
    fail_unless(bool((exact | finite).all()), f"{what}: words that are not finite differ")
    if flat.numel() <= tile_numel(x.dtype) and not bool(finite.all()):
        fail_unless(bool(exact.all()), f"{what}: a tile that is not finite throughout differs")
    if subject.error_bound is not None:
        pair = (torch.where(finite, words, 0), torch.where(finite, words_hat, 0))
        fail_unless(subject.error_bound(*pair), f"{what}: beyond the codec's error bound")


def _check_prediction(codec: Codec, x: torch.Tensor, what: str) -> None:
    predict = codec.traits.predicted_ratio
    if predict is not None:
        ratio = predict(profile(flatten(x)))
        fail_unless(0 < ratio < math.inf, f"{what}: predicted ratio {ratio}")


def _real_words(flat: torch.Tensor) -> torch.Tensor:
    # A view of bytes: torch.view_as_real takes no complex32.
    real = {16: torch.float64, 8: torch.float32, 4: torch.float16}
    return bits(flat).view(real[flat.itemsize] if flat.is_complex() else flat.dtype)


def _check_twin(
    codec: Codec, x: torch.Tensor, encoding: Encoding, key: EncodeKey, twin: str, what: str
) -> None:
    # Each device decodes the other's encoding to the same bits; places of segments may differ.
    there = Encoding(codec.name, encoding.meta, encoding.payload.to(twin))
    expected = bits(codec.decode(encoding))
    fail_unless(
        torch.equal(bits(codec.decode(there)).cpu(), expected), f"{what}: {twin} decodes it wrong"
    )
    back = codec.encode(moved(x, twin), key=key)
    here = Encoding(codec.name, encoding.meta, back.payload.cpu())
    fail_unless(
        torch.equal(bits(codec.decode(here)), expected), f"{what}: {twin}'s encoding differs"
    )


def _check_many_tiles(subject: Subject) -> None:
    # Enough tiles for several threads. Zeros have the highest ratio, which readers must accept.
    dtype = _narrowest(subject.dtypes)
    numel = MANY_TILES * tile_numel(torch_dtype(dtype)) + 5
    for values in ("sparse", "zeros"):
        check_one(subject, TensorSpec(dtype, (numel,), values=values), threads=3, seed=1)


def _narrowest(dtypes: tuple[str, ...]) -> str:
    return min(dtypes, key=lambda d: DTYPES[d].itemsize)


def _check_concurrency(subject: Subject) -> None:
    codec, n_threads = subject.codec, 4
    kinds = values_for(subject.dtypes[0])
    inputs = [
        TensorSpec(subject.dtypes[0], (3000 + i,), values=kinds[i % len(kinds)], seed=i).build()
        for i in range(2 * n_threads)
    ]
    expected = [(bits(e.payload), bits(codec.decode(e))) for e in map(codec.encode, inputs)]
    start = threading.Barrier(n_threads)
    wrong: list[str] = []

    def work(first: int) -> None:
        start.wait()
        for i in [*range(first, len(inputs)), *range(first)]:
            encoding = codec.encode(inputs[i], stream=Threads(2))
            found = (bits(encoding.payload), bits(codec.decode(encoding, stream=Threads(2))))
            if not all(map(torch.equal, found, expected[i])):
                wrong.append(f"tensor {i}")

    threads = [threading.Thread(target=work, args=(2 * i,)) for i in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fail_unless(not wrong, f"{codec!r} from {n_threads} threads at once: {wrong} differ")
