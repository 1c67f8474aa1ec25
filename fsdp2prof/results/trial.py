"""Result of ``try``: FSDP2 settings measured in the running training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdp2prof.results.shown import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedChange:
    """One candidate beside the script's own settings."""

    change: str
    """As it is written on the command line: ``reshard=never``."""
    outcome: Literal["faster", "slower", "not_distinguishable"]
    """``not_distinguishable``: the interval of 95 % holds zero, or fewer than six rounds were measured."""
    gained_ns: float | None
    """Median over rounds: the script's step less the candidate's. Negative is lost; null without a round."""
    low_ns: float | None
    """Lower end of the confidence interval of 95 % of ``gained_ns`` (bootstrap over rounds)."""
    high_ns: float | None
    """Upper end."""
    gained_frac: float | None
    """``gained_ns`` over the median step with the script's settings."""
    rounds: int
    """Pairs of blocks that the gain is the median of."""
    predicted_ns: float | None
    """Gain that ``whatif`` predicts from recorded steps with the script's settings; null where it cannot."""
    least_predicted_ns: float | None = None
    """Predicted for the recorded step that gains least; null with a single step."""
    most_predicted_ns: float | None = None
    """Predicted for the recorded step that gains most."""
    predicted_reason: str | None
    """Why there is no prediction; null where there is one."""
    peak_bytes: int | None
    """Peak of the fullest rank in the candidate's recorded step of memory; null without that recording."""
    added_bytes: int | None
    """``peak_bytes`` less the peak with the script's settings."""
    recording: int | None
    """Number of its recording, one traced step and one of memory; null where the training ended first."""
    lines: list[str] = field(default_factory=list)
    """Lines of Python that make the change in a script whose root module is ``model``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UntriedChange:
    """A candidate that was not tried."""

    change: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialResult(Shown):
    """Result of ``try``."""

    schema: str = "fsdp2prof.try/1"
    verdict: list[str]
    """At most three sentences."""
    path: str
    ranks: list[int]
    """Ranks whose steps were timed."""
    seed: int
    clock: Literal["host", "device"]
    """What ends a step: the host's boundary or the compute stream's."""
    step_ns: float | None
    """Median timed step with the script's own settings; null where none was timed."""
    peak_bytes: int | None
    """Peak of the fullest rank with the script's own settings; null without that recording."""
    tried: list[TriedChange]
    """The largest gain first, then those without a measurement."""
    left_out: list[UntriedChange]
    rounds: int
    """Rounds in which every candidate had a block."""
    ended: str | None
    """Why the trial ended; null where the training ended first."""
    restored: bool
    """Whether the script's own settings were back before the training ended."""
    warnings: list[str]
