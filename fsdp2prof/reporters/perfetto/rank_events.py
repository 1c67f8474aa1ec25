"""One rank as a process of the merged trace: the recorded events, and those that the analysis adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from fsdp2prof.analyzers import intervals
from fsdp2prof.analyzers.launches import host_launches
from fsdp2prof.analyzers.trace.rank_tables import RankTables
from fsdp2prof.analyzers.trace.waits import charging_order
from fsdp2prof.reporters.perfetto.tracks import (
    Event,
    FlowPoint,
    RankClock,
    Slice,
    Slices,
    Track,
    as_json,
    counter,
    flow,
    named_process,
    title,
    track_events,
)
from fsdp2prof.tables.columns import IntArray
from fsdp2prof.tables.trace import PhaseTable
from fsdp2prof.vocabulary import layer_name, op_label, printable

_STEPS, _EXPOSED, _STALLS, _PHASES, _LAYERS, _COLLECTIVES, _RECORDED = 1, 2, 3, 100, 200, 300, 400
"""Numbers of tracks: of one, or the first of many."""
_MOST = 99
_LAUNCHES = 1 << 32
"""Numbers of arrows that a rank's launches may take; those of all ranks stay exact in a JSON number."""


def rank_events(
    tables: RankTables, rank: int, clock: RankClock, flows: Mapping[int, FlowPoint]
) -> Iterator[list[str]]:
    """Yield everything of one rank as encoded events: its name, slices by track, arrows, memory counters.

    ``flows`` go by row among the analysed collectives.
    """
    aside = "" if clock.aligned else "clock not aligned"
    yield [as_json(event) for event in named_process(rank, f"rank {rank}", aside)]
    yield from _added(tables, rank, clock)
    yield from _collectives(tables, rank, clock, flows)
    yield from _recorded(tables, rank, clock)
    yield [as_json(event) for event in _memory(tables, rank, clock)]


def _added(tables: RankTables, rank: int, clock: RankClock) -> Iterator[list[str]]:
    """Yield steps, exposed communication, stalls, and each thread's phases and layers."""
    windows = tables.windows
    steps = [
        Slice(int(start), int(end), f"step {step}", "step")
        for step, start, end in zip(windows.step, windows.start_ns, windows.end_ns, strict=True)
    ]
    yield _lines(Track(_STEPS, "step", 0), steps, rank, clock)
    yield _lines(Track(_EXPOSED, "exposed", 1), _exposed(tables), rank, clock)
    yield _lines(Track(_STALLS, "stall", 2), _stalls(tables), rank, clock)
    for place, thread in enumerate(sorted(set(tables.phases.thread.tolist()))[:_MOST]):
        phases = tables.phases.take(tables.phases.thread == thread)
        name = _thread_name(tables, thread)
        phase = _runs(phases, phases.phase.to_list())
        layer = _runs(phases, [None if fqn is None else layer_name(fqn) for fqn in phases.fqn.to_list()])
        yield _lines(Track(_PHASES + place, f"FSDP phase, {name}", 3), phase, rank, clock)
        yield _lines(Track(_LAYERS + place, f"layer, {name}", 4), layer, rank, clock)


def _exposed(tables: RankTables) -> Iterator[Slice]:
    """Yield the stretches of exposed communication, each under the collective that it is charged to."""
    table = tables.collectives.table
    order = charging_order(tables.collectives, tables.waits)
    pieces = intervals.charged_pieces(tables.parts.exposed, table.start_ns, table.end_ns, order)
    for row, start, end in zip(*(column.tolist() for column in pieces), strict=True):
        yield Slice(start, end, f"exposed {_title(tables, row)}", "exposed")


def _stalls(tables: RankTables) -> Iterator[Slice]:
    waits = tables.waits
    for row in np.flatnonzero(waits.stall_ns > 0).tolist():
        needed = int(waits.needed_ns[row])
        name = f"waits for {_title(tables, row)}"
        yield Slice(needed, needed + int(waits.stall_ns[row]), name, "stall")


def _title(tables: RankTables, row: int) -> str:
    table = tables.collectives.table
    return printable(f"{op_label(table.op[row] or 'other')} {layer_name(table.fqn[row])}")


def _runs(phases: PhaseTable, names: list[str | None]) -> Iterator[Slice]:
    """Join neighbours with the same name; those without a name are left out."""
    since, until, before = 0, 0, None
    for start, end, name in zip(phases.start_ns.tolist(), phases.end_ns.tolist(), names, strict=True):
        if name == before and start <= until:
            until = end
            continue
        if before is not None:
            yield Slice(since, until, printable(before), "fsdp")
        since, until, before = start, end, name
    if before is not None:
        yield Slice(since, until, printable(before), "fsdp")


def _collectives(
    tables: RankTables, rank: int, clock: RankClock, flows: Mapping[int, FlowPoint]
) -> Iterator[list[str]]:
    """Yield every collective with all that is known of it, a track a kind, and the arrows between ranks."""
    table = tables.collectives.table
    analysed = np.flatnonzero(np.isin(table.step, tables.windows.step)).tolist()
    points = {analysed[place]: point for place, point in flows.items()}
    exposed = np.zeros(len(table), dtype=np.int64)
    np.add.at(exposed, tables.exposure.collective, tables.exposure.exposed_ns)
    exposed_ns = exposed.tolist()
    for place, op in enumerate(sorted(set(table.op.to_list()), key=str)[:_MOST]):
        rows = np.flatnonzero(table.op.equals(op))
        titles = [_title(tables, row) for row in rows.tolist()]
        slices = Slices(
            table.start_ns[rows],
            table.end_ns[rows],
            [title(one, "collective") for one in titles],
            [as_json(_about(tables, row, exposed_ns[row])) for row in rows.tolist()],
        )
        track = Track(_COLLECTIVES + place, op_label(op or "other"), 5)
        lines, tids = track_events(track, slices, rank, clock)
        for row, name, tid in zip(rows.tolist(), titles, tids.tolist(), strict=True):
            if (point := points.get(row)) is not None:
                time = clock.us(point.time_ns)
                lines.append(as_json(flow(point.kind, name, "collective", point.number, rank, tid, time)))
        yield lines


def _about(tables: RankTables, row: int, exposed_ns: int) -> dict[str, Any]:
    """Return the known fields of a collective: sizes in bytes, times in nanoseconds; unknown ones are
    absent."""
    table, waits = tables.collectives.table, tables.waits
    texts = {
        "layer": layer_name(table.fqn[row]),
        "phase": table.phase[row],
        "process group": table.process_group[row],
        "mesh dim": table.mesh_dim[row],
        "dtype": table.dtype[row],
    }
    numbers = {
        "group size": table.group_size[row],
        "payload bytes": table.payload_bytes[row],
        "wire bytes": table.wire_bytes[row],
        "seq": table.seq[row],
        "stall ns": waits.stall_ns[row],
    }
    return (
        {name: printable(text) for name, text in texts.items() if text is not None}
        | {name: int(number) for name, number in numbers.items() if number >= 0}
        | {"exposed ns": exposed_ns}
    )


# What was recorded.


def _recorded(tables: RankTables, rank: int, clock: RankClock) -> Iterator[list[str]]:
    """Yield the trace's own events, each on its thread or stream, and the arrows from launches."""
    events = tables.trace.events
    on_device = events.stream >= 0
    lane = np.where(on_device, events.stream, events.thread)
    names = [*map(printable, events.name.values), ""]  # -1 is without a name
    categories = [*map(printable, events.category.values), ""]
    about = _layers_of_events(tables)
    tids = np.zeros(len(events), dtype=np.int64)
    lanes = sorted(set(zip(on_device.tolist(), lane.tolist(), strict=True)))
    for place, (device, number) in enumerate(lanes):
        rows = np.flatnonzero((on_device == device) & (lane == number))
        said = zip(events.name.codes[rows].tolist(), events.category.codes[rows].tolist(), strict=True)
        slices = Slices(
            events.start_ns[rows],
            events.end_ns[rows],
            [title(names[name], categories[category]) for name, category in said],
            [about.get(row, "") for row in rows.tolist()],
        )
        name = f"stream {number}" if device else _thread_name(tables, number)
        track = Track(_RECORDED + place, name, 7 if device else 6)
        lines, tids[rows] = track_events(track, slices, rank, clock)
        yield lines
    yield _launches(tables, rank, clock, tids)


def _launches(tables: RankTables, rank: int, clock: RankClock, tids: IntArray) -> list[str]:
    """Return an arrow from each call to the activity it launched."""
    events = tables.trace.events
    device = np.flatnonzero(events.stream >= 0)
    calls = host_launches(events, device)
    device, calls = device[calls >= 0], calls[calls >= 0]
    numbers = rank * _LAUNCHES + device
    ends = (("s", calls, ""), ("f", device, ',"bp":"e"'))
    arrow = '{{"ph":"{}","name":"launch","cat":"launch","id":{},"pid":{},"tid":{},"ts":{}{}}}'.format
    return [
        arrow(kind, number, rank, tid, time, rest)
        for kind, rows, rest in ends
        for number, tid, time in zip(
            numbers.tolist(), tids[rows].tolist(), clock.each_us(events.start_ns[rows]), strict=True
        )
    ]


def _layers_of_events(tables: RankTables) -> dict[int, str]:
    """Return event row -> layer and phase, of the device's activities (host-only: of working operators)."""
    work, phases, table = tables.work, tables.phases, tables.collectives.table
    fqn, phase = phases.fqn.lookup(work.phase_row), phases.phase.lookup(work.phase_row)
    found = {event: _place(fqn[i], phase[i]) for i, event in enumerate(work.event.tolist())}
    carried = tables.device.event[tables.collectives.activity].tolist()
    for event, owner in zip(carried, tables.collectives.activity_owner.tolist(), strict=True):
        found[event] = _place(table.fqn[owner], table.phase[owner])
    return found


@lru_cache(maxsize=4096)
def _place(fqn: str | None, phase: str | None) -> str:
    return as_json({"layer": printable(layer_name(fqn)), "phase": phase or "other"})


def _memory(tables: RankTables, rank: int, clock: RankClock) -> Iterator[Event]:
    """Yield the memory that the trace's own events count, a counter a device."""
    memory = tables.trace.memory
    for row in range(len(memory)):
        device = int(memory.device[row])
        values = {"allocated": int(memory.allocated_bytes[row]), "reserved": int(memory.reserved_bytes[row])}
        known = {name: value for name, value in values.items() if value >= 0}
        if known:
            name = "host memory" if device < 0 else f"memory of device {device}"
            yield counter(rank, f"{name}, bytes", clock.us(int(memory.time_ns[row])), known)


def _lines(track: Track, slices: Iterable[Slice], rank: int, clock: RankClock) -> list[str]:
    return track_events(track, Slices.of(slices), rank, clock)[0]


def _thread_name(tables: RankTables, thread: int) -> str:
    threads = tables.trace.threads
    return f"thread {printable(threads[thread])}" if 0 <= thread < len(threads) else f"thread {thread}"
