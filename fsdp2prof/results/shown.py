"""What every result offers to people at a prompt or in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

__all__ = ["Shown"]


class Shown:
    """A result that lays itself out: as data frames, as figures, as HTML in a notebook.

    It is what the command prints; pandas, plotly and the layout are imported when a method is called.
    """

    __slots__ = ()

    def to_pandas(self) -> dict[str, pd.DataFrame]:
        """Return every table by its name, in raw units (``_ns``, ``_bytes``, ``_frac``); unknown is NA."""
        from fsdp2prof.reporters.notebook import to_pandas

        return to_pandas(self)

    def figures(self) -> dict[str, Figure]:
        """Return every chart by its name, as a plotly figure."""
        from fsdp2prof.reporters.notebook import to_figures

        return to_figures(self)

    def _repr_html_(self) -> str:
        from fsdp2prof.reporters.notebook import to_html

        return to_html(self)
