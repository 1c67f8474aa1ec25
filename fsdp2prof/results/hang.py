"""Result of ``analyze hang``: which collective a job stands in, who has not come, and who differs."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2prof.results.finding import Finding
from fsdp2prof.results.shown import Shown

__all__ = ["HANG_SCHEMA", "HangAnalysis", "HangCall", "HangMismatch", "HangRank", "HangStanding"]

HANG_SCHEMA = "fsdp2prof.hang/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class HangCall:
    """A collective or point-to-point call as one rank issued it."""

    op: str
    """As in ``analyze trace``, or torch's own name where none fits: ``barrier``, ``send 0->1``."""
    group: str
    """Name of the process group."""
    group_desc: str
    mesh_dim: str | None
    """Mesh dimension that the group spans; null without a manifest."""
    seq: int
    input_sizes: list[list[int]]
    output_sizes: list[list[int]]
    dtype: str | None
    fqn: str | None
    """Layer whose parameters it moves; null where unknown or where it is not FSDP's."""
    phase: str | None
    """``forward`` or ``backward``; null where unknown."""
    layer_known: bool
    """Whether the layer could be told; needs a manifest."""
    finished: bool
    created_ns: int
    place: str | None
    """The innermost line outside torch that issued it; null without stacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangStanding:
    """A collective that ranks of one process group stand in."""

    call: HangCall
    """As the lowest rank that came issued it."""
    ranks: list[int]
    """Of the group."""
    came: list[int]
    not_come: list[int]
    no_dump: list[int]
    """Ranks of the group that left no dump: whether they came is unknown."""
    ranks_known: bool = True
    """Whether a dump or a manifest says who belongs to the group; else ``ranks`` are those that used it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangMismatch:
    """The first collective of a process group that not all its ranks issued alike."""

    kind: str
    """``size``, ``dtype``, ``op``; ``skipped``, ``extra`` or ``swapped`` where what follows shows it;
    ``early`` where the odd call followed the expected one before, so it was skipped or came too early."""
    ranks: list[int]
    """The odd ones, fewer than the others or without the lowest rank."""
    found: HangCall
    others: list[int]
    expected: HangCall
    count: int
    """Collectives skipped or added; 0 for other kinds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangRank:
    """What one rank did last."""

    rank: int
    dump: str | None
    """Its file; null where it left none."""
    last: HangCall | None
    """The last call it issued."""
    standing_in: HangCall | None
    """The first call it issued that has not finished; null where it waits in none."""
    behind: int | None
    """Collectives that it is behind the furthest rank of the group it is furthest behind in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangAnalysis(Shown):
    """What the Flight Recorder dumps of a job say about where it stands."""

    schema: str = HANG_SCHEMA
    cause: str
    """``mismatch``, ``not_come``, ``no_dump``, ``order`` (ranks wait for each other in different groups),
    ``inside`` (all came, none got out), or ``none``."""
    culprits: list[int]
    """Ranks that the cause names; empty where none does."""
    standings: list[HangStanding]
    """One a process group at most, that of the cause first."""
    mismatches: list[HangMismatch]
    ranks: list[HangRank]
    findings: list[Finding]
    verdict: list[str]
    warnings: list[str]
