"""Result of ``whatif``: replays of a recorded run with changes."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp2prof.results import Shown
from fsdp2prof.units import format_bytes, format_frac, format_ns


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIfChange:
    """One change, replayed on a recorded run."""

    change: str
    """Change as on the command line: ``forward_prefetch=2``, ``without host_syncs``."""
    what: str
    """The change in words."""
    step_ns: float | None
    """Mean step with the change; null if it does not apply."""
    gained_ns: float | None
    """Time saved per step; negative is a loss."""
    least_gained_ns: float | None = None
    """Gain in the recorded step that gains least; null with a single step, or if the change does not
    apply."""
    most_gained_ns: float | None = None
    """Gain in the recorded step that gains most."""
    gained_frac: float | None
    """Gain as a fraction of the recorded step."""
    memory_bytes: int | None
    """Upper bound of the additional peak memory of one rank; null if unknown."""
    reason: str | None
    """Reason why it does not apply; null if it does."""
    other_hardware: bool = False
    """Whether it needs faster devices or links, which no training setting provides."""
    told: bool = False
    """Whether it is proposed: it keeps the training's results or is the remedy of a reported loss; gains
    most among values of its setting, and as much as a reported loss; and its memory is not known to be
    missing."""
    assumptions: list[str] = field(default_factory=list)
    """Assumptions beyond those of the replay itself."""

    def sentence(self, name: str | None = None) -> str:
        """Report the gain and cost of the change, called by what it does unless it has a ``name``.

        ``explicit forward prefetch of 2: saves 14.0 ms per step (3.1%)``.
        """
        gained, name = self.gained_ns or 0.0, name or self.what
        text = f"{name}: {'saves' if gained > 0 else 'costs'} {format_ns(abs(gained))} per step"
        text = (
            f"{name}: saves no time"
            if abs(gained) < 1
            else f"{text} ({format_frac(abs(self.gained_frac or 0.0))})"
        )
        if not self.memory_bytes:
            return text
        more, size = self.memory_bytes > 0, format_bytes(abs(self.memory_bytes))
        return f"{text} and {'needs' if more else 'frees'} at most {size}{' more' if more else ' of'} memory"


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
    """Exposed time saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf(Shown):
    """Result of ``whatif``: a recorded step, replayed with changes."""

    schema: str = "fsdp2prof.what_if/1"
    verdict: list[str]
    """At most three sentences."""
    path: str
    ranks: list[int]
    steps: int
    """Number of traced steps of all ranks, over which means are taken."""
    step_ns: float
    """Mean recorded step."""
    replayed_ns: float
    """Mean step of the replay without a change."""
    replay_error_frac: float
    """``replayed_ns`` / ``step_ns`` - 1."""
    tried: list[WhatIfChange]
    """Changes that apply, largest gain first, then the others."""
    shown: str | None
    """Change to which ``breakdown_after_ns`` and ``by_layer`` belong; null if none applies."""
    breakdown_before_ns: dict[str, float]
    """Part of the recorded step -> mean."""
    breakdown_after_ns: dict[str, float]
    """Parts of the step with the change; empty if none applies."""
    by_layer: list[WhatIfLayer]
    """Collectives, largest change of exposed time first."""
    assumptions: list[str]
    """Assumptions of every replay."""
    warnings: list[str]
