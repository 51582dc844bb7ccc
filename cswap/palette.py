"""The colours of all pictures: Okabe and Ito's, which colour-blind readers can distinguish.

A colour means the same thing in every picture where the thing occurs: a step without cswap is
`BLACK`, lossless cswap `BLUE`, int8 `VERMILION`, raw swaps `SKY`, checkpointing `GREEN`,
save_on_cpu `ORANGE`; encodes `BLUE`, decodes `GREEN`, copies out `ORANGE` and in `SKY`.
"""

from __future__ import annotations

from typing import Final

BLACK: Final = "#000000"
BLUE: Final = "#0072b2"
VERMILION: Final = "#d55e00"
GREEN: Final = "#009e73"
ORANGE: Final = "#e69f00"
SKY: Final = "#56b4e9"
PURPLE: Final = "#cc79a7"
GREY: Final = "#999999"
"""For the baseline of a comparison, and for lines that guide the eye."""

LIGHT: Final = "#bbbbbb"
"""For lines behind everything else."""
