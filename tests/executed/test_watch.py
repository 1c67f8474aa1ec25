"""A job that is watched: its lines, what they come to, and what the recorder measures them with."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from support.present import present
from support.watched import MS, watched_run, watched_steps
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from fsdp2prof.analyzers.watching import watch_steps
from fsdp2prof.errors import RunDirectoryError
from fsdp2prof.files import write_json
from fsdp2prof.manifest import RankManifest, RecordOptions, RunInfo, StepInfo, WatchedStep
from fsdp2prof.readers.run.documents import read_last_steps
from fsdp2prof.recorder.rank import watching
from fsdp2prof.recorder.rank.watching import StepLines
from fsdp2prof.reporters.open_metrics import open_metrics
from fsdp2prof.workflows.watch import watch_run


def test_the_slow_rank_is_the_one_that_waits_least():
    run = watched_run()
    assert [(rank.rank, rank.behind_ns) for rank in run.ranks] == [(2, 15 * MS), (0, 0), (1, 0)]
    assert run.verdict[1].startswith("Rank 2 needs 15.0 ms more")
    assert (run.step_ns, run.last_step, run.step_spread) == (100 * MS, 19, 0)
    assert run.exposed_frac == 0.2
    assert run.tokens_per_s == 10_000
    assert [one.step for one in run.steps] == list(range(10, 20))
    assert run.ranks[0].growth_bytes == 9 * 1000


def test_ranks_that_are_alike_are_not_blamed_and_what_is_unknown_stays_so():
    alike = watch_steps({0: watched_steps(0), 1: watched_steps(1)}, path="x", state="running", window=5)
    assert all("wait for it" not in line for line in alike.verdict)
    bare = [WatchedStep(step=step, duration_ns=MS) for step in range(3)]
    run = watch_steps({0: bare}, path="x", state="running", window=5)
    rank = run.ranks[0]
    assert (rank.exposed_ns, rank.behind_ns, rank.peak_bytes, rank.growth_bytes) == (None, None, None, None)
    assert (run.exposed_frac, run.tokens_per_s) == (None, None)


def test_a_rank_of_two_is_named_only_if_it_needs_more_in_most_steps():
    """Rank 1 needs 30 ms more in every step, or in every other one (and 30 less in between)."""
    for every, behind, named in ((1, 30, True), (2, 15, False)):
        steps = {0: watched_steps(0, busy_ms=50), 1: watched_steps(1, busy_ms=80)}
        for line in steps[1][::every] if every > 1 else []:
            line.exposed_ns = 80 * MS
        run = watch_steps(steps, path="x", state="running", window=20)
        assert {rank.rank: rank.behind_ns for rank in run.ranks}[1] == behind * MS
        assert (
            any("Rank 1 needs 30.0 ms more for its own work than the other" in line for line in run.verdict)
            == named
        )


def test_memory_that_a_recording_took_has_not_grown():
    """The peak goes up to step 6, the last recorded one, and stays."""
    lines = watched_steps(0, steps=12)
    for line in lines:
        line.kind = "traced" if 3 <= line.step <= 6 else "plain"
        line.reserved_peak_bytes = 10**6 * min(line.step, 6)
    run = watch_steps({0: lines}, path="x", state="running", window=12)
    assert (run.ranks[0].growth_bytes, len(run.verdict)) == (0, 1)
    lines[-1].reserved_peak_bytes = 7 * 10**6
    run = watch_steps({0: lines}, path="x", state="running", window=12)
    assert run.ranks[0].growth_bytes == 10**6
    assert "reserved memory of rank 0 grew over these steps by 976.6 KiB" in run.verdict[1]


def test_all_ranks_that_grew_are_named():
    """Two ranks of three grow by 10 of 100 MB, then the third does, too."""
    steps = {rank: watched_steps(rank, steps=12) for rank in range(3)}
    for rank, lines in steps.items():
        for line in lines:
            line.reserved_peak_bytes = 10**8 + (10**6 * line.step if rank else 0)
    run = watch_steps(steps, path="x", state="running", window=12)
    assert "reserved memory of ranks 1, 2 grew" in run.verdict[-1]
    for line in steps[0]:
        line.reserved_peak_bytes = 10**8 + 10**6 * line.step
    run = watch_steps(steps, path="x", state="running", window=12)
    assert "reserved memory of all 3 ranks grew" in run.verdict[-1]


def test_recorded_steps_do_not_count():
    lines = watched_steps(0, steps=4)
    lines[1].kind, lines[1].duration_ns = "traced", 10**9
    assert watch_steps({0: lines}, path="x", state="running", window=5).step_ns == 100 * MS


def test_the_last_lines_of_a_file_that_is_being_written(tmp_path):
    file = tmp_path / "steps.jsonl"
    lines = [msgspec.json.encode(line) for line in watched_steps(0, steps=500)]
    file.write_bytes(b"\n".join(lines) + b"\n" + lines[0][:40])
    assert [line.step for line in read_last_steps(file, 3)] == [497, 498, 499]
    assert len(read_last_steps(file, 1000)) == 500
    file.write_bytes(b"nonsense\n" + lines[7] + b"\n")
    assert [line.step for line in read_last_steps(file, 3)] == [7]


def test_a_run_that_is_not_watched_is_told(tmp_path):
    write_json(tmp_path / "run.json", RunInfo(state="running"))
    with pytest.raises(RunDirectoryError, match="record --watch"):
        watch_run(tmp_path, window=5)
    write_json(tmp_path / "run.json", RunInfo(state="running", options=RecordOptions(watch=True)))
    with pytest.raises(RunDirectoryError, match="no rank has completed a step yet"):
        watch_run(tmp_path, window=5)
    for rank in (0, 1):
        (tmp_path / f"rank-0000{rank}").mkdir()
        write_json(tmp_path / f"rank-0000{rank}" / "manifest.json", RankManifest(rank=rank, world_size=2))
    line = msgspec.json.encode(watched_steps(1)[0])
    (tmp_path / "rank-00001" / "steps.jsonl").write_bytes(line + b"\n")
    run = watch_run(tmp_path, window=5)
    assert ([rank.rank for rank in run.ranks], run.warnings) == ([1], ["rank 0: no step yet"])


def test_metrics():
    lines = open_metrics(watched_run()).splitlines()
    assert 'fsdp2prof_watched_step_seconds{rank="2"} 0.1' in lines
    assert 'fsdp2prof_watched_exposed_seconds{rank="0"} 0.02' in lines
    assert 'fsdp2prof_watched_allocator_retries{rank="1"} 1' in lines
    assert lines[-1] == "# EOF"


def step(number: int) -> StepInfo:
    return StepInfo(step=number, start_ns=0, duration_ns=10**9)


def lines_of(folder: Any) -> list[WatchedStep]:
    return read_last_steps(folder / "steps.jsonl", 100)


def test_on_a_cpu_the_calls_that_fsdp_makes_are_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: "reduced")
    lines = StepLines(tmp_path)
    lines.end_step(step(0))
    before = _fsdp_collectives.dist
    lines.begin("cpu", blocking=True)
    seen: Any = _fsdp_collectives.dist
    assert seen.all_reduce(1) == "reduced"
    assert seen.ReduceOp is dist.ReduceOp
    dist.all_reduce(torch.ones(1))  # the training's own
    lines.end_step(step(1))
    lines.end_step(step(2))
    lines.end()
    assert _fsdp_collectives.dist is before
    first, second, third = lines_of(tmp_path)
    assert first.exposed_ns is None
    assert 0 < present(second.exposed_ns) < 10**9
    assert third.exposed_ns == 0
    assert present(third.resident_peak_bytes) > 10**6


class Event:
    """A pretended CUDA event: it has happened when the clock has come to it."""

    clock, now = 0, 0

    def __init__(self, **_: Any) -> None:
        self.time = 0

    def record(self, _: Any) -> None:
        Event.clock += 3  # each is 3 ms after the one before
        self.time = Event.clock

    def query(self) -> bool:
        return self.time <= Event.now

    def elapsed_time(self, other: Event) -> float:
        return other.time - self.time


def test_on_a_gpu_the_waits_that_fsdp_makes_the_compute_stream_do_are_measured(tmp_path, monkeypatch):
    waited: list[Any] = []
    compute, other = SimpleNamespace(), SimpleNamespace(name="all-gather")
    stats = {name: {"all": {"peak": size}} for name, size in (("allocated_bytes", 5), ("reserved_bytes", 7))}
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: compute)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch._C, "_cuda_memoryStats", lambda _: {**stats, "num_alloc_retries": 2}, raising=False
    )
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda stream, event: waited.append((stream, event)))
    original = torch.cuda.Stream.wait_event
    lines = StepLines(tmp_path)
    lines.begin("cuda", blocking=True)
    wait: Any = torch.cuda.Stream.wait_event
    of_fsdp = {"__name__": "torch.distributed.fsdp._fully_shard._fsdp_param_group", "wait": wait}
    for stream in (compute, compute, other):
        eval("wait(stream, 'event')", of_fsdp, {"stream": stream})
    wait(compute, "the training's own")
    assert len(waited) == 4
    lines.end_step(step(1))
    assert not (tmp_path / "steps.jsonl").exists()  # nothing has happened yet, and nothing waits for it
    Event.now = Event.clock
    lines.end_step(step(2))
    lines.end()
    assert torch.cuda.Stream.wait_event is original
    first, second = lines_of(tmp_path)
    assert (first.exposed_ns, second.exposed_ns) == (2 * 3 * MS, 0)
    assert (first.allocated_peak_bytes, first.reserved_peak_bytes, first.retries) == (5, 7, 2)


class FatalInChildren:
    """A CUDA event: freed in a forked child, it aborts it."""

    parent = os.getpid()

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return False

    def __del__(self) -> None:
        if os.getpid() != self.parent:
            os._exit(6)


@pytest.mark.usefixtures("forks")
def test_a_forked_child_frees_no_event_and_writes_no_line(tmp_path: Path, monkeypatch: Any) -> None:
    """A worker of a data loader, for example."""
    monkeypatch.setattr(watching, "_new_pair", lambda: (FatalInChildren(), FatalInChildren()))
    monkeypatch.setattr(watching, "_caller", lambda: "torch.distributed.fsdp._fully_shard")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "compute")
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda *_: None)
    lines = StepLines(tmp_path)
    lines.begin("cuda", blocking=False)
    lines._device_type = "cpu"  # its memory is read on a CPU
    wait: Any = torch.cuda.Stream.wait_event
    lines._write(WatchedStep(step=1, duration_ns=MS), 0)
    wait("compute")
    lines.end_step(StepInfo(step=2, start_ns=0, duration_ns=MS))
    wait("compute")
    child = os.fork()
    if not child:
        try:
            lines.forget()
            gc.collect()
            assert lines._file is not None
            lines._file.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lines.end()
    assert [line.step for line in lines_of(tmp_path)] == [1, 2]
