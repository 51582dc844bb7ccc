"""The models' memory by the papers, and the same quantity of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cswap.schema.trace import Trace

GIB = 1 << 30

VDNN_BYTES = {"vgg16, batch 256": 28 * GIB, "vgg416, batch 32": 67.1 * GIB}
"""vDNN, abstract and section V-E. It writes GB; that they are GiB is our reading: in GB, VGG-416's
feature maps and weights alone would be larger than its total."""


def network_wide_bytes(trace: Trace) -> dict[str, int]:
    """vDNN's baseline: memory allocated for the whole network at once, nothing freed in between.

    As in Torch, two buffers hold every layer's dX and dY in turn, one workspace serves all layers,
    and activations are in place (vDNN, sections II-C and IV). cuDNN's pooling keeps no indices and
    its dropout no mask of torch's kind: saved integers and bools are left out.

    Args:
        trace: estimated with ``optimizer="none"``.

    Returns:
        Bytes by use: ``maps``, ``gradient_maps``, ``weights`` (with their gradients),
        ``workspace``, and ``total``.
    """
    of_weights = {i for o in trace.operators if o.phase == "optimizer" for i in o.inputs}
    maps = sum(
        t.nbytes
        for t in trace.tensors
        if t.role in ("activation", "input") and t.dtype.startswith(("float", "bfloat"))
    )
    gradient_maps = max(
        sum(
            trace.tensors[i].nbytes
            for i in (*o.inputs, *o.outputs)
            if trace.tensors[i].role == "gradient" and i not in of_weights
        )
        for o in trace.operators
        if o.phase == "backward"
    )
    found = {
        "maps": maps,
        "gradient_maps": gradient_maps,
        "weights": trace.resident_bytes + sum(trace.tensors[i].nbytes for i in of_weights),
        "workspace": max(o.workspace_bytes for o in trace.operators),
    }
    return {**found, "total": sum(found.values())}
