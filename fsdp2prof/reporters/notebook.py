"""Results in a notebook: their document as data frames, figures and HTML."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from fsdp2prof.reporters.document import Table
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers.html import render_fragment
from fsdp2prof.vocabulary import printable

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure


def to_pandas(result: Any) -> dict[str, pd.DataFrame]:
    """Return the tables of a result's document: raw values, integers exact, unknown ones NA."""
    return {name: _frame(table) for name, table in build(result).tables().items()}


def to_figures(result: Any) -> dict[str, Figure]:
    """Return the charts of a result's document."""
    from plotly.graph_objects import Figure

    return {
        name: Figure(chart.drawn()).update_layout(title_text=escape(printable(chart.title)), margin_t=72)
        for name, chart in build(result).charts().items()
    }


def to_html(result: Any) -> str:
    """Return the first screen of a result as HTML for a notebook: no script, no chart."""
    return render_fragment(build(result))


def _frame(table: Table) -> pd.DataFrame:
    import pandas as pd

    columns, rows = table.raw()
    return pd.DataFrame(rows, columns=[column.name for column in columns], dtype=object).convert_dtypes()
