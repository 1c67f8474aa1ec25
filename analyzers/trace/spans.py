"""One rank's activities, in the lanes of a timeline, folded until it is small enough to keep.

Every activity of the rank's device (host-only: its working operators) and every phase of its host is a
span of one lane. Spans of one layer and phase with short gaps fold into one that stores their number and
total duration; collectives are kept separate as long as there is room.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from isal import isal_zlib

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.intervals import Intervals
from fsdp2prof.analyzers.steps import STEP_LABEL
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.backends import kernel_name
from fsdp2prof.tables.columns import BoolArray, IntArray, Strings, Table, concat_tables
from fsdp2prof.tables.trace import PhaseTable, Trace
from fsdp2prof.vocabulary import LANES

NEXT_BATCH = "enumerate(DataLoader)#"
"""Prefix of the range that torch's ``DataLoader`` puts around getting a batch
(``torch/utils/data/dataloader.py``)."""


def loading(trace: Trace, phases: PhaseTable) -> Intervals:
    """Return when a thread that trains was getting a batch from a ``DataLoader``, in host time."""
    labels, rows = trace.labels, loading_rows(trace, phases)
    return intervals.union(labels.start_ns[rows], labels.end_ns[rows])


def loading_rows(trace: Trace, phases: PhaseTable) -> IntArray:
    """Return the rows of the labels in which a thread that trains was getting a batch.

    Loaders that other threads ask ahead of need hold nothing up by themselves.
    """
    labels = trace.labels
    asked = labels.name.matches(lambda name: name.startswith(NEXT_BATCH))
    if not asked.any():
        return np.flatnonzero(asked)
    steps = labels.name.matches(lambda name: name.startswith(STEP_LABEL))
    training = phases.phase.equals("forward") | phases.phase.equals("optimizer")
    threads = np.union1d(labels.thread[steps], phases.thread[training])
    return np.flatnonzero(asked & np.isin(labels.thread, threads))


_STEPS = 4
"""Steps whose spans are kept until all ranks are available and one is chosen: the last ones."""

_SPANS = 64_000
_SPANS_A_RANK = 1500
"""Spans that a chart has at most, of all ranks and of one."""
_FOLDED_FIRST = 4000
"""Spans to which a step is folded before: within each, time of overlapping ones counts at most once."""
RANKS = 64
"""Ranks that a chart shows at most."""

_FINEST = 1 << 14
_COARSEST = 1 << 4
"""Parts of the step in which gaps are measured: smaller gaps are folded."""

_LANES = tuple(LANES)
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "other_comm")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanTable(Table):
    """Spans of one rank, by lane and start."""

    lane: Strings
    start_ns: IntArray
    end_ns: IntArray
    busy_ns: IntArray
    count: IntArray
    fqn: Strings
    phase: Strings
    name: Strings
    collective: IntArray
    """Row among the rank's analysed collectives; -1 for other activities, or several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpans:
    """One step of one rank, small and picklable."""

    step: int
    start_ns: int
    """Of its window."""
    end_ns: int
    resolution_ns: int
    packed: bytes
    """The spans, compressed, for those of most ranks and steps are never shown; empty without any."""

    @property
    def spans(self) -> SpanTable:
        """The spans, of which there are some."""
        table: SpanTable = pickle.loads(isal_zlib.decompress(self.packed))
        return table


def spans_shown(ranks: int) -> int:
    """Return the number of spans that a chart shows of each of so many ranks."""
    return min(_SPANS_A_RANK, _SPANS // max(1, min(ranks, RANKS)))


def rank_spans(tables: RankTables, ranks: int = 1) -> list[RankSpans]:
    """Return the spans of a rank's last analysed steps; the job has so many ranks."""
    windows = tables.windows
    everything = _all_spans(tables)
    kept = []
    for row in range(max(0, len(windows) - _STEPS), len(windows)):
        step, low, high = int(windows.step[row]), int(windows.start_ns[row]), int(windows.end_ns[row])
        inside = (everything.start_ns < high) & (everything.end_ns > low)
        host = everything.lane.equals("host")
        first, last = _host_range(tables, step, low, high)
        inside[host] = (everything.start_ns[host] < last) & (everything.end_ns[host] > first)
        spans = everything.take(inside)
        host = spans.lane.equals("host")
        start = np.maximum(spans.start_ns, np.where(host, first, low))
        end = np.minimum(spans.end_ns, np.where(host, last, high))
        clipped = spans.with_columns(start_ns=start, end_ns=end, busy_ns=end - start)
        folded, finer = fold(clipped, _FOLDED_FIRST)
        folded, coarser = fold(folded, spans_shown(ranks))
        pickled = pickle.dumps(folded.compact(), pickle.HIGHEST_PROTOCOL) if len(folded) else b""
        packed = isal_zlib.compress(pickled, 0) if pickled else b""
        resolution = max(finer, coarser)
        kept.append(RankSpans(step=step, start_ns=low, end_ns=high, resolution_ns=resolution, packed=packed))
    return kept


def fold(spans: SpanTable, most: int) -> tuple[SpanTable, int]:
    """Return at most ``most`` spans (or two a lane), and the gap up to which they folded.

    Small gaps are folded before large ones, one layer's spans before those of several, and collectives last.
    """
    resolution = 0
    if len(spans) > most:
        length = int(spans.end_ns.max() - spans.start_ns.min())
        spans = spans.take(np.lexsort((spans.start_ns, spans.lane.codes)))
        reached = _running_end(spans)
        for resolution, mixed, all_lanes in _coarser(length):
            opens = _opens(spans, reached, resolution, mixed, all_lanes)
            if np.count_nonzero(opens) <= most:
                break
        spans = _folded(spans, reached, opens)
    return spans, resolution


def _coarser(length: int) -> Iterator[tuple[int, bool, bool]]:
    for mixed, all_lanes in ((False, False), (True, False), (True, True)):
        parts = _FINEST
        while parts >= _COARSEST:
            yield max(1, length // parts), mixed, all_lanes
            parts //= 4
    yield 2 * length + 1, True, True


def _opens(spans: SpanTable, reached: IntArray, gap_ns: int, mixed: bool, all_lanes: bool) -> BoolArray:
    """Mask of the spans that are not folded into the one before them.

    Neighbours of a lane and layer at most ``gap_ns`` apart are; ``mixed``: those that are shorter than that
    and begin in the same interval, for any layers.
    """
    lane = spans.lane.codes
    opens = np.ones(len(spans), dtype=np.bool_)
    opens[1:] = lane[1:] != lane[:-1]
    if mixed:
        stretch = spans.start_ns // gap_ns
        long = spans.end_ns - spans.start_ns >= gap_ns
        opens[1:] |= (stretch[1:] != stretch[:-1]) | long[1:] | long[:-1]
    else:
        opens[1:] |= spans.start_ns[1:] - reached[:-1] > gap_ns
        for column in (spans.fqn, spans.phase):
            opens[1:] |= column.codes[1:] != column.codes[:-1]
    if not all_lanes:
        opens |= _in_collective_lane(spans)
        opens[1:] |= opens[1:] | _in_collective_lane(spans)[:-1]
    return opens


def _folded(spans: SpanTable, reached: IntArray, opens: BoolArray) -> SpanTable:
    """Fold spans into the last before them that opens."""
    first = np.flatnonzero(opens)
    counts = np.diff(np.append(first, len(spans)))
    length, alone = spans.end_ns - spans.start_ns, counts == 1
    is_longest = length == np.repeat(np.maximum.reduceat(length, first), counts)
    longest = np.maximum.reduceat(np.where(is_longest, np.arange(len(spans)), -1), first)
    overlapping = np.append(spans.start_ns[1:] < reached[:-1], False)
    busy = np.add.reduceat(spans.busy_ns, first)
    end = np.maximum.reduceat(spans.end_ns, first)
    if overlapping.any():
        busy = np.minimum(busy, end - spans.start_ns[first])
    return SpanTable(
        lane=spans.lane.take(first),
        start_ns=spans.start_ns[first],
        end_ns=end,
        busy_ns=busy,
        count=np.add.reduceat(spans.count, first),
        fqn=spans.fqn.take(longest),
        phase=spans.phase.take(longest),
        name=spans.name.take(longest),
        collective=np.where(alone, spans.collective[first], -1),
    )


def _running_end(spans: SpanTable) -> IntArray:
    """Return the latest end so far within each lane, of spans by lane and start."""
    reached: IntArray = spans.end_ns.copy()
    lane = spans.lane.codes
    starts = np.flatnonzero(np.append(True, lane[1:] != lane[:-1])) if len(lane) else np.empty(0, np.int64)
    for low, high in zip(starts.tolist(), [*starts[1:].tolist(), len(lane)], strict=True):
        reached[low:high] = np.maximum.accumulate(spans.end_ns[low:high])
    return reached


def _in_collective_lane(spans: SpanTable) -> BoolArray:
    return spans.lane.matches(_COLLECTIVES.__contains__)


# The lanes.


def _all_spans(tables: RankTables) -> SpanTable:
    spans = concat_tables([_host(tables), _batches(tables), _work(tables), _collectives(tables)])
    return spans.take(np.lexsort((spans.start_ns, spans.lane.codes)))


def _host(tables: RankTables) -> SpanTable:
    phases = tables.phases
    return _spans(
        _lanes(np.full(len(phases), _LANES.index("host"))),
        phases.start_ns,
        phases.end_ns,
        fqn=phases.fqn,
        phase=phases.phase,
        name=phases.activity,
    )


def _batches(tables: RankTables) -> SpanTable:
    """The host while it gets a batch."""
    found = loading(tables.trace, tables.phases)
    count = len(found.start)
    return _spans(
        _lanes(np.full(count, _LANES.index("host"))),
        found.start,
        found.end,
        fqn=Strings.full(count, None),
        phase=Strings.full(count, "other"),
        name=Strings.full(count, "data loader"),
    )


def _work(tables: RankTables) -> SpanTable:
    work, phases = tables.work, tables.phases
    lane = np.full(len(work), _LANES.index("compute"))
    lane[work.is_fsdp] = _LANES.index("fsdp_copy")
    lane[work.is_memcpy] = _LANES.index("memcpy")
    return _spans(
        _lanes(lane),
        work.start_ns,
        work.end_ns,
        fqn=phases.fqn.lookup(work.phase_row),
        phase=phases.phase.lookup(work.phase_row),
        name=_short(tables.trace.events.name.take(work.event)),
    )


def _collectives(tables: RankTables) -> SpanTable:
    table = tables.collectives.table
    analysed = np.isin(table.step, tables.windows.step)
    other = _LANES.index("other_comm")
    known = [_LANES.index(op) if op in _COLLECTIVES else other for op in table.op.values]
    return _spans(
        _lanes(np.array([*known, other], dtype=np.int64)[table.op.codes]),
        table.start_ns,
        table.end_ns,
        fqn=table.fqn,
        phase=table.phase,
        name=table.op,
        collective=np.where(analysed, np.cumsum(analysed) - 1, -1),
    )


def _spans(
    lane: Strings,
    start_ns: IntArray,
    end_ns: IntArray,
    *,
    fqn: Strings,
    phase: Strings,
    name: Strings,
    collective: IntArray | None = None,
) -> SpanTable:
    ones = np.ones(len(lane), dtype=np.int64)
    return SpanTable(
        lane=lane,
        start_ns=start_ns,
        end_ns=end_ns,
        busy_ns=end_ns - start_ns,
        count=ones,
        fqn=fqn,
        phase=phase,
        name=name,
        collective=-ones if collective is None else collective,
    )


def _lanes(index: IntArray) -> Strings:
    return Strings(index.astype(np.int32), _LANES)


def _short(names: Strings) -> Strings:
    """Name kernels by their functions; only those that occur."""
    occurs = np.flatnonzero(np.bincount(names.codes + 1, minlength=len(names.values) + 1)[1:])
    short = Strings.intern(kernel_name(names.values[code]) for code in occurs.tolist())
    codes = np.full(len(names.values) + 1, -1, dtype=np.int32)
    codes[occurs] = short.codes
    return Strings(codes[names.codes], short.values)


def _host_range(tables: RankTables, step: int, low: int, high: int) -> tuple[int, int]:
    """Host time of a step: its label's, or the window's if it has no step label."""
    rows = np.flatnonzero(tables.analysed.step == step)
    if not len(rows):
        return low, high
    start, end = int(tables.analysed.start_ns[rows[0]]), int(tables.analysed.end_ns[rows[0]])
    return (low, high) if start == np.iinfo(np.int64).min else (start, end)
