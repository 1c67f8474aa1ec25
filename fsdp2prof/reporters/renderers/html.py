"""A page: one offline HTML file with the tables and charts of a document.

Everything a trace or a run says is untrusted. Text is escaped by the templates (autoescape), chart data by
:func:`_json_in_script` or packed, and the page's content security policy allows the page's own scripts by
their hashes and nothing else: no request leaves the file. Scripts are packed (gzip, base64): plotly is most
of a page.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from base64 import b64encode
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fsdp2prof import __version__
from fsdp2prof.reporters.charts.figure import DARK
from fsdp2prof.reporters.document import CHANGES, Block, Column, Document, Section, Table, Value
from fsdp2prof.reporters.renderers import RenderOptions
from fsdp2prof.reporters.renderers.terminal import shorten
from fsdp2prof.vocabulary import layer_name, printable

if TYPE_CHECKING:
    from markupsafe import Markup

_ROW_LIMIT = 2000
"""Rows of an unabridged table: a browser can still open a page of thousands of ranks quickly."""

_NAME_LENGTH = 120
"""Characters of a name in a table; the middle of a longer one is left out, the whole shown on hover."""

_WHOLE_NAME = 24
"""Characters of a name that never breaks."""

_BESIDE_ANOTHER = 32
"""Characters of a name for which there is room in a table beside another one."""

_BREAK = re.compile(r"([._:/,](?=[^\W\d])|(?<=[^\W\d])\.(?=\d))")
_CODE = re.compile("`([^`]+)`|(?<![^\\s(])--[a-z][\\w-]*")
_BREAKABLE = re.compile(r"\S*[-/?]\S*")
_LONG = re.compile(r"[\w.:/,]{30,}")


class HtmlRenderer:
    """A page that needs nothing but itself: works offline, in the dark, on paper and on a phone."""

    def render(self, document: Document, options: RenderOptions) -> str:
        """Fill the template with the document; ``options.source`` is the page's title."""
        return _page(document, options)


def _page(document: Document, options: RenderOptions, *, embedded: bool = False) -> str:
    """Fill the template with the document; ``embedded``: only its sections are seen."""
    from markupsafe import Markup

    charts = document.charts()
    details = {name: chart.zoomed() for name, chart in charts.items() if chart.detail is not None}
    scripts = [_asset("datatables.min.js"), _asset("tables.js")]
    if charts:
        scripts += [_plotly(), _asset("charts.js")]
    if details:
        scripts.append(_asset("timeline.js"))
    loader = _asset("load.js")
    page: str = _template("page").render(
        document=document,
        title=options.source or document.title,
        figures=Markup(_json_in_script({name: chart.drawn() for name, chart in charts.items()})),
        details=_packed(json.dumps(details, allow_nan=False, separators=(",", ":"))) if details else "",
        dark=Markup(_json_in_script(DARK)),
        loader=Markup(loader),
        scripts=[_packed(script) for script in scripts],
        script_hashes=[_hash(script) for script in (loader, *scripts)],
        css=Markup(_asset("page.css")),
        version=__version__,
        embedded=embedded,
    )
    return page


def render_fragment(document: Document) -> str:
    """Return the first screen as HTML for a notebook: the verdict, then the timeline.

    The timeline is a page in a frame: no script runs in the notebook. Without a timeline, the short form
    follows.
    """
    framed = _timeline_alone(document)
    frame = None if framed is None else _page(framed, RenderOptions(), embedded=True)
    fragment: str = _template("fragment").render(document=document, frame=frame)
    return fragment


def _timeline_alone(document: Document) -> Document | None:
    """Return a document with only its timeline and the links to it; None without one."""
    charts = [one for one in document.charts().values() if one.detail is not None]
    if not charts:
        return None
    places = {
        line: [link for link in links if link.window is not None] for line, links in document.places().items()
    }
    section = Section(anchor=charts[0].name, title="", blocks=charts[:1])
    return replace(document, sections=[section], places=lambda: places, numbers=(), warnings=())


@cache
def _template(name: str) -> Any:
    from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "breakable": _breakable,
        "broad": _broad,
        "cell": _cell,
        "code": _code,
        "data": _data,
        "full": _full,
        "full_rows": _full_rows,
        "header": _header,
        "kind": _kind,
        "layer_name": layer_name,
        "long": _long,
        "printable": printable,
        "sentence": _sentence,
    }
    environment.globals |= {"row_limit": _ROW_LIMIT, "changes_title": CHANGES}
    return environment.get_template(f"{name}.html.j2")


# Filters of the template.


def _kind(block: Block) -> str:
    return type(block).__name__


def _header(column: Column) -> str:
    return printable(column.header)


def _sentence(line: str) -> Markup:
    """Escape a sentence; code in backquotes; long words may break after a dot or underscore."""
    from markupsafe import Markup, escape

    def code(found: re.Match[str]) -> str:
        return _whole_words(found[0]) if found[1] is None else f"<code>{_whole_words(found[1])}</code>"

    text = _CODE.sub(code, str(escape(printable(line))))
    return Markup(_LONG.sub(lambda word: _BREAK.sub(r"\1<wbr>", word.group()), text))


def _code(line: str) -> Markup:
    """Escape a line of code, which breaks at its spaces and at no hyphen."""
    from markupsafe import Markup, escape

    return Markup(_whole_words(str(escape(printable(line)))))


def _whole_words(text: str) -> str:
    """Mark words of escaped text that a browser would break at a hyphen or slash though a line holds them."""
    return _BREAKABLE.sub(r"<span class='whole'>\g<0></span>", text)


def _cell(value: Value, column: Column) -> str:
    text = printable(column.text(value))
    return shorten(text, _NAME_LENGTH) if column.kind == "name" else text


def _breakable(text: str) -> Markup:
    """Escape a name that may break after a dot or an underscore if it is long, never inside a word."""
    from markupsafe import Markup, escape

    name = escape(text)
    return Markup(_BREAK.sub(r"\1<wbr>", str(name))) if _long(text) else name


def _long(name: str) -> bool:
    return len(name) > _WHOLE_NAME


def _broad(table: Table) -> bool:
    """Whether a table takes the whole width: for its many columns, or for names that would break."""
    kinds = [column.kind for column in table.columns]
    names = [i for i, kind in enumerate(kinds) if kind == "name"]
    shown = table.rows[: table.limit]
    longest = max((len(_cell(row[i], table.columns[i])) for row in shown for i in names), default=0)
    return len(kinds) > (4 if "prose" in kinds else 7) or longest > _BESIDE_ANOTHER


def _data(value: Value, column: Column) -> Value:
    """Sort value of a cell: the number itself."""
    return value if column.kind == "number" and isinstance(value, (int, float)) else None


def _full(value: Value, column: Column) -> str | None:
    """The whole of a name that is shown shortened."""
    shortened = (
        column.kind == "name" and isinstance(value, str) and value and value not in _cell(value, column)
    )
    return printable(str(value)) if shortened else None


def _full_rows(table: Table) -> Table | None:
    """The table behind the fold: every row that the shown one leaves out or folds."""
    if table.unabridged is not None:
        return table.unabridged
    return table if table.limit is not None and len(table.rows) > table.limit else None


@cache
def _asset(name: str) -> str:
    return files("fsdp2prof.reporters").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """The part of plotly.js that draws bars, lines and heatmaps: a third of all of it opens twice as fast."""
    packed = files("fsdp2prof.reporters").joinpath("assets").joinpath("plotly-cartesian.min.js.gz")
    return gzip.decompress(packed.read_bytes()).decode()


@cache
def _packed(text: str) -> str:
    """Compress text that the page unpacks; base64, reproducible."""
    return b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def _hash(script: str) -> str:
    """Hash of an inline script as content security policies write it."""
    return "sha256-" + b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _json_in_script(value: Any) -> str:
    """Encode JSON that cannot end its script element."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
