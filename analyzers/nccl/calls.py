"""Inspected collectives of all ranks side by side, by communicator, kind and sequence number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers.nccl.layers import Layers
from fsdp2prof.analyzers.trace.collective_names import wire_bytes
from fsdp2prof.manifest import RankManifest
from fsdp2prof.results.nccl import NcclCollective
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings, concat_tables
from fsdp2prof.tables.nccl import InspectedCalls, InspectedCommunicator, InspectedProcess


@dataclass(frozen=True, kw_only=True, slots=True)
class Calls:
    """Every collective once."""

    rows: list[NcclCollective]
    came_last: list[int]
    """By process: how often the others waited for it only, among the collectives that several processes
    wrote."""
    matched: int
    """Collectives that several ranks wrote."""
    total: int


@dataclass(frozen=True, slots=True)
class _Folded:
    """Collectives in order of communicator, kind and number; each is a range of the sorted calls."""

    calls: InspectedCalls
    first: IntArray
    length: IntArray
    shortest: IntArray
    longest: IntArray
    last: IntArray
    """Process that was last, or one of those that were."""
    alone: BoolArray
    """Whether no other was in the collective for as short a time: of equal times none is last."""


def side_by_side(
    processes: Sequence[InspectedProcess],
    names: Mapping[str, str],
    manifests: Mapping[int, tuple[int, RankManifest]],
) -> Calls:
    """Put the calls of all processes together.

    ``names`` are the communicators' by id; ``manifests`` those of the processes that one is known of, with
    the rank, by position.
    """
    if not any(len(one.calls) for one in processes):
        return Calls(rows=[], came_last=[0] * len(processes), matched=0, total=0)
    folded = _fold(processes)
    several = folded.length > 1
    came_last = np.bincount(folded.last[several & folded.alone], minlength=len(processes)).tolist()
    communicators = {name: one for process in processes for name, one in process.communicators.items()}
    layers = Layers(processes, manifests)
    rows = [
        _row(folded, rows, communicators, names, layer)
        for members in _alike(folded)
        for layer, rows in layers.split(folded.calls, folded.first, members)
    ]
    rows.sort(key=lambda row: (-(row.mean_ns or 0) * row.count, row.communicator, row.op, row.message_bytes))
    return Calls(rows=rows, came_last=came_last, matched=int(several.sum()), total=len(folded.first))


def payload_bytes(op: str, message_bytes: int, size: int | None) -> int | None:
    """Return the payload of an NCCL message; None if it depends on an unknown size."""
    if op not in ("all_gather", "reduce_scatter"):
        return message_bytes
    return None if size is None else message_bytes * size


def _fold(processes: Sequence[InspectedProcess]) -> _Folded:
    calls = concat_tables([one.calls for one in processes])
    process = np.repeat(np.arange(len(processes)), [len(one.calls) for one in processes])
    order = np.lexsort((calls.duration_ns, calls.seq, calls.op.codes, calls.communicator.codes))
    calls, process = calls.take(order), process[order]
    opens = np.ones(len(calls), dtype=np.bool_)
    keys = (calls.communicator.codes, calls.op.codes, calls.seq)
    opens[1:] = np.any([column[1:] != column[:-1] for column in keys], axis=0)
    first = np.flatnonzero(opens)
    end = np.append(first[1:], len(calls))
    second = np.minimum(first + 1, end - 1)
    return _Folded(
        calls=calls,
        first=first,
        length=end - first,
        shortest=calls.duration_ns[first],
        longest=calls.duration_ns[end - 1],
        last=process[first],
        alone=calls.duration_ns[second] > calls.duration_ns[first],
    )


def _alike(folded: _Folded) -> Iterator[IntArray]:
    """Rows of the folded collectives that share communicator, kind, size, algorithm and protocol."""
    calls = folded.calls
    columns = [
        column[folded.first]
        for column in (
            calls.communicator.codes,
            calls.op.codes,
            calls.message_bytes,
            calls.algorithm.codes,
            calls.protocol.codes,
        )
    ]
    _, group = np.unique(np.stack(columns), axis=1, return_inverse=True)
    order = np.argsort(group, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(group.reshape(-1)[order])) + 1)


def _row(
    folded: _Folded,
    members: IntArray,
    communicators: Mapping[str, InspectedCommunicator],
    names: Mapping[str, str],
    layer: tuple[str | None, str | None] | None,
) -> NcclCollective:
    at = int(folded.first[members[0]])
    calls = folded.calls
    communicator = communicators[str(calls.communicator[at])]
    op, message = str(calls.op[at]), int(calls.message_bytes[at])
    payload = payload_bytes(op, message, communicator.size)
    wire = wire_bytes(
        Strings.full(1, op), np.array([-1 if payload is None else payload]), np.array([communicator.size])
    )
    total = int(folded.shortest[members].sum())
    several = members[folded.length[members] > 1]
    waited = (folded.longest - folded.shortest)[several]
    return NcclCollective(
        communicator=names[communicator.id],
        op=op,
        fqn=None if layer is None else layer[0],
        phase=None if layer is None else layer[1],
        layer_known=layer is not None,
        message_bytes=message,
        payload_bytes=payload,
        algorithm=calls.algorithm[at],
        protocol=calls.protocol[at],
        count=len(members),
        mean_ns=round(total / len(members)),
        waiting_ns=round(float(waited.mean())) if len(several) else None,
        bus_bytes_per_s=int(wire[0]) * len(members) * 10**9 // total if wire[0] >= 0 and total else None,
    )


def by_communicator(
    processes: Sequence[InspectedProcess],
) -> dict[str, list[tuple[int, InspectedCommunicator]]]:
    """Processes, by position, of each communicator, with how they see it."""
    found: dict[str, list[tuple[int, InspectedCommunicator]]] = defaultdict(list)
    for position, process in enumerate(processes):
        for one in process.communicators.values():
            found[one.id].append((position, one))
    return dict(found)
