"""Ranks in the ledger that could have run: without a processor, or without the interpreter."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from fsdp2prof.analyzers.ledger.book import Book, Remedy, Said
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.analyzers.ledger.machine import oversubscribed, waited_ns

__all__ = ["enter_starved"]

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


def enter_starved(book: Book) -> None:
    """Enter the time in which ranks were ready to run, and had no processor or not the interpreter."""
    _threads(book)
    waited = {
        (manifest.rank, step): ns for manifest in book.manifests for step, ns in waited_ns(manifest).items()
    }
    mine = _taken(book, waited)
    cost = sum(one.ns for one in mine)
    if not cost:
        return
    crowded = oversubscribed(book.manifests)
    remedy = Remedy(
        change="Give each rank fewer threads: OMP_NUM_THREADS, or torch.set_num_threads().",
        gain_ns=cost,
        reason="all of this waiting",
    )
    problem = f"Ranks are ready to run and wait {book.per_step(cost)} for a processor"
    book.enter(
        Said(
            id="starved_host",
            cause="starved",
            title="waiting for a processor",
            problem=f"{problem}: {crowded}." if crowded else f"{problem} that other programs use.",
            remedy=remedy if crowded else None,
            calm=not crowded,
            why_sure="the system counts it",
        ),
        mine,
    )


def _threads(book: Book) -> None:
    """Enter the time in which other Python threads of the ranks held the interpreter's lock.

    Such a thread computed, and the training's thread neither computed nor waited for a processor, a batch or
    another rank.
    """
    held = _lock_held_ns(book)
    mine = _taken(book, held)
    cost = sum(one.ns for one in mine)
    if not cost:
        return
    lines: Counter[str] = Counter()
    for manifest in book.manifests:
        for step in manifest.host_steps:
            lines.update(step.python_threads)
    line = lines.most_common(1)[0][0]
    remedy = Remedy(
        change=f"Run the work of {line} in another process (multiprocessing): the threads of a process share "
        "the interpreter's lock.",
        gain_ns=cost,
        reason="all of this waiting",
    )
    problem = (
        f"Another Python thread computes ({line}) and holds the interpreter's lock; the training's thread "
        f"waits for it {book.per_step(cost)}."
    )
    book.enter(
        Said(
            id="starved_host",
            cause="starved",
            title="waiting for the interpreter's lock",
            problem=problem,
            remedy=remedy,
            confidence="medium",
            why_sure="CPU time of threads is recorded, who holds the lock is not",
            evidence={"line": line},
        ),
        mine,
    )


def _taken(book: Book, amounts: dict[tuple[int, int], int]) -> list[Charge]:
    """Take up to an amount per rank and step of the time in which the host launched nothing."""
    mine = []
    for cause in ("host_pause", "host"):
        for one in book.take(cause):
            part = min(one.ns, amounts.get((one.rank, one.step), 0))
            if part > 0:
                amounts[one.rank, one.step] -= part
                mine.append(replace(one, ns=part, cause="starved", count=0))
            book.put_back([replace(one, ns=one.ns - part)] if one.ns > part else [])
    return mine


def _lock_held_ns(book: Book) -> dict[tuple[int, int], int]:
    """Return rank and step -> time that its training thread may have waited for another Python thread."""
    waits: Counter[tuple[int, int]] = Counter()
    for cause in _BLOCKED:
        for charge in book.left(cause):
            waits[charge.rank, charge.step] += charge.ns
    found = {}
    for manifest in book.manifests:
        took = {one.step: one.duration_ns for one in manifest.steps}
        for step in manifest.host_steps:
            busy = step.main_thread_cpu_ns + (step.main_thread_waiting_ns or 0)
            absent = took.get(step.step, 0) - busy - waits[manifest.rank, step.step]
            held = min(absent, sum(step.python_threads.values()))
            if held > 0:
                found[manifest.rank, step.step] = held
    return found
