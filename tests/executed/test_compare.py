"""Comparisons by hand: means, exact equality, ranks that meet, what is said of what one side lacks."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cli import call
from support.present import present
from support.results import (
    HOSTILE,
    MIB,
    MS,
    group,
    memory_analysis,
    run_analysis,
    run_comparison,
    run_summary,
    trace_analysis,
)
from support.samples import sample

from fsdp2prof.analyzers.compare.baseline import Side
from fsdp2prof.analyzers.compare.sides import compare
from fsdp2prof.analyzers.fail_on import check, parse
from fsdp2prof.errors import InputError, UsageError
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.results.comparison import RunComparison, SettingChange
from fsdp2prof.results.estimate import CommEstimate, CommRow, EstimatedMesh, EstimatedModel, EstimatedPolicy
from fsdp2prof.results.peak import LayerBytes, Peak
from fsdp2prof.results.run import RunSummary, StepTime
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.workflows.compare import read_side
from fsdp2prof.workflows.ranks.kept import cut


def side(name: str, trace: TraceAnalysis | None = None, **parts) -> Side:
    return Side(path=name, kind="run", trace=trace, **parts)


def slower(analysis: TraceAnalysis, rank: int, step: int, extra_ns: int) -> TraceAnalysis:
    """Give one step of one rank more compute."""
    steps = [
        replace(
            one,
            duration_ns=one.duration_ns + extra_ns,
            breakdown_ns=replace(one.breakdown_ns, compute=one.breakdown_ns.compute + extra_ns),
        )
        if one.step == step
        else one
        for one in analysis.ranks[rank].steps
    ]
    ranks = list(analysis.ranks)
    ranks[rank] = replace(ranks[rank], steps=steps)
    return replace(analysis, ranks=ranks)


def only(analysis: TraceAnalysis, rank: int, step: int) -> TraceAnalysis:
    """Keep one step of one rank."""
    kept = replace(
        analysis.ranks[rank], steps=[one for one in analysis.ranks[rank].steps if one.step == step]
    )
    groups = [row for row in analysis.groups if (row.rank, row.step) == (rank, step)]
    return replace(analysis, ranks=[kept], groups=groups)


def estimate(analysis: TraceAnalysis) -> CommEstimate:
    """What an estimate of one rank and step of this trace would say."""
    rows = [
        CommRow(
            root=0,
            fqn=row.fqn,
            phase=row.phase,
            op=row.op,
            process_group=None,
            mesh_dim=row.mesh_dim,
            dtype=row.dtype or "",
            group_size=2,
            count=row.count,
            payload_bytes=row.payload_bytes or 0,
            wire_bytes=row.wire_bytes or 0,
        )
        for row in only(analysis, 0, 3).groups
    ]
    return CommEstimate(
        model=EstimatedModel(name="tiny", parameters=1),
        mesh=EstimatedMesh(world_size=2),
        policy=EstimatedPolicy(),
        groups=rows,
        per_step={},
        assumptions=[],
    )


def peak(**layers: int) -> Peak:
    rows = [LayerBytes(fqn=name, category="activation", bytes=size) for name, size in layers.items()]
    total = sum(layers.values())
    return Peak(
        allocated_bytes=total,
        reserved_bytes=2 * total,
        step=1,
        phase="backward",
        fqn="",
        categories={"activation": total},
        by_layer=rows,
    )


def as_json(result) -> str:
    return rendered(result, "json")


def rendered(comparison, form: str, **options) -> str:
    text = RENDERERS[form].render(build(comparison), RenderOptions(**options))
    assert isinstance(text, str)
    return text


def times(comparison: RunComparison) -> dict[str, tuple[float, float, float]]:
    rows = [*comparison.breakdown, *([comparison.step] if comparison.step else [])]
    return {row.part: (row.before_ns, row.after_ns, row.delta_ns) for row in rows}


def test_times_are_means_over_ranks_and_steps() -> None:
    comparison = compare(side("a", trace_analysis()), side("b", slower(trace_analysis(), 1, 4, 6 * MS)))
    found = times(comparison)
    assert found["step"] == (50 * MS, 51_500_000, 1_500_000)
    assert found["compute"] == (30 * MS, 31_500_000, 1_500_000)
    assert found["idle"] == (8 * MS, 8 * MS, 0)
    assert comparison.step is not None
    assert comparison.step.delta_frac == 0.03
    assert {row.part: row.delta_frac for row in comparison.breakdown}["exposed_all_reduce"] is None
    assert comparison.after.step_max_ns == 56 * MS
    assert (comparison.after.steps, comparison.after.step_min_ns) == (4, 50 * MS)


@given(st.lists(st.integers(0, 10**12), min_size=4, max_size=4))
def test_changes_of_the_parts_sum_to_the_steps(extra: list[int]) -> None:
    after = trace_analysis()
    for position, ns in enumerate(extra):
        after = slower(after, position // 2, 3 + position % 2, ns)
    comparison = compare(side("a", trace_analysis()), side("b", after))
    assert comparison.step is not None
    assert Fraction(comparison.step.delta_ns) == Fraction(sum(extra), 4)
    assert sum(row.delta_ns for row in comparison.breakdown) == comparison.step.delta_ns
    back = compare(side("b", after), side("a", trace_analysis()))
    assert back.step is not None
    assert back.step.delta_ns == -comparison.step.delta_ns


def test_a_layer_that_went_and_a_dtype_that_came() -> None:
    after = trace_analysis(blocks=3)
    wider = [
        replace(row, dtype="float32", payload_bytes=16 * MIB, wire_bytes=8 * MIB)
        if row.fqn == "layers.1"
        else row
        for row in after.groups
    ]
    comparison = compare(side("a", trace_analysis()), side("b", replace(after, groups=wider)))
    rows = {row.fqn: row for row in comparison.communication}
    assert len(rows) == 5
    assert comparison.communication_equal is False
    gone = rows["layers.3"]
    assert gone.after is None
    assert not gone.equal
    assert (gone.delta.count, gone.delta.wire_bytes, gone.delta.exposed_ns) == (-1, -4 * MIB, -1 * MS)
    changed = rows["layers.1"]
    assert (changed.before_dtypes, changed.after_dtypes) == (["bfloat16"], ["float32"])
    assert (changed.delta.count, changed.delta.payload_bytes) == (0, 8 * MIB)
    assert not changed.equal
    assert rows["layers.0"].equal
    assert rows[""].equal


def test_the_largest_growth_of_exposed_time_comes_first() -> None:
    groups = [
        replace(row, exposed_ns=row.exposed_ns + {"layers.2": 2 * MS, "layers.1": -MS}.get(row.fqn or "", 0))
        for row in trace_analysis().groups
    ]
    comparison = compare(side("a", trace_analysis()), side("b", replace(trace_analysis(), groups=groups)))
    deltas = [(row.fqn, row.delta.exposed_ns) for row in comparison.communication]
    assert deltas[0] == ("layers.2", 2 * MS)
    assert deltas[-1] == ("layers.1", -MS)


def test_equality_is_exact_over_different_numbers_of_steps() -> None:
    comparison = compare(side("a", trace_analysis()), side("b", only(trace_analysis(), 1, 4)))
    assert comparison.communication_equal is True
    one_more = [*trace_analysis().groups, group("layers.1", "all_gather", 0, 3, exposed_ms=0)]
    comparison = compare(
        side("a", replace(trace_analysis(), groups=one_more)), side("b", only(trace_analysis(), 1, 4))
    )
    [row] = [row for row in comparison.communication if not row.equal]
    assert row.fqn == "layers.1"
    assert row.before is not None
    assert row.before.count == 1.25


def test_unknown_bytes_are_neither_equal_nor_a_change() -> None:
    unknown = [replace(row, payload_bytes=None, wire_bytes=None) for row in trace_analysis().groups]
    comparison = compare(side("a", trace_analysis()), side("b", replace(trace_analysis(), groups=unknown)))
    assert comparison.communication_equal is False
    assert {row.delta.wire_bytes for row in comparison.communication} == {None}


def test_an_op_without_wire_bytes_does_not_stand_in_the_way() -> None:
    broadcast = replace(group(None, "broadcast", 0, 3, exposed_ms=0), wire_bytes=None)
    before = replace(trace_analysis(), groups=[*trace_analysis().groups, broadcast])
    after = replace(before, groups=[*before.groups, group("", "reduce_scatter", 0, 3, exposed_ms=0)])
    assert compare(side("a", before), side("b", before)).communication_equal is True
    comparison = compare(side("a", before), side("b", after))
    assert [row.op for row in comparison.communication if not row.equal] == ["reduce_scatter"]
    [failure] = check([parse("wire_bytes_frac>0")], comparison)
    assert failure.value == pytest.approx(1 / 20)
    known = replace(before, groups=[*trace_analysis().groups, replace(broadcast, wire_bytes=5)])
    comparison = compare(side("a", before), side("b", known))
    assert comparison.communication_equal is False
    with pytest.raises(InputError, match="undefined here"):
        check([parse("wire_bytes_frac>0")], comparison)


def test_a_run_against_its_estimate() -> None:
    predicted = Side(path="e", kind="estimate", communication=estimate(trace_analysis()), world_size=2)
    comparison = compare(side("a", trace_analysis(), world_size=2), predicted)
    assert comparison.communication_equal is True
    assert comparison.step is None
    assert {row.delta.exposed_ns for row in comparison.communication} == {None}
    assert comparison.warnings == ["e has predicted collectives: times cannot be compared"]
    assert comparison.equalities == [
        "counts, payload and wire bytes of the collectives: all 5 rows (layer, phase, op)"
    ]
    assert comparison.equalities[0] in rendered(comparison, "text")


def test_several_roots_of_an_estimate_are_named_as_a_trace_names_them() -> None:
    one = estimate(trace_analysis())
    two = replace(one, groups=[*one.groups, replace(one.groups[0], root=1)])
    names = {
        row.fqn for row in compare(side("a", trace_analysis()), side("b", communication=two)).communication
    }
    assert {"root0:layers.0", "root1:layers.0", "root0:"} <= names


def test_shared_ranks_meet_and_the_largest_growth_is_shown() -> None:
    before = {0: peak(a=10), 1: peak(a=10), 2: peak(a=90)}
    after = {0: peak(a=10), 1: peak(a=10, b=5), 7: peak(a=99)}
    comparison = compare(side("a", peaks=before), side("b", peaks=after))
    assert [(row.after_rank, row.delta_allocated_bytes) for row in comparison.peaks] == [(1, 5), (0, 0)]
    assert comparison.peaks[0].delta_reserved_bytes == 10
    assert comparison.memory is not None
    assert comparison.memory.delta_bytes == 5
    assert [(row.fqn, row.delta_bytes) for row in comparison.memory.by_layer] == [("b", 5), ("a", 0)]


def test_the_fullest_ranks_meet_where_none_is_shared() -> None:
    comparison = compare(
        side("a", peaks={0: peak(a=1), 1: peak(a=9)}), side("b", peaks={5: peak(a=12), 6: peak(a=12)})
    )
    [row] = comparison.peaks
    assert (row.before_rank, row.after_rank, row.delta_allocated_bytes) == (1, 5, 3)


def test_nothing_in_common_is_refused() -> None:
    with pytest.raises(InputError, match="a has a trace, b has memory: nothing to compare"):
        compare(side("a", trace_analysis()), side("b", peaks={0: peak(a=1)}))


def test_worlds_and_devices_that_differ_are_told() -> None:
    on_gpu = replace(trace_analysis(), ranks=[replace(r, device_type="cuda") for r in trace_analysis().ranks])
    comparison = compare(side("a", trace_analysis(), world_size=2), side("b", on_gpu, world_size=4))
    assert comparison.warnings == [
        "2 ranks before, 4 after: times and bytes are means per rank",
        "cpu before, cuda after: their times cannot be compared",
    ]


def test_settings_that_differ_are_listed() -> None:
    before = run_summary()
    first, *others = before.shard_groups
    after = replace(
        before,
        versions={**before.versions, "torch": "9.9"},
        shard_groups=[replace(first, reshard_after_forward=not first.reshard_after_forward), *others],
    )
    found = compare(
        side("a", peaks={0: peak(a=1)}, run=before), side("b", peaks={0: peak(a=1)}, run=after)
    ).settings
    assert SettingChange(name="versions.torch", before=before.versions["torch"], after="9.9") in found
    [sharding] = [change for change in found if change.name.startswith("sharding of ")]
    assert sharding.before != sharding.after
    assert len(found) == 2


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("step_time_frac", 0.03),
        ("step_time_delta_ms", 1.5),
        ("exposed_time_frac", -1 / 10),
        ("exposed_time_delta_ms", -1.0),
        ("wire_bytes_frac", -1 / 5),
        ("unequal_collectives", 1.0),
        ("peak_allocated_frac", 0.25),
        ("peak_reserved_frac", 0.25),
    ],
)
def test_conditions_on_changes(metric: str, value: float) -> None:
    before = side("a", trace_analysis(), peaks={0: peak(a=100), 1: peak(a=100)})
    after = side("b", slower(trace_analysis(blocks=3), 1, 4, 6 * MS), peaks={0: peak(a=90), 1: peak(a=125)})
    comparison = compare(before, after)
    [failure] = check([parse(f"{metric}>={value - 1e-9}")], comparison)
    assert failure.value == pytest.approx(value)
    assert failure.rank == (1 if metric.startswith("peak") else None)
    assert check([parse(f"{metric}>{value + 1e-9}")], comparison) == []


def test_conditions_that_cannot_be_tested() -> None:
    comparison = compare(side("a", peaks={0: peak(a=1)}), side("b", peaks={0: peak(a=2)}))
    for metric in ("step_time_frac", "exposed_time_delta_ms", "wire_bytes_frac", "unequal_collectives"):
        with pytest.raises(InputError, match="undefined here"):
            check([parse(f"{metric}>0")], comparison)
    with pytest.raises(UsageError, match="needs a trace analysis"):
        check([parse("exposed_frac>0")], comparison)
    with pytest.raises(UsageError, match="needs `fsdp2prof compare`"):
        check([parse("step_time_frac>0")], trace_analysis())


def test_csv_holds_every_change_in_raw_units() -> None:
    rows = list(csv.DictReader(io.StringIO(rendered(run_comparison(), "csv"))))
    [step] = [row for row in rows if (row["table"], row["fqn"]) == ("step", "step")]
    assert (step["before"], step["after"], step["delta"]) == ("50000000", "50000000", "0")
    gone = {row["measure"]: row for row in rows if row["fqn"] == "layers.3"}
    assert (gone["wire_bytes"]["before"], gone["wire_bytes"]["after"]) == (str(4 * MIB), "")
    assert gone["wire_bytes"]["delta"] == str(-4 * MIB)
    assert {row["table"] for row in rows} == {
        "settings",
        "step",
        "communication",
        "peak",
        "memory_category",
        "memory_layer",
    }


def test_untrusted_names_are_inert_in_text() -> None:
    comparison = compare(side("a", trace_analysis(hostile=HOSTILE)), side("b", trace_analysis(blocks=3)))
    text = rendered(comparison, "text", verbose=True)
    assert "\x1b" not in text
    assert "\\x1b[31m" in text


def test_repeated_layers_that_differ_alike_are_one_row() -> None:
    comparison = compare(side("a", trace_analysis(blocks=9)), side("b", trace_analysis(blocks=2)))
    [folded] = [row for row in comparison.communication_folded if row.fqn == "layers.2-8"]
    assert (folded.layers, folded.delta.count, folded.delta.wire_bytes) == (7, -7, -7 * 4 * MIB)
    assert "layers.2-8" in rendered(comparison, "text")


@pytest.mark.parametrize(
    ("analysis", "has_trace", "peaks"),
    [(trace_analysis(), True, 0), (memory_analysis(), False, 2), (run_analysis(), True, 2)],
)
def test_an_analysis_kept_as_json_is_a_side(tmp_path, analysis, has_trace, peaks) -> None:
    kept = tmp_path / "baseline.json"
    kept.write_text(as_json(analysis))
    comparison = compare(read_side(kept), read_side(kept))
    assert comparison.communication_equal is (True if has_trace else None)
    assert (comparison.step is not None) == has_trace
    assert [row.delta_allocated_bytes for row in comparison.peaks] == [0] * peaks
    assert comparison.settings == []


def test_a_memory_analysis_kept_before_it_said_more_is_a_side(tmp_path) -> None:
    """Keys are only added: a document without the later ones reads as what it says."""
    document = json.loads(as_json(memory_analysis()))
    for key in ("verdict", "advice", "key_figures"):
        del document[key]
    for rank in document["ranks"]:
        rank["fragmentation"] = {}
        for key in ("remedies", "device_total_bytes"):
            del rank[key]
        for key in ("by_category", "layers", "layers_folded"):
            del rank["peak"][key]
    kept, now = tmp_path / "kept.json", tmp_path / "now.json"
    kept.write_text(json.dumps(document))
    now.write_text(as_json(memory_analysis()))
    comparison = compare(read_side(kept), read_side(now))
    assert comparison.memory is not None
    assert (comparison.memory.delta_bytes, len(comparison.memory.by_category)) == (0, 4)


def test_ranks_and_steps_are_chosen_in_a_kept_analysis_too(tmp_path) -> None:
    kept = tmp_path / "baseline.json"
    kept.write_text(as_json(run_analysis()))
    read = read_side(kept, ranks={1}, steps={4})
    assert read.trace is not None
    assert [(rank.rank, [one.step for one in rank.steps]) for rank in read.trace.ranks] == [(1, [4])]
    assert {(row.rank, row.step) for row in read.trace.groups} == {(1, 4)}
    assert list(read.peaks) == [1]
    assert cut(memory_analysis(), kept, {1}, None).verdict[0] == "Rank 1 peaks at 100.0 MiB."
    kept.write_text(as_json(memory_analysis()))
    with pytest.raises(InputError, match="rank 9 is not here; it has rank"):
        read_side(kept, ranks={9})


def test_a_baseline_from_before_the_summaries_is_summed_up_as_it_is_read(tmp_path) -> None:
    document = json.loads(as_json(trace_analysis()))
    for key in ("verdict", "totals", "by_rank", "by_layer", "by_layer_folded", "layers", "advice", "late"):
        del document[key]
    kept = tmp_path / "old.json"
    kept.write_text(json.dumps(document))
    assert read_side(kept).trace == trace_analysis()
    only = read_side(kept, ranks={1}, steps={4}).trace
    assert only is not None
    assert (only.totals.windows, [row.exposed_ns / MS for row in only.by_layer]) == (1, [4, 3, 1, 1, 1])


def test_the_step_without_recording_is_the_median_of_all_ranks_plain_steps() -> None:
    def run(*durations: int) -> RunSummary:
        plain = [StepTime(step=i, duration_ns=ns, kind="plain") for i, ns in enumerate(durations)]
        traced = StepTime(step=99, duration_ns=10**9, kind="traced")
        ranks = [replace(rank, steps=[*plain, traced]) for rank in run_summary().ranks]
        return replace(run_summary(), ranks=ranks)

    comparison = compare(side("a", run=run(900, 100, 120)), side("b", run=run(950, 150, 140)))
    change = comparison.unrecorded_step
    assert change is not None
    assert (change.before_ns, change.after_ns) == (110, 145), "the first step pays for initialisation"
    for metric in ("unrecorded_step_frac", "step_time_frac"):
        [failure] = check([parse(f"{metric}>0.3")], comparison)
        assert failure.value == pytest.approx(35 / 110)
    [failure] = check([parse("step_time_delta_ms>0")], comparison)
    assert failure.value == pytest.approx(35e-6)
    assert compare(side("a", trace_analysis()), side("b", trace_analysis())).unrecorded_step is None


def test_an_estimate_kept_as_json_is_a_side(tmp_path) -> None:
    kept = tmp_path / "estimate.json"
    kept.write_text(as_json(estimate(trace_analysis())))
    read = read_side(kept)
    assert (read.kind, read.world_size) == ("estimate", 2)
    assert read.communication == estimate(trace_analysis())


def test_a_predicted_step_kept_as_json_stands_above_a_recorded_one(tmp_path) -> None:
    made = sample("step_estimate")
    kept = tmp_path / "estimate.json"
    kept.write_text(as_json(made))
    read = read_side(kept)
    assert (read.kind, read.world_size) == ("estimate", made.mesh.world_size)
    recorded = side("b", replace(made.trace, ranks=[replace(made.trace.ranks[0], rank=1)]))
    comparison = compare(read, recorded)
    assert times(comparison)["step"] == (made.step_ns, made.step_ns, 0)
    document = build(comparison)
    detail = document.charts()["timeline"].zoomed()
    assert detail is not None
    assert [one["name"] for one in detail["sides"]] == ["predicted", "recorded"]
    stage = replace(made, bubble_ns=3 * MS)
    kept.write_text(as_json(stage))
    assert any("3.00 ms of waiting for the others" in line for line in read_side(kept).warnings)


def test_documents_that_cannot_be_compared(tmp_path, capfd) -> None:
    kept = tmp_path / "old.json"
    kept.write_text(as_json(run_comparison()))
    call(capfd, "compare", kept, kept).refused("a document of fsdp2prof.compare/1 cannot be compared")
    kept.write_text('{"schema": "fsdp2prof.trace/1", "ranks": 3}')
    call(capfd, "compare", kept, kept).refused("not a fsdp2prof.trace/1 document", "write it again")
    call(capfd, "compare", tmp_path / "nowhere", kept).refused("nowhere")
    call(capfd, "compare", kept, kept, "--fail-on", "step_time>1").refused("no metric 'step_time'", code=2)


def test_the_command_gates(tmp_path, capfd) -> None:
    for name, analysis in (("a", trace_analysis()), ("b", slower(trace_analysis(), 1, 4, 6 * MS))):
        (tmp_path / f"{name}.json").write_text(as_json(analysis))
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    passed = call(capfd, "compare", a, b, "--fail-on", "step_time_frac>0.05", "--format", "json")
    assert passed.code == 0
    assert passed.err.splitlines() == [
        "passed: 1 condition tested, none holds",
        "  step_time_frac>0.05: step_time_frac is 0.03",
    ]
    assert present(msgspec.json.decode(passed.out, type=RunComparison).step).delta_ns == 1_500_000
    failed = call(capfd, "compare", a, b, "--fail-on", "step_time_frac>0.01", "-o", tmp_path / "out.csv")
    assert failed.code == 3
    assert failed.err == "error: step_time_frac>0.01: step_time_frac is 0.03\n"
    assert (tmp_path / "out.csv").read_text().startswith("table,fqn,phase,op,measure,before,after,delta\n")
