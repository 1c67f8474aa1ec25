"""The document of a trace analysis: its numbers are the result's, and it shows them all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from support.large_run import timeline
from support.numbers import unexplained
from support.rendered import csv_of, json_of, row_of, table_of, text_of
from support.results import HOSTILE, MIB, MS, trace_analysis
from synthetic import Schedule, record, transformer, write_run

from fsdp2prof.analyzers.ledger.replayed import that_fit, with_replays
from fsdp2prof.analyzers.trace.summary import of_part
from fsdp2prof.reporters.document import Chart, Findings, Sentences, Table
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.documents.timeline import timeline_section
from fsdp2prof.reporters.documents.trace import step_title
from fsdp2prof.reporters.documents.what_if import what_if_section
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.results.communication import BandwidthRow, Straggler
from fsdp2prof.results.ledger import LedgerRemedy
from fsdp2prof.results.step import Throughput, TimelineStall
from fsdp2prof.results.trace import HostSyncRow
from fsdp2prof.results.what_if import WhatIfChange
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.job.job_files import open_job

RAW = frozenset({"groups", "prefetch", "host_syncs"})
"""Rows of every rank and step: what is made of them stands beside them."""


def test_breakdown_shows_means_and_percentages() -> None:
    """50 ms: 30 compute, 2 copies, 7 all-gather, 3 reduce-scatter, 8 idle."""
    text = text_of(trace_analysis())
    assert row_of(text, "mean") == ["mean", "50.00", "30.00", "2.00", "7.00", "3.00", "8.00"]
    assert row_of(text, "%") == ["%", "100.0", "60.0", "4.0", "14.0", "6.0", "16.0"]
    assert "memcpy  " not in text  # a part that is zero everywhere has no column


def test_idle_time_and_speed_are_explained_under_the_breakdown() -> None:
    analysis = trace_analysis()
    speed = Throughput(
        step_ns=50 * MS, tokens_per_s=80_000.0, flops_per_s=2.5e14, mfu=0.25, measured_on="unrecorded"
    )
    ranks = [
        replace(
            rank,
            throughput=speed,
            steps=[replace(step, idle_ns={"host_bound": 6 * MS, "queued": 2 * MS}) for step in rank.steps],
        )
        for rank in analysis.ranks
    ]
    table = table_of(build(of_part(replace(analysis, ranks=ranks))), "breakdown")
    assert list(table.remarks) == [
        "Idle: 6.00 ms nothing launched in time; 2.00 ms launch latency.",
        "Speed in unrecorded steps: 80,000 tokens/s over all ranks, 250.00 TFLOP/s a rank, MFU 25.0%.",
    ]


def test_layer_row_shows_every_number() -> None:
    cells = row_of(text_of(trace_analysis()), "layers.1-3")
    assert " ".join(cells) == "layers.1-3 forward all-gather 3.00 12.00 75.0% 3.00 3 24.00 12.00 1.05 bf16"


def test_verbose_unfolds_the_layers() -> None:
    assert "layers.2 " not in text_of(trace_analysis())
    assert row_of(text_of(trace_analysis(), verbose=True), "layers.2")[3] == "1.00"


def test_several_groups_have_a_column() -> None:
    analysis = trace_analysis()
    groups = [replace(row, mesh_dim=f"dp{i % 2}") for i, row in enumerate(analysis.groups)]
    table = table_of(build(of_part(replace(analysis, groups=groups))), "by_layer")
    assert table.columns[-1].name == "group"
    assert table_of(build(analysis), "by_layer").columns[-1].name == "dtype"


ALL_GATHER = BandwidthRow(
    op="all_gather",
    process_group="7",
    mesh_dim=None,
    group_size=8,
    dtype="bfloat16",
    payload_bytes=MIB,
    count=10,
    algbw_bytes_per_s=20e9,
    busbw_bytes_per_s=17.5e9,
    best_busbw_bytes_per_s=18e9,
    of_best_frac=0.5,
)


def test_bandwidth_has_a_column_for_the_peak_only_where_it_is_known() -> None:
    row = ALL_GATHER
    analysis = replace(trace_analysis(), bandwidth=[row])
    cells = row_of(text_of(analysis).split("of the best")[1], "all-gather")
    assert " ".join(cells) == "all-gather 1.00 MiB 10 20.00 17.50 50.0% bf16 8 7"
    alone = text_of(replace(analysis, bandwidth=[replace(row, waits_known=False)]))
    assert "where other ranks' traces are missing" in " ".join(alone.split())
    assert "traces are missing" not in text_of(replace(analysis, bandwidth=[row]))
    with_peak = text_of(replace(analysis, bandwidth=[replace(row, of_peak_frac=0.04)]))
    assert "4.0%" in row_of(with_peak.split("of the peak")[1], "all-gather")


def test_groups_of_one_mesh_dimension_are_told_apart_by_their_ranks() -> None:
    """HSDP has a shard group per replica, and all of them the same name."""
    row = replace(ALL_GATHER, mesh_dim="shard", group_size=2, ranks=[0, 1])
    analysis = replace(trace_analysis(), bandwidth=[row, replace(row, process_group="8", ranks=[2, 3, 5])])
    both = table_of(build(analysis), "bandwidth")
    assert [cells[-1] for cells in both.rows] == ["shard, ranks 0-1", "shard, ranks 2-3,5"]
    alone = table_of(build(replace(analysis, bandwidth=[row])), "bandwidth")
    assert [cells[-1] for cells in alone.rows] == ["shard"]


def test_the_title_of_the_step_names_exposed_communication_as_one_part() -> None:
    """Two kinds of 20% are more than 30% of idle time, and say so; host copies are no communication."""
    totals = replace(
        trace_analysis().totals,
        exposed_frac=0.4,
        breakdown_frac={
            "exposed_all_gather": 0.2,
            "exposed_reduce_scatter": 0.2,
            "exposed_memcpy": 0.05,
            "idle": 0.3,
            "compute": 0.25,
        },
    )
    title = step_title(replace(trace_analysis(), totals=totals))
    assert title == "By activity, a step is 40.0% collectives alone, 30.0% idle, 25.0% compute"


def test_host_synchronisations_are_a_table() -> None:
    calls = HostSyncRow(rank=0, fqn=None, phase="other", call="cudaStreamSynchronize", operator="aten::item",
                        count=8, blocked_ns=8 * MS)  # fmt: skip
    text = text_of(of_part(replace(trace_analysis(), host_syncs=[calls])))
    assert row_of(text.split("The host waited for the device")[1], "(no layer)")[2:] == [
        "other", "cudaStreamSynchronize", "2.00", "ms", "2", "aten::item",
    ]  # fmt: skip


def test_ranks_are_told_apart_by_waiting_and_reason() -> None:
    analysis = trace_analysis()
    reason = Straggler(rank=1, fqn=None, wait_caused_ns=3 * MS, cause="its host paused", collectives=2)
    cross = replace(
        analysis.cross_rank, wait_ns={"0": 3 * MS, "1": 0}, wait_caused_ns={"1": 3 * MS}, stragglers=[reason]
    )
    text = text_of(of_part(replace(analysis, cross_rank=cross)))
    assert row_of(text.split("Waiting for each other")[1], "1 ") == ["1", "3.00", "ms", "0", "ns"]
    assert "3.00 ms  2  its host paused" in text


def test_nothing_to_show_is_said() -> None:
    analysis = trace_analysis()
    assert "No collective ran" in text_of(of_part(replace(analysis, groups=[])))
    stepless = of_part(replace(analysis, ranks=[replace(rank, steps=[]) for rank in analysis.ranks]))
    assert "These traces contain no step" in text_of(stepless)
    assert "Where the step goes" not in text_of(stepless)
    assert text_of(of_part(replace(analysis, ranks=[], groups=[], findings=[], warnings=[])))


def test_limits_of_a_recording_are_notes_unless_the_verdict_has_them() -> None:
    analysis = trace_analysis()
    noted = build(replace(analysis, advice=["said", "unsaid"], verdict=["said"])).sections[0].blocks
    assert [type(block) for block in noted] == [Findings, Sentences]
    assert isinstance(noted[1], Sentences)
    assert noted[1].lines == ["unsaid"]
    assert [type(block) for block in build(analysis).sections[0].blocks] == [Findings]


def test_data_formats_have_every_step_and_group() -> None:
    tables = build(trace_analysis()).tables()
    assert list(tables)[:2] == ["groups", "steps"]
    assert len(tables["groups"].rows) == 20
    assert [len(tables["steps"].rows), tables["steps"].columns[4].name] == [4, "compute_ns"]
    assert [column.name for column in tables["by_layer"].columns][3] == "exposed_ns"
    assert len(tables["by_layer"].rows) == 5, "not folded"


def test_parts_sum_to_their_window_in_csv() -> None:
    found = csv_of(trace_analysis(), "steps")
    assert [row["step"] for row in found] == ["3", "4", "3", "4"]
    for row in found:
        parts = [int(v) for k, v in row.items() if k.endswith("_ns") and k not in ("start_ns", "duration_ns")]
        assert len(parts) == 8
        assert sum(parts) == int(row["duration_ns"])


def test_unknown_is_empty_and_formulas_are_text_in_csv() -> None:
    first = trace_analysis().groups[0]
    groups = [replace(first, fqn="=HYPERLINK(1)", payload_bytes=None)]
    (row,) = csv_of(replace(trace_analysis(), groups=groups))
    assert (row["fqn"], row["payload_bytes"]) == ("'=HYPERLINK(1)", "")


@pytest.mark.parametrize("hostile", [None, "a_very_long_module_name." * 12, HOSTILE])
@pytest.mark.parametrize("width", [80, 118])
def test_it_fits_its_width_and_names_stay_text(hostile: str | None, width: int) -> None:
    text = text_of(trace_analysis(hostile=hostile), width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text


def test_every_number_of_the_text_stands_in_the_json(tmp_path: Path) -> None:
    """A run of three ranks of a transformer whose last rank is slow, folded, unfolded and with thresholds."""
    schedule = Schedule(roots=(transformer(6, all_gather_ns=900_011, host_ns=7_000),))
    run = write_run(record(schedule, schedule, schedule.scaled(1.7, "layers.2")), tmp_path / "run")
    analysis = analyze_trace(open_job(run), workers=1)
    assert analysis.findings
    assert analysis.late_folded
    assert analysis.cross_rank.stragglers
    for verbose in (False, True):
        text = text_of(analysis, verbose=verbose).split("fsdp2prof report")[0]
        left_out = {"and", "more"}
        shown = [line for line in text.splitlines() if not left_out <= set(line.split())]
        assert unexplained("\n".join(shown), json_of(analysis), without=RAW) == []


def test_a_number_that_the_json_lacks_is_noticed() -> None:
    """The check above is one that can fail: a sum that nobody put into the result is found."""
    document = {"parts_ns": [1_230_000, 4_560_000]}
    assert unexplained("1.23 ms and 4.56 ms", document) == []
    assert unexplained("1.23 ms and 4.56 ms: 5.79 ms", document) == ["5.79"]


def test_the_changes_worth_most_open_the_page_with_gain_and_cost() -> None:
    def change(name: str, gained: float | None, memory: int | None = None) -> WhatIfChange:
        frac = None if gained is None else gained / (50 * MS)
        step = None if gained is None else 50 * MS - gained
        return WhatIfChange(
            change=name, what=f"with {name}", step_ns=step, gained_ns=gained, gained_frac=frac,
            memory_bytes=memory, reason=None if gained is not None else "no",
            other_hardware=name.startswith("bandwidth"),
        )  # fmt: skip

    offered = [
        change("bandwidth=2x", 9 * MS),
        change("reshard=never", 5 * MS, 3 * MIB),
        change("forward_prefetch=2", 4 * MS, 0),
        change("reduce_dtype=bfloat16", 2 * MS, -MIB),
        change("without host_syncs", 0.4 * MS),
        change("reshard=always", -3 * MS, -MIB),
        change("backward_prefetch=2", None),
    ]
    on_gpus = trace_analysis()
    on_gpus = replace(on_gpus, ranks=[replace(rank, device_type="cuda") for rank in on_gpus.ranks])
    analysis = with_replays(on_gpus, offered)
    document = build(analysis)
    assert document.changes == [
        "With reshard=never (`reshard=never`): saves 5.00 ms per step (10.0%) and needs at most 3.00 MiB "
        "more memory.",
        "With forward_prefetch=2 (`forward_prefetch=2`): saves 4.00 ms per step (8.0%).",
    ], "other results (reduce_dtype) and other hardware are not proposed"
    brief = RENDERERS["text"].render(document, RenderOptions(brief=True, width=100))
    assert "With reshard=never (`reshard=never`): saves 5.00 ms" in brief, "the terminal names them too"
    assert [row.change for row in analysis.what_if if row.told] == ["reshard=never", "forward_prefetch=2"]
    assert not build(with_replays(trace_analysis(), offered)).changes, "not of a CPU's collectives"
    few = with_replays(on_gpus, [change("forward_prefetch=2", 1.4 * MS)])
    assert not build(few).changes, "a gain that is too small for a finding is not proposed"
    full = that_fit(analysis, 2 * MIB)
    assert [row.change for row in full.what_if if row.told] == ["forward_prefetch=2"], "the rest does not fit"


def test_the_timeline_opens_with_the_rank_that_others_wait_for() -> None:
    """Whether or not a change is proposed."""
    analysis = trace_analysis()
    assert analysis.ledger is not None
    late = replace(analysis.ledger.entries[0], cause="late_rank", rank=1, told=False)
    analysis = replace(
        analysis, ledger=replace(analysis.ledger, entries=[late]), timeline=timeline(Random(0), 2)
    )
    section = next(one for one in build(analysis).sections if one.anchor == "timeline")
    (chart,) = [block for block in section.blocks if isinstance(block, Chart)]
    detail = chart.zoomed()
    assert detail is not None
    assert detail["first"] == [1]


def tried(change: str, gained_ns: float, *, other_hardware: bool = False) -> WhatIfChange:
    return WhatIfChange(
        change=change,
        what=change,
        step_ns=1e9 - gained_ns,
        gained_ns=gained_ns,
        gained_frac=gained_ns / 1e9,
        memory_bytes=0,
        reason=None,
        other_hardware=other_hardware,
    )


def test_settings_that_gain_come_before_faster_hardware_and_the_rest() -> None:
    rows = [
        tried("compute=1.2x", 2e8, other_hardware=True),
        tried("reshard=never", 1e8),
        tried("forward_prefetch=1", 0.0),
        tried("reshard=always", -1e7),
    ]
    table, hardware, without, *_ = what_if_section(rows)[0].blocks
    assert isinstance(table, Table)
    assert table.unabridged is not None
    assert [row[0] for row in table.rows] == ["reshard=never"]
    assert [row[0] for row in table.unabridged.rows] == [row.change for row in rows]
    assert isinstance(hardware, Sentences)
    assert hardware.lines == ["compute=1.2x: saves 200.0 ms per step (20.0%)"]
    assert isinstance(without, Sentences)
    assert without.lines == ["forward_prefetch=1, reshard=always"]


def test_a_wait_is_listed_once_on_the_rank_that_waits_longest() -> None:
    made = timeline(Random(0), 2)
    first = made.ranks[0]
    stall = TimelineStall(
        fqn="layers.0",
        phase="forward",
        lane="all_gather",
        start_ns=0,
        end_ns=50,
        needed_ns=10,
        stall_ns=40,
        cause="launch",
    )
    ranks = [
        replace(first, rank=0, stalls=[stall]),
        replace(first, rank=1, stalls=[replace(stall, stall_ns=60), replace(stall, fqn="layers.1")]),
    ]
    (section,) = timeline_section(replace(made, ranks=ranks))
    table = section.blocks[-1]
    assert isinstance(table, Table)
    assert table.unabridged is not None
    at = [column.name for column in table.columns]
    shown = [(row[at.index("fqn")], row[at.index("rank")], row[at.index("stall_ns")]) for row in table.rows]
    assert shown == [("layers.0", 1, 60), ("layers.1", 1, 40)]
    assert len(table.unabridged.rows) == 3


@pytest.mark.parametrize(("cause", "waits"), [("host", False), ("late_rank", True)])
def test_a_timeline_is_titled_by_the_loss_that_the_verdict_begins_with(cause: str, waits: bool) -> None:
    """Only a late rank is a wait for a collective; a host that launches too slowly is none."""
    base = trace_analysis()
    assert base.ledger is not None
    loss = replace(base.ledger.entries[0], cause=cause, title="too slow a launch", ns=12.0 * MS, frac=0.24)
    made = timeline(Random(0), 1)
    stall = TimelineStall(
        fqn="layers.0", phase="forward", lane="all_gather", start_ns=0, end_ns=50, needed_ns=10, stall_ns=40,
        cause="launch",
    )  # fmt: skip
    made = replace(made, ranks=[replace(made.ranks[0], stalls=[stall])])
    (section,) = timeline_section(made, loss=loss)
    chart = section.blocks[0]
    assert isinstance(chart, Chart)
    longest = "he longest wait is for layers.0"
    assert chart.title.startswith(f"T{longest}" if waits else "Too slow a launch: 12.0 ms (24.0%)")
    assert (f"; t{longest}" in chart.note) is not waits


def test_a_change_gains_what_its_cause_is_charged_and_is_not_said_twice() -> None:
    """A replay that removes 9 ms, 4 of which are charged to the cause it removes."""
    base = trace_analysis()
    assert base.ledger is not None
    remedy = LedgerRemedy(
        change="Load in workers.", gain_ns=4.0 * MS, gain_frac=0.08, basis="replay", reason="",
        what_if="without data_loader",
    )  # fmt: skip
    entry = replace(base.ledger.entries[0], told=True, remedy=remedy, ns=4.0 * MS)
    replayed = WhatIfChange(
        change="without data_loader", what="no waiting", step_ns=41 * MS, gained_ns=9 * MS, gained_frac=0.18,
        memory_bytes=None, reason=None, told=True,
    )  # fmt: skip
    other = replace(replayed, change="reshard=never", what="never", gained_ns=5 * MS, gained_frac=0.1)
    ledger = replace(base.ledger, entries=[entry])
    both = build(replace(base, ledger=ledger, what_if=[replayed, other]))
    assert both.changes == [
        "Never (`reshard=never`): saves 5.00 ms per step (10.0%).",
        "No waiting (`without data_loader`): saves 4.00 ms per step (8.0%).",
    ]
    assert not build(replace(base, ledger=ledger, what_if=[replayed])).changes, "the verdict says it"
