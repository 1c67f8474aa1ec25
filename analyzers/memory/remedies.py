"""Changes that would make it fit: bytes saved by each at one instant, most first."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers.findings import worded
from fsdp2prof.analyzers.memory.attribution import CHECKPOINT, LOSS, StackKinds
from fsdp2prof.analyzers.memory.prepared import PreparedRecording, live_at
from fsdp2prof.analyzers.recorded_groups import forwards_of_a_backward
from fsdp2prof.labels import is_root, qualified_fqn
from fsdp2prof.manifest import RankManifest
from fsdp2prof.results.memory import MemoryAnalysis
from fsdp2prof.results.peak import Remedy
from fsdp2prof.tables.allocations import AllocationTable, Stacks
from fsdp2prof.tables.columns import NEVER, BoolArray, IntArray

_CAST = re.compile(r"aten::(?:_to_copy|to_dtype|to_device|to\b|float)")
_NUMBERED = re.compile(r"(.*?)\d+$")
_CHECKPOINTED = 2
"""Activations that a checkpointed block holds at most."""
_KEPT = 3
"""Allocations of a layer from which on they are a graph's: outputs and skip connections are fewer."""
_LITTLE = 0.01
"""Share of the allocated memory below which a saving is not reported, unless it is enough."""
_CHUNKS = 8
"""Pieces a chunked loss is counted with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request that failed."""

    bytes: int
    in_loss: bool
    missing_bytes: int | None
    """Bytes that the driver lacked for it; null if unknown."""


def in_loss(allocations: AllocationTable, stacks: Stacks) -> BoolArray:
    """Mask of the allocations of a cross-entropy loss, by operator or stack, and of its backward.

    Its backward is the part before FSDP's first label there, mainly the gradient of the logits: autograd
    leaves no Python frame on a GPU, and no module is known then. Where nothing of a cross-entropy's forward
    is live, the loss is another one.
    """
    made = allocations.op.matches(lambda name: LOSS.search(name) is not None)
    made |= StackKinds(stacks).matching(allocations.stack, LOSS)
    if not made.any():
        return made
    backward = allocations.phase.equals("backward") & allocations.activity.equals("compute")
    return made | (backward & allocations.fqn.equals(None) & allocations.category.equals("temporary"))


def kept_gathered(manifest: RankManifest | None) -> set[str]:
    """Return the groups, without roots, whose policy keeps them gathered from forward to backward."""
    groups = [] if manifest is None else manifest.param_groups
    count = 0 if manifest is None else manifest.root_count
    kept = (qualified_fqn(one.fqn, one.root, count) for one in groups if one.reshard_after_forward is False)
    return {fqn for fqn in kept if not is_root(fqn)}


def kept_gradients(view: PreparedRecording, order: int, manifest: RankManifest | None) -> BoolArray:
    """Mask of the unsharded gradients that are live at ``order`` and wait for another micro-batch.

    The next forward begins in their life, before the optimizer's step, and so does the backward after it.
    """
    rows = view.allocations
    forward = _next_of(rows, "forward", rows.alloc_order, NEVER - 1)
    backward = _next_of(rows, "backward", forward, NEVER - 1)
    kept = rows.category.equals("unsharded_gradient") & (rows.free_order > backward)
    kept &= forward < _next_of(rows, "optimizer", rows.alloc_order, NEVER)
    one_micro_batch = manifest is not None and manifest.micro_batches == 1  # an evaluation's, a closure's
    return kept & live_at(rows, order) & (not one_micro_batch)


def _next_of(rows: AllocationTable, phase: str, after: IntArray, end: int) -> IntArray:
    """Order of the next allocation of a phase after each given one; ``end`` if there is none."""
    orders = np.append(np.sort(rows.alloc_order[rows.phase.equals(phase)]), end)
    return np.asarray(orders[np.searchsorted(orders[:-1], after, side="right")])


def remedies_at(
    view: PreparedRecording,
    order: int,
    fqn: str | None,
    manifest: RankManifest | None,
    request: Request | None = None,
    *,
    split_bytes: int = 0,
) -> list[Remedy]:
    """Return the saving of each change right after event ``order``, while layer ``fqn`` ran.

    Savings are upper bounds of one change alone. For a request that failed there, its own bytes count, and
    ``enough`` says whether a change would have made it fit. ``split_bytes`` are free parts of segments in
    use, which the allocator cannot return to the driver.
    """
    live = view.live(order)
    requested, missing = (request.bytes, request.missing_bytes) if request else (0, None)
    loss = in_loss(live, view.recording.stacks)
    loss_bytes = _size(live, loss) + (requested if request and request.in_loss else 0)
    casts = loss & live.op.matches(lambda name: _CAST.match(name) is not None)
    resharded, ahead = _gathered(live, fqn, manifest)
    of_batch = live.category.matches(lambda name: name in ("activation", "input", "temporary"))
    of_batch &= ~live.op.matches(lambda name: name.endswith("(workspace)")) & ~live.phase.equals("optimizer")
    shards = _held(live, "sharded_parameter")
    states = shards and shards + _held(live, "sharded_gradient", "optimizer_state")
    recomputed = _recomputable(view, live, loss)
    unused = _unused(view, order)
    forwards = 1 if manifest is None else forwards_of_a_backward(manifest)
    savings = {
        "no_grad": _kept_without_backward(live, fqn),
        "chunked_loss": loss_bytes * (_CHUNKS - 1) // _CHUNKS,
        "low_precision_logits": _size(live, casts),
        "activation_checkpointing": recomputed[1],
        "backward_after_each_forward": _held(live, "activation") * (forwards - 1) // forwards,
        "smaller_batch": (_size(live, of_batch) + requested) // 2,
        "reshard_after_forward": resharded,
        "less_prefetch": ahead,
        "reduced_gradients": int(view.allocations.size[kept_gradients(view, order, manifest)].sum()),
        "wider_sharding": states // 2,
        "expandable_segments": unused if request else min(split_bytes, unused),
    }
    found = [
        Remedy(
            action=action,
            saves_bytes=saves,
            enough=_enough(saves, recomputed[0] if action == "activation_checkpointing" else saves, missing),
            how=worded("memory", f"remedy/{action}", {"chunks": _CHUNKS, "forwards": forwards})("change"),
        )
        for action, saves in sorted(savings.items(), key=lambda option: -option[1])
        if saves > 0
    ]
    little = _LITTLE * int(view.totals[order])
    return [remedy for remedy in found if remedy.enough or remedy.saves_bytes > little]


def _kept_without_backward(live: AllocationTable, fqn: str | None) -> int:
    """Bytes that layers of a forward keep for a backward that never comes: each several, past its own end."""
    kept = live.category.equals("temporary") & live.phase.equals("forward") & (live.free_order < NEVER)
    kept &= live.fqn.matches(lambda name: not is_root(name) and name != fqn)
    layers, count = np.unique(live.fqn.codes[kept], return_counts=True)
    return _size(live, kept & np.isin(live.fqn.codes, layers[count >= _KEPT]))


def _enough(most: int, least: int, missing: int | None) -> bool | None:
    """Whether savings between two bounds let a request fit; ``None`` if that depends, or is unknown."""
    if missing is None or least < missing <= most:
        return None
    return least >= missing


def _size(live: AllocationTable, rows: BoolArray) -> int:
    return int(live.size[rows].sum())


def _held(live: AllocationTable, *categories: str) -> int:
    return _size(live, live.category.matches(lambda name: name in categories))


def _gathered(live: AllocationTable, fqn: str | None, manifest: RankManifest | None) -> tuple[int, int]:
    """Bytes of other groups that resharding frees, and of those that are gathered more than one ahead, as
    parameters or still in all-gather buffers.

    Without a manifest it is unknown which of them result from prefetch.
    """
    others = live.take(live.category.equals("unsharded_parameter") & ~live.fqn.equals(fqn))
    held = {one: _size(others, others.fqn.equals(one)) for one in others.fqn.values if one is not None}
    if manifest is None:
        return sum(held.values()), 0
    kept = kept_gathered(manifest) & held.keys()
    buffers = live.take(live.category.equals("all_gather_buffer") & ~live.fqn.equals(fqn))
    gathered = {one: _size(buffers, buffers.fqn.equals(one)) for one in buffers.fqn.values if one is not None}
    of_blocks = [one for one in {*held, *gathered} if one not in kept and not is_root(one)]
    ahead = [held.get(one, 0) + gathered.get(one, 0) for one in of_blocks]
    resharded = sum(held[one] for one in kept) if len(kept) > 1 else 0  # one may be the next that is needed
    return resharded, sum(ahead) - max(ahead, default=0)


def _unused(view: PreparedRecording, order: int) -> int:
    """Reserved and not allocated, where expandable segments would let it be used."""
    if view.reserved is None or view.recording.segments.expandable.any():
        return 0
    return int(view.reserved[order] - view.totals[order])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Block:
    """Activations of one numbered block."""

    bytes: int
    allocations: int
    largest: int


def _recomputable(view: PreparedRecording, live: AllocationTable, loss: BoolArray) -> tuple[int, int]:
    """Activations that checkpointing of the blocks drops, at least and at most.

    Of a block it keeps the input, and one block is recomputed at a time. Where no numbered blocks
    (``layers.0``, ...) are known, all but the loss's may go, or none; nothing if stacks show that
    checkpointing is on already.
    """
    kept = live.category.equals("activation")
    families = _blocks(live.take(kept))
    if families:
        bounds = [_dropped(blocks) for blocks in families]
        return sum(low for low, _ in bounds), sum(high for _, high in bounds)
    if StackKinds(view.recording.stacks).matching(view.allocations.stack, CHECKPOINT).any():
        return 0, 0
    return 0, _size(live, kept & ~loss)


def _blocks(activations: AllocationTable) -> list[list[_Block]]:
    """Activations of the numbered blocks, a list for each kind of them."""
    families: dict[str, list[_Block]] = {}
    for fqn in activations.fqn.values:
        rows = activations.size[activations.fqn.equals(fqn)]
        if len(rows) and (match := _NUMBERED.match(fqn)):
            block = _Block(bytes=int(rows.sum()), allocations=len(rows), largest=int(rows.max()))
            families.setdefault(match[1], []).append(block)
    return list(families.values())


def _dropped(blocks: list[_Block]) -> tuple[int, int]:
    """Minimum and maximum that checkpointing saves in similar blocks.

    A block with hardly any allocations is checkpointed already and shows the size of an input; without
    such a block, an input is at most the block's largest allocation.
    """
    inputs = [block.bytes for block in blocks if block.allocations <= _CHECKPOINTED]
    least = [max(0, block.bytes - (min(inputs) if inputs else block.largest)) for block in blocks]
    most = [max(0, block.bytes - min(inputs, default=0)) for block in blocks]
    return sum(least) - max(least), sum(most) - max(most)


_TIGHT = 0.85
"""Part of its device from which on a peak makes memory worth advice."""
_ROOM = 0.5
"""Part of its device up to which a peak leaves room for activations that are recomputed now."""


def is_tight(memory: MemoryAnalysis) -> bool:
    """Whether a request failed, or the peak is known to take most of its device."""
    figures = memory.key_figures
    full = figures is not None and figures.device_frac is not None and figures.device_frac >= _TIGHT
    return full or any(rank.oom is not None for rank in memory.ranks)


def has_room(memory: MemoryAnalysis | None) -> bool:
    """Whether less than half of the device is known to be in use at the peak."""
    figures = None if memory is None else memory.key_figures
    return figures is not None and figures.device_frac is not None and figures.device_frac < _ROOM


def free_bytes(memory: MemoryAnalysis | None) -> int | None:
    """Return the memory left on the fullest device at its peak; None if its size is unknown."""
    figures = None if memory is None else memory.key_figures
    if figures is None or figures.device_total_bytes is None:
        return None
    return figures.device_total_bytes - (figures.reserved_bytes or figures.allocated_bytes)
