"""Recordings that lost records of the device: said first, left out, and nothing concluded from them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support.traces import TraceBuilder
from synthetic import Schedule, record, transformer, write

from fsdp2prof.analyzers.launches import incomplete_steps, launch_calls
from fsdp2prof.analyzers.steps import host_steps
from fsdp2prof.analyzers.trace.analysis import analyze_trace
from fsdp2prof.analyzers.trace.rank_tables import rank_tables
from fsdp2prof.manifest import DeviceInfo, HostStep, RankManifest
from fsdp2prof.readers.trace.chrome_trace import read_trace
from fsdp2prof.readers.trace.launch_counts import count_launches
from fsdp2prof.readers.trace.nsys_report import read_nsys_report
from fsdp2prof.results.trace import TraceAnalysis

RECORDINGS = Path(__file__).parents[1] / "data" / "gpu" / "recordings"
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
Event = dict[str, Any]


def _first_20(events: list[Event]) -> list[Event]:
    return events[: len(events) // 5]


def _after_55(events: list[Event]) -> list[Event]:
    begin, end = events[0]["ts"], max(event["ts"] + event["dur"] for event in events)
    return [event for event in events if event["ts"] > begin + 0.55 * (end - begin)]


def _random_20(events: list[Event]) -> list[Event]:
    chance = random.Random(1)
    return [event for event in events if chance.random() < 0.2]


def _one_stream(events: list[Event]) -> list[Event]:
    """Of the collectives: a few of all launches."""
    return [event for event in events if "nccl" in event["name"]]


def _copies(events: list[Event]) -> list[Event]:
    return [event for event in events if event["cat"] == "gpu_memcpy"]


def _nothing(_: list[Event]) -> list[Event]:
    return []


def spoilt(path: Path, lost: Callable[[list[Event]], list[Event]]) -> Path:
    """Write the trace of four steps, 3 to 6, without the device's records that were ``lost``."""
    (recording,) = record(Schedule(roots=(transformer(3),), steps=4))
    document = json.loads(gzip.decompress(write(recording, path).read_bytes()))
    work = sorted((e for e in document["traceEvents"] if e.get("cat") in WORK), key=lambda e: e["ts"])
    gone = set(map(id, lost(work)))
    document["traceEvents"] = [event for event in document["traceEvents"] if id(event) not in gone]
    path.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    return path


def analysis(path: Path, manifest: RankManifest | None = None) -> TraceAnalysis:
    return analyze_trace([(read_trace(path), manifest)])


@pytest.mark.parametrize(
    ("lost", "incomplete", "analysed"),
    [
        (_first_20, [3], [4, 5, 6]),
        (_after_55, [5, 6], [3, 4]),
        (_random_20, [3, 4, 5, 6], []),
        (lambda work: work, [3, 4, 5, 6], []),
    ],
    ids=["first-20", "after-55", "random-20", "all"],
)
def test_steps_that_lost_records_are_named_first_and_left_out(
    tmp_path: Path, lost: Callable[[list[Event]], list[Event]], incomplete: list[int], analysed: list[int]
) -> None:
    whole = analysis(spoilt(tmp_path / "whole.json.gz", _nothing))
    found = analysis(spoilt(tmp_path / "rank0_trace.json.gz", lost))
    (rank,) = found.ranks
    assert [one.step for one in rank.incomplete_steps] == incomplete
    assert [step.step for step in rank.steps] == analysed
    of_whole = {step.step: step for step in whole.ranks[0].steps}
    # the last complete step before a hole ends with its own last activity, else nothing differs
    for step in rank.steps:
        assert step.breakdown_ns.compute == of_whole[step.step].breakdown_ns.compute
        assert step.duration_ns == pytest.approx(of_whole[step.step].duration_ns, rel=0.01)
    assert "Device records are missing" in found.verdict[0]
    assert "launches" in found.warnings[0]
    told = " ".join(
        [*found.verdict, *found.warnings, *found.advice, *(one.message for one in found.findings)]
    )
    assert "launched nothing" not in told
    assert "CPU" not in told
    if not analysed:
        assert (found.findings, found.advice, len(found.verdict)) == ([], [], 1)


def test_a_profile_of_hardware_counters_is_not_called_lost(tmp_path: Path) -> None:
    path = spoilt(tmp_path / "trace.json.gz", lambda work: work)
    assert "The profiler lost them" in analysis(path).warnings[0]
    document = json.loads(gzip.decompress(path.read_bytes()))
    counted = {"ph": "X", "cat": "cuda_profiler_range", "name": "gemm", "pid": 0, "tid": 0, "ts": 1, "dur": 1}
    document["traceEvents"].append(counted | {"args": {"smsp__sass_thread_inst_executed.sum": 4866048}})
    path.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    assert "hardware counters" in analysis(path).warnings[0]


@pytest.mark.parametrize("lost", [_one_stream, _copies])
def test_of_a_real_trace_a_kind_of_work_is_missed(
    real_data: Path, tmp_path: Path, lost: Callable[[list[Event]], list[Event]]
) -> None:
    """21 of 3,777 launches of three steps are collectives, and 960 copies."""
    (path,) = (real_data / "traces" / "ddp2-a100-rank0").glob("*.json.gz")
    document = json.loads(gzip.decompress(path.read_bytes()))
    gone = set(map(id, lost([e for e in document["traceEvents"] if e.get("cat") in WORK])))
    document["traceEvents"] = [event for event in document["traceEvents"] if id(event) not in gone]
    (spoilt_path := tmp_path / "trace.json.gz").write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    assert [one.step for one in analysis(spoilt_path).ranks[0].incomplete_steps] == [4, 5, 6]


def test_of_a_real_trace_the_first_records_are_missed(tmp_path: Path) -> None:
    """3 of the 225 launches of one of two steps."""
    path = RECORDINGS / "hsdp" / "rank-00000" / "trace.json.gz"
    document = json.loads(gzip.decompress(path.read_bytes()))
    work = sorted((e for e in document["traceEvents"] if e.get("cat") in WORK), key=lambda e: e["ts"])
    gone = set(map(id, _first_20(work)))
    document["traceEvents"] = [event for event in document["traceEvents"] if id(event) not in gone]
    (spoilt_path := tmp_path / "trace.json.gz").write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    assert analysis(path).ranks[0].incomplete_steps == []
    (lost,) = analysis(spoilt_path).ranks[0].incomplete_steps
    assert (lost.missing, lost.launches) == (3, 225)


def test_a_whole_trace_gets_no_word(tmp_path: Path) -> None:
    found = analysis(spoilt(tmp_path / "trace.json.gz", _nothing))
    assert (found.warnings, found.ranks[0].incomplete_steps) == ([], [])


def test_steps_that_were_asked_for_are_shown_and_nothing_is_concluded(tmp_path: Path) -> None:
    path = spoilt(tmp_path / "trace.json.gz", _random_20)
    tables = rank_tables(read_trace(path), chosen=[4])
    assert tables.windows.step.tolist() == [4]
    whole = rank_tables(read_trace(path), window="trace")
    assert (len(whole.windows), [one.step for one in whole.incomplete]) == (0, [0])


def test_a_manifest_that_names_a_gpu_needs_records_of_it(tmp_path: Path) -> None:
    """CUPTI refused: neither calls nor records are in the trace."""

    def strip(path: Path) -> Path:
        document = json.loads(gzip.decompress(path.read_bytes()))
        kinds = (*WORK, "cuda_runtime", "cuda_driver", "gpu_user_annotation")
        document["traceEvents"] = [e for e in document["traceEvents"] if e.get("cat") not in kinds]
        path.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
        return path

    path = strip(spoilt(tmp_path / "trace.json.gz", _nothing))
    h100 = DeviceInfo(type="cuda", index=0, name="NVIDIA H100 80GB HBM3")
    found = analysis(path, RankManifest(world_size=4, device=h100))
    assert found.ranks[0].steps == []
    assert "NVIDIA H100" in found.warnings[0]
    assert found.findings == []
    assert analysis(path, RankManifest(world_size=4)).ranks[0].steps, "a run on a CPU has none"


def test_a_few_lost_records_change_no_mean() -> None:
    """1 of 300 launches of three steps, the first or the last 2 or 6 of 100 in one of seven steps."""
    cases: list[tuple[list[int], int, list[int]]] = [([5], 3, []), ([0, 1], 7, [0]), ([698, 699], 7, [])]
    cases += [(list(range(6)), 7, [0]), (list(range(694, 700)), 7, [6])]
    for lost, steps, incomplete in cases:
        trace = TraceBuilder()
        for step in range(steps):
            trace.label(f"ProfilerStep#{step}", step * 1000, step * 1000 + 999)
            for i in range(100):
                time = step * 1000 + i * 5
                trace.device("gemm", time + 2, time + 4, launch=time)
        device = [row for row in trace.rows if "device" in row]
        for i in lost:
            trace.rows.remove(device[i])
        built = trace.build()
        found = incomplete_steps(launch_calls(built), host_steps(built.labels))
        assert [one.step for one in found] == incomplete


def test_what_was_queued_when_a_capture_was_cut_is_not_missing() -> None:
    """The device works until the end, on what was launched long before: the rest was still queued."""
    trace = TraceBuilder()
    for i in range(10):
        trace.device("gemm", 100 + i * 100, 200 + i * 100, launch=i * 100)
    rows = [row for row in trace.rows if row.get("start", 0) < 600 or "device" not in row]
    trace.rows[:] = rows
    built = trace.build()
    assert int((~launch_calls(built).has_record).sum()) == 5
    cut = launch_calls(replace(built, capture="cut"))
    # the device worked until 600: launches before that were queued, those after it are lost
    assert int((~cut.has_record).sum()) == 3


def test_copies_that_never_leave_a_record_are_no_launches() -> None:
    trace = TraceBuilder()
    for i in range(4):
        trace.device("gemm", 100 + i * 10, 105 + i * 10, launch=i * 10)
        trace.host("hipMemcpy", i * 10 + 2, i * 10 + 4, "cuda_runtime")
        trace.rows[-1]["correlation"] = 900 + i
    assert len(launch_calls(trace.build())) == 4


def test_what_leaves_no_record_when_nothing_is_lost_is_no_launch() -> None:
    """Fills may be of zero bytes; what is launched into a graph that is being captured does not run."""
    trace = TraceBuilder()
    for i in range(4):
        trace.device("gemm", 100 + i * 10, 105 + i * 10, launch=i * 10)
    calls = ["cudaMemsetAsync", "cudaStreamBeginCapture", *["cudaLaunchKernel"] * 6, "cudaStreamEndCapture"]
    for i, name in enumerate(calls):
        trace.host(name, 50 + i * 2, 51 + i * 2, "cuda_runtime")
        trace.rows[-1]["correlation"] = 900 + i
    assert launch_calls(trace.build()).has_record.tolist() == [True] * 4
    for number, (time, thread) in enumerate([(56, 1), (80, 0)]):  # beside the capture, and after it
        trace.host("cudaLaunchKernel", time, time + 1, "cuda_runtime", thread=thread)
        trace.rows[-1]["correlation"] = 950 + number
    assert sorted(launch_calls(trace.build()).has_record.tolist()) == [False] * 2 + [True] * 4


def test_launches_into_a_graph_are_left_out_of_the_files_count_too(tmp_path: Path) -> None:
    def call(name: str, time: int, correlation: int, thread: int = 1) -> Event:
        args = {"correlation": correlation}
        return {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": name,
            "pid": 1,
            "tid": thread,
            "ts": time,
            "dur": 1,
            "args": args,
        }

    events = [
        {**call("gemm", 5, 1, thread=7), "cat": "kernel", "pid": 0},
        call("cudaLaunchKernel", 1, 1),
        call("cudaStreamEndCapture", 30, 2),
        call("cudaStreamBeginCapture", 10, 3),
        call("cudaLaunchKernel", 20, 4),
        call("cudaLaunchKernel", 20, 5, thread=2),
        call("cudaMemsetAsync", 40, 6),
        call("cudaLaunchKernel", 40, 7),
    ]
    (path := tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    calls = launch_calls(read_trace(path))
    assert (len(calls), int((~calls.has_record).sum())) == (3, 2)
    assert count_launches(path) == (3, 2)


def test_counting_in_the_file_equals_counting_in_the_tables(tmp_path: Path) -> None:
    for lost in (_first_20, _after_55, _random_20, _nothing):
        path = spoilt(tmp_path / "trace.json.gz", lost)
        calls = launch_calls(read_trace(path))
        assert count_launches(path) == (len(calls), int(np.count_nonzero(~calls.has_record)))


def test_a_trace_of_another_rank_or_device_is_said(tmp_path: Path) -> None:
    path = spoilt(tmp_path / "trace.json.gz", _nothing)
    assert analysis(path, RankManifest(rank=0, world_size=4)).warnings == []
    other = RankManifest(rank=1, world_size=8, device=DeviceInfo(type="cuda", name="NVIDIA A100"))
    told = analysis(path, other).warnings
    assert [word in line for word, line in zip(("rank", "world size", "device"), told, strict=True)] == [
        True
    ] * 3


def test_a_lowered_clock_and_a_used_up_quota_are_said(tmp_path: Path) -> None:
    path = spoilt(tmp_path / "trace.json.gz", _nothing)
    steps = [
        HostStep(step=3, cpu_time_ns=100, slowed_by=["power_cap"], quota_throttled_ns=5),
        HostStep(step=4, cpu_time_ns=100, slowed_by=["power_cap", "thermal_slowdown"], quota_throttled_ns=0),
        HostStep(step=5, cpu_time_ns=100, slowed_by=["thermal_slowdown"], quota_throttled_ns=2_000_000),
        HostStep(step=6, cpu_time_ns=100, quota_throttled_ns=4_000_000),
    ]
    calm = RankManifest(rank=0, world_size=4, host_steps=steps[:1])
    assert analysis(path, calm).warnings == []
    told = [
        one.split(": ", 1)[1]
        for one in analysis(path, msgspec.structs.replace(calm, host_steps=steps)).warnings
    ]
    assert told == [
        "thermal_slowdown lowered the GPU's clock in steps 4, 5 (NVML): check cooling and power",
        "the container's CPU quota was exhausted for 3.00 ms per step in steps 5, 6: raise its CPU limit",
    ]


def test_a_trace_of_another_torch_is_said(tmp_path: Path) -> None:
    trace = replace(read_trace(spoilt(tmp_path / "trace.json.gz", _nothing)), torch_version="2.9.1")
    for version, told in (
        ("2.9.1", []),
        ("2.13.0", ["its torch is 2.9.1, but the manifest beside it says 2.13.0"]),
    ):
        manifest = RankManifest(rank=0, world_size=4, versions={"torch": version})
        warnings = analyze_trace([(trace, manifest)]).warnings
        assert [one.split(": ")[1] for one in warnings] == told


def test_records_that_overlap_on_one_stream_are_said() -> None:
    trace = TraceBuilder()
    for i in range(10):
        trace.device("gemm", i * 10, i * 10 + 15, launch=i)
    assert any("overlap the preceding record" in line for line in rank_tables(trace.build()).warnings)


class TestRealTraces:
    def test_no_real_trace_gets_a_word(self, real_data: Path) -> None:
        for path in sorted((real_data / "traces").rglob("*.json.gz")):
            tables = rank_tables(read_trace(path))
            assert tables.incomplete == [], path
            assert not [line for line in tables.warnings if "record" in line and "device" in line], path

    def test_a_report_that_was_cut_is_whole(self, real_data: Path) -> None:
        report = real_data / "nsight" / "fsdp2-offload-2xh100" / "h100_2gpu_1s.sqlite"
        for rank in range(2):
            assert rank_tables(read_nsys_report(report, rank=rank)).incomplete == []
