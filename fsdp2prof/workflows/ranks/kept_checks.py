"""Checks of a saved analysis beyond its types: columns of equal length, numbers and words within range."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from fsdp2prof.results.timeline import StepTimeline, TimelineLane
from fsdp2prof.vocabulary import LANES, PHASES

__all__ = ["check_numbers", "check_timeline"]

_LONG_NUMBER = re.compile(rb"[:,\[\s-]\d{19}")
"""May be one beyond 64 bits, or stand in a text."""

_LONGEST_NS = 1 << 56
"""Two years; a lane may begin before its step."""


def check_numbers(content: bytes) -> None:
    """Raise ``ValueError`` for an integer of more than 64 bits: sums and means of it have no end."""
    if not _LONG_NUMBER.search(content):
        return
    left: list[Any] = [msgspec.json.decode(content)]
    while left:
        value = left.pop()
        if isinstance(value, int) and abs(value) >> 63:
            raise ValueError("a number beyond 64 bits")
        if isinstance(value, (dict, list)):
            left.extend(value.values() if isinstance(value, dict) else value)


def check_timeline(timeline: StepTimeline | None) -> None:
    """Raise ``ValueError`` with the first value that no analysis writes."""
    if timeline is None:
        return
    if not set(timeline.phases) <= PHASES.keys() or not set(timeline.slice_phases) <= PHASES.keys():
        raise ValueError("a timeline with an unknown phase")
    if len(timeline.slice_phases) != len(timeline.compute_frac):
        raise ValueError("a timeline whose slices and phases differ in number")
    _within(timeline.duration_ns, timeline.resolution_ns)
    for rank in timeline.ranks:
        _within(rank.start_ns, rank.duration_ns)
        for stall in rank.stalls:
            _word(stall.lane)
            _within(stall.start_ns, stall.end_ns, stall.needed_ns, stall.stall_ns)
        for lane in rank.lanes:
            _check_lane(lane, timeline)


def _check_lane(lane: TimelineLane, timeline: StepTimeline) -> None:
    _word(lane.lane)
    spans = len(lane.start_ns)
    whole = (lane.duration_ns, lane.busy_ns, lane.count, lane.layer, lane.phase, lane.name)
    optional = (lane.payload_bytes, lane.peer_wait_ns)
    if any(len(column) != spans for column in whole) or any(len(one) not in (0, spans) for one in optional):
        raise ValueError("a timeline lane with columns of different lengths")
    _within(*lane.start_ns, *lane.duration_ns, *lane.busy_ns, *lane.count)
    _within(*(value for column in optional for value in column if value is not None))
    named = ((lane.layer, timeline.layers), (lane.phase, timeline.phases), (lane.name, timeline.names))
    for column, names in named:
        if any(not 0 <= index < len(names) for index in column):
            raise ValueError("a timeline lane with an index beyond its names")


def _word(lane: str) -> None:
    if lane not in LANES:
        raise ValueError("a timeline with an unknown lane")


def _within(*values: int) -> None:
    if any(abs(value) > _LONGEST_NS for value in values):
        raise ValueError("a timeline with an impossible time")
