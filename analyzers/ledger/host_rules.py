"""The host in the ledger: batches, pauses, synchronizations, dispatch, and tracing overhead."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fsdp2prof.analyzers.layers import SITE, block_of, in_phase, named_layer, numbered, times
from fsdp2prof.analyzers.ledger.book import ALL, Book, main_layer, worst_layer
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.analyzers.ledger.machine_rules import waits_for_processors, without_free_cores
from fsdp2prof.analyzers.ledger.thresholds import severity_of, worth_telling
from fsdp2prof.analyzers.steps import added_ns, are_unlike
from fsdp2prof.backends import blocks_its_host
from fsdp2prof.by_key import grouped, summed
from fsdp2prof.manifest import OptimizerInfo
from fsdp2prof.results.finding import EvidenceValue
from fsdp2prof.units import plural

_UNEVEN, _UNEVEN_ON_CPU = 2, 4
"""How many times as long as any other one rank waits for its data, from which on that rank is named: where
ranks share the cores of a host, their loaders wait for these, too."""
_NEARLY_ALL = 0.9
"""Part of all pauses from which on one rank is named for them."""
_OFTEN, _LONG_PAUSE = 0.75, 0.25
"""Part of a rank's steps in which it pauses at one place, or part of a step that one pause takes, from which
on the pause is the script's own."""

UPDATING = "updating"
"""Why an offloaded training's device idles in the optimizer."""
LOADING = "loading"
"""Why the training's own process works for a batch."""
_OBJECTS = re.compile(r"(?:all_gather|gather|broadcast|scatter)_object(?:_list)?\(\) \(")
"""Lines that exchange Python objects."""
_OPERATOR = re.compile(r"::|(?:Function|Backward\d*)$")
"""Names of operators and of custom autograd functions, which the model runs."""
RUNS_AUTOGRAD = re.compile(r"Backward\d*$|^backward\(\) \(")
"""Names of autograd's nodes (``MmBackward0``, FSDP2's ``RegisterPostBackwardFunctionBackward``), and a line
of the script that starts it."""


def enter_tracing(book: Book) -> None:
    """Enter tracing overhead on the host, if unrecorded steps are shorter."""
    step = book.analysis.unrecorded_step
    mine = book.take("tracing")
    if book.analysis.host_runs_ahead:
        mine += book.take("host")
    added = int(added_ns(step) * book.rank_steps)
    if step is not None:
        longer = _added(book, added) if are_unlike(step) else _beyond(book, step.median_ns)
        mine += longer
        added -= sum(one.ns for one in longer)
    whole = book.left_ns("sync")
    part = min(whole, added)
    if part > 0:
        mine += book.take("sync", part=(part, whole))
    slower = step is not None and step.traced_median_ns is not None and (step.slowdown or 0) > 1
    much = step is not None and (step.slowdown or 0) >= book.thresholds.slowdown
    book.enter(
        mine,
        "slowed_by_tracing" if much else "tracing",
        known=step is not None or book.analysis.host_runs_ahead,
        slowdown=times(step.slowdown or 0) if step is not None and slower else None,
        traced=None if step is None else step.traced_median_ns,
        median=None if step is None else step.median_ns,
    )


def _added(book: Book, added: int) -> list[Charge]:
    """Subtract tracing overhead from the time that the host launches too slowly, in equal parts over all
    steps."""
    whole = book.left_ns("host")
    return book.take("host", part=(min(whole, added), max(1, whole)))


def _beyond(book: Book, median_ns: float) -> list[Charge]:
    """Take, step by step, the time the host launches too slowly that an unrecorded step has no room for."""
    idle = summed(((one.rank, one.step), one.ns) for one in book.left("host"))
    longer = {
        (rank.rank, step.step): max(0, int(step.duration_ns - median_ns))
        for rank in book.analysis.ranks
        for step in rank.steps
    }

    def part(charge: Charge) -> tuple[int, int]:
        whole = idle[charge.rank, charge.step]
        return min(whole, longer.get((charge.rank, charge.step), 0)), max(1, whole)

    return book.take("host", lambda one: part(one)[0] > 0, part)


def enter_new_iterators(book: Book) -> None:
    """Enter data loaders whose iterator is often created again: workers start, and no batch is prefetched.

    Often means in most steps; or in at least two, if nearly all waiting for batches is in these.
    """
    drawn = [one for one in book.left("data_loader") if one.why == "rebuilt"]
    made = {(one.rank, one.step) for one in drawn}
    steps = {step for _, step in made}
    waited = sum(one.ns for one in book.left("data_loader") if (one.rank, one.step) in made)
    often = len(made) >= _OFTEN * book.rank_steps
    if not often and (len(steps) < 2 or waited < _NEARLY_ALL * book.left_ns("data_loader")):
        return
    sites = Counter(one.site for one in drawn if one.site)
    site = sites.most_common(1)[0][0] if sites else None
    mine = book.take("data_loader")
    for cause in ("host_pause", "host", "compute", "uneven_ranks"):
        mine += book.take(
            cause, lambda one: one.phase == "other" and one.site is not None and one.site == site
        )
    when = "every step" if often else f"{len(steps)} of {plural(len(book.traced), 'traced step')}"
    book.enter(mine, "data_loader/new_iterator", {"site": site}, when=when)


def enter_host(book: Book) -> None:
    """Enter the time that the host lost."""
    _data_loader(book)
    _compilation(book)
    _garbage(book)
    _allocation(book)
    _pauses(book)
    _syncs(book)
    _dispatch(book)


def enter_offloaded_update(book: Book) -> None:
    """Count the device's idle time in an optimizer that updates parameters on the CPU as CPU offload.

    Tracing does not slow that work down: it is a few long operators.
    """
    if book.on_device and book.offloads:
        for cause in ("sync", "host_pause"):
            mine = book.take(cause, lambda one: _updates(one) and one.late_rank is None)
            book.put_back(replace(one, cause="offload", count=0, why=UPDATING) for one in mine)


def _updates(charge: Charge) -> bool:
    """Whether the optimizer ran on the host, or the clipping of gradients before it."""
    return charge.phase == "optimizer" or charge.why == "before_update"


def _data_loader(book: Book) -> None:
    """Enter the waiting for batches: each rank's own, and that of the others for it."""
    mine = book.take("data_loader")
    for cause in ("compute", "host", "host_pause"):
        mine += book.take(cause, lambda one: one.why == LOADING)
    if not mine:
        return
    own: Counter[int] = Counter({rank.rank: 0 for rank in book.analysis.ranks})
    for one in mine:
        if one.late_rank is None:
            own[one.rank] += one.ns
    steps = {rank.rank: max(1, len(rank.steps)) for rank in book.analysis.ranks}
    means = {rank: ns / steps[rank] for rank, ns in own.items()}
    slowest = max(means, key=lambda rank: means[rank])
    others = [mean for rank, mean in means.items() if rank != slowest]
    times_others = _UNEVEN if book.on_device else _UNEVEN_ON_CPU
    uneven = bool(others) and means[slowest] > times_others * max(others)
    made = [one for one in mine if one.why == LOADING]
    key = "data_loader/workers" if any(one.why == "workers" for one in mine) else "data_loader"
    key = "data_loader/made" if made and key == "data_loader" else key
    named = slowest if uneven else None
    book.enter(
        mine,
        "data_loader/one_rank" if uneven else key,
        {"rank": named, "longest_ns_per_step": int(means[slowest]), "site": book.main_site(made)},
        rank=named,
        longest=means[slowest],
        others="the other" if len(others) == 1 else "the others",
        most=max(others, default=0),
        cores=None if book.on_device else without_free_cores(book.manifests),
    )


def _compilation(book: Book) -> None:
    graphs = book.take("compilation", lambda one: one.why == "graphs")
    mine = book.take("compilation")
    first = book.traced == {0}  # perhaps the training's, in which everything is compiled
    alone, layer = _alone(book, graphs), worst_layer(graphs)
    book.enter(graphs, "recompilation/graphs", rank=alone, fqn=layer, calm=first)
    book.enter(mine, "recompilation", rank=_alone(book, mine), fqn=worst_layer(mine), calm=first)


def _alone(book: Book, mine: Sequence[Charge]) -> int | None:
    """Return the one rank of several whose own time some charges are."""
    ranks = {one.rank for one in mine if one.late_rank is None}
    return ranks.pop() if len(ranks) == 1 < len(book.analysis.ranks) else None


def _garbage(book: Book) -> None:
    mine = book.take("garbage_collection")
    count = sum(one.count for one in mine) / book.rank_steps
    book.enter(
        mine,
        "garbage_collection",
        {"collections_per_step": count, "site": book.main_site(mine)},
        calm=book.is_seen_once(mine),
    )


def _allocation(book: Book) -> None:
    """Enter calls that allocate device memory outside the caching allocator; in a few steps it only grows.

    One step is not enough to tell: a first step allocates all of its memory.
    """
    mine = book.take("allocation")
    if not mine:
        return
    own = [one for one in mine if one.late_rank is None]
    ranks = sorted({one.rank for one in own})
    every = len(ranks) == len(book.analysis.ranks)
    steps = book.rank_steps // len(book.analysis.ranks) * len(ranks)
    count = sum(one.count for one in own) / max(1, steps)
    book.enter(
        mine,
        "allocator_stalls",
        {"calls_per_step": count},
        rank=ranks[0] if len(ranks) == 1 and not every else None,
        calm=steps <= len(ranks) or len({(one.rank, one.step) for one in own}) < _OFTEN * steps,
        whose="The host allocates or frees"
        if every
        else f"On {numbered('rank', ranks)}, the host allocates or frees",
        often=_often(count),
        with_others="" if len(own) == len(mine) else ", including the other ranks' waiting",
    )


def _pauses(book: Book) -> None:
    """Enter long gaps in which the host launched nothing, by place."""
    _give_to_optimizer(book)
    steady = steady_pauses(book)
    chance = book.take("host_pause", lambda one: one.late_rank is None and pausing_at(one) not in steady)
    book.put_back(replace(one, cause="host") for one in chance)
    mine = book.take("host_pause")
    own = [one for one in mine if one.late_rank is None]
    if not own:
        book.put_back(replace(one, cause="host") for one in mine)
        return
    places = grouped((pausing_at(one), one) for one in own)
    most = max(places.values(), key=lambda those: sum(one.ns for one in those))
    site, phase = book.main_site(most), most[0].phase
    layers = {one.fqn for one in most}
    fqn = layers.pop() if len(layers) == 1 else None
    count = sum(one.count for one in mine) / book.rank_steps
    where = _where(fqn, phase)
    ranks = summed((one.rank, one.ns) for one in own)
    rank, longest = ranks.most_common(1)[0]
    alone = len(book.analysis.ranks) > 1 and longest >= _NEARLY_ALL * ranks.total()
    waited = len(own) < len(mine)
    place, work = f"{where}: Python code or I/O", where
    key, in_script = "straggler/pauses" if alone else "host_pause", site is not None and SITE.fullmatch(site)
    if site:
        work = f"at {site}" if in_script else f"in `{site}`"
        place = work if phase == "other" else f"{work}, {where}"
    if site and _OBJECTS.match(site) and not alone:
        key = "host_pause/objects"
    elif site and _OPERATOR.search(site) and not in_script:
        key = "host_pause/operator"
    elif not in_script and book.traced == {0}:
        key = "host_pause/first_step"
    book.enter(
        mine,
        key,
        {"pauses_per_step": count, "phase": phase, "site": site},
        rank=rank if alone else None,
        fqn=fqn,
        known=in_script,
        with_others=", including the other ranks' waiting for it" if waited else "",
        and_waiting=" and the waiting for them" if waited else "",
        place=place,
        work=work,
        see="" if in_script else " Record with --stacks to see the function.",
    )


def _give_to_optimizer(book: Book) -> None:
    """Count pauses of torch's own optimizer as dispatch: no function of the script was seen there alone.

    The function that calls ``step()`` runs elsewhere, too. Where no line is recorded at all, the script may
    have an optimizer of its own.
    """
    seen = [
        one for cause in ("host", "host_pause") for one in book.left(cause) if SITE.fullmatch(one.site or "")
    ]
    if not seen or not book.on_device:
        return
    elsewhere = {_function(one) for one in seen if one.phase != "optimizer"}
    mine = book.take(
        "host_pause",
        lambda one: (
            one.phase == "optimizer" and one.late_rank is None and _function(one) in {None, *elsewhere}
        ),
    )
    book.put_back(replace(one, cause="host", site=None) for one in mine)


def _function(one: Charge) -> str | None:
    """Return file and function of a charge's line; None of another place or a script's outermost line."""
    line = SITE.fullmatch(one.site or "")
    return None if line is None or line["function"] is None else line["file"] + line["function"]


def pausing_at(one: Charge) -> tuple[str | None, str | None, str]:
    """Name the place of a pause: the function of the script with its file, in whichever layers it is called.

    Without a line of the script it is the operator, if any, and the layer.
    """
    function = _function(one)
    return (one.site, one.fqn, one.phase) if function is None else (function, None, one.phase)


def steady_pauses(book: Book) -> set[tuple[str | None, str | None, str]]:
    """Return the places at which a rank pauses in most of its steps, or for long in one.

    A busy host interrupts a rank at varying places; the script pauses at the same place. A pause in only
    one step counts as far as it exceeds the rank's wait for a processor there.
    """
    steps = {rank.rank: len(rank.steps) for rank in book.analysis.ranks}
    pauses: dict[tuple[str | None, str | None, str], dict[tuple[int, int], int]] = defaultdict(
        lambda: defaultdict(int)
    )
    for one in (one for one in book.left("host_pause") if one.late_rank is None):
        pauses[pausing_at(one)][one.rank, one.step] += one.ns
    mean_step = book.total_ns / max(1, book.rank_steps)
    waited = waits_for_processors(book.manifests)
    large = book.thresholds.medium_cost_frac * mean_step * (1 - book.frac(book.starved_ns))
    found = set()
    for place, spent in pauses.items():
        ranks: Counter[int] = Counter(rank for (rank, _), ns in spent.items() if ns >= large)
        often = any(count >= _OFTEN * steps[rank] and count > 1 for rank, count in ranks.items())
        autograd = place[0] is None or RUNS_AUTOGRAD.search(place[0]) is not None
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


_COPIES = ("aten::copy_", "aten::_to_copy", "aten::to")
"""Operators whose copies block the host where its memory is not pinned."""


def _syncs(book: Book) -> None:
    """Enter the device's idle time after the host waited for it, with the copies that made it wait."""
    calls = book.analysis.host_syncs
    worst = max(calls, key=lambda row: row.blocked_ns, default=None)
    if book.offloads and (worst is None or worst.operator is None):
        book.put_back(
            [replace(one, cause="offload", count=0) for one in book.take("sync")]
        )  # FSDP waits for its copies
        return
    copies = (
        []
        if worst is None or worst.operator is None
        else book.take("offload", lambda one: blocks_its_host(one.op or ""))
    )
    mine = [*book.take("sync"), *copies]
    key = "host_sync"
    said: dict[str, Any] = {}
    evidence: dict[str, EvidenceValue] = {}
    if worst is not None:
        count = sum(row.count for row in calls) / book.rank_steps
        where = "" if worst.phase == "other" else f" {in_phase(worst.phase)}"
        where += "" if worst.fqn is None else f" of {named_layer(worst.fqn)}"
        where += "" if worst.site is None else f", at {worst.site}"
        checked = any(one.why == "anomaly" for one in book.left("compute"))
        copied = worst.site is None and worst.operator in _COPIES
        key = "host_sync/anomaly" if checked else "host_sync/copies" if copied else "host_sync/calls"
        evidence = {
            "calls_per_step": count,
            "operator": worst.operator,
            "call": worst.call,
            "phase": worst.phase,
            "site": worst.site,
        }
        said = {
            "often": _often(count),
            "longest": worst.operator or worst.call,
            "where": where,
            "calls": worst.site or ".item(), .cpu(), full_tensor() and synchronize()",
        }
    book.enter(mine, key, evidence, fqn=None if worst is None else worst.fqn, **said)


def _often(count: float) -> str:
    """Say how many times: steps may differ."""
    if round(count, 2) == 1:
        return "once"
    times = f"{count:,.0f} times" if count >= 10 else f"{count:.3g} times"
    return times if round(count, 2) == round(count) else f"on average {times}"


_ON_HOST, _ON_DEVICE = 3 / 4, 1 / 2
"""Parts of the host's work and of compute that operators on lists of tensors save: the host still unwraps
each DTensor, and compute reads and writes as much."""
_OPERATORS_EACH = 3
"""Operators for each parameter, from which on an optimizer of the script's updates them one by one."""


def enter_optimizer(book: Book) -> None:
    """Enter an optimizer that is set, or written, to update its parameters one by one.

    Tracing overhead is subtracted from its host time.
    """
    issued = sum(one.count for one in book.left("compute") if one.why == "one_by_one") / book.rank_steps
    optimizers = [one for manifest in book.manifests for one in manifest.optimizers]
    slow = [one for one in optimizers if _one_by_one(one, issued) or _a_group_each(book, one)]
    if not slow:
        return
    on_host = book.left_ns("host")
    added = min(on_host, int(added_ns(book.analysis.unrecorded_step) * book.rank_steps))
    mine = book.take("host", lambda one: one.phase == "optimizer", (on_host - added, max(1, on_host)))
    mine += book.take("queued" if book.on_device else "compute", lambda one: one.phase == "optimizer")
    key = "optimizer_per_tensor" if "foreach" in slow[0].defaults else "optimizer_per_tensor/own"
    book.enter(
        mine,
        "optimizer_per_tensor/groups" if _a_group_each(book, slow[0]) else key,
        {"parameters": slow[0].parameters, "groups": slow[0].param_groups},
        gain_ns=sum((_ON_HOST if one.cause == "host" else _ON_DEVICE) * one.ns for one in mine),
        optimizer=slow[0].class_name,
        operators=issued,
    )


def _one_by_one(optimizer: OptimizerInfo, operators: float) -> bool:
    """Whether an optimizer updates its parameters one by one unnecessarily; torch's own optimizers report
    it."""
    if "foreach" in optimizer.defaults:
        fused = optimizer.defaults.get("fused", "None") not in ("None", "False")
        return optimizer.defaults["foreach"] == "False" and not fused
    return optimizer.class_name != "LBFGS" and 0 < _OPERATORS_EACH * optimizer.parameters <= operators


def _a_group_each(book: Book, optimizer: OptimizerInfo) -> bool:
    """Whether an optimizer that updates a group at once has groups of hardly more than one parameter."""
    set_to = {optimizer.defaults.get("foreach"), optimizer.defaults.get("fused")}
    at_once = "True" in set_to or (book.on_device and set_to == {"None"})
    groups = optimizer.param_groups
    return at_once and groups >= _MANY_GROUPS and optimizer.parameters < _IN_A_GROUP * groups


_MANY_GROUPS, _IN_A_GROUP = 16, 2
"""Groups of fewer parameters, from which on an optimizer updates them nearly one by one."""
_FINE_PER_BLOCK = 3
"""FSDP units in most blocks from which on a host that falls behind has too many of them."""


def _units(book: Book) -> None:
    """Enter FSDP's own work on a host that falls behind, where blocks consist of several units."""
    manifest = next((one for one in book.manifests if one.param_groups), None)
    units = {group.fqn for group in manifest.param_groups if group.fqn} if manifest is not None else set()
    blocks = Counter(map(block_of, units))
    fine = {block: count for block, count in blocks.items() if count >= _FINE_PER_BLOCK}
    mine = book.take(
        "host", lambda one: one.why == "fsdp" and one.fqn is not None and block_of(one.fqn) in fine
    )
    cost, count = sum(one.ns for one in mine), sum(fine.values())
    gain = cost * (count - len(fine)) / max(1, count)
    if worth_telling(severity_of(book.frac(gain), book.thresholds, book.on_device)):
        book.enter(
            mine,
            "wrapping_too_fine/host",
            {"units": count, "blocks": len(fine)},
            gain_ns=gain,
            each=count / max(1, len(fine)),
        )
    else:
        book.put_back(mine)


def _dispatch(book: Book) -> None:
    known = book.analysis.unrecorded_step is not None and book.analysis.unrecorded_step.slowdown is not None
    enough = book.frac(sum(one.ns for one in book.left("host"))) >= book.thresholds.host_bound_frac
    if enough and book.on_device:
        _units(book)
    mine = book.take("host")
    batches = min((one.micro_batches or 1 for one in book.manifests), default=1)
    compiled = book.take("compute", lambda one: one.why == "compiled")
    key = "host_bound/micro_batches" if batches > 1 else "host_bound/compiled" if compiled else "host_bound"
    book.enter(
        mine,
        key if book.on_device else "host",
        {"micro_batches": batches} if batches > 1 else None,
        fqn=main_layer(mine),
        remedy=enough,
        gain_ns=ALL if batches == 1 else sum(one.ns for one in mine) * (batches - 1) / batches,
        known=known or not book.on_device,
        frees_waits=True,
        unsure_part="" if known else "; the profiler causes an unknown part of this",
    )
