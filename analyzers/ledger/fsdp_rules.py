"""FSDP's collectives in the ledger: those that the set-up does not explain, and why they came late."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

from fsdp2prof.analyzers.layers import named_layer
from fsdp2prof.analyzers.ledger.book import Book, Remedy, by_layer, worst_layer
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.analyzers.ledger.unit_rules import enter_setup, is_kind
from fsdp2prof.results.communication import GroupRow
from fsdp2prof.vocabulary import op_label


def enter_fsdp(book: Book) -> None:
    """Enter all exposed communication of layers."""
    _behind_syncs(book)
    enter_setup(book)
    if book.on_device:
        _all_reduces(book)
        _late(book)
    _in_line(book, book.take("communication"))


def _behind_syncs(book: Book) -> None:
    """Charge collectives that were launched late to the calls that stopped the host in their phase before."""
    blocked: Counter[str] = Counter()
    for row in book.analysis.host_syncs:
        if row.phase in ("forward", "backward"):
            blocked[row.phase] += row.blocked_ns
    for phase, ns in blocked.items():
        mine = book.take("communication", partial(_launched_late, phase))
        behind = sum(one.ns for one in mine) <= ns
        book.put_back(replace(one, cause="sync") if behind else one for one in mine)


def _launched_late(phase: str, charge: Charge) -> bool:
    return charge.why == "launch" and charge.phase == phase


def _all_reduces(book: Book) -> None:
    mine = book.take("communication", is_kind("all_reduce"))
    book.enter(
        mine,
        id="all_reduce_exposed",
        cause="communication",
        title="all-reduce between replicas",
        problem="The all-reduce between HSDP replicas is exposed for {cost}.",
        remedy=Remedy(
            change="Use fewer replicas (a larger shard dimension), reduce in a smaller dtype, or "
            "accumulate gradients with set_requires_all_reduce(False) on all but the last micro-batch.",
            reason="all of its exposed time",
        ),
        fqn=worst_layer(mine),
    )


# Why the others came late.


@dataclass(frozen=True, slots=True)
class _Lateness:
    """How one cause of stalls is worded."""

    name: str
    problem: str
    change: str
    what_if: str | None = None


_PREFETCH = "Prefetch explicitly (set_modules_to_forward_prefetch, set_modules_to_backward_prefetch)."
_OWN_COMMUNICATOR = (
    "Give reductions a communicator of their own: set_separate_reduce_scatter_group() (torch 2.13)."
)
_SLOW_OR_LATE = _Lateness(
    "slow_transfer_or_late_peer",
    "take longer than the median of their size, because of slow links or of a rank that comes late",
    "",
)
_LINKS = "Check the links of the ranks involved, and traffic that shares them."
_LATENESS: dict[tuple[str, str, str], _Lateness] = {
    ("all_gather", "any", "launch"): _Lateness(
        "all_gather_launched_late",
        "are launched too late to be there when their layer needs them",
        "Prefetch further ahead (set_modules_to_forward_prefetch, set_modules_to_backward_prefetch) and "
        "keep host work and synchronisation out of the way.",
        "prefetch",
    ),
    ("all_gather", "forward", "communicator"): _Lateness(
        "all_gathers_back_to_back",
        "follow one another without a pause: gathering a layer takes longer than computing one",
        "Do more work per gathered parameter (larger batch), gather in a smaller dtype, or shard over "
        "fewer ranks.",
    ),
    ("all_gather", "backward", "communicator"): _Lateness(
        "all_gather_queued",
        "are launched in time but queue behind other collectives of their process group, which they share "
        "with reduce-scatters",
        _OWN_COMMUNICATOR,
        "separate_reduce_scatter_group=yes",
    ),
    ("all_gather", "any", "stream"): _Lateness(
        "all_gather_behind_stream",
        "are launched in time but wait for earlier work on the streams they use: the previous layer's "
        "copy-out, or all compute before them with unshard_async_op",
        _PREFETCH,
        "prefetch",
    ),
    ("all_gather", "any", "transfer"): _Lateness(
        "slow_transfer", "take longer than the median of their size", _LINKS
    ),
    ("all_gather", "any", "transfer_or_peer"): _SLOW_OR_LATE,
    ("reduce_scatter", "any", "transfer_or_peer"): _SLOW_OR_LATE,
    ("reduce_scatter", "any", "communicator"): _Lateness(
        "reduce_scatter_queued",
        "queue behind other collectives of their process group, which they share with all-gathers",
        _OWN_COMMUNICATOR,
        "separate_reduce_scatter_group=yes",
    ),
    ("reduce_scatter", "any", "transfer"): _Lateness(
        "slow_transfer", "take longer than the median of their size", _LINKS
    ),
    ("reduce_scatter", "any", "launch"): _Lateness(
        "reduce_scatter_too_long",
        "outlast the backward of the next layer, which has to wait for their buffer",
        "Let more of them be in flight with set_reduce_scatter_max_input_buffers() (torch 2.13), at the "
        "cost of their memory, or reduce in a smaller dtype.",
    ),
}


def _late(book: Book) -> None:
    """Enter stalls by operation, phase and cause."""
    compute = book.left_ns("compute") + sum(one.total_ns for one in book.entries if one.cause == "compute")
    waiting = sum(book.analysis.cross_rank.wait_ns.values())
    total = sum(rank.communication.total_ns for rank in book.analysis.ranks) - waiting
    if total > compute:
        _bound(book, total, compute)
    ends = _first_and_last(book)
    _ends(book, ends)
    shared = {row.process_group for row in book.rows("all_gather")} & {
        row.process_group for row in book.rows("reduce_scatter")
    }
    for named in dict.fromkeys(lateness.name for lateness in _LATENESS.values()):
        mine = book.take("communication", lambda one, named=named: _name_of(one, shared) == named)  # type: ignore[misc]
        if mine:
            _enter_late(book, mine)


def _lateness(charge: Charge) -> _Lateness | None:
    op, cause = charge.op or "", charge.why or ""
    return _LATENESS.get((op, charge.phase, cause), _LATENESS.get((op, "any", cause)))


def _name_of(charge: Charge, shared: set[str | None]) -> str | None:
    """Name the entry that an exposed collective belongs to; both kinds may share a communicator."""
    lateness = _lateness(charge)
    if lateness is None or (lateness.change == _OWN_COMMUNICATOR and charge.group not in shared):
        return None
    return lateness.name


def _enter_late(book: Book, mine: list[Charge]) -> None:
    most_of = max(mine, key=lambda one: one.ns)
    lateness, op, cause = _lateness(most_of), most_of.op or "", most_of.why or ""
    assert lateness is not None
    phases = sorted({one.phase for one in mine}, reverse=True)
    phase = " and ".join(phases)
    layers = by_layer(mine)
    cost = sum(ns for _, ns in layers)
    worst, most = layers[0]
    many = len(layers) > 1
    whose = f"{len(layers)} layers" if many else named_layer(worst)
    detail = f", most for {named_layer(worst)} ({book.per_step(most)})" if many else ""
    known = cause in ("launch", "stream", "peer") or book.waits_known
    missing = "" if known else f" {book.missing_traces}"
    problem = (
        f"{op_label(op).capitalize()}s of {whose} in {phase} {lateness.problem}: the compute stream waits "
        f"{book.per_step(cost)}{detail}.{missing}"
    )
    what_if = lateness.what_if
    if what_if == "prefetch":
        what_if = f"{phases[0]}_prefetch" if len(phases) == 1 else "prefetch"
    remedy = None
    if lateness.change:
        hideable = lateness.change.startswith("Prefetch")
        remedy = Remedy(
            change=lateness.change,
            gain_ns=book.hideable_ns(mine) if hideable else cost,
            reason="compute of the same phase can hide no more" if hideable else "all of the time waited",
            what_if=what_if,
        )
    book.enter(
        mine,
        id=lateness.name,
        cause="communication",
        title=f"{op_label(op)}s in {phase}: {lateness.name.removeprefix(op).replace('_', ' ').strip()}",
        problem=problem,
        remedy=remedy,
        fqn=worst,
        confidence="high" if known else "low",
        why_sure="labels, launches and waits are recorded" if known else "ranks are missing",
        evidence={
            "op": op,
            "phase": phase,
            "layers": {layer or "": late // book.rank_steps for layer, late in layers[:5]},
        },
    )


def _bound(book: Book, total: int, compute: int) -> None:
    """More communication than compute: no schedule can hide it all."""
    unknown = book.analysis.cross_rank.waits_unknown_ns
    whole = book.left_ns("communication")
    too_much = whole if total - unknown <= compute else min(whole, total - compute)
    mine = book.take("communication", part=(too_much, whole)) if whole else []
    long = (
        f"Communication takes longer than compute ({book.per_step(total)} against {book.per_step(compute)})"
    )
    amounts = {"communication_ns": total, "compute_ns": compute}
    if total - unknown <= compute:
        problem = f"{long}, but the share of waiting for other ranks is unknown. {book.missing_traces}"
        book.enter(
            mine,
            id="waiting_or_transfer",
            cause="communication",
            title="communication, or waiting for other ranks",
            problem=problem,
            calm=True,
            confidence="low",
            why_sure="ranks are missing",
            evidence={**amounts, "waits_unknown_ns": unknown},
        )
        return
    book.enter(
        mine,
        id="communication_bound",
        cause="communication",
        title="more communication than compute",
        problem=f"{long}: no schedule can hide {{cost}} of it.",
        remedy=Remedy(
            change="Do more work per gathered parameter (larger batch, gradient accumulation without sync) "
            "or send less (smaller dtypes, shard over fewer ranks with HSDP).",
            reason="what communication takes beyond compute",
        ),
        fqn=worst_layer(mine),
        calm=any(one.told and one.cause == "communication" for one in book.entries),
        evidence={**amounts},
    )


def _ends(book: Book, ends: set[tuple[int, int, str, str, str | None]]) -> None:
    """The first all-gather and the last reduce-scatter of each step: nothing runs that could hide them."""
    mine = book.take(
        "communication", lambda one: (one.rank, one.step, one.op or "", one.phase, one.fqn) in ends
    )
    book.enter(
        mine,
        id="first_and_last_collective",
        cause="communication",
        title="the first all-gather and the last reduce-scatter",
        problem="The first all-gather and the last reduce-scatter of a step have nothing to hide behind: "
        "{cost}.",
        fqn=worst_layer(mine),
        calm=True,
    )


def _first_and_last(book: Book) -> set[tuple[int, int, str, str, str | None]]:
    first: dict[tuple[int, int], GroupRow] = {}
    last: dict[tuple[int, int], GroupRow] = {}
    for row in book.rows("all_gather"):
        first.setdefault((row.rank, row.step), row)
    for row in book.rows("reduce_scatter"):
        last[row.rank, row.step] = row
    return {(row.rank, row.step, row.op, row.phase, row.fqn) for row in [*first.values(), *last.values()]}


def _in_line(book: Book, mine: list[Charge]) -> None:
    """Enter the communication that no rule explains; on a CPU it blocks the thread that asks for it."""
    if book.on_device:
        problem, named = "Collectives of layers are exposed for {cost}.", "exposed_communication"
    else:
        named = "cpu_collectives_in_line"
        problem = (
            "On a CPU, FSDP2's collectives block the thread that calls them (all-gathers unless it unshards "
            "asynchronously): {cost}. That is how gloo works; judge overlap on a GPU."
        )
    book.enter(
        mine,
        id=named,
        cause="communication",
        title="FSDP's collectives",
        problem=problem,
        fqn=worst_layer(mine) if book.on_device else None,
        calm=True,
    )
