"""From NCCL's files to communicators, the speed of their collectives, and the reason a group is slow."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fsdp2prof.analyzers.nccl.calls import Calls, by_communicator, payload_bytes, side_by_side
from fsdp2prof.analyzers.nccl.causes import (
    OF_SOME_RANKS,
    Reason,
    behind,
    folded,
    forced_settings,
    logged_warnings,
    reasons,
)
from fsdp2prof.analyzers.nccl.layers import groups_of
from fsdp2prof.manifest import RankManifest
from fsdp2prof.results.finding import SEVERITIES
from fsdp2prof.results.nccl import NcclAnalysis, NcclCollective, NcclCommunicator, NcclRank, NcclTransport
from fsdp2prof.tables.nccl import (
    InspectedCommunicator,
    InspectedProcess,
    LoggedCall,
    LoggedCommunicator,
    NcclLog,
)
from fsdp2prof.units import format_bytes, plural
from fsdp2prof.vocabulary import op_label, printable

_DEVICE = re.compile(r"NET/([^/]+)/(\d+)(?:\(\d+\))?")
_NUMBERS = re.compile(r"/\d+(?:\(\d+\))?(?:\[\d+\])?")

_CLEAR = 0.5
"""Part of the collectives in which one rank came last from which on it is named."""
_FEW = 10

_Seen = list[tuple[int, InspectedCommunicator]]
_Manifests = Mapping[int, tuple[int, RankManifest]]


def analyze_nccl(
    processes: Sequence[InspectedProcess],
    log: NcclLog,
    manifests: Mapping[int, RankManifest],
    warnings: Sequence[str] = (),
) -> NcclAnalysis:
    """Put the Inspector's records, the log and the manifests of a job together; any of them may be empty."""
    ranks = _ranks(processes, manifests)
    known = {
        at: (rank, manifests[rank]) for at, rank in enumerate(ranks) if rank is not None and rank in manifests
    }
    inspected, logged = by_communicator(processes), _logged(log)
    dims = {key: _mesh_dim(processes, seen, known) for key, seen in inspected.items()}
    names = _names(inspected, logged, dims)
    calls = side_by_side(processes, names, known)
    collectives = [*calls.rows, *_counted(logged, names, inspected)]
    communicators: list[NcclCommunicator] = []
    causes: list[tuple[NcclCommunicator, list[Reason]]] = []
    for key in {**inspected, **logged}:
        one = _communicator(names[key], key, inspected.get(key, []), logged.get(key, []), dims.get(key))
        own = {(part.host, part.pid) for part in logged.get(key, [])}
        why = reasons(one, [process for process in log.processes if (process.host, process.pid) in own])
        why += behind(logged.get(key, []))
        causes.append((one, why))
        communicators.append(replace(one, causes=[reason.id for reason in why]))
    findings = folded(causes)
    findings += [*logged_warnings(log.processes), *forced_settings(log.processes)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    communicators.sort(key=lambda one: (not one.causes, -_moved(one.name, collectives)))
    result = NcclAnalysis(
        inspected=len(processes),
        logged=len(log.processes),
        communicators=communicators,
        collectives=collectives,
        ranks=_rank_rows(processes, ranks, calls),
        findings=findings,
        verdict=[],
        warnings=[*warnings, *_warnings(processes, calls, bool(manifests), known)],
    )
    return replace(result, verdict=_verdict(result, calls.matched))


def _ranks(processes: Sequence[InspectedProcess], manifests: Mapping[int, RankManifest]) -> list[int | None]:
    """Rank of each process in the job: by host and process id, otherwise in the largest communicator."""
    told = {(one.host, one.pid): rank for rank, one in manifests.items()}
    sizes = [one.size for process in processes for one in process.communicators.values()]
    world = max([*sizes, *(one.world_size for one in manifests.values())], default=0)
    return [
        told.get(
            (process.host, process.pid),
            next((one.rank for one in process.communicators.values() if one.size == world), None),
        )
        for process in processes
    ]


def _logged(log: NcclLog) -> dict[str, list[LoggedCommunicator]]:
    """Communicators of the log, grouped by properties that are equal on all ranks; without any, each is
    separate.

    Versions before 2.17 log no number of a communicator. There the communicators of one size belong
    together if each of the ranks has exactly one of them. A log without INIT names neither number nor
    rank: its communicators of one size belong together if no more processes than that size call the same
    collectives.
    """
    found: dict[str, list[LoggedCommunicator]] = defaultdict(list)
    unnamed: dict[tuple[int, int], list[LoggedCommunicator]] = defaultdict(list)
    made: Counter[tuple[str, int, int, int]] = Counter()
    called_alike: dict[tuple[int, frozenset[LoggedCall], int], list[LoggedCommunicator]] = defaultdict(list)
    made_alike: Counter[tuple[str, int, int, frozenset[LoggedCall]]] = Counter()
    for one in log.communicators:
        if one.id is not None:
            found[one.id].append(one)
        elif one.size is not None and one.rank is not None:
            nth = made[key := (one.host, one.pid, one.size, one.rank)]
            made[key] += 1
            unnamed[one.size, nth].append(one)
        elif one.size is not None and one.calls:
            called = frozenset(call for call in one.calls if call.op not in OF_SOME_RANKS)
            nth = made_alike[alike := (one.host, one.pid, one.size, called)]
            made_alike[alike] += 1
            called_alike[one.size, called, nth].append(one)
        else:
            found[f"of {one.host}:{one.pid}"].append(one)
    for (size, nth), parts in unnamed.items():
        if sorted(one.rank or 0 for one in parts) == list(range(size)):
            found[f"of {size} ranks, {nth}"] = parts
        else:
            found |= {f"of {one.host}:{one.pid}, rank {one.rank} of {size}, {nth}": [one] for one in parts}
    several = Counter(size for size, _, _ in called_alike)
    for number, ((size, _, nth), parts) in enumerate(called_alike.items()):
        if len(parts) <= size:
            which = f", {number}" if several[size] > 1 else ""
            found[f"of {size} ranks{which}"] = parts
        else:
            found |= {f"of {one.host}:{one.pid}, {size} ranks, {nth}": [one] for one in parts}
    return dict(found)


def _names(
    inspected: Mapping[str, _Seen],
    logged: Mapping[str, Sequence[LoggedCommunicator]],
    dims: Mapping[str, str | None],
) -> dict[str, str]:
    """A name of each communicator that no other has."""
    wanted = {
        key: next((one.name for _, one in inspected.get(key, []) if one.name), None) or dims.get(key) or key
        for key in {**inspected, **logged}
    }
    often = Counter(wanted.values())
    return {key: name if often[name] == 1 else f"{name} {key}" for key, name in wanted.items()}


def _mesh_dim(processes: Sequence[InspectedProcess], seen: _Seen, known: _Manifests) -> str | None:
    for position, one in seen:
        if position in known:
            dims = {group.mesh_dim for group in groups_of(processes[position], one, *known[position])}
            if len(dims) == 1 and (dim := dims.pop()) is not None:
                return dim
    return None


def _communicator(
    name: str, key: str, seen: _Seen, logged: Sequence[LoggedCommunicator], mesh_dim: str | None
) -> NcclCommunicator:
    first = seen[0][1] if seen else None
    hosts = {one.rank: one.host for one in logged if one.rank is not None}
    through: dict[str, list[int]] = {}
    nics: set[str] = set()
    whole = True
    for one in logged:
        for connection, count in one.connections.items():
            kind = _NUMBERS.sub("", connection.via)
            ends = (hosts.get(connection.source), hosts.get(connection.target))
            row = through.setdefault(kind, [0, 0])
            row[0] += count
            row[1] += count if None not in ends and ends[0] != ends[1] else 0
            whole &= None not in ends
            if device := _DEVICE.match(connection.via):
                nics.add(f"NET/{device[1]} {device[2]}")
    return NcclCommunicator(
        name=name,
        id=key if first is not None or (logged and logged[0].id is not None) else None,
        mesh_dim=mesh_dim,
        size=first.size if first is not None else next((o.size for o in logged if o.size), None),
        nodes=first.nodes if first is not None else next((o.nodes for o in logged if o.nodes), None),
        ranks_seen=max(len(seen), len({(one.host, one.pid) for one in logged})),
        channels=next((one.channels for one in logged if one.channels), None),
        ring=list(next((one.ring for one in logged if one.ring), ())),
        trees=max((one.trees for one in logged), default=None),
        nvls=any(one.nvls for one in logged) if logged else None,
        path_types=sorted(set().union(*(one.path_types for one in logged))),
        transports=[
            NcclTransport(transport=kind, connections=count, across_nodes=across if whole else None)
            for kind, (count, across) in sorted(through.items(), key=lambda item: -item[1][0])
        ],
        nics=sorted(nics),
        causes=[],
    )


def _counted(
    logged: Mapping[str, Sequence[LoggedCommunicator]],
    names: Mapping[str, str],
    inspected: Mapping[str, _Seen],
) -> list[NcclCollective]:
    """Calls that only the log counts, of the rank that made most."""
    rows = []
    for key, parts in logged.items():
        if key in inspected:
            continue
        size = next((one.size for one in parts if one.size), None)
        most: Counter[LoggedCall] = Counter()
        for one in parts:
            most |= one.calls
        chosen = {(call.op, call.message_bytes): call for one in parts for call in one.chosen}
        for call in most or {call: 0 for one in parts for call in one.chosen}:
            how = chosen.get((call.op, call.message_bytes), call)
            count = most[call] or sum(one.chosen[call] for one in parts)
            rows.append(_counted_row(names[key], call, how, count, size))
    return sorted(rows, key=lambda row: (row.communicator, -row.message_bytes * row.count, row.op))


def _counted_row(
    name: str, call: LoggedCall, how: LoggedCall, count: int, size: int | None
) -> NcclCollective:
    return NcclCollective(
        communicator=name,
        op=call.op,
        fqn=None,
        phase=None,
        layer_known=False,
        message_bytes=call.message_bytes,
        payload_bytes=payload_bytes(call.op, call.message_bytes, size),
        dtype=call.dtype,
        algorithm=how.algorithm,
        protocol=how.protocol,
        count=count,
        mean_ns=None,
        waiting_ns=None,
        bus_bytes_per_s=None,
    )


def _moved(name: str, collectives: Sequence[NcclCollective]) -> int:
    return sum(row.message_bytes * row.count for row in collectives if row.communicator == name)


def _rank_rows(
    processes: Sequence[InspectedProcess], ranks: Sequence[int | None], calls: Calls
) -> list[NcclRank]:
    rows = [
        NcclRank(
            rank=rank,
            host=process.host,
            pid=process.pid,
            collectives=len(process.calls),
            duration_ns=int(process.calls.duration_ns.sum()),
            came_last=last,
            dropped=process.dropped,
        )
        for process, rank, last in zip(processes, ranks, calls.came_last, strict=True)
    ]
    return sorted(rows, key=lambda row: (row.rank is None, row.rank or 0, row.host, row.pid))


def _warnings(
    processes: Sequence[InspectedProcess], calls: Calls, asked: bool, known: _Manifests
) -> list[str]:
    found = []
    if dropped := sum(one.dropped for one in processes):
        more = "increase NCCL_INSPECTOR_DUMP_COLL_RING_SIZE"
        found.append(
            f"{plural(dropped, 'collective')} left NCCL Inspector's ring buffer before it wrote them: {more}"
        )
    if unread := sum(one.unread for one in processes):
        found.append(
            f"{plural(unread, 'line')} of NCCL Inspector's logs are incomplete records and are left out"
        )
    timings = {timing for one in processes for timing in one.calls.timing.values} & {
        "kernel_cpu",
        "collective_cpu",
    }
    if timings:
        found.append(
            f"some times are host times ({', '.join(sorted(timings))}): they include more than the transfer"
        )
    if calls.total and not calls.matched:
        found.append("each collective was logged by only one rank: its time includes waiting for others")
    if processes and asked and len(known) < len(processes):
        found.append(
            f"{plural(len(processes) - len(known), 'process')} match no rank of the run: "
            "their collectives have no layers"
        )
    return found


# The sentences on top.


def _verdict(result: NcclAnalysis, matched: int) -> list[str]:
    """At most three sentences: why a group is slow, which collective costs most time and its speed, which
    rank is late."""
    causes = [
        one.message
        for one in result.findings
        if one.severity != "low" and one.evidence.get("communicator") is not None
    ]
    sentences = causes[:1]
    if not causes and result.logged:
        logged = plural(len(result.communicators), "communicator")
        sentences = [f"NCCL's log shows no cause of slowness in {logged}."]
    timed = [row for row in result.collectives if row.mean_ns is not None]
    if timed:
        sentences.append(_slowest(timed))
    elif not causes:
        sentences.append("No file contains durations of collectives; NCCL Inspector records them.")
    late = _late(result.ranks, matched)
    return [*sentences, *late]


def _slowest(timed: Sequence[NcclCollective]) -> str:
    most = timed[0]
    total = sum((row.mean_ns or 0) * row.count for row in timed)
    spent = (most.mean_ns or 0) * most.count
    layer = "" if most.fqn is None else f" of `{printable(most.fqn) or 'the root'}`"
    speed = (
        "" if most.bus_bytes_per_s is None else f" at {most.bus_bytes_per_s / 1e9:.1f} GB/s of bus bandwidth"
    )
    size = "" if most.payload_bytes is None else f" of {format_bytes(most.payload_bytes)}"
    part = f"{spent / total:.0%} of the time in collectives" if total else "the time in collectives"
    return (
        f"{part[0].upper()}{part[1:]} is in {op_label(most.op)}s{size}{layer} on "
        f"{printable(most.communicator)}{speed}."
    )


def _late(ranks: Sequence[NcclRank], matched: int) -> list[str]:
    if matched < _FEW or len(ranks) < 3:  # of two ranks one is always last
        return []
    worst = max(ranks, key=lambda row: row.came_last)
    if worst.came_last < _CLEAR * matched:
        return []
    who = (
        f"Rank {worst.rank}" if worst.rank is not None else f"Process {worst.pid} on {printable(worst.host)}"
    )
    return [f"{who} arrived last in {worst.came_last / matched:.0%} of the {matched:,} matched collectives."]
