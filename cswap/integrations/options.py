"""Options of an integration: from arguments, a mapping, or a file in YAML or JSON."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cswap.config import SwapConfig
from cswap.display import shown, visible
from cswap.errors import ConfigError

if TYPE_CHECKING:
    from typing import TypeAlias

    Source: TypeAlias = "SwapConfig | Mapping[str, Any] | CswapArguments | str | os.PathLike[str]"

SECTION: Final = "cswap"
"""Key of a file or mapping under which the options lie, if it holds others, too."""

PREFIX: Final = "cswap_"


@dataclass(frozen=True)
class CswapArguments:
    """Options as command-line arguments, for `transformers.HfArgumentParser`.

    See `cswap.SwapConfig`; an argument that is not given is left to its default.

    Attributes:
        cswap_lossy: ``lossy``.
        cswap_codec: ``codec``.
        cswap_budget: ``budget``.
        cswap_min_bytes: ``min_bytes``.
        cswap_exclude: ``exclude``, globs separated by commas.
        cswap_include: ``include``, likewise.
        cswap_remat: ``remat``.
        cswap_fit: ``fit``.
        cswap_slowdown: ``slowdown``.
    """

    cswap_lossy: str | None = field(
        default=None, metadata={"help": "Lossy codec, or largest relative error; default: off."}
    )
    cswap_codec: str | None = field(default=None, metadata={"help": "Codec; default: auto."})
    cswap_budget: str | None = field(
        default=None, metadata={"help": 'Device bytes that saved tensors may keep: "2GiB".'}
    )
    cswap_min_bytes: str | None = field(
        default=None, metadata={"help": "Smaller tensors stay in place."}
    )
    cswap_exclude: str | None = field(
        default=None, metadata={"help": "Globs on module paths that stay, with commas."}
    )
    cswap_include: str | None = field(
        default=None, metadata={"help": "Globs on module paths that alone are swapped."}
    )
    cswap_remat: str | None = field(
        default=None, metadata={"help": "Whether cheap tensors are computed again: yes or no."}
    )
    cswap_fit: str | None = field(
        default=None, metadata={"help": 'Device bytes of a step: "16GiB", "min" or "device".'}
    )
    cswap_slowdown: str | None = field(
        default=None, metadata={"help": "Longest step, over that without cswap; default: 1.1."}
    )


def read_options(source: Source | None, options: Mapping[str, Any]) -> SwapConfig:
    """The configuration of an integration.

    Args:
        source: a `SwapConfig`, a mapping, `CswapArguments`, or a file in YAML or JSON. Mappings and
            files may hold the options under the key "cswap".
        options: by name; they override those of ``source``.

    Raises:
        ConfigError: an option is unknown or has a wrong value, or the file cannot be read.
    """
    if source is None or isinstance(source, SwapConfig):
        return SwapConfig.resolve(source, **options)
    if isinstance(source, CswapArguments):
        given = dataclasses.asdict(source).items()
        found = {k.removeprefix(PREFIX): v for k, v in given if v is not None}
    elif isinstance(source, Mapping):
        found = _section(source, "options")
    elif isinstance(source, str | os.PathLike):
        found = _section(_read(Path(source)), f"options={shown(str(source))}")
    else:
        raise ConfigError(
            f"options={shown(source)}: must be a SwapConfig, a mapping, CswapArguments, or the "
            "path of a YAML or JSON file."
        )
    return SwapConfig.resolve(None, **{**found, **options})


def _section(found: Mapping[Any, Any], where: str) -> dict[str, Any]:
    inner = found.get(SECTION, found)
    if not isinstance(inner, Mapping) or not all(isinstance(key, str) for key in inner):
        raise ConfigError(f"{where}: must map names of options to values.")
    return dict(inner)


def _read(path: Path) -> Mapping[Any, Any]:
    where = f"options={shown(str(path))}"
    try:
        import yaml  # JSON is YAML, too
    except ImportError as error:
        raise ConfigError(f"{where}: needs PyYAML ({error}): pip install pyyaml.") from error
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{where}: cannot be read ({visible(why)}).") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{where}: must map names of options to values.")
    return found
