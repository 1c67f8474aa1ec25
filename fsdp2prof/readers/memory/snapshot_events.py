"""The events and segments of an allocator snapshot as columns: allocations, segments, blocks.

An event's order is its position in the device's trace. A block freed by the program (``free_requested``) is
no longer allocated; it can be reused once every stream is done with it (``free_completed``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp2prof.readers.safe_pickle import text
from fsdp2prof.tables.allocations import AllocationTable, BlockTable, SegmentTable, Stacks
from fsdp2prof.tables.columns import NEVER, IntArray, Strings, Table

_OPERATOR = re.compile(r"at::_ops::(\w+)::call\b")
_INSTALLED = re.compile(r"^.*[/\\](?:site|dist)-packages[/\\]")
"""Install location of packages: the rest of the path names the file."""


class StackInterner:
    """Gives every distinct stack a row; ``-1`` means none.

    Snapshots share frame dictionaries, so most lookups are by identity: the objects must stay alive while the
    interner is in use.
    """

    def __init__(self) -> None:
        self._rows_by_id: dict[tuple[int, ...], int] = {}
        self._rows: dict[tuple[int, ...], int] = {}
        self._frame_by_id: dict[int, int] = {}
        self._frames: dict[str, int] = {}

    def row(self, frames: Any) -> int:
        """Return the row of a list of ``{filename, line, name}`` frames, innermost first."""
        if not frames:
            return -1
        identity = tuple(map(id, frames))
        row = self._rows_by_id.get(identity)
        if row is None:
            codes = tuple([self._frame(frame) for frame in frames])
            row = self._rows_by_id[identity] = self._rows.setdefault(codes, len(self._rows))
        return row

    def table(self) -> Stacks:
        """Return the stacks by row."""
        names = list(self._frames)
        return Stacks.intern([names[code] for code in codes] for codes in self._rows)

    def operators(self) -> Strings:
        """Return for each row the operator that Python called, otherwise the innermost Python frame."""
        names = list(self._frames)
        operator = [_OPERATOR.search(name) for name in names]
        python = [".py:" in name for name in names]
        found: list[str | None] = []
        for codes in self._rows:
            outermost = None
            for code in codes:
                if python[code]:
                    break
                if match := operator[code]:
                    outermost = f"aten::{match[1]}"
            where = next((names[code] for code in codes if python[code]), names[codes[0]])
            found.append(outermost or _INSTALLED.sub("", where))
        return Strings.intern(found)

    def _frame(self, frame: Any) -> int:
        known = self._frame_by_id.get(id(frame))
        if known is not None:
            return known
        name, line = text(frame["name"]), int(frame["line"])
        full = f"{text(frame['filename'])}:{line}:{name}" if line else name
        code = self._frame_by_id[id(frame)] = self._frames.setdefault(full, len(self._frames))
        return code


_STATES = {
    "active_allocated": "allocated",
    "active_pending_free": "pending_free",
    "active_awaiting_free": "pending_free",
    "inactive": "free",
}
_STACKED = frozenset({"alloc", "oom"})


@dataclass(frozen=True, kw_only=True, slots=True)
class EventColumns(Table):
    """One device's trace, a row an event, in the file's order."""

    action: Strings
    address: IntArray
    size: IntArray
    stream: IntArray
    time_ns: IntArray
    """-1 in files without times."""
    device_free: IntArray
    """Bytes the driver had left at an ``oom``; -1 elsewhere."""
    stack: IntArray
    """Row of the stack of an ``alloc`` or ``oom``; -1 elsewhere."""
    pool: Strings
    """Private pool as written; None is the default pool or unknown."""
    tag: Strings
    """``user_metadata``; None if empty."""


def read_events(trace: list[Any], stacks: StackInterner) -> EventColumns:
    """Turn a device's trace into columns. Raises ``KeyError`` or ``TypeError`` if an event is malformed."""
    actions = [text(event["action"]) for event in trace]
    times = np.array([event.get("time_us", -1) for event in trace], dtype=np.int64)
    return EventColumns(
        action=Strings.intern(actions),
        address=np.array([event.get("addr", -1) for event in trace], dtype=np.int64),
        size=np.array([event.get("size", 0) for event in trace], dtype=np.int64),
        stream=np.array([event.get("stream", 0) for event in trace], dtype=np.int64),
        time_ns=np.where(times < 0, -1, times * 1000),
        device_free=np.array([event.get("device_free", -1) for event in trace], dtype=np.int64),
        stack=np.array(
            [
                stacks.row(event.get("frames")) if action in _STACKED else -1
                for action, event in zip(actions, trace, strict=True)
            ],
            dtype=np.int64,
        ),
        pool=Strings.intern(_private_pool(event.get("pool_id")) for event in trace),
        tag=Strings.intern(_tag(event.get("user_metadata")) for event in trace),
    )


def build_allocations(
    events: EventColumns, blocks: BlockTable, segments: list[Any], stacks: StackInterner
) -> tuple[AllocationTable, int]:
    """Pair allocations with their frees, and add memory that was alive before the history began.

    Returns the table and the number of blocks whose allocation was recorded but is not in the file: a ring
    buffer that overflowed.
    """
    history = _History(events)
    born = history.orders("alloc")
    again = history.following(born, "alloc")
    requested = _if_before(history.following(born, "free_requested"), again)
    completed = _if_before(history.following(born, "free_completed"), again)
    freed = np.where(requested != NEVER, requested, completed)

    # Frees of blocks whose allocation the history does not hold. One that was only completed here had been
    # freed before, unless the file knows no requests at all.
    kind = "free_requested" if len(history.orders("free_requested")) else "free_completed"
    claimed = np.zeros(len(events) + 1, dtype=np.bool_)
    claimed[np.minimum(freed, len(events))] = True
    old = history.orders(kind)
    old = old[~claimed[old]]
    old_released = _if_before(history.following(old, "free_completed"), history.following(old, "alloc"))

    alive = set(events.address[born[freed == NEVER]].tolist())
    held = blocks.take(blocks.state.equals("allocated"))
    staying = held.take(np.array([address not in alive for address in held.address.tolist()], dtype=np.bool_))
    lost = int((staying.stack >= 0).sum())

    def column(of_events: IntArray, of_blocks: IntArray) -> IntArray:
        return np.concatenate([of_blocks, of_events[old], of_events[born]])

    before = len(staying) + len(old)
    free_order = np.concatenate([np.full(len(staying), NEVER), old, freed])
    stack = column(events.stack, staying.stack)
    address = column(events.address, staying.address)
    rows = len(address)
    tag = events.tag.take(born)
    return AllocationTable(
        alloc_order=np.concatenate([np.full(before, -1), born]),
        free_order=free_order,
        alloc_ns=np.concatenate([np.full(before, -1), events.time_ns[born]]),
        free_ns=np.append(events.time_ns, NEVER)[np.minimum(free_order, len(events))],
        size=column(events.size, staying.requested),
        address=address,
        stream=column(events.stream, staying.stream),
        pool=_pools(address, Strings(events.pool.codes[born], events.pool.values), before, segments),
        step=np.full(rows, -1, dtype=np.int64),
        phase=Strings.full(rows, "other"),
        fqn=Strings.full(rows, None),
        activity=Strings.full(rows, None),
        category=Strings.full(rows, "unattributed"),
        op=stacks.operators().lookup(stack),
        stack=stack,
        tag=Strings(np.concatenate([np.full(before, -1), tag.codes]).astype(np.int32), tag.values),
        release_order=np.concatenate([np.full(len(staying), NEVER), old_released, completed]),
    ), lost


def build_segments(events: EventColumns, segments: list[Any]) -> SegmentTable:
    """Return reserved memory over time: segments and, in expandable ones, mapped ranges.

    Segments from before the history that still exist at its end come from the snapshot's own list. An
    unmapping may split a range that was mapped at once, so ranges are followed one by one.
    """
    ranges = _Ranges()
    for order in np.flatnonzero(events.action.matches(lambda name: name.startswith("segment_"))).tolist():
        action = events.action[order]
        start, size = int(events.address[order]), int(events.size[order])
        if action in ("segment_alloc", "segment_map"):
            ranges.add(start, size, order, int(events.stream[order]), action == "segment_map")
        else:
            ranges.remove(start, size, order, int(events.stream[order]), action == "segment_unmap")
    for segment in segments:
        ranges.complete(int(segment["address"]), int(segment["total_size"]), segment)
    rows = sorted(ranges.rows, key=lambda row: (row.alloc_order, row.address))
    address = np.array([row.address for row in rows], dtype=np.int64)
    alloc_order = np.array([row.alloc_order for row in rows], dtype=np.int64)
    return SegmentTable(
        alloc_order=alloc_order,
        free_order=np.array([row.free_order for row in rows], dtype=np.int64),
        alloc_ns=np.append(events.time_ns, -1)[alloc_order],
        size=np.array([row.size for row in rows], dtype=np.int64),
        address=address,
        stream=np.array([row.stream for row in rows], dtype=np.int64),
        pool=_pools(address, Strings.full(0, None), len(rows), segments),
        expandable=np.array([row.expandable for row in rows], dtype=np.bool_),
    )


def build_blocks(segments: list[Any], stacks: StackInterner) -> BlockTable:
    """Return the blocks of every segment at the end of the recording."""
    pairs = [(segment, block) for segment in segments for block in segment["blocks"]]
    pairs.sort(key=lambda pair: int(pair[1]["address"]))
    size = [int(block["size"]) for _, block in pairs]
    states = [_STATES[block["state"]] for _, block in pairs]
    requested = [
        0 if state == "free" else int(block.get("requested_size", block["size"]))
        for state, (_, block) in zip(states, pairs, strict=True)
    ]
    return BlockTable(
        address=np.array([block["address"] for _, block in pairs], dtype=np.int64),
        size=np.array(size, dtype=np.int64),
        requested=np.array(requested, dtype=np.int64),
        state=Strings.intern(states),
        segment=np.array([segment["address"] for segment, _ in pairs], dtype=np.int64),
        stream=np.array([segment["stream"] for segment, _ in pairs], dtype=np.int64),
        pool=Strings.intern(_pool(segment) for segment, _ in pairs),
        expandable=np.array([_expandable(segment) for segment, _ in pairs], dtype=np.bool_),
        stack=np.array([stacks.row(block.get("frames")) for _, block in pairs], dtype=np.int64),
    )


class _History:
    """Finds the next event of a kind at an address: one sorted key (address, order) per kind."""

    def __init__(self, events: EventColumns) -> None:
        self._events = events
        self._length = len(events) + 1
        _, self._code = np.unique(events.address, return_inverse=True)

    def orders(self, action: str) -> IntArray:
        """Return the orders of all events of a kind."""
        return np.flatnonzero(self._events.action.equals(action))

    def following(self, orders: IntArray, action: str) -> IntArray:
        """Return for each event the next one of a kind at the same address, ``NEVER`` if there is none."""
        wanted = self.orders(action)
        keys = np.sort(self._key(wanted))
        query = self._key(orders) + 1
        found = np.searchsorted(keys, query)
        key = np.append(keys, -1)[found]
        return np.where(key // self._length == self._code[orders], key % self._length, NEVER)

    def _key(self, orders: IntArray) -> IntArray:
        return np.asarray(self._code[orders] * self._length + orders, dtype=np.int64)


@dataclass(slots=True)
class _Range:
    """A reserved range of device memory while its life is followed."""

    address: int
    size: int
    alloc_order: int
    stream: int
    expandable: bool
    free_order: int = NEVER


class _Ranges:
    """Reserved ranges, by start address while they live."""

    def __init__(self) -> None:
        self.rows: list[_Range] = []
        self._live: dict[int, _Range] = {}

    def add(self, address: int, size: int, order: int, stream: int, expandable: bool) -> None:
        """Reserve a range."""
        row = self._live[address] = _Range(address, size, order, stream, expandable)
        self.rows.append(row)

    def remove(self, address: int, size: int, order: int, stream: int, expandable: bool) -> None:
        """Release a range; a part that was never added existed before the history began."""
        end, known = address + size, 0
        for row in [
            row for row in self._live.values() if row.address < end and address < row.address + row.size
        ]:
            del self._live[row.address]
            row_end = row.address + row.size
            for start, stop in ((row.address, min(address, row_end)), (max(end, row.address), row_end)):
                if start < stop:
                    self.add(start, stop - start, row.alloc_order, row.stream, row.expandable)
            row.address, row.size = max(row.address, address), min(row_end, end) - max(row.address, address)
            row.free_order = order
            known += row.size
        if known < size:
            self.rows.append(_Range(address, size - known, -1, stream, expandable, order))

    def complete(self, address: int, size: int, segment: Any) -> None:
        """Account for a segment of the final list: a part that no event reserved existed from the start."""
        end = address + size
        known = sum(row.size for row in self._live.values() if address <= row.address < end)
        if known < size:
            stream, expandable = int(segment["stream"]), _expandable(segment)
            self.rows.append(_Range(address, size - known, -1, stream, expandable))


def _if_before(order: IntArray, limit: IntArray) -> IntArray:
    """Orders below their limit; ``NEVER`` for the others."""
    return np.where(order < limit, order, NEVER)


def _pools(address: IntArray, private: Strings, before: int, segments: list[Any]) -> Strings:
    """Pool of each address: from the event, otherwise that of its segment at the end.

    ``private`` belongs to the rows from ``before`` on.
    """
    listed = sorted(segments, key=lambda segment: int(segment["address"]))
    start = np.array([segment["address"] for segment in listed], dtype=np.int64)
    end = start + np.array([segment["total_size"] for segment in listed], dtype=np.int64)
    names = [_pool(segment) for segment in listed]
    row = np.searchsorted(start, address, side="right") - 1
    inside = (row >= 0) & (address < np.append(end, 0)[row])
    interned = Strings.intern([*names, None])
    codes = interned.codes[np.where(inside, row, len(names))]
    values = [*interned.values, *private.values]
    told = private.codes >= 0
    codes[before:][told] = private.codes[told] + np.int32(len(interned.values))
    return Strings(codes, tuple(values))


def _pool(segment: Any) -> str | None:
    kind = None if segment.get("segment_type") is None else text(segment["segment_type"])
    private = _private_pool(segment.get("segment_pool_id"))
    return kind if private is None else f"{kind or 'pool'} {private}"


def _private_pool(identifier: Any) -> str | None:
    """Private pool id as ``(1, 0)``; None for the default pool and where the file does not say."""
    if identifier is None:
        return None
    first, second = int(identifier[0]), int(identifier[1])
    return f"({first}, {second})" if first or second else None


def _tag(metadata: Any) -> str | None:
    return text(metadata) if metadata else None


def _expandable(segment: Any) -> bool:
    return bool(segment.get("is_expandable", False))
