"""A result becomes its document: one builder a kind of result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp2prof.reporters.document import Document
from fsdp2prof.reporters.documents.balance import balance_document
from fsdp2prof.reporters.documents.baseline import baseline_document
from fsdp2prof.reporters.documents.bench import bench_document
from fsdp2prof.reporters.documents.catalogs import (
    category_catalog_document,
    hardware_catalog_document,
    model_catalog_document,
)
from fsdp2prof.reporters.documents.check import check_document
from fsdp2prof.reporters.documents.checkpoint_estimate import checkpoint_estimate_document
from fsdp2prof.reporters.documents.comm_estimate import comm_estimate_document
from fsdp2prof.reporters.documents.comparison import comparison_document
from fsdp2prof.reporters.documents.environment_check import environment_check_document
from fsdp2prof.reporters.documents.hang import hang_document
from fsdp2prof.reporters.documents.hta import (
    critical_path_document,
    diff_document,
    idle_document,
    launch_document,
)
from fsdp2prof.reporters.documents.inspected_checkpoint import checkpoint_document
from fsdp2prof.reporters.documents.memory import memory_document
from fsdp2prof.reporters.documents.memory_comparison import memory_comparison_document
from fsdp2prof.reporters.documents.memory_estimate import memory_estimate_document
from fsdp2prof.reporters.documents.mesh import mesh_document
from fsdp2prof.reporters.documents.nccl import nccl_document
from fsdp2prof.reporters.documents.packing_estimate import packing_estimate_document
from fsdp2prof.reporters.documents.parity import parity_document
from fsdp2prof.reporters.documents.plan import plan_document
from fsdp2prof.reporters.documents.run import run_document
from fsdp2prof.reporters.documents.sharding import sharding_document
from fsdp2prof.reporters.documents.step_estimate import step_estimate_document
from fsdp2prof.reporters.documents.trace import trace_document
from fsdp2prof.reporters.documents.watch import watch_document
from fsdp2prof.reporters.documents.what_if import what_if_document
from fsdp2prof.results import (
    BalanceCheck,
    Baseline,
    BenchResult,
    CategoryCatalog,
    CheckpointEstimate,
    CheckpointMap,
    CommEstimate,
    CriticalPath,
    EnvironmentCheck,
    HangAnalysis,
    HardwareCatalog,
    IdleCauses,
    LaunchStatistics,
    MemoryAnalysis,
    MemoryComparison,
    MemoryEstimate,
    MeshMap,
    ModelCatalog,
    NcclAnalysis,
    PackingEstimate,
    ParityCheck,
    Plan,
    RunAnalysis,
    RunCheck,
    RunComparison,
    ShardingMap,
    StepEstimate,
    TraceAnalysis,
    TraceDiff,
    WatchedRun,
    WhatIf,
)

__all__ = ["BUILDERS", "build"]

BUILDERS: dict[type, Callable[[Any], Document]] = {
    Baseline: baseline_document,
    BenchResult: bench_document,
    CheckpointEstimate: checkpoint_estimate_document,
    CommEstimate: comm_estimate_document,
    CriticalPath: critical_path_document,
    HangAnalysis: hang_document,
    IdleCauses: idle_document,
    LaunchStatistics: launch_document,
    MemoryAnalysis: memory_document,
    MemoryComparison: memory_comparison_document,
    MemoryEstimate: memory_estimate_document,
    Plan: plan_document,
    CategoryCatalog: category_catalog_document,
    CheckpointMap: checkpoint_document,
    HardwareCatalog: hardware_catalog_document,
    ModelCatalog: model_catalog_document,
    ShardingMap: sharding_document,
    MeshMap: mesh_document,
    NcclAnalysis: nccl_document,
    ParityCheck: parity_document,
    EnvironmentCheck: environment_check_document,
    RunCheck: check_document,
    PackingEstimate: packing_estimate_document,
    BalanceCheck: balance_document,
    RunAnalysis: run_document,
    RunComparison: comparison_document,
    StepEstimate: step_estimate_document,
    TraceAnalysis: trace_document,
    TraceDiff: diff_document,
    WhatIf: what_if_document,
    WatchedRun: watch_document,
}
"""Type of a result -> its builder."""


def build(result: Any) -> Document:
    """Return a result's document. Raises ``KeyError`` for a type that has none."""
    return BUILDERS[type(result)](result)
