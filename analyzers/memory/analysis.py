"""``analyze memory``: the content of each device at its peak, by layer, phase and kind of tensor.

Out of memory: the request, its origin, the memory in its way, and the changes that would have made it fit.

Reserved minus allocated: the location of the caching allocator's unused memory, and the requests that
could use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeAlias

import numpy as np

from fsdp2prof.analyzers.memory.attribution import LOSS, StackKinds, own_frame
from fsdp2prof.analyzers.memory.findings import rank_findings, rank_imbalance
from fsdp2prof.analyzers.memory.peak import (
    describe_peak,
    largest_blocks,
    layer_bytes,
    layer_peaks,
    place_at,
    sum_by,
    timeline,
)
from fsdp2prof.analyzers.memory.prepared import PreparedRecording, prepare
from fsdp2prof.analyzers.memory.remedies import Request, is_tight, remedies_at
from fsdp2prof.analyzers.memory.wording import memory_advice, memory_verdict
from fsdp2prof.manifest import RankManifest
from fsdp2prof.results.finding import SEVERITIES, Finding
from fsdp2prof.results.memory import MemoryAnalysis, MemoryFigures, PhaseSpan, RankMemory
from fsdp2prof.results.peak import Fragmentation, OutOfMemory, Peak, PoolBytes, SegmentBytes
from fsdp2prof.tables.allocations import BlockTable, MemoryRecording
from fsdp2prof.tables.columns import BoolArray
from fsdp2prof.tables.trace import PhaseTable
from fsdp2prof.units import format_bytes

_SEGMENTS = 10


def fragmentation(view: PreparedRecording) -> Fragmentation | None:
    """Describe the unused memory at the end of a recording; ``None`` without known blocks."""
    blocks, reserved = view.recording.blocks, view.reserved
    if not len(blocks) or reserved is None:
        return None
    return Fragmentation(
        gap_at_peak_bytes=int(reserved[view.peak_order] - view.totals[view.peak_order]),
        **_parts(blocks),
        expandable_segments=bool(blocks.expandable.any()),
        segments=len(np.unique(blocks.segment)),
        by_pool=_pools(blocks),
        by_segment=_most_split(blocks),
    )


def _pools(blocks: BlockTable) -> list[PoolBytes]:
    keys = np.stack([blocks.pool.codes, blocks.stream, blocks.expandable])
    distinct, inverse = np.unique(keys, axis=1, return_inverse=True)
    of_pool = [blocks.take(inverse.reshape(-1) == index) for index in range(distinct.shape[1])]
    pools = [
        PoolBytes(
            pool=mine.pool[0],
            stream=int(mine.stream[0]),
            expandable=bool(mine.expandable[0]),
            segments=len(np.unique(mine.segment)),
            **_parts(mine),
        )
        for mine in of_pool
    ]
    return sorted(pools, key=lambda pool: -pool.reserved_bytes)


def _most_split(blocks: BlockTable) -> list[SegmentBytes]:
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
        SegmentBytes(
            address=int(mine.segment[0]),
            pool=mine.pool[0],
            stream=int(mine.stream[0]),
            expandable=bool(mine.expandable[0]),
            **_parts(mine),
        )
        for mine in rows
    ]


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


_SMALL_REQUEST, _SMALL_SEGMENT = 1 << 20, 2 << 20
_LARGE_REQUEST, _LARGE_SEGMENT, _LARGE_ROUND = 10 << 20, 20 << 20, 2 << 20
"""Segment sizes of CUDACachingAllocator: requests up to 1 MiB share segments of 2 MiB, those below 10 MiB
segments of 20 MiB, and a larger one has its own segment in steps of 2 MiB."""


def out_of_memory(view: PreparedRecording, manifest: RankManifest | None) -> OutOfMemory | None:
    """Describe the last request that failed; ``None`` if none did."""
    recording, reserved = view.recording, view.reserved
    if not len(recording.ooms):
        return None
    oom = recording.ooms.take(np.array([len(recording.ooms) - 1]))
    order, requested = int(oom.order[0]), int(oom.requested[0])
    live = view.live(order)
    place = place_at(view, int(oom.time_ns[0]))
    stack = list(recording.stacks[int(oom.stack[0])]) if oom.stack[0] >= 0 else []
    device_free = int(oom.device_free[0]) if oom.device_free[0] >= 0 else None
    held = None if reserved is None else int(reserved[order])
    total = manifest.device.total_bytes if manifest else None
    outside = None
    if total is not None and device_free is not None and held is not None:
        outside = max(0, total - device_free - held)
    missing = _missing(requested, device_free)
    request = Request(
        bytes=requested,
        in_loss=any(LOSS.search(frame) for frame in stack),
        missing_bytes=missing,
    )
    return OutOfMemory(
        requested_bytes=requested,
        op=oom.op[0],
        phase=place.phase or str(StackKinds(recording.stacks).phase(oom.stack)[0]),
        fqn=place.fqn,
        allocated_bytes=int(view.totals[order]),
        reserved_bytes=held,
        device_free_bytes=device_free,
        outside_bytes=outside,
        missing_bytes=missing,
        largest_free_block_bytes=_largest_free(recording, requested, int(oom.stream[0]), order),
        stack=stack,
        place=own_frame(stack),
        categories={str(name): size for (name,), size in sum_by(live.size, live.category).items()},
        by_layer=layer_bytes(live),
        largest_blocks=largest_blocks(live, recording.stacks, int(oom.time_ns[0])),
        remedies=remedies_at(view, order, place.fqn, manifest, request),
    )


def _missing(requested: int, device_free: int | None) -> int | None:
    """Bytes the driver lacked for the segment of a request; ``None`` if unknown or if it lacked none."""
    if device_free is None:
        return None
    lacking = _segment_bytes(requested) - device_free
    return lacking if lacking > 0 else None


def _segment_bytes(requested: int) -> int:
    """Bytes the allocator takes from the driver for a request that finds no block."""
    if requested < _LARGE_REQUEST:
        return _SMALL_SEGMENT if requested <= _SMALL_REQUEST else _LARGE_SEGMENT
    return -(-requested // _LARGE_ROUND) * _LARGE_ROUND


def _largest_free(recording: MemoryRecording, requested: int, stream: int, order: int) -> int | None:
    """Largest free block of the request's stream and size class, if the history ends with the failure."""
    if order < recording.events - 1 or not len(recording.blocks):
        return None
    pool, blocks = "small" if requested <= _SMALL_REQUEST else "large", recording.blocks
    mine = blocks.state.equals("free") & blocks.pool.equals(pool) & (blocks.stream == stream)
    return int(blocks.size[mine].max(initial=0))


RankRecording: TypeAlias = "tuple[int, MemoryRecording, RankManifest | None]"
"""A rank, one of its devices' recordings, and the rank's manifest if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingAnalysis:
    """One recording's part of the result."""

    rank: RankMemory
    findings: list[Finding]
    warnings: list[str]


def analyze_memory(recordings: Sequence[RankRecording]) -> MemoryAnalysis:
    """Analyse recordings of any ranks, from any source."""
    return merge(
        [
            analyze_prepared(rank, prepare(recording, manifest), manifest)
            for rank, recording, manifest in recordings
        ]
    )


def analyze_prepared(rank: int, view: PreparedRecording, manifest: RankManifest | None) -> RecordingAnalysis:
    """Analyse one recording on its own."""
    result = _rank_memory(rank, view, manifest)
    recording = view.recording
    return RecordingAnalysis(
        rank=result,
        findings=rank_findings(view, result, manifest),
        warnings=[f"rank {rank}: {text}" for text in (*recording.warnings, *_contradictions(result.peak))],
    )


def _contradictions(peak: Peak) -> list[str]:
    """Say where the allocator's segments and its history cannot both be true."""
    allocated, reserved = peak.allocated_bytes, peak.reserved_bytes
    if reserved is None or reserved >= allocated:
        return []
    return [
        f"{format_bytes(allocated)} allocated exceeds {format_bytes(reserved)} reserved: "
        "the file's segments and history do not match"
    ]


def merge(analyses: Sequence[RecordingAnalysis]) -> MemoryAnalysis:
    """Put recordings together, the highest peak first, the first given among equals."""
    return merge_results(
        [MemoryAnalysis(ranks=[one.rank], findings=one.findings, warnings=one.warnings) for one in analyses]
    )


def merge_results(analyses: Sequence[MemoryAnalysis]) -> MemoryAnalysis:
    """Put the results of single ranks together, as :func:`merge` does their recordings."""
    fullest_first = sorted(analyses, key=lambda one: -one.ranks[0].peak.allocated_bytes)
    ranks = [rank for one in fullest_first for rank in one.ranks]
    imbalance = rank_imbalance(ranks)
    return summarise(
        MemoryAnalysis(
            ranks=ranks,
            findings=[
                *([imbalance] if imbalance else []),
                *_merged((one.ranks[0].rank, one.findings) for one in fullest_first),
            ],
            warnings=[text for one in analyses for text in one.warnings],
        )
    )


def summarise(analysis: MemoryAnalysis) -> MemoryAnalysis:
    """Fill in the fields about the rank with the highest peak: key figures, verdict and advice.

    Without a known lack of memory, only leaks and what the script keeps have a severity above low.
    """
    ranks = analysis.ranks
    if not ranks:
        return replace(analysis, key_figures=None, verdict=[], advice=[])
    figures = _figures(ranks[0])
    analysis = replace(analysis, key_figures=figures)
    tight = is_tight(analysis)
    return replace(
        analysis,
        findings=[one if tight else _while_there_is_room(one) for one in analysis.findings],
        verdict=memory_verdict(ranks, figures),
        advice=memory_advice(ranks),
    )


def _while_there_is_room(finding: Finding) -> Finding:
    """Return a finding as it matters where memory is not known to be tight: waste stays what it is."""
    lowered = finding.severity == "medium" and finding.id not in ("kept_after_backward", "prefetched_ahead")
    return replace(finding, severity="low") if lowered else finding


def _rank_memory(rank: int, view: PreparedRecording, manifest: RankManifest | None) -> RankMemory:
    peak, unused = describe_peak(view), fragmentation(view)
    split_bytes = unused.inactive_split_bytes if unused else 0
    return RankMemory(
        rank=rank,
        device=view.recording.device,
        source=view.recording.source,
        peak=peak,
        layers=layer_peaks(view),
        fragmentation=unused,
        oom=out_of_memory(view, manifest),
        truncated=view.recording.truncated,
        timeline=timeline(view),
        phase_spans=phase_spans(view.phases),
        device_total_bytes=manifest.device.total_bytes if manifest else None,
        remedies=remedies_at(view, view.peak_order, peak.fqn, manifest, split_bytes=split_bytes),
        model_part=_model_part(manifest),
    )


def _model_part(manifest: RankManifest | None) -> str | None:
    groups = [] if manifest is None else manifest.param_groups
    told = [(one.root, one.fqn, [(each.fqn, each.global_shape) for each in one.parameters]) for one in groups]
    return blake2b(repr(told).encode(), digest_size=6).hexdigest() if told else None


def _figures(rank: RankMemory) -> MemoryFigures:
    peak, total = rank.peak, rank.device_total_bytes
    used = peak.allocated_bytes if peak.reserved_bytes is None else peak.reserved_bytes
    return MemoryFigures(
        rank=rank.rank,
        allocated_bytes=peak.allocated_bytes,
        reserved_bytes=peak.reserved_bytes,
        device_total_bytes=total,
        device_frac=used / total if total else None,
        unattributed_frac=peak.categories.get("unattributed", 0) / max(1, peak.allocated_bytes),
    )


def _merged(analyses: Iterable[tuple[int, Sequence[Finding]]]) -> list[Finding]:
    """Merge messages that several ranks share, in the words of the first, and name the ranks."""
    first: dict[tuple[str, str | None], Finding] = {}
    where: dict[tuple[str, str | None], list[int]] = {}
    for rank, findings in analyses:
        for finding in findings:
            key = finding.id, finding.fqn
            first.setdefault(key, finding)
            where.setdefault(key, []).append(rank)
    merged = [
        replace(finding, evidence={**finding.evidence, "ranks": sorted(set(where[key]))})
        for key, finding in first.items()
    ]
    return sorted(merged, key=lambda finding: SEVERITIES.index(finding.severity))


def phase_spans(phases: PhaseTable) -> list[PhaseSpan]:
    """Merge neighbouring rows of one step and phase, over all threads, into disjoint spans in time order.

    Where threads overlap, a span ends when the next one starts. Phase ``other`` has no span.
    """
    named = phases.take(~phases.phase.equals("other") & (phases.phase.codes >= 0))
    if not len(named):
        return []
    named = named.take(np.argsort(named.start_ns, kind="stable"))
    opens = np.ones(len(named), dtype=np.bool_)
    opens[1:] = (named.step[1:] != named.step[:-1]) | (named.phase.codes[1:] != named.phase.codes[:-1])
    first = np.flatnonzero(opens)
    starts = named.start_ns[first]
    ends = np.maximum.reduceat(named.end_ns, first)
    ends[:-1] = np.minimum(ends[:-1], starts[1:])
    return [
        PhaseSpan(start_ns=start, end_ns=end, step=step if step >= 0 else None, phase=str(phase))
        for start, end, step, phase in zip(
            starts.tolist(),
            ends.tolist(),
            named.step[first].tolist(),
            named.phase.take(first).to_list(),
            strict=True,
        )
    ]
