"""A result narrowed to layers, ranks and steps: rows by hand, means made anew, everything else as it was."""

from __future__ import annotations

import pytest
from support.results import MS, memory_analysis, run_analysis, trace_analysis

from fsdp2prof.analyzers.focus import focus_on
from fsdp2prof.errors import UsageError
from fsdp2prof.results.step import Focus


def focus(
    *, layers: list[str] | None = None, ranks: list[int] | None = None, steps: list[int] | None = None
) -> Focus:
    return Focus(layers=layers, ranks=ranks, steps=steps)


def test_layers_keep_their_rows_and_the_step_stays_whole() -> None:
    whole = trace_analysis()
    part = focus_on(whole, focus(layers=["layers.[12]"]))
    assert {row.fqn for row in part.groups} == {"layers.1", "layers.2"}
    assert [row for row in whole.by_layer if row.fqn in ("layers.1", "layers.2")] == part.by_layer
    assert {layer.fqn for layer in part.layers} == {"layers.1", "layers.2"}
    assert part.totals == whole.totals
    assert part.verdict == whole.verdict
    assert part.findings == [], "the only one is of layers.0"
    assert part.cross_rank.stragglers == whole.cross_rank.stragglers, "it is of layers.1"
    assert part.focus == focus(layers=["layers.[12]"])


def test_folded_rows_are_made_of_what_is_left() -> None:
    part = focus_on(trace_analysis(), focus(layers=["layers.*"]))
    assert {row.fqn for row in part.by_layer_folded} == {"layers.0", "layers.1-3"}
    less = focus_on(trace_analysis(), focus(layers=["layers.1", "layers.2"]))
    assert {row.fqn for row in less.by_layer_folded} == {"layers.1", "layers.2"}


def test_the_root_goes_by_the_name_that_people_see() -> None:
    part = focus_on(trace_analysis(), focus(layers=["(root)"]))
    assert {row.fqn for row in part.groups} == {""}


def test_means_of_one_rank_and_step_are_that_windows_own() -> None:
    part = focus_on(trace_analysis(), focus(ranks=[1], steps=[4]))
    assert [(rank.rank, [step.step for step in rank.steps]) for rank in part.ranks] == [(1, [4])]
    assert part.totals.windows == 1
    assert part.totals.step_ns == 50 * MS
    assert part.attribution.collectives == 5, "four all-gathers and one reduce-scatter"
    assert part.attribution.comm_ns == sum(row.total_ns for row in part.groups)
    worst = part.by_layer[0]
    assert (worst.fqn, worst.exposed_ns, worst.count) == ("layers.0", 4 * MS, 1)
    assert part.cross_rank == trace_analysis().cross_rank, "compared with the ranks that are not shown"
    assert "left out" in part.warnings[-1]


def test_memory_is_that_of_the_ranks_and_layers() -> None:
    whole = memory_analysis()
    fqn = next(row.fqn for row in whole.ranks[0].peak.by_layer if row.fqn)
    part = focus_on(whole, focus(layers=[fqn]))
    rank = part.ranks[0]
    assert {row.fqn for row in rank.peak.by_layer} == {fqn}
    assert {name for row in rank.peak.layers for name in row.fqns} == {fqn}
    assert rank.peak.allocated_bytes == whole.ranks[0].peak.allocated_bytes
    other = whole.ranks[-1].rank
    alone = focus_on(whole, focus(ranks=[other]))
    assert {one.rank for one in alone.ranks} == {other}
    assert alone.key_figures is not None
    assert alone.key_figures.rank == other


def test_a_run_is_narrowed_in_both_its_parts() -> None:
    part = focus_on(run_analysis(), focus(layers=["layers.1"]))
    assert part.trace is not None
    assert part.memory is not None
    assert {row.fqn for row in part.trace.groups} == {"layers.1"}
    assert {row.fqn for row in part.memory.ranks[0].peak.by_layer} <= {"layers.1"}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (focus(layers=["decoder.*"]), "--layer decoder.*: no layer has such a name; there is layers.0"),
        (focus(ranks=[0, 7]), "no rank 7 was analysed; there is 0, 1"),
        (focus(steps=[9]), "no step 9 was analysed; there is 3, 4"),
    ],
)
def test_what_is_not_there_is_named_beside_what_is(wanted: Focus, said: str) -> None:
    with pytest.raises(UsageError) as error:
        focus_on(trace_analysis(), wanted)
    assert said in str(error.value)
