"""``analyze memory``: what fills each device at its peak, by layer, phase and kind of tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from fsdp2prof.analyzers.memory.findings import rank_findings, rank_imbalance
from fsdp2prof.analyzers.memory.fragmentation import fragmentation
from fsdp2prof.analyzers.memory.out_of_memory import out_of_memory
from fsdp2prof.analyzers.memory.peak import describe_peak, layer_peaks, timeline
from fsdp2prof.analyzers.memory.prepared import PreparedRecording, prepare
from fsdp2prof.analyzers.phase_spans import phase_spans
from fsdp2prof.manifest import RankManifest
from fsdp2prof.results import SEVERITIES, Finding, MemoryAnalysis, RankMemory
from fsdp2prof.tables import MemoryRecording

__all__ = ["RankRecording", "analyze_memory"]

RankRecording: TypeAlias = "tuple[int, MemoryRecording, RankManifest | None]"
"""A rank, one of its devices' recordings, and what the recorder said about the rank, if it did."""


def analyze_memory(recordings: Sequence[RankRecording]) -> MemoryAnalysis:
    """Analyse recordings of any ranks, from any source."""
    ranks: list[RankMemory] = []
    findings: list[list[Finding]] = []
    for rank, recording, manifest in recordings:
        view = prepare(recording, manifest)
        result = _rank_memory(rank, view)
        ranks.append(result)
        findings.append(rank_findings(view, result, manifest))
    imbalance = rank_imbalance(ranks)
    return MemoryAnalysis(
        ranks=ranks,
        findings=[*([imbalance] if imbalance else []), *_merged(ranks, findings)],
        warnings=[f"rank {rank}: {text}" for rank, recording, _ in recordings for text in recording.warnings],
    )


def _rank_memory(rank: int, view: PreparedRecording) -> RankMemory:
    return RankMemory(
        rank=rank,
        device=view.recording.device,
        source=view.recording.source,
        peak=describe_peak(view),
        layers=layer_peaks(view),
        fragmentation=fragmentation(view),
        oom=out_of_memory(view),
        truncated=view.recording.truncated,
        timeline=timeline(view),
        phase_spans=phase_spans(view.phases),
    )


def _merged(ranks: list[RankMemory], findings: list[list[Finding]]) -> list[Finding]:
    """Say what many ranks have in common once, in the words of the fullest, and name the ranks."""
    fullest_first = sorted(zip(ranks, findings, strict=True), key=lambda pair: -pair[0].peak.allocated_bytes)
    first: dict[tuple[str, str | None], Finding] = {}
    where: dict[tuple[str, str | None], list[int]] = {}
    for result, found in fullest_first:
        for finding in found:
            key = finding.id, finding.fqn
            first.setdefault(key, finding)
            where.setdefault(key, []).append(result.rank)
    merged = [
        replace(finding, evidence={**finding.evidence, "ranks": sorted(set(where[key]))})
        for key, finding in first.items()
    ]
    return sorted(merged, key=lambda finding: SEVERITIES.index(finding.severity))
