"""Several ranks at once: each runs until its next collective, which moves once the last rank is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from synthetic.launches import Arrival
from synthetic.schedule import Schedule
from synthetic.timeline import Timeline
from synthetic.training import Trainer


@dataclass
class Recording:
    """One rank's simulated run: its schedule, its timeline in true time, and its clock's error."""

    rank: int
    world_size: int
    schedule: Schedule
    timeline: Timeline
    skew_ns: int = 0
    """Added to every time written to the trace."""


def record(*schedules: Schedule, skews: Sequence[int] | None = None) -> list[Recording]:
    """Run one schedule per rank (ranks 0, 1, ...; the other ranks of a group are assumed punctual)."""
    timelines = [Timeline(rank) for rank in range(len(schedules))]
    programs = [
        Trainer(timeline, schedule).run() for timeline, schedule in zip(timelines, schedules, strict=True)
    ]
    waiting: dict[int, Arrival] = {}
    for rank, program in enumerate(programs):
        _advance(rank, program, None, waiting)
    while waiting:
        meetings: dict[tuple[tuple[int, ...], str, int], list[int]] = {}
        for rank, arrival in waiting.items():
            meetings.setdefault((arrival.group.ranks, arrival.group.name, arrival.seq), []).append(rank)
        complete = [
            ranks
            for (members, _, _), ranks in meetings.items()
            if len(ranks) == sum(member < len(schedules) for member in members)
        ]
        assert complete, f"ranks wait for each other for ever: {waiting}"
        for ranks in complete:
            latest = max(waiting[rank].start for rank in ranks)
            for rank in ranks:
                del waiting[rank]
                _advance(rank, programs[rank], latest, waiting)
    first = schedules[0]
    return [
        Recording(rank, first.shard * first.replicas, schedule, timeline, skews[rank] if skews else 0)
        for rank, (schedule, timeline) in enumerate(zip(schedules, timelines, strict=True))
    ]


def _advance(rank: int, program: object, latest: int | None, waiting: dict[int, Arrival]) -> None:
    try:
        waiting[rank] = program.send(latest)  # type: ignore[attr-defined]
    except StopIteration:
        return
