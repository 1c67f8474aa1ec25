"""Text for people: the numbers are right, it fits, and hostile names do nothing."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest import mock

from support.results import (
    HOSTILE,
    MIB,
    fragmentation,
    memory_analysis,
    memory_comparison,
    out_of_memory,
    run_analysis,
    trace_analysis,
)

from fsdp2prof.reporters.advice import memory_advice, trace_advice
from fsdp2prof.reporters.comparison_grids import comparison_grids
from fsdp2prof.reporters.terminal import PLAIN_WIDTH, memory_view, render, run_view, trace_view
from fsdp2prof.reporters.trace_grids import step_rows
from fsdp2prof.results import AtPeak


def plain(view: object) -> str:
    return render(view, to_terminal=False)  # type: ignore[arg-type]


def row_of(text: str, start: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.strip().startswith(start))


def test_breakdown_shows_means_and_percentages() -> None:
    """50 ms: 30 compute, 2 copies, 7 all-gather, 3 reduce-scatter, 8 idle."""
    text = plain(trace_view(trace_analysis()))
    assert row_of(text, "mean") == ["mean", "50.00", "30.00", "2.00", "7.00", "3.00", "8.00"]
    assert row_of(text, "%") == ["%", "100.0", "60.0", "4.0", "14.0", "6.0", "16.0"]
    assert "memcpy " not in text.splitlines()[3]  # a part that is zero everywhere has no column


def test_layer_row_shows_every_number() -> None:
    cells = row_of(plain(trace_view(trace_analysis())), "layers.1-3")
    assert " ".join(cells) == "layers.1-3 forward all-gather bf16 3 24.00 12.00 12.00 3.00 3.00 75.0% 1.05"


def test_many_windows_become_means_and_many_ranks_three_rows() -> None:
    analysis = trace_analysis()
    ranks = [replace(analysis.ranks[0], rank=rank) for rank in range(8)]
    assert [(row.rank, row.step) for row in step_rows(replace(analysis, ranks=ranks))] == [
        (rank, "mean") for rank in range(8)
    ]
    slow = replace(analysis.ranks[0].steps[0].breakdown_ns, idle=10**9)
    ranks = [replace(analysis.ranks[0], rank=rank) for rank in range(64)]
    ranks[17] = replace(ranks[17], steps=[replace(ranks[17].steps[0], breakdown_ns=slow)])
    rows = step_rows(replace(analysis, ranks=ranks))
    assert [row.step for row in rows] == ["fastest", "median", "slowest"]
    assert rows[-1].rank == 17


def test_memory_categories_and_layers_sum_to_the_peak() -> None:
    text = plain(memory_view(memory_analysis()))
    assert row_of(text, "allocated") == ["allocated", "100.0", "MiB", "100.0"]
    matrix = text[text.index("The same by layer") :]
    assert row_of(matrix, "all ") == ["all", "100.00", "40.00", "30.00", "10.00", "20.00"]
    assert row_of(matrix, "layers.0") == ["layers.0", "83.00", "25.00", "30.00", "10.00", "18.00"]


def test_everything_fits_its_width() -> None:
    for hostile in (None, "a_very_long_module_name." * 12, HOSTILE):
        text = plain(run_view(run_analysis(hostile=hostile)))
        assert max(len(line) for line in text.splitlines()) <= PLAIN_WIDTH


def test_hostile_names_stay_text() -> None:
    text = plain(run_view(run_analysis(hostile=HOSTILE)))
    assert "\x1b" not in text
    assert "[bold red]" in text.replace("\n", "")
    coloured = render(trace_view(trace_analysis(hostile=HOSTILE)), to_terminal=True)
    assert "\x1b[31m:" not in coloured
    assert "\\x1b[31m" in coloured


def test_colour_only_on_a_terminal_that_wants_it() -> None:
    view = trace_view(trace_analysis())
    with mock.patch.dict(os.environ, {"TERM": "xterm-256color"}, clear=False):
        os.environ.pop("NO_COLOR", None)
        assert "\x1b[" in render(view, to_terminal=True)
        with mock.patch.dict(os.environ, {"NO_COLOR": "1"}):
            assert "\x1b[3" not in render(view, to_terminal=True)


def test_advice_leads_to_the_largest_loss_first() -> None:
    lines = trace_advice(trace_analysis(blocks=8))
    assert lines[0].startswith("22.0% of the step is exposed all-gather (11.0 ms)")
    assert "layers.0 in forward, 4.00 ms of 4.00 ms exposed" in lines[0]
    assert "sharded parameters (40.0 MiB, 40.0%)" in memory_advice(memory_analysis())[0]


def test_nothing_to_show_is_said() -> None:
    empty = replace(trace_analysis(), groups=[])
    assert "No collective ran" in plain(trace_view(empty))
    assert plain(trace_view(replace(empty, ranks=[])))


def test_a_flat_or_unknown_course_is_left_out() -> None:
    analysis = memory_analysis()
    ranks = [replace(rank, timeline={}) for rank in analysis.ranks]
    assert "over time" not in plain(memory_view(replace(analysis, ranks=ranks)))
    rank = replace(analysis.ranks[0], peak=replace(analysis.ranks[0].peak, by_layer=[], categories={}))
    assert "The same by layer" not in plain(memory_view(replace(analysis, ranks=[rank])))
    assert analysis.ranks[0].peak.allocated_bytes == 100 * MIB


def test_out_of_memory_comes_first_with_what_would_help() -> None:
    analysis = memory_analysis()
    rank = replace(analysis.ranks[0], oom=out_of_memory(), fragmentation=fragmentation())
    text = plain(memory_view(replace(analysis, ranks=[rank])))
    assert "A request for 6.00 MiB failed in forward of (root), by aten::empty at me/train.py:7:loss." in text
    assert "At that moment: allocated 100.0 MiB, free on the device 4.00 MiB, missing 2.00 MiB." in text
    assert row_of(text, "smaller batch") == ["smaller", "batch", "1.00", "MiB", "unknown", "halve", "it"]
    assert row_of(text, "chunked loss") == ["chunked", "loss", "5.00", "MiB", "yes", "in", "chunks"]
    sizes = " ".join(row_of(text, "large "))
    assert sizes == "large 0 3 120.0 MiB 100.0 MiB 0 B 20.0 MiB 0 B 0 B"
    assert text.index("Out of memory") < text.index("What fills rank")


def test_two_recordings_compared() -> None:
    """Places that read alike are one row: 3 + 5 MiB of aten::mm became 6 + 14."""
    grids = {grid.title: grid for grid in comparison_grids(memory_comparison())}
    assert grids["Change by kind"].rows == [
        ["activations", "8.00 MiB", "20.0 MiB", "+12.0 MiB"],
        ["temporaries", "2.00 MiB", "0 B", "-2.00 MiB"],
    ]
    assert grids["Change by place"].rows == [
        ["aten::mm", "8.00 MiB", "20.0 MiB", "+12.0 MiB"],
        ["aten::empty", "82.0 MiB", "80.0 MiB", "-2.00 MiB"],
    ]
    for grid in grids.values():
        assert grid.totals == [["all", "90.0 MiB", "100.0 MiB", "+10.0 MiB"]]


def test_what_ran_at_the_peak_is_told_from_the_trace() -> None:
    analysis = memory_analysis()
    seen = AtPeak(match="place", step=3, operator="aten::mm", launched=None, running=["all_gather layers.1"])
    text = plain(memory_view(replace(analysis, ranks=[replace(analysis.ranks[0], at_peak=seen)])))
    assert (
        "At that place of the traced step 3: the host was in aten::mm; in flight: all_gather layers.1."
        in text
    )
