"""The ledger of lost time: every nanosecond of the traced steps, charged to exactly one cause."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdp2prof.results.finding import EvidenceValue, Place, Severity

NOTHING = "Nothing to fix was found"
PART = "Not every rank is included"
"""How the sentence begins that says which ranks a result leaves out."""
"""Beginning of the sentence for a run without a remedy to report."""

GainBasis = Literal["replay", "bound", "estimate", "unknown"]
"""Basis of a gain: a replay of the recording with the change; an upper bound from the entry's own time; an
estimate from a typical share of that time; or unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRemedy:
    """A change that the training does not make yet and that saves time."""

    change: str
    """One imperative sentence."""
    gain_ns: float | None
    """Time saved in a mean traced step; null if unknown."""
    gain_frac: float | None
    """Time saved as a fraction of the mean traced step."""
    basis: GainBasis
    reason: str
    """Explanation of the gain, in words."""
    memory_bytes: int | None = None
    """Upper bound of the additional peak memory of one rank; null if unknown."""
    what_if: str | None = None
    """The change in ``whatif`` syntax: ``forward_prefetch=2``; null if it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerPlace:
    """Part of an entry's time: one layer, phase and operation, or one call site."""

    fqn: str | None
    """FSDP module, or ``layers.0-31`` for folded layers; the empty string is the root; null: unattributed."""
    phase: str
    op: str | None
    """Kind of collective, or operator; null if neither applies."""
    site: str | None
    """Python function, file and line; null if no stack was recorded."""
    why: str | None
    """Reason why this part is exposed, in words; null if the cause explains it."""
    total_ns: int
    """Sum over ranks and steps; the parts of an entry sum to its total."""
    ns: float
    """Mean per rank and step."""
    count: float | None = None
    """Collectives, copies or calls per rank and step; null if not counted."""
    bytes: float | None = None
    """Payload per rank and step; null if unknown."""
    bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """All time of one cause, with its locations and the change that would save it."""

    id: str
    """Identifier: the finding's id if the entry is reported as a finding, otherwise the cause."""
    cause: str
    """One of ``fsdp2prof.vocabulary.LEDGER_CAUSES``."""
    fqn: str | None
    """Layer with most of the time; null if it has none."""
    rank: int | None
    """Rank that caused the loss; null if no single rank did."""
    total_ns: int
    """Sum over ranks and steps; all entries of a ledger sum to ``Ledger.total_ns`` exactly."""
    ns: float
    """Mean per rank and step."""
    frac: float
    """Fraction of the traced steps."""
    severity: Severity
    """Severity; ``info`` for useful time and for losses without a remedy."""
    told: bool
    """Whether findings and verdict name the entry."""
    title: str
    """Short title for tables and charts: ``waiting for rank 3``."""
    said: str
    """Loss, location and reason, in one or two sentences."""
    remedy: LedgerRemedy | None
    """Change that would save the time; null if none is known or the training already makes it."""
    confidence: Literal["high", "medium", "low"]
    confidence_reason: str
    places: list[LedgerPlace] = field(default_factory=list)
    """Locations, largest first; the last one sums all others."""
    evidence: dict[str, EvidenceValue] = field(default_factory=dict)
    place: Place | None = None
    """Location with most of the time; null for an entry without time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRest:
    """Sum of the smallest entries of a ledger."""

    entries: int
    """Number of entries in the sum."""
    ns: float
    """Mean per rank and step."""
    frac: float
    """Fraction of the traced steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerStep:
    """One traced step of one rank, by cause."""

    rank: int
    step: int
    duration_ns: int
    causes_ns: dict[str, int]
    """Cause -> time; sums to ``duration_ns`` exactly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """All time of the traced steps by cause, in the order in which to act on it."""

    windows: int
    """Number of traced steps of all ranks."""
    total_ns: int
    """Duration of the traced steps, summed."""
    step_ns: float
    """Mean duration of a traced step."""
    unrecorded_step_ns: float | None
    """Median unrecorded step, the step time to quote; null for traces without a manifest."""
    entries: list[LedgerEntry]
    """Entries: first the reported ones, most important first; then the others, longest first. Together
    they sum to ``total_ns``."""
    steps: list[LedgerStep] = field(default_factory=list)
    rest: LedgerRest | None = None
    """Sum of the entries that a short table shows in one row; null if it lists all of them."""
    causes_ns: dict[str, float] = field(default_factory=dict)
    """Cause -> mean per rank and step, longest first."""
    exact: bool = True
    """Whether the ledger uses the ranks' own events; otherwise it follows from the breakdown alone,
    without waiting for other ranks or forwards without backward."""
    bound: str = ""
    """Bottleneck of the step, in one sentence."""
    collectives: str = ""
    """How the entries and the rows by layer count the same collectives; empty if they agree."""
    not_judged: list[str] = field(default_factory=list)
    """Limits of this recording, one sentence each: overlap on a CPU, waits of ranks without a trace."""
