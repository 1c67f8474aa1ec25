"""Columns of all chunks of a file to its :class:`Trace`: sorted, threads numbered, sparse tables joined."""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fsdp2prof import backends
from fsdp2prof.errors import TraceError
from fsdp2prof.manifest import DeviceInfo, ProcessGroupInfo
from fsdp2prof.readers.limits import MOST_DEVICES, MOST_RANKS, too_many_labels
from fsdp2prof.readers.trace.event_args import (
    Interner,
    collective_args,
    compact,
    int_column,
    shape_table,
    sync_table,
)
from fsdp2prof.readers.trace.event_columns import Columns, Share
from fsdp2prof.readers.trace.kineto_schema import Header
from fsdp2prof.readers.trace.optimizer_steps import add_steps
from fsdp2prof.tables.columns import CompactArray, IntArray, Strings
from fsdp2prof.tables.trace import EventTable, LabelTable, MemoryEventTable, Trace

_WORTH_RETURNING_BYTES = 8 << 20
_MOST_PAIRS = 1 << 20
"""Processes times threads up to which a table of all their pairs is looked up in; sorting takes longer."""
_MOST_BYTES = 1 << 60
_BASE_NS = 1 << 62
"""The year 2116: sums of a trace's epoch and its times fit 64 bits."""
_UNCALLED = "cuda"
"""Type of a device whose work was launched by no call in the file."""


def assemble(source: str, header: Header, share: Share, warnings: list[str]) -> Trace:
    """Build the tables of one file from all its chunks, which are consumed.

    Raises ``TraceError`` if there are no events.
    """
    if add_steps(share):
        steps = "a step lasts from one optimizer update to the next"
        warnings.append(f"{source}: no ProfilerStep#N ranges; {steps}")
    pieces = [share.pieces[number] for number in sorted(share.pieces)]
    lengths = [len(piece.events["start_ns"]) for piece in pieces]
    if not sum(lengths):
        raise TraceError(f"{source}: holds no events; was the profiler stopped before a step was recorded?")
    first_rows = np.cumsum([0, *lengths[:-1]]).tolist()
    placed = list(zip(pieces, first_rows, strict=True))
    metadata = [(row + first, *rest) for piece, first in placed for row, *rest in piece.metadata]
    shapes = [(row + first, *rest) for piece, first in placed for row, *rest in piece.shapes]
    syncs = [(row + first, *rest) for piece, first in placed for row, *rest in piece.syncs]
    threads = _Threads(share.pids, share.tids)
    memory = _memory_table([piece.memory for piece in pieces if piece.memory], threads)
    columns = [piece.events for piece in pieces]
    start, end = _times(columns, source, warnings)
    order = _outer_first(start, end)
    position = _inverse(order)
    collectives = collective_args(metadata, shapes, position)
    shaped, waits = shape_table(shapes, position), sync_table(syncs, position)
    del position, metadata, shapes, syncs
    start = start[order]
    end = end[order]
    events = _event_table(columns, start, end, order, share, threads)
    is_label = events.category.equals("user_annotation") & (events.thread >= 0)
    labels = LabelTable(
        thread=events.thread[is_label].astype(np.int64),
        start_ns=events.start_ns[is_label],
        end_ns=events.end_ns[is_label],
        name=events.name.take(is_label),
    )
    devices = len(np.unique(memory.device))
    too_many = f"{devices} devices with memory" if devices > MOST_DEVICES else too_many_labels(labels)
    if too_many:
        raise TraceError(f"{source}: not the trace of one process: it has {too_many}")
    distributed = header.distributed_info
    return Trace(
        source=source,
        rank=header_integer(distributed, "rank"),
        world_size=header_integer(distributed, "world_size"),
        device=_device(events, header.device_properties),
        process_groups=_process_groups(distributed),
        base_time_ns=_base_time_ns(header),
        events=events,
        collective_args=collectives,
        labels=labels,
        shapes=shaped,
        memory=memory,
        threads=tuple(threads.names),
        warnings=tuple(warnings),
        syncs=waits,
        torch_version=header.torch_version if isinstance(header.torch_version, str) else None,
    )


def _times(pieces: list[Columns], source: str, warnings: list[str]) -> tuple[IntArray, IntArray]:
    """Start and end of every event; a negative duration is taken as none, and said."""
    start, duration = _join(pieces, "start_ns").astype(np.int64), _join(pieces, "duration_ns")
    negative = int(np.count_nonzero(duration < 0))
    if negative:
        warnings.append(f"{source}: {negative} events end before they start; taken as empty")
    return start, start + np.maximum(duration, 0)


def _event_table(
    pieces: list[Columns], start: IntArray, end: IntArray, order: IntArray, share: Share, threads: _Threads
) -> EventTable:
    """The columns, put in order one after the other: each is some 100 MB of a 5 GB trace."""
    thread = threads.number(_join(pieces, "pid"), _join(pieces, "tid"))[order]
    name = Strings(_join(pieces, "name")[order].astype(np.int32), tuple(share.names))
    category = Strings(_join(pieces, "category")[order].astype(np.int32), tuple(share.categories))
    integers = ("device", "stream", "correlation", "external_id", "bytes")
    columns = {column: compact(_join(pieces, column)[order]) for column in integers}
    return EventTable(start_ns=start, end_ns=end, name=name, category=category, thread=thread, **columns)


def _memory_table(pieces: list[Columns], threads: _Threads) -> MemoryEventTable:
    names = ("time_ns", "device", "address", "bytes", "allocated_bytes", "reserved_bytes")
    columns = {name: _join(pieces, name).astype(np.int64) for name in names}
    thread = threads.number(_join(pieces, "pid"), _join(pieces, "tid")).astype(np.int64)
    table = MemoryEventTable(thread=thread, **columns)
    return table.take(np.argsort(table.time_ns, kind="stable"))


def _join(pieces: list[Columns], name: str) -> npt.NDArray[Any]:
    """Join one column of the chunks, and release them."""
    parts = [piece.pop(name) for piece in pieces]
    joined = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    del parts
    if joined.nbytes > _WORTH_RETURNING_BYTES:
        _return_freed_pages()
    return joined


def _return_freed_pages() -> None:
    """Return freed memory to the system: glibc keeps it, and no whole column fits into the holes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _inverse(order: IntArray) -> IntArray:
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    return position


def _outer_first(start: IntArray, end: IntArray) -> IntArray:
    """Order by start, the longer first on ties, file order after that."""
    order = np.argsort(start, kind="stable")
    ordered = start[order]
    tie = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(tie):
        rows = np.union1d(tie, tie + 1)
        tied = order[rows]
        order[rows] = tied[np.lexsort((-end[tied], start[tied]))]
    return order


class _Threads:
    """Numbers the (pid, tid) pairs of host events; -1 where the pid is -1."""

    def __init__(self, pids: Interner, tids: Interner) -> None:
        self._pids, self._tids = list(pids), list(tids)
        self._numbers: dict[int, int] = {}
        self.names: list[str] = []

    def number(self, pid: npt.NDArray[Any], tid: npt.NDArray[Any]) -> CompactArray:
        """Thread numbers of pairs of interned pids and tids."""
        nowhere = len(self._pids) * len(self._tids)
        pair = np.where(pid >= 0, pid.astype(np.int64) * len(self._tids) + tid, nowhere)
        if nowhere > _MOST_PAIRS:
            distinct, code = np.unique(pair, return_inverse=True)
            numbers = [-1 if one == nowhere else self._number(one) for one in distinct.tolist()]
            return np.asarray(numbers, dtype=np.int32)[code]
        seen = np.zeros(nowhere + 1, dtype=np.bool_)
        seen[pair] = True
        lookup = np.full(nowhere + 1, -1, dtype=np.int32)
        for one in np.flatnonzero(seen[:-1]).tolist():
            lookup[one] = self._number(one)
        return lookup[pair]

    def _number(self, pair: int) -> int:
        if pair not in self._numbers:
            self._numbers[pair] = len(self.names)
            self.names.append(f"{self._pids[pair // len(self._tids)]}/{self._tids[pair % len(self._tids)]}")
        return self._numbers[pair]


def header_integer(info: Any, key: str, most: int = MOST_RANKS) -> int | None:
    """A count of a JSON object; None if it is not an object, or the value not an integer up to ``most``."""
    value = info.get(key) if isinstance(info, dict) else None
    return value if type(value) is int and 0 <= value <= most else None


def _base_time_ns(header: Header) -> int:
    base = int(int_column([header.base_time_ns])[0])
    return base if 0 <= base < _BASE_NS else 0


def _process_groups(info: Any) -> tuple[ProcessGroupInfo, ...]:
    """Process groups of ``distributedInfo.pg_config``, which is a list, or JSON text in some versions."""
    configs = info.get("pg_config") if isinstance(info, dict) else None
    if isinstance(configs, str):
        try:
            configs = msgspec.json.decode(configs)
        except (msgspec.DecodeError, RecursionError):
            configs = None
    groups = []
    for config in configs if isinstance(configs, list) else []:
        if not isinstance(config, dict):
            continue
        ranks = config.get("ranks", [])
        groups.append(
            ProcessGroupInfo(
                name=str(config.get("pg_name", "")),
                desc=str(config.get("pg_desc", "")),
                backend=str(config.get("backend_config", config.get("backend", ""))),
                ranks=[r for r in ranks if type(r) is int and 0 <= r <= MOST_RANKS]
                if isinstance(ranks, list)
                else [],
            )
        )
    return tuple(groups)


def _device(events: EventTable, properties: Any) -> DeviceInfo:
    """The device most of the work ran on, with what ``deviceProperties`` says about it."""
    used = events.device[events.device >= 0]
    called = backends.device_type(events.category.values)
    if not len(used):
        return DeviceInfo(type=called or "cpu")
    indices, counts = np.unique(used, return_counts=True)
    index = int(indices[counts.argmax()])
    known = [p for p in properties if isinstance(p, dict)] if isinstance(properties, list) else []
    match = [p for p in known if p.get("id") == index]
    if not match and len({str(p.get("name")) for p in known}) == 1:
        match = known
    if not match:
        return DeviceInfo(type=called or _UNCALLED, index=index)
    major, minor = match[0].get("computeMajor"), match[0].get("computeMinor")
    return DeviceInfo(
        type=called or _UNCALLED,
        index=index,
        name=str(match[0].get("name", "")),
        total_bytes=header_integer(match[0], "totalGlobalMem", _MOST_BYTES),
        capability=None if major is None else f"{major}.{minor}",
    )
