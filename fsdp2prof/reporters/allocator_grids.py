"""What the allocator says: the request that failed, what would have let it fit, and fragmentation."""

from __future__ import annotations

from fsdp2prof.analyzers.memory.wording import where
from fsdp2prof.reporters.grid import Cell, Col, Grid
from fsdp2prof.results import BlockBytes, RankMemory
from fsdp2prof.units import format_bytes
from fsdp2prof.vocabulary import remedy_label

__all__ = ["fragmentation_grid", "oom_lines", "remedy_grid"]

_ENOUGH = {True: "yes", False: "no", None: "unknown"}
_POOL_COLUMNS = {
    "reserved_bytes": "reserved",
    "allocated_bytes": "allocated",
    "inactive_split_bytes": "split, unused",
    "releasable_bytes": "releasable",
    "rounding_bytes": "rounding",
    "largest_free_block_bytes": "largest\nfree block",
}


def oom_lines(rank: RankMemory) -> list[str]:
    """Say which request failed, where, and how much was missing; empty where nothing ran out."""
    oom = rank.oom
    if oom is None:
        return []
    by = " ".join(part for part in (oom.op or "", f"at {oom.place}" if oom.place else "") if part)
    sizes = {
        "allocated": oom.allocated_bytes,
        "reserved": oom.reserved_bytes,
        "free on the device": oom.device_free_bytes,
        "largest free block": oom.largest_free_block_bytes,
        "missing": oom.missing_bytes,
    }
    known = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size is not None)
    unknown = "" if oom.device_free_bytes is not None else ", free on the device unknown"
    failed = f"A request for {format_bytes(oom.requested_bytes)} failed {where(oom.phase, oom.fqn)}"
    return [f"{failed}{', by ' + by if by else ''}.", f"At that moment: {known}{unknown}."]


def remedy_grid(rank: RankMemory) -> Grid | None:
    """Return what would have let the request fit, most bytes first; None where nothing ran out."""
    remedies = rank.oom.remedies if rank.oom else []
    if not remedies:
        return None
    return Grid(
        title=f"What would let it fit on rank {rank.rank}",
        note="each alone, most bytes first",
        columns=[Col("change"), Col("saves", "number"), Col("enough"), Col("how", "name")],
        rows=[
            [
                remedy_label(remedy.action),
                format_bytes(remedy.saves_bytes),
                _ENOUGH[remedy.enough],
                remedy.how,
            ]
            for remedy in remedies
        ],
    )


def fragmentation_grid(rank: RankMemory) -> Grid | None:
    """Return reserved against allocated memory by pool and stream, and its sum; None without an allocator."""
    found = rank.fragmentation
    if found is None:
        return None
    return Grid(
        title=f"Reserved and not allocated on rank {rank.rank}",
        note="expandable segments" if found.expandable_segments else "at the end of the recording",
        columns=[
            Col("pool"),
            Col("stream", "number"),
            Col("segments", "number"),
            *(Col(_POOL_COLUMNS[name], "number") for name in _POOL_COLUMNS),
        ],
        rows=[
            [
                str(pool.pool),
                str(pool.stream),
                str(pool.segments),
                *(_size(pool, name) for name in _POOL_COLUMNS),
            ]
            for pool in found.by_pool
        ],
        totals=[["all", "", str(found.segments), *(_size(found, name) for name in _POOL_COLUMNS)]],
    )


def _size(sizes: BlockBytes, name: str) -> Cell:
    return format_bytes(getattr(sizes, name))
