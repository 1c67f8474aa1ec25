"""Findings of a memory analysis: FSDP2's typical problems, leaks, fragmentation, ranks that differ.

Memory that grows with every step: memory that each step leaves behind and no later one frees.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import prod

import numpy as np

from fsdp2prof.analyzers import findings, intervals
from fsdp2prof.analyzers.memory.attribution import StackKinds, own_frame
from fsdp2prof.analyzers.memory.prepared import PreparedRecording, live_at, running_total
from fsdp2prof.analyzers.memory.remedies import in_loss, kept_gathered, kept_gradients
from fsdp2prof.analyzers.memory.wording import request_story, what_would_fit, where
from fsdp2prof.by_key import grouped, summed
from fsdp2prof.labels import is_root
from fsdp2prof.manifest import RankManifest
from fsdp2prof.results.finding import EvidenceValue, Finding, Severity
from fsdp2prof.results.memory import RankMemory
from fsdp2prof.results.peak import Peak
from fsdp2prof.tables.allocations import AllocationTable, Stacks
from fsdp2prof.tables.columns import NEVER, BoolArray, IntArray
from fsdp2prof.tables.trace import StepTable
from fsdp2prof.vocabulary import category_label, layer_name

_FIRST_STEPS = 2
"""Steps at the beginning of a training that may leave less than later ones."""
_OF_MODULES = ("forward", "backward")
_STATES = ("sharded_parameter", "optimizer_state")
"""Live for ever by design."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """Memory that one line of the program leaves allocated in every step."""

    bytes_per_step: int
    steps: int
    """Steps that were watched to the end of the next one."""
    category: str
    fqn: str | None
    op: str | None
    stack: list[str]


_LEAST_LEAK_BYTES = 16 << 10
"""A step's left-over memory that fills less than 2 GiB in 100,000 steps is not reported: a loss that is
kept."""


def find_leaks(allocations: AllocationTable, steps: StepTable, stacks: Stacks) -> list[Leak]:
    """Return places that leave memory behind in every step but the last, largest first.

    The next step may free what the last one leaves. So three steps are needed, or two that leave the same
    where the memory from before them, of unknown role, is as large as their predecessors would have left.
    With less the list is empty. ``bytes_per_step`` is rounded down.
    """
    watched = steps.step[:-1]
    if not len(watched):
        return []
    states = allocations.category.matches(lambda name: name in _STATES)
    left = (allocations.free_order == NEVER) & np.isin(allocations.step, watched) & ~states
    rows = allocations.take(left)
    keys = np.stack([rows.category.codes, rows.fqn.codes, rows.op.codes, rows.stack])
    distinct, inverse = np.unique(keys, axis=1, return_inverse=True)
    leaks = []
    for index in range(distinct.shape[1]):
        mine = rows.take(inverse.reshape(-1) == index)
        if len(np.unique(mine.step)) < len(watched):
            continue
        stack = int(mine.stack[0])
        if len(watched) < 2 and not _grew_before(allocations, states, mine, int(steps.step[-1])):
            continue
        leaks.append(
            Leak(
                bytes_per_step=int(mine.size.sum()) // len(watched),
                steps=len(watched),
                category=str(mine.category[0]),
                fqn=mine.fqn[0],
                op=mine.op[0],
                stack=list(stacks[stack]) if stack >= 0 else [],
            )
        )
    large = [leak for leak in leaks if leak.bytes_per_step >= _LEAST_LEAK_BYTES]
    return sorted(large, key=lambda leak: -leak.bytes_per_step)


def _grew_before(allocations: AllocationTable, states: BoolArray, left: AllocationTable, last: int) -> bool:
    """Whether the ``last`` step leaves the same as the one before, perhaps as earlier steps already did."""
    same = (allocations.free_order == NEVER) & (allocations.step == last) & ~states
    for column in ("category", "fqn", "op"):
        same &= getattr(allocations, column).equals(getattr(left, column)[0])
    same &= allocations.stack == left.stack[0]
    size, again = int(left.size.sum()), int(allocations.size[same].sum())
    early = (allocations.free_order == NEVER) & (allocations.alloc_order < 0)
    early &= allocations.category.equals("unattributed")
    before = last - 1 - _FIRST_STEPS
    return before > 0 and again == size and int(allocations.size[early].sum()) >= before * size


_NOTABLE, _LARGE = 0.05, 0.15
"""Shares of the peak from which something is worth a finding, and a medium one."""
_IMBALANCE = 0.05

finding = partial(findings.finding, "memory")


def rank_findings(
    view: PreparedRecording, result: RankMemory, manifest: RankManifest | None
) -> list[Finding]:
    """Return the findings of one rank."""
    return [
        *_out_of_memory(result),
        *_all_in_one_group(result.peak),
        *_unsharded_together(result.peak, manifest),
        *_unsharded_gradients(view, manifest),
        *_fp32_logits(view),
        *_scores(view),
        *_kept_after_backward(view),
        *_optimizer_first_step(view),
        *_held_across_streams(view),
        *_gradients_kept(view),
        *_fragmented(result),
        *(
            _leaking(result.rank, leak)
            for leak in find_leaks(view.allocations, view.steps, view.recording.stacks)
        ),
        *_unattributed(view, result.peak, manifest),
        *([finding("history_truncated")] if result.truncated else []),
    ]


def _of_peak(
    key: str,
    size: int,
    whole: int,
    facts: Mapping[str, EvidenceValue] | None = None,
    fqn: str | None = None,
) -> Iterator[Finding]:
    """Yield a finding about bytes of the peak if they are a notable part of it."""
    if size > _NOTABLE * whole:
        amounts = {"bytes": size, **(facts or {})}
        yield finding(key, amounts, severity=_severity(size, whole), fqn=fqn, part=size / whole)


def rank_imbalance(results: Sequence[RankMemory]) -> Finding | None:
    """Return a finding if the ranks' peaks differ by more than 5%: the fullest decides what fits.

    Ranks with the same part of the model come first; pipeline stages differ by nature.
    """
    parts = grouped((result.model_part, result) for result in results)
    uneven = max((_furthest(members) for members in parts.values()), key=_spread_frac, default=None)
    key = "rank_imbalance"
    if uneven is None or _spread_frac(uneven) <= _IMBALANCE:
        uneven = _furthest(results) if len(parts) > 1 else None
        key = "stage_imbalance"
    if uneven is None or _spread_frac(uneven) <= _IMBALANCE:
        return None
    fullest, emptiest = uneven
    return finding(
        key,
        {"ranks": {str(result.rank): result.peak.allocated_bytes for result in results}},
        fullest=fullest.rank,
        emptiest=emptiest.rank,
        high=fullest.peak.allocated_bytes,
        low=emptiest.peak.allocated_bytes,
    )


def _furthest(results: Sequence[RankMemory]) -> tuple[RankMemory, RankMemory]:
    """The fullest and the emptiest."""
    return (
        max(results, key=lambda result: result.peak.allocated_bytes),
        min(results, key=lambda result: result.peak.allocated_bytes),
    )


def _spread_frac(pair: tuple[RankMemory, RankMemory]) -> float:
    """By how much two ranks differ, of the fuller one's peak; nothing between devices of one rank."""
    high, low = (one.peak.allocated_bytes for one in pair)
    return (high - low) / high if high and pair[0].rank != pair[1].rank else 0.0


def _out_of_memory(result: RankMemory) -> Iterator[Finding]:
    if (oom := result.oom) is not None:
        yield finding(
            "out_of_memory",
            {
                "requested_bytes": oom.requested_bytes,
                "missing_bytes": oom.missing_bytes,
                "remedies": [asdict(remedy) for remedy in oom.remedies],
            },
            fqn=oom.fqn,
            rank=result.rank,
            where=where(oom.phase),
            story=request_story(oom),
            what_would_fit=what_would_fit(oom),
        )


def _all_in_one_group(peak: Peak) -> Iterator[Finding]:
    """One group holds every parameter, so that all of them are unsharded while any is needed."""
    layers = {row.fqn for row in peak.by_layer if row.fqn is not None}
    held = {row.category: row.bytes for row in peak.by_layer if row.fqn is not None}
    size = held.get("unsharded_parameter", 0) + held.get("all_gather_buffer", 0)
    if len(layers) == 1 and "sharded_parameter" in held:
        yield from _of_peak("all_in_one_group", size, peak.allocated_bytes, fqn=layers.pop())


def _unsharded_together(peak: Peak, manifest: RankManifest | None) -> Iterator[Finding]:
    """Groups unsharded at the peak: the root kept so, and others that prefetch or no resharding adds."""
    gathered = ("unsharded_parameter", "all_gather_buffer")
    held = summed((row.fqn, row.bytes) for row in peak.by_layer if row.category in gathered)
    for root in [fqn for fqn in held if fqn is not None and is_root(fqn)]:
        size = held.pop(root)
        if peak.fqn != root:
            yield from _of_peak("root_kept_unsharded", size, peak.allocated_bytes, fqn=root)
    kept = kept_gathered(manifest) & held.keys()
    total = sum(held.values())
    # One group is in use and FSDP2 gathers the next, or the last one is kept: that is as it should be.
    if (len(kept) > 1 or len(held) > 2) and total > _NOTABLE * peak.allocated_bytes:
        groups = manifest.param_groups if manifest else []
        asked = max(
            (len(names) for one in groups for names in (one.forward_prefetch, one.backward_prefetch)),
            default=0,
        )
        others = "prefetched_ahead" if asked > 1 else "groups_unsharded_together/prefetched"
        yield finding(
            "groups_unsharded_together" if len(kept) > 1 else others,
            {"bytes": {str(name): size for name, size in held.items()}},
            severity=_severity(total, peak.allocated_bytes),
            groups=len(held),
            names=_listed(sorted(str(name) for name in held)),
            total=total,
            ahead=asked,
            why=_why_together(len(held), sorted(kept)),
        )


def _why_together(held: int, kept: Sequence[str]) -> str:
    """Say which groups the policy keeps from forward to backward; others are in use or prefetched."""
    if len(kept) == held:
        return "reshard_after_forward=False keeps them from forward to backward"
    if not kept:
        return "several groups are prefetched, or several roots are in use"
    others = "the other one is" if held - len(kept) == 1 else "the others are"
    named = _listed([layer_name(one) for one in kept])
    return f"reshard_after_forward=False keeps {named} until the backward; {others} in use or prefetched"


def _listed(names: Sequence[str]) -> str:
    return findings.listed(names, 4)


def _unsharded_gradients(view: PreparedRecording, manifest: RankManifest | None) -> Iterator[Finding]:
    """Unsharded gradients that outlive their backward: the next forward begins, and they are still there."""
    rows = view.allocations
    kept = kept_gradients(view, view.peak_order, manifest)
    groups = {"groups": len(np.unique(rows.fqn.codes[kept]))}
    yield from _of_peak("unsharded_gradients", int(rows.size[kept].sum()), view.peak_bytes, groups)


def _fp32_logits(view: PreparedRecording) -> Iterator[Finding]:
    """The loss holds a large part of the peak."""
    live = view.live(view.peak_order)
    loss = in_loss(live, view.recording.stacks)
    blocks = {"blocks": int(loss.sum())}
    yield from _of_peak("logits_in_loss", int(live.size[loss].sum()), view.peak_bytes, blocks)


_SOFTMAX = re.compile(r"(?:^aten::_?|:)softmax(?:$|\()")
"""An operator, or a Python frame's function."""
_LAYERS = 4
"""Equal results of softmax from which on they are of attention's layers, and not of a loss or a router."""


def _scores(view: PreparedRecording) -> Iterator[Finding]:
    """Attention stores its scores: a softmax of the same size in each of several layers."""
    live = view.live(view.peak_order)
    made = live.op.matches(lambda name: _SOFTMAX.search(name) is not None)
    made |= StackKinds(view.recording.stacks).matching(live.stack, _SOFTMAX)
    made &= live.category.equals("activation")
    sizes, count = np.unique(live.size[made], return_counts=True)
    of_layers = made & np.isin(live.size, sizes[count >= _LAYERS])
    blocks = {"blocks": int(of_layers.sum())}
    yield from _of_peak("scores_at_peak", int(live.size[of_layers].sum()), view.peak_bytes, blocks)


def _kept_after_backward(view: PreparedRecording) -> Iterator[Finding]:
    """Forward's tensors that outlive their backward: a later forward has begun, no backward frees them."""
    rows, phases = view.allocations, view.phases
    order = np.argsort(rows.alloc_order, kind="stable")
    order = order[rows.alloc_order[order] >= 0]
    phase = rows.phase.take(order)
    order = order[phase.matches(_OF_MODULES.__contains__)]
    begins = rows.phase.take(order).equals("forward")
    begins[1:] &= rows.phase.take(order[:-1]).equals("backward")
    begun = rows.alloc_order[order[begins]][1:]
    begun = begun[begun <= view.peak_order]
    if not len(begun):
        return
    kept = live_at(rows, view.peak_order) & rows.phase.equals("forward") & rows.category.equals("activation")
    kept &= (rows.alloc_order >= 0) & (rows.alloc_order < begun[-1])
    freed = intervals.containing(phases.start_ns, phases.end_ns, rows.free_ns)
    kept &= ~phases.phase.lookup(freed).equals("backward")
    facts = {"blocks": int(kept.sum())}
    yield from _of_peak("kept_after_backward", int(rows.size[kept].sum()), view.peak_bytes, facts)


def _optimizer_first_step(view: PreparedRecording) -> Iterator[Finding]:
    """The optimizer made its states inside the recording: the peak of later steps is higher."""
    rows = view.allocations
    states = rows.category.equals("optimizer_state")
    kept = states & (rows.alloc_order >= 0) & (rows.free_order == NEVER)
    replaced = int(rows.size[states & (rows.free_order != NEVER)].sum())
    grown = int(rows.size[kept].sum()) - replaced
    missing = int(rows.size[kept & (rows.alloc_order > view.peak_order)].sum()) - replaced
    key = "optimizer_first_step/after_peak" if missing > 0 else "optimizer_first_step"
    yield from _of_peak(key, grown, view.peak_bytes, {"after_peak_bytes": missing})


def _held_across_streams(view: PreparedRecording) -> Iterator[Finding]:
    """Blocks that were freed but could not be reused because another stream still read them."""
    rows = view.allocations
    # A free that no stream delays is completed by the very next event.
    waited = rows.take((rows.free_order != NEVER) & (rows.release_order - 1 > rows.free_order))
    held = running_total(waited.free_order, waited.release_order, waited.size, view.recording.events)
    yield from _of_peak("held_across_streams", int(held.max()), view.peak_bytes, {"blocks": len(waited)})


def _gradients_kept(view: PreparedRecording) -> Iterator[Finding]:
    """Gradients that are alive while a forward runs, and reduced already: they were not set to None."""
    rows = view.allocations
    forward = rows.alloc_order[rows.phase.equals("forward") & (rows.alloc_order >= 0)]
    if len(forward):
        first = int(forward.min())
        backward = rows.alloc_order[rows.phase.equals("backward") & (rows.alloc_order > first)]
        old = rows.category.equals("unsharded_gradient") & (rows.free_order < backward.min(initial=NEVER))
        kept = (rows.category.equals("sharded_gradient") | old) & (rows.alloc_order < first)
        kept &= rows.free_order > first
        yield from _of_peak("gradients_not_none", int(rows.size[kept].sum()), view.peak_bytes)


def _fragmented(result: RankMemory) -> Iterator[Finding]:
    """Yield the free parts of segments at the end, as far as they raised the peak or a request failed."""
    found = result.fragmentation
    if found is None or found.expandable_segments:
        return
    split, reserved = found.inactive_split_bytes, found.reserved_bytes
    if result.oom is None:
        split = min(split, found.gap_at_peak_bytes)
    if split > _NOTABLE * reserved:
        amounts = {"inactive_split_bytes": split, "reserved_bytes": reserved}
        yield finding("fragmentation", amounts, severity=_severity(split, reserved), part=split / reserved)


def _leaking(rank: int, leak: Leak) -> Finding:
    what, place = leak.op or category_label(leak.category), own_frame(leak.stack)
    return finding(
        "leak",
        {
            "bytes_per_step": leak.bytes_per_step,
            "steps": leak.steps,
            "category": leak.category,
            "op": leak.op,
            "place": place,
            "stack": leak.stack,
        },
        fqn=leak.fqn,
        rank=rank,
        by=what if place is None else place if what.endswith(place) else f"{what} at {place}",
    )


def _unattributed(view: PreparedRecording, peak: Peak, manifest: RankManifest | None) -> Iterator[Finding]:
    """Report a large part of the peak that neither the recording nor the manifest explains."""
    unknown = peak.categories["unattributed"]
    live = view.live(view.peak_order)
    old = live.size[live.category.equals("unattributed") & (live.alloc_order < 0)]
    early = int(old.sum())
    if manifest is not None and manifest.tensors_are_all and (copies := _of_whole_parameters(old, manifest)):
        yield from _of_peak("model_copy", copies, peak.allocated_bytes)
        unknown, early = unknown - copies, early - copies
    key = "unattributed"
    if 2 * early < unknown:
        key = "unattributed/without_label"
    elif manifest is not None and manifest.tensors_are_all:
        key = "unattributed/kept_by_script"
    elif manifest is not None and manifest.tensors:
        key = "unattributed/not_sharded"
    elif not view.recording.events:
        key = "unattributed/without_history"
    yield from _of_peak(key, unknown, peak.allocated_bytes, {"before_history_bytes": early})


_ALL = 0.9
"""Part of a sharded model's bytes that blocks have the sizes of, from which on they are a copy of it."""
_COPIED_TYPES = (4, 2)
"""Bytes of an element of a copy: float32, or half precision."""
_ROUNDING = 512
"""The caching allocator hands out multiples of it (kMinBlockSize in CUDACachingAllocator)."""


def _of_whole_parameters(sizes: IntArray, manifest: RankManifest) -> int:
    """Return the bytes of blocks with the sizes of all sharded parameters, unsharded: copies of the model."""
    shapes = [
        prod(one.global_shape)
        for group in manifest.param_groups
        if group.shard_world_size > 1
        for one in group.parameters
    ]
    there = Counter(_rounded(size) for size in sizes.tolist())
    found = []
    for each in _COPIED_TYPES:
        wanted = Counter(_rounded(elements * each) for elements in shapes)
        whole = sum(size * count for size, count in wanted.items())
        times = max(1, sum(there[size] * size for size in wanted) // max(1, whole))
        same = {size: min(there[size], times * count) for size, count in wanted.items()}
        matched = sum(size * count for size, count in same.items())
        if len(wanted) > 1 and matched >= _ALL * whole:
            found.append(matched)
    return max(found, default=0)


def _rounded(size: int) -> int:
    return -(-size // _ROUNDING) * _ROUNDING


def _severity(part: int, whole: int) -> Severity:
    return "medium" if part > _LARGE * whole else "low"
