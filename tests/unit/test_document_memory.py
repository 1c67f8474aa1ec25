"""The documents of a memory analysis and of two recordings: the result's numbers, all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.numbers import unexplained
from support.rendered import csv_of, json_of, row_of, table_of, text_of
from support.results import (
    HOSTILE,
    MIB,
    fragmentation,
    memory_analysis,
    memory_comparison,
    out_of_memory,
)

from fsdp2prof.analyzers.memory.analysis import analyze_memory
from fsdp2prof.analyzers.memory.peak import category_shares, fold_layers, layer_rows
from fsdp2prof.analyzers.memory.wording import memory_advice, memory_verdict
from fsdp2prof.readers.memory.recording import read_memory
from fsdp2prof.reporters.document import Facts, Findings
from fsdp2prof.reporters.documents import build
from fsdp2prof.results.finding import Finding
from fsdp2prof.results.memory import AtPeak, MemoryAnalysis, RankMemory
from fsdp2prof.results.peak import LayerBytes, OtherPeak, Remedy
from fsdp2prof.vocabulary import CATEGORIES, Word


def with_rank(**changes: Any) -> MemoryAnalysis:
    """One rank, changed; the verdict of it."""
    analysis = memory_analysis()
    assert analysis.key_figures is not None
    rank = replace(analysis.ranks[0], **changes)
    return replace(analysis, ranks=[rank], verdict=memory_verdict([rank], analysis.key_figures))


def filled(rank: RankMemory, by_layer: list[LayerBytes]) -> RankMemory:
    """The rank with other memory alive at its peak."""
    layers = layer_rows(by_layer)
    categories: dict[str, int] = {}
    for row in by_layer:
        categories[row.category] = categories.get(row.category, 0) + row.bytes
    peak = replace(
        rank.peak,
        allocated_bytes=sum(categories.values()),
        categories=categories,
        by_layer=by_layer,
        by_category=category_shares(categories.items()),
        layers=layers,
        layers_folded=fold_layers(layers),
    )
    return replace(rank, peak=peak)


def test_the_verdict_says_how_high_where_and_what_to_try() -> None:
    remedy = Remedy(action="activation_checkpointing", saves_bytes=18 * MIB, enough=None, how="recompute")
    little = Remedy(action="smaller_batch", saves_bytes=MIB, enough=None, how="halve it")
    analysis = with_rank(remedies=[remedy, little], device_total_bytes=400 * MIB)
    assert analysis.verdict == [
        "Rank 0 peaks at 100.0 MiB.",
        "The peak is in backward of `layers.0`, step 5; it holds sharded parameters 40.0 MiB (40.0%), "
        "optimizer state 30.0 MiB (30.0%), activations 20.0 MiB (20.0%).",
        "Largest savings: activation checkpointing (up to 18.0 MiB).",
    ]


def test_a_warning_of_several_ranks_is_said_once() -> None:
    warnings = ["rank 0: x", "rank 2: y", "of the run", "rank 1: x", "rank 2: x", "rank 0: x"]
    document = build(replace(memory_analysis(), warnings=warnings))
    assert document.warnings == ("ranks 0-2: x", "rank 2: y", "of the run")
    assert json_of(replace(memory_analysis(), warnings=warnings))["warnings"] == warnings


def test_the_device_is_in_the_verdict_and_the_figures_where_it_is_known() -> None:
    analysis = memory_analysis()
    assert analysis.key_figures is not None
    figures = replace(
        analysis.key_figures, reserved_bytes=300 * MIB, device_total_bytes=400 * MIB, device_frac=0.75
    )
    first = memory_verdict(analysis.ranks, figures)[0]
    assert first == (
        "Rank 0, the highest of 2 ranks, peaks at 100.0 MiB, with 300.0 MiB reserved, 75.0% of its 400.0 MiB "
        "device."
    )
    numbers = build(replace(analysis, key_figures=figures)).numbers
    shown = [(number.value, number.label) for number in numbers]
    assert shown == [("100.0 MiB", "peak memory, rank 0"), ("300.0 MiB", "reserved, 75.0% of the device")]


def test_categories_and_layers_sum_to_the_peak() -> None:
    text = text_of(memory_analysis())
    assert row_of(text, "allocated") == ["allocated", "100.0", "MiB", "100.0"]
    matrix = text[text.index("Memory at the peak by layer") :]
    assert row_of(matrix, "all ") == ["all", "100.00", "40.00", "30.00", "20.00", "10.00"]
    assert row_of(matrix, "layers.0") == ["layers.0", "83.00", "25.00", "30.00", "18.00", "10.00"]


def test_layers_that_are_alike_share_a_row() -> None:
    """Four blocks of 3 MiB and a fifth that holds more; with -v each has its own."""
    by_layer = [LayerBytes(fqn=f"layers.{i}", category="activation", bytes=3 * MIB) for i in range(4)]
    by_layer.append(LayerBytes(fqn="layers.4", category="activation", bytes=5 * MIB))
    rank = filled(memory_analysis().ranks[0], by_layer)
    analysis = replace(memory_analysis(), ranks=[rank])
    table = table_of(build(analysis), "by_layer")
    assert [row[:2] for row in table.rows] == [["layers.0-3", 12 * MIB], ["layers.4", 5 * MIB]]
    assert table.unabridged is not None
    assert [row[1] for row in table.unabridged.rows] == [5 * MIB, *[3 * MIB] * 4]
    assert row_of(text_of(analysis, verbose=True)[1:], "layers.2") == ["layers.2", "3.00", "3.00"]


def test_every_second_layer_is_named_shortly() -> None:
    by_layer = [LayerBytes(fqn=f"layers.{i}", category="activation", bytes=MIB) for i in range(1, 32, 2)]
    (row,) = fold_layers(layer_rows(by_layer))
    assert row.name == "layers.1,3,...,31"


def test_out_of_memory_comes_first_with_what_would_help() -> None:
    found = Finding(id="out_of_memory", severity="high", fqn="", message="told in its own section")
    analysis = replace(with_rank(oom=out_of_memory(), fragmentation=fragmentation()), findings=[found])
    text = text_of(analysis)
    assert analysis.verdict[0] == (
        "Rank 0 ran out of memory in forward of the root module: `aten::empty` asked for 6.00 MiB with "
        "100.0 MiB allocated and 4.00 MiB left on the device, 2.00 MiB too little."
    )
    assert (
        analysis.verdict[-1]
        == "This change alone would have let this request fit: chunked loss (up to 5.00 MiB)."
    )
    assert " ".join(row_of(text, "request")) == "request 6.00 MiB by aten::empty at me/train.py:7:loss"
    assert row_of(text, "missing") == ["missing", "2.00", "MiB"]
    assert row_of(text, "chunked loss") == ["chunked", "loss", "5.00", "MiB", "yes", "in", "chunks"]
    assert row_of(text, "smaller batch") == ["smaller", "batch", "1.00", "MiB", "unknown", "halve", "it"]
    assert " ".join(row_of(text, "large ")) == "large 0 120.0 MiB 100.0 MiB 0 B 20.0 MiB 0 B 0 B 0 B 3"
    assert text.index("Changes that would let it fit") < text.index("by kind")
    assert "told in its own section" not in text
    assert not any(
        isinstance(block, Findings) for section in build(analysis).sections for block in section.blocks
    )


def test_a_rank_that_ran_out_comes_before_a_fuller_one() -> None:
    analysis = memory_analysis()
    assert analysis.key_figures is not None
    ranks = [analysis.ranks[0], replace(analysis.ranks[1], oom=out_of_memory())]
    assert memory_verdict(ranks, analysis.key_figures)[0].startswith("Rank 1 ran out of memory in forward")
    both = [replace(rank, oom=out_of_memory()) for rank in ranks]
    assert memory_verdict(both, analysis.key_figures)[0].startswith(
        "2 ranks ran out of memory, rank 0 in forward of the root module: `aten::empty` asked for 6.00 MiB"
    )


def test_what_nobody_knows_is_said_to_be_unknown() -> None:
    silent = replace(
        out_of_memory(),
        device_free_bytes=None,
        missing_bytes=None,
        remedies=[Remedy(action="smaller_batch", saves_bytes=MIB, enough=None, how="halve it")],
    )
    analysis = with_rank(oom=silent)
    text = text_of(analysis)
    assert row_of(text, "free on the device")[-1] == row_of(text, "missing")[-1] == "unknown"
    assert (
        analysis.verdict[-1]
        == "The amount needed is unknown; the largest savings: smaller batch (up to 1.00 MiB)."
    )
    assert "No single change" not in text


def test_what_ran_at_the_peak_is_told_from_the_trace() -> None:
    seen = AtPeak(match="place", step=3, operator="aten::mm", launched=None, running=["all_gather layers.1"])
    text = text_of(with_rank(at_peak=seen))
    assert (
        "At the same point of traced step 3: the host was in aten::mm; in flight: all_gather layers.1."
        in text
    )


def test_another_peak_nearly_as_high_limits_what_is_gained() -> None:
    rank = memory_analysis().ranks[0]
    others = [
        OtherPeak(allocated_bytes=97 * MIB, step=5, phase="forward", fqn=""),
        OtherPeak(allocated_bytes=60 * MIB, step=5, phase="optimizer", fqn=None),
    ]
    assert memory_advice([replace(rank, peak=replace(rank.peak, others=others))]) == [
        "Unsharded at the peak: `layers.0`.",
        "Memory is almost as high in forward of the root module: lowering only one of them saves only "
        "3.00 MiB.",
    ]


def test_what_is_not_known_has_no_place() -> None:
    """No timeline: no course. No layer: no table by layer and no column of it."""
    rank = memory_analysis().ranks[0]
    assert "over time" not in text_of(with_rank(timeline={}, layers=[]))
    nowhere = filled(rank, [LayerBytes(fqn=None, category="activation", bytes=MIB)])
    blocks = [replace(block, fqn=None, step=None) for block in rank.peak.largest_blocks]
    peak = replace(nowhere.peak, fqn=None, step=None, largest_blocks=blocks)
    document = build(replace(memory_analysis(), ranks=[replace(nowhere, peak=peak)]))
    assert "by_layer" not in document.tables()
    assert "memory_layers" not in document.charts()
    for name in ("ranks", "largest_blocks"):
        columns = {column.name for column in table_of(document, name).columns}
        assert not columns & {"fqn", "step"}


def test_csv_tells_the_root_from_no_layer() -> None:
    peak = csv_of(memory_analysis())
    assert list(peak[0]) == ["rank", "fqn", "category", "bytes"]
    assert sum(int(row["bytes"]) for row in peak if row["rank"] == "0") == 100 * MIB
    named = {(row["fqn"], row["category"]): int(row["bytes"]) for row in peak if row["rank"] == "1"}
    assert named["(root)", "sharded_parameter"] == 15 * MIB
    assert named["(no layer)", "activation"] == 2 * MIB
    layers = csv_of(memory_analysis(), "layers")
    assert list(layers[0]) == ["rank", "fqn", "phase", "peak_bytes", "delta_bytes"]
    assert [row["phase"] for row in layers] == ["forward", "backward"] * 2
    text = text_of(memory_analysis())
    assert row_of(text, "(root)")[:2] == ["(root)", "15.00"]
    assert row_of(text, "(no layer)")[:3] == ["(no", "layer)", "2.00"]


def test_the_devices_limit_is_drawn_where_it_is_known() -> None:
    """Out of sight it waits in the legend, so that the course is not flattened."""

    def limit(**changes: Any) -> dict[str, object]:
        last: dict[str, object] = build(with_rank(**changes)).charts()["memory_course"].drawn()["data"][-1]
        return last

    assert "device" not in str(limit()["name"])
    near = limit(device_total_bytes=200 * MIB)
    assert (near["name"], near["y"], near.get("visible")) == ("device: 200.0 MiB", [200.0, 200.0], None)
    assert limit(device_total_bytes=1 << 40)["visible"] == "legendonly"


@pytest.mark.parametrize("hostile", [None, "a_very_long_module_name." * 12, HOSTILE])
@pytest.mark.parametrize("width", [80, 118])
def test_it_fits_its_width_and_names_stay_text(hostile: str | None, width: int) -> None:
    text = text_of(memory_analysis(hostile=hostile), width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text


def test_a_new_category_appears_wherever_categories_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of categories is the one place: a word added there has its label, header and colour."""
    monkeypatch.setitem(CATEGORIES, "scale", Word("fp8 scales", "fp8\nscales", "#123456"))
    rank = filled(memory_analysis().ranks[0], [LayerBytes(fqn="a", category="scale", bytes=7 * MIB)])
    course = {"time_ns": [0, 1], "scale": [MIB, 7 * MIB]}
    analysis = replace(memory_analysis(), ranks=[replace(rank, timeline=course)])
    document = build(analysis)
    assert row_of(text_of(analysis), "fp8 scales") == ["fp8", "scales", "7.00", "MiB", "100.0", "█" * 30]
    assert "fp8\nscales" in [column.label for column in table_of(document, "by_layer").columns]
    for chart in document.charts().values():
        (drawn,) = chart.drawn()["data"]
        assert (drawn["name"], drawn["marker"]["color"]) == ("fp8 scales", "#123456")


@pytest.mark.real_data
@pytest.mark.parametrize(
    "name", ["fsdp2-llama8b-a100-oom/rank0_memory_snapshot", "single-gpu/transformer_medium_train"]
)
def test_every_number_of_the_text_stands_in_the_json(real_data: Path, name: str) -> None:
    recordings = read_memory(real_data / "snapshots" / f"{name}.pickle")
    analysis = analyze_memory([(0, recording, None) for recording in recordings])
    for verbose in (False, True):
        text = text_of(analysis, verbose=verbose)
        left_out = {"and", "more"}
        shown = [line for line in text.splitlines() if not left_out <= set(line.split())]
        assert unexplained("\n".join(shown), json_of(analysis)) == []


# Two recordings.


def test_two_recordings_compared() -> None:
    """Places that read alike are one row: 3 + 5 MiB of aten::mm became 6 + 14."""
    document = build(memory_comparison())
    assert [list(row) for row in table_of(document, "memory_by_category").rows] == [
        ["activation", 8 * MIB, 20 * MIB, 12 * MIB],
        ["temporary", 2 * MIB, 0, -2 * MIB],
    ]
    assert [list(row) for row in table_of(document, "memory_by_place").rows] == [
        ["aten::mm", 8 * MIB, 20 * MIB, 12 * MIB],
        ["aten::empty", 82 * MIB, 80 * MIB, -2 * MIB],
    ]
    text = text_of(memory_comparison())
    assert row_of(text, "activations") == ["activations", "8.00", "MiB", "20.0", "MiB", "+12.0", "MiB"]
    assert sum(line.split()[:3] == ["all", "90.0", "MiB"] for line in text.splitlines()) == 3
    assert list(document.charts()) == ["memory_peaks"]
    everything = text_of(memory_comparison(), verbose=True)
    assert " ".join(row_of(everything, "sharded parameters")) == "sharded parameters 80.0 MiB 80.0 MiB 0 B"


def test_a_comparison_says_what_changed_most() -> None:
    assert memory_comparison().verdict == [
        "The peak is 10.0 MiB higher (+11.1%): 90.0 MiB before, 100.0 MiB after.",
        "Largest changes: activations (+12.0 MiB) and temporaries (-2.00 MiB).",
        "Where: the root module (+10.0 MiB).",
    ]


def test_every_change_is_in_the_csv() -> None:
    rows = csv_of(memory_comparison())
    assert list(rows[0]) == ["by", "name", "before_bytes", "after_bytes", "delta_bytes"]
    assert [(row["by"], row["name"]) for row in rows] == [
        ("category", "activations"),
        ("category", "temporaries"),
        ("category", "sharded parameters"),
        ("layer", "(root)"),
        ("place", "aten::mm"),
        ("place", "aten::empty"),
    ]
    assert unexplained(text_of(memory_comparison()), json_of(memory_comparison())) == []


@pytest.mark.parametrize(
    ("op", "fqn", "request_line", "place"),
    [
        (
            "aten::empty",
            "",
            "6.00 MiB by aten::empty at me/train.py:7:loss",
            ("phase, layer", "forward, (root)"),
        ),
        ("/home/me/train.py:7:loss", None, "6.00 MiB at me/train.py:7:loss", ("phase", "forward")),
    ],
)
def test_a_failed_request_names_its_line_once_and_no_layer_it_has_not(
    op: str, fqn: str | None, request_line: str, place: tuple[str, str]
) -> None:
    analysis = memory_analysis()
    rank = replace(analysis.ranks[0], oom=replace(out_of_memory(), op=op, fqn=fqn))
    document = build(replace(analysis, ranks=[rank]))
    facts = next(one for one in document.sections if one.anchor == "out_of_memory").blocks[0]
    assert isinstance(facts, Facts)
    assert facts.pairs["request"] == request_line
    assert place in facts.pairs.items()
