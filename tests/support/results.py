"""Hand-made analyses for the tests of the outputs: two ranks, two steps, a root and four blocks.

What is said of memory and of a run is written out here. A trace's rows and a comparison's sides are made by
hand and summed by the analyzers; test_trace_summary.py, test_by_layer.py and test_compare.py derive the sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp2prof.analyzers.compare.baseline import Side
from fsdp2prof.analyzers.compare.sides import compare
from fsdp2prof.analyzers.run_summary import combine
from fsdp2prof.analyzers.trace.summary import of_part
from fsdp2prof.results.communication import Attribution, Communication, CrossRank, GroupRow, Straggler
from fsdp2prof.results.comparison import LayerMemoryDelta, MemoryComparison, MemoryDelta, RunComparison
from fsdp2prof.results.finding import Finding
from fsdp2prof.results.memory import LayerPeak, MemoryAnalysis, MemoryFigures, PhaseSpan, RankMemory
from fsdp2prof.results.peak import (
    CategoryBytes,
    Fragmentation,
    LayerBytes,
    LayerMemory,
    LiveBlock,
    OutOfMemory,
    Peak,
    PoolBytes,
    Remedy,
)
from fsdp2prof.results.run import RunAnalysis, RunRank, RunSummary, ShardFamily, ShardGroup, StepTime
from fsdp2prof.results.step import BreakdownNs, StepBreakdown, UnrecordedStep
from fsdp2prof.results.trace import RankTrace, TraceAnalysis
from fsdp2prof.results.trial import TrialResult, TriedChange, UntriedChange

MS = 1_000_000
MIB = 1 << 20
HOSTILE = "</script><img src=x onerror=alert(1)>[bold red]\x1b[31m"
"""A layer name that attacks HTML, rich markup and the terminal at once."""
UNRECORDED = UnrecordedStep(
    steps=1,
    median_ns=40 * MS,
    lower_quartile_ns=40 * MS,
    upper_quartile_ns=40 * MS,
    min_ns=40 * MS,
    max_ns=40 * MS,
    traced_median_ns=50 * MS,
    slowdown=1.25,
)
"""Of the ranks of :func:`run_summary`."""


def group(
    fqn: str | None, op: str, rank: int, step: int, *, exposed_ms: int, phase: str = "forward"
) -> GroupRow:
    """One collective of 8 MiB over 2 ranks that takes 4 ms: 2 GiB/s algbw, half of it busbw."""
    return GroupRow(
        rank=rank,
        step=step,
        fqn=fqn,
        phase=phase,
        op=op,
        process_group="1",
        mesh_dim="dp_shard",
        dtype="bfloat16" if op == "all_gather" else "float32",
        count=1,
        payload_bytes=8 * MIB,
        wire_bytes=4 * MIB,
        total_ns=4 * MS,
        exposed_ns=exposed_ms * MS,
        stall_ns=exposed_ms * MS,
        overlap_frac=1 - exposed_ms / 4,
        algbw_bytes_per_s=8 * MIB / 0.004,
        busbw_bytes_per_s=4 * MIB / 0.004,
        group_size=2,
    )


def trace_analysis(blocks: int = 4, hostile: str | None = None) -> TraceAnalysis:
    """Block 0's all-gather is exposed for 4 ms, the others' for 1 ms, the root's reduce-scatter for 3 ms."""
    names = [hostile or "layers.0", *(f"layers.{i}" for i in range(1, blocks))]
    ranks, groups = [], []
    for rank in (0, 1):
        for step in (3, 4):
            exposed = [4] + [1] * (blocks - 1)
            groups += [
                group(name, "all_gather", rank, step, exposed_ms=ms)
                for name, ms in zip(names, exposed, strict=True)
            ]
            groups.append(group("", "reduce_scatter", rank, step, exposed_ms=3, phase="backward"))
        steps = [
            StepBreakdown(
                step=step,
                duration_ns=50 * MS,
                start_ns=100 * MS * step,
                breakdown_ns=BreakdownNs(
                    compute=30 * MS,
                    fsdp_copy=2 * MS,
                    exposed_all_gather=(3 + blocks) * MS,
                    exposed_reduce_scatter=3 * MS,
                    exposed_all_reduce=0,
                    exposed_other_comm=0,
                    exposed_memcpy=0,
                    idle=(12 - blocks) * MS,
                ),
            )
            for step in (3, 4)
        ]
        ranks.append(
            RankTrace(
                rank=rank,
                world_size=2,
                device_type="cpu",
                steps=steps,
                communication=Communication(
                    total_ns=2 * 4 * (blocks + 1) * MS,
                    exposed_ns=2 * (6 + blocks) * MS,
                    overlap_frac=1 - (6 + blocks) / (4 * (blocks + 1)),
                ),
                source=f"rank-{rank:05d}/trace.json.gz",
                state="complete",
            )
        )
    count = len(groups)
    measured = TraceAnalysis(
        ranks=ranks,
        groups=groups,
        attribution=Attribution(
            collectives=count, attributed=count, comm_ns=count * 4 * MS, attributed_ns=count * 4 * MS
        ),
        cross_rank=CrossRank(
            match_key="order",
            matched=count // 2,
            unmatched=0,
            clock_offset_ns={"0": 0, "1": 1500},
            wait_ns={"0": 3 * MS, "1": 0},
            stragglers=[Straggler(rank=1, fqn="layers.1", wait_caused_ns=2 * MS, cause="host gap")],
        ),
        findings=[
            Finding(
                id="late_launch",
                severity="high",
                fqn=names[0],
                message="Its forward all-gather is launched 3.1 ms late; prefetch it explicitly.",
                evidence={"late_ns": 3_100_000},
            )
        ],
        warnings=["rank 1: 2 events without a duration were left out"],
    )
    return of_part(measured)


def memory_analysis(hostile: str | None = None) -> MemoryAnalysis:
    """A peak of 100 MiB: 40 parameters, 30 optimizer state, 20 activations, 10 unsharded parameters."""
    layer = hostile or "layers.0"
    by_layer = [
        LayerBytes(fqn=layer, category="sharded_parameter", bytes=25 * MIB),
        LayerBytes(fqn="", category="sharded_parameter", bytes=15 * MIB),
        LayerBytes(fqn=layer, category="optimizer_state", bytes=30 * MIB),
        LayerBytes(fqn=layer, category="activation", bytes=18 * MIB),
        LayerBytes(fqn=None, category="activation", bytes=2 * MIB),
        LayerBytes(fqn=layer, category="unsharded_parameter", bytes=10 * MIB),
    ]
    timeline = {
        "time_ns": [0, 1 * MS, 2 * MS, 3 * MS],
        "sharded_parameter": [40 * MIB] * 4,
        "optimizer_state": [30 * MIB] * 4,
        "activation": [0, 10 * MIB, 20 * MIB, 0],
        "unsharded_parameter": [0, 10 * MIB, 10 * MIB, 0],
    }
    categories = {
        "sharded_parameter": 40 * MIB,
        "optimizer_state": 30 * MIB,
        "activation": 20 * MIB,
        "unsharded_parameter": 10 * MIB,
    }
    shares = [
        CategoryBytes(category=name, bytes=size, frac=size / (100 * MIB)) for name, size in categories.items()
    ]
    of_layer = {
        "sharded_parameter": 25 * MIB,
        "optimizer_state": 30 * MIB,
        "activation": 18 * MIB,
        "unsharded_parameter": 10 * MIB,
    }
    layers = [
        LayerMemory(name=layer, fqns=[layer], bytes=83 * MIB, categories=of_layer),
        LayerMemory(name="(root)", fqns=[""], bytes=15 * MIB, categories={"sharded_parameter": 15 * MIB}),
        LayerMemory(name="(no layer)", fqns=[None], bytes=2 * MIB, categories={"activation": 2 * MIB}),
    ]
    ranks = [
        RankMemory(
            rank=rank,
            device="cpu",
            source="storage_count",
            peak=Peak(
                allocated_bytes=100 * MIB,
                reserved_bytes=None,
                step=5,
                phase="backward",
                fqn=layer,
                time_ns=2 * MS,
                categories=categories,
                by_layer=by_layer,
                by_category=shares,
                layers=layers,
                layers_folded=layers,
                largest_blocks=[
                    LiveBlock(
                        bytes=18 * MIB,
                        category="activation",
                        fqn=layer,
                        phase="forward",
                        step=5,
                        op="aten::mm",
                        age_ns=2 * MS,
                        stack=["/site-packages/torch/nn/functional.py:12 linear", "train.py:40 forward"],
                        place="train.py:40 forward",
                    )
                ],
            ),
            layers=[
                LayerPeak(fqn=layer, phase="forward", peak_bytes=90 * MIB, delta_bytes=18 * MIB),
                LayerPeak(fqn=layer, phase="backward", peak_bytes=100 * MIB, delta_bytes=-18 * MIB),
            ],
            fragmentation=None,
            oom=None,
            truncated=False,
            timeline=timeline,
            phase_spans=[
                PhaseSpan(start_ns=0, end_ns=2 * MS, step=5, phase="forward"),
                PhaseSpan(start_ns=2 * MS, end_ns=3 * MS, step=5, phase="backward"),
            ],
        )
        for rank in (0, 1)
    ]
    figures = MemoryFigures(
        rank=0,
        allocated_bytes=100 * MIB,
        reserved_bytes=None,
        device_total_bytes=None,
        device_frac=None,
        unattributed_frac=0.0,
    )
    return MemoryAnalysis(
        ranks=ranks,
        findings=[],
        warnings=[],
        key_figures=figures,
        verdict=[
            "Rank 0, the highest of 2 ranks, peaks at 100.0 MiB.",
            f"The peak is in backward of `{layer}`, step 5; it holds sharded parameters 40.0 MiB (40.0%), "
            "optimizer state 30.0 MiB (30.0%), activations 20.0 MiB (20.0%).",
        ],
        advice=[f"Unsharded at the peak: `{layer}`."],
    )


def out_of_memory() -> OutOfMemory:
    """A loss that asks for 6 MiB where 2 MiB are missing; a chunked one would fit."""
    stack = ["torch::unwind()", "/x/torch/nn/functional.py:1:f", "/home/me/train.py:7:loss"]
    return OutOfMemory(
        requested_bytes=6 * MIB,
        op="aten::empty",
        phase="forward",
        fqn="",
        allocated_bytes=100 * MIB,
        reserved_bytes=None,
        device_free_bytes=4 * MIB,
        outside_bytes=None,
        missing_bytes=2 * MIB,
        largest_free_block_bytes=None,
        stack=stack,
        place="me/train.py:7:loss",
        categories={"activation": 100 * MIB},
        by_layer=[LayerBytes(fqn="", category="activation", bytes=100 * MIB)],
        largest_blocks=[],
        remedies=[
            Remedy(action="chunked_loss", saves_bytes=5 * MIB, enough=True, how="in chunks"),
            Remedy(action="smaller_batch", saves_bytes=MIB, enough=None, how="halve it"),
        ],
    )


def fragmentation() -> Fragmentation:
    """100 of 120 MiB are allocated, in one pool of three segments."""
    pool = PoolBytes(
        pool="large",
        stream=0,
        expandable=False,
        segments=3,
        reserved_bytes=120 * MIB,
        allocated_bytes=100 * MIB,
        releasable_bytes=20 * MIB,
    )
    return Fragmentation(
        gap_at_peak_bytes=20 * MIB,
        segments=3,
        by_pool=[pool],
        reserved_bytes=pool.reserved_bytes,
        allocated_bytes=pool.allocated_bytes,
        releasable_bytes=pool.releasable_bytes,
    )


def memory_comparison() -> MemoryComparison:
    """From 90 to 100 MiB: 12 more of activations, 2 less of temporaries."""
    after = memory_analysis().ranks[0].peak
    changes = [("activation", 8, 20), ("temporary", 2, 0), ("sharded_parameter", 80, 80)]
    places = [("aten::mm", 5, 14), ("aten::mm", 3, 6), ("aten::empty", 82, 80)]
    return MemoryComparison(
        before=replace(after, allocated_bytes=90 * MIB),
        after=after,
        delta_bytes=10 * MIB,
        by_category=[_delta(before, now, category=name) for name, before, now in changes],
        by_layer=[_delta(90, 100, fqn="")],
        by_stack=[_delta(before, now, op=op) for op, before, now in places],
        by_place=[_delta(8, 20, op="aten::mm"), _delta(82, 80, op="aten::empty")],
        by_layer_folded=[
            LayerMemoryDelta(
                name="(root)",
                fqns=[""],
                before_bytes=90 * MIB,
                after_bytes=100 * MIB,
                delta_bytes=10 * MIB,
            )
        ],
        verdict=[
            "The peak is 10.0 MiB higher (+11.1%): 90.0 MiB before, 100.0 MiB after.",
            "Largest changes: activations (+12.0 MiB) and temporaries (-2.00 MiB).",
            "Where: the root module (+10.0 MiB).",
        ],
    )


def run_comparison() -> RunComparison:
    """From a run of four blocks to one of three, their memory the same."""
    before, after = trace_analysis(), trace_analysis(blocks=3)
    peaks = {rank.rank: rank.peak for rank in memory_analysis().ranks}
    sides = [
        Side(
            path=f"runs/{name}",
            kind="run",
            trace=trace,
            peaks=peaks,
            run=replace(run_summary(), command=[name]),
            warnings=["it says"],
        )
        for name, trace in (("a", before), ("b", after))
    ]
    return compare(*sides)


def _delta(before: int, after: int, **what: Any) -> MemoryDelta:
    sizes: dict[str, Any] = {
        "before_bytes": before * MIB,
        "after_bytes": after * MIB,
        "delta_bytes": (after - before) * MIB,
    }
    return MemoryDelta(**sizes, **what)


def run_summary(hostile: str | None = None) -> RunSummary:
    """Two complete ranks of three planned ones."""
    ranks = [
        RunRank(
            rank=rank,
            state="complete",
            host="node0",
            device="cpu",
            steps=[
                StepTime(step=1, duration_ns=40 * MS, kind="plain"),
                StepTime(step=3, duration_ns=50 * MS, kind="traced"),
                StepTime(step=4, duration_ns=50 * MS, kind="traced"),
                StepTime(step=5, duration_ns=60 * MS, kind="memory"),
            ],
            traced_steps=[3, 4],
            memory_steps=[5],
            has_trace=True,
            has_memory=True,
            error=None,
            messages=[],
            unrecorded_step=UNRECORDED,
        )
        for rank in (0, 1)
    ]
    layers = ("", hostile or "layers.0", "layers.1")
    groups = [ShardGroup(root=0, fqn=fqn, **_sharded(fqn)) for fqn in layers]
    families = [ShardFamily(layer=fqn, groups=1, **_sharded(fqn)) for fqn in layers]
    return RunSummary(
        path="runs/sample",
        command=["torchrun", "--nproc-per-node", "2", "train.py", hostile or "--lr=1e-3"],
        state="partial",
        exit_code=0,
        started_at="2026-01-02T03:04:05+00:00",
        finished_at="2026-01-02T03:05:05+00:00",
        hosts=["node0"],
        world_size=3,
        versions={"torch": "2.13.0", "fsdp2prof": "0.1.0"},
        environment={"OMP_NUM_THREADS": "1"},
        options={"active": 2, "wait": 1},
        messages=["1 of 3 ranks left no recording: rank 2"],
        ranks=ranks,
        shard_groups=groups,
        optimizers=["AdamW, 5.72 MiB of state"],
        unrecorded_step=replace(UNRECORDED, steps=2),
        shard_families=families,
    )


def _sharded(fqn: str) -> dict[str, Any]:
    return {
        "parameters": 9,
        "numel": 1_000_000,
        "sharded_bytes": 2_000_064,
        "padding_bytes": 64,
        "dtype": "float32",
        "param_dtype": "bfloat16",
        "reduce_dtype": "float32",
        "mesh": "dp_shard=2",
        "reshard_after_forward": fqn != "",
        "offload": False,
        "requires_grad": True,
    }


def run_analysis(hostile: str | None = None) -> RunAnalysis:
    """Run, trace and memory together."""
    return combine(run_summary(hostile), trace_analysis(hostile=hostile), memory_analysis(hostile=hostile))


def trial_sample() -> TrialResult:
    return TrialResult(
        verdict=["reshard=never is the fastest."],
        path="runs/tried",
        ranks=[0, 1],
        seed=0,
        clock="host",
        step_ns=100e6,
        peak_bytes=1 << 20,
        tried=[
            TriedChange(
                change="reshard=never",
                outcome="faster",
                gained_ns=5e6,
                low_ns=4e6,
                high_ns=6e6,
                gained_frac=0.05,
                rounds=12,
                predicted_ns=7e6,
                predicted_reason=None,
                peak_bytes=3 << 19,
                added_bytes=1 << 19,
                recording=2,
                lines=["model.set_reshard_after_forward(False)"],
            )
        ],
        left_out=[UntriedChange(change="reshard=always", reason="the training has this setting already")],
        rounds=12,
        ended="decided after 12 rounds",
        restored=True,
        warnings=[],
    )
