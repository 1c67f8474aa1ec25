"""Result of ``whatif``: a recorded run with something changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp2prof.results.shown import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIfChange:
    """One change, tried on a recorded run."""

    change: str
    """As it is written on the command line: ``forward_prefetch=2``, ``without host_syncs``."""
    what: str
    """In words."""
    step_ns: float | None
    """Mean step with it; null where it does not apply."""
    gained_ns: float | None
    """Of a step; negative is lost."""
    least_gained_ns: float | None = None
    """In the recorded step that gains least; null with a single step, or where the change does not apply."""
    most_gained_ns: float | None = None
    """In the recorded step that gains most."""
    gained_frac: float | None
    """Of the recorded step."""
    memory_bytes: int | None
    """More memory at the peak of one rank, at most; null is not known."""
    reason: str | None
    """Why it does not apply; null where it does."""
    other_hardware: bool = False
    """Whether it takes faster devices or links: no setting of a training makes it."""
    told: bool = False
    """Whether it is proposed: it keeps the training's results, or is the remedy of a reported loss; of its
    setting it gains most, as much as a loss that is reported; and its memory is not known to be missing."""
    assumptions: list[str] = field(default_factory=list)
    """What it rests on beyond the replay itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIfLayer:
    """Collectives of one layer, phase and op before and after a change: means per rank and step."""

    fqn: str | None
    """FSDP module; the empty string is the root, null is unattributed."""
    phase: str
    op: str
    count_before: float
    count_after: float
    total_before_ns: float
    total_after_ns: float
    exposed_before_ns: float
    exposed_after_ns: float
    gained_ns: float
    """Less exposed time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf(Shown):
    """Result of ``whatif``: a recorded step, replayed with changes."""

    schema: str = "fsdp2prof.what_if/1"
    verdict: list[str]
    """At most three sentences."""
    path: str
    ranks: list[int]
    steps: int
    """Traced steps of all ranks: what means are over."""
    step_ns: float
    """Mean recorded step."""
    replayed_ns: float
    """Mean step of the replay without a change."""
    replay_error_frac: float
    """``replayed_ns`` over ``step_ns``, less 1."""
    tried: list[WhatIfChange]
    """Those that apply, the most gained first, then the others."""
    shown: str | None
    """Change that ``breakdown_after_ns`` and ``by_layer`` are of; null if none applies."""
    breakdown_before_ns: dict[str, float]
    """Part of the recorded step -> mean."""
    breakdown_after_ns: dict[str, float]
    """The same with the change; empty if none applies."""
    by_layer: list[WhatIfLayer]
    """The largest change of exposed time first."""
    assumptions: list[str]
    """Of every replay."""
    warnings: list[str]
