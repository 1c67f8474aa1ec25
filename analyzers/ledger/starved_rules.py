"""Ranks in the ledger that could have run: without a processor, or without the interpreter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fsdp2prof.analyzers.ledger.book import Book
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.analyzers.ledger.machine import oversubscribed, waits_for_processors

_BLOCKED = (
    "communication",
    "other_communication",
    "uneven_ranks",
    "data_loader",
    "offload",
    "sync",
    "queued",
)
"""Causes in which the training's thread may wait without a processor."""
_COLLECTIVES = ("communication", "other_communication", "uneven_ranks")
_RUNNING = ("host_pause", "host")
"""Causes in which it runs or is ready to; on a CPU the work itself, too."""


def enter_starved(book: Book) -> None:
    """Enter the time in which ranks were ready to run, and had no processor or not the interpreter."""
    _threads(book)
    own = () if book.on_device else ("compute", "fsdp_copy")
    ready = (*_RUNNING, "garbage_collection", *own)
    mine = _taken(book, _waited_while_ready(book, ready), ready)
    if any(one.ns for one in mine):
        crowded, change = oversubscribed(book.manifests)
        more = "; more threads were ready to run than the machine has CPU cores"
        book.enter(
            mine,
            "starved_host",
            calm=not change,
            crowded=f": {crowded}" if crowded else more,
            change=change or "",
        )


def _waited_while_ready(book: Book, causes: Sequence[str]) -> dict[tuple[int, int], int]:
    """Return rank and step -> time of the causes in which the thread waited for a processor.

    The system counts all waiting of a step, also that of a thread that wakes up inside a collective. The
    thread is assumed to wait the same share of its ready time everywhere, so that its own computing
    remains: waiting / (waiting + computing) of the causes, both as counted by the system.
    """
    pool = _pool(book, causes)
    computed = {
        (one.rank, step.step): step.main_thread_cpu_ns for one in book.manifests for step in one.host_steps
    }
    return {
        place: min(waited, pool[place] * waited // (waited + computed[place]))
        for place, waited in waits_for_processors(book.manifests).items()
        if waited
    }


def _pool(book: Book, causes: Sequence[str]) -> Counter[tuple[int, int]]:
    """Return rank and step -> remaining time of the causes."""
    pool: Counter[tuple[int, int]] = Counter()
    for cause in causes:
        for one in book.left(cause):
            pool[one.rank, one.step] += one.ns
    return pool


def _threads(book: Book) -> None:
    """Enter the time in which other Python threads of the ranks held the interpreter's lock.

    Such a thread computed, and the training's thread neither computed nor waited for a processor, a batch or
    another rank. Where it computed longer than the training's own, that had to wait for the lock after
    collectives, too.
    """
    held = _lock_held_ns(book)
    mine = _taken(book, held, _RUNNING)
    left = Counter(held)
    for one in mine:
        left[one.rank, one.step] -= one.ns
    busier = _busier_threads(book)
    mine += _taken(book, {place: ns for place, ns in left.items() if place in busier}, _COLLECTIVES)
    if not any(one.ns for one in mine):
        return
    lines: Counter[str] = Counter()
    for manifest in book.manifests:
        for step in manifest.host_steps:
            lines.update(step.python_threads)
    book.enter(mine, "starved_host/interpreter", {"line": lines.most_common(1)[0][0]})


def _taken(book: Book, amounts: Mapping[tuple[int, int], int], causes: Sequence[str]) -> list[Charge]:
    """Take an amount per rank and step out of the time of some causes, the same part of each charge."""
    pool = _pool(book, causes)
    mine = []
    for cause in causes:
        for one in book.take(cause):
            whole = pool[one.rank, one.step]
            part = one.ns * min(whole, amounts.get((one.rank, one.step), 0)) // whole if whole else 0
            mine += [replace(one, ns=part, cause="starved", count=0)] if part else []
            book.put_back([replace(one, ns=one.ns - part)] if one.ns > part or not part else [])
    return mine


def _lock_held_ns(book: Book) -> dict[tuple[int, int], int]:
    """Return rank and step -> time that its training thread may have waited for another Python thread."""
    waits: Counter[tuple[int, int]] = Counter()
    for cause in _BLOCKED:
        for charge in book.left(cause):
            waits[charge.rank, charge.step] += charge.ns
    found, busier = {}, _busier_threads(book)
    for manifest in book.manifests:
        took = {one.step: one.duration_ns for one in manifest.steps}
        for step in manifest.host_steps:
            busy = step.main_thread_cpu_ns + (step.main_thread_waiting_ns or 0)
            blocked = 0 if (manifest.rank, step.step) in busier else waits[manifest.rank, step.step]
            absent = took.get(step.step, 0) - busy - blocked
            held = min(absent, sum(step.python_threads.values()))
            if held > 0:
                found[manifest.rank, step.step] = held
    return found


def _busier_threads(book: Book) -> set[tuple[int, int]]:
    """Return ranks and steps in which other Python threads compute longer than the training's."""
    return {
        (manifest.rank, step.step)
        for manifest in book.manifests
        for step in manifest.host_steps
        if sum(step.python_threads.values()) > step.main_thread_cpu_ns > 0
    }
