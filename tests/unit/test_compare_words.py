"""What a comparison says in words: the verdict, whether a change is beyond the spread, what is folded."""

from __future__ import annotations

from dataclasses import replace
from statistics import quantiles

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results import MIB, MS, memory_analysis, run_summary, trace_analysis

from fsdp2prof.analyzers.compare.baseline import Side
from fsdp2prof.analyzers.compare.settings import fold_settings, setting_changes
from fsdp2prof.analyzers.compare.sides import compare
from fsdp2prof.analyzers.compare.times import beyond_spread
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.results.comparison import RunComparison, SettingChange, StepSpread
from fsdp2prof.results.peak import LayerBytes, Peak
from fsdp2prof.results.run import RunSummary, StepTime
from fsdp2prof.results.step import BreakdownNs, StepBreakdown
from fsdp2prof.results.trace import TraceAnalysis


def run_of(*durations_ms: float) -> RunSummary:
    """A run of one rank: a first step that pays for starting up, then these unrecorded ones."""
    plain = [
        StepTime(step=i + 2, duration_ns=round(ms * MS), kind="plain") for i, ms in enumerate(durations_ms)
    ]
    first = StepTime(step=1, duration_ns=900 * MS, kind="plain")
    return replace(run_summary(), ranks=[replace(run_summary().ranks[0], steps=[first, *plain])])


def trace_of(*durations_ms: int) -> TraceAnalysis:
    """One rank whose steps are 10 ms of compute and idle time."""
    steps = [
        StepBreakdown(
            step=number,
            duration_ns=ms * MS,
            start_ns=0,
            breakdown_ns=BreakdownNs(
                compute=10 * MS,
                fsdp_copy=0,
                exposed_all_gather=0,
                exposed_reduce_scatter=0,
                exposed_all_reduce=0,
                exposed_other_comm=0,
                exposed_memcpy=0,
                idle=(ms - 10) * MS,
            ),
        )
        for number, ms in enumerate(durations_ms)
    ]
    analysis = trace_analysis()
    return replace(analysis, ranks=[replace(analysis.ranks[0], steps=steps)], groups=[])


def side(name: str, **parts) -> Side:
    return Side(path=name, kind="run", **parts)


def test_a_change_beyond_the_spread_of_unrecorded_steps() -> None:
    """Quartiles of 10 to 14 are 11 and 13, of 15 to 19 they are 16 and 18; 17 over 12 is 41.7% more."""
    comparison = compare(side("a", run=run_of(10, 11, 12, 13, 14)), side("b", run=run_of(15, 16, 17, 18, 19)))
    assert comparison.beyond_spread is True
    assert comparison.verdict == [
        "The unrecorded step is 41.7% slower: 17.0 ms after 12.0 ms, beyond the spread of the steps "
        "(11.0 ms to 13.0 ms before, 16.0 ms to 18.0 ms after)."
    ]


def test_a_change_within_the_spread() -> None:
    comparison = compare(side("a", run=run_of(10, 11, 12, 13, 14)), side("b", run=run_of(9, 10, 11, 12, 13)))
    assert comparison.beyond_spread is False
    assert comparison.verdict == [
        "No change beyond the spread of the steps: the unrecorded step is 11.0 ms after 12.0 ms (-8.3%; "
        "11.0 ms to 13.0 ms before, 10.0 ms to 12.0 ms after)."
    ]


def test_two_steps_are_too_few_to_tell() -> None:
    comparison = compare(side("a", run=run_of(10, 10)), side("b", run=run_of(20, 20)))
    assert comparison.beyond_spread is None
    assert "too few steps to exclude coincidence (2 and 2)" in comparison.verdict[0]


def test_traced_steps_count_where_a_side_has_no_others() -> None:
    """Means 21 and 31 ms: 47.6% slower; the ranges 20 to 22 and 30 to 32 do not meet. All of it is idle."""
    comparison = compare(
        side("a", trace=trace_of(20, 21, 22)), side("b", trace=trace_of(30, 31, 32), run=run_of(5))
    )
    assert comparison.before.spread == StepSpread(
        measured_on="traced", steps=3, typical_ns=21 * MS, low_ns=20 * MS, high_ns=22 * MS
    )
    assert comparison.verdict == [
        "The traced step is 47.6% slower: 31.0 ms after 21.0 ms, beyond the spread of the steps "
        "(20.0 ms to 22.0 ms before, 30.0 ms to 32.0 ms after).",
        "Of the traced step, idle (+10.0 ms) changed most.",
    ]


_SOME_STEPS = st.lists(st.integers(1, 50), min_size=3, max_size=9)


@given(_SOME_STEPS, _SOME_STEPS)
def test_spreads_that_meet_are_no_change(before: list[int], after: list[int]) -> None:
    """Beyond the spread is symmetric, and half of one side is then below the other's lower quartile."""
    sides = [(quantiles(one, n=4, method="inclusive"), one) for one in (before, after)]
    spreads = [
        StepSpread(measured_on="unrecorded", steps=len(one), typical_ns=mid, low_ns=low, high_ns=high)
        for (low, mid, high), one in sides
    ]
    beyond = beyond_spread(*spreads)
    assert beyond == beyond_spread(*reversed(spreads))
    assert beyond_spread(spreads[0], spreads[0]) is False
    if beyond:
        (_, faster), (slower, _) = sorted(sides)
        assert sum(time < slower[0] for time in faster) >= len(faster) / 2


def test_the_worst_layer_and_operation_are_named() -> None:
    groups = [
        replace(row, exposed_ns=row.exposed_ns + (2 * MS if row.fqn == "layers.2" else 0))
        for row in trace_analysis().groups
    ]
    slower = [
        replace(rank, steps=[_longer(step, 3 * MS) for step in rank.steps]) for rank in trace_analysis().ranks
    ]
    after = replace(trace_analysis(), groups=groups, ranks=slower)
    comparison = compare(side("a", trace=trace_analysis()), side("b", trace=after))
    assert comparison.verdict[1] == (
        "Of the traced step, exposed all-gather (+3.00 ms) changed most; among collectives, "
        "the all-gather of `layers.2` in forward (+2.00 ms exposed)."
    )
    assert comparison.exposed is not None
    assert (comparison.exposed.delta_ns, comparison.exposed.delta_frac) == (3 * MS, 3 / 10)


def _longer(step: StepBreakdown, extra_ns: int) -> StepBreakdown:
    parts = step.breakdown_ns
    return replace(
        step,
        duration_ns=step.duration_ns + extra_ns,
        breakdown_ns=replace(parts, exposed_all_gather=parts.exposed_all_gather + extra_ns),
    )


def test_memory_is_the_last_sentence() -> None:
    def peak(size: int) -> Peak:
        return Peak(
            allocated_bytes=size * MIB,
            reserved_bytes=None,
            step=1,
            phase="backward",
            fqn="",
            categories={"activation": size * MIB},
            by_layer=[LayerBytes(fqn="", category="activation", bytes=size * MIB)],
        )

    comparison = compare(
        side("a", trace=trace_of(20, 21, 22), peaks={0: peak(10)}),
        side("b", trace=trace_of(20, 21, 22), peaks={0: peak(15)}),
    )
    assert comparison.verdict == [
        "The traced step takes 21.0 ms on both sides.",
        "The peak is 5.00 MiB higher (+50.0%): 10.0 MiB before, 15.0 MiB after.",
        "Largest changes: activations (+5.00 MiB).",
    ]


def test_settings_of_repeated_layers_that_changed_alike_are_one() -> None:
    before, after = run_summary(), run_summary()
    groups = [replace(after.shard_groups[0], fqn=f"layers.{i}") for i in range(4)]
    before = replace(before, shard_groups=groups)
    after = replace(after, shard_groups=[replace(group, reduce_dtype="bfloat16") for group in groups])
    changes = setting_changes(before, after)
    assert [change.name for change in changes] == [f"sharding of layers.{i}" for i in range(4)]
    [folded] = fold_settings(changes)
    assert (folded.name, folded.settings) == ("sharding of layers.0-3", 4)
    assert (folded.before, folded.after) == (changes[0].before, changes[0].after)
    alone = SettingChange(name="layers.9", before="x", after=None)
    assert fold_settings([alone, *changes]) == [alone, folded]


@pytest.mark.parametrize("form", ["text", "html"])
def test_what_people_see_stands_in_the_json(form: str) -> None:
    """Both show the verdict and the equalities of the decoded document, in that order."""
    sides = [
        Side(
            path=f"runs/{name}", kind="run", trace=trace, run=run, peaks={0: memory_analysis().ranks[0].peak}
        )
        for name, trace, run in (
            ("a", trace_of(20, 21), run_of(9, 9, 9)),
            ("b", trace_of(30, 31), run_of(8, 8, 8)),
        )
    ]
    comparison = compare(*sides)
    document = build(comparison)
    kept = msgspec.json.decode(
        str(RENDERERS["json"].render(document, RenderOptions())).encode(), type=RunComparison
    )
    assert kept == comparison
    shown = " ".join(str(RENDERERS[form].render(document, RenderOptions(width=200))).split())
    places = [shown.index(sentence) for sentence in (*kept.verdict, *kept.equalities)]
    assert places == sorted(places)
    assert len(kept.verdict) == 3
    for path in ("runs/a", "runs/b"):
        assert path in shown


def test_collectives_that_differ_are_folded_by_their_bytes_alone() -> None:
    """One layer of six grew much slower: a row of its own by time, none by bytes."""
    before, after = trace_analysis(blocks=6), trace_analysis(blocks=6)
    doubled = [
        replace(
            row,
            payload_bytes=2 * (row.payload_bytes or 0),
            exposed_ns=row.exposed_ns + (40 * MS if row.fqn == "layers.3" else 0),
        )
        for row in after.groups
    ]
    comparison = compare(side("a", trace=before), side("b", trace=replace(after, groups=doubled)))
    by_time = [(row.fqn, row.layers) for row in comparison.communication_folded]
    by_bytes = [(row.fqn, row.layers) for row in comparison.communication_differing]
    assert by_time == [("layers.3", 1), ("layers.0-2,4-5", 5), ("", 1)]
    assert by_bytes == [("layers.0-5", 6), ("", 1)]
    folded = comparison.communication_differing[0]
    assert (folded.delta.payload_bytes, folded.delta.count) == (6 * 8 * MIB, 0)
    assert sum(row.delta.exposed_ns or 0 for row in comparison.communication_folded) == 40 * MS


def test_layers_that_only_have_other_names_are_compared_with_each_other() -> None:
    """``layers.0`` to ``layers.5`` before, ``blocks.0`` to ``blocks.5`` after; then one sends less."""
    before, after = trace_analysis(blocks=6), trace_analysis(blocks=6)
    renamed = [replace(row, fqn=(row.fqn or "").replace("layers", "blocks")) for row in after.groups]
    comparison = compare(side("a", trace=before), side("b", trace=replace(after, groups=renamed)))
    assert comparison.communication_equal is True
    renamed = [replace(row, payload_bytes=1) if row.fqn == "blocks.5" else row for row in renamed]
    comparison = compare(side("a", trace=before), side("b", trace=replace(after, groups=renamed)))
    assert {row.fqn for row in comparison.communication} > {"layers.0", "blocks.0"}


def test_a_change_that_would_be_written_as_nothing_is_not_a_change() -> None:
    """A microsecond of 40 ms, beyond the spread of steps that are all alike."""
    before, after = trace_of(40, 40, 40), trace_of(40, 40, 40)
    longer = [replace(one, duration_ns=one.duration_ns + 1000) for one in after.ranks[0].steps]
    after = replace(after, ranks=[replace(after.ranks[0], steps=longer)])
    comparison = compare(side("a", trace=before), side("b", trace=after))
    assert comparison.verdict[0] == "The traced step takes 40.0 ms on both sides."
