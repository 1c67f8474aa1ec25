"""The storage count against sizes worked out by hand, and against Kineto's count of the same allocator."""

import gc
import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from support.present import present
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fsdp2prof.analyzers.memory.attribution import attribute
from fsdp2prof.analyzers.memory.prepared import allocated_totals
from fsdp2prof.estimators.allocator.cuda_kernels import as_on_cuda
from fsdp2prof.storage_tracker import StorageTracker
from fsdp2prof.tables.allocations import MemoryRecording
from fsdp2prof.tables.columns import NEVER


def totals(recording: MemoryRecording) -> list[int]:
    """Allocated bytes after each event, above what was alive before."""
    allocations = recording.allocations
    before = allocations.size[allocations.alloc_order < 0].sum()
    return (allocated_totals(allocations, recording.events) - before).tolist()


def row_of(recording: MemoryRecording, size: int) -> int:
    """The one allocation of a size."""
    (row,) = np.flatnonzero(recording.allocations.size == size)
    return int(row)


def history(recording: MemoryRecording) -> list[tuple[int, int]]:
    """(address, bytes) of every event in order, frees negative."""
    allocations = recording.allocations
    born, freed = allocations.alloc_order >= 0, allocations.free_order < NEVER
    events = [
        *zip(allocations.alloc_order[born], allocations.address[born], allocations.size[born], strict=True)
    ]
    events += zip(
        allocations.free_order[freed], allocations.address[freed], -allocations.size[freed], strict=True
    )
    return [(int(address), int(size)) for _, address, size in sorted(events)]


def is_subsequence(part: list[tuple[int, int]], whole: list[tuple[int, int]]) -> bool:
    """Whether ``part`` comes out of ``whole`` by leaving some out."""
    rest = iter(whole)
    return all(item in rest for item in part)


def test_births_and_deaths_in_order():
    with StorageTracker() as tracker:
        a = torch.empty(100)  # 400
        b = a + 1  # 400
        view = a.view(10, 10)[2:]  # no memory
        del a
        c = torch.empty(8, dtype=torch.bfloat16)  # 16; `view` still holds a's 400
        del view, b, c
    assert totals(tracker.recording()) == [400, 800, 816, 416, 16, 0]


def test_memory_alive_before_counts_and_may_die_inside():
    before = torch.empty(1000, dtype=torch.float64)
    kept = torch.empty(77, dtype=torch.int8)
    with StorageTracker() as tracker:
        addresses = {tracker.address(before), tracker.address(kept)}
        del before
        gc.collect()
    recording = tracker.recording()
    freed, alive = row_of(recording, 8000), row_of(recording, 77)
    allocations = recording.allocations
    assert {int(allocations.address[freed]), int(allocations.address[alive])} == addresses
    assert allocations.address[alive] == kept.untyped_storage().data_ptr()
    assert allocations.alloc_order[freed] == allocations.alloc_order[alive] == -1
    assert allocations.free_order[freed] < NEVER
    assert allocations.free_order[alive] == NEVER


def test_gradient_that_only_cpp_holds_is_alive_before():
    parameter = torch.ones(123, requires_grad=True)
    (parameter * 2).sum().backward()
    with StorageTracker() as tracker:
        pass
    allocations = tracker.recording().allocations
    rows = np.flatnonzero(allocations.size == 123 * 4)
    pointers = {parameter.data_ptr(), present(parameter.grad).data_ptr()}
    assert pointers <= set(allocations.address[rows].tolist())


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        return given.view_as(given)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_view_that_autograd_refuses_to_describe_is_counted() -> None:
    """Of a custom function and changed in place, as ``to_local()`` of a parameter that is updated."""
    base = torch.ones(100, requires_grad=True)
    view = _Same.apply(base)
    with torch.no_grad():
        view.add_(1)
    with pytest.raises(RuntimeError, match="is a view"):
        _ = view.is_leaf
    with StorageTracker() as tracker:
        del base, view
    assert row_of(tracker.recording(), 400) >= 0


def test_resize_frees_and_allocates_in_place():
    tensor = torch.empty(50)
    alias = tensor[10:]
    with StorageTracker() as tracker:
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(400)  # from nothing: nothing to copy
        tensor.untyped_storage().resize_(800)  # the new memory exists before the old one goes
        del tensor, alias
    recording = tracker.recording()
    assert totals(recording) == [-200, 200, 1000, 600, -200]
    assert recording.allocations.op[row_of(recording, 800)] == "UntypedStorage.resize_"


def test_out_argument_that_grows():
    out = torch.empty(0)
    with StorageTracker() as tracker:
        torch.add(torch.ones(30), 1, out=out)
        torch._foreach_add_([out], 1)
    assert totals(tracker.recording())[-1] == 120


def test_saved_for_backward_lives_in_cpp_until_backward():
    x = torch.ones(10, requires_grad=True)
    with StorageTracker() as tracker:
        loss = x.exp().sum()  # autograd alone holds the 40 bytes of exp
        held = tracker.recording().allocations
        loss.backward()
        del loss
    assert held.free_order[held.op.equals("aten::exp")].tolist() == [NEVER]
    recording = tracker.recording()
    exp = np.flatnonzero(recording.allocations.op.equals("aten::exp"))
    assert (recording.allocations.free_order[exp] < NEVER).all()
    assert totals(recording)[-1] == 40  # the gradient
    backward = np.flatnonzero(recording.labels.name.matches(lambda name: name.startswith("autograd::engine")))
    assert len(backward) == 1
    inside = recording.allocations.op.equals("aten::mul.Tensor")
    start, end = recording.labels.start_ns[backward], recording.labels.end_ns[backward]
    times = recording.allocations.alloc_ns[inside]
    assert ((start <= times) & (times <= end)).all()


def test_labels_steps_streams_and_stacks():
    side = torch.cpu.Stream()
    with StorageTracker() as tracker:
        tracker.mark_step(7)
        with record_function("FSDP::all_gather (layers.0)"), torch.cpu.stream(side):
            a = torch.empty(64_003)
        tracker.mark_step(8)
        b = torch.empty(64_005)
        thread = threading.Thread(target=lambda: record_function("elsewhere").__enter__())
        thread.start()
        thread.join()
        opened = record_function("still open")
        opened.__enter__()
    opened.__exit__(None, None, None)
    del a, b
    recording = tracker.recording()
    allocations, labels, steps = recording.allocations, recording.labels, recording.steps
    first, second = row_of(recording, 256_012), row_of(recording, 256_020)
    assert allocations.stream[[first, second]].tolist() == [1, 0]
    assert labels.name.to_list() == ["FSDP::all_gather (layers.0)", "still open"]
    assert labels.start_ns[0] < allocations.alloc_ns[first] < labels.end_ns[0] < steps.start_ns[1]
    assert steps.step.tolist() == [7, 8]
    assert steps.end_ns[0] == steps.start_ns[1] < allocations.alloc_ns[second] < steps.end_ns[1]
    assert labels.end_ns[1] <= recording.end_ns == steps.end_ns[1]
    innermost = recording.stacks[int(allocations.stack[second])][0]
    assert innermost.endswith(":test_labels_steps_streams_and_stacks")


def test_wrappers_unfold_and_foreign_memory_shows_up():
    array = np.zeros(11, dtype=np.float64)
    with StorageTracker() as tracker:
        tensor = torch.from_numpy(array)  # not torch's memory, and no operator
        doubled = tensor * 2
    allocations = tracker.recording().allocations
    mine = allocations.take(allocations.size == 88)
    assert mine.op.to_list() == ["given to aten::lift_fresh", "aten::mul.Tensor"]
    assert float(doubled.sum()) == 0


def test_fake_tensors_count_with_their_size_and_real_ones_do_not():
    mode = FakeTensorMode()
    with mode:
        before = torch.empty(1 << 40, dtype=torch.int8)
    with mode, StorageTracker(fake_mode=mode) as tracker:
        a = torch.empty(1 << 41, dtype=torch.int8)
        address = tracker.address(a)
        a.untyped_storage().resize_(0)
        with FakeTensorMode():
            torch.empty(333)
        del a
    recording = tracker.recording()
    assert recording.source == "estimate"
    assert recording.allocations.size.tolist() == [1 << 40, 1 << 41]
    assert recording.allocations.address[row_of(recording, 1 << 41)] == address
    assert totals(recording) == [1 << 41, 0]
    assert before.numel() == 1 << 40


def test_compiled_model_is_counted_as_the_eager_one_and_says_so():
    model = torch.nn.Linear(32, 64)
    compiled = torch.compile(model, backend="eager")
    with StorageTracker() as tracker:
        plain = model(torch.ones(4, 32))
    assert tracker.recording().warnings == ()
    compiled(torch.ones(4, 32))
    with StorageTracker() as tracker:
        result = compiled(torch.ones(4, 32))
    recording = tracker.recording()
    torch._dynamo.reset()
    assert "runs eagerly" in recording.warnings[0]
    assert recording.allocations.op.equals("aten::addmm").sum() == 1
    assert torch.equal(plain, result)


def on_a_thread(act: Callable[[], None]) -> None:
    """Run something with a stack of dispatch modes of its own."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(act).result()


def test_a_mode_of_the_program_stays_where_it_is():
    def program():
        tracker = StorageTracker()
        tracker.start()
        with FlopCounterMode(display=False) as counter:
            tracker.stop()
            assert isinstance(_get_current_dispatch_mode_stack()[-1], type(counter.mode))
            torch.ones(2, 3) @ torch.ones(3, 2)
        assert counter.get_total_flops() == 2 * 2 * 3 * 2

    on_a_thread(program)


@pytest.mark.parametrize("called", ["_before", "_after", "_died"])
def test_it_can_stop_inside_an_operator_or_a_finalizer(called):
    def program():
        def hook(function):
            def stopping(*arguments):
                if function.__name__ == called:
                    tracker.stop()
                function(*arguments)

            return stopping

        tracker = StorageTracker(hook=hook)
        with FlopCounterMode(display=False) as counter:
            tracker.start()
            torch.ones(2, 3) @ torch.ones(3, 2)
            torch.ones(4)
        assert counter.get_total_flops() == 2 * 2 * 3 * 2
        assert (torch.ones(3) + 1).tolist() == [2, 2, 2]

    on_a_thread(program)


def test_everything_is_put_back():
    resize, enter = torch.UntypedStorage.resize_, record_function.__enter__
    with pytest.raises(RuntimeError, match="mat1"), StorageTracker():
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert torch.UntypedStorage.resize_ is resize
    assert record_function.__enter__ is enter
    assert "resize_" not in torch.UntypedStorage.__dict__


@pytest.mark.filterwarnings("ignore")
def test_training_step_agrees_with_kineto_on_one_thread(tmp_path: Path):
    """Kineto counts every call of the allocator; on one thread, without collectives, it loses no free."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 64)
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiler, StorageTracker() as tracker:
        step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    memory = [event for event in events if event["name"] == "[memory]"]
    memory.sort(key=lambda event: event["ts"])
    kineto = [(event["args"]["Addr"], event["args"]["Bytes"]) for event in memory]
    recording = tracker.recording()
    ours = history(recording)
    # What Kineto has on top are workspaces inside kernels, gone when the operator returns.
    workspaces = Counter(kineto) - Counter(ours)
    assert sum(address_size[1] * count for address_size, count in workspaces.items()) == 0
    largest = max(size for _, size in workspaces)  # layer norm's backward
    assert not Counter(ours) - Counter(kineto)
    assert is_subsequence(ours, kineto)
    assert (
        max(totals(recording))
        <= max(np.cumsum([size for _, size in kineto]))
        <= max(totals(recording)) + largest
    )
    assert totals(recording)[-1] == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forwards_are_known_with_and_without_stacks(reentrant):
    """A checkpointed layer: the same allocations are told as recomputed, by stacks or by the range."""
    layers = [torch.nn.Linear(16, 16) for _ in range(3)]

    def block(hidden):
        return torch.relu(layers[1](hidden)).square()

    sizes = []
    for stacks in (True, False):
        with StorageTracker(stacks=stacks) as tracker:
            tracker.mark_step(1)
            hidden = checkpoint(block, layers[0](torch.ones(4, 16)), use_reentrant=reentrant)
            layers[2](hidden).sum().backward()
        recording = tracker.recording()
        attributed = attribute(recording, recording.steps)
        # Checkpointing's copy of the random state is made before gradients are on.
        known = attributed.recomputed & ~recording.allocations.op.equals("torch.get_rng_state")
        told = recording.allocations.take(known)
        sizes.append(Counter(zip(told.op.to_list(), told.size.tolist(), strict=True)))
    by_stack, by_range = sizes
    assert by_range["aten::addmm", 4 * 16 * 4] == 1
    if reentrant:  # its backward of the block runs below the frame that recomputes
        assert not by_range - by_stack
        assert not any("backward" in (operator or "") for operator, _ in by_range)
    else:
        assert by_stack == by_range


def test_autograd_adds_gradients_in_place_of_the_first() -> None:
    """As Kineto sees it on real tensors; fake ones, and any under a mode of dispatch, are added elsewhere."""

    def step() -> None:
        weights = [torch.empty(64, 64, requires_grad=True) for _ in range(3)]
        given = torch.empty(128, 64, requires_grad=True)
        hidden = given + torch.sin(given)
        parts = [hidden @ weight for weight in weights]
        (hidden + parts[0] * parts[1] * parts[2]).sum().backward()

    def sums(recording: MemoryRecording) -> int:
        return recording.allocations.op.to_list().count("aten::add.Tensor")

    with torch.profiler.profile() as profiler:
        step()
    counts = {event.key: event.count for event in profiler.key_averages()}
    with FakeTensorMode() as mode, StorageTracker(fake_mode=mode, stacks=False) as fake:
        step()
    on_device = as_on_cuda(fake.recording(), frozenset())
    forward, of_expanded, in_place = 2, 1, 3  # the first gradient of the hidden state is a scalar, expanded
    assert (counts["aten::add"], counts["aten::add_"]) == (forward + of_expanded, in_place)
    assert sums(fake.recording()) == forward + of_expanded + in_place
    assert sums(on_device) == forward + of_expanded
