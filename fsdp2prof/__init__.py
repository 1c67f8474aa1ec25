"""fsdp2prof: where a PyTorch FSDP2 step goes, what fills memory at the peak, what a run will need.

``import fsdp2prof`` is cheap: torch, pandas, plotly and hta are imported by the call that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp2prof.estimators.checkpoint import estimate_checkpoint
    from fsdp2prof.estimators.communication import estimate_comm
    from fsdp2prof.estimators.memory import estimate_memory
    from fsdp2prof.estimators.spec.mesh import MeshSpec
    from fsdp2prof.estimators.spec.model import ModelSpec
    from fsdp2prof.estimators.spec.policy import PolicySpec
    from fsdp2prof.recorder import Recorder

__all__ = [
    "MeshSpec",
    "ModelSpec",
    "PolicySpec",
    "Recorder",
    "__version__",
    "estimate_checkpoint",
    "estimate_comm",
    "estimate_memory",
]

__version__ = "0.1.0"

_LAZY = {
    "MeshSpec": "fsdp2prof.estimators.spec.mesh",
    "ModelSpec": "fsdp2prof.estimators.spec.model",
    "PolicySpec": "fsdp2prof.estimators.spec.policy",
    "Recorder": "fsdp2prof.recorder",
    "estimate_checkpoint": "fsdp2prof.estimators.checkpoint",
    "estimate_comm": "fsdp2prof.estimators.communication",
    "estimate_memory": "fsdp2prof.estimators.memory",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fsdp2prof' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
