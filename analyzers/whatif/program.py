"""A recorded rank as a program: what its host did one after the other, and what that started.

Times are the recording's own, in nanoseconds on the rank's own clock. A point ends one stretch of the
host's time; an activity is what ran beside the host: a kernel, a copy, a collective.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from fsdp2prof.tables.columns import BoolArray, IntArray, Strings, Table


@dataclass(frozen=True, slots=True)
class Activities(Table):
    """Activities beside the host, with their recorded data; those that a change adds come last."""

    start: IntArray
    end: IntArray
    stream: IntArray
    kind: Strings
    """``compute``, ``fsdp_copy``, ``memcpy`` or ``collective``."""
    step: IntArray
    """That launched it; -1 outside every one."""
    fqn: Strings
    phase: Strings
    role: Strings
    """Purpose of one of FSDP2's own copies (``copy_in``, ``copy_out``, ``reduce``), or ``to_host`` for
    another copy that blocks its host; null is anything else."""
    op: Strings
    """Of a collective."""
    group: Strings
    """Communicator of a collective."""
    dtype: Strings
    group_size: IntArray
    payload_bytes: IntArray
    meeting: IntArray
    """Number of a collective in which ranks were matched; equal on all its ranks, -1 is none."""
    transfer_ns: IntArray
    """A collective's time from the arrival of its last rank (if that is not known: of this one)."""
    gap: IntArray
    """From the moment at which everything known allowed it to start, to its start; never negative."""
    early: IntArray
    """How long before its launch plus the usual latency it started, as a negative number; otherwise 0."""
    overlap: IntArray
    """How long it overlapped with earlier launches on its stream."""
    rules: IntArray
    """Rules of FSDP2 that the recording contradicts, one bit each."""
    after: IntArray
    """Its observed dependency, if no rule explains it; -1 is none."""
    origin: IntArray
    """Activity that it is a copy of; its own row if it was recorded."""

    @property
    def duration(self) -> IntArray:
        """Recorded nanoseconds."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Points(Table):
    """Ends of intervals of the host's time, in order; activities are rows, -1 is none."""

    number: IntArray
    """Place in the recording."""
    begin: IntArray
    """Recorded start of the interval."""
    end: IntArray
    work_ns: IntArray
    """The host's working time in it; in the rest it was blocked."""
    compute_ns: IntArray
    """Part of ``work_ns`` that computed (a CPU is host and device)."""
    update_ns: IntArray
    """Part of ``compute_ns`` that updated parameters: the optimizer's."""
    launches: IntArray
    awaits: IntArray
    """The host continues when this has ended."""
    syncs: BoolArray
    """It waits because a call synchronises with the device."""
    needs: IntArray
    """The compute stream waits for this collective from here on."""
    joins: BoolArray
    """The gather's streams wait for the compute stream from here on (a root's forward begins)."""
    label: Strings
    """Name of the label that begins or ends here; null is none."""
    opens: BoolArray
    copy: BoolArray
    """Whether a change repeats the recorded interval here."""


@dataclass(frozen=True, slots=True)
class Waits(Table):
    """Dependencies of launches, both by their number in the order of launches."""

    one: IntArray
    other: IntArray
    rule: IntArray
    beside: BoolArray
    """Whether the first ran beside the second in the recording."""


@dataclass(slots=True)
class RankProgram:
    """One rank of a recorded run."""

    rank: int
    on_device: bool
    compute_stream: int
    latency_ns: int
    """Shortest time from a launch to a start."""
    points: Points
    activities: Activities
    """The collectives come first, as in their table; some may be launched no more."""
    shift_ns: int = 0
    """Added to the rank's times to get those of the clock that all ranks share."""
    left_out: list[tuple[int, int]] = field(default_factory=list)
    """Recorded stretches of the host's time that a change leaves out."""
    event: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Event rows in the trace of activities on a device."""
    event_owner: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Activity of each."""
    compared: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Collectives that were compared with other ranks': row of the comparison -> activity."""
    steps: list[int] = field(default_factory=list)
    """Numbers of the analysed steps; 0 where the whole trace is one."""
    windows: list[tuple[int, int]] = field(default_factory=list)
    """Beginning and end of each analysed step, as the analysis measures them."""
    boundary: int = -1
    """Number of the point at which the first analysed step begins: all up to it stays as recorded."""
    contradicted: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Waits of the compute stream that the recording contradicts (see :mod:`~...whatif.waits`)."""
    waits: Waits | None = field(default=None, init=False, repr=False)
    """Dependencies that are followed; a changed copy begins without them."""
    found: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """Cached look-ups in these points; a changed copy of the program begins without them."""

    @property
    def recorded(self) -> int:
        """Number of activities that were recorded: they come before those that changes added."""
        own = self.activities.origin == np.arange(len(self.activities))
        return int(own.sum())

    @property
    def launched(self) -> BoolArray:
        """Mask of the activities that are launched."""
        mask = np.zeros(len(self.activities), dtype=np.bool_)
        mask[self.points.launches[self.points.launches >= 0]] = True
        return mask


Job: TypeAlias = "list[RankProgram]"
"""All recorded ranks, in order."""
