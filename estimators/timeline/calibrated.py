"""Costs of commands by a recorded run, instead of the models of kernels, hosts and links.

By place (layer with its numbers left out, and phase): how many times as long the recorded kernels took as
modelled ones, and how long the host took for an operator; by operation and group: how long collectives of
recorded sizes took. What was not recorded is the mean of what was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdp2prof.estimators.simulate.program import Collective, Command, Enter, Kernel, Leave, Program
from fsdp2prof.estimators.timeline.costs import ClusterCosts, Place, Transfer, places_of

REST = "outside every captured command"
"""Name of the host's work that a capture does not see: data loading, logging, zeroing gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Measured costs of one recorded run."""

    source: str
    on_host: bool
    """Recorded on a CPU."""
    kernel_factor: Mapping[Place, float]
    """Recorded over modelled kernel time."""
    operator_ns: Mapping[Place, float]
    """Host time of an operator beyond the kernel itself."""
    rest_ns: int
    """Host time of a step at places without a captured command."""
    collectives: Mapping[tuple[str, int], Sequence[tuple[int, int]]]
    """(operation, ranks) -> (payload in bytes, nanoseconds), ascending."""
    low_frac: float
    high_frac: float
    """The recorded steps' quartiles over their median."""
    steps: int
    notes: tuple[str, ...] = ()

    def collective_ns(self, op: str, ranks: int, payload: int) -> int | None:
        """Time of a collective from the recorded ones of its kind; None if none was recorded.

        For another size, along the line through the smallest and the largest recorded size (through zero
        if there is one size); for another group, by the bytes that each rank sends.
        """
        known = self.collectives.get((op, ranks))
        share = 1.0
        if known is None:
            others = [size for kind, size in self.collectives if kind == op and size > 1]
            if not others or ranks < 2:
                return None
            near = min(others, key=lambda size: abs(size - ranks))
            known = self.collectives[op, near]
            share = ((ranks - 1) / ranks) / ((near - 1) / near)
        exact = dict(known).get(payload)
        if exact is not None:
            return round(share * exact)
        (low, fast), (high, slow) = known[0], known[-1]
        each = (slow - fast) / (high - low) if high > low else 0.0
        if each <= 0:
            each = slow / high
            fast, low = 0, 0
        latency = max(0.0, fast - each * low)
        return max(1, round(share * (latency + each * payload)))


@dataclass(kw_only=True)
class PlacedCosts(ClusterCosts):
    """Costs on a CPU, or by a calibration, of the commands of one program (by identity)."""

    calibration: Calibration | None = None
    places: dict[int, Place] = field(default_factory=dict)
    """Identity of a command -> its place."""

    @property
    def on_host(self) -> bool:
        """Whether the host computes itself."""
        return self.cluster.hardware.on_host or (self.calibration is not None and self.calibration.on_host)

    def __post_init__(self) -> None:
        ClusterCosts.__post_init__(self)
        if self.on_host:
            self.launch_latency_ns = 0

    def kernel_ns(self, kernel: Kernel) -> int:
        """Time on the device; none on a CPU, where the host computes."""
        return 0 if self.on_host else self._kernel_ns(kernel)

    def slowdown(self, kernel: Kernel) -> float:
        """None by a recording, whose kernels have it already, and on a CPU."""
        return 0.0 if self.on_host or self.calibration is not None else self.contention_frac

    def host_ns(self, command: Command) -> int:
        """Time the host needs for a command."""
        if self.on_host and isinstance(command, (Enter, Leave)):
            return 1  # so that ranges that begin together differ
        if not isinstance(command, Kernel):
            return 0 if self.on_host or self.calibration is not None else ClusterCosts.host_ns(self, command)
        if self.calibration is not None and command.op == REST:
            return self.calibration.rest_ns
        return self.computing_ns(command) + self._operator_ns(command)

    def computing_ns(self, command: Command) -> int:
        """Compute time within the host's time for a command; none if there is a device."""
        return self._kernel_ns(command) if self.on_host and isinstance(command, Kernel) else 0

    def transfer(self, collective: Collective) -> Transfer:
        """Return time, link and bandwidth of a collective."""
        if self.calibration is not None:
            time = self.calibration.collective_ns(
                collective.op, collective.group_size, collective.payload_bytes
            )
            if time is not None:
                return Transfer(time, self.cluster.node_link, collective.payload_bytes * 1e9 / time)
        return ClusterCosts.transfer(self, collective)

    def _operator_ns(self, kernel: Kernel) -> int:
        if self.calibration is None:
            return (self.cluster.hardware.host_operator_ns or self.host.operator_ns) + self.host.work_ns(
                kernel
            )
        return round(_of(self.calibration.operator_ns, self.places.get(id(kernel))))

    def _kernel_ns(self, kernel: Kernel) -> int:
        time = ClusterCosts.kernel_ns(self, kernel)
        if self.calibration is None:
            return time
        return round(time * _of(self.calibration.kernel_factor, self.places.get(id(kernel))))


def placed(
    program: Program, costs: ClusterCosts, calibration: Calibration | None
) -> tuple[Program, PlacedCosts]:
    """Return a program of distinct commands with their costs; with a calibration, by their places."""
    commands = [replace(command) for command in program.commands]
    program = replace(program, commands=commands)
    places: dict[int, Place] = {}
    if calibration is not None:
        places = {id(one): place for one, place in zip(commands, places_of(program), strict=True)}
        if calibration.rest_ns:
            commands.append(Kernel(0, REST, None))
    return program, PlacedCosts(
        cluster=costs.cluster,
        mesh=costs.mesh,
        host=costs.host,
        contention_frac=costs.contention_frac,
        calibration=calibration,
        places=places,
    )


def _of(known: Mapping[Place, float], place: Place | None) -> float:
    """A place's own value, otherwise the mean of its phase, otherwise the overall mean."""
    if place is not None and place in known:
        return known[place]
    same = [value for (_, phase), value in known.items() if place is not None and phase == place[1]]
    values = same or list(known.values())
    return sum(values) / len(values) if values else 1.0
