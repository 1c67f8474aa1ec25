"""Rules for waiting for other ranks: for a slow rank, for whichever is last, at the start."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from statistics import median_high

from fsdp2prof.analyzers.layers import SITE, named_layer, numbered, without_call
from fsdp2prof.analyzers.ledger.book import RUNNING, Book
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.analyzers.ledger.host_rules import pausing_at, steady_pauses
from fsdp2prof.analyzers.ledger.machine_rules import oversubscribed, starved_ranks, waits_for_processors
from fsdp2prof.analyzers.ranks.stragglers import LATE_FROM_THE_START
from fsdp2prof.analyzers.ranks.summary import GARBAGE
from fsdp2prof.by_key import summed
from fsdp2prof.results.communication import LateRank, LateRanks
from fsdp2prof.results.finding import EvidenceValue
from fsdp2prof.units import format_frac, format_ns

_UNEVEN = 2
"""How many times as much as any other a rank loses to a cause that is its own."""
_STEPS_OF_MORE_WORK = 2
"""Steps in which one rank has to have most work."""
_NEARLY_ALL = 0.9
"""Part of the waiting that is in a few steps."""
_AS_LATE = 0.25
"""Part of the others' waiting for a late rank below which a rank is as late itself."""
_EXPLAINED = 0.5
"""Part of the waiting for a rank that its additional work has to explain."""
_UNEVEN_WORK = 0.05
"""Difference of the operations of ranks in one step, from which on their inputs are called uneven."""

_OFTEN_LATE = 0.75
"""Part of the steps in which a rank has to be late at a line that is called its own."""

_WORKING = ("compute", "host", "host_pause", "fsdp_copy")
"""Causes that a rank with more to do has more of."""
_OWN_LOSS = {"data_loader": ("data_loader",), "host": ("host_pause", "garbage_collection")}
"""Enter the time that a late rank lost itself while the others waited, by kind of work."""


def enter_waits(book: Book) -> None:
    """Enter all waiting for ranks that came late.

    Ranks that share processors are late for several steps on end though they do the same: the system takes
    their processors at any line, and inside of operators. There only more work, a slow loader or pauses at
    one place are a rank's own.
    """
    _from_the_start(book)
    for cause in ("compilation", "allocation"):
        _for_calls(book, cause)
    more = _more_work(book)
    late = book.analysis.cross_rank.late
    if late is not None and late.steady and book.on_device:
        for one in late.ranks:
            _straggler(book, late, one)
    _for_loaders(book)
    _for_pauses(book)
    _for_lines(book)
    if not more:
        _uneven_inputs(book)
    _take_turns(book, late)


def _from_the_start(book: Book) -> None:
    mine = book.take("uneven_ranks", lambda one: one.detail == LATE_FROM_THE_START)
    book.enter(mine, "late_from_the_start")


def _straggler(book: Book, among: LateRanks, late: LateRank) -> None:
    rank = late.rank
    mine = book.take("uneven_ranks", lambda one: one.late_rank == rank)
    cost = sum(one.ns for one in mine)
    outside = max(1, among.compared - len(among.ranks))
    share = book.frac(cost) * len(book.analysis.ranks) / outside
    ranks, behind = len(book.analysis.ranks), {one.rank for one in among.ranks}
    equals = _as_late(book, mine, behind)
    behind |= equals
    together_late = sorted({rank, *equals})
    net = max(0.0, min((cost / outside - late.wait_ns) * ranks, book.least_ns(mine, behind)))
    if share < book.thresholds.straggler_frac:
        book.put_back(mine)
        return
    kind, text, fqn = main_cause(mine)
    site = _main_site(mine, kind)
    others = "the other rank waits" if outside == 1 else "the other ranks wait"
    together = [one.rank for one in among.ranks if one is not late]
    beside = (
        f" With {numbered('rank', together)} it causes {format_frac(among.explained_frac)} of all waiting."
        if together
        else ""
    )
    at = "" if fqn is None or (kind == "host" and site) else f", at {named_layer(fqn)}"
    key = f"straggler/{kind}"
    starved = starved_ranks(book.manifests).get(rank)
    crowded, change = oversubscribed(book.manifests)
    if starved is not None and kind in ("host", "kernel", "unknown"):
        key = "starved_host/late_rank"
    elif kind == "data_loader":
        key = "data_loader/late_rank"
    elif site == GARBAGE:
        key = "straggler/garbage"
    elif kind == "host" and site is not None:
        key = "straggler/site"
    own = [cause for cause in _OWN_LOSS.get(kind, ()) if site != GARBAGE or cause == "garbage_collection"]
    for lost in own:
        mine += _own_loss(book, lost, rank)  # the same time as the others' waiting: it is gained once
    mine += own_excess(book, mine, rank, net / ranks)
    book.enter(
        mine,
        key,
        {
            "wait_frac": share,
            "rank": rank,
            "wait_caused_ns": book.analysis.cross_rank.wait_caused_ns.get(str(rank), 0),
            "late_steps": late.late_steps,
            "kind": kind,
            "cause": text,
            **_facts(among),
        },
        rank=rank,
        fqn=fqn,
        gain_ns=min(net, sum(one.ns for one in mine)),
        late=behind,
        known=among.chance <= 0.1,
        ranks_late=numbered("rank", together_late),
        equals=sorted(equals) or None,
        replayed=",".join(map(str, together_late)),
        others=others,
        beside=beside,
        reason=f"{text or 'unknown'}{at}",
        site=site,
        starved=starved,
        busy=crowded or "machine was busy",
        free=change or f"Free the CPU cores of rank {rank}'s host from other programs.",
    )


def _as_late(book: Book, waits: Sequence[Charge], late: Collection[int]) -> set[int]:
    """Return other ranks that hardly wait for the late ones: they are as late, though never the last."""
    waited = {rank.rank: 0 for rank in book.analysis.ranks if rank.rank not in late}
    for one in waits:
        if one.rank in waited and not one.caught_up:
            waited[one.rank] += one.ns
    usual = median_high(waited.values()) if waited else 0
    alike = {rank for rank, ns in waited.items() if ns < _AS_LATE * usual}
    return alike if 2 * (len(alike) + len(late)) <= len(book.analysis.ranks) else set()


def _own_loss(book: Book, cause: str, rank: int) -> list[Charge]:
    """Take the time that a rank lost to a cause, if the others lost much less to it."""
    lost = summed((one.rank, one.ns) for one in book.left(cause))
    others = max((ns for other, ns in lost.items() if other != rank), default=0)
    return book.take(cause, lambda one: one.rank == rank) if lost[rank] > _UNEVEN * others else []


def own_excess(
    book: Book, taken: Sequence[Charge], rank: int, wanted: float, causes: Sequence[str] = _WORKING
) -> list[Charge]:
    """Take the time that a late rank spends beyond the others, up to the time by which it is late."""
    left = int(wanted) - sum(one.ns for one in taken if one.rank == rank)
    others = max(1, len(book.analysis.ranks) - 1)
    found: list[Charge] = []
    for cause in causes:
        spent = summed((one.rank, one.ns) for one in book.left(cause))
        more = min(left, spent[rank] - (spent.total() - spent[rank]) // others)
        if more > 0:
            mine = book.take(cause, lambda one: one.rank == rank, part=(more, spent[rank]))
            found += mine
            left -= sum(one.ns for one in mine)
    return found


def _main_site(charges: Sequence[Charge], kind: str) -> str | None:
    """Return the line that made a rank late most, if most of its lateness of that kind has one."""
    sums = summed((one.site, one.ns) for one in charges if (one.why or "unknown") == kind)
    return sums.most_common(1)[0][0] if sums else None


def main_cause(charges: Sequence[Charge]) -> tuple[str, str | None, str | None]:
    """Return kind, text and layer of the main cause of a rank's delay."""
    sums: Counter[str] = Counter()
    texts: dict[str, Counter[tuple[str | None, str | None]]] = defaultdict(Counter)
    for one in charges:
        sums[one.why or "unknown"] += one.ns
        texts[one.why or "unknown"][one.detail, one.fqn] += one.ns
    if not sums:
        return "unknown", None, None
    kind = sums.most_common(1)[0][0]
    text, fqn = texts[kind].most_common(1)[0][0]
    return kind, text, fqn


def _for_loaders(book: Book) -> None:
    """Charge waiting for the rank whose batch came last to the data loader."""
    mine = book.take("uneven_ranks", lambda one: one.why == "data_loader")
    book.put_back(replace(one, cause="data_loader") for one in mine)


def _for_calls(book: Book, cause: str) -> None:
    """Charge waiting for the host of a rank that mostly compiles, or gets memory, meanwhile to that."""
    spent = summed((one.rank, one.ns) for one in book.left(cause))
    waited = summed((one.late_rank, one.ns if one.why == "host" else 0) for one in book.left("uneven_ranks"))
    others = max(1, len(book.analysis.ranks) - 1)
    late = {rank for rank, ns in spent.items() if ns >= _EXPLAINED * waited[rank] / others}
    mine = book.take("uneven_ranks", lambda one: one.why == "host" and one.late_rank in late)
    book.put_back(replace(one, cause=cause, count=0) for one in mine)


def _for_pauses(book: Book) -> None:
    """Charge waiting for a rank that pauses at one place in most steps, or collects garbage, to these."""
    steady = steady_pauses(book)
    pausing = {
        (one.rank, one.site) for one in book.left("host_pause") if one.site and pausing_at(one) in steady
    }
    mine = book.take("uneven_ranks", lambda one: one.why == "host" and (one.late_rank, one.site) in pausing)
    book.put_back(replace(one, cause="host_pause") for one in mine)
    collecting = {one.rank for one in book.left("garbage_collection")}
    mine = book.take("uneven_ranks", lambda one: one.site == GARBAGE and one.late_rank in collecting)
    book.put_back(replace(one, cause="garbage_collection", site=None, count=0) for one in mine)


def _for_lines(book: Book) -> None:
    """Charge waiting for a rank that is late at one line of the script in most steps to that line.

    On a CPU only, and only if no other rank is ever late at that line, because any rank may be at a common
    line when the system takes its processor. Time that it waited for a processor does not count.
    """
    if book.on_device:
        return
    waited: dict[str, dict[int, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))
    for one in book.left("uneven_ranks"):
        if one.why == "host" and one.late_rank is not None and one.site and SITE.fullmatch(one.site):
            waited[without_call(one.site)][one.late_rank][one.step] += one.ns
    others = max(1, len(book.analysis.ranks) - 1)
    large = book.thresholds.cpu_cost_frac * book.total_ns / max(1, book.rank_steps)
    steps = max(1, book.rank_steps // max(1, len(book.analysis.ranks)))
    for line, ranks in waited.items():
        rank, by_step = next(iter(ranks.items()))
        starved = waits_for_processors(book.manifests)
        late = sum(ns / others - starved.get((rank, step), 0) >= large for step, ns in by_step.items())
        if len(ranks) > 1 or late < max(_STEPS_OF_MORE_WORK, _OFTEN_LATE * steps):
            continue
        mine = book.take("uneven_ranks", partial(_is_for, rank, line))
        mine += own_excess(book, mine, rank, by_step.total() / others, ("host_pause", "host"))
        book.put_back(replace(one, cause="host_pause", site=line, fqn=None, phase="other") for one in mine)


def _is_for(rank: int, line: str, one: Charge) -> bool:
    return one.late_rank == rank and one.why == "host" and without_call(one.site or "") == line


def _operations(book: Book) -> dict[int, dict[int, int]]:
    """Return step -> rank -> operations, of the steps in which all ranks count theirs."""
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for rank in book.analysis.ranks:
        for step in rank.steps:
            if step.work:
                found[step.step][rank.rank] = step.work
    return {step: ranks for step, ranks in found.items() if len(ranks) == len(book.analysis.ranks) > 1}


def _most_operations(book: Book) -> tuple[int, float] | None:
    """Return the rank that computes most in every step, and how many times the others' work that is."""
    steps = _operations(book) if len(book.training_alike) == 1 else {}
    most = {max(ranks, key=lambda rank: ranks[rank]) for ranks in steps.values()}
    if len(most) != 1 or len(steps) < _STEPS_OF_MORE_WORK:
        return None
    (rank,) = most
    others = [max(count for other, count in ranks.items() if other != rank) for ranks in steps.values()]
    least = min(ranks[rank] / max(1, other) for ranks, other in zip(steps.values(), others, strict=True))
    return (rank, least) if least >= 1 + _UNEVEN_WORK else None


def _busy_ns(book: Book, rank: int) -> int:
    """Return the time in which a rank is in no collective."""
    whole = sum(step.duration_ns for one in book.analysis.ranks if one.rank == rank for step in one.steps)
    causes = ("uneven_ranks", "communication", "other_communication")
    return whole - sum(one.ns for cause in causes for one in book.left(cause) if one.rank == rank)


def _more_work(book: Book) -> bool:
    """Enter waiting for one rank that has more to do than the others in every step; False without one."""
    rank = max(book.additional_ns, key=lambda one: book.additional_ns[one], default=0)
    expected: float = book.additional_ns.get(rank, 0)
    steps = max(1, book.rank_steps // max(1, len(book.analysis.ranks)))
    does, change = (
        f"runs operators for {format_ns(expected / steps)} per step that the others do not run",
        "work",
    )
    if (most := _most_operations(book)) and (more := _busy_ns(book, most[0]) * (1 - 1 / most[1])) > expected:
        (rank, least), expected, change = most, more, "batch and the same work"
        does = f"computes {least:.3g} times as many operations as any other rank in every step"
    if (line := _own_line(book, rank, expected)) is not None:
        does += f", most of it at {line}"
    mine = book.take("uneven_ranks", lambda one: one.late_rank == rank and one.why != "data_loader")
    waited = sum(one.ns for one in mine) / max(1, len(book.analysis.ranks) - 1)
    if not mine or expected < max(_EXPLAINED * waited, book.thresholds.straggler_frac * _busy_ns(book, rank)):
        book.put_back(mine)
        return False
    gain = book.least_ns(mine, {rank})
    mine += own_excess(book, mine, rank, waited)
    book.enter(
        mine,
        "straggler/more_work",
        {"rank": rank, "additional_ns_per_step": int(expected / steps), "kind": "kernel"},
        rank=rank,
        gain_ns=min(gain, sum(one.ns for one in mine)),
        late={rank},
        does=does,
        work=change,
        replayed=rank if book.on_device else None,
    )
    return True


def _own_line(book: Book, rank: int, expected: float) -> str | None:
    """Return the line of the script at which a rank spends at least half of some time beyond every other
    rank's; None without such a line."""
    spent: Counter[tuple[str, int]] = Counter()
    for one in (one for cause in RUNNING for one in book.left(cause)):
        if one.site is not None and SITE.fullmatch(one.site):
            spent[without_call(one.site), one.rank] += one.ns
    others = [one.rank for one in book.analysis.ranks if one.rank != rank]
    beyond = Counter(
        {
            line: ns - max((spent[line, other] for other in others), default=0)
            for (line, at), ns in spent.items()
            if at == rank
        }
    )
    line, most = next(iter(beyond.most_common(1)), (None, 0))
    return line if 2 * most >= expected else None


def _uneven_inputs(book: Book) -> None:
    """Enter waiting between ranks whose work differs from step to step: batches of different sizes."""
    alike = book.training_alike
    rows = [
        [count for rank, count in ranks.items() if rank in some]
        for ranks in _operations(book).values()
        for some in alike
    ]
    spread = [(max(row) - min(row)) / max(row) for row in rows if len(row) > 1]
    if not spread or sum(spread) / len(spread) < _UNEVEN_WORK:
        return
    mine = book.take("uneven_ranks", lambda one: one.why in ("kernel", "host", "unknown"))
    evidence = {"flops_spread_frac": sum(spread) / len(spread)}
    book.enter(mine, "ranks_take_turns/batches", evidence)


def _take_turns(book: Book, late: LateRanks | None) -> None:
    """Enter waiting that no single rank causes, or in too few steps to name one."""
    mine = book.take("uneven_ranks")
    if not mine:
        return
    facts: dict[str, EvidenceValue] = {} if late is None else _facts(late)
    unclear = late is not None and not late.steady and late.late_steps == late.steps < late.steps_needed
    if late is not None and unclear and book.on_device:
        book.enter(
            mine,
            "late_rank_unclear",
            facts,
            rank=late.ranks[0].rank,
            basis="unknown",
            names=numbered("rank", [one.rank for one in late.ranks]),
            late_steps=late.late_steps,
            needed=late.steps_needed,
        )
        return
    kind, text, _ = main_cause(mine)
    few = _few_steps(book, mine)
    key = "ranks_take_turns" if book.on_device else "ranks_take_turns/cpu"
    key = "ranks_take_turns/few_steps" if few and book.on_device else key
    book.enter(mine, key, {**facts, "kind": kind}, few=numbered("step", few) if few else "", reason=text)


def _few_steps(book: Book, waits: Sequence[Charge]) -> list[int]:
    """Return the steps with nearly all of some waits, if they are less than half of the steps."""
    spent = summed((one.step, one.ns) for one in waits)
    most: list[int] = []
    for step, _ in spent.most_common():
        most.append(step)
        if sum(spent[one] for one in most) >= _NEARLY_ALL * spent.total():
            break
    return sorted(most) if 2 * len(most) < len(book.traced) else []


def _facts(late: LateRanks) -> dict[str, EvidenceValue]:
    return {
        "ranks": [one.rank for one in late.ranks],
        "late_together_steps": late.late_steps,
        "steps": late.steps,
        "explained_frac": late.explained_frac,
        "chance": late.chance,
    }
