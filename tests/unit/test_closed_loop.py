"""From a simulated FSDP2 trace file back to the answers it was built from: to the nanosecond and the byte."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from synthetic import Layer, Recording, Schedule, record, transformer, truth_of, write, write_run
from synthetic.strategies import schedules
from synthetic.truth import GroupKey, GroupTruth

from fsdp2prof.analyzers.trace.analysis import RankAnalysis, analyze_rank
from fsdp2prof.readers.trace.chrome_trace import read_trace
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.job.job_files import open_job


def analyse(recording: Recording, folder: Path, **options: Any) -> RankAnalysis:
    trace = read_trace(write(recording, folder / "trace.json", **options), workers=1)
    assert trace.warnings == ()
    return analyze_rank(trace)


def sums_of(found: RankAnalysis) -> dict[GroupKey, GroupTruth]:
    """Fold the rows of several dtypes and process groups, which the answers do not tell apart."""
    sums: dict[GroupKey, GroupTruth] = defaultdict(GroupTruth)
    for row in found.groups:
        total = sums[row.step, row.fqn, row.phase, row.op]
        total.count += row.count
        total.total_ns += row.total_ns
        total.exposed_ns += row.exposed_ns
        for name in ("payload_bytes", "wire_bytes", "stall_ns"):
            value, so_far = getattr(row, name), getattr(total, name)
            setattr(total, name, None if value is None or so_far is None else so_far + value)
    return sums


def assert_recovered(recording: Recording, found: RankAnalysis) -> None:
    truth = truth_of(recording)
    steps = {step.step: step for step in found.rank.steps}
    assert {step: asdict(row.breakdown_ns) for step, row in steps.items()} == {
        step: answer.breakdown_ns for step, answer in truth.steps.items()
    }
    for step, answer in truth.steps.items():
        assert steps[step].duration_ns == answer.duration_ns == sum(answer.breakdown_ns.values())
    assert sums_of(found) == truth.groups
    assert found.rank.communication.total_ns == truth.communication_ns
    assert found.rank.communication.exposed_ns == truth.exposed_ns


def chain(layers: tuple[Layer, ...], ahead: int) -> tuple[Layer, ...]:
    """Prefetch ``ahead`` layers explicitly, in forward and backward."""
    root, *children = layers
    names = [layer.fqn for layer in children]
    return (
        replace(root, forward_prefetch=tuple(names[:1])),
        *(
            replace(
                layer,
                forward_prefetch=tuple(names[i + 1 : i + 1 + ahead]),
                backward_prefetch=tuple(reversed(names[max(0, i - ahead) : i])),
            )
            for i, layer in enumerate(children)
        ),
    )


T = transformer
COMM_BOUND: dict[str, Any] = {
    "all_gather_ns": 700_011,
    "reduce_scatter_ns": 1_100_003,
    "all_reduce_ns": 1_500_009,
}
VARIANTS = {
    "default": Schedule(roots=(T(),)),
    "never_reshard": Schedule(roots=(T(reshard=False),)),
    "root_resharded": Schedule(roots=((replace(T()[0], reshard=True), *T()[1:]),)),
    "explicit_prefetch": Schedule(roots=(chain(T(4), 1),)),
    "explicit_prefetch_of_two": Schedule(roots=(chain(T(4), 2),)),
    "unshard_async_op": Schedule(roots=(T(),), unshard_async_op=True),
    "hsdp": Schedule(roots=(T(),), shard=2, replicas=2),
    "hsdp_comm_bound": Schedule(roots=(T(**COMM_BOUND),), shard=2, replicas=2),
    "hsdp_two_backwards": Schedule(roots=(T(**COMM_BOUND),), shard=2, replicas=2, microbatches=2),
    "reduce_in_bf16": Schedule(roots=(T(),), reduce_dtype="BFloat16"),
    "two_backwards": Schedule(roots=(T(),), microbatches=2),
    "accumulation_without_sync": Schedule(roots=(T(),), microbatches=3, sync_every_microbatch=False),
    "two_roots": Schedule(roots=(T(2, "encoder"), T(2, "decoder"))),
    "two_roots_told_apart": Schedule(roots=(T(2), T(2)), mark_roots=True),
    "checkpoint_inside": Schedule(roots=(T(),), checkpoint="inside"),
    "checkpoint_outside": Schedule(roots=(T(),), checkpoint="outside"),
    "recomputation_prefetches_forwards": Schedule(roots=(chain(T(4), 1),), checkpoint="outside"),
    "late_forward": Schedule(roots=(T(),)).changed("layers.1", late_ns=2_000_077),
    "late_backward": Schedule(roots=(T(),)).changed("layers.1", late_backward_ns=2_000_077),
    "host_bound": Schedule(roots=(T(host_ns=400_033),)),
    "item_in_forward": Schedule(roots=(T(),)).changed("layers.1", sync=True),
    "queued_behind_reduce_scatter": Schedule(roots=(T(reduce_scatter_ns=900_011),)),
    "separate_reduce_scatter_group": Schedule(
        roots=(T(reduce_scatter_ns=900_011),), separate_reduce_scatter_group=True
    ),
    "slow_transfer": Schedule(roots=(T(),), slow_transfer=frozenset({("all_gather", "layers.1")})),
    "user_annotations_that_nest": Schedule(roots=(T(),), user_ranges=True),
    "compiled_blocks": Schedule(roots=(T(),), compiled=True),
    "steps_that_overlap": Schedule(roots=(T(),), input_stream=True, steps=3),
    "steps_that_overlap_under_load": Schedule(roots=(T(**COMM_BOUND),), input_stream=True, steps=3),
    "copy_engine": Schedule(roots=(T(),), flavour="copy_engine"),
    "rccl_generic_kernels": Schedule(roots=(T(),), flavour="rccl"),
    "rccl_without_metadata": Schedule(roots=(T(),), flavour="rccl", metadata=False),
    "rccl_old_kernel_name": Schedule(roots=(T(),), flavour="rccl_old"),
    "symmetric_memory": Schedule(roots=(T(),), flavour="symmetric_memory"),
    "labels_at_launch": Schedule(roots=(T(),), labels="launch"),
    "labels_at_launch_hsdp": Schedule(roots=(T(),), labels="launch", shard=2, replicas=2),
    "no_labels": Schedule(roots=(T(),), labels="none"),
    "cuda_graph": Schedule(roots=(T(),), graph=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_answers_are_recovered(name: str, tmp_path: Path) -> None:
    (recording,) = record(VARIANTS[name])
    assert_recovered(recording, analyse(recording, tmp_path))


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("no_labels", "cuda_graph")])
def test_every_collective_is_attributed(name: str, tmp_path: Path) -> None:
    (recording,) = record(VARIANTS[name])
    found = analyse(recording, tmp_path).attribution
    assert found.attributed == found.collectives == len(recording.timeline.collectives)
    assert found.attributed_ns == found.comm_ns
    assert found.unattributed_reasons == {}


@pytest.mark.parametrize("name", ["no_labels", "cuda_graph"])
def test_what_has_no_label_is_counted_with_its_reason(name: str, tmp_path: Path) -> None:
    (recording,) = record(VARIANTS[name])
    found = analyse(recording, tmp_path).attribution
    assert found.attributed == 0
    assert (
        sum(found.unattributed_reasons.values()) == found.collectives == len(recording.timeline.collectives)
    )


def test_work_whose_launches_are_missing_is_still_in_the_whole_window(tmp_path: Path) -> None:
    (recording,) = record(VARIANTS["default"])
    path = write(recording, tmp_path / "trace.json", launches=False)
    found = analyze_rank(read_trace(path, workers=1), window="trace")
    device = recording.timeline.device
    (step,) = found.rank.steps
    assert step.duration_ns == max(a.end for a in device) - min(a.start for a in device)
    assert found.rank.communication.total_ns == truth_of(recording).communication_ns
    assert found.attribution.collectives == len(recording.timeline.collectives)
    assert found.attribution.attributed == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=schedules())
def test_the_answers_of_any_schedule_are_recovered(schedule: Schedule, tmp_path: Path) -> None:
    (recording,) = record(schedule)
    assert_recovered(recording, analyse(recording, tmp_path))


@pytest.mark.parametrize("name", VARIANTS)
def test_idle_causes_sum_to_the_idle_time(name: str, tmp_path: Path) -> None:
    (recording,) = record(VARIANTS[name])
    for step in analyse(recording, tmp_path).rank.steps:
        assert sum(step.idle_ns.values()) == step.breakdown_ns.idle
        assert all(time > 0 for time in step.idle_ns.values())


def test_a_drained_queue_is_charged_with_the_lead_it_cost(tmp_path: Path) -> None:
    """Launching a kernel takes 90 us, running it 100: after ``.item()`` the next compute comes 90 us late."""
    busy = Schedule(roots=(T(3, host_ns=90_007, copy_ns=1_003, all_gather_ns=5_003),), steps=3)
    (synced,), (plain,) = record(busy.changed("layers.1", sync=True)), record(busy)
    last = analyse(synced, tmp_path).rank.steps[-1]
    assert last.idle_ns["device_sync"] > 80_000
    assert last.idle_ns["device_sync"] > 5 * last.idle_ns.get("host_bound", 0)
    assert "device_sync" not in analyse(plain, tmp_path).rank.steps[-1].idle_ns


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ("no_labels", "cuda_graph")])
def test_verdicts_say_how_early_and_how_late(name: str, tmp_path: Path) -> None:
    (recording,) = record(VARIANTS[name])
    write(recording, tmp_path / "rank0_trace.json")
    rows = analyze_trace(open_job(tmp_path), workers=1).prefetch
    awaited = [c for c in recording.timeline.collectives if c.consumer is not None]
    key = sorted((c.step, c.fqn, c.op, c.needed - c.issue, c.needed - c.end, c.stall) for c in awaited)
    assert key == sorted(
        (r.step, r.fqn, r.op, r.issued_before_ns, r.finished_before_ns, r.stall_ns) for r in rows
    )
    for row in rows:
        assert sum(row.late_ns.values()) == row.stall_ns
        assert (row.cause is None) == (row.stall_ns == 0)


CAUSES = {
    "launch": (Schedule(roots=(T(),)).changed("layers.1", late_ns=20_000_077), "layers.1", "forward"),
    "communicator": (VARIANTS["queued_behind_reduce_scatter"], "layers.0", "backward"),
    "stream": (VARIANTS["unshard_async_op"], "layers.1", "forward"),
    "transfer": (
        Schedule(roots=(T(4),), slow_transfer=frozenset({("all_gather", "layers.0")})),
        "layers.0",
        "forward",
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_of_a_late_all_gather_is_the_one_built_in(cause: str, tmp_path: Path) -> None:
    schedule, fqn, phase = CAUSES[cause]
    pair = replace(schedule, shard=2)
    rows = analyze_trace(open_job(write_run(record(pair, pair), tmp_path / "run")), workers=1).prefetch
    found = [r for r in rows if (r.rank, r.fqn, r.phase, r.op) == (0, fqn, phase, "all_gather")]
    assert [row.cause for row in found] == [cause] * schedule.steps


def test_an_all_gather_late_for_a_peer_names_the_peer(tmp_path: Path) -> None:
    base = VARIANTS["default"]
    folder = write_run(record(base, base.changed("layers.1", forward_ns=2_000_003)), tmp_path / "run")
    rows = analyze_trace(open_job(folder), workers=1).prefetch
    late = [r for r in rows if (r.rank, r.op, r.cause) == (0, "all_gather", "peer")]
    assert late
    assert all(r.late_ns["peer"] <= 2_000_003 - 300_017 for r in late)


@pytest.mark.parametrize("name", ["default", "hsdp", "comm_bound_from_the_middle"])
def test_a_recording_that_begins_in_the_middle_of_a_step(name: str, tmp_path: Path) -> None:
    """The host's first step is lost but its work still runs: later steps are exact, the rest has a reason."""
    schedule = VARIANTS.get(name, Schedule(roots=(T(**COMM_BOUND),)))
    (recording,) = record(replace(schedule, steps=3))
    timeline, truth = recording.timeline, truth_of(recording)
    second = next(e.start for e in timeline.host if e.name == "ProfilerStep#4")
    timeline.host = [event for event in timeline.host if event.start >= second - 50_000]
    trace = read_trace(write(recording, tmp_path / "trace.json"), workers=1)
    found = analyze_rank(trace)
    assert {step.step: asdict(step.breakdown_ns) for step in found.rank.steps} == {
        step: answer.breakdown_ns for step, answer in truth.steps.items() if step > 3
    }
    assert sums_of(found) == {key: answer for key, answer in truth.groups.items() if key[0] > 3}
    whole = analyze_rank(trace, window="trace")
    (step,) = whole.rank.steps
    assert sum(asdict(step.breakdown_ns).values()) == step.duration_ns
    queued = whole.attribution.unattributed_reasons["its launch is not in the file"]
    assert whole.attribution.attributed + queued == len(timeline.collectives)
