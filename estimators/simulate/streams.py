"""The streams of one rank, simulated: when every command of a program starts and ends.

The host issues commands in order, each after the time it takes; a stream runs what is queued on it in order,
no sooner than its launch and the events that it waits for; collectives of one communicator
run one after the other. While a collective transfers, computing kernels go slower by the share of the device
that it takes, and transfers that use the same link share it. Time is integer nanoseconds throughout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.simulate.program import (
    Collective,
    Command,
    Enter,
    HostWait,
    Kernel,
    Leave,
    Program,
    Record,
    Wait,
)
from fsdp2prof.tables.columns import IntArray

_FULL = 1_000_000
"""Speed of an undisturbed activity, in units of work per nanosecond."""
_LONGEST_NS = 1 << 56
"""Two years."""


class Costs(Protocol):
    """Costs of commands on some hardware."""

    launch_latency_ns: int
    """From a launch to the earliest start."""

    def kernel_ns(self, kernel: Kernel) -> int:
        """Time of a kernel without interference; 0 for commands that launch nothing."""

    def collective_ns(self, collective: Collective) -> int:
        """Time of a collective that nothing disturbs and for which no rank is late."""

    def link(self, collective: Collective) -> str:
        """Name of the link that a collective uses: collectives on the same link share its bandwidth."""

    def slowdown(self, kernel: Kernel) -> float:
        """How much longer a kernel takes while a collective is in flight, as a fraction of its time."""

    def disturbs(self, collective: Collective) -> bool:
        """Whether kernels are slower while a collective is in flight: not where copy engines send it."""

    def host_ns(self, command: Command) -> int:
        """Time the host needs to issue a command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Time of each command, by its position in the program; -1 for commands that run only on the host."""

    host_ns: IntArray
    """The host begins to issue it."""
    host_end_ns: IntArray
    start_ns: IntArray
    """On the device."""
    end_ns: IntArray


def host_tail_ns(program: Program, timeline: Timeline) -> int:
    """How long the host still computes when the device is done, as an optimizer on the host does."""
    computes = any(
        isinstance(command, Kernel) and command.work is not None and command.work.kind == "host"
        for command in program.commands
    )
    if not computes:
        return 0
    return max(0, int(timeline.host_end_ns.max()) - max(0, int(timeline.end_ns.max())))


def simulate(program: Program, costs: Costs, *, repeats: int = 2) -> Timeline:
    """Run a program ``repeats`` times in a row and return the last run's times, from its first host time.

    The earlier runs bring host and streams into the state of a steady step. Raises ``ModelError`` for a
    program whose time is implausibly long.
    """
    state = _Simulation(program, costs, repeats)
    state.run()
    if max((*state.host_end, *state.end), default=0) > _LONGEST_NS:
        raise ModelError(
            "a step would take more than two years: a rate or time in the hardware description is wrong"
        )
    size = len(program.commands)
    begin = state.host[-size] if size else 0
    return Timeline(
        host_ns=_shifted(state.host[-size:], begin),
        host_end_ns=_shifted(state.host_end[-size:], begin),
        start_ns=_shifted(state.start[-size:], begin),
        end_ns=_shifted(state.end[-size:], begin),
    )


def _shifted(times: Sequence[int], begin: int) -> IntArray:
    array = np.array(times, dtype=np.int64)
    return np.where(array < 0, -1, array - begin)


@dataclass(slots=True)
class _Running:
    """An activity in flight."""

    position: int
    left: int
    """Work left, in units of which an undisturbed activity does :data:`_FULL` a nanosecond."""
    speed: int
    until: int
    """When it will end at this speed."""


class _Simulation:
    """The host and the streams; ``now`` is the device's time, and the host may be ahead of it.

    Positions count through all repeats. A negative entry of a queue, ``~position``, is the point in the
    issuing stream after which a collective on its communicator's own stream may start.
    """

    def __init__(self, program: Program, costs: Costs, repeats: int) -> None:
        self._program = program.commands
        self._size = len(program.commands)
        self._repeats = repeats
        self._latency = costs.launch_latency_ns
        self._issue_ns = [costs.host_ns(command) for command in self._program]
        self._length = [_length(command, costs) for command in self._program]
        self._slowed = [_slowed(command, costs) for command in self._program]
        self._is_kernel = [isinstance(command, Kernel) for command in self._program]
        self._link = [costs.link(c) if isinstance(c, Collective) else "" for c in self._program]
        self._disturbs = [isinstance(c, Collective) and costs.disturbs(c) for c in self._program]
        self._queues: list[deque[int]] = [deque() for _ in range(program.streams)]
        self._own_queues: dict[str, int] = {}
        self._communicators: dict[str, deque[int]] = {}
        """Collectives of each communicator in the order of issue, the running one first."""
        self._running: dict[int, _Running] = {}
        self._events: dict[tuple[int, int], int] = {}
        """(repeat, event) -> time; -1 if not yet recorded. Waits for an event that is never recorded end
        at once."""
        self._gates: dict[int, bool] = {}
        self._links: dict[str, int] = {}
        self._in_flight = 0
        self._now = 0
        total = self._size * repeats
        self.host, self.host_end = [0] * total, [0] * total
        self.start, self.end = [-1] * total, [-1] * total

    def run(self) -> None:
        """Issue every command and wait until the device is done."""
        host = 0
        for position in range(self._size * self._repeats):
            command = self._program[position % self._size]
            self.host[position] = host
            if isinstance(command, HostWait):
                host = max(host, self._wait_on_host(position, command))
            host += self._issue_ns[position % self._size]
            self.host_end[position] = host
            self._issue(position, command)
        self._advance(lambda: False)

    def _issue(self, position: int, command: Command) -> None:
        if isinstance(command, (Enter, Leave, HostWait)):
            return
        if isinstance(command, Kernel) and not self._length[position % self._size]:
            return
        stream = command.stream
        if isinstance(command, Record):
            self._events[position // self._size, command.event] = -1
        elif isinstance(command, Collective):
            self._communicators.setdefault(command.group, deque()).append(position)
            if command.event >= 0:
                # Asynchronous: NCCL runs it on its own stream once the issuing stream has come this far.
                self._events[position // self._size, command.event] = -1
                self._gates[position] = False
                self._queues[stream].append(~position)
                stream = self._own_queues.setdefault(command.group, len(self._queues))
                if stream == len(self._queues):
                    self._queues.append(deque())
        self._queues[stream].append(position)

    def _wait_on_host(self, position: int, command: HostWait) -> int:
        """Let the device continue until the host's wait is over; return that time."""
        if command.event >= 0:
            key = position // self._size, command.event
            self._advance(lambda: self._events.get(key, 0) >= 0)
            return self._events.get(key, 0)
        queue = self._queues[command.stream]
        self._advance(lambda: not queue and command.stream not in self._running)
        return self._now

    def _advance(self, done: Callable[[], bool]) -> None:
        """Run the device until ``done()`` or until nothing is left to run."""
        while True:
            self._start_what_can()
            if done():
                return
            self._run_on()
            times = [running.until for running in self._running.values()]
            times += self._launches_to_come()
            if not times:
                return
            self._step_to(min(times))

    def _run_on(self) -> None:
        """Let the only compute stream run kernel after kernel while nothing else can happen.

        The result is the same as step by step, but faster: other running commands keep their speed
        meanwhile.
        """
        computing = [stream for stream, one in self._running.items() if not self._links_of(one)]
        if len(computing) != 1:
            return
        stream = computing[0]
        running, queue = self._running[stream], self._queues[stream]
        rest = [one.until for other, one in self._running.items() if other != stream]
        limit = min([*rest, *self._launches_to_come()], default=None)
        began = self._now
        while queue and queue[0] >= 0 and (limit is None or running.until < limit):
            position = queue[0]
            at = position % self._size
            begin = max(running.until, self.host_end[position] + self._latency)
            if not self._is_kernel[at] or (limit is not None and begin >= limit):
                break  # another activity ends first and may change what this one's speed is
            queue.popleft()
            self.end[running.position] = running.until
            self.start[position] = self._now = begin
            running.position, running.left = position, self._length[at] * _FULL
            running.speed = self._slowed[at] if self._in_flight else _FULL
            running.until = begin - (-running.left // running.speed)  # rounded up: no work ends early
        if self._now > began:
            for other, one in self._running.items():
                if other != stream:
                    one.left -= (self._now - began) * one.speed

    def _links_of(self, running: _Running) -> str:
        return self._link[running.position % self._size]

    def _launches_to_come(self) -> list[int]:
        """Launch times of the next commands of idle streams that wait for nothing else."""
        heads = [
            queue[0] for stream, queue in enumerate(self._queues) if queue and stream not in self._running
        ]
        times = [self._ready(position) for position in heads if position >= 0]
        return [time for time in times if time is not None and time > self._now]

    def _ready(self, position: int) -> int | None:
        """Earliest start of the next command of a stream, as far as known; None if it waits for something."""
        command = self._program[position % self._size]
        if isinstance(command, Wait):
            happened = self._events.get((position // self._size, command.event), 0) >= 0
            return self._now if happened else None
        if isinstance(command, Record):
            return self._now
        if isinstance(command, Collective) and (
            self._communicators[command.group][0] != position or not self._gates.get(position, True)
        ):
            return None
        return self.host_end[position] + self._latency

    def _start_what_can(self) -> None:
        """Pass records and waits, and start every activity that is due, until nothing changes."""
        changed = True
        while changed:
            changed = False
            for stream, queue in enumerate(self._queues):
                while queue and stream not in self._running:
                    position = queue[0]
                    ready = self._now if position < 0 else self._ready(position)
                    if ready is None or ready > self._now:
                        break
                    queue.popleft()
                    changed = True
                    self._pass(stream, position)

    def _pass(self, stream: int, position: int) -> None:
        """Let the head of a stream happen."""
        if position < 0:
            self._gates[~position] = True
            return
        command = self._program[position % self._size]
        if isinstance(command, Record):
            self._events[position // self._size, command.event] = self._now
        elif not isinstance(command, Wait):
            self._begin(stream, position)

    def _begin(self, stream: int, position: int) -> None:
        link = self._link[position % self._size]
        if link:
            self._links[link] = self._links.get(link, 0) + 1
            self._in_flight += self._disturbs[position % self._size]
        self.start[position] = self._now
        self._running[stream] = running = _Running(
            position, self._length[position % self._size] * _FULL, _FULL, 0
        )
        self._set_speeds() if link else self._set_speed(running)

    def _set_speeds(self) -> None:
        for running in self._running.values():
            self._set_speed(running)

    def _set_speed(self, running: _Running) -> None:
        link = self._link[running.position % self._size]
        if link:
            running.speed = _FULL // self._links[link]  # collectives on one link share it evenly
        else:
            running.speed = self._slowed[running.position % self._size] if self._in_flight else _FULL
        running.until = self._now - (-running.left // running.speed)

    def _step_to(self, time: int) -> None:
        passed = time - self._now
        self._now = time
        for running in self._running.values():
            running.left -= passed * running.speed
        transfers = False
        for stream in [stream for stream, running in self._running.items() if running.left <= 0]:
            transfers |= self._finish(self._running.pop(stream).position)
        if transfers:
            self._set_speeds()

    def _finish(self, position: int) -> bool:
        """Note the end of an activity; whether it was a collective."""
        self.end[position] = self._now
        command = self._program[position % self._size]
        if not isinstance(command, Collective):
            return False
        self._communicators[command.group].popleft()
        self._links[self._link[position % self._size]] -= 1
        self._in_flight -= self._disturbs[position % self._size]
        if command.event >= 0:
            self._events[position // self._size, command.event] = self._now
        return True


def _length(command: Command, costs: Costs) -> int:
    """Nanoseconds of an activity alone; 0 for commands that the device does not run."""
    if isinstance(command, Collective):
        return max(1, costs.collective_ns(command))
    return costs.kernel_ns(command) if isinstance(command, Kernel) else 0


def _slowed(command: Command, costs: Costs) -> int:
    """Speed of a kernel beside a collective in flight."""
    return round(_FULL / (1 + costs.slowdown(command))) if isinstance(command, Kernel) else _FULL
