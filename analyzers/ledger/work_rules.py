"""Work in the ledger beside training's own: evaluation, copies, recomputation, and what remains."""

from __future__ import annotations

from collections import Counter

from fsdp2prof.analyzers.layers import named_layer
from fsdp2prof.analyzers.ledger.book import Book, Remedy, by_layer, worst_layer
from fsdp2prof.units import format_bytes, plural

_GIGA = 1e9
_GENERATING = (
    "Keep the model gathered while it generates (set_reshard_after_forward(False)), or generate with an "
    "inference engine."
)


def enter_work(book: Book) -> None:
    """Enter what ran beside the training's own work, and all that no rule took."""
    _evaluation(book)
    _offload(book)
    _recompute(book)
    _copies(book)
    _rest(book)


def _evaluation(book: Book) -> None:
    mine = book.take("evaluation")
    cost = sum(one.ns for one in mine)
    if not cost:
        return
    forwards = sum(one.count for one in mine if one.op is None)
    windows = {(one.rank, one.step) for one in mine if one.op is None and one.count}
    steps = {step for _, step in windows}
    traced = {one.step for rank in book.analysis.ranks for one in rank.steps}
    lines: Counter[str] = Counter()
    for one in mine:
        lines[one.site or ""] += one.count if one.op is None else 0
    site = max(filter(None, lines), key=lambda line: lines[line], default=None)
    each = forwards / max(1, len(windows))
    often = "every step" if steps == traced else f"{len(steps)} of {plural(len(traced), 'traced step')}"
    called = f", called at {site}" if site else " (evaluation, generation, or an output that is not used)"
    problem = (
        f"{each:.3g} {'forward runs' if round(each, 2) == 1 else 'forwards run'} without a backward in "
        f"{often}"
        f"{called}: {book.per_step(cost)}, with {'its' if round(each, 2) == 1 else 'their'} all-gathers."
    )
    book.enter(
        mine,
        id="forward_without_backward",
        cause="evaluation",
        title="forwards without backward",
        problem=problem,
        remedy=Remedy(
            change=_GENERATING if site and "generat" in site else _evaluate_less(site),
            reason="all of their time",
        ),
        calm=bool(steps) and steps <= _without_some_model(book),
        why_sure="forwards and backwards are counted by their labels",
        evidence={"forwards_per_step": each, "steps": len(steps), "site": site},
    )


def _without_some_model(book: Book) -> set[int]:
    """Return the steps that reduce no gradient of a root which others reduce: models updated in turns.

    A model may well run forward there for the sake of another: a generator for its discriminator.
    """
    reduced: dict[int, set[str]] = {step.step: set() for rank in book.analysis.ranks for step in rank.steps}
    for row in book.rows("reduce_scatter"):
        root, of_several, _ = (row.fqn or "").partition(":")
        if of_several and row.count:
            reduced.setdefault(row.step, set()).add(root)
    roots = set().union(*reduced.values())
    return {step for step, some in reduced.items() if some and some != roots}


def _evaluate_less(site: str | None) -> str:
    return (
        f"{f'Run the forward at {site}' if site else 'Evaluate'} every few hundred steps if it only measures "
        "(evaluation, metrics), or remove it if its output is not used. If the training needs it (rollouts, "
        "scores), keep the model gathered over several such forwards (set_reshard_after_forward(False))."
    )


def _offload(book: Book) -> None:
    """Copies between host and device that nothing hides: CPU offload, or the training's own."""
    mine = book.take("offload")
    if not mine:
        return
    cost = sum(one.ns for one in mine)
    size, count = sum(one.bytes for one in mine), sum(one.count for one in mine)
    offloaded = book.offloads
    pinned = all(group.offload_pin_memory for group in book.groups if group.offload)
    layers = [(fqn, ns) for fqn, ns in by_layer(mine) if fqn is not None]
    worst = layers[0][0] if layers else None
    copying = sum(one.ns for one in mine if one.op is not None)
    speed = f" at {size / copying:.1f} GB/s" if size and copying else ""
    amount = (
        f"{format_bytes(size // book.rank_steps)}{speed}" if size else f"{count / book.rank_steps:.3g} copies"
    )
    whose = f", most for {named_layer(worst)} ({book.per_step(layers[0][1])})" if layers else ""
    what = (
        "Parameters and gradients cross the host's link (CPU offload)"
        if offloaded
        else "Copies between host and device"
    )
    problem = f"{what} {'' if offloaded else 'are exposed '}for {book.per_step(cost)}: {amount}{whose}."
    if not offloaded:
        change = "Copy from pinned memory with non_blocking=True, ahead of need."
    elif not pinned:
        change = (
            "Pin the offloaded parameters (CPUOffloadPolicy(pin_memory=True)), or keep them on the device."
        )
    else:
        change = (
            "Keep parameters on the device (no CPUOffloadPolicy) if they fit, shard over more ranks, or do "
            "more work per copy (larger batch, gradient accumulation)."
        )
    book.enter(
        mine,
        id="cpu_offload" if offloaded else "host_copies",
        cause="offload",
        title="copies between host and device",
        problem=problem,
        remedy=Remedy(change=change, reason="all exposed copies"),
        fqn=worst,
        evidence={
            "bytes_per_step": size // book.rank_steps,
            "bytes_per_s": size * _GIGA / copying if copying else None,
            "copies_per_step": count / book.rank_steps,
        },
    )


def _recompute(book: Book) -> None:
    book.enter(
        book.take("recompute"),
        id="recomputation",
        cause="recompute",
        title="recomputed forwards",
        problem="Activation checkpointing runs forwards again in backward: {cost}.",
    )


def _copies(book: Book) -> None:
    """FSDP's copies between buffers and parameters: units that stay gathered save those of backward."""
    mine = book.take("fsdp_copy")
    cost = sum(one.ns for one in mine)
    again: dict[str, int] = {}
    for row in book.rows("all_gather"):
        if row.phase == "backward" and row.count and row.fqn is not None:
            again.setdefault(row.fqn, (row.payload_bytes or 0) // row.count)
    saved = sum(one.ns for one in mine if one.phase == "forward" and one.fqn in again)
    remedy = Remedy(
        change="Keep units gathered between forward and backward (reshard_after_forward=False) if memory "
        "allows, or do more work per gathered parameter (larger batch).",
        gain_ns=saved,
        reason="the copies of forward, which backward repeats",
        memory_bytes=sum(again.values()) or None,
    )
    book.enter(
        mine,
        id="fsdp_copies",
        cause="fsdp_copy",
        title="FSDP copies",
        problem="FSDP's copies and casts for its buffers take {cost}.",
        remedy=remedy if book.on_device and book.frac(cost) >= book.thresholds.high_cost_frac else None,
        fqn=worst_layer(mine),
    )


def _rest(book: Book) -> None:
    """Enter launch latency, useful compute, and what nothing explains."""
    worded = {
        "queued": (
            "launch_latency",
            "launched, not yet started",
            "Work that is launched waits {cost} to start.",
        ),
        "unknown": (
            "unknown_idle",
            "idle, cause unknown",
            "Nothing runs for {cost}, and no launch in the file tells why.",
        ),
        "compute": ("compute", "compute", "Useful work takes {cost}."),
    }
    for cause, (named, title, problem) in worded.items():
        mine = book.take(cause)
        book.enter(
            mine, id=named, cause=cause, title=title, problem=problem, fqn=worst_layer(mine), calm=True
        )
