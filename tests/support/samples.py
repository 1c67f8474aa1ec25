"""One small result of every kind that has a document, made by the code that makes real ones where it can."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from fsdp2prof.analyzers.balance import RankStep, StepTokens, check_balance
from fsdp2prof.analyzers.bench import bench_result
from fsdp2prof.analyzers.compare.baseline import Side, baseline_of
from fsdp2prof.analyzers.hang.analysis import analyze_hang
from fsdp2prof.analyzers.hta.views import critical_path, idle_causes, launch_statistics, trace_diff
from fsdp2prof.analyzers.nccl.analysis import analyze_nccl
from fsdp2prof.analyzers.sharding.checkpoint import map_checkpoint
from fsdp2prof.analyzers.sharding.environment import judge_environment
from fsdp2prof.analyzers.sharding.layout import lay_out_shards
from fsdp2prof.analyzers.sharding.mesh_map import map_mesh
from fsdp2prof.analyzers.sharding.parity import judge_parity
from fsdp2prof.analyzers.trace.analysis import analyze_tables
from fsdp2prof.analyzers.trace.rank_tables import rank_tables
from fsdp2prof.analyzers.whatif.recorded import program_of
from fsdp2prof.analyzers.whatif.what_if import RecordedRank, what_if
from fsdp2prof.estimators.checkpoint import estimate_checkpoint
from fsdp2prof.estimators.communication import estimate_comm
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.packing import estimate_packing
from fsdp2prof.estimators.sharding_table import shard_model
from fsdp2prof.estimators.step import estimate_step, predict_step
from fsdp2prof.estimators.techniques.weight_sync import WeightSyncSpec
from fsdp2prof.measured import CollectiveTimes, Measured, RateTimes
from fsdp2prof.results.bench import BenchResult
from fsdp2prof.results.catalog import CategoryCatalog, HardwareCatalog, ModelCatalog
from fsdp2prof.results.check import BalanceCheck, EnvironmentCheck, ParityCheck, RunCheck
from fsdp2prof.results.comparison import Baseline, MemoryComparison, RunComparison
from fsdp2prof.results.estimate import (
    CheckpointEstimate,
    CommEstimate,
    MemoryEstimate,
    PackingEstimate,
    StepEstimate,
)
from fsdp2prof.results.hang import HangAnalysis
from fsdp2prof.results.hta import CriticalPath, IdleCauses, LaunchStatistics, TraceDiff
from fsdp2prof.results.memory import MemoryAnalysis
from fsdp2prof.results.mesh import MeshMap
from fsdp2prof.results.nccl import NcclAnalysis
from fsdp2prof.results.plan import Plan
from fsdp2prof.results.run import RunAnalysis
from fsdp2prof.results.sharding import CheckpointMap, ShardingMap
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.results.trial import TrialResult
from fsdp2prof.results.watch import WatchedRun
from fsdp2prof.results.what_if import WhatIf
from fsdp2prof.tables.flight_recorder import RankStacks, StackFrame, ThreadStack
from fsdp2prof.workflows.inspect import list_categories, list_hardware, list_models
from support.checkpoints import small_checkpoint
from support.flight_dumps import two_ranks_that_differ
from support.nccl_files import inspected, logged, manifest
from support.parity_measurements import doubled_gradient
from support.plans import small_plan
from support.probes import two_probes
from support.results import (
    memory_analysis,
    memory_comparison,
    run_analysis,
    run_comparison,
    trace_analysis,
    trial_sample,
)
from support.run_checks import run_check
from support.traces import two_kernel_trace
from support.watched import watched_run

MODEL, MESH = ModelSpec(source="gpt2", layers=1), MeshSpec(dp_shard=2)
POLICY = PolicySpec(seq_len=16)


def baseline() -> Baseline:
    """The sums of a small run."""
    analysis = run_analysis()
    assert analysis.memory is not None
    peaks = {rank.rank: rank.peak for rank in analysis.memory.ranks}
    return baseline_of(Side(path="run", kind="run", trace=analysis.trace, peaks=peaks, run=analysis.run))


def two_measured_ranks() -> Measured:
    """Times of two gloo ranks, made up."""
    return Measured(
        device_type="cpu",
        device="cpu",
        backend="gloo",
        world_size=2,
        ranks_per_node=2,
        memory_bytes=8 << 30,
        units=1,
        torch="2.13.0",
        seconds=2.5,
        collectives=[
            CollectiveTimes(op=op, mesh_dim="world", ranks=2, payload_bytes=size, times_ns=[size + 100_000])
            for op in ("all_gather", "all_reduce")
            for size in (4096, 1 << 20)
        ],
        rates=[
            RateTimes(kind=kind, dtype="float32", size="some", amount=1 << 20, times_ns=[10_000, 12_000])
            for kind in ("matmul", "attention", "copy", "operator")
        ],
    )


def what_if_sample() -> WhatIf:
    """A run of one simulated rank, every single change tried."""
    trace = predict_step(MODEL, MESH, POLICY, Cluster(hardware=HardwareSpec.parse("h100"))).trace
    tables = rank_tables(trace)
    analysis = analyze_tables(tables)
    program = program_of(tables, analysis.summary)
    return what_if([RecordedRank(tables=tables, program=program, analysis=analysis)], "run")


def small_balance() -> BalanceCheck:
    """Two ranks, one of which has 20 ns more to do, and the tokens of one step."""
    measured = {
        rank: {step: RankStep(duration_ns=100, busy_ns=60 + 20 * rank) for step in range(2)}
        for rank in range(2)
    }
    tokens = {0: [StepTokens(tokens=3, computed=5), StepTokens(tokens=8, computed=8)]}
    return check_balance(measured, path="run", measured_on="watched", tokens=tokens, documents=4)


def nccl_analysis() -> NcclAnalysis:
    """Four ranks on two nodes: a communicator that both the Inspector and the log know, and another."""
    with tempfile.TemporaryDirectory() as folder:
        gathers = [[("all_gather", n, 2000, 400 - 90 * rank) for n in range(4)] for rank in range(2)]
        log = logged(Path(folder, "logs"), far="NET/Socket/0", calls=3)
        manifests = {rank: manifest(rank) for rank in range(2)}
        return analyze_nccl(inspected(Path(folder), gathers), log, manifests)


def hang_analysis() -> HangAnalysis:
    """Two ranks that issue different collectives, and the stack of one of them."""
    calls = [StackFrame("/env/torch/distributed/distributed_c10d.py", 9, "all_reduce")]
    main = ThreadStack(name="MainThread", frames=[*calls, StackFrame("/me/train.py", 7, "main")])
    stacks = RankStacks(rank=1, source="stacks_1.txt", tool="py-spy", main=main, others=[])
    return analyze_hang(two_ranks_that_differ(), stacks=[stacks])


SAMPLES: dict[str, tuple[type, str, Callable[[], Any]]] = {
    "trace": (TraceAnalysis, "fsdp2prof.trace/1", trace_analysis),
    "memory": (MemoryAnalysis, "fsdp2prof.memory/1", memory_analysis),
    "memory_comparison": (MemoryComparison, "fsdp2prof.memory_comparison/1", memory_comparison),
    "hang": (HangAnalysis, "fsdp2prof.hang/1", hang_analysis),
    "nccl": (NcclAnalysis, "fsdp2prof.nccl/1", nccl_analysis),
    "check": (RunCheck, "fsdp2prof.check/1", run_check),
    "parity": (
        ParityCheck,
        "fsdp2prof.check.parity/1",
        lambda: judge_parity(doubled_gradient()),
    ),
    "watch": (WatchedRun, "fsdp2prof.watch/1", watched_run),
    "environment_check": (
        EnvironmentCheck,
        "fsdp2prof.check.env/1",
        lambda: judge_environment(
            two_probes(), command=["torchrun"], world_size=2, transports={(0, 1, "NET/IB/0"): 4}
        ),
    ),
    "mesh": (
        MeshMap,
        "fsdp2prof.inspect.mesh/1",
        lambda: map_mesh({"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}, gpus_per_node=8),
    ),
    "sharding": (
        ShardingMap,
        "fsdp2prof.inspect.sharding/1",
        lambda: lay_out_shards(shard_model(MODEL, MeshSpec(dp_replicate=2, dp_shard=5), POLICY)),
    ),
    "checkpoint": (
        CheckpointMap,
        "fsdp2prof.inspect.checkpoint/1",
        lambda: map_checkpoint(small_checkpoint(), shard_model(MODEL, MESH, POLICY)),
    ),
    "models": (ModelCatalog, "fsdp2prof.inspect.models/1", list_models),
    "hardware": (HardwareCatalog, "fsdp2prof.inspect.hardware/1", list_hardware),
    "categories": (CategoryCatalog, "fsdp2prof.inspect.categories/1", list_categories),
    "baseline": (Baseline, "fsdp2prof.baseline/1", baseline),
    "compare": (RunComparison, "fsdp2prof.compare/1", run_comparison),
    "run_analysis": (RunAnalysis, "fsdp2prof.run_analysis/1", run_analysis),
    "memory_estimate": (
        MemoryEstimate,
        "fsdp2prof.estimate.memory/1",
        lambda: estimate_memory(MODEL, MESH, POLICY),
    ),
    "comm_estimate": (
        CommEstimate,
        "fsdp2prof.estimate.comm/1",
        lambda: estimate_comm(MODEL, MESH, POLICY, WeightSyncSpec(engines=2)),
    ),
    "step_estimate": (
        StepEstimate,
        "fsdp2prof.estimate.step/1",
        lambda: estimate_step(MODEL, MESH, POLICY, Cluster(hardware=HardwareSpec.parse("h100"))),
    ),
    "packing_estimate": (
        PackingEstimate,
        "fsdp2prof.estimate.packing/1",
        lambda: estimate_packing([3, 5, 2, 9], seq_len=8, batch_size=2),
    ),
    "balance": (
        BalanceCheck,
        "fsdp2prof.check.balance/1",
        small_balance,
    ),
    "plan": (Plan, "fsdp2prof.plan/1", small_plan),
    "checkpoint_estimate": (
        CheckpointEstimate,
        "fsdp2prof.estimate.checkpoint/1",
        lambda: estimate_checkpoint(MODEL, MESH, POLICY),
    ),
    "critical_path": (
        CriticalPath,
        "fsdp2prof.trace.critical_path/1",
        lambda: critical_path(two_kernel_trace()),
    ),
    "launch_statistics": (
        LaunchStatistics,
        "fsdp2prof.trace.launch_statistics/1",
        lambda: launch_statistics(two_kernel_trace()),
    ),
    "idle_causes": (
        IdleCauses,
        "fsdp2prof.trace.idle_causes/1",
        lambda: idle_causes(two_kernel_trace()),
    ),
    "bench": (BenchResult, "fsdp2prof.bench/1", lambda: bench_result(two_measured_ranks())),
    "trial": (TrialResult, "fsdp2prof.try/1", trial_sample),
    "what_if": (WhatIf, "fsdp2prof.what_if/1", what_if_sample),
    "trace_diff": (
        TraceDiff,
        "fsdp2prof.trace.diff/1",
        lambda: trace_diff(two_kernel_trace(), two_kernel_trace()),
    ),
}
"""Short name -> type, schema, what makes one."""


@cache
def sample(name: str) -> Any:
    """Return the sample of a name, made once a process."""
    return SAMPLES[name][2]()
