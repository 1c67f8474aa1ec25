"""What the CUDA kernels of the same operators allocate besides their results.

The execution runs CPU operators on fake tensors. Their results have the sizes and lifetimes of the CUDA ones;
three things differ, and are put into the recording here:

- a matrix product needs a cuBLAS workspace: one per thread and stream, from the first product on, for good
  (forward runs on the main thread, backward on autograd's; ``ATen/cuda/CublasHandlePool.cpp``);
- attention's backward accumulates dQ in fp32 while it runs: flash (``flash_api.cpp: mha_bwd``), the
  memory-efficient kernel (``mem_eff_attention/kernel_backward.h``, up to 128 elements a head) and cuDNN
  (``sdpa_bwd``: its workspace) alike. Attention as separate operators (math) is executed as it is;
- autograd adds a later gradient of a tensor to the first one, in the memory of the first if nothing else
  holds it (``input_buffer.cpp: accumulate``). It does not where a tensor dispatches in Python, as fake ones
  do: there the sum is a new tensor, after which both are dropped.

A recording made with the installed torch, as the run's own torch would have made it.

The real FSDP2 of the installed torch is executed; where an older one allocates elsewhere or frees at another
time, and nothing else differs, the recording is changed accordingly.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.memory.attribution import Attributed, attribute
from fsdp2prof.backends import blas_workspace_bytes
from fsdp2prof.estimators.torch_rules import TorchRules
from fsdp2prof.labels import AUTOGRAD_NODE, RECOMPUTED
from fsdp2prof.tables.allocations import AllocationTable, MemoryRecording
from fsdp2prof.tables.columns import NEVER, BoolArray, IntArray, Strings, concat_tables
from fsdp2prof.tables.trace import LabelTable

BLAS_WORKSPACE_BYTES = blas_workspace_bytes("9.0")
"""Of Hopper and newer."""

_MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_SUM = "aten::add.Tensor"
_FLASH_BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
_ORDERS = 8
"""Each event's order is multiplied by this number, which leaves room for events in between."""


def as_on_cuda(
    recording: MemoryRecording, host: frozenset[int], *, of_plain_tensors: bool = True
) -> MemoryRecording:
    """Return the device's part of a recording, without ``host`` addresses, as CUDA kernels would make it.

    Without ``of_plain_tensors`` gradients may be DTensors, which autograd does not add in place.
    """
    on_device = ~np.isin(recording.allocations.address, list(host))
    allocations = recording.allocations.take(on_device)
    if of_plain_tensors:
        allocations = _with_sums_in_place(allocations, recording.labels)
    allocations = _spread(allocations)
    parts = [
        allocations,
        _blas_workspaces(allocations, _backward_start(recording)),
        _flash_accumulators(allocations),
    ]
    merged = concat_tables(parts)
    return replace(
        recording,
        device="cuda",
        allocations=merged.take(np.argsort(merged.alloc_order, kind="stable")),
        events=recording.events * _ORDERS,
    )


def with_fused_blocks(recording: MemoryRecording, blocks: tuple[str, ...]) -> MemoryRecording:
    """Return the recording without the tensors that ``torch.compile`` of each block keeps out of memory.

    A compiled block fuses its pointwise operators and reductions: a tensor that lives only between two of
    FSDP's labels inside one block stays in registers, unless a matrix product or attention makes or reads
    it.
    """
    attributed = attribute(recording, recording.steps)
    allocations = attributed.allocations
    inside = allocations.fqn.matches(set(blocks).__contains__) & allocations.activity.equals("compute")
    short = attributed.alloc_row == attributed.free_row
    kernels = allocations.op.matches(lambda name: name.startswith((*_MATMULS, "aten::_scaled_dot_product")))
    pointwise = np.flatnonzero(inside & short & ~kernels)
    read = _read_by(allocations, np.flatnonzero(inside & kernels), pointwise)
    fused = np.zeros(len(allocations), dtype=np.bool_)
    fused[np.setdiff1d(pointwise, read)] = True
    return replace(recording, allocations=recording.allocations.take(~fused))


def with_least_saved(recording: MemoryRecording, blocks: tuple[str, ...]) -> MemoryRecording:
    """Return the recording with the minimum that compiled blocks may save: no pointwise result except the
    output.

    The partitioner never recomputes matrix products and attention, and may recompute everything else.
    """
    attributed = attribute(recording, recording.steps)
    allocations = attributed.allocations
    inside = allocations.fqn.matches(set(blocks).__contains__) & allocations.activity.equals("compute")
    kept = attributed.alloc_row != attributed.free_row
    kernels = allocations.op.matches(lambda name: name.startswith((*_MATMULS, "aten::_scaled_dot_product")))
    forward = allocations.phase.equals("forward")
    rows = np.flatnonzero(inside & kept & forward & ~kernels)
    last = {}
    for row in rows.tolist():
        last[int(attributed.alloc_row[row])] = row
    recomputed = np.zeros(len(allocations), dtype=np.bool_)
    recomputed[np.setdiff1d(rows, np.array(list(last.values()), dtype=np.int64))] = True
    return replace(recording, allocations=recording.allocations.take(~recomputed))


def _read_by(allocations: AllocationTable, kernels: IntArray, results: IntArray) -> IntArray:
    """The youngest of the ``results`` alive when each kernel runs: its input, made for it."""
    born, freed = allocations.alloc_order[results], allocations.free_order[results]
    read = []
    for order in allocations.alloc_order[kernels].tolist():
        alive = np.flatnonzero((born < order) & (freed > order))
        read.extend(results[alive[-1:]].tolist())
    return np.array(read, dtype=np.int64)


def _spread(allocations: AllocationTable) -> AllocationTable:
    def wider(orders: IntArray) -> IntArray:
        return np.where((orders < 0) | (orders == NEVER), orders, orders * _ORDERS)

    return allocations.with_columns(
        alloc_order=wider(allocations.alloc_order),
        free_order=wider(allocations.free_order),
        release_order=wider(allocations.release_order),
    )


def _backward_start(recording: MemoryRecording) -> int:
    labels = recording.labels
    backward = labels.name.matches(lambda name: name.startswith("FSDP::pre_backward"))
    return int(labels.start_ns[backward].min()) if backward.any() else NEVER


def _blas_workspaces(allocations: AllocationTable, backward_ns: int) -> AllocationTable:
    """One block after the first product of the forward, one after that of the backward, never freed."""
    products = allocations.op.matches(lambda name: name in _MATMULS)
    backward = allocations.alloc_ns >= backward_ns
    firsts = [np.flatnonzero(products & side)[:1] for side in (~backward, backward)]
    rows = allocations.take(np.concatenate(firsts))
    return _extra(rows, rows.alloc_order + 1, np.full(len(rows), NEVER), rows.alloc_ns, BLAS_WORKSPACE_BYTES)


def _with_sums_in_place(allocations: AllocationTable, labels: LabelTable) -> AllocationTable:
    """Leave out each sum after which autograd drops both gradients; the first of them lives on as the sum."""
    own = labels.name.matches(lambda name: name.startswith(AUTOGRAD_NODE))
    again = labels.name.equals(RECOMPUTED)
    times = allocations.alloc_ns
    inside, recomputed = (
        intervals.containing(labels.start_ns[rows], labels.end_ns[rows], times) >= 0 for rows in (own, again)
    )
    sums = np.flatnonzero(inside & ~recomputed & allocations.op.equals(_SUM))
    freed = np.argsort(allocations.free_order, kind="stable")
    orders = allocations.free_order[freed]
    following = np.searchsorted(orders, allocations.alloc_order[sums], side="right")
    free_order, free_ns = allocations.free_order.copy(), allocations.free_ns.copy()
    release_order = allocations.release_order.copy()
    memory_of: dict[int, int] = {}
    """Of each sum, the row whose memory it is in."""
    for row, place in zip(sums.tolist(), following.tolist(), strict=True):
        both = freed[place : place + 2].tolist()
        at = int(allocations.alloc_order[row])
        alike = [
            one
            for number, one in enumerate(both, 1)
            if int(allocations.free_order[one]) == at + number
            and allocations.size[one] == allocations.size[row]
            and allocations.stream[one] == allocations.stream[row]
        ]
        if len(alike) < 2 or allocations.free_order[row] == NEVER:
            continue
        first = memory_of.get(alike[0], alike[0])
        memory_of[row] = first
        free_order[first], free_ns[first] = allocations.free_order[row], allocations.free_ns[row]
        release_order[first] = allocations.release_order[row]
    changed = allocations.with_columns(free_order=free_order, free_ns=free_ns, release_order=release_order)
    kept = np.ones(len(allocations), dtype=np.bool_)
    kept[list(memory_of)] = False
    return changed.take(kept)


def _flash_accumulators(allocations: AllocationTable) -> AllocationTable:
    """The fp32 dQ of each backward of flash attention, alive between its results and its return."""
    calls = np.flatnonzero(allocations.op.equals(_FLASH_BACKWARD))[2::3]  # dQ, dK, dV: after the third
    rows = allocations.take(calls)
    queries = allocations.take(calls - 2)
    return _extra(rows, rows.alloc_order + 1, rows.alloc_order + 2, rows.alloc_ns, 2 * queries.size)


def _extra(
    rows: AllocationTable,
    alloc_order: IntArray,
    free_order: IntArray,
    free_ns: IntArray,
    size: IntArray | int,
) -> AllocationTable:
    return rows.with_columns(
        alloc_order=alloc_order,
        free_order=free_order,
        release_order=free_order,
        free_ns=np.where(free_order == NEVER, NEVER, free_ns),
        size=np.broadcast_to(np.asarray(size, dtype=np.int64), (len(rows),)).copy(),
        address=np.full(len(rows), -1, dtype=np.int64),
        op=Strings.intern(f"{op} (workspace)" for op in rows.op.to_list()),
    )


_MADE = "aten::empty.memory_format"
_MADE_LIKE_INPUT = "aten::new_empty"
"""How a reduce-scatter's output is made up to torch 2.7; later like its input."""
_COLLECTIVES = "_c10d_functional::"
_LAUNCHES_AHEAD = 1024
"""Launches that CUDA queues on a device before the next one blocks its caller."""


def as_in_torch(recording: MemoryRecording, rules: TorchRules) -> MemoryRecording:
    """Return the recording as a version of torch makes it; its orders leave room between events."""
    if not rules.all_reduce_input_is_held:
        recording = _with_all_reduce_inputs_dropped(recording)
    if not rules.reduce_scatter_input_on_default_stream:
        recording = _with_inputs_on_their_stream(recording)
    return recording


def _with_inputs_on_their_stream(recording: MemoryRecording) -> MemoryRecording:
    """The reduce-scatter's input on the reduce-scatter's stream, dropped at once."""
    attributed = attribute(recording, recording.steps)
    allocations = recording.allocations
    inputs, outputs = _of_reduce_scatters(attributed)
    if not len(inputs) or not len(outputs):
        return recording
    ends = attributed.phases.end_ns[attributed.alloc_row[inputs]]
    stream = allocations.stream.copy()
    stream[inputs] = allocations.stream[outputs[0]]
    return replace(
        recording,
        allocations=_freed(allocations, inputs, _last_order_before(allocations, ends) + 1).with_columns(
            stream=stream, free_ns=_put(allocations.free_ns, inputs, ends - 1)
        ),
    )


def _with_all_reduce_inputs_dropped(recording: MemoryRecording) -> MemoryRecording:
    """Drop the input of HSDP's all-reduces where the gradients were cast from it.

    An input that is held lives until the root's last callback; gradients that are views of it live longer,
    and without HSDP none of it lives so long.
    """
    attributed = attribute(recording, recording.steps)
    allocations = recording.allocations
    _, outputs = _of_reduce_scatters(attributed)
    held = outputs[attributed.freed_in(("final_wait",))[outputs]]
    if not len(held):
        return recording
    ends = attributed.phases.end_ns[attributed.alloc_row[held]]
    return replace(
        recording,
        allocations=_freed(allocations, held, _last_order_before(allocations, ends) + 1).with_columns(
            free_ns=_put(allocations.free_ns, held, ends - 1)
        ),
    )


def _of_reduce_scatters(attributed: Attributed) -> tuple[IntArray, IntArray]:
    """Rows of the inputs, on the default stream, and of the outputs, on a separate stream."""
    allocations = attributed.allocations
    reducing = allocations.activity.equals("reduce")
    made = reducing & allocations.op.equals(_MADE)
    outputs = made | (reducing & allocations.op.equals(_MADE_LIKE_INPUT))
    on_default = allocations.stream == 0
    return np.flatnonzero(made & on_default), np.flatnonzero(outputs & ~on_default)


def with_recorded_streams(recording: MemoryRecording) -> MemoryRecording:
    """Return the recording with the tensors of asynchronous collectives held for the longest possible
    time.

    A block that ``record_stream`` was called on is free again when the device has passed the collective,
    not when the host drops it: at most as many launches later as CUDA queues. An allocation stands for a
    launch, which makes that an upper bound, since many launches allocate nothing. No step begins before
    the previous one has ended.
    """
    allocations = recording.allocations
    results = np.flatnonzero(allocations.op.matches(lambda name: name.startswith(_COLLECTIVES)))
    held = np.union1d(results, _inputs(allocations, results))
    held = held[allocations.free_order[held] != NEVER]
    births = np.sort(allocations.alloc_order)
    later = np.searchsorted(births, allocations.free_order[held]) + _LAUNCHES_AHEAD
    by_queue = births[np.minimum(later, len(births) - 1)] - 1
    by_step = _last_order_before(allocations, _step_ends(recording, allocations.free_ns[held]))
    until = np.maximum(allocations.free_order[held], np.minimum(by_queue, by_step))
    return replace(recording, allocations=_freed(allocations, held, until))


def _inputs(allocations: AllocationTable, results: IntArray) -> IntArray:
    """The newest allocation alive when each collective ran: its input, allocated for it."""
    born, freed = allocations.alloc_order, allocations.free_order
    found: list[int] = []
    for order in born[results].tolist():
        alive = np.flatnonzero((born < order) & (freed > order))
        found.extend(alive[np.argmax(born[alive]) :][:1].tolist() if len(alive) else [])
    return np.array(found, dtype=np.int64)


def _step_ends(recording: MemoryRecording, times: IntArray) -> IntArray:
    ends = np.sort(recording.steps.end_ns)
    return ends[np.minimum(np.searchsorted(ends, times), len(ends) - 1)]


def _last_order_before(allocations: AllocationTable, times: IntArray) -> IntArray:
    """Order of the last event before each time."""
    freed: BoolArray = allocations.free_order != NEVER
    at = np.concatenate([allocations.alloc_ns, allocations.free_ns[freed]])
    orders = np.concatenate([allocations.alloc_order, allocations.free_order[freed]])
    by_time = np.lexsort((orders, at))
    last = np.searchsorted(at[by_time], times) - 1
    latest: IntArray = np.maximum.accumulate(orders[by_time])[np.maximum(last, 0)]
    return latest


def _freed(allocations: AllocationTable, rows: IntArray, orders: IntArray) -> AllocationTable:
    return allocations.with_columns(
        free_order=_put(allocations.free_order, rows, orders),
        release_order=_put(allocations.release_order, rows, orders),
    )


def _put(column: IntArray, rows: IntArray, values: IntArray) -> IntArray:
    changed: IntArray = column.copy()
    changed[rows] = values
    return changed
