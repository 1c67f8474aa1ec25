"""The rules of the Trace Event Format that Perfetto needs: what breaks one is returned, in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

_PHASES = {"X", "M", "C", "i", "s", "t", "f"}


def broken_rules(events: Sequence[dict[str, Any]]) -> list[str]:
    """Return every rule that the events break."""
    return [*_fields(events), *_names(events), *_nesting(events), *_flows(events)]


def nanoseconds(us: float) -> int:
    return round(us * 1000)


def slices(events: Sequence[dict[str, Any]], track: str, pid: int) -> list[dict[str, Any]]:
    """The slices of a process in the rows of a track, by the rows' names."""
    rows = {
        event["tid"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == pid
        if event["args"]["name"].split(" (")[0] == track
    }
    return [event for event in events if event["ph"] == "X" and event["pid"] == pid and event["tid"] in rows]


def _fields(events: Sequence[dict[str, Any]]) -> list[str]:
    broken = []
    for event in events:
        kind = event.get("ph")
        if kind not in _PHASES:
            broken.append(f"unknown phase {kind}")
            continue
        if not isinstance(event.get("pid"), int) or not isinstance(event.get("tid"), int):
            broken.append(f"no place: {event}")
        if not isinstance(event.get("name"), str):
            broken.append(f"no name: {event}")
        if kind != "M" and not isinstance(event.get("ts"), (int, float)):
            broken.append(f"no time: {event}")
        if kind == "X" and not event.get("dur", -1) >= 0:
            broken.append(f"no duration: {event}")
        if kind == "C" and not all(isinstance(value, (int, float)) for value in event["args"].values()):
            broken.append(f"a counter's values are numbers: {event}")
        if kind == "i" and event.get("s") not in ("g", "p", "t"):
            broken.append(f"an instant has a scope: {event}")
        if kind in "stf" and ("id" not in event or "cat" not in event):
            broken.append(f"an arrow has id and category: {event}")
    return broken


def _names(events: Sequence[dict[str, Any]]) -> list[str]:
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xi"}
    return [
        *(f"no name for thread {place}" for place in sorted(used - threads)),
        *(f"no name for process {pid}" for pid in sorted({e["pid"] for e in events} - processes)),
    ]


def _nesting(events: Sequence[dict[str, Any]]) -> list[str]:
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = nanoseconds(event["ts"])
            rows[event["pid"], event["tid"]].append((start, start + nanoseconds(event["dur"])))
    broken = []
    for row, spans in rows.items():
        ends: list[int] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while ends and ends[-1] <= start:
                ends.pop()
            if ends and end > ends[-1]:
                broken.append(f"{row}: [{start}, {end}) overlaps a slice until {ends[-1]}")
            ends.append(end)
    return broken


def _flows(events: Sequence[dict[str, Any]]) -> list[str]:
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    arrows: dict[tuple[str, str, int], list[tuple[int, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = nanoseconds(event["ts"])
            rows[event["pid"], event["tid"]].append((start, start + nanoseconds(event["dur"])))
    broken = []
    for event in events:
        if event["ph"] in "stf":
            time = nanoseconds(event["ts"])
            arrows[event["cat"], event["name"], event["id"]].append((time, event["ph"]))
            if not any(start <= time <= end for start, end in rows[event["pid"], event["tid"]]):
                broken.append(f"an arrow's point lies in no slice: {event}")
            if event["ph"] == "f" and event.get("bp") != "e":
                broken.append(f"an arrow's end binds to the enclosing slice: {event}")
    for key, points in arrows.items():
        order = "".join(kind for _, kind in sorted(points, key=lambda p: (p[0], "stf".index(p[1]))))
        if order[0] != "s" or order[-1] != "f" or set(order[1:-1]) - {"t"}:
            broken.append(f"{key}: its points in time are {order}")
    return broken
