"""Device activities and the host calls that launched them: the bridge from streams to phases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsdp2prof import backends
from fsdp2prof.tables import BoolArray, CompactArray, EventTable, IntArray, Table, Trace

__all__ = ["DeviceTable", "device_activities", "host_launches", "runtime_calls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTable(Table):
    """Activities of the rank's device, sorted by ``start_ns``."""

    event: IntArray
    """Row in the trace's :class:`~fsdp2prof.tables.EventTable`."""
    start_ns: IntArray
    end_ns: IntArray
    stream: CompactArray
    is_copy: BoolArray
    """A memory copy, by kernel or by copy engine."""
    is_set: BoolArray
    """A memory set."""
    launch_ns: IntArray
    """Host time at which its launch began; -1 when the launch is not in the file."""
    thread: CompactArray
    """Thread of its launch; -1 unknown."""
    in_graph: BoolArray
    """Launched by the one call that launched its whole graph."""


def device_activities(trace: Trace) -> DeviceTable:
    """Return the activities of the trace's device, joined to their launches by correlation id.

    A graph's kernels share the one call that launched the graph. Activities without a launch in the file
    (queued before recording began) have launch time and thread -1.
    """
    events = trace.events
    on_device = events.category.matches(backends.is_work)
    if trace.device.index is not None:
        on_device &= events.device == trace.device.index
    event = np.flatnonzero(on_device)
    launch = host_launches(events, event)
    graph = events.name.lookup(launch).matches(backends.launches_graph)
    return DeviceTable(
        event=event,
        start_ns=events.start_ns[event],
        end_ns=events.end_ns[event],
        stream=events.stream[event],
        is_copy=events.category.matches(backends.is_copy)[event],
        is_set=events.category.matches(backends.is_fill)[event],
        launch_ns=np.where(launch >= 0, events.start_ns[launch], -1),
        thread=np.where(launch >= 0, events.thread[launch], -1),
        in_graph=graph,
    )


def runtime_calls(events: EventTable) -> IntArray:
    """Return the event rows of the host's calls into the device's runtime and driver."""
    return np.flatnonzero(events.category.matches(backends.is_call))


def host_launches(events: EventTable, rows: IntArray) -> IntArray:
    """Return the event row of the runtime call that launched each device event; -1 where it is missing."""
    calls = runtime_calls(events)
    calls = calls[events.correlation[calls] >= 0]
    if not len(calls):
        return np.full(len(rows), -1, dtype=np.int64)
    calls = calls[np.argsort(events.correlation[calls], kind="stable")]
    ids = events.correlation[calls]
    wanted = events.correlation[rows]
    found = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return np.where((wanted >= 0) & (ids[found] == wanted), calls[found], -1)
