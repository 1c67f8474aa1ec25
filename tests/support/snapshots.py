"""Hand-made allocator snapshots: what torch writes, event by event."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any


class SnapshotBuilder:
    """Writes one device's history; times advance by one microsecond an event."""

    def __init__(self, *, device: int = 0, timed: bool = True) -> None:
        self.device = device
        self.trace: list[dict[str, Any]] = []
        self.segments: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self._timed = timed
        self._now_us = 1_000_000

    def event(self, action: str, addr: int, size: int, *, stream: int = 0, **more: Any) -> SnapshotBuilder:
        """Add an event of any action."""
        event: dict[str, Any] = {"action": action, "addr": addr, "size": size, "stream": stream}
        self._now_us += 1
        if self._timed:
            event["time_us"] = self._now_us
        self.trace.append({**event, "frames": [], **more})
        return self

    def alloc(self, addr: int, size: int, **more: Any) -> SnapshotBuilder:
        """Allocate."""
        return self.event("alloc", addr, size, **more)

    def free(self, addr: int, size: int, **more: Any) -> SnapshotBuilder:
        """Free, and complete the free at once."""
        self.event("free_requested", addr, size, **more)
        return self.event("free_completed", addr, size, **more)

    def label(self, stage: str, name: str) -> SnapshotBuilder:
        """``START`` or ``END`` a range."""
        self._now_us += 1
        self.annotations.append(
            {"stage": stage, "name": name, "device": self.device, "time_us": self._now_us}
        )
        return self

    def segment(
        self, address: int, blocks: list[tuple[int, int, str]], *, stream: int = 0, **more: Any
    ) -> SnapshotBuilder:
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
