"""The ledger: every nanosecond charged once, to what caused it, on synthetic trainings of any kind."""

from __future__ import annotations

import functools
import itertools
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.results import trace_analysis
from support.traces import TraceBuilder
from synthetic import Layer, Schedule, record, transformer, write_run

from fsdp2prof.analyzers.ledger.account import with_ledger
from fsdp2prof.analyzers.ledger.replayed import that_fit, with_replays
from fsdp2prof.analyzers.ranks.summary import GARBAGE
from fsdp2prof.analyzers.trace.collective_names import is_collective_kernel
from fsdp2prof.analyzers.trace.rank_tables import sighted
from fsdp2prof.labels import parse_label
from fsdp2prof.manifest import HostSpan, HostStep, MachineInfo, RankManifest, StepInfo
from fsdp2prof.results.ledger import Ledger, LedgerEntry
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.vocabulary import LEDGER_CAUSES, layer_name
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.job.job_files import open_job

MS = 1_000_000


def ledger_of(folder: Path, *schedules: Schedule, what_if: bool = False) -> Ledger:
    analysis = analyze_trace(open_job(write_run(record(*schedules), folder)), workers=1, what_if=what_if)
    assert analysis.ledger is not None
    return analysis.ledger


def told(ledger: Ledger) -> list[str]:
    return [entry.id for entry in ledger.entries if entry.told]


def named(ledger: Ledger, name: str) -> LedgerEntry:
    return next(entry for entry in ledger.entries if entry.id == name)


def assert_exact(ledger: Ledger) -> None:
    assert sum(entry.total_ns for entry in ledger.entries) == ledger.total_ns
    rest = ledger.rest
    listed = ledger.entries[: len(ledger.entries) - (rest.entries if rest else 0)]
    shown = sum(entry.ns for entry in listed) + (rest.ns if rest else 0)
    assert shown == pytest.approx(ledger.step_ns), "a short table sums to the step"
    assert all(entry.told or entry.frac >= 0.01 for entry in listed[:-1])
    for step in ledger.steps:
        assert sum(step.causes_ns.values()) == step.duration_ns
    for entry in ledger.entries:
        assert entry.total_ns >= 0
        assert entry.cause in LEDGER_CAUSES
        assert sum(place.total_ns for place in entry.places) == entry.total_ns


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    def time(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    layers = tuple(
        Layer(
            fqn="" if i == 0 else f"layers.{i - 1}",
            numel=time(1, 400) * 100_000,
            forward_ns=time(10_000, 3 * MS),
            backward_ns=time(10_000, 5 * MS),
            all_gather_ns=time(1_000, 3 * MS),
            reduce_scatter_ns=time(1_000, 4 * MS),
            host_ns=time(1_000, 800_000),
            late_ns=draw(st.sampled_from([0, 0, 5 * MS])),
            sync=draw(st.booleans()),
        )
        for i in range(draw(st.integers(2, 5)))
    )
    return Schedule(
        roots=(layers,),
        shard=2,
        microbatches=draw(st.integers(1, 3)),
        sync_every_microbatch=draw(st.booleans()),
        loading_ns=draw(st.sampled_from([0, 4 * MS])),
        checkpoint=draw(st.sampled_from(["none", "inside", "outside"])),
        unshard_async_op=draw(st.booleans()),
    )


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=schedules(), factor=st.sampled_from([1.0, 1.6]))
def test_the_parts_sum_to_the_steps_exactly(
    tmp_path_factory: pytest.TempPathFactory, schedule: Schedule, factor: float
) -> None:
    folder = tmp_path_factory.mktemp("run")
    assert_exact(ledger_of(folder / "run", schedule, schedule.scaled(factor)))


def healthy(**fields: Any) -> Schedule:
    long: dict[str, Any] = {"forward_ns": 2 * MS + 17, "backward_ns": 4 * MS + 31, "numel": 8_000_000}
    root, *children = transformer(6, **(long | fields))
    children[-1] = replace(children[-1], reshard=False)
    return Schedule(roots=((root, *children),), shard=2)


def test_nothing_is_told_of_a_healthy_training(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "run", healthy(), healthy(), what_if=True)
    assert_exact(ledger)
    assert told(ledger) == []
    assert ledger.bound.startswith("Most of the step is compute")


def test_waiting_for_a_slow_rank_is_charged_to_it_and_not_to_a_layers_collective(tmp_path: Path) -> None:
    steps = replace(healthy(), steps=3)
    ledger = ledger_of(tmp_path / "run", steps, steps.scaled(1.6, "layers.1"), what_if=True)
    assert told(ledger)[0] == "straggler"
    entry = named(ledger, "straggler")
    assert (entry.cause, entry.rank) == ("late_rank", 1)
    assert entry.remedy is not None
    assert entry.remedy.basis == "replay"
    assert " waiting for rank 1, " in ledger.collectives
    scale = {"ms": 1.0, "us": 1e-3}
    whole, *parts = (
        float(number) * scale[unit] for number, unit in re.findall(r"([\d.]+) (ms|us)", ledger.collectives)
    )
    assert sum(parts) == pytest.approx(whole, abs=0.02), "causes sum to what the rows by layer expose"


def test_waiting_for_a_rank_whose_loader_is_slow_is_charged_to_the_loader(tmp_path: Path) -> None:
    steps = replace(healthy(), steps=3)
    ledger = ledger_of(tmp_path / "run", steps, replace(steps, loading_ns=60 * MS), what_if=True)
    assert told(ledger)[0] == "data_loader"
    assert named(ledger, "data_loader").rank == 1


def test_a_replay_that_gains_nothing_proposes_nothing(tmp_path: Path) -> None:
    """Waiting hidden behind other waiting: the time stays in the ledger, its remedy is not proposed."""
    ledger = ledger_of(tmp_path / "run", healthy(sync=True), healthy(sync=True), what_if=True)
    for entry in ledger.entries:
        if entry.remedy is not None and entry.remedy.basis == "replay" and not entry.remedy.gain_ns:
            assert not entry.told


@functools.cache
def waiting() -> TraceAnalysis:
    """Ranks of which one is late, with gathers that nothing hides: remedies that replays answer."""
    steps = replace(healthy(), steps=3)
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(record(steps, steps.scaled(1.6, "layers.1")), Path(folder) / "run")
        return analyze_trace(open_job(run), workers=1, what_if=True)


@settings(max_examples=50, deadline=None)
@given(gains=st.lists(st.floats(-0.5, 1.0), min_size=1))
def test_no_remedy_gains_more_than_its_cause_takes(gains: list[float]) -> None:
    """Whatever replays of the changes gained, in parts of a step."""
    analysis = waiting()
    assert analysis.ledger is not None
    step_ns = analysis.ledger.step_ns
    rows = [
        replace(row, gained_ns=gain * step_ns, gained_frac=gain)
        for row, gain in zip(analysis.what_if, itertools.cycle(gains), strict=False)
    ]
    ledger = with_replays(analysis, rows).ledger
    assert ledger is not None
    answered = [entry for entry in ledger.entries if "what_if" in entry.evidence]
    assert answered
    for entry in answered:
        assert entry.remedy is not None
        assert entry.remedy.gain_ns is not None
        assert entry.remedy.gain_frac is not None
        assert entry.remedy.gain_ns <= entry.ns
        assert entry.remedy.gain_frac <= entry.frac + 1e-9


@pytest.mark.parametrize(
    "name",
    [
        "void hybrid_ep::dispatch_kernel<4>(int)",
        "hybrid_ep::combine_kernel",
        "nccl_ep::low_latency_dispatch",
        "ubx_kernel_allgather_2",
        "mori::moe::EpDispatchIntraNodeKernel<float>(x)",
        "EpCombineInterNodeKernel",
        "torchcomms::ncclx::sendrecv_kernel",
        "void torchcomms::rccl::allgather_kernel<float>(int)",
        "torchcomm::reduceScatterKernel",
    ],
)
def test_kernels_of_communication_libraries_are_communication(name: str) -> None:
    assert is_collective_kernel(name)
    assert not is_collective_kernel("hybrid_ep::metadata_preprocessing_kernel")


def test_megatrons_ranges_are_labels_of_a_module() -> None:
    label = parse_label("MFSDP decoder.layers.3 backward")
    assert label is not None
    assert (label.kind, label.fqn, label.is_backward) == ("module_backward", "decoder.layers.3", True)
    assert parse_label("MFSDP decoder.layers.3 optimizer") is None


def test_a_proposal_that_does_not_fit_into_memory_is_not_made(tmp_path: Path) -> None:
    """Without reductions the full gradients stay in memory until the last micro-batch."""
    schedule = replace(healthy(reduce_scatter_ns=9 * MS), microbatches=4, steps=3)
    analysis = analyze_trace(open_job(write_run(record(schedule, schedule), tmp_path / "run")), workers=1)
    ledger = analysis.ledger
    assert ledger is not None
    entry = named(ledger, "reduced_every_micro_batch")
    assert entry.told
    assert entry.remedy is not None
    assert entry.remedy.memory_bytes is not None
    for free, proposed in ((entry.remedy.memory_bytes, True), (entry.remedy.memory_bytes - 1, False)):
        fitting = that_fit(analysis, free)
        assert fitting.ledger is not None
        assert ("reduced_every_micro_batch" in told(fitting.ledger)) == proposed
        assert ("reduced_every_micro_batch" in {one.id for one in fitting.findings}) == proposed


def test_wrappers_are_no_part_of_a_layers_name() -> None:
    assert layer_name("layers.0._checkpoint_wrapped_module") == "layers.0"
    assert layer_name("layers.0._checkpoint_wrapped_module.mlp") == "layers.0.mlp"
    assert layer_name("_orig_mod.layers.0") == "layers.0"


def test_one_unit_that_holds_most_is_named_where_nothing_inside_can_be_wrapped(tmp_path: Path) -> None:
    large: dict[str, Any] = {"numel": 400_000_000, "all_gather_ns": 12 * MS, "reduce_scatter_ns": 9 * MS}
    ledger = ledger_of(tmp_path / "run", *[healthy().changed("layers.3", **large)] * 2)
    assert told(ledger)[0] == "wrapping_too_coarse"
    assert named(ledger, "wrapping_too_coarse").fqn == "layers.3"


def test_a_python_thread_that_computes_holds_the_interpreter() -> None:
    """8 of 50 ms without an operator in which the training's thread neither computed nor waited."""
    analysis = trace_analysis()
    ranks = [
        replace(rank, steps=[replace(step, idle_ns={"host_bound": 8 * MS}) for step in rank.steps])
        for rank in analysis.ranks
    ]
    for spent_ms, expected in ((45, []), (5, ["starved_host"])):
        steps = [
            HostStep(
                step=step, main_thread_cpu_ns=spent_ms * MS, python_threads={"train.py:9 (spin)": 30 * MS}
            )
            for step in (3, 4)
        ]
        took = [StepInfo(step=step, start_ns=0, duration_ns=50 * MS) for step in (3, 4)]
        manifests = [RankManifest(rank=rank, host_steps=steps, steps=took) for rank in (0, 1)]
        ledger = with_ledger(replace(analysis, ranks=ranks), manifests=manifests).ledger
        assert ledger is not None
        assert told(ledger)[:1] == expected
        for entry in ledger.entries[: len(expected)]:
            assert "train.py:9 in spin()" in entry.said


def test_the_line_seen_most_names_a_stretch_and_collections_their_own() -> None:
    """All of autograd's work happens inside a call of backward, which names nothing."""
    lines = [(100, 200, "a.py:1 (f)"), (300, 300, "b.py:2 (g)"), (400, 900, "c.py:3 (h)")]
    lines.append((2000, 3000, "backward() in d.py:4 (main)"))
    spans = [HostSpan(start_ns=BASE + a, duration_ns=b - a, line=line) for a, b, line in lines]
    collected = [HostSpan(start_ns=BASE + 1000, duration_ns=500)]
    step = HostStep(step=1, lines=spans, garbage_collections=collected)
    trace = replace(TraceBuilder().build(), base_time_ns=BASE)
    seen = sighted(trace, RankManifest(host_steps=[step]))
    start = np.array([0, 150, 310, 120, 2100, 1100])
    end = np.array([90, 450, 350, 900, 2900, 1600])
    assert seen.lines.seen(start, end) == [None, "a.py:1 in f()", None, "c.py:3 in h()", None, None]
    assert seen.gaps(start, end)[-1] == GARBAGE
    assert (
        sighted(replace(trace, base_time_ns=0), RankManifest(host_steps=[step])).lines.seen(start, end)
        == [None] * 6
    )


BASE = 1_700_000_000_000_000_000


def starved(waiting_ms: int, threads: int, computing_ms: int = 0) -> list[RankManifest]:
    """Two ranks of a host of two processors, whose training threads wait for one in every step."""
    machine = MachineInfo(cores=2, usable_cores=2, torch_threads=threads)
    steps = [
        HostStep(step=step, main_thread_waiting_ns=waiting_ms * MS, main_thread_cpu_ns=computing_ms * MS)
        for step in (3, 4)
    ]
    return [RankManifest(rank=rank, host="node0", machine=machine, host_steps=steps) for rank in (0, 1)]


def test_a_busy_host_leaves_the_ranks_what_they_computed() -> None:
    """60 ms of waiting, 20 of computing: of 40 ms in which the ranks could have run they waited 3 / 4."""
    analysis = trace_analysis()
    ranks = [
        replace(rank, steps=[replace(step, idle_ns={"host_bound": 8 * MS}) for step in rank.steps])
        for rank in analysis.ranks
    ]
    for computing_ms, waited_ms in ((0, 40), (20, 30)):
        manifests = starved(60, 1, computing_ms)
        ledger = with_ledger(replace(analysis, ranks=ranks), manifests=manifests).ledger
        assert ledger is not None
        assert named(ledger, "starved_host").ns == waited_ms * MS


@pytest.mark.parametrize(("threads", "proposed"), [(1, False), (8, True)])
def test_a_host_without_a_processor_is_not_the_scripts_fault(threads: int, proposed: bool) -> None:
    """20 of 50 ms in which the ranks could have run: their own threads are to blame, or others."""
    analysis = trace_analysis()
    ranks = [
        replace(rank, steps=[replace(step, idle_ns={"host_bound": 8 * MS}) for step in rank.steps])
        for rank in analysis.ranks
    ]
    ledger = with_ledger(replace(analysis, ranks=ranks), manifests=starved(20, threads)).ledger
    assert ledger is not None
    entry = named(ledger, "starved_host")
    assert entry.ns == 20 * MS, "of idle time and of the work itself: an operator that waits is longer"
    assert (entry.remedy is not None) == proposed
    assert ("starved_host" in told(ledger)) == proposed
    assert any("The host was busy" in line for line in ledger.not_judged) != proposed
