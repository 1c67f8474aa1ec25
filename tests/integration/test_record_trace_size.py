"""``--max-trace-size`` and ``--ranks``: recorded ranks capture the same steps, the others do nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

from fsdp2prof.manifest import RankManifest, RecordOptions
from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.recorder.rank.captures import Schedule
from fsdp2prof.recorder.settings import MEASURED_STEPS

from .alone_and_recorded import ended
from .conftest import torchrun, training_environment

SCRIPT = """
import json, os, sys, torch, torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.autograd import _profiler_enabled
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen, calls = [], []
def count(frame, event, _):
    if event == "call" and "fsdp2prof" in frame.f_code.co_filename:
        calls.append(frame.f_code.co_name)
for step in range(16):
    sys.setprofile(count if step else None)  # imports of the first step pass through a finder
    loss = model(torch.randn(2, 8)).square().mean()
    for _ in range(WORK * rank):
        torch.ones(2) + 1
    loss.backward()
    seen.append((_profiler_enabled(), len(_get_current_dispatch_mode_stack())))
    optimizer.step()
    optimizer.zero_grad()
    sys.setprofile(None)
    if rank == 0:
        print(step, loss.item().hex(), flush=True)
Path(os.environ["SEEN"], str(rank)).write_text(json.dumps([seen, calls]))
dist.destroy_process_group()
"""

Recording: TypeAlias = tuple[list[RankManifest], list[list], bytes]


def training(folder: Path, ranks: int, work: int, *before: str) -> tuple[tuple[int, bytes], list[list]]:
    """Run the script behind some words; return how it ended, and what each rank saw of the recorder."""
    script, seen = folder / "train.py", folder / "seen"
    seen.mkdir(parents=True)
    script.write_text(SCRIPT.replace("WORK", str(work)))
    environment = training_environment(SEEN=str(seen), LOG=str(folder / "stderr"))
    end = ended([*before, *torchrun(script, ranks)], folder / "cwd", env=environment)
    return end, [json.loads((seen / str(rank)).read_text()) for rank in range(ranks) if not end[0]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], tuple[int, bytes]]:
    """How the script ends without the recorder, for a number of ranks and of more operators a rank."""

    @cache
    def end(ranks: int, work: int) -> tuple[int, bytes]:
        folder = tmp_path_factory.mktemp("alone")
        first, _ = training(folder / "first", ranks, work)
        # torchrun may give up by itself on a busy machine: nothing to compare with
        return training(folder / "again", ranks, work)[0] if first[0] else first

    return end


@pytest.fixture
def record(alone: Callable[[int, int], tuple[int, bytes]]) -> Callable[..., Recording]:
    """Record the script; return its manifests, what each rank saw of the recorder, and stderr."""

    def recorded(folder: Path, ranks: int, *options: str, work: int = 0) -> Recording:
        run = folder / "run"
        recorder = [
            sys.executable,
            "-m",
            "fsdp2prof",
            "record",
            "--wait",
            "0",
            "-o",
            str(run),
            *options,
            "--",
        ]
        end, seen = training(folder, ranks, work, "sh", "-c", 'exec "$@" 2>"$LOG"', "sh", *recorder)
        assert end == alone(ranks, work)
        opened = [one.manifest for one in open_run(run).ranks]
        return [one for one in opened if one is not None], seen, (folder / "stderr").read_bytes()

    return recorded


@pytest.mark.parametrize(("world", "recorded"), [(2, [0]), pytest.param(4, [1, 2], marks=pytest.mark.slow)])
def test_ranks_left_out_do_nothing_and_the_others_record_the_same_steps(tmp_path, record, world, recorded):
    chosen = ",".join(map(str, recorded))
    manifests, seen, _ = record(tmp_path, world, "--ranks", chosen, "--active", "2")
    for rank, (manifest, (states, calls)) in enumerate(zip(manifests, seen, strict=True)):
        traced = [step for step, (profiled, _) in enumerate(states) if profiled]
        counted = [step for step, (_, modes) in enumerate(states) if modes]
        if rank in recorded:
            assert (traced, counted) == ([1, 2], [3, 4])
            assert (manifest.traced_steps, manifest.memory_steps) == (traced, counted)
            assert calls
        else:
            assert (traced, counted, calls) == ([], [], []), (
                "nothing of ours runs in a step, so nothing waits"
            )
            assert (manifest.pauses, manifest.steps) == ([], [])


@pytest.mark.slow
def test_as_many_steps_are_traced_as_fit_on_every_rank(tmp_path, record):
    """Rank 1 runs 2,000 operators more a step, so that its file is some ten times as large."""
    first, others = tmp_path / "first", tmp_path / "others"
    manifests, _, log = record(first, 2, "--active", "3", "--max-trace-size", "1GB", work=2000)
    start = MEASURED_STEPS + 1
    assert [one.traced_steps for one in manifests] == [[start, start + 1, start + 2]] * 2
    assert b"--max-trace-size" not in log
    small, large = (one.pauses[1].file_bytes for one in manifests)
    assert small < large / 2
    manifests, seen, log = record(
        others, 2, "--active", "3", "--max-trace-size", f"{large * 5 // 6}", work=2000
    )
    for manifest, (states, _) in zip(manifests, seen, strict=True):
        assert manifest.traced_steps == [start, start + 1]
        assert manifest.memory_steps == [start + 3, start + 4], "its place does not depend on the size"
        assert [step for step, (profiled, _) in enumerate(states) if profiled] == [1, start, start + 1]
        assert manifest.pauses[1].file_bytes <= large * 5 // 6
        assert manifest.state == "complete"
        assert manifest.messages[0].startswith("2 of 3 steps traced: --max-trace-size ")
    assert b"rank 0: 2 of 3 steps traced: --max-trace-size" in log


@pytest.mark.slow
def test_a_limit_below_one_step_traces_none(tmp_path, record):
    manifests, _, log = record(tmp_path, 2, "--ranks", "0", "--active", "3", "--max-trace-size", "1KB")
    assert manifests[0].traced_steps == []
    assert len(manifests[0].memory_steps) == 2
    assert not (tmp_path / "run/rank-00000/trace.json.gz").exists()
    assert b"0 of 3 steps traced: --max-trace-size is 1KB, and a step takes" in log


def test_the_step_that_is_measured_comes_after_the_warm_up():
    schedule = Schedule(RecordOptions(wait=2, warmup=1, active=3, memory_steps=1, max_trace_size="1MB"))
    first = 2 + 1 + MEASURED_STEPS
    assert [step for step in range(20) if schedule.is_measured(step)] == [3]
    assert [step for step in range(20) if schedule.kind(step) == "traced"] == [first, first + 1, first + 2]
    schedule.shorten(1)
    assert [step for step in range(20) if schedule.kind(step) != "plain"][-2:] == [first, first + 3]
    assert schedule.end == first + 4
