"""``check balance``: the ranks' own work per step, the cost of waiting for the slowest, and the share that
data explain.

Collectives make all ranks equally slow, so step durations do not show imbalance; ranks are compared by
their time outside waits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from fsdp2prof.analyzers.findings import finding
from fsdp2prof.analyzers.ranks.late_ranks import chance
from fsdp2prof.errors import InputError
from fsdp2prof.results.check import BalanceCheck, BalancedRank, BalancedStep, TokenBalance
from fsdp2prof.results.finding import Finding, Severity
from fsdp2prof.units import format_frac, format_ns, plural

_WORTH_FRAC = 0.03
"""Part of a step from which an imbalance is worth a finding."""
_HIGH_FRAC = 0.15
_PADDING_FRAC = 0.1
_FEW_STEPS, _ALWAYS_FRAC, _CHANCE = 3, 0.8, 0.1
"""Steps, and the part of them, in which a rank that is always behind is the slowest; how likely one of equal
ranks may be so."""
_EXPLAINED_FRAC = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """One step of one rank."""

    duration_ns: int
    busy_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTokens:
    """Operations that one rank computes in one step."""

    tokens: int
    computed: int


def tokens_of_steps(
    lengths: Sequence[int],
    steps: Sequence[int],
    *,
    ranks: int,
    batch_size: int,
    micro_batches: int,
    seq_len: int | None,
) -> dict[int, list[StepTokens]]:
    """Assign documents to ranks as torch's ``DistributedSampler`` does without shuffling.

    Document i goes to rank i mod ``ranks``. A sequence has ``seq_len`` tokens, which truncates longer
    documents, or otherwise the length of the longest document in its rank's micro-batch. Steps beyond the
    last document are left out.
    """
    of_step = ranks * batch_size * micro_batches
    dealt: dict[int, list[StepTokens]] = {}
    for step in steps:
        mine = lengths[step * of_step : (step + 1) * of_step]
        if len(mine) == of_step:
            dealt[step] = [_computed(mine[rank::ranks], batch_size, seq_len) for rank in range(ranks)]
    return dealt


def check_balance(
    measured: Mapping[int, Mapping[int, RankStep]],
    *,
    path: str,
    measured_on: Literal["watched", "traced"],
    tokens: Mapping[int, Sequence[StepTokens]] | None = None,
    documents: int = 0,
    flops: Collection[int | None] = (),
    assumptions: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> BalanceCheck:
    """Compare ranks (rank -> step -> measurement) over the steps that all have.

    ``tokens`` are by step, one entry per rank in their order; ``flops`` are the operations of every traced
    step of every rank. Raises ``InputError`` for fewer than two ranks or no common step.
    """
    ranks = sorted(measured)
    common = sorted(set.intersection(*(set(steps) for steps in measured.values()))) if ranks else []
    if len(ranks) < 2 or not common:
        what = "one rank" if len(ranks) == 1 else "no step that all ranks have"
        raise InputError(f"{path}: {what}: there is nothing to balance")
    tokens = tokens or {}
    busy = {step: [measured[rank][step].busy_ns for rank in ranks] for step in common}
    rows = [_step(step, ranks, measured, busy[step], tokens.get(step)) for step in common]
    by_rank = _ranks(ranks, common, busy, tokens)
    step_ns, lost_ns = fmean(row.duration_ns for row in rows), fmean(row.lost_ns for row in rows)
    constant_ns = max(0.0, max(row.behind_ns for row in by_rank))
    summed = _tokens(busy, tokens, documents) if tokens else None
    result = BalanceCheck(
        passed=True,
        verdict=[],
        path=path,
        measured_on=measured_on,
        step_ns=step_ns,
        busy_ns=fmean(row.mean_busy_ns for row in rows),
        lost_ns=lost_ns,
        lost_frac=lost_ns / step_ns if step_ns else 0.0,
        constant_ns=min(constant_ns, lost_ns),
        varying_ns=max(0.0, lost_ns - constant_ns),
        tokens=summed,
        findings=[],
        ranks=sorted(by_rank, key=lambda row: (-row.busy_ns, row.rank)),
        steps=rows,
        assumptions=list(assumptions),
        warnings=list(warnings),
    )
    is_even = len(flops) > 1 and None not in flops and len(set(flops)) == 1
    return _judged(result, is_even=is_even)


def _computed(lengths: Sequence[int], batch_size: int, seq_len: int | None) -> StepTokens:
    kept = [length if seq_len is None else min(length, seq_len) for length in lengths]
    batches = [kept[start : start + batch_size] for start in range(0, len(kept), batch_size)]
    computed = sum(len(batch) * (seq_len or max(batch)) for batch in batches)
    return StepTokens(tokens=sum(kept), computed=computed)


def _step(
    step: int,
    ranks: Sequence[int],
    measured: Mapping[int, Mapping[int, RankStep]],
    busy: Sequence[int],
    tokens: Sequence[StepTokens] | None,
) -> BalancedStep:
    mean, most = fmean(busy), max(busy)
    return BalancedStep(
        step=step,
        duration_ns=fmean(measured[rank][step].duration_ns for rank in ranks),
        mean_busy_ns=mean,
        max_busy_ns=most,
        lost_ns=most - mean,
        slowest_rank=ranks[busy.index(most)],
        mean_tokens=None if tokens is None else fmean(one.computed for one in tokens),
        max_tokens=None if tokens is None else max(one.computed for one in tokens),
    )


def _ranks(
    ranks: Sequence[int],
    common: Sequence[int],
    busy: Mapping[int, Sequence[int]],
    tokens: Mapping[int, Sequence[StepTokens]],
) -> list[BalancedRank]:
    means = [fmean(busy[step][position] for step in common) for position in range(len(ranks))]
    known = [tokens[step] for step in common if step in tokens]
    return [
        BalancedRank(
            rank=rank,
            busy_ns=means[position],
            behind_ns=means[position] - fmean(means),
            slowest_steps=sum(busy[step][position] == max(busy[step]) for step in common),
            tokens=fmean(one[position].tokens for one in known) if known else None,
            computed_tokens=fmean(one[position].computed for one in known) if known else None,
        )
        for position, rank in enumerate(ranks)
    ]


def _tokens(
    busy: Mapping[int, Sequence[int]], tokens: Mapping[int, Sequence[StepTokens]], documents: int
) -> TokenBalance:
    steps = [step for step in busy if step in tokens]
    used = sum(one.tokens for step in steps for one in tokens[step])
    computed = sum(one.computed for step in steps for one in tokens[step])
    counts = {step: [one.computed for one in tokens[step]] for step in steps}
    padding = (computed - used) / computed if computed else 0.0
    return TokenBalance(
        documents=documents,
        steps=len(steps),
        tokens=used,
        computed_tokens=computed,
        padding_frac=padding,
        padding_ns=padding * fmean(value for step in steps for value in busy[step]),
        imbalance_frac=fmean(max(counts[step]) / fmean(counts[step]) - 1 for step in steps),
        explained_frac=_explained({step: busy[step] for step in steps}, counts),
    )


def _explained(busy: Mapping[int, Sequence[int]], tokens: Mapping[int, Sequence[int]]) -> float | None:
    """Square of the correlation of two measures within steps."""
    pairs = [
        (value - fmean(busy[step]), count - fmean(tokens[step]))
        for step in busy
        for value, count in zip(busy[step], tokens[step], strict=True)
    ]
    of_busy, of_tokens = sum(x * x for x, _ in pairs), sum(y * y for _, y in pairs)
    if not of_busy or not of_tokens:
        return None
    return min(1.0, sum(x * y for x, y in pairs) ** 2 / (of_busy * of_tokens))


def _judged(check: BalanceCheck, *, is_even: bool) -> BalanceCheck:
    findings = [*_imbalance(check, is_even=is_even), *_padding(check)]
    verdict = (
        ["All ranks have the same work in every step."]
        if not check.lost_ns
        else [
            f"On average, the slowest rank of a step works {format_ns(check.lost_ns)} longer "
            f"than the mean of {plural(len(check.ranks), 'rank')}: {format_frac(check.lost_frac)} of a step "
            f"of {format_ns(check.step_ns)}.",
            f"Over {plural(len(check.steps), 'step')}, rank {check.ranks[0].rank} causes "
            f"{format_ns(check.constant_ns)} of it; "
            f"the other {format_ns(check.varying_ns)} come from a different rank in each step.",
        ]
    )
    if check.tokens is not None:
        verdict.append(
            f"{format_frac(check.tokens.padding_frac)} of the tokens computed are padding, and the rank with "
            f"the most tokens computes {format_frac(check.tokens.imbalance_frac)} more than the mean."
        )
    return replace(
        check,
        findings=findings,
        verdict=verdict,
        passed=not any(one.severity == "high" for one in findings),
    )


def _imbalance(check: BalanceCheck, *, is_even: bool) -> list[Finding]:
    findings: list[Finding] = []
    first = check.ranks[0]
    steps, slowest = len(check.steps), first.slowest_steps
    is_always = steps >= _FEW_STEPS and slowest >= _ALWAYS_FRAC * steps
    is_always = is_always and chance(steps, slowest, len(check.ranks)) <= _CHANCE
    varying_ns = check.varying_ns if is_always else check.lost_ns
    if is_always and check.step_ns and check.constant_ns / check.step_ns >= _WORTH_FRAC:
        always = {"rank": first.rank, "behind_ns": first.behind_ns, "slowest_steps": first.slowest_steps}
        severity = _severity(check.constant_ns / check.step_ns)
        key = "rank_always_behind/even" if is_even else "rank_always_behind"
        findings.append(finding("balance", key, always, severity=severity, behind=check.constant_ns))
    if check.step_ns and varying_ns / check.step_ns >= _WORTH_FRAC:
        findings.append(_varying(check, varying_ns, is_even=is_even))
    return findings


def _varying(check: BalanceCheck, varying_ns: float, *, is_even: bool) -> Finding:
    """Finding for a slowest rank that changes: data, if tokens explain it, otherwise another reason."""
    explained = check.tokens.explained_frac if check.tokens else None
    by_data = explained is not None and explained >= _EXPLAINED_FRAC
    key = "work_varies"
    if by_data:
        key = "work_varies/by_data"
    elif is_even:
        key = "time_varies"
    elif explained is not None:
        key = "work_varies/unexplained"
    frac = varying_ns / check.step_ns
    # Only a reason that is known fails a job: noise of a busy host does not.
    severity = _severity(frac if by_data else min(frac, _WORTH_FRAC))
    amounts = {"varying_ns": varying_ns, "explained_frac": explained}
    return finding("balance", key, amounts, severity=severity)


def _padding(check: BalanceCheck) -> list[Finding]:
    tokens = check.tokens
    if tokens is None or tokens.padding_frac < _PADDING_FRAC:
        return []
    amounts = {"padding_frac": tokens.padding_frac, "padding_ns": tokens.padding_ns}
    return [finding("balance", "padding", amounts)]


def _severity(frac: float) -> Severity:
    return "high" if frac >= _HIGH_FRAC else "medium"
