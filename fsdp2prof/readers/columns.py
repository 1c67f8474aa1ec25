"""Typed Kineto events to columns: exact nanoseconds, interned strings, host threads and device streams."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fsdp2prof.readers.kineto_schema import Args, Complete, Instant
from fsdp2prof.tables import EventTable, IntArray, MemoryEventTable, Strings

__all__ = [
    "DEVICE_CATEGORIES",
    "EventColumns",
    "Interner",
    "MemoryColumns",
    "TextTimeNeededError",
    "int_column",
]

DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"})
"""Kineto categories of what runs on a device."""

_FLOAT_EXACT_BELOW_US = float(1 << 43)
"""Below it half the spacing of float64 is under half a nanosecond, so three decimals survive the rounding."""

_THREE_DECIMALS = re.compile(rb"\.(\d{3})(?=,|\Z)")
_INT64 = np.iinfo(np.int64)


class TextTimeNeededError(Exception):
    """Fractional timestamps too large for float64 to hold their nanoseconds: decode them as text."""


class Interner(dict[Any, int]):
    """Distinct values numbered in order of appearance."""

    def __missing__(self, key: Any) -> int:
        code = self[key] = len(self)
        return code

    def codes(self, values: Iterable[Any], count: int) -> npt.NDArray[np.int32]:
        """Numbers of ``count`` values."""
        return np.fromiter(map(self.__getitem__, values), dtype=np.int32, count=count)


class EventColumns:
    """Complete events, added piece by piece, until :meth:`finish` sorts them into an :class:`EventTable`."""

    def __init__(self, pids: Interner, tids: Interner) -> None:
        self._names, self._categories, self._pids, self._tids = Interner(), Interner(), pids, tids
        self._pieces: list[dict[str, npt.NDArray[Any]]] = []
        self._rows = 0
        self.negative_durations = 0

    def add(self, events: list[Complete], args: list[Args]) -> int:
        """Add events; return the row of the first, before sorting. May raise :class:`TextTimeNeededError`."""
        count = len(events)
        start = to_ns([e.ts for e in events])
        duration = to_ns([e.dur for e in events])
        category = self._categories.codes([e.cat for e in events], count)
        pid = self._pids.codes([e.pid for e in events], count)
        tid = self._tids.codes([e.tid for e in events], count)
        is_device = np.asarray([c in DEVICE_CATEGORIES for c in self._categories], dtype=np.bool_)[category]
        device = np.full(count, -1, dtype=np.int32)
        stream = np.full(count, -1, dtype=np.int32)
        rows = np.flatnonzero(is_device).tolist()
        device[rows] = int_column([events[i].pid if args[i].device is None else args[i].device for i in rows])
        stream[rows] = int_column([events[i].tid if args[i].stream is None else args[i].stream for i in rows])
        self.negative_durations += int(np.count_nonzero(duration < 0))
        self._pieces.append(
            {
                "start_ns": start,
                "end_ns": start + np.maximum(duration, 0),
                "name": self._names.codes([e.name for e in events], count),
                "category": category,
                "pid": np.where(is_device, -1, pid),
                "tid": tid,
                "device": device,
                "stream": stream,
                "correlation": int_column([a.correlation for a in args]),
                "external_id": int_column([a.external_id for a in args]),
                "bytes": int_column([a.bytes for a in args]),
            }
        )
        self._rows += count
        return self._rows - count

    def finish(self, threads: ThreadNumbers) -> tuple[EventTable, IntArray]:
        """Return the table sorted by start, outer before inner, and the position of every added row in it."""
        start = self._column("start_ns")
        end = self._column("end_ns")
        order = _outer_first(start, end)
        position = np.empty(len(order), dtype=np.int64)
        position[order] = np.arange(len(order))
        start, end = start[order], end[order]
        thread = threads.number(self._column("pid"), self._column("tid"))[order]
        columns = {
            name: self._column(name)[order].astype(np.int64)
            for name in ("device", "stream", "correlation", "external_id", "bytes")
        }
        table = EventTable(
            start_ns=start,
            end_ns=end,
            name=Strings(self._column("name", np.int32)[order], tuple(self._names)),
            category=Strings(self._column("category", np.int32)[order], tuple(self._categories)),
            thread=thread,
            **columns,
        )
        return table, position

    def _column(self, name: str, dtype: type = np.int64) -> npt.NDArray[Any]:
        """Join one column's pieces, letting go of them."""
        pieces = [piece.pop(name) for piece in self._pieces]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)


class MemoryColumns:
    """``[memory]`` instants, added piece by piece."""

    def __init__(self, pids: Interner, tids: Interner) -> None:
        self._pids, self._tids = pids, tids
        self._pieces: list[dict[str, npt.NDArray[Any]]] = []

    def add(self, instants: list[Instant]) -> None:
        """Add instants. May raise :class:`TextTimeNeededError`."""
        count = len(instants)
        args = [i.args for i in instants]
        kind, index = int_column([a.device_type for a in args]), int_column([a.device_id for a in args])
        self._pieces.append(
            {
                "time_ns": to_ns([i.ts for i in instants]),
                "pid": self._pids.codes([i.pid for i in instants], count),
                "tid": self._tids.codes([i.tid for i in instants], count),
                "device": np.where(kind == 0, -1, index),
                "address": int_column([a.address for a in args]),
                "bytes": int_column([a.bytes for a in args]),
                "allocated_bytes": int_column([a.allocated for a in args]),
                "reserved_bytes": int_column([a.reserved for a in args]),
            }
        )

    def finish(self, threads: ThreadNumbers) -> MemoryEventTable:
        """Return the table in time order."""
        names = ("time_ns", "device", "address", "bytes", "allocated_bytes", "reserved_bytes")
        columns = {name: self._column(name) for name in names}
        thread = threads.number(self._column("pid"), self._column("tid"))
        order = np.argsort(columns["time_ns"], kind="stable")
        return MemoryEventTable(thread=thread, **columns).take(order)

    def _column(self, name: str) -> npt.NDArray[Any]:
        pieces = [piece.pop(name) for piece in self._pieces]
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64)


class ThreadNumbers:
    """Numbers the (pid, tid) pairs of host events in order of appearance; -1 where the pid is -1."""

    def __init__(self, pids: Interner, tids: Interner) -> None:
        self._pids, self._tids = list(pids), list(tids)
        self._numbers = np.full(len(pids) * len(tids), -1, dtype=np.int64)
        self.names: list[str] = []

    def number(self, pid: npt.NDArray[Any], tid: npt.NDArray[Any]) -> IntArray:
        """Thread numbers of pairs of interned pids and tids."""
        pair = pid.astype(np.int64) * len(self._tids) + tid
        host = pid >= 0
        seen = np.zeros(len(self._numbers), dtype=np.bool_)
        seen[pair[host]] = True
        for code in np.flatnonzero(seen & (self._numbers < 0)).tolist():
            self._numbers[code] = len(self.names)
            self.names.append(f"{self._pids[code // len(self._tids)]}/{self._tids[code % len(self._tids)]}")
        return np.where(host, self._numbers[np.where(host, pair, 0)], -1)


def to_ns(microseconds: list[Any]) -> IntArray:
    """Convert microseconds (int, float or JSON text) to exact integer nanoseconds.

    Whole and fractional microseconds are converted apart; raises :class:`TextTimeNeededError` where float64
    has already lost the fraction (from 2**43 us on, as in Unix time).
    """
    if microseconds and isinstance(microseconds[0], msgspec.Raw):
        return _text_to_ns(microseconds)
    values = np.array(microseconds, dtype=None if microseconds else np.int64)
    if values.dtype == np.int64:
        return np.asarray(values * 1000)
    if np.abs(values).max() >= _FLOAT_EXACT_BELOW_US:
        raise TextTimeNeededError
    whole = np.floor(values)
    fraction_ns = np.rint((values - whole) * 1000).astype(np.int64)
    return np.asarray(whole.astype(np.int64) * 1000 + fraction_ns)


def _text_to_ns(microseconds: list[msgspec.Raw]) -> IntArray:
    """Convert decimal text: dropping the point of a number with three decimals makes nanoseconds of it."""
    text, replaced = _THREE_DECIMALS.subn(rb"\1", b",".join(microseconds))
    if replaced == len(microseconds):
        return np.asarray(np.fromstring(text, dtype=np.int64, sep=","))
    return np.asarray([round(Decimal(bytes(item).decode()) * 1000) for item in microseconds], dtype=np.int64)


def int_column(values: list[Any]) -> IntArray:
    """Convert JSON values to int64: text is parsed (``0x`` too), what is no integer of 64 bits is -1."""
    try:
        return np.array(values, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return np.asarray([_integer(value) for value in values], dtype=np.int64)


def _integer(value: Any) -> int:
    if isinstance(value, str):
        try:
            value = int(value, 0)
        except ValueError:
            return -1
    if not isinstance(value, int) or not _INT64.min <= value <= _INT64.max:
        return -1
    return value


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
