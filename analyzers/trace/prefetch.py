"""Was it there in time? A verdict on every collective that the compute stream waits for.

A stall ends with the collective, so its cause lies in what made the collective end late. The stall is shared
out, in this order, each cause taking at most what is left:

- ``peer``: how long it waited for the last rank to arrive (where ranks were compared);
- ``transfer``: how much longer it took than the median of its kind (same op, process group and payload),
  i.e. how far its busbw lay below theirs; ``transfer_or_peer`` where a rank of its group was not compared;
- ``communicator``: how long, launched and with its input ready, it queued behind another collective of its
  process group (all-gather and reduce-scatter share one);
- ``stream``: how long, launched, it or (an all-gather) its copy-in queued behind other work of its stream;
- ``launch``: the rest. Launched that much earlier, it would have been there in time; a reduction that waits
  for its gradients counts here too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.results.communication import LateCause, PrefetchRow
from fsdp2prof.tables.columns import BoolArray, IntArray, Table
from fsdp2prof.tables.trace import CollectiveTable

_ENOUGH = 3
"""Collectives of a kind that make a median."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AwaitedTable(Table):
    """Collectives that the compute stream waits for."""

    collective: IntArray
    """Row among the rank's analysed collectives."""
    needed_ns: IntArray
    stall_ns: IntArray
    communicator_ns: IntArray
    """Queued, launched, behind another collective of its process group."""
    stream_ns: IntArray
    """Queued, launched, behind any other work."""


def awaited(tables: RankTables) -> AwaitedTable:
    """Return the verdict of one rank's timeline about each wait."""
    table, waits = tables.collectives.table, tables.waits
    analysed = np.isin(table.step, tables.windows.step)
    position = np.cumsum(analysed) - 1
    rows = np.flatnonzero(analysed & (waits.stall_ns >= 0))
    launched = np.minimum(table.issue_ns[rows] + _launch_latency(tables), table.start_ns[rows])
    ready = np.clip(_input_ready(tables, rows), launched, table.start_ns[rows])
    communicator = np.zeros(len(rows), dtype=np.int64)
    for code in range(len(table.process_group.values)):
        members = table.process_group.codes == code
        busy = intervals.union(table.start_ns[members], table.end_ns[members])
        mine = table.process_group.codes[rows] == code
        communicator[mine] = intervals.covered(busy, ready[mine], table.start_ns[rows[mine]])
    return AwaitedTable(
        collective=position[rows],
        needed_ns=waits.needed_ns[rows],
        stall_ns=waits.stall_ns[rows],
        communicator_ns=communicator,
        stream_ns=table.start_ns[rows]
        - ready
        - communicator
        + np.where(table.op.equals("all_gather")[rows], ready - launched, 0),
    )


def _input_ready(tables: RankTables, rows: IntArray) -> IntArray:
    """End of the last FSDP copy launched before each collective: its copy-in or chunk-cat; -1 if none."""
    work = tables.work
    copies = np.flatnonzero(work.is_fsdp & (work.launch_ns >= 0))
    copies = copies[np.argsort(work.launch_ns[copies], kind="stable")]
    before = np.searchsorted(work.launch_ns[copies], tables.collectives.table.issue_ns[rows], side="left")
    ends: IntArray = np.concatenate([[-1], work.end_ns[copies]])
    return ends[before]


def transfer_ns(collectives: CollectiveTable, wait_ns: IntArray) -> IntArray:
    """Return each collective's duration without its wait for the last rank (-1: unmatched, none known)."""
    return collectives.end_ns - collectives.start_ns - np.maximum(wait_ns, 0)


def verdicts(
    rank: int,
    collectives: CollectiveTable,
    waited: AwaitedTable,
    wait_ns: IntArray,
    waits_known: BoolArray,
) -> list[PrefetchRow]:
    """Return one row per awaited collective, in order of need.

    ``wait_ns`` comes from comparing ranks, and so does whether it is all there was to wait for.
    """
    excess = _excess(collectives, transfer_ns(collectives, wait_ns))
    left = waited.stall_ns.copy()
    shares: dict[LateCause, IntArray] = {}
    causes: tuple[tuple[LateCause, IntArray], ...] = (
        ("peer", np.maximum(wait_ns, 0)[waited.collective]),
        ("transfer", np.where(waits_known, excess, 0)[waited.collective]),
        ("transfer_or_peer", np.where(waits_known, 0, excess)[waited.collective]),
        ("communicator", waited.communicator_ns),
        ("stream", waited.stream_ns),
    )
    for cause, amount in causes:
        shares[cause] = np.minimum(left, amount)
        left = left - shares[cause]
    shares["launch"] = left
    texts = (collectives.fqn, collectives.phase, collectives.op, collectives.process_group)
    fqn, phase, op, process_group = (column.to_list() for column in texts)
    late_ns = {cause: share.tolist() for cause, share in shares.items() if share.any()}
    rows = []
    for i in np.argsort(waited.needed_ns, kind="stable").tolist():
        c = int(waited.collective[i])
        late: dict[LateCause, int] = {cause: share[i] for cause, share in late_ns.items() if share[i]}
        needed = int(waited.needed_ns[i])
        rows.append(
            PrefetchRow(
                rank=rank,
                step=int(collectives.step[c]),
                fqn=fqn[c],
                phase=phase[c] or "other",
                op=op[c] or "other",
                process_group=process_group[c],
                issued_before_ns=needed - int(collectives.issue_ns[c]),
                finished_before_ns=needed - int(collectives.end_ns[c]),
                stall_ns=int(waited.stall_ns[i]),
                late_ns=late,
                cause=_largest(late),
            )
        )
    return rows


def _largest(late: dict[LateCause, int]) -> LateCause | None:
    order: list[LateCause] = sorted(late, key=lambda cause: -late[cause])
    return order[0] if order else None


def _launch_latency(tables: RankTables) -> int:
    """Shortest time from any launch to its start; anything above it is queueing."""
    device = tables.device
    launched = device.launch_ns >= 0
    latency = device.start_ns[launched] - device.launch_ns[launched]
    return max(int(latency.min()), 0) if len(latency) else 0


def _excess(collectives: CollectiveTable, transfer: IntArray) -> IntArray:
    """Return how much longer each transfer took than the median of its kind; 0 without a median."""
    excess = np.zeros(len(collectives), dtype=np.int64)
    kinds = np.stack([collectives.op.codes, collectives.process_group.codes, collectives.payload_bytes])
    _, kind, count = np.unique(kinds, axis=1, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(kind.reshape(-1), kind="stable"), np.cumsum(count)[:-1])
    for rows in members:
        if len(rows) >= _ENOUGH and collectives.payload_bytes[rows[0]] >= 0:
            excess[rows] = np.maximum(transfer[rows] - np.sort(transfer[rows])[len(rows) // 2], 0)
    return excess
