"""fsdp2prof: where a PyTorch FSDP2 step goes, what fills memory at the peak, what a run will need.

``import fsdp2prof`` is cheap: torch, pandas, plotly and hta are imported by the call that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp2prof.recorder import Recorder

__all__ = ["Recorder", "__version__"]

__version__ = "0.1.0"

_LAZY = {"Recorder": "fsdp2prof.recorder"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fsdp2prof' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
