"""Reserved minus allocated: where the caching allocator's unused memory lies, and who could have used it."""

from __future__ import annotations

from typing import Any

import numpy as np

from fsdp2prof.analyzers.memory.prepared import PreparedRecording
from fsdp2prof.tables import BlockTable, BoolArray

__all__ = ["fragmentation", "free_blocks"]

_SEGMENTS = 10


def fragmentation(view: PreparedRecording) -> dict[str, Any]:
    """Describe the unused memory at the end of a recording; empty without a caching allocator.

    - ``gap_at_peak_bytes``: reserved minus allocated at the peak.
    - ``reserved_bytes`` = ``allocated_bytes`` (blocks in use) + ``pending_free_bytes`` (freed, but another
      stream is not done) + ``inactive_split_bytes`` (free parts of segments in use: fragmentation)
      + ``releasable_bytes`` (whole free segments, which the allocator can give back).
    - ``rounding_bytes``: part of ``allocated_bytes`` that nobody asked for.
    - ``largest_free_block_bytes``: the largest request that fits without a new segment.
    - ``by_pool``: the same by pool and stream; a request finds only the free blocks of its own.
    - ``by_segment``: the same of the ten segments in use with the most free memory, most first.
    """
    blocks, reserved = view.recording.blocks, view.reserved
    if not len(blocks) or reserved is None:
        return {}
    pools: list[dict[str, Any]] = []
    keys = np.stack([blocks.pool.codes, blocks.stream, blocks.expandable])
    distinct, inverse = np.unique(keys, axis=1, return_inverse=True)
    for index in range(distinct.shape[1]):
        mine = blocks.take(inverse.reshape(-1) == index)
        pools.append(
            {
                "pool": mine.pool[0],
                "stream": int(mine.stream[0]),
                "expandable": bool(mine.expandable[0]),
                "segments": len(np.unique(mine.segment)),
                **_parts(mine),
            }
        )
    pools.sort(key=lambda pool: -pool["reserved_bytes"])
    return {
        "gap_at_peak_bytes": int(reserved[view.peak_order] - view.totals[view.peak_order]),
        **_parts(blocks),
        "expandable_segments": bool(blocks.expandable.any()),
        "by_pool": pools,
        "by_segment": _most_split(blocks),
    }


def _most_split(blocks: BlockTable) -> list[dict[str, Any]]:
    segments, inverse = np.unique(blocks.segment, return_inverse=True)
    free = np.zeros(len(segments), dtype=np.int64)
    used = np.zeros(len(segments), dtype=np.int64)
    is_free = blocks.state.equals("free")
    np.add.at(free, inverse[is_free], blocks.size[is_free])
    np.add.at(used, inverse[~is_free], blocks.size[~is_free])
    split = np.where(used > 0, free, 0)
    worst = np.argsort(-split, kind="stable")[:_SEGMENTS]
    rows = [blocks.take(inverse == index) for index in worst[split[worst] > 0].tolist()]
    return [
        {
            "address": int(mine.segment[0]),
            "pool": mine.pool[0],
            "stream": int(mine.stream[0]),
            "expandable": bool(mine.expandable[0]),
            **_parts(mine),
        }
        for mine in rows
    ]


def free_blocks(blocks: BlockTable) -> BlockTable:
    """Return the free blocks, largest first."""
    free = blocks.take(blocks.state.equals("free"))
    return free.take(np.argsort(-free.size, kind="stable"))


def _parts(blocks: BlockTable) -> dict[str, int]:
    """Split the bytes of some blocks by state."""
    allocated = blocks.state.equals("allocated")
    pending = blocks.state.equals("pending_free")
    free = blocks.state.equals("free")
    split = free & np.isin(blocks.segment, blocks.segment[~free])

    def size(rows: BoolArray) -> int:
        return int(blocks.size[rows].sum())

    return {
        "reserved_bytes": int(blocks.size.sum()),
        "allocated_bytes": size(allocated),
        "rounding_bytes": size(allocated) - int(blocks.requested[allocated].sum()),
        "pending_free_bytes": size(pending),
        "inactive_split_bytes": size(split),
        "inactive_split_blocks": int(split.sum()),
        "releasable_bytes": size(free & ~split),
        "largest_free_block_bytes": int(blocks.size[free].max(initial=0)),
    }
