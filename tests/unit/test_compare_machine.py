"""Comparisons of captures that are no steps, of settings, and on machines that were not equally busy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.cli import call
from support.results import MS, run_summary, trace_analysis
from synthetic import Schedule, record, transformer, write, write_run

import fsdp2prof
from fsdp2prof.analyzers.compare.baseline import Side
from fsdp2prof.analyzers.compare.settings import changed, device_changes
from fsdp2prof.analyzers.compare.sides import compare
from fsdp2prof.analyzers.fail_on import check, judge, parse
from fsdp2prof.analyzers.ledger.machine_rules import processor_use, starved_ranks
from fsdp2prof.errors import InputError
from fsdp2prof.manifest import HostStep, RankManifest, StepInfo
from fsdp2prof.results.run import ProcessorUse, RunSummary, StepTime
from fsdp2prof.results.trace import TraceAnalysis

LAYERS = transformer(
    8, forward_ns=2 * MS, backward_ns=3 * MS, all_gather_ns=MS // 10, reduce_scatter_ns=MS // 10
)
SCHEDULE = Schedule(roots=(LAYERS,), steps=3, shard=2)


def capture(schedule: Schedule, folder: Path, begin: float, end: float, *, marks: bool = False) -> Path:
    """Write what a capture from ``begin`` to ``end`` (parts of the whole recording) holds of each rank."""
    folder.mkdir()
    for recording in record(schedule, schedule):
        path = folder / f"rank{recording.rank}.json"
        write(recording, path)
        content = json.loads(path.read_text())
        timed = [event for event in content["traceEvents"] if "ts" in event and event.get("ph") == "X"]
        times = [float(event["ts"]) for event in timed]
        first, length = min(times), max(times) - min(times)
        kept = [
            event
            for event in content["traceEvents"]
            if "ts" not in event
            or (
                begin * length <= float(event["ts"]) - first <= end * length
                and (marks or not str(event.get("name")).startswith(("ProfilerStep#", "Optimizer.step#")))
            )
        ]
        path.write_text(json.dumps({**content, "traceEvents": kept}))
    return folder


def test_captures_cut_anywhere_are_compared_from_layer_to_layer(tmp_path: Path) -> None:
    """A block's forward computes 2 ms, and 2.5 ms on the other side, whatever the captures' lengths."""
    before = capture(SCHEDULE, tmp_path / "a", 0.01, 0.9)
    after = capture(SCHEDULE.scaled(1.25), tmp_path / "b", 0.004, 0.7)
    comparison = fsdp2prof.compare(before, after)
    assert (comparison.step, comparison.breakdown, comparison.communication_equal) == (None, [], None)
    pace = comparison.layer_pace
    assert pace is not None
    assert pace.part == "layers.*"
    assert pace.before_ns == pytest.approx(2 * MS, rel=0.05)
    assert pace.delta_frac == pytest.approx(0.25, abs=0.02)
    assert "From one forward of `layers.*` to the next the time is 2" in comparison.verdict[0]
    assert "longer" in comparison.verdict[0]
    assert any("without step marks" in line for line in comparison.warnings)


def test_a_capture_of_complete_passes_is_a_step(tmp_path: Path) -> None:
    whole = capture(SCHEDULE, tmp_path / "a", 0, 1)
    comparison = fsdp2prof.compare(whole, whole)
    assert comparison.step is not None
    assert comparison.layer_pace is None


def test_a_cut_capture_is_refused_beside_steps_and_as_a_baseline(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cut = capture(SCHEDULE, tmp_path / "a", 0.01, 0.9)
    run = write_run(record(SCHEDULE, SCHEDULE), tmp_path / "run")
    call(capfd, "compare", run, cut).refused("without step marks")
    call(capfd, "compare", tmp_path / "kept.json", cut, "--write-baseline").refused("needs whole steps")


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (
            "torchrun --master-port 1 t.py sync=last",
            "torchrun --master-port 2 t.py sync=every",
            ["argument sync"],
        ),
        ("torchrun --master-port=29500 t.py", "torchrun --master-port=31117 t.py", []),
        ("torchrun --rdzv-endpoint localhost:0 t.py", "torchrun --rdzv-endpoint localhost:4242 t.py", []),
        (
            "torchrun --rdzv_id 1 t.py --lr 3",
            "torchrun --rdzv_id 2 t.py --lr 4 --fused",
            ["argument lr", "argument fused"],
        ),
        ("torchrun t.py", "torchrun other.py", ["command"]),
        ("accelerate launch --main_process_port 1 t.py", "accelerate launch --main_process_port 2 t.py", []),
    ],
)
def test_a_changed_argument_is_named_and_a_port_is_not(before: str, after: str, names: list[str]) -> None:
    assert [one.name for one in changed({"command": before}, {"command": after})] == names


def test_traces_of_different_devices_say_so() -> None:
    def trace(*names: str | None) -> TraceAnalysis:
        base = trace_analysis()
        ranks = [replace(base.ranks[0], rank=i, device_name=name) for i, name in enumerate(names)]
        return replace(base, ranks=ranks)

    changes = device_changes(trace("H100", "H100"), trace("MI300X", "MI300X"))
    assert [(one.name, one.before, one.after) for one in changes] == [("device", "H100", "MI300X")]
    assert device_changes(trace("H100", None), trace("H100")) == []
    assert device_changes(trace("H100"), trace(None)) == []
    assert device_changes(None, trace("H100")) == []


def test_a_port_in_an_address_is_no_change() -> None:
    assert not changed(
        {"environment.NCCL_COMM_ID": "10.0.0.1:33"}, {"environment.NCCL_COMM_ID": "10.0.0.1:44"}
    )
    assert changed({"environment.NCCL_COMM_ID": "10.0.0.1:33"}, {"environment.NCCL_COMM_ID": "10.0.0.2:33"})


def manifest(rank: int, *, wait: float, busy: float, own: float) -> RankManifest:
    """Three steps of 100 ms on two cores; ``busy`` and ``own`` are parts of 200 ms."""
    return RankManifest(
        rank=rank,
        host="node0",
        steps=[StepInfo(step=i, start_ns=0, duration_ns=100 * MS, kind="traced") for i in range(3)],
        host_steps=[
            HostStep(
                step=i,
                main_thread_waiting_ns=round(wait * 100 * MS),
                machine_busy_ns=round(busy * 200 * MS),
                machine_steal_ns=0,
                machine_time_ns=200 * MS,
                cpu_time_ns=round(own * 200 * MS),
            )
            for i in range(3)
        ],
    )


def test_what_others_use_is_what_is_busy_and_not_the_ranks() -> None:
    """Two ranks use 0.3 of the processors each, 0.9 are busy: 0.3 are others'."""
    use = processor_use([manifest(0, wait=0.1, busy=0.9, own=0.3), manifest(1, wait=0.4, busy=0.9, own=0.3)])
    assert use is not None
    assert use.wait_frac == pytest.approx(0.4)
    assert use.others_frac == pytest.approx(0.3)
    assert processor_use([RankManifest(rank=0)]) is None


def run_of(*durations_ms: float, use: ProcessorUse | None = None) -> RunSummary:
    steps = [StepTime(step=i, duration_ns=round(ms * MS), kind="plain") for i, ms in enumerate(durations_ms)]
    return replace(run_summary(), ranks=[replace(run_summary().ranks[0], steps=steps)], processors=use)


QUIET = ProcessorUse(wait_frac=0.01, others_frac=0.05)
BUSY = ProcessorUse(wait_frac=0.4, others_frac=0.6)
CROWDED = ProcessorUse(wait_frac=0.4, others_frac=0.05)
"""Its ranks wait for each other: too many threads."""


@pytest.mark.parametrize(
    ("before", "after", "fails"),
    [
        (QUIET, BUSY, False),
        (BUSY, BUSY, True),
        (QUIET, CROWDED, True),
        (None, BUSY, True),
        (QUIET, None, True),
    ],
)
def test_the_gate_does_not_fail_for_a_busier_machine(
    before: ProcessorUse | None, after: ProcessorUse | None, fails: bool
) -> None:
    slower = compare(
        Side(path="a", kind="run", run=run_of(90, 10, 10, 11, use=before)),
        Side(path="b", kind="run", run=run_of(90, 15, 16, 17, use=after)),
    )
    condition = parse("step_time_frac>0.1")
    [outcome] = judge([condition], slower)
    assert outcome.ranks == 1
    assert outcome.failed == fails
    assert bool(check([condition], slower)) == fails
    assert ("the machine was busier" in slower.verdict[0]) != fails


def test_how_long_ranks_wait_for_a_processor_is_said_once() -> None:
    """By the verdict where the machine changed, else by a warning for each busy side."""
    base = trace_analysis()
    assert base.ledger is not None
    waited = {"starved": 0.45 * base.ledger.step_ns}
    trace = replace(base, ledger=replace(base.ledger, causes_ns=waited))
    for use, warned in ((QUIET, False), (BUSY, True)):
        comparison = compare(
            Side(path="a", kind="run", run=run_of(10, 10, 10, use=use), trace=trace),
            Side(path="b", kind="run", run=run_of(10, 15, 15, use=BUSY), trace=trace),
        )
        assert (comparison.machine_changed is None) == warned
        assert [line for line in comparison.warnings if "the host was busy" in line] == [
            f"{side}: the host was busy; its ranks waited 45.0% of a step for a CPU core, which may explain "
            "a change of step time"
            for side in ("a", "b")
            if warned
        ]


def test_a_busy_machine_excuses_no_bytes() -> None:
    """Only what a clock measured is excused."""
    comparison = compare(
        Side(path="a", kind="run", run=run_of(10, 10, 10, use=QUIET)),
        Side(path="b", kind="run", run=run_of(10, 15, 15, use=BUSY)),
    )
    with pytest.raises(InputError, match="undefined here"):
        judge([parse("wire_bytes_frac>0")], comparison)


@pytest.mark.parametrize(("ran", "starved"), [((20, 60), []), ((20, 20), [1])])
def test_a_rank_with_more_work_is_not_starved_alone(ran: tuple[int, int], starved: list[int]) -> None:
    """Rank 1 waits 36 of 100 ms, rank 0 12: as much for each millisecond that they run, or three times it."""
    manifests = [manifest(rank, wait=wait, busy=0.9, own=0.3) for rank, wait in enumerate((0.12, 0.36))]
    for one, ms in zip(manifests, ran, strict=True):
        one.host_steps = [
            msgspec.structs.replace(step, main_thread_cpu_ns=ms * MS) for step in one.host_steps
        ]
    assert list(starved_ranks(manifests)) == starved
