"""Communication by layer: its amount, the exposed and late part, and the waits of the compute stream.

Rows are means over ranks and steps; repeated layers are folded.

Layers whose names differ only in one number (``layers.0`` ... ``layers.79``) and whose collectives carry
the same bytes become one row, ``layers.0-79``; a layer that is much worse than its siblings keeps its own
row.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.layers import family_name, fold_alike, natural_key
from fsdp2prof.analyzers.steps import kinds_of_steps, known_sum, mean, rate
from fsdp2prof.analyzers.trace.accounting import Exposure, Timeline
from fsdp2prof.analyzers.trace.collectives import Collectives
from fsdp2prof.analyzers.trace.waits import WaitTable
from fsdp2prof.by_key import grouped
from fsdp2prof.results.communication import (
    Attribution,
    Communication,
    GroupRow,
    LateRow,
    LayerRow,
    LayerTotal,
    PrefetchRow,
)
from fsdp2prof.results.trace import RankTrace
from fsdp2prof.tables.columns import IntArray
from fsdp2prof.tables.trace import StepTable
from fsdp2prof.vocabulary import PHASES, layer_name

_NS = 10**9


def overlap_frac(exposed_ns: float, total_ns: float) -> float | None:
    """Return 1 - exposed / total; null if there is no communication."""
    return None if total_ns == 0 else 1 - exposed_ns / total_ns


def communication(run: Timeline, windows: StepTable, exposure: Exposure) -> Communication:
    """Return a rank's communication over its windows; the total is a union, not a sum."""
    inside = intervals.intersect(run.comm, intervals.union(windows.start_ns, windows.end_ns))
    exposed, total = int(exposure.exposed_ns.sum()), intervals.total(inside)
    return Communication(total_ns=total, exposed_ns=exposed, overlap_frac=overlap_frac(exposed, total))


def group_rows(
    rank: int, windows: StepTable, collectives: Collectives, exposure: Exposure, waits: WaitTable
) -> list[GroupRow]:
    """Return one row per (step, fqn, phase, op, process group, mesh dim, dtype), in order of first start.

    A collective counts, with its bytes, in its own step; its time counts in the window where it ran, so that
    the exposed times of a step's rows sum to the step's. Rates are payload and wire over the collectives' own
    durations.
    """
    table = collectives.table
    counted = np.flatnonzero(np.isin(table.step, windows.step))
    owner = np.concatenate([counted, exposure.collective])
    step = np.concatenate([table.step[counted], windows.step[exposure.window]])
    columns = (table.fqn, table.phase, table.op, table.process_group, table.mesh_dim, table.dtype)
    fqn, phase, op, process_group, mesh_dim, dtype = (column.to_list() for column in columns)
    keys = np.stack([step, table.group_size[owner], *(column.codes[owner] for column in columns)])
    _, first, group = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    group = group.reshape(-1)
    own, piece = group[: len(counted)], group[len(counted) :]

    def of_own(values: IntArray) -> IntArray:
        return _sums(own, values[counted], len(first))

    total, exposed = (_sums(piece, values, len(first)) for values in (exposure.total_ns, exposure.exposed_ns))
    duration = of_own(table.end_ns - table.start_ns)
    payload, wire, stall = (
        _known_sum(own, values[counted], len(first))
        for values in (table.payload_bytes, table.wire_bytes, waits.stall_ns)
    )
    count = of_own(np.ones(len(table), dtype=np.int64))
    rows = []
    order = np.lexsort((table.start_ns[owner[first]], step[first]))
    for i in order.tolist():
        c = int(owner[first[i]])
        seconds = int(duration[i]) / _NS
        rows.append(
            GroupRow(
                rank=rank,
                step=int(step[first[i]]),
                fqn=fqn[c],
                phase=phase[c] or "other",
                op=op[c] or "other",
                process_group=process_group[c],
                mesh_dim=mesh_dim[c],
                dtype=dtype[c],
                count=int(count[i]),
                payload_bytes=payload[i],
                wire_bytes=wire[i],
                total_ns=int(total[i]),
                exposed_ns=int(exposed[i]),
                stall_ns=stall[i],
                overlap_frac=overlap_frac(int(exposed[i]), int(total[i])),
                algbw_bytes_per_s=_rate(payload[i], seconds),
                busbw_bytes_per_s=_rate(wire[i], seconds),
                group_size=None if table.group_size[c] < 0 else int(table.group_size[c]),
            )
        )
    return rows


def attribution(windows: StepTable, collectives: Collectives) -> Attribution:
    """Return how much of the analysed windows' communication was attributed to a layer, and why the rest
    was not."""
    table = collectives.table
    mine = np.isin(table.step, windows.step)
    placed = mine & (table.fqn.codes >= 0)
    duration = table.end_ns - table.start_ns
    reasons: dict[str, int] = {}
    for code, reason in enumerate(collectives.reason.values):
        if number := int((mine & (collectives.reason.codes == code)).sum()):
            reasons[reason] = number
    return Attribution(
        collectives=int(mine.sum()),
        attributed=int(placed.sum()),
        comm_ns=int(duration[mine].sum()),
        attributed_ns=int(duration[placed].sum()),
        unattributed_reasons=reasons,
    )


def _sums(group: IntArray, values: IntArray, groups: int) -> IntArray:
    sums = np.zeros(groups, dtype=np.int64)
    np.add.at(sums, group, values)
    return sums


def _known_sum(group: IntArray, values: IntArray, groups: int) -> list[int | None]:
    """Sum per group; null where any member is unknown (negative)."""
    unknown = _sums(group, (values < 0).astype(np.int64), groups)
    return [
        None if missing else int(value)
        for value, missing in zip(_sums(group, values, groups).tolist(), unknown.tolist(), strict=True)
    ]


def _rate(amount: int | None, seconds: float) -> float | None:
    return None if amount is None or seconds <= 0 else amount / seconds


def layer_rows(groups: Sequence[GroupRow], windows: int) -> list[LayerRow]:
    """Average rows of ranks and steps over ``windows`` step windows; worst exposed first."""
    alike = grouped(((row.fqn, row.phase, row.op, _group(row), row.dtype), row) for row in groups)
    return _worst_first(_mean(rows, windows) for rows in alike.values())


def layer_rows_by_kind(groups: Sequence[GroupRow], ranks: Sequence[RankTrace]) -> list[LayerRow]:
    """Return folded rows of each kind of steps apart, means over steps of that kind; nothing for one kind."""
    kinds = kinds_of_steps(groups, ranks)
    found = []
    for steps in kinds.apart if kinds else ():
        windows = sum(step.step in steps for rank in ranks for step in rank.steps)
        rows = fold(layer_rows([row for row in groups if row.step in steps and row.count], windows))
        found += [replace(row, steps=steps) for row in rows]
    return found


def fold(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Fold alike layers into one row each, their sums; worst exposed first."""
    items = [
        (row.fqn, (row.phase, row.op, row.group, row.dtype, row.count, row.payload_bytes)) for row in rows
    ]
    groups = fold_alike(items, [row.exposed_ns for row in rows])
    return _worst_first(_sum([rows[i] for i in members]) for members in groups)


def layer_totals(rows: Sequence[LayerRow]) -> list[LayerTotal]:
    """Sum all rows of a layer, in the order of the layers' names."""
    layers = grouped((row.fqn, row) for row in rows)
    return [
        LayerTotal(
            fqn=fqn,
            total_ns=sum(row.total_ns for row in layers[fqn]),
            exposed_ns=sum(row.exposed_ns for row in layers[fqn]),
        )
        for fqn in sorted(layers, key=lambda fqn: natural_key(layer_name(fqn)))
    ]


def _mean(rows: list[GroupRow], windows: int) -> LayerRow:
    def known(values: list[int | None]) -> float | None:
        total = known_sum(values)
        return None if total is None else mean(total, windows)

    first = rows[0]
    exposed, total = sum(row.exposed_ns for row in rows), sum(row.total_ns for row in rows)
    return LayerRow(
        fqn=first.fqn,
        layers=1,
        phase=first.phase,
        op=first.op,
        group=_group(first),
        dtype=first.dtype,
        count=mean(sum(row.count for row in rows), windows),
        payload_bytes=known([row.payload_bytes for row in rows]),
        wire_bytes=known([row.wire_bytes for row in rows]),
        total_ns=mean(total, windows),
        exposed_ns=mean(exposed, windows),
        stall_ns=known([row.stall_ns for row in rows]),
        overlap_frac=overlap_frac(exposed, total),
        busbw_bytes_per_s=rate([(row.wire_bytes, row.busbw_bytes_per_s) for row in rows]),
    )


def _sum(rows: list[LayerRow]) -> LayerRow:
    if len(rows) == 1:
        return rows[0]
    exposed, total = sum(row.exposed_ns for row in rows), sum(row.total_ns for row in rows)
    return replace(
        rows[0],
        fqn=family_name([row.fqn for row in rows]),
        layers=len(rows),
        count=sum(row.count for row in rows),
        payload_bytes=known_sum([row.payload_bytes for row in rows]),
        wire_bytes=known_sum([row.wire_bytes for row in rows]),
        total_ns=total,
        exposed_ns=exposed,
        stall_ns=known_sum([row.stall_ns for row in rows]),
        overlap_frac=overlap_frac(exposed, total),
        busbw_bytes_per_s=rate([(row.wire_bytes, row.busbw_bytes_per_s) for row in rows]),
    )


def _group(row: GroupRow) -> str | None:
    return row.mesh_dim or row.process_group


def _worst_first(rows: Iterable[LayerRow]) -> list[LayerRow]:
    def key(row: LayerRow) -> tuple[object, ...]:
        return -row.exposed_ns, -row.total_ns, natural_key(layer_name(row.fqn)), row.phase, row.op

    return sorted(rows, key=key)


def late_rows(prefetch: Sequence[PrefetchRow], windows: int, *, folded: bool = False) -> list[LateRow]:
    """Sum verdicts over ``windows`` step windows; longest wait first, those in time last.

    ``folded`` combines similar layers into one row, except those that wait much longer than their
    siblings.
    """
    kinds = grouped(((row.fqn, row.phase, row.op, row.cause), row) for row in prefetch)
    members = list(kinds.values())
    groups = _alike(members) if folded else [[i] for i in range(len(members))]
    return _longest_first(_late_row([members[i] for i in group], windows) for group in groups)


def arrivals(prefetch: Sequence[PrefetchRow], windows: int) -> list[LateRow]:
    """Sum verdicts by layer, phase and op only, in that order; the cause is that of the longest wait."""
    kinds = grouped(((row.fqn, row.phase, row.op), row) for row in prefetch)
    rows = [
        replace(_late_row([members], windows), cause=max(members, key=lambda row: row.stall_ns).cause)
        for members in kinds.values()
    ]
    order = list(PHASES)
    return sorted(
        rows,
        key=lambda row: (
            order.index(row.phase) if row.phase in order else len(order),
            row.op,
            natural_key(layer_name(row.fqn)),
        ),
    )


def _alike(kinds: Sequence[Sequence[PrefetchRow]]) -> list[list[int]]:
    items: list[tuple[str | None, Hashable]] = [
        (rows[0].fqn, (rows[0].phase, rows[0].op, rows[0].cause)) for rows in kinds
    ]
    return fold_alike(items, [sum(row.stall_ns for row in rows) for rows in kinds])


def _late_row(layers: Sequence[Sequence[PrefetchRow]], windows: int) -> LateRow:
    rows = [row for layer in layers for row in layer]
    first = rows[0]
    return LateRow(
        fqn=first.fqn if len(layers) == 1 else family_name([layer[0].fqn for layer in layers]),
        layers=len(layers),
        phase=first.phase,
        op=first.op,
        cause=first.cause,
        count=mean(len(rows), windows),
        issued_before_ns=median(row.issued_before_ns for row in rows),
        finished_before_ns=median(row.finished_before_ns for row in rows),
        stall_ns=mean(sum(row.stall_ns for row in rows), windows),
    )


def _longest_first(rows: Iterable[LateRow]) -> list[LateRow]:
    def key(row: LateRow) -> tuple[object, ...]:
        return -row.stall_ns, natural_key(layer_name(row.fqn)), row.phase, row.op

    return sorted(rows, key=key)
