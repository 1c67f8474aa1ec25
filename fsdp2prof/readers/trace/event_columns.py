"""Typed Kineto events to columns: exact nanoseconds, interned strings, host threads and device streams.

A file is decoded chunk by chunk, possibly in several processes; :class:`Piece` has one chunk's columns,
and :class:`Share` the chunks that one process decoded with the values of their codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fsdp2prof import backends
from fsdp2prof.readers.trace.event_args import (
    LONGEST_US,
    Interner,
    Metadata,
    Shape,
    Sync,
    collective_metadata,
    has_shapes,
    int_column,
    narrow,
    recorded_shapes,
    sync_waits,
    to_ns,
)
from fsdp2prof.readers.trace.kineto_schema import Args, Complete, EventKinds, Instant

Columns: TypeAlias = dict[str, npt.NDArray[Any]]

_WHOLE_TRACE = "Trace"
"""Category of the range that spans the whole trace; it is skipped."""


@dataclass(slots=True)
class Piece:
    """Columns of one chunk of a file; sparse rows count from the chunk's first event."""

    events: Columns
    memory: Columns
    metadata: list[Metadata]
    shapes: list[Shape]
    syncs: list[Sync]


@dataclass(slots=True)
class Share:
    """Chunks by their number in the file, and the values of their codes."""

    pieces: dict[int, Piece] = field(default_factory=dict)
    names: Interner = field(default_factory=Interner)
    categories: Interner = field(default_factory=Interner)
    pids: Interner = field(default_factory=Interner)
    tids: Interner = field(default_factory=Interner)
    _on_device: bytearray = field(default_factory=bytearray)
    """For each category so far, whether it belongs to a device."""
    _shaped: bytearray = field(default_factory=bytearray)
    """For each name so far, whether its recorded inputs are stored."""

    def add(self, number: int, events: list[Any], kinds: EventKinds) -> None:
        """Turn a chunk, decoded into events of these kinds, into columns.

        May raise ``TextTimeNeededError``, without adding a chunk.
        """
        kind, instant = kinds.complete, kinds.instant
        complete = [e for e in events if type(e) is kind]
        memory = [e for e in events if type(e) is instant and e.name == "[memory]"]
        category = self.categories.codes([e.cat for e in complete], len(complete))
        part = category != self.categories.get(_WHOLE_TRACE, -1)
        if not part.all():
            complete, category = [*compress(complete, part.tolist())], category[part]
        args = [e.args for e in complete]
        on_device = _rows(self._on_device, backends.is_on_device, self.categories, category)
        columns = self._event_columns(complete, args, category, on_device)
        self.pieces[number] = Piece(
            events=_narrowed(columns),
            memory=_narrowed(self._memory_columns(memory)) if memory else {},
            metadata=collective_metadata(args),
            shapes=recorded_shapes(
                complete, args, _rows(self._shaped, has_shapes, self.names, columns["name"])
            ),
            syncs=sync_waits(args, on_device),
        )

    def merge(self, other: Share) -> None:
        """Take over another share's chunks, translating its codes."""
        lookups = {
            "name": _lookup(self.names, other.names),
            "category": _lookup(self.categories, other.categories),
            "pid": _lookup(self.pids, other.pids),
            "tid": _lookup(self.tids, other.tids),
        }
        for number, piece in other.pieces.items():
            for columns in (piece.events, piece.memory):
                for name in lookups.keys() & columns.keys():
                    columns[name] = lookups[name][columns[name]]
            self.pieces[number] = piece

    def _event_columns(
        self, events: list[Complete], args: list[Args], category: npt.NDArray[np.int32], on_device: list[int]
    ) -> Columns:
        count = len(events)
        pid = self.pids.codes([e.pid for e in events], count)
        pid[on_device] = -1
        return {
            "start_ns": to_ns([e.ts for e in events]),
            "duration_ns": to_ns([e.dur for e in events], most_us=LONGEST_US),
            "name": self.names.codes([e.name for e in events], count),
            "category": category,
            "pid": pid,
            "tid": self.tids.codes([e.tid for e in events], count),
            "correlation": int_column([a.correlation for a in args]),
            "external_id": int_column([a.external_id for a in args]),
            **_device_columns([(events[i], args[i]) for i in on_device], on_device, count),
        }

    def _memory_columns(self, instants: list[Instant]) -> Columns:
        args = [i.args for i in instants]
        kind, index = int_column([a.device_type for a in args]), int_column([a.device_id for a in args])
        return {
            "time_ns": to_ns([i.ts for i in instants]),
            "pid": self.pids.codes([i.pid for i in instants], len(instants)),
            "tid": self.tids.codes([i.tid for i in instants], len(instants)),
            "device": np.where(kind == 0, -1, index),
            "address": int_column([a.address for a in args]),
            "bytes": int_column([a.bytes for a in args]),
            "allocated_bytes": int_column([a.allocated for a in args]),
            "reserved_bytes": int_column([a.reserved for a in args]),
        }


def _rows(
    answers: bytearray, question: Callable[[str], bool], values: Interner, codes: npt.NDArray[np.int32]
) -> list[int]:
    """Rows whose value the answer is yes for; each new value is asked about once."""
    answers.extend(map(question, islice(values, len(answers), None)))
    rows: list[int] = np.flatnonzero(np.frombuffer(bytes(answers), dtype=np.bool_)[codes]).tolist()
    return rows


def _device_columns(worked: list[tuple[Complete, Args]], rows: list[int], count: int) -> Columns:
    """Columns that only device activities have, which are those ``rows``."""
    columns = {name: np.full(count, -1, dtype=np.int64) for name in ("device", "stream", "bytes")}
    columns["device"][rows] = int_column([e.pid if a.device is None else a.device for e, a in worked])
    columns["stream"][rows] = int_column([e.tid if a.stream is None else a.stream for e, a in worked])
    columns["bytes"][rows] = int_column([a.bytes for _, a in worked])
    return columns


def _narrowed(columns: Columns) -> Columns:
    """Columns as they wait for the others, or travel from another process: in less than half the bytes."""
    return {name: narrow(values) for name, values in columns.items()}


def _lookup(own: Interner, other: Interner) -> npt.NDArray[np.int32]:
    """Translation of another interner's codes; -1 stays -1."""
    return np.asarray([*(own[value] for value in other), -1], dtype=np.int32)
