"""Results of analyses: frozen dataclasses whose fields are the JSON contract.

Encoding one of these with ``msgspec.json.encode`` gives the documented JSON. Keys may be added, never
renamed; ``tests/golden`` freezes them. Times are nanoseconds, sizes bytes, rates bytes per second,
fractions 0..1; ``None`` means unknown or undefined, never zero.

Import a result from the module that defines it. For programs outside this package, ``from
fsdp2prof.results import TraceAnalysis`` also works: names are looked up on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, TypeVar

from fsdp2prof.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

_Part = TypeVar("_Part")


class Shown:
    """Base of results: lays itself out as data frames, figures and HTML for notebooks.

    The content equals the command's output; pandas, plotly and the layout are imported when a method is
    called.
    """

    __slots__ = ()

    def to_pandas(self) -> dict[str, pd.DataFrame]:
        """Return every table by name, in raw units (``_ns``, ``_bytes``, ``_frac``); unknown values are
        NA."""
        frames: dict[str, pd.DataFrame] = _notebook().to_pandas(self)
        return frames

    def frame(self, name: str) -> pd.DataFrame:
        """Return one table: ``frame("by_layer")``. Raises ``UsageError`` for an unknown name."""
        return _named(self.to_pandas(), name, "table")

    def figures(self) -> dict[str, Figure]:
        """Return every chart by name, as a plotly figure."""
        figures: dict[str, Figure] = _notebook().to_figures(self)
        return figures

    def figure(self, name: str) -> Figure:
        """Return one chart: ``figure("timeline")``. Raises ``UsageError`` for an unknown name."""
        return _named(self.figures(), name, "figure")

    def _repr_html_(self) -> str:
        return str(_notebook().to_html(self))


def _notebook() -> Any:
    """Import the layout module by name, because results must not depend on any layout."""
    return import_module("fsdp2prof.reporters.notebook")


def _named(parts: Mapping[str, _Part], name: str, kind: str) -> _Part:
    if name not in parts:
        there = f"there are {', '.join(parts)}" if parts else "it has none"
        raise UsageError(f"no {kind} {name!r} here: {there}")
    return parts[name]


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for module in iter_modules(__path__):
            home = import_module(f"{__name__}.{module.name}")
            if name in vars(home):
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
