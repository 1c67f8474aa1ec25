"""The machine in the ledger: processors that ranks waited for, threads that held the interpreter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from fsdp2prof.analyzers.layers import site_name, without_call
from fsdp2prof.analyzers.ledger.book import Book
from fsdp2prof.analyzers.ledger.charges import Charge
from fsdp2prof.by_key import grouped
from fsdp2prof.manifest import MachineInfo, RankManifest
from fsdp2prof.units import format_frac, plural

if TYPE_CHECKING:
    from fsdp2prof.results.run import ProcessorUse

_STARVED = 0.1
"""Part of a step that the training thread waits for a processor, from which on its host is called starved."""
_MORE = 2
"""Ratio of processor waiting to the other ranks' from which a rank counts as starved."""


def waited_ns(manifest: RankManifest) -> dict[int, int]:
    """Return step -> time in which the training thread could run and had no processor."""
    return {
        one.step: one.main_thread_waiting_ns
        for one in manifest.host_steps
        if one.main_thread_waiting_ns is not None
    }


def waits_for_processors(manifests: Sequence[RankManifest]) -> dict[tuple[int, int], int]:
    """Return the same by rank and step."""
    return {(one.rank, step): ns for one in manifests for step, ns in waited_ns(one).items()}


def starved_frac(manifest: RankManifest) -> float | None:
    """Return the part of a rank's captured steps that it waited for a processor; None unknown."""
    waited = waited_ns(manifest)
    took = {one.step: one.duration_ns for one in manifest.steps if one.step in waited}
    whole = sum(took.values())
    return sum(waited[step] for step in took) / whole if whole else None


def starved_ranks(manifests: Sequence[RankManifest]) -> dict[int, str]:
    """Return the ranks that wait for a processor much longer than the others, each with a sentence.

    A rank with more work waits longer on a busy host; it is starved only if it also waits more for each
    nanosecond that it runs.
    """
    parts = {one.rank: part for one in manifests if (part := starved_frac(one)) is not None}
    pressures = {one.rank: _pressure(one) for one in manifests if one.rank in parts}
    found = {}
    for rank, part in parts.items():
        others = [other for other in parts if other != rank]
        more = all(
            measure[rank] >= _MORE * median(measure[other] for other in others)
            for measure in (parts, pressures)
            if others
        )
        if part >= _STARVED and more:
            found[rank] = f"Its training thread waits {format_frac(part)} of a step for a CPU core."
    return found


def _pressure(manifest: RankManifest) -> float:
    """Return the time that the training thread waits for a processor, for each nanosecond that it has one."""
    waited = waited_ns(manifest)
    ran = sum(one.main_thread_cpu_ns for one in manifest.host_steps if one.step in waited)
    return sum(waited.values()) / max(1, ran)


def processor_use(manifests: Sequence[RankManifest]) -> ProcessorUse | None:
    """Return how much the ranks waited for processors and how much of these others used; None unknown."""
    waits = [part for one in manifests if (part := starved_frac(one)) is not None]
    hosts = grouped((one.host, one) for one in manifests)
    others = [part for ranks in hosts.values() if (part := _others_frac(ranks)) is not None]
    if not waits and not others:
        return None
    from fsdp2prof.results.run import ProcessorUse  # with it come the results of memory and sharding

    return ProcessorUse(wait_frac=max(waits, default=None), others_frac=max(others, default=None))


def _others_frac(ranks: Sequence[RankManifest]) -> float | None:
    """Return the fraction of a host's processor time not used by the ranks; None if unknown.

    Each rank's part is from its own captured steps; all ranks capture the same ones.
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


def without_free_cores(manifests: Sequence[RankManifest]) -> int | None:
    """Return the CPU cores of a host whose ranks have as many threads or more; None without one."""
    for machines in _by_host(manifests):
        cores = max(one.usable_cores for one in machines)
        if sum(one.torch_threads for one in machines) >= cores:
            return cores
    return None


def _by_host(manifests: Sequence[RankManifest]) -> list[list[MachineInfo]]:
    hosts = grouped(
        (one.host, one.machine)
        for one in manifests
        if one.machine is not None and one.machine.torch_threads and one.machine.usable_cores
    )
    return list(hosts.values())


def oversubscribed(manifests: Sequence[RankManifest]) -> tuple[str, str]:
    """Return which ranks have more threads than processors and the remedy; otherwise empty texts."""
    for machines in _by_host(manifests):
        threads = sum(one.torch_threads for one in machines)
        cores = max(one.usable_cores for one in machines)
        said = f"{threads} threads of the ranks share {plural(cores, 'CPU core')}"
        if threads > cores and max(one.torch_threads for one in machines) > 1:
            return said, "Give each rank fewer threads: OMP_NUM_THREADS, or torch.set_num_threads()."
        if threads > cores and cores < max(one.cores for one in machines):
            return said, "Allow the ranks more of their host's CPU cores (taskset, --cpus-per-task)."
    return "", ""


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
    """Enter the waiting for the interpreter, and separate that for a processor from the work that waited."""
    _threads(book)
    own = () if book.on_device else ("compute", "fsdp_copy")
    ready = (*_RUNNING, "garbage_collection", *own)
    book.waiting = _taken(book, _waited_while_ready(book, ready), ready)


def enter_waiting(book: Book) -> None:
    """Enter the waiting for a processor that no other entry has."""
    mine, book.waiting = book.waiting, []
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
            pool[one.rank, one.step] += 0 if one.asleep else one.ns
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
    line = without_call(site_name(lines.most_common(1)[0][0]))
    book.enter(mine, "starved_host/interpreter", {"line": line})


def _taken(book: Book, amounts: Mapping[tuple[int, int], int], causes: Sequence[str]) -> list[Charge]:
    """Take an amount per rank and step out of the time of some causes, the same part of each charge."""
    if not any(amounts.values()):
        return []
    pool = _pool(book, causes)
    mine = []
    for cause in causes:
        for one in book.take(cause, lambda one: not one.asleep):
            whole = pool[one.rank, one.step]
            part = one.ns * min(whole, amounts.get((one.rank, one.step), 0)) // whole if whole else 0
            mine += [replace(one, ns=part, cause="starved", count=0)] if part else []
            rest = replace(one, ns=one.ns - part) if part else one
            book.put_back([rest] if rest.ns or not part else [])
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
