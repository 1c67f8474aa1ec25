"""``try``: each candidate's gain per step, measured in pairs within the running training.

A round holds one block of steps of every candidate and one of the script's own settings, in random order.
A gain is the difference of the two blocks of a round, so that a slowdown of the machine for longer than a
round affects both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from fsdp2prof.results.trial import TrialResult, TriedChange, UntriedChange
from fsdp2prof.trial import (
    Trial,
    TriedBlock,
    block_differences,
    paired_interval,
    parse_candidate,
    script_lines,
)
from fsdp2prof.units import format_bytes, format_frac, format_ns, plural

LEAST_ROUNDS = 6
"""With fewer pairs the range of all of them holds the median with less than 95 % (1 - 2 / 2**n)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The prediction of ``whatif`` for one candidate."""

    gained_ns: float | None
    reason: str | None
    least_ns: float | None = None
    """In the recorded step that gains least; None with a single step."""
    most_ns: float | None = None


def analyze_trial(
    path: str,
    trials: Sequence[Trial],
    *,
    predicted: Mapping[str, Prediction],
    peaks: Mapping[str, int],
    warnings: Sequence[str] = (),
) -> TrialResult:
    """Sum up the ranks' trials; ``predicted`` and ``peaks`` (bytes of the fullest rank) are by candidate.

    Raises ``ValueError`` without a trial.
    """
    if not trials:
        raise ValueError("a trial needs a rank")
    first = min(trials, key=lambda one: one.rank)
    blocks = _over_ranks(trials)
    own = [duration for one in blocks if not one.candidate for duration in one.durations_ns]
    step_ns = median(own) if own else None
    tried = [
        _tried(number, text, blocks, step_ns, first, predicted.get(text), peaks)
        for number, text in enumerate(first.candidates)
        if number
    ]
    tried.sort(key=lambda one: (one.gained_ns is None, -(one.gained_ns or 0.0)))
    return TrialResult(
        verdict=_verdict(tried, step_ns, first),
        path=path,
        ranks=sorted(one.rank for one in trials),
        seed=first.seed,
        clock=first.clock,
        step_ns=step_ns,
        peak_bytes=peaks.get(""),
        tried=tried,
        left_out=[UntriedChange(change=one.change, reason=one.reason) for one in first.left_out],
        rounds=min((one.rounds for one in tried), default=0),
        ended=first.ended,
        restored=all(one.restored for one in trials),
        warnings=list(warnings),
    )


def _over_ranks(trials: Sequence[Trial]) -> list[TriedBlock]:
    """Blocks of the job: each step is the mean over the ranks that timed the whole block."""
    by_place: dict[tuple[int, int], list[TriedBlock]] = {}
    for trial in trials:
        for block in trial.blocks:
            by_place.setdefault((block.round, block.candidate), []).append(block)
    merged = []
    for (number, candidate), blocks in sorted(by_place.items()):
        length = max(len(one.durations_ns) for one in blocks)
        whole = [one.durations_ns for one in blocks if len(one.durations_ns) == length]
        means = [round(fmean(step)) for step in zip(*whole, strict=True)]
        merged.append(
            TriedBlock(candidate=candidate, round=number, first_step=blocks[0].first_step, durations_ns=means)
        )
    return merged


def _tried(
    number: int,
    text: str,
    blocks: Sequence[TriedBlock],
    step_ns: float | None,
    trial: Trial,
    prediction: Prediction | None,
    peaks: Mapping[str, int],
) -> TriedChange:
    differences = block_differences(blocks, number)
    low = gained = high = None
    outcome: Literal["faster", "slower", "not_distinguishable"] = "not_distinguishable"
    if differences:
        low, gained, high = paired_interval(differences)
        if len(differences) >= LEAST_ROUNDS:
            outcome = "faster" if low > 0 else "slower" if high < 0 else outcome
    peak, own_peak = peaks.get(text), peaks.get("")
    return TriedChange(
        change=text,
        outcome=outcome,
        gained_ns=gained,
        low_ns=low,
        high_ns=high,
        gained_frac=None if gained is None or not step_ns else gained / step_ns,
        rounds=len(differences),
        predicted_ns=None if prediction is None else prediction.gained_ns,
        least_predicted_ns=None if prediction is None else prediction.least_ns,
        most_predicted_ns=None if prediction is None else prediction.most_ns,
        predicted_reason="no recording to predict from" if prediction is None else prediction.reason,
        peak_bytes=peak,
        added_bytes=None if peak is None or own_peak is None else peak - own_peak,
        recording=trial.recordings.get(text),
        lines=script_lines(*parse_candidate(text)),
    )


def _verdict(tried: Sequence[TriedChange], step_ns: float | None, trial: Trial) -> list[str]:
    if step_ns is None or not any(one.rounds for one in tried):
        why = f": {trial.ended}" if trial.ended else ": the training ended before the first round"
        return [f"Nothing was measured{why}."]
    best = tried[0]
    if best.outcome == "faster" and best.gained_ns is not None and best.low_ns is not None:
        said = [
            f"{best.change} is the fastest: it saves {format_ns(best.gained_ns)} per step "
            f"({format_frac(best.gained_frac or 0.0)} of {format_ns(step_ns)}), "
            f"95 % interval {format_ns(best.low_ns)} to {format_ns(best.high_ns or 0.0)}, "
            f"over {plural(best.rounds, 'round')}."
        ]
        if best.added_bytes is not None:
            more = "more" if best.added_bytes >= 0 else "less"
            said.append(f"It takes {format_bytes(abs(best.added_bytes))} {more} memory at the peak.")
        if best.lines:
            said.append(f"In the script: {'; '.join(best.lines)}")
        return said
    said = ["No candidate is measurably faster than the script's own settings."]
    if best.rounds < LEAST_ROUNDS:
        said.append(
            f"Only {plural(best.rounds, 'round')} of at least {LEAST_ROUNDS} ran: train longer or try fewer "
            "candidates."
        )
    return said
