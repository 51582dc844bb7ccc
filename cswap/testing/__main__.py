"""``python -m cswap.testing tests/golden``: write the golden files that do not exist yet."""

from __future__ import annotations

import sys
from pathlib import Path

from cswap.codecs.registry import get_codec, list_codecs
from cswap.testing.golden import write_golden

for name in list_codecs():
    for folder in write_golden(get_codec(name), Path(sys.argv[1])):
        sys.stdout.write(f"{folder}\n")
