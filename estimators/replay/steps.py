"""How long the steps of a program that was run again take, by the same definition as a recorded one's."""

from __future__ import annotations

from collections import defaultdict
from statistics import mean

from fsdp2prof.estimators.replay.run import Ran, RankRun

__all__ = ["mean_step_ns"]


def mean_step_ns(ran: Ran, ranks: frozenset[int] | None = None) -> float:
    """Return the mean step of all ranks, or of those in ``ranks``."""
    durations = [
        duration
        for one in ran.ranks
        if ranks is None or one.program.rank in ranks
        for duration in _durations(one)
    ]
    return mean(durations) if durations else 0.0


def _durations(ran: RankRun) -> list[int]:
    wanted = set(ran.program.steps)
    windows = _device_windows(ran) if ran.program.on_device else _host_windows(ran)
    if not windows:
        return [_whole(ran)]
    return [end - start for step, (start, end) in windows.items() if step in wanted]


def _device_windows(ran: RankRun) -> dict[int, tuple[int, int]]:
    """From the first activity launched in a step to the first one launched in the next."""
    first: dict[int, int] = {}
    last: dict[int, int] = defaultdict(int)
    labelled = {point.label for point in ran.program.points if point.label.startswith("ProfilerStep#")}
    if not labelled:
        return {}
    for index, one in ran.program.activities.items():
        if one.step >= 0:
            start = ran.started[index]
            first[one.step] = min(first.get(one.step, start), start)
            last[one.step] = max(last[one.step], ran.ended[index])
    steps = sorted(first)
    windows, reached = {}, 0
    for at, step in enumerate(steps):
        begin = reached = max(reached, first[step]) if at else first[step]
        end = max(begin, first[steps[at + 1]]) if at + 1 < len(steps) else max(last[step], begin)
        windows[step] = begin, end
    return windows


def _host_windows(ran: RankRun) -> dict[int, tuple[int, int]]:
    """From a step's label to its end, or to the next one's beginning where a crash left it open."""
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for point, time in zip(ran.program.points, ran.end, strict=True):
        if point.label.startswith("ProfilerStep#"):
            (begins if point.opens else ends).setdefault(int(point.label[13:]), time)
    order = sorted(begins, key=lambda step: begins[step])
    limits = [*(begins[step] for step in order[1:]), max(ran.end, default=0)]
    return {
        step: (
            begins[step],
            min(ends.get(step, limit), limit) if at + 1 < len(order) else ends.get(step, limit),
        )
        for at, (step, limit) in enumerate(zip(order, limits, strict=True))
    }


def _whole(ran: RankRun) -> int:
    """From the first to the last activity."""
    starts = [*ran.started.values()] if ran.program.on_device else ran.begin[:1]
    ends = [*ran.ended.values()] if ran.program.on_device else ran.end[-1:]
    return max(ends, default=0) - min(starts, default=0)
