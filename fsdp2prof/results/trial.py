"""Result of ``try``: FSDP2 settings measured in a running training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdp2prof.results import Shown


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedChange:
    """One candidate, compared with the script's own settings."""

    change: str
    """Candidate as on the command line: ``reshard=never``."""
    outcome: Literal["faster", "slower", "not_distinguishable"]
    """``faster``, ``slower``, or ``not_distinguishable``: the 95 % interval contains zero, or fewer than
    six rounds were measured."""
    gained_ns: float | None
    """Median over rounds of the script's step minus the candidate's; negative is a loss; null without a
    round."""
    low_ns: float | None
    """Lower end of the 95 % confidence interval of ``gained_ns`` (bootstrap over rounds)."""
    high_ns: float | None
    """Upper end of the confidence interval."""
    gained_frac: float | None
    """``gained_ns`` as a fraction of the median step with the script's settings."""
    rounds: int
    """Number of pairs of blocks of which the gain is the median."""
    predicted_ns: float | None
    """Gain that ``whatif`` predicts from recorded steps with the script's settings; null if it cannot."""
    least_predicted_ns: float | None = None
    """Lowest prediction from a single recorded step; null with one step."""
    most_predicted_ns: float | None = None
    """Highest prediction from a single recorded step."""
    predicted_reason: str | None
    """Reason why there is no prediction; null if there is one."""
    peak_bytes: int | None
    """Highest peak of any rank in the candidate's recorded memory step; null without that recording."""
    added_bytes: int | None
    """``peak_bytes`` minus the peak with the script's settings."""
    recording: int | None
    """Number of its recording, with one traced step and one memory step; null if the training ended
    before."""
    lines: list[str] = field(default_factory=list)
    """Python lines that make the change in a script whose root module is ``model``."""


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
    """Clock of the step ends: the host's or the compute stream's."""
    step_ns: float | None
    """Median timed step with the script's own settings; null if none was timed."""
    peak_bytes: int | None
    """Highest peak of any rank with the script's own settings; null without that recording."""
    tried: list[TriedChange]
    """Candidates, largest gain first, then those without a measurement."""
    left_out: list[UntriedChange]
    rounds: int
    """Number of rounds in which every candidate had a block."""
    ended: str | None
    """Reason why the trial ended; null if the training ended first."""
    restored: bool
    """Whether the script's own settings were restored before the training ended."""
    warnings: list[str]
