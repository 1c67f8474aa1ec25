"""Tags where backward has a thread of its own, as on CUDA: torch keeps ``user_metadata`` a thread.

A real engine runs the backward of two micro-batches; what backward allocates is allocated by a thread that
lives from one backward to the next. The allocator is pretended.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.snapshots import Training
from torch.profiler import record_function

from fsdp2prof.analyzers.memory.analysis import analyze_memory
from fsdp2prof.analyzers.memory.prepared import prepare
from fsdp2prof.analyzers.memory.remedies import in_loss
from fsdp2prof.recorder.memory.history import CudaMemoryCapture

LOGITS, INPUT, ACTIVATION, GRADIENT = 4000, 300, 200, 100
CROSS_ENTROPY = [{"filename": "torch/nn/functional.py", "line": 3500, "name": "cross_entropy"}]


class Machine:
    """An allocator with a tag for each thread, and a thread for backward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.history = Training()
        self.tag = threading.local()
        self.device = ThreadPoolExecutor(1)
        enter, leave = record_function.__enter__, record_function.__exit__

        def entered(label):
            self.history.label("START", label.name)
            return enter(label)

        def left(label, *error):
            self.history.label("END", label.name)
            return leave(label, *error)

        monkeypatch.setattr(record_function, "__enter__", entered)
        monkeypatch.setattr(record_function, "__exit__", left)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled="all", **_: None)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self.history.snapshot)
        monkeypatch.setattr(torch.cuda.memory, "_set_memory_metadata", self._set, raising=False)

    def _set(self, text: str) -> None:
        self.tag.text = text

    def get(self, name: str, size: int, **more: Any) -> None:
        self.history.get(name, size, user_metadata=getattr(self.tag, "text", ""), **more)


def final_callback() -> None:
    with record_function("FSDP::root_post_backward_callback"):
        pass


class Loss(torch.autograd.Function):
    """A model of one layer and its loss; backward runs on the machine's own thread."""

    @staticmethod
    def forward(context, weight, machine, name):
        context.machine, context.name = machine, name
        with record_function("FSDP::pre_forward (layers.0)"):
            pass
        machine.get(f"activation {name}", ACTIVATION)
        with record_function("FSDP::post_forward (layers.0)"):
            pass
        with record_function("FSDP::post_forward"):
            pass
        machine.get(f"logits {name}", LOGITS, frames=CROSS_ENTROPY)
        return weight * 1

    @staticmethod
    def backward(context, gradient):
        torch.autograd.Variable._execution_engine.queue_callback(final_callback)
        context.machine.device.submit(Loss._on_device, context.machine, context.name).result()
        return gradient, None, None

    @staticmethod
    def _on_device(machine, name):
        machine.get(f"gradient of logits {name}", LOGITS + 1)
        with record_function("FSDP::pre_backward (layers.0)"):
            pass
        machine.history.drop(f"gradient of logits {name}", f"logits {name}")
        machine.get(f"gradient {name}", GRADIENT)
        with record_function("FSDP::post_backward_reduce (layers.0)"):
            machine.history.drop(f"gradient {name}", f"activation {name}", f"input {name}")


def test_what_backward_allocates_is_not_the_last_steps(monkeypatch, tmp_path):
    machine = Machine(monkeypatch)
    engine = torch.autograd._engine_run_backward
    capture = CudaMemoryCapture(tmp_path / "memory.pickle", several_roots=False)
    weight = torch.ones((), requires_grad=True)
    for step in (5, 6):
        capture.begin_step(step)
        for batch in range(2):
            machine.get(f"input {step}.{batch}", INPUT)
            with record_function("FSDP::root_pre_forward"), record_function("FSDP::pre_forward"):
                pass
            Loss.apply(weight, machine, f"{step}.{batch}").backward()
    capture.finish()
    assert torch.autograd._engine_run_backward is engine

    recording = machine.history.read(tmp_path)
    view = prepare(recording, None)
    rows = view.allocations
    told = dict(
        zip(rows.size.tolist(), zip(rows.phase.to_list(), rows.category.to_list(), strict=True), strict=True)
    )
    assert told[LOGITS + 1] == ("backward", "temporary")
    assert told[GRADIENT] == ("backward", "unsharded_gradient")
    assert told[INPUT][1] == "input"
    assert told[ACTIVATION] == ("forward", "activation")
    assert rows.step[rows.size == LOGITS + 1].tolist() == [5, 5, 6, 6]
    assert rows.category.take(rows.size == INPUT).to_list() == ["input"] * 4
    assert in_loss(rows, view.recording.stacks)[rows.size == LOGITS + 1].all()
    found = {one.id: one.evidence for one in analyze_memory([(0, recording, None)]).findings}
    assert found["logits_in_loss"] == {"bytes": 2 * LOGITS + 1, "blocks": 2, "ranks": [0]}


def test_a_backward_inside_another_leaves_the_place_as_it_is(monkeypatch, tmp_path):
    machine = Machine(monkeypatch)
    capture = CudaMemoryCapture(tmp_path / "memory.pickle", several_roots=False)
    capture.begin_step(0)

    class Reentrant(torch.autograd.Function):
        @staticmethod
        def forward(context, weight):
            return weight * 1

        @staticmethod
        def backward(context, gradient):
            with record_function("FSDP::pre_backward (layers.0)"):
                pass
            with torch.enable_grad():
                inner = torch.ones((), requires_grad=True)
                (inner * 2).backward()
            machine.get("after", 10)
            return gradient

    Reentrant.apply(torch.ones((), requires_grad=True)).backward()
    assert machine.history.trace[-1]["user_metadata"].startswith("step=0;phase=backward")
    assert machine.tag.text == ""
    capture.finish()
