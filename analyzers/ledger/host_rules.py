"""The host in the ledger: batches, pauses, synchronisations, dispatch, and what tracing adds."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace

from fsdp2prof.analyzers.layers import in_phase, named_layer, numbered, times
from fsdp2prof.analyzers.ledger.book import Book, Remedy, worst_layer
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.analyzers.ledger.machine import waits_for_processors
from fsdp2prof.analyzers.ledger.notes import REMOVE_ANOMALY
from fsdp2prof.analyzers.steps import added_ns
from fsdp2prof.results.finding import EvidenceValue
from fsdp2prof.units import format_ns, plural

_UNEVEN = 2
"""How many times as long as any other one rank waits for its data, from which on that rank is named."""
_NEARLY_ALL = 0.9
"""Part of all pauses from which on one rank is named for them."""
_OFTEN, _LONG_PAUSE = 0.75, 0.25
"""Part of a rank's steps in which it pauses at one place, or part of a step that one pause takes, from which
on the pause is the script's own."""

_RUNS_AUTOGRAD = re.compile(r"Backward\d*$|^backward\(\) in ")
"""Names of autograd's nodes (``MmBackward0``, FSDP2's ``RegisterPostBackwardFunctionBackward``), and a line
of the script that starts it."""


def enter_tracing(book: Book) -> None:
    """Enter what tracing added to the host's part of the steps, where unrecorded steps are shorter."""
    step = book.analysis.unrecorded_step
    mine = book.take("tracing")
    added = int(added_ns(step) * book.rank_steps)
    for cause in ("host", "sync"):
        whole = book.left_ns(cause)
        part = min(whole, added)
        if part > 0:
            mine += book.take(cause, part=(part, whole))
            added -= part
    if not mine:
        return
    cost = book.per_step(sum(one.ns for one in mine))
    slower = ""
    if (
        step is not None
        and step.slowdown is not None
        and step.traced_median_ns is not None
        and step.slowdown > 1
    ):
        slower = (
            f" A traced step takes {times(step.slowdown)} as long as one without recording "
            f"({format_ns(step.traced_median_ns)} against {format_ns(step.median_ns)})."
        )
    much = step is not None and (step.slowdown or 0) >= book.thresholds.slowdown
    book.enter(
        mine,
        id="slowed_by_tracing" if much else "tracing",
        cause="tracing",
        title="tracing itself",
        problem=f"Tracing accounts for {cost}.{slower}",
        calm=True,
        confidence="high" if step is not None else "low",
        why_sure="steps without recording are timed"
        if step is not None
        else "no step without recording is known",
    )


def enter_host(book: Book) -> None:
    """Enter what the host lost."""
    _data_loader(book)
    _compilation(book)
    _garbage(book)
    _allocation(book)
    _pauses(book)
    _syncs(book)
    _per_tensor(book)
    _dispatch(book)


def _data_loader(book: Book) -> None:
    """What steps lost for want of their batches: each rank's own waiting, and the others' for it."""
    mine = book.take("data_loader")
    if not mine:
        return
    cost = sum(one.ns for one in mine)
    own: Counter[int] = Counter({rank.rank: 0 for rank in book.analysis.ranks})
    for one in mine:
        if one.late_rank is None:
            own[one.rank] += one.ns
    steps = {rank.rank: max(1, len(rank.steps)) for rank in book.analysis.ranks}
    means = {rank: ns / steps[rank] for rank, ns in own.items()}
    slowest = max(means, key=lambda rank: means[rank])
    others = [mean for rank, mean in means.items() if rank != slowest]
    uneven = bool(others) and means[slowest] > _UNEVEN * max(others)
    if uneven:
        usual = f"{'the other' if len(others) == 1 else 'the others'} at most {format_ns(max(others))}"
        problem = (
            f"Rank {slowest} waits {format_ns(means[slowest])} a step for its data loader, {usual}; with the "
            f"others' waiting for it, that is {book.per_step(cost)}."
        )
        change = (
            f"Check what the data loader of rank {slowest} reads and from where; give it more workers "
            "(num_workers) and prefetch_factor."
        )
    else:
        problem = f"Nothing runs for {book.per_step(cost)} because the data loader has no batch ready."
        working = any(one.why == "workers" for one in mine)
        load = "Give it more workers" if working else "Load in workers"
        more = "prefetch_factor" if working else "prefetch_factor, persistent_workers"
        change = f"{load} (num_workers, {more}), and reduce the work per sample."
    book.enter(
        mine,
        id="data_loader",
        cause="data_loader",
        title="waiting for the data loader",
        problem=problem,
        remedy=Remedy(change=change, reason="all of the waiting for batches", what_if="without data_loader"),
        rank=slowest if uneven else None,
        evidence={"rank": slowest if uneven else None, "longest_ns_per_step": int(means[slowest])},
    )


def _compilation(book: Book) -> None:
    mine = book.take("compilation")
    fqn = worst_layer(mine)
    where = "" if fqn is None else f", most of it in {named_layer(fqn)}"
    book.enter(
        mine,
        id="recompilation",
        cause="compilation",
        title="compiling in the traced steps",
        problem=f"torch.compile compiles again in the traced steps: {{cost}}{where}.",
        remedy=Remedy(
            change="Find out what changes with TORCH_LOGS=recompiles, then pad inputs to a few sizes or "
            "mark the dimension dynamic (torch._dynamo.mark_dynamic, dynamic=True).",
            reason="all of the compiling",
        ),
        fqn=fqn,
        why_sure="the compiler's own ranges are recorded",
    )


def _garbage(book: Book) -> None:
    mine = book.take("garbage_collection")
    count = sum(one.count for one in mine) / book.rank_steps
    site = book.main_site(mine)
    seen = f", most of it at {site}" if site else ""
    book.enter(
        mine,
        id="garbage_collection",
        cause="garbage_collection",
        title="garbage collection",
        problem=f"Python collects garbage for {{cost}}{seen}.",
        remedy=Remedy(
            change="Call gc.freeze() once the model is built, create fewer reference cycles, and collect "
            "every few hundred steps (gc.disable(), then gc.collect()).",
            reason="all of these collections",
        ),
        why_sure="the interpreter reports each collection",
        evidence={"collections_per_step": count, "site": site},
    )


def _allocation(book: Book) -> None:
    """Calls that get memory from the device, past the caching allocator: in a step or two it only grows."""
    mine = book.take("allocation")
    if not mine:
        return
    own = [one for one in mine if one.late_rank is None]
    ranks = sorted({one.rank for one in own})
    every = len(ranks) == len(book.analysis.ranks)
    steps = book.rank_steps // len(book.analysis.ranks) * len(ranks)
    count = sum(one.count for one in own) / max(1, steps)
    whose = "The host gets" if every else f"On {numbered('rank', ranks)} the host gets"
    waiting = "" if len(own) == len(mine) else "; with the other ranks' waiting"
    book.enter(
        mine,
        id="allocator_stalls",
        cause="allocation",
        title="getting memory from the device",
        problem=f"{whose} memory from the device or gives it back {_often(count)} a step, and the device "
        f"idles meanwhile{waiting}: {{cost}}.",
        remedy=Remedy(
            change="Keep the allocator from freeing and allocating in every step: "
            "PYTORCH_ALLOC_CONF=expandable_segments:True, no empty_cache() in the step, or a lower peak "
            "(smaller batch, activation checkpointing).",
            reason="all of this idle time",
        ),
        calm=len({(one.rank, one.step) for one in own}) < _OFTEN * steps,
        rank=ranks[0] if len(ranks) == 1 and not every else None,
        why_sure="the calls are recorded",
        evidence={"calls_per_step": count},
    )


def _pauses(book: Book) -> None:
    """Long gaps in which the host launched nothing, by where it was."""
    steady = steady_pauses(book)
    chance = book.take(
        "host_pause", lambda one: one.late_rank is None and (one.site, one.fqn, one.phase) not in steady
    )
    book.put_back(replace(one, cause="host") for one in chance)
    mine = book.take("host_pause")
    own = [one for one in mine if one.late_rank is None]
    if not own:
        book.put_back(replace(one, cause="host") for one in mine)
        return
    cost = sum(one.ns for one in mine)
    places: dict[tuple[str | None, str | None, str], int] = defaultdict(int)
    for one in own:
        places[one.site, one.fqn, one.phase] += one.ns
    (site, fqn, phase), _ = max(places.items(), key=lambda item: item[1])
    count = sum(one.count for one in mine) / book.rank_steps
    where = _where(fqn, phase)
    ranks: Counter[int] = Counter()
    for one in own:
        ranks[one.rank] += one.ns
    rank, longest = ranks.most_common(1)[0]
    alone = len(book.analysis.ranks) > 1 and longest >= _NEARLY_ALL * ranks.total()
    whose = f"The host of rank {rank}" if alone else "The host"
    others = "; with the other ranks' waiting for it" if len(own) < len(mine) else ""
    place = f"{where}: Python code, or input and output"
    if site:
        place = f"at {site}" if phase == "other" else f"at {site}, {where}"
    work = f"at {site}" if site else where
    see = "" if site else " Record with --stacks to see the function."
    problem = f"{whose} runs no operator for {book.per_step(cost)}{others}, most of it {place}."
    book.enter(
        mine,
        id="straggler" if alone else "host_pause",
        cause="host_pause",
        title=f"pauses of rank {rank}'s host" if alone else "pauses of the host",
        problem=problem,
        remedy=Remedy(
            change=f"Move the work that the script does {work} out of the step, or into another "
            f"process.{see}",
            reason="all of these pauses" + (" and the waiting for them" if others else ""),
        ),
        rank=rank if alone else None,
        fqn=fqn,
        confidence="high" if site else "medium",
        why_sure="the line is recorded" if site else "no Python stack is recorded",
        evidence={"pauses_per_step": count, "phase": phase, "site": site},
    )


def steady_pauses(book: Book) -> set[tuple[str | None, str | None, str]]:
    """Return the places at which a rank pauses in most of its steps, or for long in one.

    A busy host interrupts a rank here and there; the script pauses at the same place. What a pause
    takes in one step alone counts beyond the rank's waiting for a processor there.
    """
    steps = {rank.rank: len(rank.steps) for rank in book.analysis.ranks}
    pauses: dict[tuple[str | None, str | None, str], dict[tuple[int, int], int]] = defaultdict(
        lambda: defaultdict(int)
    )
    for one in (one for one in book.left("host_pause") if one.late_rank is None):
        pauses[one.site, one.fqn, one.phase][one.rank, one.step] += one.ns
    mean_step = book.total_ns / max(1, book.rank_steps)
    waited = waits_for_processors(book.manifests)
    found = set()
    for place, spent in pauses.items():
        large = book.thresholds.medium_cost_frac * mean_step
        ranks: Counter[int] = Counter(rank for (rank, _), ns in spent.items() if ns >= large)
        often = any(count >= _OFTEN * steps[rank] and count > 1 for rank, count in ranks.items())
        autograd = place[0] is None or _RUNS_AUTOGRAD.search(place[0]) is not None
        if not book.on_device and autograd and place[2] == "backward":
            continue  # autograd runs there, not the script
        longest = max(ns - waited.get(where, 0) for where, ns in spent.items())
        if often or longest >= _LONG_PAUSE * mean_step or max(steps.values()) < 2:
            found.add(place)
    return found


def _where(fqn: str | None, phase: str) -> str:
    if phase == "other":
        return "between the optimizer and the next forward, or between forward and backward"
    return in_phase(phase) + ("" if fqn is None else f" of {named_layer(fqn)}")


def _syncs(book: Book) -> None:
    """What the device idles after the host stopped for it, with the copies that made it stop."""
    calls = book.analysis.host_syncs
    worst = max(calls, key=lambda row: row.blocked_ns, default=None)
    if book.offloads and (worst is None or worst.operator is None):
        book.put_back(
            [replace(one, cause="offload", count=0) for one in book.take("sync")]
        )  # FSDP waits for its copies
        return
    copies = [] if worst is None or worst.operator is None else book.take("offload", _blocks_its_host)
    mine = [*book.take("sync"), *copies]
    if not mine and not calls:
        return
    cost = sum(one.ns for one in mine)
    problem = f"The device idles {book.per_step(cost)} after copies that block the host."
    change, title = (
        "Copy from pinned memory with non_blocking=True.",
        "refilling the device after a blocking copy",
    )
    evidence: dict[str, EvidenceValue] = {}
    checked = any(one.why == "anomaly" for one in book.left("compute"))
    if worst is not None:
        count = sum(row.count for row in calls) / book.rank_steps
        where = "" if worst.phase == "other" else f" {in_phase(worst.phase)}"
        where += "" if worst.fqn is None else f" of {named_layer(worst.fqn)}"
        where += "" if worst.site is None else f", at {worst.site}"
        problem = (
            f"The host stops for the device {_often(count)} a step, longest in {worst.operator or worst.call}"
            f"{where}; the device waits {book.per_step(cost)} for the copies and until work arrives again."
        )
        title = "synchronizations of the host"
        change = (
            f"Move {worst.site or '.item(), .cpu(), full_tensor() and synchronize()'} out of the step, or do "
        )
        change += "this every few steps: each stops the host for the device."
        if checked:
            problem = (
                f"Anomaly detection of autograd is on: it stops the host {_often(count)} a step to check "
                f"gradients for NaN, and the device waits {book.per_step(cost)} until work arrives again."
            )
            change = REMOVE_ANOMALY
        evidence = {
            "calls_per_step": count,
            "operator": worst.operator,
            "call": worst.call,
            "phase": worst.phase,
            "site": worst.site,
        }
    book.enter(
        mine,
        id="host_sync",
        cause="sync",
        title=title,
        problem=problem,
        remedy=Remedy(change=change, reason="all of this idle time", what_if="without host_syncs"),
        fqn=None if worst is None else worst.fqn,
        evidence=evidence,
    )


def _often(count: float) -> str:
    return "once" if round(count, 2) == 1 else f"{count:,.0f} times" if count >= 10 else f"{count:.3g} times"


def _blocks_its_host(charge: Charge) -> bool:
    """Whether a copy is one of ``.item()`` or ``.cpu()``: to memory that is not pinned."""
    name = charge.op or ""
    return "DtoH" in name and "Pinned" not in name


def _per_tensor(book: Book) -> None:
    """An optimizer told to go through its parameters one by one."""
    slow = [
        one
        for manifest in book.manifests
        for one in manifest.optimizers
        if one.defaults.get("foreach") == "False" and one.defaults.get("fused", "None") in ("None", "False")
    ]
    if not slow:
        return
    mine = book.take("host", lambda one: one.phase == "optimizer")
    if not book.on_device:
        mine += book.take("compute", lambda one: one.phase == "optimizer")
    cost = sum(one.ns for one in mine)
    first = slow[0]
    problem = (
        f"{first.class_name} updates {plural(first.parameters, 'parameter')} one by one (foreach=False): "
        f"{book.per_step(cost)} in the optimizer, most of it dispatch."
    )
    book.enter(
        mine,
        id="optimizer_per_tensor",
        cause="host",
        title="optimizer, one parameter at a time",
        problem=problem,
        remedy=Remedy(
            change="Leave foreach at its default, or pass fused=True.",
            gain_ns=cost / 2,
            reason="an estimate: half of the optimizer's time",
        ),
        confidence="medium",
        why_sure="the option is recorded, the gain estimated",
        evidence={"parameters": first.parameters},
    )


def _dispatch(book: Book) -> None:
    mine = book.take("host")
    cost, fqn = sum(one.ns for one in mine), worst_layer(mine)
    if not book.on_device:
        problem = "Python and the dispatch of operators take {cost} between the operators."
        book.enter(
            mine, id="host", cause="host", title="Python and dispatch", problem=problem, fqn=fqn, calm=True
        )
        return
    known = book.analysis.unrecorded_step is not None and book.analysis.unrecorded_step.slowdown is not None
    unsure = "" if known else "; the profiler adds an unknown part of this"
    idle = f"The device is idle for {book.per_step(cost)}"
    problem = f"{idle} because the host does not launch in time{unsure}."
    change = (
        "Launch less (torch.compile, CUDA graphs, fused optimizer), or give each launch more work "
        "(larger batch)."
    )
    enough = book.frac(cost) >= book.thresholds.host_bound_frac
    book.enter(
        mine,
        id="host_bound",
        cause="host",
        title="the host launches too slowly",
        problem=problem,
        remedy=Remedy(change=change, reason="all of this idle time") if enough else None,
        fqn=fqn,
        confidence="high" if known else "low",
        why_sure="the cost of tracing is subtracted" if known else "the cost of tracing is unknown",
    )
