"""Hand-made allocator snapshots: what torch writes, event by event."""

from __future__ import annotations

import pickle
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp2prof.readers.memory.recording import read_memory
from fsdp2prof.tables.allocations import MemoryRecording

if TYPE_CHECKING:
    from typing_extensions import Self


class SnapshotBuilder:
    """Writes one device's history; times advance by one microsecond an event."""

    def __init__(self, *, device: int = 0, timed: bool = True) -> None:
        self.device = device
        self.trace: list[dict[str, Any]] = []
        self.segments: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self._timed = timed
        self._now_us = 1_000_000

    def event(self, action: str, addr: int, size: int, *, stream: int = 0, **more: Any) -> Self:
        """Add an event of any action."""
        event: dict[str, Any] = {"action": action, "addr": addr, "size": size, "stream": stream}
        self._now_us += 1
        if self._timed:
            event["time_us"] = self._now_us
        self.trace.append({**event, "frames": [], **more})
        return self

    def alloc(self, addr: int, size: int, **more: Any) -> Self:
        """Allocate."""
        return self.event("alloc", addr, size, **more)

    def free(self, addr: int, size: int, **more: Any) -> Self:
        """Free, and complete the free at once."""
        self.event("free_requested", addr, size, **more)
        return self.event("free_completed", addr, size, **more)

    def label(self, stage: str, name: str) -> Self:
        """``START`` or ``END`` a range."""
        self._now_us += 1
        self.annotations.append(
            {"stage": stage, "name": name, "device": self.device, "time_us": self._now_us}
        )
        return self

    def segment(
        self, address: int, blocks: list[tuple[int, int, str]], *, stream: int = 0, **more: Any
    ) -> Self:
        """List a segment of the end by its blocks: (size, requested, state)."""
        listed, at = [], address
        for size, requested, state in blocks:
            listed.append(
                {"address": at, "size": size, "requested_size": requested, "state": state, "frames": []}
            )
            at += size
        self.segments.append(
            {
                "device": self.device,
                "address": address,
                "total_size": at - address,
                "stream": stream,
                "segment_type": "large",
                "blocks": listed,
                **more,
            }
        )
        return self

    def snapshot(self) -> dict[str, Any]:
        """The snapshot as torch has it in memory."""
        traces: list[list[dict[str, Any]]] = [[] for _ in range(self.device)]
        return {
            "segments": self.segments,
            "device_traces": [*traces, self.trace],
            "allocator_settings": {"expandable_segments": False},
            "external_annotations": self.annotations,
        }

    def write(self, path: Path, *, protocol: int = 4) -> Path:
        """Pickle the snapshot."""
        path.write_bytes(pickle.dumps(self.snapshot(), protocol=protocol))
        return path


class Training(SnapshotBuilder):
    """A history with FSDP's labels: allocates by name, frees by name."""

    def __init__(self) -> None:
        super().__init__()
        self._at: dict[str, tuple[int, int]] = {}
        self._next = 1 << 30

    def get(self, name: str, size: int, **more: Any) -> Training:
        self.hold(name, size)
        self.alloc(*self._at[name], **more)
        return self

    def drop(self, *names: str) -> Training:
        for name in names:
            self.free(*self._at.pop(name))
        return self

    def within(self, label: str, *actions: tuple[str, str, int] | str) -> Training:
        """A label around gets ``("get", name, size)`` and drops ``name``."""
        self.label("START", label)
        for action in actions:
            if isinstance(action, str):
                self.drop(action)
            else:
                self.get(*action[1:])
        self.label("END", label)
        return self

    @property
    def held(self) -> list[str]:
        """Names of what is alive."""
        return list(self._at)

    def hold(self, name: str, size: int) -> int:
        """Have something from before the history; returns its address."""
        self._at[name] = self._next, size
        self._next += (size + 511) // 512 * 512
        return self._at[name][0]

    def fill(self, split: int = 0) -> int:
        """List segments for what the history took at its peak, and ``split`` free bytes beside what lives.

        Returns the bytes of all.
        """
        alive = sum(size for _, size in self._at.values())
        sign = {"alloc": 1, "free_completed": -1}
        changes = [sign.get(one["action"], 0) * one["size"] for one in self.trace]
        peak = alive - sum(changes) + max(accumulate(changes))
        self.segment(1 << 50, [(max(512, peak - alive), 0, "inactive")])
        for number, (address, size) in enumerate(self._at.values()):
            rest = [(split, 0, "inactive")] if split and not number else []
            self.segment(address, [((size + 511) // 512 * 512, size, "active_allocated"), *rest])
        return sum(one["total_size"] for one in self.segments)

    def read(self, folder: Path) -> MemoryRecording:
        blocks = [(self._next - (1 << 30), 0, "inactive")]
        if not self.segments:
            self.segment(1 << 40, blocks)
        for address, size in self._at.values():
            self.segment(address, [((size + 511) // 512 * 512, size, "active_allocated")])
        (recording,) = read_memory(self.write(folder / "snapshot.pickle"))
        return recording


def let_go(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Free at the end of the first device's history what it made, like a program that fails and unwinds."""
    trace: list[dict[str, Any]] = next(filter(None, snapshot["device_traces"]))
    alive: dict[int, dict[str, Any]] = {}
    for event in trace:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] in ("free_requested", "free_completed"):
            alive.pop(event["addr"], None)
    for block in (block for segment in snapshot["segments"] for block in segment["blocks"]):
        if block["address"] in alive:
            block.update(state="inactive", frames=[])
    for event in alive.values():
        for action in ("free_requested", "free_completed"):
            trace.append({**event, "action": action, "frames": [], "time_us": trace[-1].get("time_us", -1)})
    return snapshot


def fail_at(
    snapshot: dict[str, Any], event: int, requested: int, *, device_free: int | None = None
) -> dict[str, Any]:
    """Cut the first device's history after some events, where a request fails like the next allocation.

    ``device_free`` of None is a driver that does not say what it has left. What was there before the history
    and freed in the rest of it is freed at its end.
    """
    trace: list[dict[str, Any]] = next(filter(None, snapshot["device_traces"]))
    rest = trace[event:]
    del trace[event:]
    asking = next(one for one in rest if one["action"] == "alloc")
    oom = {**asking, "action": "oom", "addr": 0, "size": requested}
    trace.append(oom if device_free is None else {**oom, "device_free": device_free})
    born = {one["addr"] for one in trace if one["action"] == "alloc"}
    made_later: set[int] = set()
    for one in rest:
        if one["action"] == "alloc":
            made_later.add(one["addr"])
        elif one["action"].startswith("free") and one["addr"] not in born | made_later:
            trace.append({**one, "time_us": asking.get("time_us", -1)})
    for block in (block for segment in snapshot["segments"] for block in segment["blocks"]):
        if block["address"] in made_later:
            block.update(state="inactive", frames=[])
    return snapshot
