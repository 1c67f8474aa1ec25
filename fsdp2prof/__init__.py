"""fsdp2prof: profiling, memory and communication analysis for PyTorch FSDP2.

``import fsdp2prof`` is cheap: torch, pandas, plotly and hta are imported by the calls that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp2prof.api import Analysis as Analysis
    from fsdp2prof.api import Recording as Recording
    from fsdp2prof.api import analyze_memory as analyze_memory
    from fsdp2prof.api import analyze_run as analyze_run
    from fsdp2prof.api import analyze_trace as analyze_trace
    from fsdp2prof.api import compare as compare
    from fsdp2prof.api import load as load
    from fsdp2prof.api import what_if as what_if
    from fsdp2prof.estimators.checkpoint import estimate_checkpoint as estimate_checkpoint
    from fsdp2prof.estimators.communication import estimate_comm as estimate_comm
    from fsdp2prof.estimators.config.cluster import Cluster as Cluster
    from fsdp2prof.estimators.config.hardware import HardwareSpec as HardwareSpec
    from fsdp2prof.estimators.config.hardware import NetworkSpec as NetworkSpec
    from fsdp2prof.estimators.config.mesh import MeshSpec as MeshSpec
    from fsdp2prof.estimators.config.model import ModelSpec as ModelSpec
    from fsdp2prof.estimators.config.policy import PolicySpec as PolicySpec
    from fsdp2prof.estimators.memory import estimate_memory as estimate_memory
    from fsdp2prof.estimators.planner.plan import make_plan as make_plan
    from fsdp2prof.estimators.planner.request import PlanRequest as PlanRequest
    from fsdp2prof.estimators.step import estimate_step as estimate_step
    from fsdp2prof.recorder import Recorder as Recorder
    from fsdp2prof.results.comparison import RunComparison as RunComparison
    from fsdp2prof.results.estimate import CheckpointEstimate as CheckpointEstimate
    from fsdp2prof.results.estimate import CommEstimate as CommEstimate
    from fsdp2prof.results.estimate import MemoryEstimate as MemoryEstimate
    from fsdp2prof.results.estimate import StepEstimate as StepEstimate
    from fsdp2prof.results.memory import MemoryAnalysis as MemoryAnalysis
    from fsdp2prof.results.plan import Plan as Plan
    from fsdp2prof.results.run import RunAnalysis as RunAnalysis
    from fsdp2prof.results.trace import TraceAnalysis as TraceAnalysis
    from fsdp2prof.results.what_if import WhatIf as WhatIf
    from fsdp2prof.workflows.ranks.one_rank import references as references

__version__ = "0.1.0"

_HOMES = {
    "fsdp2prof.api": (
        "Analysis",
        "Recording",
        "analyze_memory",
        "analyze_run",
        "analyze_trace",
        "compare",
        "load",
        "what_if",
    ),
    "fsdp2prof.estimators.checkpoint": ("estimate_checkpoint",),
    "fsdp2prof.estimators.communication": ("estimate_comm",),
    "fsdp2prof.estimators.memory": ("estimate_memory",),
    "fsdp2prof.estimators.planner.plan": ("make_plan",),
    "fsdp2prof.estimators.planner.request": ("PlanRequest",),
    "fsdp2prof.estimators.config.cluster": ("Cluster",),
    "fsdp2prof.estimators.config.hardware": ("HardwareSpec", "NetworkSpec"),
    "fsdp2prof.estimators.config.mesh": ("MeshSpec",),
    "fsdp2prof.estimators.config.model": ("ModelSpec",),
    "fsdp2prof.estimators.config.policy": ("PolicySpec",),
    "fsdp2prof.estimators.step": ("estimate_step",),
    "fsdp2prof.recorder": ("Recorder",),
    "fsdp2prof.results.comparison": ("RunComparison",),
    "fsdp2prof.results.estimate": ("CheckpointEstimate", "CommEstimate", "MemoryEstimate", "StepEstimate"),
    "fsdp2prof.results.memory": ("MemoryAnalysis",),
    "fsdp2prof.results.plan": ("Plan",),
    "fsdp2prof.results.run": ("RunAnalysis",),
    "fsdp2prof.results.trace": ("TraceAnalysis",),
    "fsdp2prof.results.what_if": ("WhatIf",),
    "fsdp2prof.workflows.ranks.one_rank": ("references",),
}
"""Module of each public name; a module is imported on first use."""

_PUBLIC = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(["__version__", *_PUBLIC])


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fsdp2prof' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return list(__all__)
