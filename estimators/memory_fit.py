"""Whether a predicted peak fits on a device, and the estimate in three sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp2prof.analyzers.memory.wording import where
from fsdp2prof.estimators.spec.hardware import HardwareSpec
from fsdp2prof.results import Fit, OutsideAllocator, PredictedPeak, Remedy
from fsdp2prof.units import format_bytes, format_frac
from fsdp2prof.vocabulary import category_label

__all__ = ["Room", "room_on", "verdict"]

_NAMED = 2
"""Categories that the verdict names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What is left of a device above the peak: a range, because what no allocator counts is one."""

    device: str
    total_bytes: int
    least_bytes: int
    """Negative: missing."""
    most_bytes: int

    @property
    def fit(self) -> Fit:
        """Whether the peak fits."""
        if self.least_bytes >= 0:
            return "fits"
        return "depends" if self.most_bytes >= 0 else "does_not_fit"


def room_on(hardware: HardwareSpec | None, peak: PredictedPeak, outside: OutsideAllocator) -> Room | None:
    """Return the room that a peak leaves on a device; None without one."""
    if hardware is None:
        return None
    left = hardware.memory_bytes - peak.reserved_bytes
    return Room(
        device=hardware.name,
        total_bytes=hardware.memory_bytes,
        least_bytes=left - outside.high,
        most_bytes=left - outside.low,
    )


def verdict(peak: PredictedPeak, room: Room | None, options: Sequence[Remedy]) -> list[str]:
    """Say how much a rank takes and where, whether that fits, and what fills it or would take most off."""
    place = f"{where(peak.phase, peak.fqn)}, step {peak.step}"
    lines = [
        f"A rank reserves {format_bytes(peak.reserved_bytes)} at most; "
        f"{format_bytes(peak.active_bytes)} of it is in use {place}."
    ]
    if room is None or room.fit == "fits" or not options:
        return [*lines, *([] if room is None else [_fit(room)]), _filling(peak)]
    best = options[0]
    alone = "; no single change is enough" if all(one.enough is False for one in options) else ""
    least = f"What takes off most: {best.how}, {format_bytes(best.saves_bytes)} at most{alone}."
    return [*lines, _fit(room), least]


def _fit(room: Room) -> str:
    device = f"{room.device} ({format_bytes(room.total_bytes)})"
    least, most = format_bytes(abs(room.least_bytes)), format_bytes(abs(room.most_bytes))
    if room.fit == "fits":
        return f"It fits on {device}: {least} is left, and context and communicators are counted high."
    if room.fit == "depends":
        return (
            f"Whether it fits on {device} depends on what context and communicators take: "
            f"from {least} short to {most} left."
        )
    return f"It does not fit on {device}: {most} to {least} is missing."


def _filling(peak: PredictedPeak) -> str:
    largest = sorted(peak.categories.items(), key=lambda item: -item[1])[:_NAMED]
    parts = [
        f"{category_label(name)} ({format_bytes(size)}, {format_frac(size / peak.active_bytes)})"
        for name, size in largest
        if size
    ]
    return f"Most of what is in use is {' and '.join(parts)}."
