"""One rank's host clock and device streams: what is launched, when it runs, and who waits for whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

MAIN, AUTOGRAD = 4242, 4343
COMPUTE, COPY_IN, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, PG_INTERNAL, INPUT = 7, 20, 24, 28, 32, 40, 44
LAUNCH_LATENCY_NS = 3_001
CALL_NS = 2_203
ENTER_NS, LEAVE_NS = 907, 611

Kind = Literal["compute", "fsdp_copy", "comm", "memcpy", "memset"]


@dataclass
class HostEvent:
    """A range on the host."""

    name: str
    category: str
    thread: int
    start: int
    end: int = -1
    external_id: int = -1
    correlation: int = -1
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class Activity:
    """Something that ran on a device stream."""

    kind: Kind
    name: str
    category: str
    stream: int
    start: int
    end: int
    launch: int
    """Host time of the launching call; -1 if the launch is not in the trace."""
    correlation: int
    external_id: int
    args: dict[str, Any] = field(default_factory=dict)
    collective: Collective | None = None
    fqn: str | None = None


@dataclass(eq=False)
class Collective:
    """A collective, as the truth knows it."""

    op: str
    fqn: str | None
    phase: str
    step: int
    group: str
    mesh_dim: str | None
    dtype: str
    payload_bytes: int
    """-1 if the trace does not say."""
    ranks: tuple[int, ...]
    seq: int
    comms_id: int
    issue: int
    start: int = -1
    end: int = -1
    stall: int | None = 0
    """How long the compute stream waited for it; None if the trace cannot say (no labels)."""
    needed: int = -1
    """When the compute stream had nothing left to do but wait for it; -1 if nobody waited."""
    consumer: int | None = None
    """Position of its wait on the compute stream."""
    held_by: Literal["launch", "stream", "communicator"] = "launch"
    """What its start had to wait for last."""
    latest_start: int = -1
    """Start of the last rank."""

    @property
    def group_size(self) -> int:
        return len(self.ranks)

    @property
    def wire_bytes(self) -> int:
        if self.payload_bytes < 0:
            return -1
        trips = 2 if self.op == "all_reduce" else 1
        return trips * self.payload_bytes * (self.group_size - 1) // self.group_size


class Timeline:
    """One rank: a host cursor that launches, and streams that run first in, first out."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.now = 1_000_000 + 137 * rank
        self.thread = MAIN
        self.host: list[HostEvent] = []
        self.device: list[Activity] = []
        self.collectives: list[Collective] = []
        self.tail: dict[int, int] = defaultdict(int)
        """Per stream: when everything enqueued so far, waits included, is done."""
        self.done: dict[int, int] = defaultdict(int)
        """Per stream: the same without waits that a trace does not explain (the user's own)."""
        self.communicator: dict[str, int] = defaultdict(int)
        """Per process group: end of its last collective; one communicator runs one at a time."""
        self.waits = 0
        self.owner: str | None = None
        """Module whose work is being launched."""
        self._ids = 0
        self._open: list[HostEvent] = []

    def next_id(self) -> int:
        self._ids += 1
        return self._ids

    @contextmanager
    def range(self, name: str, category: str = "user_annotation", **args: Any) -> Iterator[HostEvent]:
        """Open a host range; nested launches take the innermost operator's id."""
        event = HostEvent(name, category, self.thread, self.now, external_id=self.next_id(), args=args)
        self.host.append(event)
        self._open.append(event)
        self.now += ENTER_NS
        yield event
        self.now += LEAVE_NS
        event.end = self.now
        self._open.pop()

    def call(self, name: str, cost: int = CALL_NS) -> HostEvent:
        """Make a runtime (or, by its name, driver) call that takes ``cost`` on the host."""
        event = HostEvent(
            name,
            "cuda_driver" if name.startswith("cuLaunch") else "cuda_runtime",
            self.thread,
            self.now,
            external_id=self._operator(),
            correlation=self.next_id(),
        )
        self.now += cost
        event.end = self.now
        self.host.append(event)
        return event

    def _operator(self) -> int:
        return next((e.external_id for e in reversed(self._open) if e.category == "cpu_op"), -1)

    def launch(
        self, stream: int, duration: int, name: str, kind: Kind, call: HostEvent | None = None
    ) -> Activity:
        """Launch one kernel or copy; ``call`` shares an earlier launch (a graph's)."""
        is_copy = kind in ("memcpy", "memset")
        if call is None:
            call = self.call(
                {"memcpy": "cudaMemcpyAsync", "memset": "cudaMemsetAsync"}.get(kind, "cudaLaunchKernel")
            )
        start = max(call.start + LAUNCH_LATENCY_NS, self.tail[stream])
        activity = Activity(
            kind=kind,
            name=name,
            category=f"gpu_{kind}" if is_copy else "kernel",
            stream=stream,
            start=start,
            end=start + duration,
            launch=call.start,
            correlation=call.correlation,
            external_id=call.external_id,
            fqn=self.owner,
        )
        self.device.append(activity)
        self.tail[stream] = self.done[stream] = activity.end
        return activity

    def kernel(self, stream: int, duration: int, name: str, kind: Kind, op: str) -> Activity:
        """Launch one kernel from inside an operator."""
        with self.range(op, "cpu_op"):
            return self.launch(stream, duration, name, kind)

    def wait_stream(self, stream: int, until: int) -> None:
        """Make later work of ``stream`` wait for a recorded event."""
        self.call("cudaStreamWaitEvent", 700)
        self.tail[stream] = max(self.tail[stream], until)

    def wait_collectives(self, stream: int, *collectives: Collective, until: int = 0) -> None:
        """Make the compute stream wait for collectives, with one call on an event recorded behind them.

        The stall of each is what it costs beyond those that end before it. ``until`` is when the event itself
        comes, if work of FSDP's own follows the collectives on their stream.
        """
        self.call("cudaStreamWaitEvent", 700)
        for collective in sorted(collectives, key=lambda c: c.end):
            if collective.stall is not None:
                collective.consumer = self.waits
                collective.needed = max(self.done[stream], self.now)
                collective.stall = max(0, collective.end - collective.needed)
                self.waits += 1
            self.done[stream] = max(self.done[stream], collective.end)
        self.done[stream] = max(self.done[stream], until)
        self.tail[stream] = max(self.tail[stream], self.done[stream])

    def synchronize(self, stream: int) -> None:
        """Block the host until ``stream`` is done."""
        call = self.call("cudaStreamSynchronize", 0)
        self.now = max(self.now + CALL_NS, self.tail[stream] + CALL_NS)
        call.end = self.now
