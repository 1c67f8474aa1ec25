"""Out of memory: what was asked for, by whom, what stood in the way, and what would have let it fit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.memory.fragmentation import free_blocks
from fsdp2prof.analyzers.memory.peak import largest_blocks, layer_bytes, sum_by
from fsdp2prof.analyzers.memory.prepared import PreparedRecording
from fsdp2prof.tables import AllocationTable, BoolArray, MemoryRecording, Stacks

__all__ = ["in_loss", "out_of_memory"]

_SMALL_REQUEST, _SMALL_SEGMENT = 1 << 20, 2 << 20
_LARGE_REQUEST, _LARGE_SEGMENT, _LARGE_ROUND = 10 << 20, 20 << 20, 2 << 20
"""CUDACachingAllocator: requests up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB,
and a larger one takes a segment of its own in steps of 2 MiB."""
_CAST = re.compile(r"aten::(?:_to_copy|to_dtype|to_device|to\b|float)")
_NUMBERED = re.compile(r"(.*?)\d+$")
_LOSS = re.compile(r"cross_entropy|nll_loss|log_softmax|logsumexp")
_CHUNKS = 8
"""Pieces a chunked loss is counted with."""


def out_of_memory(view: PreparedRecording) -> dict[str, Any] | None:
    """Describe the last request that failed; ``None`` if none did.

    - ``requested_bytes``, ``op``, ``phase``, ``fqn``, ``stack``: the request;
    - ``allocated_bytes``, ``reserved_bytes``, ``device_free_bytes``: then, with cached segments given back;
    - ``missing_bytes``: what the driver lacked for the segment it takes;
    - ``largest_free_block_bytes``: the largest block the allocator still had in that request's pool and
      stream; null if the history went on after the failure;
    - ``categories``, ``by_layer``, ``largest_blocks``: what was alive;
    - ``remedies``: what would have let it fit, by the bytes it saves, most first (:func:`_remedies`).
    """
    recording, phases, totals, reserved = view.recording, view.phases, view.totals, view.reserved
    if not len(recording.ooms):
        return None
    oom = recording.ooms.take(np.array([len(recording.ooms) - 1]))
    order, requested = int(oom.order[0]), int(oom.requested[0])
    live = view.live(order)
    row = int(intervals.containing(phases.start_ns, phases.end_ns, oom.time_ns)[0])
    stack = list(recording.stacks[int(oom.stack[0])]) if oom.stack[0] >= 0 else []
    device_free = int(oom.device_free[0])
    missing = None if device_free < 0 else max(0, _segment_bytes(requested) - device_free)
    fqn = phases.fqn[row] if row >= 0 else None
    unused = 0 if reserved is None else int(reserved[order] - totals[order])
    return {
        "requested_bytes": requested,
        "op": oom.op[0],
        "phase": phases.phase[row] if row >= 0 else "other",
        "fqn": fqn,
        "allocated_bytes": int(totals[order]),
        "reserved_bytes": None if reserved is None else int(reserved[order]),
        "device_free_bytes": None if device_free < 0 else device_free,
        "missing_bytes": missing,
        "largest_free_block_bytes": _largest_free(recording, requested, int(oom.stream[0]), order),
        "stack": stack,
        "categories": {str(name): size for (name,), size in sum_by(live.size, live.category).items()},
        "by_layer": layer_bytes(live),
        "largest_blocks": largest_blocks(live, recording.stacks, int(oom.time_ns[0])),
        "remedies": _remedies(
            _Failure(
                live=live,
                loss=in_loss(live, recording.stacks),
                requested=requested,
                request_in_loss=any(_LOSS.search(frame) for frame in stack),
                fqn=fqn,
                unused=unused,
                missing=missing,
                expandable=bool(recording.blocks.expandable.any()),
            )
        ),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    """What the remedies are counted from."""

    live: AllocationTable
    loss: BoolArray
    """Live allocations that the loss made."""
    requested: int
    request_in_loss: bool
    fqn: str | None
    """Layer that asked."""
    unused: int
    """Reserved and not allocated then."""
    missing: int | None
    expandable: bool

    def held(self, *categories: str) -> int:
        """Live bytes of some categories."""
        return int(self.live.size[self.live.category.matches(lambda name: name in categories)].sum())


def in_loss(allocations: AllocationTable, stacks: Stacks) -> BoolArray:
    """Mask of the allocations that a cross-entropy loss made, by operator or stack."""
    hit = stacks.frames.matches(lambda frame: _LOSS.search(frame) is not None)
    of_stack = np.zeros(len(stacks) + 1, dtype=np.bool_)
    of_stack[np.repeat(np.arange(len(stacks)), np.diff(stacks.offsets))[hit]] = True
    return of_stack[allocations.stack] | allocations.op.matches(lambda name: _LOSS.search(name) is not None)


def _remedies(failure: _Failure) -> list[dict[str, Any]]:
    """Return what each change would have saved at that instant, most bytes first.

    Each ``{action, saves_bytes, enough, how}``; ``enough`` is null where the driver's free memory is unknown.
    Savings are upper bounds of one change alone: they overlap and do not add up.
    """
    live, requested = failure.live, failure.requested
    loss_bytes = int(live.size[failure.loss].sum()) + (requested if failure.request_in_loss else 0)
    casts = failure.loss & live.op.matches(lambda name: _CAST.match(name) is not None)
    per_sample = failure.held("activation", "input", "temporary") + requested
    others = live.category.equals("unsharded_parameter") & ~live.fqn.equals(failure.fqn)
    states = failure.held("sharded_parameter", "sharded_gradient", "optimizer_state")
    options = [
        (
            "chunked_loss",
            loss_bytes * (_CHUNKS - 1) // _CHUNKS,
            f"compute head and loss in {_CHUNKS} chunks of the tokens, or with a fused linear cross-entropy",
        ),
        (
            "low_precision_logits",
            int(live.size[casts].sum()),
            "do not copy the logits to fp32 before the loss; a fused cross-entropy casts inside its kernel",
        ),
        (
            "activation_checkpointing",
            _recomputable(live),
            "checkpoint every block: keep its input, recompute the rest in backward",
        ),
        ("smaller_batch", per_sample // 2, "halve the micro-batch and accumulate gradients over two of them"),
        (
            "reshard_after_forward",
            int(live.size[others].sum()),
            "reshard the groups that stay unsharded while another layer runs",
        ),
        ("wider_sharding", states // 2, "shard over twice as many ranks: each holds half of the states"),
        (
            "expandable_segments",
            0 if failure.expandable else failure.unused,
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: unused reserved memory becomes usable",
        ),
    ]
    ranked = sorted((option for option in options if option[1] > 0), key=lambda option: -option[1])
    return [
        {
            "action": action,
            "saves_bytes": saves,
            "enough": None if failure.missing is None else saves >= failure.missing,
            "how": how,
        }
        for action, saves, how in ranked
    ]


def _recomputable(live: AllocationTable) -> int:
    """Activations that checkpointing of numbered blocks (``layers.0``, ...) drops, all but one block's.

    A block keeps its input; the smallest sum of any block stands for it, since one that is checkpointed
    already holds nothing more.
    """
    blocks: dict[str, list[int]] = {}
    rows = live.take(live.category.equals("activation"))
    for (fqn,), size in sum_by(rows.size, rows.fqn).items():
        if fqn is not None and (match := _NUMBERED.match(fqn)):
            blocks.setdefault(match[1], []).append(size)
    saved = 0
    for sizes in blocks.values():
        extra = [size - min(sizes) for size in sizes]
        saved += sum(extra) - max(extra)
    return saved


def _segment_bytes(requested: int) -> int:
    """Bytes the allocator takes from the driver for a request that finds no block."""
    if requested < _LARGE_REQUEST:
        return _SMALL_SEGMENT if requested <= _SMALL_REQUEST else _LARGE_SEGMENT
    return -(-requested // _LARGE_ROUND) * _LARGE_ROUND


def _largest_free(recording: MemoryRecording, requested: int, stream: int, order: int) -> int | None:
    """Largest free block of the request's stream and size class, if the history ends with the failure."""
    if order < recording.events - 1 or not len(recording.blocks):
        return None
    pool = "small" if requested <= _SMALL_REQUEST else "large"
    blocks = free_blocks(recording.blocks)
    mine = (blocks.stream == stream) & blocks.pool.matches(lambda name: name == pool)
    return int(blocks.size[mine].max(initial=0))
