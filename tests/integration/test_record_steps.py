"""One training step each: real optimizers, scalers and hooks on a real wrapped model, in this process."""

from __future__ import annotations

import gc
import threading
import time
from operator import attrgetter

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp2prof.manifest import RecordOptions
from fsdp2prof.recorder.identity import Identity
from fsdp2prof.recorder.rank import host
from fsdp2prof.recorder.rank.session import RankSession
from fsdp2prof.recorder.settings import Settings

pytestmark = pytest.mark.usefixtures("single_rank")

FEW = {"active": 3, "memory_steps": 1}


@pytest.fixture
def sessions():
    """Those that were started; they end with the test."""
    started: list[RankSession] = []
    yield started
    for session in started:
        session.end()


@pytest.fixture
def start(tmp_path, sessions):
    """Starts a session whose schedule lies far ahead: it only counts steps."""

    def begin(*models, **options):
        settings = Settings(run=str(tmp_path), options=RecordOptions(**{**FEW, "wait": 10_000, **options}))
        session = RankSession(settings, Identity(0, 0, 1), automatic=True)
        session.begin()
        sessions.append(session)
        for model in models:
            for module in model.modules():
                if hasattr(module, "_get_fsdp_state"):
                    session.watch(module)
        return session.manifest.steps

    return begin


def wrapped():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    fully_shard(model[0])
    return fully_shard(model)


def loss(model):
    return model(torch.randn(2, 4)).pow(2).mean()


def test_a_plain_loop(start):
    model = wrapped()
    steps = start(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [step.step for step in steps] == [0, 1, 2, 3, 4]


def test_a_scheduler_made_after_fully_shard(start):
    model = wrapped()
    steps = start(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        loss(model).backward()
        optimizer.step()
        scheduler.step()
    assert len(steps) == 3


def test_a_scheduler_made_before_fully_shard(start):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    fully_shard(model)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    steps = start(model)
    for _ in range(3):
        loss(model).backward()
        optimizer.step()
        scheduler.step()
    assert len(steps) == 3


def test_two_models_and_two_optimizers_make_one_step(start):
    first, second = wrapped(), wrapped()
    steps = start(first, second)
    optimizers = torch.optim.AdamW(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.1)
    for _ in range(4):
        (loss(first) + loss(second)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(steps) == 4


def test_models_updated_in_turns_make_a_step_each(start):
    first, second = wrapped(), wrapped()
    steps = start(first, second)
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (first, second)]
    for _ in range(3):
        for model, optimizer in pairs:
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(steps) == 6


def test_micro_batches_make_one_step(start):
    model = wrapped()
    steps = start(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        for micro_batch in range(4):
            model.set_requires_gradient_sync(micro_batch == 3)
            loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(steps) == 3


def test_a_compiled_model_is_traced_around_the_recorders_hooks(start):
    model = wrapped()
    steps = start(model)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss(compiled).backward()  # a hook that dynamo traced would warn here, which is an error in tests
        optimizer.step()
    assert len(steps) == 3
    torch._dynamo.reset()


def test_a_step_the_scaler_skips_is_a_step(start):
    model = wrapped()
    steps = start(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scales = []
    for step in range(4):
        factor = float("inf") if step % 2 else 1.0
        scaler.scale(loss(model) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    assert scales == [4.0, 2.0, 2.0, 1.0]  # two steps were skipped indeed
    assert len(steps) == 4


def test_optimizers_in_backward_make_one_step_a_backward(start):
    model = wrapped()
    steps = start(model)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    updates = []

    def update(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()
        updates.append(parameter)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        loss(model).backward()
    assert len(updates) == 3 * 4
    assert len(steps) == 2  # the third is still open: it ends with the next forward, or with the session
    loss(model)
    assert len(steps) == 3


def test_evaluation_and_stray_updates_are_no_steps(start):
    model = wrapped()
    steps = start(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss(model).backward()
        optimizer.step()
        with torch.no_grad():
            loss(model)
        optimizer.step()
    assert len(steps) == 2


def test_a_closure_and_nested_step_methods(start):
    class Noisy(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = wrapped()
    steps = start(model)
    optimizer = Noisy(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(closure)
    assert len(steps) == 3


def test_everything_is_put_back(start, tmp_path):
    model = wrapped()
    plain = torch.optim.SGD.step, torch.amp.GradScaler.step, torch.optim.Optimizer.profile_hook_step
    hooks = len(model._forward_pre_hooks), len(model._forward_hooks)
    settings = Settings(run=str(tmp_path / "other"), options=RecordOptions(active=3, memory_steps=1))
    session = RankSession(settings, Identity(0, 0, 1), automatic=True)
    session.begin()
    session.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        loss(model).backward()
        optimizer.step()
    assert session.manifest.state == "complete"
    assert (session.manifest.traced_steps, session.manifest.memory_steps) == ([2, 3, 4], [5])
    session.end()
    assert (torch.optim.SGD.step, torch.amp.GradScaler.step, torch.optim.Optimizer.profile_hook_step) == plain
    assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == hooks
    state = model._get_fsdp_state()
    assert "_pre_backward" not in vars(state)


def test_the_host_and_the_groups_of_captured_steps(start, sessions):
    model = wrapped()
    start(model, wait=0, warmup=1, active=1, memory_steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        with torch.no_grad():
            model(torch.ones(2, 4))
        for _ in range(2):
            loss(model).backward()
        optimizer.step()
    manifest = sessions[-1].manifest
    assert [one.step for one in manifest.host_steps] == [0, 1, 2]
    for one in manifest.host_steps:
        assert min(one.main_thread_cpu_ns, one.cpu_time_ns) > 0
        assert (one.main_thread_waiting_ns or 0) >= 0
    assert manifest.machine.cores >= manifest.machine.usable_cores > 0
    assert {(one.forwards, one.evaluations) for one in manifest.param_groups} == {(2, 1)}
    assert {root.evaluations for root in manifest.roots} == {1}


def test_where_the_host_of_a_traced_step_was(start, sessions, monkeypatch):
    """The line that slept, the collection that was asked for, and the thread that holds the interpreter."""
    # On a busy machine the thread gets less than the share of a step that is worth a line.
    monkeypatch.setattr(host, "_NOTED", 0.0)
    model = wrapped()
    start(model, wait=0, warmup=1, active=1, memory_steps=0, memory=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    over = threading.Event()
    spinning = threading.Thread(target=spin, args=(over,))
    spinning.start()
    callbacks = list(gc.callbacks)
    for _ in range(3):
        loss(model).backward()
        time.sleep(0.3)
        cycles: list[list[object]] = [[] for _ in range(100_000)]
        for one in cycles:
            one.append(one)
        del cycles, one
        gc.collect()
        optimizer.step()
    over.set()
    spinning.join()
    step = next(one for one in sessions[-1].manifest.host_steps if one.step == 1)
    slept = [one for one in step.lines if "test_record_steps.py" in one.line and one.duration_ns > 10_000_000]
    assert any("test_where_the_host" in one.line for one in slept), step.lines
    assert sum(one.duration_ns for one in step.sleeps) > 10_000_000, step.sleeps
    assert step.garbage_collection_ns > 1_000_000
    assert sum(one.duration_ns for one in step.garbage_collections) <= step.garbage_collection_ns
    assert any("(spin)" in line for line in step.python_threads)
    assert gc.callbacks == callbacks, "nothing of ours is left"


def spin(over):
    while not over.is_set():
        pass


def test_unknown_structures_cost_the_description_and_neither_trace_nor_training(start, sessions, monkeypatch):
    model = wrapped()
    start(model, wait=0, warmup=0)
    session = sessions[-1]
    monkeypatch.setattr(
        "fsdp2prof.recorder.model.describe._param_group", lambda *_: attrgetter("mesh_info")(object())
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        loss(model).backward()
        optimizer.step()
    session.end()
    assert session.manifest.state == "complete"
    (message,) = session.manifest.messages
    reason = "'object' object has no attribute 'mesh_info'"
    assert message == f"the description of the model failed at step 1: {reason}"
    assert reason in (session.folder / "errors.txt").read_text()
    assert not torch.autograd._profiler_enabled(), "nothing records any more"
    assert (session.folder / "trace.json.gz").exists()


def test_a_full_disk_costs_the_trace_and_neither_memory_nor_training(start, sessions, monkeypatch):
    model = wrapped()
    start(model, wait=0, warmup=0)
    session = sessions[-1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fsdp2prof.recorder.rank.tracing.igzip.open", full)
    for _ in range(6):
        loss(model).backward()
        optimizer.step()
    session.end()
    assert session.manifest.state == "partial"
    expected = "the trace failed at step 3: [Errno 28] No space left on device"
    assert session.manifest.messages == [expected]
    assert sorted(file.name for file in session.folder.iterdir()) == [
        "errors.txt",
        "manifest.json",
        "memory.npz",
    ]
