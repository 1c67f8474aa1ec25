"""A recorded rank as a program: what its host did one after the other, and what that started.

Times are the recording's own, in nanoseconds on the rank's own clock. A :class:`Point` ends one
stretch of the host's time; an :class:`Activity` is what ran beside the host: a kernel, a copy, a collective.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Kind: TypeAlias = Literal["compute", "fsdp_copy", "memcpy", "collective"]

Role: TypeAlias = Literal["", "copy_in", "copy_out", "reduce", "to_host"]
"""What one of FSDP2's own copies is for, or that another copy blocks its host; empty is anything else."""


@dataclass(slots=True, eq=False)
class Activity:
    """An activity beside the host, with its recorded data."""

    index: int
    """Its own in the program of its rank; a copy that a change adds gets a new one."""
    start: int
    end: int
    stream: int
    kind: Kind
    step: int
    """That launched it; -1 outside every one."""
    fqn: str | None = None
    phase: str = "other"
    role: Role = ""
    op: str = ""
    """Of a collective."""
    group: str = ""
    """Communicator of a collective."""
    dtype: str = ""
    group_size: int = -1
    payload_bytes: int = -1
    meeting: int = -1
    """Number of a collective in which ranks were matched; equal on all its ranks."""
    transfer_ns: int = 0
    """A collective's time from the arrival of its last rank (if that is not known: of this one)."""
    gap: int = 0
    """From the moment at which everything known allowed it to start, to its start; never negative."""
    early: int = 0
    """How long before its launch plus the usual latency it started, as a negative number; otherwise 0."""
    overlap: int = 0
    """How long it overlapped with earlier launches on its stream."""
    rules: frozenset[str] = frozenset()
    """Waits of FSDP2 that the recording contradicts."""
    after: tuple[Activity, ...] = ()
    """Its observed dependency, if no rule explains it."""
    origin: int = -1
    """Activity that it is a copy of; its own index if it was recorded."""

    @property
    def duration(self) -> int:
        """Recorded nanoseconds."""
        return self.end - self.start


@dataclass(slots=True, eq=False)
class Point:
    """The end of an interval of the host's time."""

    number: int
    """Its place in the recording."""
    begin: int
    """Recorded start of the interval."""
    end: int
    work_ns: int
    """The host's working time in it; in the rest it was blocked."""
    compute_ns: int = 0
    """Part of ``work_ns`` that computed (a CPU is host and device)."""
    update_ns: int = 0
    """Part of ``compute_ns`` that updated parameters: the optimizer's."""
    launches: Activity | None = None
    awaits: Activity | None = None
    """The host continues when this has ended."""
    syncs: bool = False
    """It waits because a call synchronises with the device."""
    needs: Activity | None = None
    """The compute stream waits for this collective from here on."""
    joins: bool = False
    """The gather's streams wait for the compute stream from here on (a root's forward begins)."""
    label: str = ""
    """Name of the label that begins or ends here."""
    opens: bool = False
    copy: bool = False
    """Whether a change repeats the recorded interval here."""


@dataclass(slots=True)
class RankProgram:
    """One rank of a recorded run."""

    rank: int
    on_device: bool
    compute_stream: int
    latency_ns: int
    """Shortest time from a launch to a start."""
    points: list[Point]
    activities: dict[int, Activity]
    """By index; the collectives come first, as in their table."""
    shift_ns: int = 0
    """Added to the rank's times to get those of the clock that all ranks share."""
    recorded: dict[int, Activity] = field(default_factory=dict)
    """All that were recorded, by index, whether they still run or not."""
    left_out: list[tuple[int, int]] = field(default_factory=list)
    """Recorded stretches of the host's time that a change leaves out."""
    events: dict[int, int] = field(default_factory=dict)
    """Event row in the trace -> activity."""
    compared: list[int] = field(default_factory=list)
    """Collectives that were compared with other ranks': row of the comparison -> index."""
    steps: list[int] = field(default_factory=list)
    """Numbers of the analysed steps; 0 where the whole trace is one."""
    windows: list[tuple[int, int]] = field(default_factory=list)
    """Beginning and end of each analysed step, as the analysis measures them."""
    boundary: int = -1
    """Number of the point at which the first analysed step begins: all up to it stays as recorded."""
    waits: dict[int, list[tuple[bool, Activity]]] | None = field(default=None, init=False, repr=False)
    """Dependencies of each activity, and whether it overlaps with them; a changed copy begins without
    them."""
    found: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """Cached look-ups in these points; a changed copy of the program begins without them."""


Job: TypeAlias = "list[RankProgram]"
"""All recorded ranks, in order."""
