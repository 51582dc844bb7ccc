"""Compressed swapping of the tensors that PyTorch's autograd saves for backward.

>>> import cswap
>>> cswap.list_codecs()[0]
'bf16'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cswap import plan as plan
    from cswap.api import install as install
    from cswap.api import swapping as swapping
    from cswap.codecs.base import Codec as Codec
    from cswap.codecs.base import Encoding as Encoding
    from cswap.codecs.registry import get_codec as get_codec
    from cswap.codecs.registry import list_codecs as list_codecs
    from cswap.codecs.registry import register_codec as register_codec
    from cswap.compiled.hooks import inlined as inlined
    from cswap.config import SwapConfig as SwapConfig
    from cswap.errors import ConfigError as ConfigError
    from cswap.errors import CorruptEncodingError as CorruptEncodingError
    from cswap.errors import CswapError as CswapError
    from cswap.errors import UnknownCodecError as UnknownCodecError
    from cswap.option_types import SwapOptions as SwapOptions
    from cswap.plan.estimate import estimate as estimate
    from cswap.plan.hardware import list_hardware as list_hardware
    from cswap.plan.hardware import load_hardware as load_hardware
    from cswap.plan.simulate import simulate as simulate
    from cswap.schema.plan import Plan as Plan
    from cswap.schema.tensor import TensorProfile as TensorProfile
    from cswap.schema.trace import Trace as Trace
    from cswap.stats.stats import Stats as Stats

__version__: Final = "0.1.0"

_EXPORTS: Final = {
    "Codec": "cswap.codecs.base",
    "ConfigError": "cswap.errors",
    "CorruptEncodingError": "cswap.errors",
    "CswapError": "cswap.errors",
    "Encoding": "cswap.codecs.base",
    "Plan": "cswap.schema.plan",
    "Stats": "cswap.stats.stats",
    "SwapConfig": "cswap.config",
    "SwapOptions": "cswap.option_types",
    "TensorProfile": "cswap.schema.tensor",
    "Trace": "cswap.schema.trace",
    "UnknownCodecError": "cswap.errors",
    "estimate": "cswap.plan.estimate",
    "get_codec": "cswap.codecs.registry",
    "inlined": "cswap.compiled.hooks",
    "install": "cswap.api",
    "list_codecs": "cswap.codecs.registry",
    "list_hardware": "cswap.plan.hardware",
    "load_hardware": "cswap.plan.hardware",
    "register_codec": "cswap.codecs.registry",
    "simulate": "cswap.plan.simulate",
    "swapping": "cswap.api",
}
"""Public name to the module it lives in, imported on first use."""

__all__ = [
    "Codec",
    "ConfigError",
    "CorruptEncodingError",
    "CswapError",
    "Encoding",
    "Plan",
    "Stats",
    "SwapConfig",
    "SwapOptions",
    "TensorProfile",
    "Trace",
    "UnknownCodecError",
    "__version__",
    "estimate",
    "get_codec",
    "inlined",
    "install",
    "list_codecs",
    "list_hardware",
    "load_hardware",
    "plan",
    "register_codec",
    "simulate",
    "swapping",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # a checker that saw it would accept any name

    def __getattr__(name: str) -> object:
        # Lazy, so that `cswap --help`, the planners and the simulator start without torch.
        if name not in (*_EXPORTS, "plan"):
            raise AttributeError(f"module 'cswap' has no attribute {name!r}")
        if name == "plan":  # a package that can be called
            return importlib.import_module("cswap.plan")
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value  # the next access does not come here
        return value
