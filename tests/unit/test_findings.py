"""Every finding fires on a trace built to have the fault, and a healthy trace has none."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from support.ledger import find
from support.results import trace_analysis
from support.sharded_groups import sharded_group
from synthetic import Layer, Schedule, record, transformer, write_run

from fsdp2prof.analyzers.fail_on import METRICS
from fsdp2prof.analyzers.ledger.account import with_ledger
from fsdp2prof.analyzers.ledger.book import Book
from fsdp2prof.analyzers.ledger.thresholds import FindingThresholds, parse_thresholds
from fsdp2prof.analyzers.ledger.words import in_turns
from fsdp2prof.analyzers.trace.analysis import References
from fsdp2prof.errors import UsageError
from fsdp2prof.manifest import OptimizerInfo, RankManifest, RootInfo
from fsdp2prof.results.communication import CrossRank, GroupRow, LateRank, LateRanks, Straggler
from fsdp2prof.results.finding import Finding
from fsdp2prof.results.trace import TraceAnalysis
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.job.job_files import open_job

MS = 1_000_000
LAYERS = 6


def healthy_layers(**fields: Any) -> tuple[Layer, ...]:
    """Six layers that compute 2 ms and 4 ms around collectives of 0.1 and 0.2 ms; the last one is kept."""
    long: dict[str, Any] = {"forward_ns": 2 * MS + 17, "backward_ns": 4 * MS + 31, "numel": 8_000_000}
    root, *children = transformer(LAYERS, **(long | fields))
    children[-1] = replace(children[-1], reshard=False)
    return (root, *children)


HEALTHY = Schedule(roots=(healthy_layers(),))


LITTLE = References(thresholds=FindingThresholds(medium_cost_frac=0.004, cpu_cost_frac=0.004))
"""Tells losses that are too small for people, so that the schedules stay short."""


def analyse(folder: Path, *schedules: Schedule, references: References | None = None) -> TraceAnalysis:
    return analyze_trace(
        open_job(write_run(record(*schedules), folder)), workers=1, references=references or References()
    )


def every_rank(schedule: Schedule) -> list[Schedule]:
    """Ranks that are all alike, as many as the schedule shards over: nobody is missing."""
    smallest = replace(schedule, shard=2)
    return [smallest] * (smallest.shard * smallest.replicas)


def named(analysis: TraceAnalysis) -> dict[str, Finding]:
    return {finding.id: finding for finding in analysis.findings}


def number(finding: Finding, name: str, default: float | None = None) -> float:
    """A number of a finding's evidence."""
    value = finding.evidence.get(name, default)
    assert isinstance(value, (int, float))
    return value


def test_a_healthy_run_has_no_findings(tmp_path: Path) -> None:
    assert analyse(tmp_path / "run", HEALTHY, HEALTHY).findings == []


def kept_root(**fields: Any) -> Schedule:
    root, *children = healthy_layers()
    return Schedule(roots=((replace(root, **fields), *children),))


FAULTS = {
    "all_gather_launched_late": (
        Schedule(roots=(healthy_layers(all_gather_ns=900_011),)).changed("layers.3", late_ns=14 * MS),
        "layers.3",
        "set_modules_to_forward_prefetch",
    ),
    "all_gathers_back_to_back": (
        Schedule(roots=(healthy_layers(all_gather_ns=3 * MS),)),
        None,
        "larger batch",
    ),
    "all_gather_queued": (
        Schedule(
            roots=(healthy_layers(reduce_scatter_ns=3_900_011, all_gather_ns=1_500_003),),
            reduce_dtype="BFloat16",
        ),
        None,
        "set_separate_reduce_scatter_group",
    ),
    "all_gather_behind_stream": (
        Schedule(roots=(healthy_layers(all_gather_ns=500_009),), unshard_async_op=True),
        None,
        "set_modules_to_forward_prefetch",
    ),
    "slow_transfer": (
        replace(
            Schedule(roots=(healthy_layers(all_gather_ns=900_011),)),
            slow_transfer=frozenset({("all_gather", "layers.2")}),
        ),
        "layers.2",
        "links",
    ),
    "reduce_scatter_too_long": (
        Schedule(roots=(healthy_layers(reduce_scatter_ns=6 * MS),), reduce_dtype="BFloat16"),
        None,
        "set_reduce_scatter_max_input_buffers",
    ),
    "communication_bound": (
        Schedule(roots=(healthy_layers(all_gather_ns=5 * MS, reduce_scatter_ns=7 * MS),)),
        None,
        "larger batch",
    ),
    "root_holds_most": (
        kept_root(numel=400_000_000, all_gather_ns=9 * MS),
        "",
        "the embedding and the head",
    ),
    "wrapping_too_coarse": (
        HEALTHY.changed("layers.1", numel=400_000_000, all_gather_ns=9 * MS),
        "layers.1",
        "Also apply fully_shard to the modules inside `layers.1`",
    ),
    "reduced_every_micro_batch": (
        Schedule(roots=(healthy_layers(reduce_scatter_ns=6 * MS),), microbatches=3),
        None,
        "set_requires_gradient_sync(False)",
    ),
    "resharded_needlessly": (
        HEALTHY.changed(f"layers.{LAYERS - 1}", reshard=None, all_gather_ns=4 * MS),
        f"layers.{LAYERS - 1}",
        "reshard_after_forward=False",
    ),
    "root_not_resharded": (kept_root(numel=200_000_000), "", "embedding, head"),
    "reduce_in_float32": (
        Schedule(roots=(healthy_layers(reduce_scatter_ns=6 * MS),)),
        None,
        "reduce_dtype=torch.bfloat16",
    ),
    "all_reduce_exposed": (
        Schedule(roots=(healthy_layers(all_reduce_ns=6 * MS),), shard=2, replicas=2),
        None,
        "set_requires_all_reduce(False)",
    ),
    "host_bound": (Schedule(roots=(healthy_layers(host_ns=3 * MS),)), None, "torch.compile"),
    "host_sync": (
        Schedule(roots=(healthy_layers(host_ns=600_003),)).changed("layers.2", sync=True),
        "layers.2",
        "aten::item in forward of `layers.2`",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_found_where_it_is(name: str, tmp_path: Path) -> None:
    schedule, fqn, says = FAULTS[name]
    found = named(analyse(tmp_path / "run", *every_rank(schedule), references=LITTLE))
    assert name in found, f"only {list(found)}"
    assert says in found[name].message
    if fqn is not None:
        assert found[name].fqn == fqn


ALONE = {"communication_bound": "waiting_or_transfer", "slow_transfer": "slow_transfer_or_late_peer"}


@pytest.mark.parametrize("name", ALONE)
def test_one_rank_of_many_cannot_tell_waiting_from_transfer(name: str, tmp_path: Path) -> None:
    analysis = analyse(tmp_path / "run", FAULTS[name][0], references=LITTLE)
    found = named(analysis)
    assert name not in found
    assert analysis.ledger is not None
    (entry,) = [one for one in analysis.ledger.entries if one.id == ALONE[name]]
    assert "would separate waiting from transfer" in entry.said
    assert entry.remedy is None
    assert {row.of_best_frac for row in analysis.bandwidth} == {None}
    assert not any("no schedule" in finding.message for finding in analysis.findings)


def late_in_every_step(**rank: int) -> LateRanks:
    return LateRanks(
        ranks=[LateRank(**rank, late_steps=6)],
        compared=2,
        steps=6,
        late_steps=6,
        explained_frac=0.75,
        least_explained_frac=0.7,
        chance=1 / 32,
        steps_needed=5,
        steady=True,
    )


def test_many_small_collectives_under_the_knee(tmp_path: Path) -> None:
    """24 layers of 100k elements take 90 us each; the root, 600 times larger, takes 150 us."""
    short: dict[str, Any] = {"forward_ns": 12_007, "backward_ns": 25_013, "all_gather_ns": 90_011}
    root, *children = transformer(24, numel=100_000, **short)
    many = Schedule(roots=((replace(root, numel=60_000_000, all_gather_ns=150_001), *children),))
    found = named(analyse(tmp_path / "run", *every_rank(many)))["wrapping_too_fine"]
    assert number(found, "collectives_per_step") >= 24
    assert "fully_shard([a, b])" in found.message


def test_a_straggler_is_named_with_rank_layer_and_work(tmp_path: Path) -> None:
    steps = replace(HEALTHY, steps=3)
    found = named(analyse(tmp_path / "run", steps, steps, steps.scaled(1.6, "layers.1"), steps))
    straggler = found["straggler"]
    assert (straggler.evidence["rank"], straggler.evidence["kind"]) == (2, "kernel")
    assert straggler.fqn == "layers.1"
    assert "sm90_xmma_gemm" in straggler.message


def test_ranks_that_take_turns_are_no_stragglers() -> None:
    """Two ranks, four steps of 50 ms in all: each waits some 10 ms for the other, a tenth of its time."""
    turns = CrossRank(
        match_key="seq",
        matched=40,
        unmatched=0,
        wait_ns={"0": 10 * MS, "1": 11 * MS},
        wait_caused_ns={"0": 11 * MS, "1": 10 * MS},
        stragglers=[
            Straggler(rank=0, fqn="layers.0", wait_caused_ns=11 * MS, cause="slower work", kind="kernel"),
            Straggler(rank=1, fqn="layers.1", wait_caused_ns=10 * MS, cause="slower work", kind="kernel"),
        ],
    )
    (found,) = [
        f for f in find(replace(trace_analysis(), cross_rank=turns)) if f.id != "cpu_collectives_in_line"
    ]
    assert (found.id, found.severity) == ("ranks_take_turns", "info"), "calm on a CPU"
    assert found.evidence["cost_frac"] == pytest.approx(21 / 200)


def test_a_rank_that_waits_less_than_it_is_waited_for_is_one() -> None:
    """Rank 1 is waited for 30 ms and waits 10 ms itself: net 20 of the 100 ms of its peer."""
    late = CrossRank(
        match_key="seq",
        matched=40,
        unmatched=0,
        wait_ns={"0": 30 * MS, "1": 10 * MS},
        wait_caused_ns={"0": 10 * MS, "1": 30 * MS},
        late=late_in_every_step(rank=1, wait_caused_ns=30 * MS, wait_ns=10 * MS),
        stragglers=[
            Straggler(rank=1, fqn="layers.1", wait_caused_ns=30 * MS, cause="slower work", kind="kernel"),
            Straggler(rank=0, fqn="layers.0", wait_caused_ns=10 * MS, cause="slower work", kind="kernel"),
        ],
    )
    analysis = trace_analysis()
    ranks = [replace(one, device_type="cuda") for one in analysis.ranks]
    found = {f.id: f for f in find(replace(analysis, ranks=ranks, cross_rank=late))}
    assert (found["straggler"].evidence["rank"], found["straggler"].fqn) == (1, "layers.1")
    own = 20
    assert found["straggler"].evidence["cost_frac"] == pytest.approx((30 + own) / 200)
    assert found["straggler"].evidence["gain_ns_per_step"] == pytest.approx(2 * 20 * MS / 4)
    assert found["ranks_take_turns"].evidence["cost_frac"] == pytest.approx(10 / 200)


def late(rank: int, ms: int, cause: str = "slower work") -> Straggler:
    return Straggler(rank=rank, fqn=None, wait_caused_ns=ms * MS, cause=cause, kind="kernel")


def found_late(cross: CrossRank, ranks: int, device: str = "cuda") -> dict[str, list[Finding]]:
    """Findings about ranks, by id, of a trace of 3 steps of 50 ms on each rank."""
    analysis = trace_analysis()
    first = replace(analysis.ranks[0], device_type=device)
    steps = [*first.steps, first.steps[0]]
    busy = replace(first.communication, total_ns=140 * MS, exposed_ns=140 * MS)
    alike = [replace(first, rank=rank, steps=steps, communication=busy) for rank in range(ranks)]
    named: dict[str, list[Finding]] = {}
    for one in find(replace(analysis, ranks=alike, groups=[], cross_rank=cross)):
        named.setdefault(one.id, []).append(one)
    return named


def always_late(rank: int, ms: int = 90) -> CrossRank:
    """Two ranks: the other one waits for ``rank`` in each of six steps, and nobody for the other."""
    waited, other = {str(rank): 0, str(1 - rank): ms * MS}, 1 - rank
    return CrossRank(
        match_key="order",
        matched=18,
        unmatched=0,
        wait_ns=waited,
        wait_caused_ns={str(other): 0, str(rank): ms * MS},
        stragglers=[late(rank, ms)],
        late=late_in_every_step(rank=rank, wait_caused_ns=ms * MS, wait_ns=0),
    )


def test_three_clear_steps_blame_a_rank_on_a_gpu_and_not_on_shared_cores() -> None:
    cross = always_late(0)
    assert cross.late is not None
    cross = replace(cross, late=replace(cross.late, steps=3, late_steps=3, chance=0.25, steps_needed=5))
    assert "straggler" in found_late(cross, 2)
    found = found_late(cross, 2, device="cpu")
    assert [one.severity for one in found["ranks_take_turns"]] == ["info"]


def test_a_rank_late_when_the_recording_began_is_not_blamed() -> None:
    late_then = "it was late when the recording began"
    cross = replace(always_late(0), stragglers=[late(0, 90, late_then)])
    found = found_late(cross, 2)
    assert "straggler" not in found
    assert [one.severity for one in found["late_from_the_start"]] == ["info"]


def test_a_late_rank_has_one_number() -> None:
    """90 of 150 ms of one rank wait for as much of the other: both are of the cause, which gains no more."""
    (blamed,) = found_late(always_late(0), 2)["straggler"]
    assert "30.0 ms (60.0%) per step, including its own excess" in blamed.message
    assert blamed.evidence["gain_ns_per_step"] == pytest.approx(30 * MS)


def test_costs_order_the_findings(tmp_path: Path) -> None:
    schedule = Schedule(roots=(healthy_layers(all_gather_ns=5 * MS, reduce_scatter_ns=7 * MS),))
    found = analyse(tmp_path / "run", *every_rank(schedule), references=LITTLE).findings
    order = ["high", "medium", "low", "info"]
    keys = [(order.index(f.severity), -number(f, "cost_frac", 0)) for f in found]
    assert keys == sorted(keys)
    assert len(found) > 1


def test_thresholds_silence_and_escalate(tmp_path: Path) -> None:
    analysis = analyse(tmp_path / "run", FAULTS["all_reduce_exposed"][0])
    cost = number(named(analysis)["all_reduce_exposed"], "cost_frac")
    silent = find(analysis, thresholds=FindingThresholds(medium_cost_frac=1, high_cost_frac=1))
    assert "all_reduce_exposed" not in {finding.id for finding in silent}
    loud = find(analysis, thresholds=FindingThresholds(high_cost_frac=cost - 0.001))
    assert {f.severity for f in loud if f.id == "all_reduce_exposed"} == {"high"}


def test_on_a_cpu_only_the_plain_truth_is_told() -> None:
    """The hand-made analysis is of a CPU: half of its communication is in the open, as gloo has it."""
    analysis = trace_analysis()
    assert {rank.device_type for rank in analysis.ranks} == {"cpu"}
    found = {finding.id: finding for finding in find(replace(analysis, findings=[]))}
    assert {name: finding.severity for name, finding in found.items()} == {
        "cpu_collectives_in_line": "info",
        "ranks_take_turns": "info",
    }


def test_what_the_script_hands_to_fsdp_is_told_on_a_cpu_too() -> None:
    """8 of 10 MB in one all-gather; then everything: nothing is there that could hide it."""

    def row(fqn: str, op: str, phase: str, megabytes: int, count: int = 1) -> GroupRow:
        return replace(
            analysis.groups[0], rank=0, step=4, fqn=fqn, op=op, phase=phase, count=count,
            payload_bytes=megabytes * 10**6 * count, exposed_ns=20 * MS,
        )  # fmt: skip

    analysis = replace(trace_analysis(), findings=[])
    gathers = [row(fqn, "all_gather", "forward", size) for fqn, size in (("a", 1), ("wide", 8), ("b", 1))]
    reductions = [row(str(one.fqn), "reduce_scatter", "backward", 8) for one in gathers]
    found = named(replace(analysis, findings=find(replace(analysis, groups=[*gathers, *reductions]))))
    assert number(found["wrapping_too_coarse"], "share_frac") == 0.8
    assert "Also apply fully_shard to the modules inside `wide`" in found["wrapping_too_coarse"].change
    assert "reduced_every_micro_batch" not in found
    halves = [row(fqn, "all_gather", "forward", 4) for fqn in ("a", "b")]
    assert "wrapping_too_coarse" not in {one.id for one in find(replace(analysis, groups=halves))}
    for before, coarse in ((2, False), (1, True)):
        sizes = enumerate((1, before, 8))
        stages = [row(f"stages.{i}", "all_gather", "forward", size) for i, size in sizes]
        assert ("wrapping_too_coarse" in {one.id for one in find(replace(analysis, groups=stages))}) is coarse
    alone = [row("", "all_gather", "forward", 8), row("", "reduce_scatter", "backward", 8)]
    (whole,) = [f for f in find(replace(analysis, groups=alone)) if f.id == "wrapping_too_coarse"]
    assert "All parameters (7.63 MiB) are in one FSDP unit" in whole.message
    windows = sum(len(rank.steps) for rank in analysis.ranks)
    assert number(whole, "cost_ns_per_step") == (20 + 20) * MS // windows  # the gather's and the reduction's


def reduced_thrice() -> TraceAnalysis:
    """Layer ``a`` reduces three times in a step, ``b`` six times."""
    analysis = replace(trace_analysis(), findings=[])
    one = replace(
        analysis.groups[0], rank=0, step=4, op="reduce_scatter", phase="backward", count=3,
        payload_bytes=6 << 20, exposed_ns=9 * MS,
    )  # fmt: skip
    return replace(analysis, groups=[replace(one, fqn="a"), replace(one, fqn="b", count=6)])


def test_micro_batches_are_the_runs_own_word_where_it_has_one() -> None:
    """Three reductions a step of every layer: two thirds of their time go where one is enough."""
    analysis = reduced_thrice()

    def told(*manifests: RankManifest) -> list[Finding]:
        return [f for f in find(analysis, manifests) if f.id == "reduced_every_micro_batch"]

    windows = sum(len(rank.steps) for rank in analysis.ranks)
    (foreign,) = told()
    assert number(foreign, "cost_ns_per_step") == 18 * MS * 2 // 3 // windows
    assert number(foreign, "memory_bytes") == (2 << 20) + (1 << 20)  # of one reduction of each layer
    assert foreign.change.startswith("If these are micro-batches of one update: call set_requires")
    group = sharded_group("a", [8, 64], ranks=4, rows=2)
    (own,) = told(RankManifest(param_groups=[group], micro_batches=3, gradient_syncs=3))
    assert own.change.startswith("Call set_requires_gradient_sync(False)")
    assert told(RankManifest(param_groups=[group], micro_batches=3, gradient_syncs=1)) == []


def test_collectives_that_are_not_fsdps_are_told_apart() -> None:
    analysis = trace_analysis()
    ranks = [replace(rank, device_type="cuda") for rank in analysis.ranks]
    gathered = [
        replace(analysis.groups[0], rank=one.rank, step=step, fqn=None, phase="other", exposed_ns=20 * MS)
        for one in ranks
        for step in (3, 4)
    ]
    analysis = replace(analysis, ranks=ranks, groups=[*analysis.groups, *gathered], findings=[])
    (found,) = [finding for finding in find(analysis) if finding.id == "all_gather_outside_fsdp"]
    assert "full_tensor()" in found.message
    assert found.evidence["phases"] == "other"


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({3: 63}, None),
        ({3: 4, 4: 4}, "4 all-gathers per step are"),
        ({3: 4, 4: 8}, "4 to 8 all-gathers per step are"),
    ],
)
def test_collectives_of_some_steps_are_counted_in_those(counts: dict[int, int], said: str | None) -> None:
    """Two ranks with steps 3 and 4 issue them; what one step alone issues may be rare."""
    analysis = trace_analysis()
    row = replace(analysis.groups[0], fqn=None, phase="other", exposed_ns=20 * MS)
    ranks = [replace(rank, device_type="cuda") for rank in analysis.ranks]
    rows = [
        replace(row, rank=one.rank, step=step, count=count) for one in ranks for step, count in counts.items()
    ]
    found = find(replace(analysis, ranks=ranks, groups=[*analysis.groups, *rows], findings=[]))
    messages = [one.message for one in found if one.id == "all_gather_outside_fsdp"]
    assert [one.partition(" issued")[0] for one in messages] == ([said] if said else [])


def manifest(rows: int, ranks: int) -> RankManifest:
    """One Linear(64, rows) sharded over ``ranks``: rows are padded up to a multiple."""
    group = sharded_group("head", [rows, 64], ranks=ranks, rows=-(-rows // ranks))
    return RankManifest(param_groups=[group])


def test_padding_of_uneven_shards_by_hand() -> None:
    """3 rows on 4 ranks are held as 4: a quarter is padding; 64 rows on 4 ranks need none."""
    analysis = replace(trace_analysis(), findings=[])
    (found,) = [f for f in find(analysis, [manifest(3, 4)]) if f.id == "uneven_shards"]
    assert (found.evidence["padding_frac"], found.severity) == (0.25, "medium")
    assert found.fqn == "head"
    assert "uneven_shards" not in {f.id for f in find(analysis, [manifest(64, 4)])}


def without(analysis: TraceAnalysis, op: str, step: int, *layers: str) -> list[Finding]:
    """What is found where some layers lack an operation in one step."""
    kept = [r for r in analysis.groups if not (r.op == op and r.step == step and r.fqn in layers)]
    return [one for one in find(replace(analysis, groups=kept)) if one.id == "unlike_steps"]


@pytest.mark.parametrize("detached", [True, False])
def test_two_models_updated_in_turns_are_said_so(detached: bool) -> None:
    """Steps 3 to 6 update the one (a) or the other (b); without detach() all compute gradients of both."""
    analysis = trace_analysis()
    row = replace(analysis.groups[0], rank=0, count=1)
    took = replace(analysis.ranks[0].steps[0], duration_ns=50 * MS)
    rank = replace(analysis.ranks[0], steps=[replace(took, step=step) for step in range(3, 7)])
    rows = [
        replace(row, step=step, fqn=fqn, op=op, count=1 + (op == "all_gather" and step % 2))
        for step in range(3, 7)
        for op in ("all_gather", "reduce_scatter")
        for fqn in ("root0:a", "root1:b")
        if op == "all_gather" or not detached or (fqn == "root0:a") == (step % 2 == 0)
    ]
    for roots, steps in ((2, 4), (1, 4), (2, 3)):
        some = replace(rank, steps=rank.steps[:steps])
        known = {one.step for one in some.steps}
        book = SimpleNamespace(
            analysis=replace(analysis, ranks=[some], groups=[one for one in rows if one.step in known]),
            manifests=[RankManifest(roots=[RootInfo(root=root) for root in range(roots)])],
        )
        said = in_turns(cast(Book, book))
        assert [("100.0 ms" in one, "detach()" in one) for one in said] == (
            [(True, not detached)] if (roots, steps) == (2, 4) else []
        )


def test_steps_of_several_kinds_are_told(tmp_path: Path) -> None:
    analysis = analyse(tmp_path / "run", HEALTHY, HEALTHY)
    first, *others = (step.step for step in analysis.ranks[0].steps)
    assert others
    rest = f"step{'s' if len(others) > 1 else ''} {' and '.join(map(str, others))}"
    assert without(analysis, "none", first) == []
    (turns,) = without(analysis, "reduce_scatter", first, "layers.2", "layers.3")
    said = (
        rf"{rest} reduce gradients of `layers.2` and 1 more layer \(\S+ ms each\), "
        rf"step {first} only of layers that all steps reduce"
    )
    assert re.search(f"There are 2 kinds of steps: {said}", turns.message)
    assert f"--steps {first}." in turns.change
    assert (turns.evidence["kinds"], turns.severity) == (2, "low")
    gathers = sum(r.count for r in analysis.groups if r.op == "all_gather" and (r.rank, r.step) == (0, first))
    once = sum(
        r.count
        for r in analysis.groups
        if r.op == "all_gather" and (r.rank, r.step, r.fqn) == (0, first, "layers.2")
    )
    (evaluated,) = without(analysis, "all_gather", first, "layers.2")
    said = (
        rf"all-gathers of layers are {gathers - once} in step {first} \(\S+ ms each\), {gathers} in {rest} \("
    )
    assert re.search(said, evaluated.message)


def test_a_unit_that_runs_several_times_in_a_micro_batch_is_gathered_too_often() -> None:
    """Four micro-batches need eight all-gathers; of twenty the exposed time of twelve could be saved."""
    analysis = trace_analysis()
    ranks = [replace(rank, device_type="cuda") for rank in analysis.ranks]
    analysis = replace(analysis, ranks=ranks, findings=[])
    group = sharded_group("layers.0", [64, 64], ranks=2, rows=32)

    def run(gathers: int | None) -> list[RankManifest]:
        one = msgspec.structs.replace(group, gathers=gathers, forwards=10, evaluations=0)
        return [RankManifest(param_groups=[one], roots=[RootInfo(root=0, micro_batches=4)])]

    for gathers, expected in ((20, True), (8, False), (None, False)):
        found = {one.id for one in find(analysis, run(gathers))}
        assert ("gathered_repeatedly" in found) == expected
    again = with_ledger(analysis, manifests=run(20)).ledger
    assert again is not None
    entry = next(e for e in again.entries if e.id == "gathered_repeatedly")
    assert entry.ns == 4 * MS * 12 // 20


def test_thresholds_are_options_with_names() -> None:
    parsed = parse_thresholds(["straggler_frac=0.5", "small_count=3"])
    assert (parsed.straggler_frac, parsed.small_count) == (0.5, 3)
    assert parsed.knee_frac == FindingThresholds().knee_frac
    with pytest.raises(UsageError, match="min_cost_frac"):
        parse_thresholds(["stragler_frac=0.5"])
    with pytest.raises(UsageError, match="not a number"):
        parse_thresholds(["straggler_frac=much"])


def test_a_row_that_holds_only_the_end_of_another_steps_collective() -> None:
    """It has time and no collective of its own: nothing is divided by their number."""
    analysis = trace_analysis()
    thresholds = parse_thresholds(["small_payload_bytes=1000000000000", "small_count=0", "knee_frac=1"])
    over = [replace(row, count=0, payload_bytes=0) for row in analysis.groups]
    for groups in (over, [*analysis.groups, *over]):
        found = find(replace(analysis, groups=groups, findings=[]), thresholds=thresholds)
        assert all(one.message for one in found)


def test_nothing_is_found_in_nothing() -> None:
    assert find(replace(trace_analysis(), ranks=[], groups=[])) == []


DOCUMENT = Path(__file__).parents[2] / "docs" / "findings.md"


def test_the_document_has_every_threshold_with_its_default() -> None:
    rows = [line.split("|")[1:3] for line in DOCUMENT.read_text().splitlines() if line.startswith("| `")]
    documented = {name.strip(" `"): value.strip() for name, value in rows}
    for field in fields(FindingThresholds):
        assert documented[field.name] == f"{field.default}"


def test_the_document_has_every_metric_and_every_finding_that_fires() -> None:
    text = DOCUMENT.read_text()
    for name, metric in METRICS.items():
        assert f"| `{name}` | {metric.description} |" in text
    others = "straggler", "ranks_take_turns", "late_from_the_start", "slowed_by_tracing", "uneven_shards"
    unclear = "waiting_or_transfer", "slow_transfer_or_late_peer", "late_rank_unclear"
    for name in [*FAULTS, "wrapping_too_fine", *others, *unclear]:
        assert f"| `{name}` |" in text


def test_a_straggler_costs_what_is_felt_and_is_not_mistaken_for_wide_reductions(tmp_path: Path) -> None:
    """Rank 2's slow layer makes every step as long as its own; the others' wait beyond that is hidden."""
    steps = replace(HEALTHY, steps=3)
    slow = steps.scaled(1.5, "layers.2")
    analysis = analyse(tmp_path / "run", steps, steps, slow, steps)
    (alone,) = (rank.steps[-1].duration_ns for rank in analyse(tmp_path / "one", HEALTHY).ranks)
    together = analysis.ranks[0].steps[-1].duration_ns
    found = named(analysis)
    assert set(found) == {"straggler"}
    assert found["straggler"].evidence["wait_frac"] == pytest.approx((together - alone) / together, rel=0.05)


def test_the_modules_that_a_large_root_holds_are_named() -> None:
    """An embedding and a head of 32,000 x 64 beside blocks that are wrapped already."""
    analysis = replace(trace_analysis(), findings=[])
    rows = [
        replace(
            analysis.groups[0], rank=0, step=4, fqn=fqn, op="all_gather", phase="forward", count=1,
            payload_bytes=size << 20, exposed_ns=20 * MS,
        )
        for fqn, size in (("", 16), ("layers.0", 1), ("layers.1", 1))
    ]  # fmt: skip
    root = sharded_group("", [32_000, 64], ranks=2, rows=16_000)
    (one,) = root.parameters
    root.parameters = [
        msgspec.structs.replace(one, fqn=f"{name}.weight", global_shape=shape)
        for name, shape in (("embedding", [32_000, 64]), ("head", [32_000, 64]), ("norm", [64]))
    ]
    blocks = [sharded_group(f"layers.{i}", [64, 64], ranks=2, rows=32) for i in range(2)]
    found = find(replace(analysis, groups=rows), [RankManifest(param_groups=[root, *blocks])])
    (told,) = [f for f in found if f.id == "root_holds_most"]
    assert told.change == "Apply fully_shard to `embedding` and `head` before the root."


def test_closures_of_lbfgs_are_not_micro_batches() -> None:
    """Three reductions in a step: the loss at three places, not three micro-batches."""
    analysis = reduced_thrice()
    group = sharded_group("a", [8, 64], ranks=4, rows=2)
    for name, expected in (("SGD", 1), ("LBFGS", 0)):
        optimizer = OptimizerInfo(class_name=name, state_bytes=0, param_groups=1, parameters=1)
        manifest = RankManifest(param_groups=[group], optimizers=[optimizer])
        found = [f for f in find(analysis, [manifest]) if f.id == "reduced_every_micro_batch"]
        assert len(found) == expected, name
