"""Where torch or the training leave memory recording no room: the manifest says so, and nothing fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.profiler.profiler as profiler_module
from torch.profiler.profiler import _KinetoProfile
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from fsdp2prof.manifest import RankManifest
from fsdp2prof.readers.run.directory import open_run
from fsdp2prof.recorder import devices
from fsdp2prof.recorder.memory.history import CudaMemoryCapture
from fsdp2prof.recorder.rank import captures
from fsdp2prof.recorder.rank.manifest import ManifestFile
from fsdp2prof.storage_tracker import StorageTracker

from .alone_and_recorded import compare, one_rank
from .one_session import MEMORY_STEPS, STEPS, TRACED_STEPS, Act, nothing, record

pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[[Act], RankManifest]:
    return lambda act: record(tmp_path / "run", act).manifest


def refuse(*_: object) -> None:
    raise RuntimeError("cudaMallocAsync does not yet support attachOutOfMemoryObserver.\nException raised")


ATTACH = "_cuda_attach_out_of_memory_observer"


@pytest.mark.parametrize("attach", [refuse, None])
def test_an_allocator_that_tells_nobody_of_its_end(recorded, monkeypatch, attach):
    monkeypatch.setattr(ManifestFile, "device_type", "cpu")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, ATTACH, attach, raising=False)
    if attach is None:
        monkeypatch.delattr(torch._C, ATTACH)
    manifest = recorded(nothing)
    [message] = manifest.messages
    assert message.startswith("an out-of-memory error will leave no snapshot: ")
    assert (manifest.state, manifest.memory_steps) == ("complete", MEMORY_STEPS)


def no_snapshot(*_: object) -> None:
    raise RuntimeError("there is no snapshot")


def test_an_observer_that_fails_leaves_the_error_as_it_is(recorded, monkeypatch, capsys):
    """torch calls the observer and then raises; what the observer raised would take the error's place."""
    observers: list[Callable[..., object]] = []

    def run_out(step: int) -> None:
        if step != 2:
            return
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1 GiB"):
            allocate()

    def allocate() -> None:
        for observer in observers:
            observer(0, 1 << 30, 0, 0)
        raise torch.OutOfMemoryError("Tried to allocate 1 GiB")

    monkeypatch.setattr(ManifestFile, "device_type", "cpu")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, ATTACH, observers.append, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", no_snapshot)
    manifest = recorded(run_out)
    assert len(observers) == 1
    assert "the snapshot of an out-of-memory error failed at step 2" in manifest.messages[0]
    assert "the training continues" in capsys.readouterr().err


@pytest.fixture
def fresh_dynamo():
    """Tests before this one may have compiled something."""
    counters = torch._dynamo.utils.counters
    before = counters["stats"]["unique_graphs"]
    counters["stats"]["unique_graphs"] = 0
    yield
    torch._dynamo.reset()
    counters["stats"]["unique_graphs"] = before


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_that_never_ran_leaves_memory_recorded(recorded):
    compiled = torch.compile(torch.nn.functional.gelu, backend="eager")
    manifest = recorded(nothing)
    assert (manifest.memory_steps, manifest.messages) == (MEMORY_STEPS, [])
    assert manifest.compiled_modules is None
    assert callable(compiled)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("first", "recorded_steps"), [(0, []), (3, []), (4, []), (5, MEMORY_STEPS)])
def test_compiled_code_that_runs_ends_the_count(tmp_path, first, recorded_steps):
    graphs = []

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: torch.relu(x) + 1, backend=backend)

    def act(step: int) -> None:
        if step >= first:
            assert compiled(torch.ones(3)).tolist() == [2, 2, 2]

    session = record(tmp_path / "run", act)
    assert len(graphs) == 1, "compiled as often as without a recording"
    assert session.manifest.memory_steps == recorded_steps
    assert bool(recorded_steps) == (session.folder / "memory.npz").exists()
    told = " ".join(session.manifest.messages)
    assert ("memory is not recorded: counting storages on a CPU" in told) is not bool(recorded_steps)


class Counting(TorchDispatchMode):
    """A mode of the training's own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("first", [1, 3])
def test_a_mode_of_the_trainings_is_left_when_the_training_leaves_it(recorded, first):
    """It is left in the last step of memory; below a mode of ours, torch would have left ours instead."""
    mode = Counting()

    def act(step: int) -> None:
        if step == first:
            mode.__enter__()
        if step == MEMORY_STEPS[1]:
            mode.__exit__(None, None, None)
        if step > MEMORY_STEPS[1]:
            assert _get_current_dispatch_mode_stack() == []

    manifest = recorded(act)
    assert mode.seen
    assert not [one for one in mode.seen if "fsdp2prof" in one]
    assert bool(manifest.memory_steps) == (first == 3)
    told = "memory is not recorded: the training uses a TorchDispatchMode" in " ".join(manifest.messages)
    assert told == (first == 1)


def test_a_mode_of_the_trainings_sees_no_range_of_ours(recorded):
    """The traced steps have ranges that the others do not have."""
    mode, seen = Counting(), []

    def act(step: int) -> None:
        if step == 0:
            mode.__enter__()
        if step == STEPS - 1:
            mode.__exit__(None, None, None)
        seen.append(sum("record_function" in one for one in mode.seen))

    assert recorded(act).traced_steps == [1, 2]
    assert len({after - before for before, after in pairwise(seen[1:])}) == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_count_that_fails_inside_an_operator_is_out_of_the_way_in_the_next_step(recorded, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    graphs = []

    def backend(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: torch.relu(x) + 1, backend=backend)
    stacks = []

    def act(step: int) -> None:
        stacks.append(len(_get_current_dispatch_mode_stack()))
        if step == MEMORY_STEPS[0]:
            monkeypatch.setattr(StorageTracker, "_log_backward", fail)
        if step > MEMORY_STEPS[0]:
            compiled(torch.ones(3))

    manifest = recorded(act)
    assert "the memory recording failed at step 3: broken" in " ".join(manifest.messages)
    assert stacks == [0, 0, 0, 1, 0, 0, 0]
    assert len(graphs) == 1


class Allocator:
    """The functions of torch that turn CUDA's history on and off, without CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[object] = []
        self.is_on = False
        for name in ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy"):
            monkeypatch.setattr(torch._C, name, self.turn, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self.snapshot)
        monkeypatch.setattr(torch.cuda.memory, "_set_memory_metadata", lambda _: None, raising=False)

    def turn(self, enabled: object = None, *_: object, **__: object) -> None:
        self.calls.append(enabled)
        self.is_on = enabled is not None

    def snapshot(self) -> dict[str, Any]:
        return {"segments": [], "device_traces": [[{"action": "alloc"}] if self.is_on else []]}


@pytest.fixture
def allocator(monkeypatch):
    made = Allocator(monkeypatch)
    monkeypatch.setattr(ManifestFile, "device_type", "cuda")
    monkeypatch.setattr(
        captures,
        "memory_capture",
        lambda folder, *_, **__: CudaMemoryCapture(folder / "memory.pickle", several_roots=False),
    )
    cpu = devices.device_info("cpu")
    monkeypatch.setattr(devices, "device_info", lambda _: cpu)
    for name in ("allocator_stats", "allocator_settings"):
        monkeypatch.setattr(devices, name, lambda _: {})
    monkeypatch.setattr(devices, "attention_backends", lambda _: [])
    return made


def test_a_history_of_ours_is_written_and_turned_off(recorded, allocator, tmp_path):
    manifest = recorded(nothing)
    assert (manifest.memory_steps, manifest.messages) == (MEMORY_STEPS, [])
    assert allocator.calls == ["all", None]
    assert (tmp_path / "run/rank-00000/memory.pickle").exists()


def test_an_allocator_without_history_is_not_asked_for_one(recorded, allocator, monkeypatch):
    """As cudaMallocAsync: every question about its memory raises."""
    monkeypatch.setattr(torch._C, "_cuda_getAllocatorBackend", lambda: "cudaMallocAsync", raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", no_snapshot)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    manifest = recorded(nothing)
    assert (manifest.state, manifest.traced_steps, manifest.memory_steps) == ("complete", TRACED_STEPS, [])
    assert manifest.messages == [
        "memory is not recorded: torch keeps no history of the cudaMallocAsync allocator's memory"
    ]


def test_torchs_word_about_cycles_stays_out_of_the_trainings_output(recorded, monkeypatch):
    """Some versions of torch warn whenever a profiler is set up; what else it says is said."""
    prepare, said = _KinetoProfile.prepare_trace, []

    def warns(self):
        profiler_module.warn("Warning: Profiler clears events at the end of each cycle.Only events from ...")
        profiler_module.warn("something else")
        prepare(self)

    monkeypatch.setattr(_KinetoProfile, "prepare_trace", warns)
    monkeypatch.setattr(profiler_module, "warn", lambda message: said.append(message), raising=False)
    assert recorded(nothing).state == "complete"
    assert said == ["something else"]


@pytest.mark.parametrize(("enabled", "word"), [("all", "on"), (None, "off")])
@pytest.mark.parametrize("at", MEMORY_STEPS)
def test_a_history_of_the_trainings_in_our_step_is_the_trainings(
    recorded, allocator, tmp_path, enabled, word, at
):
    def turn(step: int) -> None:
        if step == at:
            torch.cuda.memory._record_memory_history(enabled=enabled)

    manifest = recorded(turn)
    [message] = manifest.messages
    assert f"the training turned its own allocator history {word} in step {at}" in message
    assert (manifest.state, manifest.memory_steps) == ("partial", [])
    assert allocator.calls == ["all", enabled], "nothing of ours comes after theirs"
    assert not (tmp_path / "run/rank-00000/memory.pickle").exists()


def test_other_devices_than_cuda_are_not_taken_for_a_cpu(recorded, monkeypatch):
    monkeypatch.setattr(ManifestFile, "device_type", "xpu")
    manifest = recorded(nothing)
    assert manifest.device.name == "xpu"
    assert manifest.memory_steps == []
    assert manifest.messages == [
        "the trace holds only the host's work: xpu devices are not recorded",
        "memory is not recorded: fsdp2prof cannot read the allocator history of xpu devices",
    ]


SCRIPT = """
import threading, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import flex_attention
attention = torch.compile(flex_attention)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = fully_shard(nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(8):
    loss = model(torch.randn(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), [thread.name for thread in threading.enumerate()])
dist.destroy_process_group()
"""


def test_a_script_that_compiles_flex_attention_without_a_call_and_lists_its_threads(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    run = compare(tmp_path, [sys.executable, str(tmp_path / "train.py")], state={"complete"}, env=one_rank())
    [rank] = open_run(run).ranks
    assert rank.memory is not None
