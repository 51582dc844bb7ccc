"""Copies tensor profiles and ratios from one trace to another. Needs no torch.

An estimated trace has no values and so no ratios: a planner would treat every codec as raw. A short
real run of the same model, with a small batch or smaller images, has profiles and ratios (`measure`
with ``codecs=``). `with_values` copies them to the large step.

Note [which tensor is like which]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A tensor of the new trace takes the values of a partner in the known trace. Signature means dtype,
kind of the producer and kinds of the forward readers.

1. If the known trace has every module that saves a tensor, the partner is the tensor with the same
   name and signature.
2. Otherwise, or if there is no such tensor, the partner has the same signature, and its relative
   position among all tensors of this signature is nearest. Rule 2 serves other image sizes (another
   stem), deeper networks (more blocks), and devices that use other operators.

A tensor without a partner stays without values. Ratios of integers depend on the size of the
feature map that the indices point into. So a tensor of integers takes values only if one sample has
the same shape in both traces.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cswap.errors import TraceError
from cswap.plan.simulator.lifetimes import lifetimes
from cswap.schema.tensor import DTYPES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from cswap.schema.trace import Trace, TraceTensor


@dataclass(frozen=True, slots=True)
class Values:
    """Profile and ratios of one saved tensor.

    Attributes:
        name: name of the tensor, such as ``features.0.convolution``.
        signature: dtype, kind of its producer, kinds of its forward readers.
        sample_shape: in elements, without the first extent (the batch); may be empty.
        profile: as `TraceTensor.profile`.
        ratios: raw bytes over encoded bytes by codec.
    """

    name: str
    signature: str
    sample_shape: tuple[int, ...] = ()
    profile: Mapping[str, float] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """Path of the module that produced the tensor."""
        return self.name.rpartition(".")[0]


def values_of(trace: Trace) -> tuple[Values, ...]:
    """Profiles and ratios of a trace's saved tensors, in saved order.

    >>> from cswap.schema.trace import Trace, TraceOperator, TraceTensor
    >>> forward = TraceOperator("f", "conv", "forward", 1.0, (), (0,))
    >>> backward = TraceOperator("b", "conv", "backward", 1.0, (0,), ())
    >>> tensor = TraceTensor(8, name="x", saved=0, ratios={"zvc": 2.0})
    >>> values_of(Trace((forward, backward), (tensor,)))[0].signature
    'float32 conv >'
    """
    names = _numbered([trace.tensors[i].name for i in _saved(trace)])
    return tuple(
        Values(name, signature, t.shape[1:], dict(t.profile), dict(t.ratios))
        for name, signature, t in zip(
            names, _signatures(trace), (trace.tensors[i] for i in _saved(trace)), strict=True
        )
    )


def with_values(
    trace: Trace, known: Sequence[Values], *, codecs: Collection[str] | None = None
) -> Trace:
    """The trace with profiles and ratios of another step of the same model.

    Args:
        trace: a trace for any device, batch and image size.
        known: a result of `values_of`; see Note [which tensor is like which].
        codecs: codecs whose ratios are copied; None: all. A planner may choose any codec that has a
            ratio. If no precision may be lost, name only lossless codecs.

    Raises:
        TraceError: no tensor of the trace has a partner.
    """
    mine = values_of(trace)
    pairs = zip(_by_name(mine, known), _by_depth(mine, known), strict=True)
    partners = [named or near for named, near in pairs]
    if known and mine and not any(partners):
        raise TraceError(
            f"trace={trace.name!r}: none of its {len(mine)} saved tensors is like any of the "
            f"{len(known)} known ones. Take values of the same model."
        )
    tensors = list(trace.tensors)
    for index, own, partner in zip(_saved(trace), mine, partners, strict=True):
        if partner is not None:
            tensors[index] = _filled(tensors[index], own, partner, codecs)
    return replace(trace, tensors=tuple(tensors))


def _saved(trace: Trace) -> list[int]:
    saved = [i for i, tensor in enumerate(trace.tensors) if tensor.saved >= 0]
    return sorted(saved, key=lambda i: trace.tensors[i].saved)


def _numbered(names: Sequence[str]) -> list[str]:
    # Two outputs of one operator have the same name. The second gets the suffix #2.
    seen: dict[str, int] = {}
    numbered = []
    for name in names:
        seen[name] = count = seen.get(name, 0) + 1
        numbered.append(name if count == 1 else f"{name}#{count}")
    return numbered


def _signatures(trace: Trace) -> list[str]:
    life, operators = lifetimes(trace), trace.operators
    found = []
    for index in _saved(trace):
        producer = life.producer[index]
        made = operators[producer].kind if producer >= 0 else trace.tensors[index].role
        readers = {operators[u].kind for u in life.users[index] if _is_forward(trace, u)}
        found.append(f"{trace.tensors[index].dtype} {made} > {' '.join(sorted(readers))}".rstrip())
    return found


def _is_forward(trace: Trace, operator: int) -> bool:
    return trace.operators[operator].phase == "forward"


def _by_name(mine: Sequence[Values], known: Sequence[Values]) -> list[Values | None]:
    if not {v.module for v in mine} <= {v.module for v in known}:
        return [None] * len(mine)
    found = {(v.name, v.signature): v for v in known}
    return [found.get((v.name, v.signature)) for v in mine]


def _by_depth(mine: Sequence[Values], known: Sequence[Values]) -> list[Values | None]:
    groups: dict[str, list[Values]] = defaultdict(list)
    for values in known:
        groups[values.signature].append(values)
    counts: dict[str, int] = defaultdict(int)
    for values in mine:
        counts[values.signature] += 1
    seen: dict[str, int] = defaultdict(int)
    partners: list[Values | None] = []
    for values in mine:
        group, count = groups.get(values.signature, []), counts[values.signature]
        rank = seen[values.signature]
        seen[values.signature] += 1
        place = round(rank * (len(group) - 1) / max(count - 1, 1)) if group else 0
        partners.append(group[place] if group else None)
    return partners


def _filled(
    tensor: TraceTensor, own: Values, partner: Values, codecs: Collection[str] | None
) -> TraceTensor:
    floating = tensor.dtype in DTYPES and DTYPES[tensor.dtype].kind == "float"
    if not floating and own.sample_shape != partner.sample_shape:
        return tensor
    ratios = {c: r for c, r in partner.ratios.items() if codecs is None or c in codecs}
    return replace(tensor, profile=dict(partner.profile), ratios=ratios)
