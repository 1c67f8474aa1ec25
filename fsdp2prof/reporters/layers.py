"""Rows per layer for people: collectives averaged over ranks and steps, repeated layers folded into one row.

A model of 80 blocks gives 160 rows that say the same thing. Layers whose names differ only in one number
(``layers.0`` ... ``layers.79``) and whose collectives carry the same bytes become one row, ``layers.0-79``;
a layer that is much worse than its siblings keeps a row of its own, because it is the one to look at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from fsdp2prof.analyzers.layers import FOLD_FROM, families, family_name, natural_key
from fsdp2prof.results import GroupRow, TraceAnalysis
from fsdp2prof.vocabulary import layer_name

__all__ = ["LayerRow", "fold", "layer_rows"]

_OUTLIER_RATIO = 2.0
_OUTLIER_SHARE = 0.05
"""A sibling keeps its own row if it is exposed twice the siblings' median and 5% of all exposed time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRow:
    """Collectives of one layer, phase and op: means per rank and step (counts and bytes included)."""

    fqn: str | None
    """Layer, ``layers.0-31`` for folded ones; the empty string is the root, null is unattributed."""
    layers: int
    """Layers folded into this row."""
    phase: str
    op: str
    group: str | None
    """Mesh dimension, or the process group's name where no mesh is known."""
    dtype: str | None
    count: float
    payload_bytes: float | None
    wire_bytes: float | None
    total_ns: float
    exposed_ns: float
    stall_ns: float | None
    busbw_bytes_per_s: float | None

    @property
    def overlap_frac(self) -> float | None:
        """1 - exposed / total; null without communication."""
        return 1 - self.exposed_ns / self.total_ns if self.total_ns else None


def layer_rows(analysis: TraceAnalysis) -> list[LayerRow]:
    """Average ``groups`` over the analysed ranks and steps; worst exposed first."""
    windows = sum(len(rank.steps) for rank in analysis.ranks)
    if not windows:
        return []
    groups: dict[Hashable, list[GroupRow]] = defaultdict(list)
    for row in analysis.groups:
        groups[row.fqn, row.phase, row.op, row.mesh_dim or row.process_group, row.dtype].append(row)
    return _worst_first(_mean(rows, windows) for rows in groups.values())


def fold(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Fold sibling layers with equal bytes into one row each; worst exposed first."""
    total = sum(row.exposed_ns for row in rows)
    folded: list[LayerRow] = []
    keys = [(row.phase, row.op, row.group, row.dtype, row.count, row.payload_bytes) for row in rows]
    for siblings in families([(row.fqn, key) for row, key in zip(rows, keys, strict=True)]):
        members = [rows[i] for i in siblings]
        usual = median(row.exposed_ns for row in members)
        limit = max(_OUTLIER_RATIO * usual, _OUTLIER_SHARE * total)
        alike = [row for row in members if row.exposed_ns <= limit]
        if len(alike) < FOLD_FROM:
            folded += members
        else:
            folded += [row for row in members if row.exposed_ns > limit]
            folded.append(_sum(alike))
    return _worst_first(folded)


def _mean(rows: list[GroupRow], windows: int) -> LayerRow:
    first = rows[0]
    return LayerRow(
        fqn=first.fqn,
        layers=1,
        phase=first.phase,
        op=first.op,
        group=first.mesh_dim or first.process_group,
        dtype=first.dtype,
        count=sum(row.count for row in rows) / windows,
        payload_bytes=_scaled([row.payload_bytes for row in rows], windows),
        wire_bytes=_scaled([row.wire_bytes for row in rows], windows),
        total_ns=sum(row.total_ns for row in rows) / windows,
        exposed_ns=sum(row.exposed_ns for row in rows) / windows,
        stall_ns=_scaled([row.stall_ns for row in rows], windows),
        busbw_bytes_per_s=_rate([(row.wire_bytes, row.busbw_bytes_per_s) for row in rows]),
    )


def _sum(rows: list[LayerRow]) -> LayerRow:
    first = rows[0]
    return LayerRow(
        fqn=family_name([row.fqn for row in rows]),
        layers=len(rows),
        phase=first.phase,
        op=first.op,
        group=first.group,
        dtype=first.dtype,
        count=sum(row.count for row in rows),
        payload_bytes=_scaled([row.payload_bytes for row in rows], 1),
        wire_bytes=_scaled([row.wire_bytes for row in rows], 1),
        total_ns=sum(row.total_ns for row in rows),
        exposed_ns=sum(row.exposed_ns for row in rows),
        stall_ns=_scaled([row.stall_ns for row in rows], 1),
        busbw_bytes_per_s=_rate([(row.wire_bytes, row.busbw_bytes_per_s) for row in rows]),
    )


def _scaled(values: Sequence[float | None], divisor: int) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / divisor if len(known) == len(values) else None


def _rate(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Bytes over the time they took, for rows that each know their own rate."""
    known = [(size, rate) for size, rate in pairs if size and rate]
    time = sum(size / rate for size, rate in known)
    return sum(size for size, _ in known) / time if time else None


def _worst_first(rows: Iterable[LayerRow]) -> list[LayerRow]:
    def key(row: LayerRow) -> tuple[object, ...]:
        return -row.exposed_ns, -row.total_ns, natural_key(layer_name(row.fqn)), row.phase, row.op

    return sorted(rows, key=key)
