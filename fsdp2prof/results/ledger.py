"""The ledger of lost time: every nanosecond of the traced steps, charged once to its cause."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdp2prof.results.finding import EvidenceValue, Place, Severity

NOTHING = "Nothing to fix was found"
"""How the sentence begins that says so."""

GainBasis = Literal["replay", "bound", "estimate", "unknown"]
"""How a gain was found: the recording was replayed with the change; it is an upper bound that follows from
the entry's own time; a part of that time is taken to be typical; or nothing says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRemedy:
    """A change that the training does not make yet and that gives time back."""

    change: str
    """One imperative sentence."""
    gain_ns: float | None
    """Time saved in a mean traced step; null unknown."""
    gain_frac: float | None
    """The same as a fraction of the mean traced step."""
    basis: GainBasis
    reason: str
    """How the gain was found, in words."""
    memory_bytes: int | None = None
    """Additional peak memory of one rank, at most; null unknown."""
    what_if: str | None = None
    """The change as ``whatif`` takes it: ``forward_prefetch=2``; null where it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerPlace:
    """A part of an entry's time: one layer, phase and operation, or one call site."""

    fqn: str | None
    """FSDP module, ``layers.0-31`` for folded ones; the empty string is the root; null: unattributed."""
    phase: str
    op: str | None
    """Kind of collective, or operator; null where neither applies."""
    site: str | None
    """Python function, file and line; null where no stack was recorded."""
    why: str | None
    """Why this part is exposed, in words; null where the cause says everything."""
    total_ns: int
    """Sum over ranks and steps; the places of an entry sum to its total."""
    ns: float
    """Mean per rank and step."""
    count: float | None = None
    """Collectives, copies or calls per rank and step; null where they are not counted."""
    bytes: float | None = None
    """Payload per rank and step; null unknown."""
    bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerEntry:
    """All time of one cause, with the places that it arose in and the change that would save it."""

    id: str
    """Identifies the entry: the finding's id where it is reported as a finding, else the cause."""
    cause: str
    """One of ``fsdp2prof.vocabulary.LEDGER_CAUSES``."""
    fqn: str | None
    """Layer with most of it; null where it has none."""
    rank: int | None
    """Rank that caused it; null where no single one did."""
    total_ns: int
    """Sum over ranks and steps; all entries of a ledger sum to ``Ledger.total_ns`` exactly."""
    ns: float
    """Mean per rank and step."""
    frac: float
    """Fraction of the traced steps."""
    severity: Severity
    """``info`` for useful time and for losses that cannot be changed."""
    told: bool
    """Whether findings and verdict name it."""
    title: str
    """The cause in a few words, for a table or a chart: ``waiting for rank 3``."""
    said: str
    """What is lost, where and why: one or two sentences."""
    remedy: LedgerRemedy | None
    """Null where nothing is known to help, or where the training does it already."""
    confidence: Literal["high", "medium", "low"]
    confidence_reason: str
    places: list[LedgerPlace] = field(default_factory=list)
    """The costliest first; the last one sums all others."""
    evidence: dict[str, EvidenceValue] = field(default_factory=dict)
    place: Place | None = None
    """Where most of it is lost; null of an entry without time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerRest:
    """The last entries of a ledger as one sum: those too small to be listed one by one."""

    entries: int
    """How many of the last entries these are."""
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
    """Where all time of the traced steps went, and the order in which to act on it."""

    windows: int
    """Traced steps of all ranks."""
    total_ns: int
    """Their durations, summed."""
    step_ns: float
    """Mean traced step."""
    unrecorded_step_ns: float | None
    """Median step without recording: the step time to quote; null for traces that no recorder described."""
    entries: list[LedgerEntry]
    """First those that are reported, in the order in which they are worth acting on; then the others, the
    most time first. Together they sum to ``total_ns``."""
    steps: list[LedgerStep] = field(default_factory=list)
    rest: LedgerRest | None = None
    """The entries that a short table shows in one row; null where it lists all of them."""
    causes_ns: dict[str, float] = field(default_factory=dict)
    """Cause -> mean per rank and step, the most first."""
    exact: bool = True
    """False where the ledger follows from the breakdown alone, without the ranks' own events: then waiting
    for other ranks and forwards without backward are not told apart."""
    bound: str = ""
    """What bounds the step, in one sentence."""
    collectives: str = ""
    """How the entries and the rows by layer count the same collectives; empty where they agree."""
    not_judged: list[str] = field(default_factory=list)
    """What this recording cannot show, a sentence each: overlap on a CPU, waits of ranks without a trace."""
