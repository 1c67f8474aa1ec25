"""What to look at in a memory analysis: FSDP2's habits, leaks, fragmentation, ranks that differ.

Memory that grows with every step: what each step leaves behind and no later one frees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from fsdp2prof.analyzers.ledger.thresholds import finding
from fsdp2prof.analyzers.memory.attribution import own_frame
from fsdp2prof.analyzers.memory.prepared import PreparedRecording, running_total
from fsdp2prof.analyzers.memory.remedies import in_loss, kept_gathered, kept_gradients
from fsdp2prof.analyzers.memory.wording import request_story, what_would_fit, where
from fsdp2prof.labels import is_root
from fsdp2prof.manifest import RankManifest
from fsdp2prof.results.finding import Finding, Severity
from fsdp2prof.results.memory import RankMemory
from fsdp2prof.results.peak import Peak
from fsdp2prof.tables import NEVER, AllocationTable, BoolArray, Stacks, StepTable
from fsdp2prof.units import format_bytes, format_frac
from fsdp2prof.vocabulary import layer_name

_FIRST_STEPS = 2
"""Steps at the beginning of a training that may leave less than later ones."""
_STATES = ("sharded_parameter", "optimizer_state")
"""Live for ever by design."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """What one place in the program leaves behind in every step."""

    bytes_per_step: int
    steps: int
    """Steps that were watched to the end of the next one."""
    category: str
    fqn: str | None
    op: str | None
    stack: list[str]


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
    return sorted(leaks, key=lambda leak: -leak.bytes_per_step)


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


def rank_findings(
    view: PreparedRecording, result: RankMemory, manifest: RankManifest | None
) -> list[Finding]:
    """Return the findings of one rank."""
    leaks = find_leaks(view.allocations, view.steps, view.recording.stacks)
    found = [
        _out_of_memory(result),
        _all_in_one_group(result.peak),
        *_unsharded_together(result.peak, manifest),
        _unsharded_gradients(view, manifest),
        _fp32_logits(view),
        _optimizer_first_step(view),
        _held_across_streams(view),
        _gradients_kept(view),
        _fragmented(result),
        *(_leaking(result.rank, leak) for leak in leaks),
        _unattributed(view, result.peak, manifest),
        _truncated(result),
    ]
    return [one for one in found if one is not None]


def rank_imbalance(results: Sequence[RankMemory]) -> Finding | None:
    """Return a finding if the ranks' peaks differ by more than 5%: the fullest decides what fits.

    Ranks with the same part of the model come first; pipeline stages differ by nature.
    """
    parts: dict[str | None, list[RankMemory]] = {}
    for result in results:
        parts.setdefault(result.model_part, []).append(result)
    uneven = max((_furthest(members) for members in parts.values()), key=_spread_frac, default=None)
    change = "Balance the batches, or look for uneven shards and work that only one rank does."
    named, why = "rank_imbalance", ""
    if uneven is None or _spread_frac(uneven) <= _IMBALANCE:
        uneven = _furthest(results) if len(parts) > 1 else None
        change = "Give the fuller stage fewer layers, where its memory limits the batch."
        named = "stage_imbalance"
        why = ": they hold different parts of the model, as pipeline stages do"
    if uneven is None or _spread_frac(uneven) <= _IMBALANCE:
        return None
    fullest, emptiest = uneven
    high, low = fullest.peak.allocated_bytes, emptiest.peak.allocated_bytes
    return finding(
        named,
        "medium" if named == "rank_imbalance" else "info",
        None,
        f"Rank {fullest.rank} peaks at {format_bytes(high)}, rank {emptiest.rank} at {format_bytes(low)}"
        f"{why}.",
        change,
        {"ranks": {str(result.rank): result.peak.allocated_bytes for result in results}},
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


def _out_of_memory(result: RankMemory) -> Finding | None:
    oom = result.oom
    if oom is None:
        return None
    return finding(
        "out_of_memory",
        "high",
        oom.fqn,
        f"Rank {result.rank} ran out of memory {where(oom.phase)}: {request_story(oom)}.",
        what_would_fit(oom),
        {
            "requested_bytes": oom.requested_bytes,
            "missing_bytes": oom.missing_bytes,
            "remedies": [asdict(remedy) for remedy in oom.remedies],
        },
    )


def _all_in_one_group(peak: Peak) -> Finding | None:
    """One group holds every parameter, so that all of them are unsharded while any is needed."""
    layers = {row.fqn for row in peak.by_layer if row.fqn is not None}
    held = {row.category: row.bytes for row in peak.by_layer if row.fqn is not None}
    size = held.get("unsharded_parameter", 0) + held.get("all_gather_buffer", 0)
    if len(layers) != 1 or "sharded_parameter" not in held or size <= _NOTABLE * peak.allocated_bytes:
        return None
    (fqn,) = layers
    return finding(
        "all_in_one_group",
        _severity(size, peak.allocated_bytes),
        fqn,
        f"All parameters are in one group, so the whole model is gathered at the peak: {format_bytes(size)} "
        f"({format_frac(size / peak.allocated_bytes)} of it) of unsharded parameters and all-gather buffers.",
        "Call fully_shard on each block, then on the module that holds them: one or two are then gathered.",
        {"bytes": size},
    )


def _unsharded_together(peak: Peak, manifest: RankManifest | None) -> list[Finding]:
    """Groups unsharded at the peak: the root kept so, and others that prefetch or no resharding adds."""
    held = {row.fqn: row.bytes for row in peak.by_layer if row.category == "unsharded_parameter"}
    found = []
    for root in [fqn for fqn in held if fqn is not None and is_root(fqn)]:
        size = held.pop(root)
        if size > _NOTABLE * peak.allocated_bytes and peak.fqn != root:
            found.append(
                finding(
                    "root_kept_unsharded",
                    _severity(size, peak.allocated_bytes),
                    root,
                    f"The root group stays unsharded at the peak ({format_bytes(size)}): all that no "
                    "fully_shard call wraps by itself, usually embedding and head.",
                    "Wrap its large children with fully_shard of their own.",
                    {"bytes": size},
                )
            )
    kept = kept_gathered(manifest) & held.keys()
    total = sum(held.values())
    # One group is in use and FSDP2 gathers the next, or the last one is kept: that is as it should be.
    if (len(kept) > 1 or len(held) > 2) and total > _NOTABLE * peak.allocated_bytes:
        names = sorted(str(name) for name in held)
        change = "Reshard them after forward (reshard_after_forward=True)."
        if len(kept) < 2:
            change = "Prefetch fewer layers ahead, or make the groups smaller."
        found.append(
            finding(
                "groups_unsharded_together",
                _severity(total, peak.allocated_bytes),
                None,
                f"{len(held)} groups are unsharded at the peak ({_listed(names)}: {format_bytes(total)}): "
                f"{_why_together(len(held), sorted(kept))}.",
                change,
                {"bytes": {str(name): size for name, size in held.items()}},
            )
        )
    return found


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
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _unsharded_gradients(view: PreparedRecording, manifest: RankManifest | None) -> Finding | None:
    """Unsharded gradients that outlive their backward: the next forward begins, and they are still there."""
    rows, whole = view.allocations, int(view.totals[view.peak_order])
    kept = kept_gradients(view, view.peak_order, manifest)
    size = int(rows.size[kept].sum())
    if size <= _NOTABLE * whole:
        return None
    return finding(
        "unsharded_gradients",
        _severity(size, whole),
        None,
        f"{format_bytes(size)} of unsharded gradients at the peak live on into the next micro-batch: without "
        "gradient sync they stay for the whole model.",
        "Reduce gradients in every micro-batch (set_requires_gradient_sync(True)), which takes one more "
        "reduce-scatter per unit each, or use fewer micro-batches.",
        {"bytes": size, "groups": len(np.unique(rows.fqn.codes[kept]))},
    )


def _fp32_logits(view: PreparedRecording) -> Finding | None:
    """The loss holds a large part of the peak."""
    live, whole = view.live(view.peak_order), int(view.totals[view.peak_order])
    loss = in_loss(live, view.recording.stacks)
    size = int(live.size[loss].sum())
    if size <= _NOTABLE * whole:
        return None
    return finding(
        "logits_in_loss",
        _severity(size, whole),
        None,
        f"The cross-entropy loss holds {format_bytes(size)} at the peak, usually copies of the logits "
        "(tokens x vocabulary) and their gradient.",
        "Compute the loss in chunks, or with a fused linear cross-entropy.",
        {"bytes": size, "blocks": int(loss.sum())},
    )


def _optimizer_first_step(view: PreparedRecording) -> Finding | None:
    """The optimizer made its states inside the recording: the peak of later steps is higher."""
    rows = view.allocations
    states = rows.category.equals("optimizer_state")
    kept = states & (rows.alloc_order >= 0) & (rows.free_order == NEVER)
    replaced = int(rows.size[states & (rows.free_order != NEVER)].sum())
    grown = int(rows.size[kept].sum()) - replaced
    missing = int(rows.size[kept & (rows.alloc_order > view.peak_order)].sum()) - replaced
    if grown <= _NOTABLE * int(view.totals[view.peak_order]):
        return None
    later = (
        f" The peak came before {format_bytes(missing)} of them: later steps go that much higher."
        if missing > 0
        else ""
    )
    return finding(
        "optimizer_first_step",
        "medium" if missing > 0 else "info",
        None,
        f"The optimizer made {format_bytes(grown)} of states while recorded, as in a first step.{later}",
        "",
        {"bytes": grown, "after_peak_bytes": missing},
    )


def _held_across_streams(view: PreparedRecording) -> Finding | None:
    """Blocks that were freed but could not be reused because another stream still read them."""
    rows = view.allocations
    # A free that no stream delays is completed by the very next event.
    waited = rows.take((rows.free_order != NEVER) & (rows.release_order - 1 > rows.free_order))
    held = running_total(waited.free_order, waited.release_order, waited.size, view.recording.events)
    most, whole = int(held.max()), int(view.totals[view.peak_order])
    if most <= _NOTABLE * whole:
        return None
    return finding(
        "held_across_streams",
        _severity(most, whole),
        None,
        f"Up to {format_bytes(most)} were freed but still in use by another stream (record_stream): "
        "the allocator cannot reuse them in time.",
        "",
        {"bytes": most, "blocks": len(waited)},
    )


def _gradients_kept(view: PreparedRecording) -> Finding | None:
    """Sharded gradients that are alive while a forward runs: they were not set to None."""
    rows = view.allocations
    forward = rows.alloc_order[rows.phase.equals("forward") & (rows.alloc_order >= 0)]
    if not len(forward):
        return None
    first = int(forward.min())
    kept = rows.category.equals("sharded_gradient") & (rows.alloc_order < first) & (rows.free_order > first)
    size = int(rows.size[kept].sum())
    if size <= _NOTABLE * int(view.totals[view.peak_order]):
        return None
    return finding(
        "gradients_not_none",
        "medium",
        None,
        f"Gradients of {format_bytes(size)} live through the forward.",
        "Call zero_grad(set_to_none=True), or accept it if they accumulate over micro-batches.",
        {"bytes": size},
    )


def _fragmented(result: RankMemory) -> Finding | None:
    found = result.fragmentation
    if found is None or found.expandable_segments:
        return None
    split, reserved = found.inactive_split_bytes, found.reserved_bytes
    if split <= _NOTABLE * reserved:
        return None
    return finding(
        "fragmentation",
        _severity(split, reserved),
        None,
        f"{format_bytes(split)} ({format_frac(split / reserved)} of the reserved memory) are free parts of "
        "segments in use.",
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        {"inactive_split_bytes": split, "reserved_bytes": reserved},
    )


def _leaking(rank: int, leak: Leak) -> Finding:
    what, place = leak.op or leak.category, own_frame(leak.stack)
    by = what if place is None or what.endswith(place) else f"{what} at {place}"
    return finding(
        "leak",
        "high",
        leak.fqn,
        f"Rank {rank} grows by {format_bytes(leak.bytes_per_step)} every step: {by} leaves memory that no "
        "later step frees.",
        "Free what each step keeps: tensors in a list, or a loss with its graph (keep loss.item() instead).",
        {
            "bytes_per_step": leak.bytes_per_step,
            "steps": leak.steps,
            "category": leak.category,
            "op": leak.op,
            "place": place,
            "stack": leak.stack,
        },
    )


def _unattributed(view: PreparedRecording, peak: Peak, manifest: RankManifest | None) -> Finding | None:
    """Report a large part of the peak that neither the recording nor the manifest explains."""
    unknown = peak.categories["unattributed"]
    if unknown <= _NOTABLE * peak.allocated_bytes:
        return None
    live = view.live(view.peak_order)
    early = int(live.size[live.category.equals("unattributed") & (live.alloc_order < 0)].sum())
    change = ""
    if 2 * early < unknown:
        why = "mostly made where neither a label nor a stack tells the phase"
    elif manifest is not None and manifest.tensors_are_all:
        why = (
            "mostly from before the recording began, and no parameter, buffer, gradient or optimizer state: "
            "the training keeps it itself (outputs or losses in a list, an EMA copy, a data cache, for "
            "instance)"
        )
    elif manifest is not None and manifest.tensors:
        why = (
            "mostly from before the recording began, and neither a sharded parameter, its gradient nor "
            "optimizer state; buffers and parameters that FSDP does not shard are not in this manifest"
        )
    elif not view.recording.events:
        why = "the snapshot has no history, and no manifest names what it holds"
    else:
        why = "mostly from before the history began, and no manifest names it"
        change = "fsdp2prof record writes one of all parameters, gradients and optimizer states."
    part = format_frac(unknown / peak.allocated_bytes)
    return finding(
        "unattributed",
        "info",
        None,
        f"{format_bytes(unknown)} ({part} of the peak) are unattributed: {why}.",
        change,
        {"bytes": unknown, "before_history_bytes": early},
    )


def _truncated(result: RankMemory) -> Finding | None:
    if not result.truncated:
        return None
    return finding(
        "history_truncated",
        "info",
        None,
        "The history's ring buffer overflowed: what was allocated before its first event has no phase here.",
        "Raise max_entries.",
        {},
    )


def _severity(part: int, whole: int) -> Severity:
    return "medium" if part > _LARGE * whole else "low"
