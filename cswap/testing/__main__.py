"""``python -m cswap.testing tests/golden [codec ...]``: writes missing golden files."""

from __future__ import annotations

import sys
from pathlib import Path

from cswap.codecs.registry import get_codec, list_codecs
from cswap.testing.golden import write_golden

if __name__ == "__main__":
    root, names = Path(sys.argv[1]), sys.argv[2:] or list_codecs()
    for name in names:
        for folder in write_golden(get_codec(name), root):
            sys.stdout.write(f"{folder}\n")
