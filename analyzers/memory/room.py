"""How much of its device a job's memory takes: whether it is tight, or far from full."""

from __future__ import annotations

from fsdp2prof.results.memory import MemoryAnalysis

_TIGHT = 0.85
"""Part of its device from which on a peak makes memory worth advice."""
_ROOM = 0.5
"""Part of its device up to which a peak leaves room for activations that are recomputed now."""


def is_tight(memory: MemoryAnalysis) -> bool:
    """Whether a request failed, or the peak is known to take most of its device."""
    figures = memory.key_figures
    full = figures is not None and figures.device_frac is not None and figures.device_frac >= _TIGHT
    return full or any(rank.oom is not None for rank in memory.ranks)


def has_room(memory: MemoryAnalysis | None) -> bool:
    """Whether less than half of the device is known to be in use at the peak."""
    figures = None if memory is None else memory.key_figures
    return figures is not None and figures.device_frac is not None and figures.device_frac < _ROOM


def free_bytes(memory: MemoryAnalysis | None) -> int | None:
    """Return the memory left on the fullest device at its peak; None if its size is unknown."""
    figures = None if memory is None else memory.key_figures
    if figures is None or figures.device_total_bytes is None:
        return None
    return figures.device_total_bytes - (figures.reserved_bytes or figures.allocated_bytes)
