"""The answers: every instant of a simulated timeline looked at once, with the definitions read literally.

Deliberately naive (one loop over elementary intervals, Python sets): it shares no idea with the analyzers.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

from synthetic.timeline import Activity, Collective
from synthetic.world import Recording

GroupKey = tuple[int, str | None, str, str]
"""(step, fqn, phase, op)"""

PARTS = (
    "compute",
    "fsdp_copy",
    "exposed_all_gather",
    "exposed_reduce_scatter",
    "exposed_all_reduce",
    "exposed_other_comm",
    "exposed_memcpy",
    "idle",
)


@dataclass
class GroupTruth:
    """Collectives of one (step, fqn, phase, op), summed: counts by the step that issued them, times by the
    window in which they ran.
    """

    count: int = 0
    payload_bytes: int | None = 0
    wire_bytes: int | None = 0
    total_ns: int = 0
    exposed_ns: int = 0
    stall_ns: int | None = 0


@dataclass
class StepTruth:
    """One step window."""

    start_ns: int
    """On the rank's own clock, as written to the trace."""
    duration_ns: int
    breakdown_ns: dict[str, int]


@dataclass
class Truth:
    """What an analysis of one rank must find."""

    steps: dict[int, StepTruth]
    groups: dict[GroupKey, GroupTruth]
    communication_ns: int
    """Union of the collectives."""
    exposed_ns: int
    collectives: list[Collective] = field(default_factory=list)


def truth_of(recording: Recording) -> Truth:
    """Count the answers from the timeline."""
    timeline = recording.timeline
    windows = _windows(recording)
    groups: dict[GroupKey, GroupTruth] = defaultdict(GroupTruth)
    for c in timeline.collectives:
        row = groups[c.step, c.fqn, c.phase, c.op]
        row.count += 1
        described = c.payload_bytes >= 0
        row.payload_bytes = _plus(row.payload_bytes, c.payload_bytes if described else None)
        row.wire_bytes = _plus(row.wire_bytes, c.wire_bytes if described else None)
        row.stall_ns = _plus(row.stall_ns, c.stall)
    parts = {step: dict.fromkeys(PARTS, 0) for step in windows}
    union = exposed = 0
    for start, end, running in _intervals(timeline.device):
        step = next((s for s, (a, b) in windows.items() if a <= start and end <= b), None)
        if step is None:
            continue
        kinds = {activity.kind for activity in running}
        flying = [activity.collective for activity in running if activity.collective is not None]
        for c in flying:
            groups[step, c.fqn, c.phase, c.op].total_ns += end - start
        union += (end - start) * ("comm" in kinds)
        if "compute" in kinds:
            part = "compute"
        elif "fsdp_copy" in kinds:
            part = "fsdp_copy"
        elif "comm" in kinds:
            charged = _next_needed(flying)
            part = f"exposed_{charged.op}"
            exposed += end - start
            groups[step, charged.fqn, charged.phase, charged.op].exposed_ns += end - start
        elif "memcpy" in kinds:
            part = "exposed_memcpy"
        else:
            part = "idle"
        parts[step][part] += end - start
    steps = {
        step: StepTruth(start + recording.skew_ns, end - start, parts[step])
        for step, (start, end) in windows.items()
    }
    return Truth(steps, dict(groups), union, exposed, timeline.collectives)


def _plus(total: int | None, value: int | None) -> int | None:
    return None if total is None or value is None else total + value


def _windows(recording: Recording) -> dict[int, tuple[int, int]]:
    """From the first device activity launched in a step to the first launched in the next."""
    timeline = recording.timeline
    ranges = [e for e in timeline.host if e.name.startswith("ProfilerStep#")]
    first = {
        int(e.name.split("#")[1]): min(a.start for a in timeline.device if e.start <= a.launch < e.end)
        for e in ranges
    }
    ends = [*list(first.values())[1:], max(a.end for a in timeline.device)]
    return {step: (start, end) for (step, start), end in zip(first.items(), ends, strict=True)}


def _intervals(device: list[Activity]) -> list[tuple[int, int, list[Activity]]]:
    """Elementary intervals between any two neighbouring starts or ends, with what runs in each."""
    cuts = sorted({t for a in device for t in (a.start, a.end)})
    return [(a, b, [x for x in device if x.start <= a and b <= x.end]) for a, b in itertools.pairwise(cuts)]


def _next_needed(running: list[Collective]) -> Collective:
    """Return the collective whose consumer comes next on the compute stream; unknown ones by their start."""
    return min(running, key=lambda c: (c.consumer is None, c.consumer if c.consumer is not None else c.start))
