"""The document of a run: trace and memory together, what was run, and nothing of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.numbers import unexplained
from support.rendered import json_of, row_of, table_of, text_of
from support.results import HOSTILE, memory_analysis, out_of_memory, run_analysis, run_summary, trace_analysis

from fsdp2prof.analyzers.run_summary import combine, shard_families
from fsdp2prof.reporters.document import Sentences
from fsdp2prof.reporters.documents import build
from fsdp2prof.results.finding import Finding, Severity
from fsdp2prof.results.ledger import NOTHING
from fsdp2prof.results.run import RunAnalysis
from fsdp2prof.vocabulary import ERROR_LENGTH, quoted_error

RAW = frozenset({"groups", "prefetch", "host_syncs", "timeline", "phase_spans"})


def finding(name: str, severity: Severity, change: str = "") -> Finding:
    return Finding(id=name, severity=severity, fqn=None, message=f"{name}. {change}", change=change)


def notes(run: RunAnalysis) -> list[str]:
    """Return the notes of a built document."""
    [section] = [one for one in build(run).sections if one.anchor == "findings"]
    return [
        line
        for block in section.blocks
        if isinstance(block, Sentences) and block.title == "Notes"
        for line in block.lines
    ]


def test_findings_of_both_the_most_severe_first_and_what_to_try_of_the_first() -> None:
    trace = replace(trace_analysis(), findings=[finding("t1", "high", "Do t1."), finding("t2", "low")])
    trace = replace(trace, advice=["A note of the trace."])
    memory = replace(memory_analysis(), findings=[finding("m1", "high"), finding("m2", "medium")])
    run = combine(run_summary(), trace, memory)
    assert [one.id for one in run.findings] == ["t1", "t2"], "memory is not tight"
    assert run.verdict[:2] == ["t1. Do t1.", trace.verdict[0]]
    assert notes(run) == trace.advice
    assert memory.key_figures is not None
    figures = replace(memory.key_figures, device_frac=0.9)
    tight = combine(run_summary(), trace, replace(memory, key_figures=figures))
    assert [one.id for one in tight.findings] == ["t1", "m1", "m2", "t2"]
    assert notes(tight) == [*trace.advice, *memory.advice]


def test_the_exception_that_ended_a_run_comes_first() -> None:
    one, two, *others = run_summary().ranks
    lost = "RuntimeError: [tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:13724"
    ended = [
        replace(one, state="crashed", error=lost),
        replace(two, state="crashed", error="ValueError: bad"),
    ]
    quiet = replace(trace_analysis(), findings=[], verdict=[f"{NOTHING}.", "A step takes 3 ms."])
    run = combine(replace(run_summary(), ranks=[*ended, *others]), quiet, memory_analysis())
    said = f"Rank {two.rank} crashed: ValueError: bad. 1 other rank then lost the connection."
    assert run.verdict[:2] == [said, "A step takes 3 ms."]
    only_lost = combine(replace(run_summary(), ranks=[ended[0], two, *others]), quiet, memory_analysis())
    assert only_lost.verdict[0] == f"{NOTHING}.", "why is not known"
    done = [replace(rank, state="complete", error=None) for rank in run_summary().ranks]
    after = combine(
        replace(run_summary(), ranks=done, state="crashed", exit_code=1), quiet, memory_analysis()
    )
    assert after.verdict[0] == "The command failed after every rank's training had ended, with exit code 1."


def test_the_peak_is_told_where_there_is_nothing_to_try() -> None:
    trace = replace(trace_analysis(), findings=[], verdict=trace_analysis().verdict[:2])
    memory = replace(memory_analysis(), findings=[], verdict=["a", "b", "c"])
    assert combine(run_summary(), trace, memory).verdict == [*trace.verdict, "a"]
    assert combine(run_summary(), replace(trace, verdict=["x"]), memory).verdict == ["x", "a"]
    tried = replace(memory, findings=[finding("m1", "medium", "Do m1.")])
    assert combine(run_summary(), trace, tried).verdict == [*trace.verdict, "a"], "memory is not tight"
    leaking = replace(memory, findings=[finding("leak", "high", "Do m1.")])
    assert combine(run_summary(), trace, leaking).verdict[0] == "leak. Do m1."
    assert combine(run_summary(), None, memory).verdict == ["a", "b", "c"]
    assert combine(run_summary(), trace, None).verdict == trace.verdict


def test_what_the_ledger_measures_is_not_judged_by_the_set_up_alone() -> None:
    setup = [finding("wrapping_too_fine", "low", "Wrap more."), finding("mesh", "low", "Turn it.")]
    trace = replace(trace_analysis(), findings=[])
    assert [one.id for one in combine(run_summary(), trace, None, setup=setup).findings] == ["mesh"]
    assert len(combine(run_summary(), replace(trace, ledger=None), None, setup=setup).findings) == 2


def test_a_leak_stands_beside_no_word_of_nothing_to_fix() -> None:
    trace = replace(trace_analysis(), findings=[], verdict=[f"{NOTHING}, and more.", "A step takes 50 ms."])
    memory = replace(memory_analysis(), findings=[finding("leak", "high", "Do m1.")], verdict=["a"])
    assert combine(run_summary(), trace, memory).verdict == ["leak. Do m1.", "A step takes 50 ms.", "a"]


def test_a_request_that_failed_leads() -> None:
    memory = memory_analysis()
    failed = replace(memory.ranks[0], oom=out_of_memory())
    memory = replace(memory, ranks=[failed], verdict=["It ran out.", "b", "Shard wider."])
    run = combine(run_summary(), trace_analysis(), memory)
    assert run.verdict == ["It ran out.", trace_analysis().verdict[0], "Shard wider."]


def test_parts_follow_one_another_and_the_run_comes_last() -> None:
    document = build(run_analysis())
    anchors = [section.anchor for section in document.sections]
    assert anchors[:3] == ["findings", "lost", "communication"]
    assert anchors.index("communication") < anchors.index("memory") < anchors.index("step")
    assert anchors[-1] == "run"
    assert (document.title, document.subtitle) == (
        "Run runs/sample",
        "partial, exit code 0, ranks 0-1 of 3 recorded on node0",
    )
    assert document.warnings[0] == "1 of 3 ranks left no recording: rank 2"
    labels = [number.label for number in document.numbers]
    assert labels[0] == "traced step, mean"
    assert any("peak memory" in label for label in labels)
    assert len(labels) <= 6
    assert not any("attributed" in label for label in labels), "no figure about the analysis itself"
    names = list(document.tables())
    assert names[:2] == ["groups", "steps"]
    assert {"by_layer", "ranks", "sharding"} <= set(names)


def test_rank_rows_hold_the_unrecorded_median_and_trouble_comes_first() -> None:
    run = run_analysis()
    broken = replace(run.run.ranks[1], state="crashed", error="ValueError: no", unrecorded_step=None)
    run = replace(run, run=replace(run.run, ranks=[run.run.ranks[0], broken]))
    text = text_of(run)
    rows = text[text.index("ranks with problems first") :]
    assert row_of(rows, "1 ")[:4] == ["1", "crashed", "-", "4"]
    assert row_of(rows, "1 ")[-2:] == ["ValueError:", "no"]
    assert row_of(rows, "0 ")[:9] == ["0", "complete", "40.0", "ms", "4", "steps", "3-4", "step", "5"]


def test_parameter_groups_that_are_alike_share_a_row_with_their_sums() -> None:
    run = run_summary()
    blocks = [replace(run.shard_groups[1], fqn=f"layers.{i}") for i in range(4)]
    frozen = replace(blocks[0], fqn="teacher", requires_grad=False, reshard_after_forward=2, offload=True)
    groups = [run.shard_groups[0], *blocks, frozen]
    families = shard_families(groups)
    assert [(one.layer, one.groups, one.numel, one.sharded_bytes) for one in families] == [
        ("", 1, 1_000_000, 2_000_064),
        ("layers.0-3", 4, 4_000_000, 4 * 2_000_064),
        ("teacher", 1, 1_000_000, 2_000_064),
    ]
    assert sum(one.padding_bytes or 0 for one in families) == sum(one.padding_bytes or 0 for one in groups)
    changed = replace(run, shard_groups=groups, shard_families=families)
    table = table_of(build(combine(changed, None, None)), "sharding")
    assert [row[0] for row in table.rows] == ["", "layers.0-3", "teacher (frozen)"]
    assert table.rows[-1][-1] == "to 2 ranks, offload"
    assert table.unabridged is not None
    assert len(table.unabridged.rows) == 6


def test_roots_are_told_apart_in_the_sharding() -> None:
    run = run_summary()
    groups = [run.shard_groups[0], replace(run.shard_groups[0], root=1)]
    assert [family.layer for family in shard_families(groups)] == ["root0:", "root1:"]


def test_a_size_that_is_unknown_in_one_group_is_unknown_in_the_family() -> None:
    first = run_summary().shard_groups[1]
    groups = [replace(first, fqn=f"h.{i}", sharded_bytes=None, padding_bytes=None) for i in range(3)]
    (family,) = shard_families(groups)
    assert (family.groups, family.sharded_bytes) == (3, None)


def test_a_run_that_left_only_its_manifests() -> None:
    text = text_of(combine(run_summary(), None, None))
    assert "Command and environment" in text
    assert "Where the step goes" not in text
    assert "ranks 0-1 of 3 recorded on node0" in text


@pytest.mark.parametrize("hostile", [None, "a_very_long_module_name." * 12, HOSTILE])
@pytest.mark.parametrize("width", [60, 80, 118])
def test_it_fits_its_width_and_names_stay_text(hostile: str | None, width: int) -> None:
    text = text_of(run_analysis(hostile=hostile), width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text


def test_every_number_of_the_text_stands_in_the_json() -> None:
    run = run_analysis()
    text = text_of(run).split("fsdp2prof report")[0]
    shown = [line for line in text.splitlines() if "all with -v" not in line]
    assert unexplained("\n".join(shown), json_of(run), without=RAW) == []


def test_an_error_that_was_cut_is_quoted_in_whole_sentences() -> None:
    said = "OutOfMemoryError: out of memory. Tried to allocate 8.00 GiB. This process has 22.68 GiB memo"
    for error in (f"{said} ...", said + "x" * (ERROR_LENGTH - len(said))):
        assert quoted_error(error) == "OutOfMemoryError: out of memory. Tried to allocate 8.00 GiB."
    assert quoted_error("ValueError: no such file") == "ValueError: no such file"
    assert quoted_error("KeyError: a long ...") == "KeyError: a long ..."
    run = run_analysis()
    broken = replace(run.run.ranks[1], state="crashed", error=f"{said} ...")
    run = replace(run, run=replace(run.run, ranks=[run.run.ranks[0], broken]))
    assert "GiB memo" not in text_of(run, verbose=True)
