"""Real traces of other people's runs: exact accounts, figures counted by hand, and a peer's results."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from synthetic import Schedule, record, transformer, write

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.ranks.summary import RankSummary
from fsdp2prof.analyzers.steps import Window
from fsdp2prof.analyzers.trace.analysis import analyze_rank, analyze_tables, merge
from fsdp2prof.analyzers.trace.rank_tables import RankTables, rank_tables
from fsdp2prof.analyzers.whatif.program import RankProgram
from fsdp2prof.analyzers.whatif.recorded import program_of
from fsdp2prof.analyzers.whatif.run import run
from fsdp2prof.analyzers.whatif.what_if import replay_job
from fsdp2prof.readers.trace.chrome_trace import read_trace
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.tables.columns import IntArray

pytestmark = pytest.mark.real_data

MI300 = [f"ddp4-mi300/rank{rank}.json.gz" for rank in range(4)]
DLRM = [f"dlrm8-v100/worker{rank}_*.json.gz" for rank in range(8)]
A100 = "ddp2-a100-rank0/nccl_data.json.gz"
V100 = "ddp2-v100-rank1-memory/df_index_resolver.json.gz"
DLRM_GRADIENTS = (394_241, 226_960, 112)
"""Elements of its three gradient buckets, which only the ``nccl:all_reduce`` ranges record."""
FLOAT_CLOCK = 10_000
"""What half microseconds, all that float64 resolves on the simulated clock, may add up to."""
RESNET = "resnet-mi300-memory/train_resnet18.json.gz"


@cache
def path(root: Path, name: str) -> Path:
    found = sorted((root / "traces").glob(name))
    if not found:
        pytest.skip(f"no {name} among the real traces")
    return found[0]


@cache
def tables(root: Path, name: str, window: Window = "steps") -> RankTables:
    return rank_tables(read_trace(path(root, name)), window=window)


@cache
def analysis(root: Path, *names: str) -> TraceAnalysis:
    return merge([analyze_rank(read_trace(path(root, name)), default_rank=i) for i, name in enumerate(names)])


@pytest.mark.parametrize("name", [*MI300, *DLRM, A100, V100, RESNET])
def test_every_nanosecond_and_every_collective_is_accounted_for(real_data: Path, name: str) -> None:
    found = analysis(real_data, name)
    rank = found.ranks[0]
    for step in rank.steps:
        parts = asdict(step.breakdown_ns)
        assert sum(parts.values()) == step.duration_ns > 0
        assert sum(step.idle_ns.values()) == step.breakdown_ns.idle
        exposed = sum(v for k, v in parts.items() if k.startswith("exposed") and k != "exposed_memcpy")
        assert exposed == sum(row.exposed_ns for row in found.groups if row.step == step.step)
    told = found.attribution
    assert told.collectives == told.attributed + sum(told.unattributed_reasons.values())
    assert told.collectives == sum(row.count for row in found.groups)


def test_ddp_of_resnet50_moves_its_parameters_and_buffers(real_data: Path) -> None:
    """ResNet-50 with 100 classes: 25,557,032 parameters, less 2,049,000 of its head, plus 204,900.

    Its 53 batch norms have 26,560 channels: as many running means and variances, and 53 counters.
    """
    found = analysis(real_data, *MI300)
    parameters = 25_557_032 - 2_049_000 + 204_900
    rows = [row for row in found.groups if row.op == "all_reduce"]
    assert len(rows) == 4 * 3
    for row in rows:
        assert (row.count, row.payload_bytes, row.group_size, row.dtype) == (5, 4 * parameters, 4, "float32")
        assert row.wire_bytes == 4 * parameters * 3 // 2
        assert (row.phase, row.process_group) == ("backward", "0")
    broadcasts = Counter((r.dtype, r.payload_bytes) for r in found.groups if r.op == "broadcast")
    assert broadcasts == {("float32", 4 * 2 * 26_560): 12, ("int64", 8 * 53): 12}
    assert found.attribution.collectives == 84
    assert found.attribution.unattributed_reasons == {"no FSDP labels in the trace": 84}


def test_ranks_of_one_node_agree_once_waiting_is_set_apart(real_data: Path) -> None:
    found = analysis(real_data, *MI300)
    assert (found.cross_rank.matched, found.cross_rank.unmatched) == (21, 0)
    large = [row for row in found.bandwidth if row.op == "all_reduce" and row.payload_bytes > 20e6]
    assert len(large) == 3
    for row in large:
        assert row.of_best_frac is not None
        assert row.of_best_frac > 0.9, "transfers repeat to 10%"
        assert row.busbw_bytes_per_s is not None
        assert row.busbw_bytes_per_s > 5 * row.algbw_bytes_per_s, "while durations are mostly waiting"


def test_ddp_of_imagenet_resnet50(real_data: Path) -> None:
    rows = [row for row in analysis(real_data, A100).groups if row.op == "all_reduce"]
    assert [(row.count, row.payload_bytes) for row in rows] == [(5, 4 * 25_557_032)] * 3
    assert {row.wire_bytes for row in rows} == {4 * 25_557_032}, "2(n-1)/n is 1 on two ranks"


def test_without_metadata_kinds_come_from_operators(real_data: Path) -> None:
    """Eight old traces: five all-to-alls, which their kernels call SendRecv, and three all-reduces each."""
    for name in DLRM:
        table = tables(real_data, name).collectives.table
        assert Counter(table.op.to_list()) == {"all_to_all": 5, "all_reduce": 3}
        reduced = table.payload_bytes[table.op.equals("all_reduce")]
        assert sorted(reduced.tolist()) == sorted(4 * numel for numel in DLRM_GRADIENTS)
    assert analysis(real_data, V100).attribution.collectives == 2020
    steps = Counter(tables(real_data, V100).collectives.table.step.tolist())
    assert steps == dict.fromkeys(range(2, 7), 404)


def test_work_queued_before_the_recording_is_in_the_whole_trace_only(real_data: Path) -> None:
    whole, steps = tables(real_data, DLRM[1], "trace"), tables(real_data, DLRM[1])
    queued = whole.device.take(whole.device.launch_ns < 0)
    assert len(queued) == 64
    assert int((queued.end_ns - queued.start_ns).sum()) == 203_000
    assert steps.windows.start_ns[0] - whole.windows.start_ns[0] == 282_000
    compute = intervals.total(whole.run.compute)
    inside = intervals.intersect(steps.run.compute, intervals.Intervals(*_window(steps)))
    assert compute - intervals.total(inside) > 150_000


def _window(found: RankTables) -> tuple[IntArray, IntArray]:
    return found.windows.start_ns, found.windows.end_ns


@pytest.fixture
def hta(monkeypatch: pytest.MonkeyPatch) -> type:
    """HTA's analysis, its rounding to microseconds undone."""
    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    from hta.trace_analysis import TraceAnalysis as Peer

    return Peer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [A100, V100, MI300[1], DLRM[3]])
def test_hta_agrees_on_overlap_and_compute(real_data: Path, hta: type, name: str) -> None:
    """Same definitions here: whole trace, communication by name, memory operations no compute.

    ``include_last_profiler_step`` keeps what HTA else drops. It computes in float microseconds: one
    nanosecond an event may be lost.
    """
    peer = hta(trace_files={0: str(path(real_data, name))}, include_last_profiler_step=True)
    ours = tables(real_data, name, "trace")
    comm, hidden = ours.run.comm, intervals.intersect(ours.run.comm, ours.run.compute)
    overlap = peer.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"][0]
    assert overlap == pytest.approx(100 * intervals.total(hidden) / intervals.total(comm), abs=0.005001)
    times = peer.get_temporal_breakdown(visualize=False).iloc[0]
    assert times["compute_time(us)"] * 1e3 == pytest.approx(
        intervals.total(ours.run.compute), abs=len(ours.device)
    )
    window = int(ours.windows.end_ns[0] - ours.windows.start_ns[0])
    assert times["kernel_time(us)"] * 1e3 == pytest.approx(window, abs=1000)
    *_, idle = intervals.classify(
        intervals.union(np.array([0]), np.array([2**62])), [ours.run.compute, ours.run.comm, ours.run.memcpy]
    )
    idle = intervals.intersect(idle, intervals.Intervals(*_window(ours)))
    assert times["idle_time(us)"] * 1e3 == pytest.approx(intervals.total(idle), abs=len(ours.device))


@pytest.mark.filterwarnings("ignore")
def test_hta_loses_a_microsecond_an_event_to_rounding_and_the_last_step(
    real_data: Path, hta: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HTA_DISABLE_NS_ROUNDING")
    ours = tables(real_data, A100, "trace")
    compute = intervals.total(ours.run.compute)
    rounded = hta(trace_files={0: str(path(real_data, A100))}, include_last_profiler_step=True)
    lost = compute - rounded.get_temporal_breakdown(visualize=False)["compute_time(us)"][0] * 1e3
    assert 1_000_000 < lost < 1_000 * len(ours.device), "milliseconds of 116"
    default = hta(trace_files={0: str(path(real_data, A100))})
    kept = default.get_temporal_breakdown(visualize=False)["kernel_time(us)"][0] * 1e3
    two_steps = int((ours.windows.end_ns - ours.windows.start_ns)[0] * 2 / 3)
    assert kept == pytest.approx(two_steps, rel=0.02), "of three"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("flavour", ["nccl", "symmetric_memory"])
def test_hta_takes_fsdps_copies_and_symmetric_memory_kernels_for_compute(
    tmp_path: Path, hta: type, flavour: Literal["nccl", "symmetric_memory"]
) -> None:
    (recording,) = record(Schedule(roots=(transformer(3, copy_ns=90_001),), flavour=flavour))
    file = write(recording, tmp_path / "rank0.json")
    ours = rank_tables(read_trace(file, workers=1), window="trace")
    peer = hta(trace_files={0: str(file)}, include_last_profiler_step=True)
    sets = [ours.run.compute, ours.run.fsdp_copy, *([ours.run.comm] if flavour == "symmetric_memory" else [])]
    *parts, _ = intervals.classify(intervals.Intervals(*_window(ours)), sets)
    times = peer.get_temporal_breakdown(visualize=False).iloc[0]
    compute = times["compute_time(us)"] * 1e3
    assert compute == pytest.approx(sum(intervals.total(part) for part in parts), abs=FLOAT_CLOCK)
    assert min(intervals.total(part) for part in parts) > 20 * FLOAT_CLOCK


@pytest.mark.parametrize(
    "name",
    [[A100], [RESNET], MI300, DLRM, pytest.param([V100], marks=pytest.mark.slow)],
    ids=["a100", "resnet", "mi300", "dlrm", "v100"],
)
def test_a_real_run_replayed_unchanged_gives_back_its_steps(real_data: Path, name: list[str]) -> None:
    ranks: list[tuple[RankProgram, RankSummary]] = []
    for one in name:
        tables = rank_tables(read_trace(path(real_data, one)))
        summary = analyze_tables(tables, default_rank=len(ranks)).summary
        ranks.append((program_of(tables, summary), summary))
    job = replay_job(ranks).job
    for ran in run(job).ranks:
        assert ran.started.tolist() == ran.program.activities.start.tolist()
        assert ran.ended.tolist() == ran.program.activities.end.tolist()
