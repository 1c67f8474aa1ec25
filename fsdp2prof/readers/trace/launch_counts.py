"""Launches without a record of the device, counted in a trace file without building its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fsdp2prof import backends
from fsdp2prof.readers.trace.event_stream import decode_pieces


class _Args(msgspec.Struct, gc=False):
    correlation: Any = -1


class _Event(msgspec.Struct, gc=False):
    """Decoded part of an event; everything else is skipped."""

    cat: str = ""
    name: str = ""
    tid: Any = None
    ts: float = 0.0
    args: _Args | None = None


class _Document(msgspec.Struct, gc=False):
    events: list[_Event] = msgspec.field(name="traceEvents", default_factory=list)


def count_launches(path: Path) -> tuple[int, int]:
    """Return how many calls of a trace launched work on a device, and how many of them have no record.

    Costs about as much as decoding the file once. Raises ``TraceError`` for a file that cannot be read.
    """
    events, document = msgspec.json.Decoder(list[_Event]), msgspec.json.Decoder(_Document)
    calls: list[tuple[Any, float, Any]] = []
    capturing: list[tuple[float, Any, str]] = []
    records: set[Any] = set()

    def count(text: bytes, _: int, is_last: bool) -> None:
        found = document.decode(text).events if is_last else events.decode(text)
        for event in found:
            if event.args is None or event.args.correlation == -1:
                continue
            if backends.is_work(event.cat):
                records.add(event.args.correlation)
            elif not backends.is_call(event.cat):
                continue
            elif backends.is_launch(event.name):
                calls.append((event.args.correlation, event.ts, event.tid))
            elif backends.begins_capture(event.name) or backends.ends_capture(event.name):
                capturing.append((event.ts, event.tid, event.name))

    decode_pieces(path, count, [])
    graphs = backends.captures(capturing)
    ran = [
        correlation
        for correlation, time, thread in calls
        if not any(thread == of and begins <= time < ends for of, begins, ends in graphs)
    ]
    return len(ran), sum(call not in records for call in ran)
