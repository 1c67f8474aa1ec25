"""Memory and traces: Kineto's memory events by hand and in a real trace, and the peak found in a trace."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.snapshots import SnapshotBuilder

from fsdp2prof.analyzers.memory.kineto_events import find_peak, kineto_recordings
from fsdp2prof.analyzers.memory.prepared import allocated_totals, prepare, reserved_totals
from fsdp2prof.analyzers.trace.rank_tables import rank_tables
from fsdp2prof.errors import SnapshotError
from fsdp2prof.readers.memory.recording import read_memory
from fsdp2prof.readers.trace.chrome_trace import read_trace
from fsdp2prof.results.memory import AtPeak
from fsdp2prof.tables.allocations import MemoryRecording
from fsdp2prof.workflows.analyze import analyze_memory
from fsdp2prof.workflows.job.job_files import open_job


def trace(
    path: Path, memory: list[tuple[int, int, int, int, int]], ranges: Sequence[tuple[str, str, int, int]] = ()
) -> Path:
    """A trace of (ts, device, address, bytes, reserved) instants and (cat, name, ts, dur) ranges."""
    held: dict[int, int] = {}
    events: list[dict[str, object]] = []
    for ts, device, address, size, reserved in memory:
        held[device] = held.get(device, 1000) + size
        args = {
            "Device Type": int(device >= 0),
            "Device Id": device,
            "Addr": address,
            "Bytes": size,
            "Total Allocated": held[device],
            "Total Reserved": reserved,
        }
        events.append({"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts, "args": args})
    for cat, name, ts, dur in ranges:
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": {}}
        )
    path.write_bytes(gzip.compress(json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()))
    return path


def totals(recording: MemoryRecording) -> list[int]:
    return allocated_totals(recording.allocations, recording.events).tolist()


def test_pairs_and_what_was_there_before(tmp_path: Path):
    memory = [
        (10, 0, 64, 100, 4096),
        (11, 0, 999, -300, 4096),
        (12, 0, 128, 50, 8192),
        (13, 0, 64, -100, 8192),
    ]
    memory += [(14, 0, 64, 70, 6144), (15, -1, 5, 8, 0)]
    ranges = [
        ("cpu_op", "aten::linear", 9, 4),
        ("cpu_op", "aten::addmm", 10, 1),
        ("user_annotation", "FSDP::all_gather (a)", 14, 1),
    ]
    device, host = kineto_recordings(read_trace(trace(tmp_path / "t.json.gz", memory, ranges)))
    assert totals(device) == [1100, 800, 850, 750, 820]  # 1000 before: 300 freed in sight, 700 never
    assert sorted(device.allocations.size.tolist()) == [50, 70, 100, 300, 700]
    assert device.allocations.op.to_list() == [None, None, "aten::addmm", "aten::linear", None]
    reserved = reserved_totals(device.segments, device.events)
    assert reserved is not None
    assert reserved.tolist() == [4096, 4096, 8192, 8192, 6144]
    assert device.labels.name.to_list() == ["FSDP::all_gather (a)"]
    assert device.warnings == ()
    assert (device.source, host.device) == ("kineto", "cpu")
    assert "approximate" in host.warnings[0]


def test_missing_free_is_put_before_the_address_is_used_again(tmp_path: Path):
    memory = [(10, -1, 64, 100, 0), (11, -1, 64, 30, 0), (12, -1, 64, -30, 0)]
    (recording,) = kineto_recordings(
        read_trace(trace(tmp_path / "t.json.gz", memory, [("cpu_op", "a", 1, 1)]))
    )
    assert totals(recording) == [1100, 1030, 1000]
    assert "(1 restored" in recording.warnings[0]


def test_trace_without_memory_events_is_one_clear_line(tmp_path: Path):
    path = trace(tmp_path / "t.json.gz", [], [("cpu_op", "aten::mm", 1, 1)])
    with pytest.raises(
        SnapshotError, match="no memory events in this trace; record it with profile_memory=True"
    ):
        analyze_memory(open_job(path))


@pytest.mark.real_data
def test_totals_of_a_real_trace_are_the_allocators_own(real_data: Path):
    """28,010 events of a V100: after each one, what is held equals Kineto's Total Allocated and Reserved."""
    source = read_trace(real_data / "traces" / "ddp2-v100-rank1-memory" / "df_index_resolver.json.gz")
    device, host = kineto_recordings(source)
    events = source.memory.take(source.memory.device == 1)
    assert np.array_equal(allocated_totals(device.allocations, device.events), events.allocated_bytes)
    reserved = reserved_totals(device.segments, device.events)
    assert reserved is not None
    assert np.array_equal(reserved, events.reserved_bytes)
    assert len(host.allocations) == 620


@pytest.mark.real_data
def test_peak_in_its_own_trace_names_operator_and_collective(real_data: Path):
    """The V100's peak: its last launch before is the gradient's all-reduce, which is still running."""
    source = read_trace(real_data / "traces" / "ddp2-v100-rank1-memory" / "df_index_resolver.json.gz")
    recording = kineto_recordings(source)[0]
    found = find_peak(prepare(recording, None), rank_tables(source))
    assert found is not None
    assert (found.match, found.step, found.operator) == ("clock", 2, "aten::empty")
    peak = source.memory.time_ns[np.argmax(source.memory.allocated_bytes)]
    device = source.events.device >= 0
    running = device & (source.events.start_ns <= peak) & (peak < source.events.end_ns)
    kernels = {source.events.name[int(row)] for row in np.flatnonzero(running)}
    assert found.running[0] in kernels
    assert found.running[1] == "all_reduce"


def test_peak_of_another_step_is_looked_up_at_the_same_place(tmp_path: Path):
    """Memory of step 5, trace of step 4: three quarters into the second forward of ``a``."""
    ranges = [("user_annotation", "ProfilerStep#4", 1000, 1000), ("cpu_op", "aten::mm", 1575, 10)]
    for start in (1100, 1500):
        ranges += [("user_annotation", "FSDP::pre_forward (a)", start - 50, 50)]
        ranges += [("user_annotation", "FSDP::post_forward (a)", start + 100, 50)]
    source = read_trace(trace(tmp_path / "t.json.gz", [], ranges))
    builder = SnapshotBuilder().label("START", "ProfilerStep#5")
    for _ in range(2):
        builder.label("START", "FSDP::pre_forward (a)").label("END", "FSDP::pre_forward (a)")
        builder.event("user_defined", 0, 0).event("user_defined", 0, 0).alloc(100, 10)
        builder.label("START", "FSDP::post_forward (a)").label("END", "FSDP::post_forward (a)")
        builder.free(100, 10)
    builder.trace[-3]["size"] = builder.trace[-1]["size"] = 20
    builder.label("END", "ProfilerStep#5")
    (recording,) = read_memory(builder.write(tmp_path / "s.pickle"))
    found = find_peak(prepare(recording, None), rank_tables(source))
    # the layer computes for 4 us and allocates after 3; in the trace for 100 us, so after 75
    assert found == AtPeak(match="place", step=4, operator="aten::mm", launched=None, running=[])
