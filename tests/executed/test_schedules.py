"""Pipelines, many micro-batches and asynchronous tensor parallelism in the step's time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from support.torch_versions import SCHEDULES_ARE_AS_TODAY

from fsdp2prof.analyzers.trace.analysis import analyze_trace
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.communication import estimate_comm
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.pipeline import (
    Interleaved,
    LoopedBfs,
    PipelineSchedule,
    ZeroBubble,
    schedule_rule,
    stages_of,
)
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.simulate.extend_commands import renumbered
from fsdp2prof.estimators.simulate.micro_batches import with_all_commands
from fsdp2prof.estimators.simulate.program import Collective, Command, Kernel, Program, Wait, Work
from fsdp2prof.estimators.simulate.streams import simulate
from fsdp2prof.estimators.step import predict_step, program_of, simulate_program
from fsdp2prof.estimators.techniques.pipeline import micro_batches_in_flight
from fsdp2prof.estimators.techniques.pipeline_order import (
    InFlight,
    Kind,
    StageWork,
    enough_micro_batches,
    in_flight,
    neighbours_of,
    order_of,
    rank_of_stage,
    waiting_ns,
)
from fsdp2prof.estimators.techniques.tensor_parallel import with_async_tensor_parallel
from fsdp2prof.estimators.timeline import capture
from fsdp2prof.estimators.timeline.bubble import stage_durations
from fsdp2prof.estimators.timeline.capture import capture_step
from fsdp2prof.estimators.timeline.costs import ClusterCosts
from fsdp2prof.estimators.timeline.repeats import fewer_micro_batches

MODEL = ModelSpec(source="llama3-8b", layers=2)
H100 = Cluster(hardware=HardwareSpec.parse("h100"))


SCHEDULES: tuple[PipelineSchedule, ...] = (
    "1f1b",
    "gpipe",
    Interleaved(2),
    LoopedBfs(2),
    "zb1p",
    ZeroBubble(2),
    "zbv",
)


def test_the_bubble_is_one_part_in_as_many_as_a_rank_has_stages() -> None:
    """(P - 1) micro-batches of one of V stages (arXiv 2104.04473, section 2.2), whatever the rank."""
    for ranks, stages, micro_batches in ((4, 1, 8), (4, 2, 8), (4, 2, 16), (8, 2, 32), (2, 4, 8)):
        found = [Interleaved(stages), LoopedBfs(stages)] if stages > 1 else ["1f1b", "gpipe", Interleaved(1)]
        for schedule in found:
            orders = order_of(schedule, ranks, micro_batches)
            for rank in range(ranks):
                assert waiting_ns(orders, rank, {"F": 100, "B": 200}) == (ranks - 1) * 300


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 12)])
def test_every_stage_does_each_micro_batch_once_and_in_order(
    schedule: PipelineSchedule, ranks: int, micro_batches: int
) -> None:
    stages = stages_of(schedule)
    for rank, order in enumerate(order_of(schedule, ranks, micro_batches)):
        assert {work.stage for work in order} == {
            stage for stage in range(ranks * stages) if rank_of_stage(schedule, ranks, stage) == rank
        }
        kinds: tuple[Kind, ...] = ("F", "I", "W") if schedule_rule(schedule).splits_backward else ("F", "B")
        assert len(order) == len(set(order)) == len(kinds) * stages * micro_batches
        for before, after in pairwise(kinds):
            for work in order:
                if work.kind == after:
                    assert order.index(StageWork(work.stage, before, work.micro_batch)) < order.index(work)


def test_two_ranks_of_two_stages_by_hand() -> None:
    """Rank 0: three warm-up forwards more than the last rank's one round, then one backward for each."""
    first, second = order_of(Interleaved(2), 2, 4)
    assert [(w.stage, w.micro_batch) for w in first[:4]] == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert not any(w.kind == "B" for w in first[:5])
    assert (in_flight(first).forwards, in_flight(second).forwards) == (5, 3)


def test_a_zero_bubble_waits_for_what_its_weights_do_not_fill() -> None:
    """ZB-H1 waits (P - 1) (F + I - W), arXiv 2401.10241 table 2; ZB-V not at all where F = I = W.

    Rank 0 in the first: its first stage makes its whole backward when the weights' part is due.
    """
    for ranks in (2, 4):
        equal: dict[Kind, int] = {"F": 100, "B": 200, "I": 100, "W": 100}
        orders = order_of("zb1p", ranks, 4 * ranks)
        assert [waiting_ns(orders, rank, equal) for rank in range(ranks)] == [(ranks - 1) * 100] * ranks
        whole = order_of("1f1b", ranks, 4 * ranks)
        assert waiting_ns(whole, 0, {"F": 100, "B": 200}) == (ranks - 1) * 300
    assert in_flight(order_of("zb1p", 4, 16)[0]).alive == in_flight(order_of("1f1b", 4, 16)[0]).alive == 4


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_more_rounds_wait_no_longer_and_keep_no_more(schedule: PipelineSchedule) -> None:
    durations: dict[Kind, int] = {"F": 90, "B": 210, "I": 130, "W": 80}
    for ranks, micro_batches in ((2, 14), (4, 24)):
        many = order_of(schedule, ranks, micro_batches)
        few = order_of(schedule, ranks, enough_micro_batches(schedule, ranks, micro_batches))
        for rank in range(ranks):
            assert waiting_ns(few, rank, durations) == waiting_ns(many, rank, durations)
            if not schedule_rule(schedule).forwards_first:
                assert in_flight(few[rank]) == in_flight(many[rank])


def test_a_gpipe_rank_holds_all_micro_batches_and_a_1f1b_rank_those_ahead() -> None:
    assert [in_flight(order) for order in order_of("gpipe", 3, 5)] == [InFlight(5, 0, 5)] * 3
    assert [in_flight(order).alive for order in order_of("1f1b", 3, 5)] == [3, 2, 1]
    assert [in_flight(order).alive for order in order_of("1f1b", 3, 2)] == [2, 2, 1]


def test_a_vs_first_rank_has_both_ends_and_its_last_rank_sends_itself_nothing() -> None:
    """Four ranks, stages 0 to 7: rank 0 has 0 and 7, rank 3 has 3 and 4."""
    assert [rank_of_stage("zbv", 4, stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [neighbours_of("zbv", 4, rank) for rank in range(4)] == [(1, 1), (2, 2), (2, 2), (1, 1)]
    assert [neighbours_of(Interleaved(2), 4, rank) for rank in (0, 1, 3)] == [(1, 2), (2, 2), (2, 1)]
    assert [neighbours_of("1f1b", 4, rank) for rank in (0, 1, 3)] == [(0, 1), (1, 1), (1, 0)]


@pytest.mark.parametrize(
    ("mesh", "changes", "message"),
    [
        ("dp_shard=2", {"pp_schedule": "interleaved:2"}, "no pipeline"),
        ("pp=2,dp_shard=2", {"pp_schedule": "interleaved:3", "reshard": "never"}, "x 3 stages for 2 layers"),
        ("dp_shard=2", {"pp_schedule": "zb1p"}, "no pipeline"),
        ("pp=2,dp_shard=2", {"pp_schedule": "zbv", "reshard": "never", "compile": True}, "leave compile out"),
        ("pp=2,dp_shard=2", {"pp_schedule": "zb1p", "reshard": "never", "ac": "op"}, "allows one backward"),
        ("dp_shard=2", {"async_tp": True, "compile": True}, "needs tensor parallelism"),
    ],
)
def test_a_schedule_that_the_mesh_cannot_have_is_refused(
    mesh: str, changes: dict[str, object], message: str
) -> None:
    policy = PolicySpec.from_mapping({"seq_len": 256, **changes})
    with pytest.raises(ModelError, match=message):
        program_of(MODEL, MeshSpec.parse(mesh), policy)


def test_a_number_of_micro_batches_that_fills_no_rounds_is_refused() -> None:
    with pytest.raises(ModelError, match="rounds"):
        order_of(Interleaved(2), 4, 9)
    with pytest.raises(ModelError, match="add compile"):
        PolicySpec(async_tp=True)


def test_interleaving_shortens_the_bubble_and_changes_no_work() -> None:
    mesh = MeshSpec(pp=2, dp_shard=2)
    plain = PolicySpec(seq_len=256, grad_accum=4, reshard="never")
    twice = replace(plain, pp_schedule=Interleaved(2))
    model = ModelSpec(source="llama3-8b", layers=4)
    program = program_of(model, mesh, plain)
    one, two = (simulate_program(program, model, mesh, policy, H100).estimate for policy in (plain, twice))
    assert two.step_ns - two.bubble_ns == one.step_ns - one.bubble_ns
    assert two.bubble_ns == pytest.approx(one.bubble_ns / 2, rel=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.sampled(6)
def test_a_saved_step_of_any_schedule_is_analysed_as_it_was_simulated(
    schedule: PipelineSchedule, stage: int
) -> None:
    """To the nanosecond; the waiting for other ranks is idle time before its update."""
    mesh, model = MeshSpec(pp=2, dp_shard=2), ModelSpec(source="gpt2", layers=4)
    policy = PolicySpec(seq_len=64, grad_accum=4, reshard="never", pp_schedule=schedule, pp_stage=stage)
    made = predict_step(model, mesh, policy, H100)
    step = analyze_trace([(made.trace, None)]).ranks[0].steps[0]
    assert step.duration_ns == made.estimate.step_ns
    parts, own = step.breakdown_ns, made.estimate.breakdown_ns
    waited = {name: getattr(parts, name) - getattr(own, name) for name in parts.__slots__}
    assert {name: more for name, more in waited.items() if more} == {"idle": made.estimate.bubble_ns}


def test_where_a_backward_is_split_the_first_stage_estimates_what_the_others_measure() -> None:
    """Half of each product of a backward makes the weights' gradients; a stage that splits it shows both.

    The others add up gradients on the way, by torch release in other ways: their weights' part is longer.
    """
    mesh, model = MeshSpec(pp=4, dp_shard=2), ModelSpec(source="llama3-8b", layers=8)
    policy = PolicySpec(seq_len=2048, grad_accum=4, reshard="never", pp_schedule="zb1p")
    made = []
    for stage in (0, 1):
        own = replace(policy, pp_stage=stage)
        program = program_of(model, mesh, own)
        timeline = simulate(program, ClusterCosts(cluster=H100, mesh=mesh))
        made.append(stage_durations(program, timeline, 1_000_000, own))
    first, second = made
    assert first["B"] > first["I"] + first["W"]  # its embedding
    assert second["B"] == pytest.approx(second["I"] + second["W"], abs=2)
    backward, theirs = (each["I"] + each["W"] for each in made)
    assert backward / first["F"] == pytest.approx(theirs / second["F"], rel=0.2)
    assert first["W"] / backward == pytest.approx(second["W"] / theirs, rel=0.2)
    assert first["W"] / backward <= second["W"] / theirs


def test_a_checkpointed_block_is_recomputed_for_the_input_and_for_every_group_of_weights() -> None:
    """A GPT-2 block has six: two norms' and four projections', of which autograd is asked one by one."""
    mesh, model = MeshSpec(pp=2, dp_shard=2), ModelSpec(source="gpt2", layers=2)
    plain = PolicySpec(seq_len=64, grad_accum=1, reshard="never", pp_stage=1, ac="full")

    def forwards(policy: PolicySpec) -> int:
        commands = program_of(model, mesh, policy).commands
        return sum(isinstance(c, Kernel) and c.op == "aten::gelu" for c in commands)

    assert forwards(plain) == 1 + 1
    assert forwards(replace(plain, pp_schedule="zb1p")) == 1 + 1 + 6


@pytest.mark.slow
def test_interleaving_keeps_more_activations_and_the_same_states() -> None:
    """Rank 0 of 2: five of its eight forwards of a stage are alive, three micro-batches' worth, not two."""
    mesh = MeshSpec(pp=2, dp_shard=2)
    plain = PolicySpec(seq_len=256, grad_accum=4, reshard="never")
    twice = replace(plain, pp_schedule=Interleaved(2))
    model = ModelSpec(source="llama3-8b", layers=4)
    assert [micro_batches_in_flight(mesh, policy) for policy in (plain, twice)] == [2, 3]
    before, after = (estimate_memory(model, mesh, policy).peak for policy in (plain, twice))
    assert after.categories["activation"] > before.categories["activation"]
    assert after.categories["sharded_parameter"] == before.categories["sharded_parameter"]


@pytest.mark.skipif(not SCHEDULES_ARE_AS_TODAY, reason="torch before 2.10")
def test_of_four_stages_a_rank_three_are_gathered_and_one_holds_gradients() -> None:
    """From torch 2.10 on, and those of the first run of a schedule are reduced before the second."""
    mesh, model = MeshSpec(pp=2, dp_shard=2), ModelSpec(source="gpt2", layers=8)
    policy = PolicySpec(
        seq_len=64, grad_accum=4, reshard="never", pp_schedule=Interleaved(4), pp_runs=2, torch="2.13",
        param_dtype="bfloat16", reduce_dtype="float32"
    )  # fmt: skip
    peak = estimate_memory(model, mesh, policy).peak
    once = estimate_memory(model, mesh, replace(policy, pp_schedule="1f1b")).peak
    held, always = (
        {row.fqn for row in one.by_layer if row.category == "unsharded_gradient" and row.fqn}
        for one in (peak, once)
    )
    assert held == {"layers.0"}  # the first stage's backward, the last to run
    assert always == {"layers.0", "layers.1", "layers.2", "layers.3"}
    assert peak.categories["sharded_gradient"] >= peak.categories["sharded_parameter"]  # of the first run
    commands = [c for c in program_of(model, mesh, policy).commands if isinstance(c, Collective)]
    executed = Counter((c.op, c.payload_bytes) for c in commands if c.mesh_dim == "dp_shard")
    rows = [row for row in estimate_comm(model, mesh, policy).groups if row.mesh_dim == "dp_shard"]
    expected: Counter[tuple[str, int]] = Counter()
    for row in rows:
        expected[row.op, row.payload_bytes // row.count] += row.count
    assert {key: executed[key] for key in expected} == expected
    assert max(expected.values()) > 4 * 2  # a gather of each block a run, and those of stages dropped before


@pytest.mark.parametrize("sync", ["each", pytest.param("last", marks=pytest.mark.slow)])
def test_repeated_micro_batches_are_those_that_a_whole_capture_has(
    sync: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsdp2prof.estimators.simulate import micro_batches

    mesh, policy = (
        MeshSpec(dp_shard=4),
        PolicySpec.from_mapping({"seq_len": 256, "grad_accum": 5, "sync": sync}),
    )
    captured = program_of(MODEL, mesh, policy)
    some = simulate_program(captured, MODEL, mesh, policy, H100).estimate
    made = with_all_commands(captured)
    monkeypatch.setattr(micro_batches, "CAPTURED_MICRO_BATCHES", 5)
    whole = program_of(MODEL, mesh, policy)
    every = simulate_program(whole, MODEL, mesh, policy, H100).estimate
    works = [[c.work for c in one.commands if isinstance(c, Kernel)] for one in (made, whole)]
    assert works[0] == works[1]
    assert [type(c) for c in made.commands] == [type(c) for c in whole.commands]
    assert (made.tokens, made.model_flops) == (whole.tokens, whole.model_flops)
    assert some.step_ns == pytest.approx(every.step_ns, rel=0.005)
    assert some.kernels_ns == pytest.approx(every.kernels_ns, rel=0.005)
    counts = [{(r.fqn, r.phase, r.op): r.count for r in one.by_layer} for one in (some, every)]
    assert counts[0] == counts[1]


def _product(m: int) -> Kernel:
    return Kernel(0, "aten::mm", Work("matmul", "bfloat16", 4 * m, 2 * m * 16 * 16, (1, m, 16, 16)))


def _collective(op: str, event: int) -> Collective:
    return Collective(
        stream=0, op=op, group="tp", mesh_dim="tp", group_size=4, dtype="bfloat16", nelems_in=1,
        nelems_out=4, payload_bytes=8, event=event,
    )  # fmt: skip


def test_a_gathers_last_chunk_waits_and_a_scatters_first_chunk_starts_it() -> None:
    copy = Kernel(0, "aten::mul", Work("pointwise", "bfloat16", 8))
    moved = Kernel(0, "aten::cat", Work("copy", "bfloat16", 8))
    view = Kernel(0, "aten::view", None)
    gather, scatter = _collective("all_gather", 1), _collective("reduce_scatter", 2)
    commands: list[Command] = [
        gather, Wait(0, 1), view, moved, _product(64), copy, _product(64), moved, scatter, Wait(0, 2), copy,
    ]  # fmt: skip
    program = Program(commands=commands, streams=1, parameters=0, tokens=0, model_flops=0)
    made = with_async_tensor_parallel(program, 4).commands
    rows = [c.work.shape[1] if isinstance(c, Kernel) and c.work and c.work.shape else c for c in made]
    assert rows == [
        gather, view, 16, 16, 16, Wait(0, 1), 16, copy, 16, scatter, 16, 16, 16, Wait(0, 2), copy,
    ]  # fmt: skip
    before, after = (
        sum(c.work.flops for c in one if isinstance(c, Kernel) and c.work) for one in (commands, made)
    )
    assert before == after


def _products(program: Program) -> int:
    return sum(
        isinstance(c, Kernel) and c.work is not None and c.work.kind == "matmul" for c in program.commands
    )


def test_asynchronous_tensor_parallelism_hides_transfers_and_does_the_same_work() -> None:
    mesh = MeshSpec(dp_shard=1, tp=8)
    policy = PolicySpec(seq_len=4096, compile=True)
    program = program_of(MODEL, mesh, policy)
    after = with_async_tensor_parallel(program, mesh.tp)
    plain, hidden = (simulate_program(one, MODEL, mesh, policy, H100).estimate for one in (program, after))
    assert hidden.step_ns < plain.step_ns
    collectives = [c for c in program.commands if isinstance(c, Collective) and c.mesh_dim == "tp"]
    sent = [c for c in collectives if c.op in ("all_gather", "reduce_scatter")]
    # two of each a block and pass; in backward not where gradients of several products add up first
    assert _products(after) - _products(program) >= 0.6 * len(sent) > 0
    assert hidden.hfu == pytest.approx(plain.hfu * plain.step_ns / hidden.step_ns, rel=1e-6)  # type: ignore[operator]


def test_tensor_parallelism_gathers_what_is_cast_to_float8_already() -> None:
    """Tensorwise: half the bytes of each gather in a block, and one cast less for what was gathered."""
    mesh, policy = MeshSpec(dp_shard=1, tp=8), PolicySpec(seq_len=2048, float8="tensorwise")
    narrow, wide = (
        program_of(MODEL, mesh, replace(policy, float8=recipe)) for recipe in ("tensorwise", "rowwise")
    )

    def gathers(program: Program) -> list[tuple[str, int, int]]:
        sent = [c for c in program.commands if isinstance(c, Collective) and c.mesh_dim == "tp"]
        return [(c.dtype, c.nelems_out, c.payload_bytes) for c in sent if c.op == "all_gather"]

    inside, outside = gathers(narrow), gathers(wide)
    assert [elements for _, elements, _ in inside] == [elements for _, elements, _ in outside]
    assert {size / elements for dtype, elements, size in inside if dtype == "float8_e4m3fn"} == {1.0}
    assert {dtype for dtype, _, _ in outside} == {"bfloat16"}
    assert sum(dtype == "float8_e4m3fn" for dtype, _, _ in inside) == 2 * 2 * 2  # blocks, passes, halves
    assert _products(narrow) == _products(wide)
    casts = [
        sum(c.work.bytes for c in p.commands if isinstance(c, Kernel) and c.op == "float8_cast" and c.work)
        for p in (narrow, wide)
    ]
    assert 0 < casts[0] < casts[1]
    counted = sum(
        row.payload_bytes
        for row in estimate_comm(MODEL, mesh, policy).groups
        if row.mesh_dim == "tp" and row.op == "all_gather"
    )
    assert counted == sum(size for _, _, size in inside)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved:2", "bfs:2", "zb1p", "zb1p:2", "zbv"])
@pytest.mark.parametrize("reshard", ["never", "always"])
def test_micro_batches_of_a_pipeline_that_are_alike_are_executed_once(schedule: str, reshard: str) -> None:
    """The commands are those of an execution of all, one by one."""
    spec, mesh = ModelSpec(source="gpt2", layers=4), MeshSpec(dp_shard=2, pp=2)
    options = {"seq_len": 32, "grad_accum": 8, "pp_schedule": schedule, "reshard": reshard}
    policy = PolicySpec.from_mapping(options)
    assert fewer_micro_batches(mesh, policy).pipelined < policy.pipelined
    made = capture_step(spec, mesh, policy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "fewer_micro_batches", lambda mesh, policy: policy)
        whole = capture_step(spec, mesh, policy)
    assert renumbered(made.commands) == renumbered(whole.commands)
    assert (made.tokens, made.model_flops, made.streams) == (whole.tokens, whole.model_flops, whole.streams)
