"""A training with a profiler of its own: its traces stay what they are, and ours stays out of the way."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import torch
import torch.autograd.profiler as entry_points
from support.present import manifest_of
from support.recordings import SHORT
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from fsdp2prof.manifest import RecordOptions
from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.recorder.identity import Identity
from fsdp2prof.recorder.rank import captures, tracing
from fsdp2prof.recorder.rank.session import RankSession
from fsdp2prof.recorder.settings import Settings

from .conftest import script_path, torchrun, training_environment

pytestmark = [
    pytest.mark.usefixtures("single_rank"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning"),
    pytest.mark.filterwarnings("ignore:Profiler won't be using warmup:UserWarning"),
]

STEPS = 12


class Training:
    """A small training that profiles itself; ``traces`` are the ranges of each trace it wrote."""

    def __init__(self, folder):
        self.folder = folder
        self.traces = []
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        fully_shard(self.model[0])
        fully_shard(self.model)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self):
        loss = self.model(torch.randn(2, 4)).pow(2).mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def write(self, profiler):
        path = self.folder / f"{len(self.traces)}.json{'.gz' if self.traces else ''}"
        profiler.export_chrome_trace(str(path))
        self.traces.append(ranges(path))


def ranges(path):
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        events = json.load(file)["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


@pytest.fixture
def compare(tmp_path):
    """Runs a training alone and recorded, and asserts that they are the same; returns the manifest."""

    def alone_and_recorded(train, **options):
        alone = Training(tmp_path)
        losses = train(alone)
        recorded = Training(tmp_path)
        settings = Settings(
            run=str(tmp_path / "run"), options=RecordOptions(**{"active": 3, "memory_steps": 1, **options})
        )
        session = RankSession(settings, Identity(0, 0, 1), automatic=True)
        session.begin()
        for module in (recorded.model[0], recorded.model):
            session.watch(module)
        assert train(recorded) == losses
        session.end()
        assert recorded.traces == alone.traces
        assert not torch.autograd._profiler_enabled()
        manifest = session.manifest
        assert " failed at " not in " ".join(manifest.messages)
        trace = session.folder / "trace.json.gz"
        if manifest.traced_steps:
            assert ranges(trace).keys() >= {f"ProfilerStep#{step}" for step in manifest.traced_steps}
        if manifest.memory_steps:
            assert (session.folder / "memory.npz").exists()
        return manifest

    return alone_and_recorded


def scheduled(*shape, **options):
    def train(training):
        wait, warmup, active = shape
        plan = schedule(wait=wait, warmup=warmup, active=active, **options)
        with profile(schedule=plan, on_trace_ready=training.write) as profiler:
            losses = []
            for _ in range(STEPS):
                losses.append(training.step())
                profiler.step()
        return losses

    return train


@pytest.mark.parametrize("at_step", [None, 0, 1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("shape", "repeat"), [((1, 1, 2), 0), ((2, 3, 1), 0), ((0, 1, 3), 0), ((5, 1, 2), 0), ((1, 0, 1), 2)]
)
@pytest.mark.sampled(12)
def test_a_schedule_of_its_own(compare, shape, repeat, at_step):
    manifest = compare(scheduled(*shape, repeat=repeat), at_step=at_step)
    if manifest.state != "complete":
        assert manifest.messages


def test_the_schedule_moves_behind_a_profiler_that_ends(compare):
    # Theirs waits in step 0, warms up in step 1, records 2 and 3, and writes at the start of step 4.
    manifest = compare(scheduled(1, 1, 2, repeat=1))
    assert manifest.state == "complete"
    assert (manifest.memory_steps, manifest.traced_steps) == ([4], [6, 7, 8])
    assert manifest.messages == [
        "the training's own profiler had priority; the recorder traced steps 6, 7, 8; "
        "memory was recorded in step 4"
    ]


def test_its_trace_stands_for_ours_where_it_leaves_no_gap(compare):
    manifest = compare(scheduled(0, 1, 3))
    assert (manifest.state, manifest.traced_steps, manifest.memory_steps) == ("partial", [1, 2, 3], [])
    assert manifest.messages[0] == (
        "the training's own profiler left no gap; trace.json.gz is the first trace it wrote, "
        "steps 1, 2, 3; no gap for the memory recording either; "
        "it slows every step that it covers: remove it when not needed"
    )
    kinds = [step.kind for step in manifest.steps]
    assert "plain" not in kinds, "no duration of a step with a profiler in it counts as undisturbed"


def test_what_it_interrupts_is_kept(compare):
    manifest = compare(scheduled(2, 3, 1), at_step=0)
    assert manifest.traced_steps == [0, 1]
    assert manifest.state == "partial"


@pytest.mark.parametrize("first", range(7))
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.sampled(6)
def test_a_profiler_around_some_steps(compare, first, length):
    def train(training):
        losses = [training.step() for _ in range(first)]
        with profile(on_trace_ready=training.write):
            losses += [training.step() for _ in range(length)]
        return losses + [training.step() for _ in range(STEPS - first - length)]

    manifest = compare(train)
    untouched = set(range(first)) | set(range(first + length, STEPS))
    assert set(manifest.traced_steps) <= untouched
    assert len(manifest.traced_steps) in (1, 2, 3)
    assert set(manifest.memory_steps) <= untouched
    assert len(manifest.memory_steps) == 1


def test_a_profiler_inside_every_forward(compare, tmp_path):
    def train(training):
        losses = []
        for _ in range(STEPS):
            with profile() as profiler:
                losses.append(training.step())
            training.write(profiler)
        return losses

    manifest = compare(train)
    assert (manifest.state, manifest.traced_steps, manifest.memory_steps) == ("partial", [], [])
    assert manifest.messages[0] == (
        "the training's own profiler left no gap; trace.json.gz is the first trace it wrote; "
        "no gap for the memory recording either; "
        "it slows every step that it covers: remove it when not needed"
    )
    assert (tmp_path / "run" / "rank-00000" / "trace.json.gz").exists()


def test_one_that_writes_no_trace(compare):
    def train(training):
        with torch.autograd.profiler.profile() as profiler:
            losses = [training.step() for _ in range(4)]
        training.traces.append(Counter(event.name for event in profiler.function_events))
        return losses

    manifest = compare(train)
    assert (manifest.state, manifest.traced_steps, manifest.memory_steps) == ("partial", [], [])
    assert manifest.messages[0] == (
        "the training's own profiler left no gap and wrote no Chrome trace to use instead; "
        "no gap for the memory recording either; "
        "it slows every step that it covers: remove it when not needed"
    )


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_real_run(tmp_path, ranks):
    def run(*prefix, folder):
        folder.mkdir()
        command = [*prefix, *torchrun(script_path("own_profiler"), ranks, str(folder))]
        return subprocess.run(
            command, env=training_environment(), capture_output=True, text=True, timeout=240, check=False
        )

    alone = run(folder=tmp_path / "alone")
    record = [sys.executable, "-m", "fsdp2prof", "record", *SHORT, "-o", str(tmp_path / "run"), "--"]
    recorded = run(*record, folder=tmp_path / "recorded")
    assert alone.returncode == recorded.returncode == 0, recorded.stderr
    for rank in range(ranks):
        notes = [
            json.loads((tmp_path / name / f"notes-{rank}.json").read_text()) for name in ("alone", "recorded")
        ]
        assert notes[0] == notes[1]
        assert notes[0][f"{rank}-0.json"]["ProfilerStep#2"] == 1
    assert "the training's own profiler left no gap; trace.json.gz is the first" in recorded.stderr
    for record_of_rank in open_run(tmp_path / "run").ranks:
        manifest = manifest_of(record_of_rank)
        assert (manifest.traced_steps, manifest.memory_steps) == ([2, 3], [4])
        assert {"ProfilerStep#2", "ProfilerStep#3"} <= ranges(record_of_rank.trace).keys()


POINTS = ["_prepare_profiler", "_enable_profiler", "_disable_profiler", "export_chrome_trace", "_compress"]
"""Where a profiler of theirs or ours begins and ends; ours is written by the last."""


@pytest.mark.parametrize("at_step", [None, 0, 4])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.sampled(6)
def test_delays_wherever_the_two_meet(compare, monkeypatch, point, at_step):
    owner = {"export_chrome_trace": entry_points.profile, "_compress": tracing}.get(point, entry_points)
    original = getattr(owner, point)

    def late(*arguments, **named):
        time.sleep(0.03)
        result = original(*arguments, **named)
        time.sleep(0.03)
        return result

    monkeypatch.setattr(owner, point, late)
    manifest = compare(scheduled(2, 3, 1), at_step=at_step)
    assert manifest.traced_steps


@pytest.mark.parametrize("first", range(6))
def test_a_profiler_on_another_thread(compare, first):
    """Kineto has one session a process: ours leaves before theirs begins, whatever thread theirs is on."""

    def train(training):
        begins, ends = threading.Event(), threading.Event()

        def watch():
            begins.wait(60)
            with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("theirs"):
                torch.ones(3).add(1)
                ends.wait(60)
            training.write(profiler)

        watching = threading.Thread(target=watch)
        watching.start()
        losses = []
        for step in range(STEPS):
            if step == first:
                begins.set()
            if step == first + 3:
                ends.set()
            losses.append(training.step())
        watching.join()
        assert "theirs" in training.traces[0]
        training.traces[0] = Counter({"theirs": 1})
        return losses

    compare(train)  # how much of ours is left depends on when their thread gets a processor


WAITED_FOR = """
import threading, sys, torch, torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import profile, record_function
from fsdp2prof.manifest import RecordOptions
from fsdp2prof.recorder.identity import Identity
from fsdp2prof.recorder.rank import training_profilers
from fsdp2prof.recorder.rank.session import RankSession
from fsdp2prof.recorder.settings import Settings

training_profilers.PATIENCE_S = 0.1
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
folder = Path(sys.argv[1])

def theirs(steps):
    def profiled():
        with profile() as profiler, record_function("theirs"):
            torch.ones(3).add(1)
            if steps:
                begun.set()
                over.wait(60)
        profiler.export_chrome_trace(str(folder / "theirs.json"))
    begun, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=profiled)
    thread.start()
    if steps:
        begun.wait(60)
    def end():
        over.set()
        thread.join()
        assert '"theirs"' in (folder / "theirs.json").read_text()
    return end

for first in range(7):
    for lasts in (0, 2):
        run = folder / f"{first}-{lasts}"
        options = RecordOptions(wait=0, warmup=1, active=3, memory_steps=1)
        session = RankSession(Settings(run=str(run), options=options), Identity(0, 0, 1), automatic=True)
        session.begin()
        model = fully_shard(nn.Linear(4, 4))
        session.watch(model)
        optimizer = torch.optim.SGD(model.parameters())
        for step in range(18):
            loss = model(torch.ones(2, 4)).sum()
            if step == first:  # in the middle of a step of ours
                end = theirs(lasts)
            if step == first + lasts:
                end()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with profile():  # the process's profiler is free
            torch.ones(3).add(1)
        session.end()
        manifest = session.manifest
        assert " failed at " not in " ".join(manifest.messages), manifest.messages
        got = manifest.traced_steps, manifest.memory_steps, first, lasts, manifest.messages
        assert len(got[0]) == 3 and len(got[1]) == 1, got
        assert not {first, first + lasts} & set(got[0]), got
        assert (session.folder / "trace.json.gz").exists()
print("ended")
"""


def test_a_profiler_on_another_thread_that_the_training_waits_for(tmp_path):
    """Ours cannot leave meanwhile: theirs takes the session, and ours is taken out after it."""
    done = subprocess.run(
        [sys.executable, "-c", WAITED_FOR, str(tmp_path)],
        env=training_environment(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr[-3000:]


def test_a_failure_on_another_thread_leaves_the_profiler_to_its_own(compare, monkeypatch):
    """Theirs is exported on another thread while ours runs again; a trace that cannot be taken ends ours."""

    def fail(*_):
        raise OSError("no room")

    monkeypatch.setattr(captures, "adopt_trace", fail)

    def train(training):
        began, over, ended, written = (threading.Event() for _ in range(4))

        def watch():
            with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("theirs"):
                began.set()
                over.wait(60)
            ended.set()
            written.wait(60)
            training.write(profiler)

        watching = threading.Thread(target=watch)
        watching.start()
        began.wait(60)
        losses = []
        for step in range(STEPS):
            losses.append(training.step())
            if step == 0:
                over.set()
                ended.wait(60)
            if step == 1:  # ours runs, and has no whole step yet
                written.set()
                watching.join()
        with profile(activities=[ProfilerActivity.CPU]):  # the process's profiler is free
            training.step()
        training.traces[0] = Counter({"theirs": 1})
        return losses

    with pytest.raises(AssertionError, match="trace and memory recording failed at step 2: no room"):
        compare(train, wait=0, warmup=1, active=6, memory=False)
    assert not torch.autograd._profiler_enabled()
