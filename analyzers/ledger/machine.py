"""The machine in the ledger: processors that ranks waited for, how many share them, and the interpreter."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from fsdp2prof.analyzers.ledger.book import Book, Remedy, Said
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.manifest import RankManifest
from fsdp2prof.results.run import ProcessorUse
from fsdp2prof.units import format_frac

__all__ = ["enter_starved", "oversubscribed", "processor_use", "starved_frac", "starved_ranks", "waited_ns"]

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
_STARVED = 0.1
"""Part of a step that the training thread waits for a processor, from which on its host is called starved."""
_MORE = 2
"""How many times as long as the others a rank waits for a processor that is starved alone."""


def waited_ns(manifest: RankManifest) -> dict[int, int]:
    """Return step -> time in which the training thread could run and had no processor."""
    return {
        one.step: one.main_thread_waiting_ns
        for one in manifest.host_steps
        if one.main_thread_waiting_ns is not None
    }


def starved_frac(manifest: RankManifest) -> float | None:
    """Return the part of a rank's captured steps that it waited for a processor; None unknown."""
    waited = waited_ns(manifest)
    took = {one.step: one.duration_ns for one in manifest.steps if one.step in waited}
    whole = sum(took.values())
    return sum(waited[step] for step in took) / whole if whole else None


def starved_ranks(manifests: Sequence[RankManifest]) -> dict[int, str]:
    """Return the ranks that wait for a processor much longer than the others, each with a sentence."""
    parts = {one.rank: part for one in manifests if (part := starved_frac(one)) is not None}
    found = {}
    for rank, part in parts.items():
        others = [other for each, other in parts.items() if each != rank]
        if part >= _STARVED and (not others or part >= _MORE * median(others)):
            found[rank] = f"Its training thread waits {format_frac(part)} of a step for a processor."
    return found


def processor_use(manifests: Sequence[RankManifest]) -> ProcessorUse | None:
    """Return how much the ranks waited for processors and how much of these others used; None unknown."""
    waits = [part for one in manifests if (part := starved_frac(one)) is not None]
    hosts: dict[str, list[RankManifest]] = defaultdict(list)
    for one in manifests:
        hosts[one.host].append(one)
    others = [part for ranks in hosts.values() if (part := _others_frac(ranks)) is not None]
    if not waits and not others:
        return None
    return ProcessorUse(wait_frac=max(waits, default=None), others_frac=max(others, default=None))


def _others_frac(ranks: Sequence[RankManifest]) -> float | None:
    """Return the part of a host's processor time that was not the ranks'; None unknown.

    Each rank's own part is of its own captured steps: ranks capture the same ones.
    """
    own, taken = 0.0, []
    for rank in ranks:
        steps = [one for one in rank.host_steps if one.machine_busy_ns is not None and one.machine_time_ns]
        if not steps:
            return None
        whole = sum(one.machine_time_ns or 0 for one in steps)
        busy = sum((one.machine_busy_ns or 0) + (one.machine_steal_ns or 0) for one in steps)
        taken.append(busy / whole)
        own += sum(one.cpu_time_ns for one in steps) / whole
    return min(1.0, max(0.0, median(taken) - own))


def oversubscribed(manifests: Sequence[RankManifest]) -> str:
    """Say where the ranks of a host have more threads than it has processors; empty where none has."""
    threads: dict[str, int] = defaultdict(int)
    cores: dict[str, int] = {}
    for one in manifests:
        if one.machine is not None and one.machine.torch_threads and one.machine.usable_cores:
            threads[one.host] += one.machine.torch_threads
            cores[one.host] = max(cores.get(one.host, 0), one.machine.usable_cores)
    worst = max(threads, key=lambda host: threads[host] / cores[host], default=None)
    if worst is None or threads[worst] <= cores[worst]:
        return ""
    return f"{threads[worst]} threads of the ranks share {cores[worst]} processors"


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
