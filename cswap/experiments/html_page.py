"""Results as one self-contained HTML page: it includes style and pictures."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment

from cswap.display import visible

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cswap.experiments.grid import Grid

_SHELL: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ccc; text-align: left }
th { background: #f3f3f3 }
img { max-width: 100%; height: auto }
.where { color: #555; font-size: 13px }
</style></head><body>
<h1>{{ title }}</h1>
{% if sections|length > 1 -%}
<nav><ul>
{% for section in sections -%}
<li><a href="#s{{ loop.index }}">{{ section.title }}</a></li>
{% endfor -%}
</ul></nav>
{% endif -%}
{% for section in sections -%}
<section id="s{{ loop.index }}">
{% if section.title %}<h2>{{ section.title }}</h2>{% endif %}
{% if section.where %}<p class="where">{{ section.where }}</p>{% endif %}
{% for table in section.tables -%}
{% if table.title %}<h3>{{ table.title }}</h3>{% endif %}
<div class="wide"><table>
<thead><tr>{% for cell in table.headings %}<th>{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in table.rows -%}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor -%}
</tbody></table></div>
{% for note in table.notes %}<p>{{ note }}</p>
{% endfor -%}
{% endfor -%}
{% for note in section.notes %}<p>{{ note }}</p>
{% endfor -%}
{% for picture in section.pictures -%}
<h3>{{ picture.title }}</h3>
<img alt="{{ picture.alt }}" src="{{ picture.source }}">
{% endfor -%}
</section>
{% endfor -%}
</body></html>
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG.

    Attributes:
        title: above it.
        alt: description for readers who do not see it.
        path: path of the file.
    """

    title: str
    alt: str
    path: Path

    @property
    def source(self) -> str:
        """The picture itself, as an address."""
        return "data:image/png;base64," + base64.b64encode(self.path.read_bytes()).decode()


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page.

    Attributes:
        title: title of the part; empty for a page of one.
        where: machine, versions, command.
        tables: in their order.
        notes: paragraphs below the tables.
        pictures: below those.
    """

    title: str
    where: str = ""
    tables: Sequence[Grid] = ()
    notes: Sequence[str] = ()
    pictures: Sequence[Picture] = ()


def render(title: str, sections: Sequence[Section]) -> str:
    """The page's HTML."""
    template = Environment(autoescape=True, trim_blocks=True, finalize=_finalize).from_string(
        _SHELL
    )
    return template.render(title=title, sections=sections)


def _finalize(value: Any) -> Any:
    return visible(value) if isinstance(value, str) else value


def where(environment: dict[str, Any]) -> str:
    """One line on machine, versions, commit and command of a result, as far as it says."""
    gpu, versions = environment.get("gpu"), environment.get("versions")
    load = environment.get("load_average_before")
    parts = [
        *([str(gpu.get("name"))] if isinstance(gpu, dict) else []),
        f"{environment.get('cpu')}, {environment.get('n_cpus')} cores",
        f"torch {versions.get('torch') if isinstance(versions, dict) else None}",
        _cswap(environment),
        *([f"load {load[0]} before"] if isinstance(load, list) and load else []),
        str(environment.get("command")),
        str(environment.get("started")),
    ]
    return "; ".join(parts)


def _cswap(environment: dict[str, Any]) -> str:
    # A checkout's commit, or the version of an installed package.
    commit, versions = environment.get("cswap_commit"), environment.get("versions")
    if commit is None and isinstance(versions, dict) and versions.get("cswap"):
        return f"cswap {versions['cswap']}"
    return f"commit {commit}{', changed since' if environment.get('cswap_modified') else ''}"
