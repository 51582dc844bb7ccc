"""Every codec's kernels once, for compute-sanitizer: `python tests/gpu/sanitized.py`.

Its exit status is the sanitizer's business; what the kernels give is that of the tests.
"""

from __future__ import annotations

import sys

import torch

from cswap.codecs.layout import torch_dtype
from cswap.codecs.registry import NVCOMP, get_codec, list_codecs
from cswap.codecs.tiled import tile_numel
from cswap.errors import CswapError
from cswap.schema.tensor import DTYPES
from cswap.testing import TensorSpec
from cswap.testing.strategies import values_for


def main() -> int:
    """Encode and decode tails, odd views and all kinds of values."""
    n_kernels = 0
    for name in sorted(set(list_codecs()) - set(NVCOMP)):  # not our kernels
        try:
            codec = get_codec(name)
        except CswapError:  # its package is not installed
            continue
        for dtype in DTYPES:
            if not codec.supports(torch_dtype(dtype), "cuda"):
                continue
            tile = tile_numel(torch_dtype(dtype))
            for i, numel in enumerate((1, 63, tile - 1, tile + 1)):
                values = values_for(dtype)[i % len(values_for(dtype))]
                x = TensorSpec(dtype, (numel + i,), values=values).build().cuda()[i:]
                codec.decode(codec.encode(x))
                n_kernels += 1
    torch.cuda.synchronize()
    sys.stdout.write(f"{n_kernels} round trips\n")
    return 0 if n_kernels else 1


if __name__ == "__main__":
    sys.exit(main())
