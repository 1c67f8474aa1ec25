"""Recorded runs replayed: unchanged to the nanosecond, changed as simulated runs that have the change."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import Layer, Schedule, record, transformer, write
from synthetic.strategies import schedules

from fsdp2prof.analyzers.trace.analysis import analyze_tables
from fsdp2prof.analyzers.trace.analysis import analyze_trace as analyze_trace_of
from fsdp2prof.analyzers.trace.rank_tables import rank_tables
from fsdp2prof.analyzers.whatif.changes import latencies, parse_change, parse_without, single_changes
from fsdp2prof.analyzers.whatif.edits import reduced_once
from fsdp2prof.analyzers.whatif.program import Activities, Points, RankProgram
from fsdp2prof.analyzers.whatif.recorded import program_of
from fsdp2prof.analyzers.whatif.run import run
from fsdp2prof.analyzers.whatif.warp import replayed_trace
from fsdp2prof.analyzers.whatif.what_if import replay_job, try_each
from fsdp2prof.errors import InputError, TraceError, UsageError
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec, NetworkSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.mesh_change import mesh_change
from fsdp2prof.estimators.step import predict_step
from fsdp2prof.readers.trace.chrome_trace import read_trace
from fsdp2prof.results.what_if import WhatIf
from fsdp2prof.tables.columns import Strings, Table
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.job.job_files import open_job
from fsdp2prof.workflows.saved_estimates import write_trace
from fsdp2prof.workflows.whatif import recorded_ranks, what_if

T = TypeVar("T", bound=Table)

SLOW_LINKS: dict[str, Any] = {"all_gather_ns": 500_013, "reduce_scatter_ns": 700_007}
TWO_NODES = Cluster(hardware=HardwareSpec.parse("h100-sxm"), network=NetworkSpec.parse("100gb-eth"))
KINDS: dict[str, dict[str, Any]] = {
    "communication bound": dict(SLOW_LINKS),
    "host syncs": {"sync": True},
}


def schedule(layers: tuple[Layer, ...], *, separate: bool = False, steps: int = 2) -> Schedule:
    return Schedule(roots=(layers,), steps=steps, separate_reduce_scatter_group=separate)


def traces(folder: Path, *schedules: Schedule) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    for recording in record(*schedules):
        write(recording, folder / f"rank{recording.rank}_trace.json")
    return folder


def tried(folder: Path, *settings: str, without: tuple[str, ...] = ()) -> WhatIf:
    return what_if(open_job(folder), settings=settings, without=without)


def with_forward_prefetch(layers: tuple[Layer, ...], ahead: int) -> tuple[Layer, ...]:
    names = [layer.fqn for layer in layers]
    return tuple(
        replace(layer, forward_prefetch=tuple(names[at + 1 : at + 1 + ahead]))
        for at, layer in enumerate(layers)
    )


def with_backward_prefetch(layers: tuple[Layer, ...], ahead: int) -> tuple[Layer, ...]:
    children = [layer.fqn for layer in layers[1:]]
    before = [children[::-1], *(children[:at][::-1] for at in range(len(children)))]
    return tuple(
        replace(layer, backward_prefetch=tuple(names[:ahead]))
        for layer, names in zip(layers, before, strict=True)
    )


def with_reshard(layers: tuple[Layer, ...], reshard: bool) -> tuple[Layer, ...]:
    return tuple(replace(layer, reshard=reshard) for layer in layers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_gives_what_a_run_that_has_it_gives(kind: str, tmp_path: Path) -> None:
    """The other run is simulated by the tests' own FSDP2, which knows nothing of replaying."""
    layers = transformer(4, **KINDS[kind])
    base = traces(tmp_path / "base", schedule(layers))
    changed = {
        "forward_prefetch=1": schedule(with_forward_prefetch(layers, 1)),
        "forward_prefetch=2": schedule(with_forward_prefetch(layers, 2)),
        "backward_prefetch=2": schedule(with_backward_prefetch(layers, 2)),
        "reshard=never": schedule(with_reshard(layers, reshard=False)),
        "reshard=always": schedule(with_reshard(layers, reshard=True)),
        "separate_reduce_scatter_group=yes": schedule(layers, separate=True),
    }
    for change, truth in changed.items():
        result = tried(base, change)
        recorded = analyze_trace(open_job(traces(tmp_path / change, truth)))
        assert result.replayed_ns == result.step_ns
        assert result.tried[0].step_ns == pytest.approx(recorded.totals.step_ns, rel=0.003), change
        assert sum(result.breakdown_after_ns.values()) == pytest.approx(result.tried[0].step_ns)


def test_one_unit_for_each_block_gains_at_least_what_is_said(tmp_path: Path) -> None:
    """Collectives take 100 us and 5 us a million elements; a merged unit launches and computes as much."""

    def unit(fqn: str, millions: int, parts: int) -> Layer:
        links: dict[str, Any] = {
            f"{op}_ns": 100_000 + 5_000 * millions for op in ("all_gather", "reduce_scatter")
        }
        links |= {"forward_ns": 40_002 * parts, "backward_ns": 80_004 * parts, "kernels": 2 * parts}
        return Layer(fqn=fqn, numel=millions * 1_000_000, copy_ns=parts * 2_000, **links)

    root = unit("", 6, 1)
    fine = [unit(f"layers.{i}.{name}", 4, 1) for i in range(4) for name in ("attention", "mlp")]
    coarse = [unit(f"layers.{i}", 8, 2) for i in range(4)]
    result = tried(traces(tmp_path / "fine", schedule((root, *fine))), "wrap=blocks")
    truth = analyze_trace(open_job(traces(tmp_path / "coarse", schedule((root, *coarse))))).totals.step_ns
    assert truth is not None
    assert result.tried[0].step_ns is not None
    assert truth <= result.tried[0].step_ns <= 1.1 * truth
    assert result.tried[0].step_ns < 0.85 * result.replayed_ns
    assert result.tried[0].memory_bytes == 2 * 4_000_000 * 4
    with pytest.raises(InputError, match="every block is already one FSDP unit"):
        tried(tmp_path / "coarse", "wrap=blocks")


@pytest.mark.parametrize("replicas", [1, 2])
def test_reducing_in_the_last_micro_batch_gives_what_a_run_that_does_so_gives(
    replicas: int, tmp_path: Path
) -> None:
    often = replace(schedule(transformer(4, **SLOW_LINKS)), microbatches=3, shard=2, replicas=replicas)
    once = replace(often, sync_every_microbatch=False)
    result = tried(traces(tmp_path / "often", often), "sync=last")
    recorded = analyze_trace(open_job(traces(tmp_path / "once", once)))
    assert result.tried[0].step_ns == pytest.approx(recorded.totals.step_ns, rel=0.003)
    # every full gradient in float32, less the shards of them that were there before
    assert result.tried[0].memory_bytes == (6_000_000 + 4 * 4_000_000) * 4 * (often.shard - 1) // often.shard
    counts = {(row.fqn, row.op, row.phase): row.count for row in recorded.by_layer}
    assert {(row.fqn, row.op, row.phase): row.count_after for row in result.by_layer} == counts


def table(of: type[T], count: int, **given: Any) -> T:
    """Build a table from columns and single values; the others are zero, false or null."""
    columns: dict[str, Any] = {}
    for field in fields(of):  # type: ignore[arg-type]
        value = given.get(field.name)
        if field.type == "Strings":
            columns[field.name] = value if isinstance(value, Strings) else Strings.full(count, value)
        else:
            dtype = np.bool_ if field.type == "BoolArray" else np.int64
            columns[field.name] = np.broadcast_to(np.array(0 if value is None else value, dtype), count)
    return of(**columns)


def test_gradients_of_two_updates_are_two_reductions() -> None:
    """Two backwards with an update between them, as of two optimizers in turns, are no accumulation."""

    def program(*labels: str) -> RankProgram:
        """Each label opens and closes, around a reduce-scatter if it is one that reduces."""
        names, opens = [], []
        for name in labels:
            inside: list[str | None] = [None] if "reduce" in name else []
            names += [name, *inside, name]
            opens += [True, *[False] * len(inside), False]
        reduces = np.array([name is None for name in names])
        launches = np.cumsum(reduces) - 1
        count = int(launches[-1]) + 1
        points = table(
            Points, len(names), label=Strings.intern(names), opens=opens,
            launches=np.where(reduces, launches, -1), awaits=-1, needs=-1,
        )  # fmt: skip
        activities = table(
            Activities, count, end=5, stream=1, step=1, kind="collective", op="reduce_scatter",
            payload_bytes=64, group_size=4, origin=np.arange(count),
        )  # fmt: skip
        return RankProgram(0, True, 0, 0, points, activities)

    reduce, done, update = (
        "FSDP::post_backward_reduce (layers.0)",
        "FSDP::root_post_backward_callback",
        "Optimizer.step#AdamW.step",
    )
    assert reduced_once(program(reduce, done, update, reduce, done, update))[1] == {}
    once, sizes = reduced_once(program(reduce, done, reduce, done, reduce, done, update))
    assert np.flatnonzero(once.launched).tolist() == [2]
    assert sizes == {reduce: 64 - 16}
    # one module that runs twice in a backward accumulates nothing
    assert reduced_once(program(reduce, reduce, done, update))[1] == {}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(each=st.lists(schedules(), min_size=1, max_size=1))
def test_a_run_replayed_unchanged_gives_back_every_nanosecond(each: list[Schedule], tmp_path: Path) -> None:
    """Whatever the policies: several roots, accumulation, HSDP, recomputation, graphs, no labels at all."""
    (recording,) = record(*each)
    trace = read_trace(write(recording, tmp_path / "trace.json"), workers=1)
    tables = rank_tables(trace)
    summary = analyze_tables(tables).summary
    job = replay_job([(program_of(tables, summary), summary)]).job
    ran = run(job).ranks[0]
    assert ran.end.tolist() == job[0].points.end.tolist()
    assert ran.started.tolist() == job[0].activities.start.tolist()
    assert ran.ended.tolist() == job[0].activities.end.tolist()
    again = replayed_trace(trace, ran)
    before, after = analyze_trace_of([(trace, None)]), analyze_trace_of([(again, None)])
    assert after.totals == before.totals
    assert after.groups == before.groups


def test_the_layers_after_a_change_are_those_of_a_run_that_has_it(tmp_path: Path) -> None:
    layers = transformer(4, **SLOW_LINKS)
    result = tried(traces(tmp_path / "base", schedule(layers)), "reshard=never")
    never = schedule(with_reshard(layers, reshard=False))
    recorded = analyze_trace(open_job(traces(tmp_path / "never", never)))
    expected = {(row.fqn, row.phase, row.op): (row.count, row.exposed_ns) for row in recorded.by_layer}
    found = {
        (row.fqn, row.phase, row.op): (row.count_after, row.exposed_after_ns)
        for row in result.by_layer
        if row.count_after
    }
    assert found == expected
    assert {
        row.count_after for row in result.by_layer if row.phase == "backward" and row.op == "all_gather"
    } == {0}
    assert result.tried[0].memory_bytes == 4 * 4_000_000 * 2  # the root stays gathered in both


def test_without_a_straggler_the_others_step_as_if_it_were_one_of_them(tmp_path: Path) -> None:
    quick, slow = transformer(3), transformer(3, late_ns=700_003)
    base = traces(tmp_path / "base", schedule(quick), schedule(slow))
    alone = analyze_trace(open_job(traces(tmp_path / "alone", schedule(quick), schedule(quick))))
    result = tried(base, without=("straggler:1",))
    assert result.replayed_ns == result.step_ns
    row = result.tried[0]
    assert row.step_ns == pytest.approx(alone.totals.step_ns, rel=0.001)
    # compared with the same ranks' own steps
    assert result.ranks == [0]
    assert result.step_ns - (row.gained_ns or 0.0) == row.step_ns
    assert sum(result.breakdown_before_ns.values()) == pytest.approx(result.step_ns)
    assert replace(row, gained_ns=0.0).sentence() == "no waiting for rank 1: saves no time"


def test_of_two_late_ranks_only_both_together_give_the_time_back(tmp_path: Path) -> None:
    quick, slow = transformer(3), transformer(3, late_ns=700_003)
    base = traces(tmp_path / "base", *(schedule(one) for one in (quick, quick, slow, slow)))
    alone = analyze_trace(open_job(traces(tmp_path / "alone", *[schedule(quick)] * 4)))
    ranks, _ = recorded_ranks(open_job(base))
    recorded_run = replay_job([(one.program, one.analysis.summary) for one in ranks])
    rows = {row.change: row for row in try_each(recorded_run, single_changes(recorded_run.job, [2, 3]))}
    one, both = (rows[f"without straggler:{late}"].gained_ns or 0.0 for late in ("3", "2,3"))
    assert one < 0.01 * both
    recorded = analyze_trace(open_job(base)).totals.step_ns or 0.0
    assert recorded - both == pytest.approx(alone.totals.step_ns, rel=0.002)
    unneeded = rows["without host_syncs"]
    assert (unneeded.gained_ns, unneeded.reason) == (
        None,
        "no call in this run synchronizes the host with the device",
    )


def test_without_the_data_loader_ranks_step_as_if_batches_were_there(tmp_path: Path) -> None:
    """One rank takes 30 ms for a batch, the other one 40 us, and waits for it."""
    layers = transformer(3)
    slow, quick, at_once = (
        replace(schedule(layers, steps=4), loading_ns=time) for time in (30_000_003, 40_003, 1)
    )
    run = traces(tmp_path / "base", slow, quick)
    recorded = analyze_trace(open_job(traces(tmp_path / "at once", at_once, at_once)))
    result = tried(run, without=("data_loader",))
    assert result.tried[0].step_ns == pytest.approx(recorded.totals.step_ns, rel=0.003)
    (found,) = [one for one in analyze_trace(open_job(run)).findings if one.id == "data_loader"]
    assert found.evidence["rank"] == 0
    gained = result.tried[0].gained_ns or 0.0
    assert 0.5 * gained < found.evidence["cost_ns_per_step"] <= gained + 40_003  # type: ignore[operator]
    with pytest.raises(InputError, match="no step in this run gets a batch"):
        tried(traces(tmp_path / "none", schedule(layers)), without=("data_loader",))


def test_only_ranks_that_are_known_to_be_slow_are_tried_away(tmp_path: Path) -> None:
    """Two steps are too few to tell a slow rank of two from chance; five are not."""
    quick, slow = transformer(3), transformer(3, late_ns=3_000_003)
    for steps, named in ((2, []), (5, ["without straggler:1"])):
        run = traces(tmp_path / str(steps), schedule(quick, steps=steps), schedule(slow, steps=steps))
        rows = tried(run).tried
        assert [row.change for row in rows if "straggler" in row.change] == named


def test_more_bandwidth_and_more_compute_are_never_slower_and_bounded_by_the_other(tmp_path: Path) -> None:
    base = traces(tmp_path / "base", schedule(transformer(4, **SLOW_LINKS)))
    steps = [tried(base, f"bandwidth={factor}x").tried[0].step_ns or 0.0 for factor in (1, 2, 4, 1000)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == tried(base).step_ns
    parts = tried(base).breakdown_before_ns
    assert steps[-1] >= parts["compute"] + parts["fsdp_copy"]
    faster = [tried(base, f"compute={factor}x").tried[0].step_ns or 0.0 for factor in (1, 2, 1000)]
    assert faster == sorted(faster, reverse=True)


def test_every_single_change_is_ranked_by_what_it_gains_and_the_others_say_why_not(tmp_path: Path) -> None:
    result = tried(traces(tmp_path / "base", schedule(transformer(4, **SLOW_LINKS))))
    gains = [row.gained_ns for row in result.tried if row.gained_ns is not None]
    assert gains == sorted(gains, reverse=True)
    assert len(gains) >= 7
    for row in result.tried:
        assert (row.step_ns is None) == (row.reason is not None)
    refused = {row.change: row.reason for row in result.tried if row.reason}
    assert refused["reshard=default"] == "the run already does this"
    assert "no call in this run synchronizes the host" in refused["without host_syncs"]


def test_the_verdict_is_about_what_a_script_can_change(tmp_path: Path) -> None:
    """Faster devices gain more than any setting here, and are told only where no setting helps."""
    layers = transformer(2, all_gather_ns=20_003, reduce_scatter_ns=20_011, forward_ns=90_000_017)
    result = tried(traces(tmp_path / "base", schedule(layers)))
    most = result.tried[0]
    assert (most.change, most.other_hardware) == ("compute=1.2x", True)
    assert result.shown == "compute=1.2x"
    assert result.verdict[0] == "None of the settings tried makes a step faster."
    slow = tried(traces(tmp_path / "slow", schedule(transformer(4, **SLOW_LINKS))))
    shown = next(row for row in slow.tried if row.change == slow.shown)
    own = [row for row in slow.tried if row.gained_ns is not None and not row.other_hardware]
    assert (shown, slow.tried[0].other_hardware) == (own[0], True)
    assert slow.verdict[0].lower().startswith(shown.what)


def test_the_ledger_says_what_its_remedies_gained_on_the_recording(tmp_path: Path) -> None:
    base = traces(tmp_path / "base", schedule(transformer(5, sync=True)))
    plain = analyze_trace(open_job(base), what_if=False).ledger
    analysis = analyze_trace(open_job(base))
    assert plain is not None
    assert analysis.ledger is not None
    assert {one.remedy.basis for one in plain.entries if one.remedy} == {"bound"}
    (sync,) = [one for one in analysis.ledger.entries if one.id == "host_sync"]
    assert sync.remedy is not None
    row = next(one for one in analysis.what_if if one.change == "without host_syncs")
    assert (sync.remedy.basis, sync.remedy.what_if) == ("replay", row.change)
    assert sync.remedy.gain_ns == row.gained_ns
    assert row.told, "terminal, page and JSON propose it alike"
    assert analysis.ledger.entries[0].id == "host_sync", "what gains most comes first"
    assert "In a replay of this recording, this saves" in analysis.verdict[1]


def test_latency_is_where_the_line_through_two_sizes_meets_no_size() -> None:
    def one(payload: int, time: int) -> tuple[str, str, int, int]:
        return "all_gather", "0", payload, time

    assert latencies([one(1_000, 30), one(2_000, 50)]) == {("all_gather", "0"): 10}
    assert latencies([one(1_000, 30)]) == {}
    assert latencies([one(1_000, 30), one(2_000, 20)]) == {}


@pytest.mark.parametrize(
    "text", ["reshard", "reshard=maybe", "bandwidth=fast", "bandwidth=0x", "forward_prefetch=0", "colour=red",
             "reduce_dtype=int8", "mesh=dp_shard=8,tp=2", "mesh=dp_shard=1",
             "separate_reduce_scatter_group=maybe"]
)  # fmt: skip
def test_a_change_that_is_not_one_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=text.partition("=")[0]):
        parse_change(text, {"mesh": partial(mesh_change, cluster=None)})


@pytest.mark.parametrize("text", ["straggler", "straggler:x", "sleep"])
def test_what_cannot_be_left_out_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="host_syncs, data_loader or straggler:RANK"):
        parse_without(text)


def test_a_given_change_that_does_not_apply_is_an_error_that_says_why(tmp_path: Path) -> None:
    base = traces(tmp_path / "base", schedule(transformer(3)))
    with pytest.raises(InputError, match="reshard=default: the run already does this"):
        tried(base, "reshard=default")
    with pytest.raises(InputError, match="the trace of another rank"):
        tried(base, without=("straggler:0",))
    with pytest.raises(UsageError, match=r"only ranks .* have traces"):
        tried(base, without=("straggler:7",))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError):
        tried(tmp_path / "empty")


@pytest.fixture(scope="module")
def two_meshes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """The same step predicted on two nodes, sharded over all ranks and with a replica a node."""
    model, policy = ModelSpec(source="llama3-8b", layers=3), PolicySpec(seq_len=512)
    found = {}
    for text in ("dp_shard=16", "dp_replicate=2,dp_shard=8"):
        made = predict_step(model, MeshSpec.parse(text), policy, TWO_NODES)
        folder = tmp_path_factory.mktemp("predicted")
        write_trace(folder / "rank0_trace.json.gz", made.trace)
        found[text] = folder, float(made.estimate.step_ns)
    return found


@pytest.mark.parametrize("order", [1, -1])
def test_another_mesh_is_what_is_predicted_of_it(
    two_meshes: dict[str, tuple[Path, float]], order: int
) -> None:
    """``estimate step`` captures the other mesh from FSDP2 itself, on the cluster that was "recorded"."""
    (_, (base, _)), (text, (_, expected)) = list(two_meshes.items())[::order]
    result = what_if(open_job(base), settings=[f"mesh={text}"], cluster=TWO_NODES)
    assert result.tried[0].step_ns == pytest.approx(expected, rel=0.02)
    assert sum(result.breakdown_after_ns.values()) == pytest.approx(result.tried[0].step_ns)
    reduced = [row for row in result.by_layer if row.op == "all_reduce" and row.fqn is not None]
    assert {row.count_after for row in reduced} == {float("dp_replicate" in text)}
    assert len(reduced) == 4  # three blocks and the root


def test_another_mesh_of_gpus_needs_the_cluster(two_meshes: dict[str, tuple[Path, float]]) -> None:
    base, _ = two_meshes["dp_shard=16"]
    with pytest.raises(UsageError, match="--hardware"):
        what_if(open_job(base), settings=["mesh=dp_shard=32"])
    with pytest.raises(InputError, match="already has this mesh"):
        what_if(open_job(base), settings=["mesh=dp_shard=16"], cluster=TWO_NODES)
    larger = what_if(open_job(base), settings=["mesh=dp_shard=64"], cluster=TWO_NODES)
    assert any("64 ranks in place of 16" in note for note in larger.tried[0].assumptions)
    assert larger.tried[0].memory_bytes is None
