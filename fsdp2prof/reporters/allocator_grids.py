"""What the allocator says: the request that failed, what would have let it fit, and fragmentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdp2prof.reporters.grid import Cell, Col, Grid
from fsdp2prof.reporters.memory_grids import own_frame
from fsdp2prof.results import RankMemory
from fsdp2prof.units import format_bytes
from fsdp2prof.vocabulary import layer_name

__all__ = ["fragmentation_grid", "oom_lines", "remedy_grid"]

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
    layer = oom.get("fqn")
    where = f"{oom.get('phase') or 'other'} of " + ("no layer" if layer is None else layer_name(layer))
    place = own_frame(oom.get("stack") or [])
    by = " ".join(part for part in (oom.get("op") or "", f"at {place}" if place else "") if part)
    sizes = {
        "allocated": oom.get("allocated_bytes"),
        "reserved": oom.get("reserved_bytes"),
        "free on the device": oom.get("device_free_bytes"),
        "largest free block": oom.get("largest_free_block_bytes"),
        "missing": oom.get("missing_bytes"),
    }
    known = [f"{name} {format_bytes(size)}" for name, size in sizes.items() if size is not None]
    requested = format_bytes(oom["requested_bytes"])
    return [
        f"A request for {requested} failed in {where}{', by ' + by if by else ''}.",
        f"At that moment: {', '.join(known)}.",
    ]


def remedy_grid(rank: RankMemory) -> Grid | None:
    """Return what would have let the request fit, most bytes first; None where nothing ran out."""
    remedies: Sequence[Mapping[str, Any]] = (rank.oom or {}).get("remedies") or []
    if not remedies:
        return None
    return Grid(
        title=f"What would let it fit on rank {rank.rank}",
        note="each alone, most bytes first",
        columns=[Col("change"), Col("saves", "number"), Col("enough"), Col("how", "name")],
        rows=[
            [
                str(remedy["action"]).replace("_", " "),
                format_bytes(remedy["saves_bytes"]),
                "yes" if remedy["enough"] else "no",
                str(remedy["how"]),
            ]
            for remedy in remedies
        ],
    )


def fragmentation_grid(rank: RankMemory) -> Grid | None:
    """Return reserved against allocated memory by pool and stream, and its sum; None without an allocator."""
    found = rank.fragmentation
    if not found:
        return None
    pools: Sequence[Mapping[str, Any]] = found.get("by_pool") or []
    names = [name for name in _POOL_COLUMNS if name in found]
    return Grid(
        title=f"Reserved and not allocated on rank {rank.rank}",
        note="expandable segments" if found.get("expandable_segments") else "at the end of the recording",
        columns=[
            Col("pool"),
            Col("stream", "number"),
            Col("segments", "number"),
            *(Col(_POOL_COLUMNS[name], "number") for name in names),
        ],
        rows=[
            [
                str(pool["pool"]),
                str(pool["stream"]),
                str(pool["segments"]),
                *(_size(pool, name) for name in names),
            ]
            for pool in pools
        ],
        totals=[
            ["all", "", str(sum(pool["segments"] for pool in pools)), *(_size(found, name) for name in names)]
        ],
    )


def _size(sizes: Mapping[str, Any], name: str) -> Cell:
    value = sizes.get(name)
    return "-" if value is None else format_bytes(value)
