"""Tables of the committed results of a GPU."""

from __future__ import annotations

from typing import Any, Final

from bench.gpu import tables
from bench.pages.committed import load

FOLDER: Final = "nvidia-h200"
"""Below bench/results."""


def codecs_table() -> str:
    """Rates of kernels, beside a copy."""
    return _table("codecs")


def link_table() -> str:
    """Rates of the link, and of kernels that store across it."""
    return _table("link")


def swap_table() -> str:
    """One tensor out and back, each way of doing so."""
    return _table("swap")


def training_table() -> str:
    """Steps of models, by method."""
    return _table("training")


def _table(part: str) -> str:
    data = load(f"../{FOLDER}/{part}.json")
    return f"{tables.markdown(data)}\n\n{_where(data, part)}"


def _where(data: dict[str, Any], part: str) -> str:
    e = data["environment"]
    gpu = e["gpu"]
    return (
        f"Measured by `{e['command']}` on {gpu['name']}, driver {gpu['driver']}, "
        f"torch {e['versions']['torch']}, {e['n_cpus']} cores of {e['cpu']}; "
        f"file: `bench/results/{FOLDER}/{part}.json`."
    )
