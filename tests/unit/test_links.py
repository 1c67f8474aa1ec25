"""Links from a sentence to a window of the timeline and to a row of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.results import memory_analysis, memory_comparison, run_analysis, run_comparison, trace_analysis

from fsdp2prof.analyzers.layers import family_name
from fsdp2prof.reporters.document import Document, Table
from fsdp2prof.reporters.documents import build
from fsdp2prof.results.finding import Finding, Place
from fsdp2prof.results.ledger import Ledger, LedgerEntry
from fsdp2prof.results.step import RankTimeline, StepTimeline, TimelineLane, TimelineStall
from fsdp2prof.vocabulary import in_family


def linked_row(document: Document, target: str) -> dict[str, object]:
    """Return the row that an anchor names, by column."""
    anchor, name, *whole, number = target.split("-")
    (section,) = (one for one in document.sections if one.anchor == anchor)
    (table,) = (one for one in section.blocks if isinstance(one, Table) and one.name == name)
    if whole:
        table = table.unabridged or table
    return dict(zip([one.name for one in table.columns], table.rows[int(number)], strict=True))


@pytest.mark.parametrize(
    ("names", "inside", "outside"),
    [
        ([f"layers.{i}" for i in range(4)], "layers.2", "layers.4"),
        (["layers.0.mlp", "layers.1.mlp", "layers.5.mlp"], "layers.5.mlp", "layers.3.mlp"),
        ([f"layers.{i}" for i in range(1, 16, 2)], "layers.9", "layers.8"),
        ([f"layers.{i}" for i in range(4)], "layers.3", "layers.3.mlp"),
    ],
)
def test_a_layer_is_known_in_its_folded_name(names: list[str], inside: str, outside: str) -> None:
    folded = family_name(names)
    assert all(in_family(name, folded) for name in names)
    assert in_family(inside, folded)
    assert not in_family(outside, folded)


def timeline(*stalls: TimelineStall) -> StepTimeline:
    lane = TimelineLane(
        lane="all_gather", start_ns=[100, 400, 900], duration_ns=[50, 70, 60], busy_ns=[50, 70, 60],
        count=[1, 1, 1], layer=[0, 1, 1], phase=[0, 0, 1], name=[0, 0, 0],
    )  # fmt: skip
    return StepTimeline(
        step=3, duration_ns=1000, aligned=True, resolution_ns=0, layers=["layers.0", "layers.1"],
        phases=["forward", "backward"], names=["all_gather"], ranks_left_out=0, stalls_left_out=0,
        ranks=[
            RankTimeline(rank=rank, start_ns=0, duration_ns=1000, lanes=[lane], stalls=[*stalls])
            for rank in (0, 1)
        ],
    )  # fmt: skip


def stall(needed_ns: int, stall_ns: int) -> TimelineStall:
    return TimelineStall(
        lane="all_gather", fqn="layers.1", phase="forward", start_ns=400, end_ns=470, needed_ns=needed_ns,
        stall_ns=stall_ns, cause="launch",
    )  # fmt: skip


def found(place: Place, *stalls: TimelineStall) -> Document:
    finding = Finding(id="x", severity="high", fqn=place.fqn, message="It waits.", place=place)
    return build(replace(trace_analysis(), findings=[finding], timeline=timeline(*stalls)))


def test_a_finding_links_to_the_window_of_its_layer_phase_operation_and_rank() -> None:
    place = Place(fqn="layers.1", phase="forward", op="all_gather", rank=1, step=3)
    (window, _) = found(place).places()["It waits."]
    assert (window.target, window.window) == ("timeline", (1, 400, 470))
    (window, _) = found(place, stall(needed_ns=380, stall_ns=90)).places()["It waits."]
    assert window.window == (1, 380, 470), "the wait for it is longer than the collective"


def test_idle_time_links_to_the_longest_gap_of_its_rank() -> None:
    place = Place(fqn=None, phase="forward", rank=1, step=3)
    entry = LedgerEntry(
        id="host_bound", cause="host", fqn=None, rank=None, total_ns=1, ns=1.0, frac=0.1, severity="high",
        told=True, title="", said="It is slow.", remedy=None, confidence="high", confidence_reason="",
        place=place,
    )  # fmt: skip
    ledger = Ledger(windows=1, total_ns=1, step_ns=1.0, unrecorded_step_ns=None, entries=[entry])
    analysis = replace(trace_analysis(), ledger=ledger, timeline=timeline(), verdict=["So: It is slow."])
    (window, _) = build(analysis).places()["So: It is slow."]
    assert window.window == (1, 470, 900)


def test_a_place_that_is_nowhere_has_no_link() -> None:
    document = found(Place(fqn="layers.7", phase="forward", op="all_gather", rank=1))
    assert document.places()["It waits."] == []


def test_a_sentence_about_a_cause_links_to_its_row_and_says_where_the_link_goes() -> None:
    """Also where nothing is to be fixed, and where the sentence names the cause by the way."""
    base = trace_analysis()
    assert base.ledger is not None
    bound, busy = (replace(base.ledger.entries[0], id=name, said="", remedy=None) for name in ("x", "y"))
    bound, busy = replace(bound, title="compute"), replace(busy, title="waiting for a CPU core")
    ledger = replace(base.ledger, entries=[bound, busy])
    verdict = ["Most of the step is compute: 5 ms.", "Ranks waited 50% of a step for a CPU core.", "Why?"]
    document = build(replace(base, ledger=ledger, verdict=verdict))
    links = [document.places()[line] for line in verdict]
    assert [[link.label for link in one] for one in links] == [["where the step goes"]] * 2 + [[]]
    rows = [linked_row(document, one[0].target)["title"] for one in links[:2]]
    assert rows == ["compute", "waiting for a CPU core"]


@pytest.mark.parametrize("sample", [run_comparison, memory_comparison])
def test_comparisons_link_every_sentence(sample: Callable[[], object]) -> None:
    document = build(sample())
    anchors = {section.anchor for section in document.sections}
    assert document.verdict
    for line in document.verdict:
        (link,) = document.places()[line]
        assert link.target in anchors or linked_row(document, link.target)


def test_a_finding_links_to_the_row_of_its_layer() -> None:
    analysis = trace_analysis()
    row = analysis.by_layer_folded[-1]
    assert row.fqn is not None
    document = found(Place(fqn=row.fqn, phase=row.phase, op=row.op))
    target = linked_row(document, document.places()["It waits."][-1].target)
    assert (target["fqn"], target["phase"], target["op"]) == (row.fqn, row.phase, row.op)


def test_every_sentence_of_a_run_links_to_a_row_or_a_section_that_is_there() -> None:
    document = build(run_analysis())
    anchors = {section.anchor for section in document.sections}
    assert document.verdict
    for line in document.verdict:
        for link in document.places()[line]:
            assert link.target in anchors or linked_row(document, link.target)


def test_a_sentence_about_the_peak_links_to_the_rank_that_peaks() -> None:
    analysis = memory_analysis()
    assert analysis.key_figures is not None
    document = build(analysis)
    row = linked_row(document, document.places()[analysis.verdict[0]][0].target)
    assert row["rank"] == analysis.key_figures.rank
