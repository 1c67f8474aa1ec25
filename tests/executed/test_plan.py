"""Plans: what is searched, what the engine says of the winner, and what is refused."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli import call
from support.plans import ENGINE, NODE, SMALL, small_plan, small_planning
from support.present import present

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators import step as steps
from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec, NetworkSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.memory import estimate_memory
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.planner.answers import answer
from fsdp2prof.estimators.planner.confirm import (
    Check,
    EngineMemory,
    check_memory,
    check_step,
    other_precisions,
    prefetches,
    prefetching_can_matter,
)
from fsdp2prof.estimators.planner.fast import FastModel, Score
from fsdp2prof.estimators.planner.outcome import name_of, room, time_parts, why_it_lost
from fsdp2prof.estimators.planner.plan import Planning
from fsdp2prof.estimators.planner.profile import BlockProfile, measure, probes
from fsdp2prof.estimators.planner.recipes import recipes
from fsdp2prof.estimators.planner.request import Call, Candidate, PlanRequest, parse_fixed
from fsdp2prof.estimators.planner.search import (
    Correction,
    Scored,
    Search,
    candidates,
    meshes,
    pareto_front,
    ranked,
    simplest,
)
from fsdp2prof.estimators.simulate import micro_batches
from fsdp2prof.estimators.simulate.program import Work
from fsdp2prof.estimators.step import StepFigures, estimate_step, step_figures
from fsdp2prof.estimators.timeline.costs import kernel_ns
from fsdp2prof.estimators.verdict.memory_fit import fit_sentence, prediction_errors, room_on
from fsdp2prof.reporters.document import Table
from fsdp2prof.reporters.documents import build
from fsdp2prof.reporters.renderers import RENDERERS, RenderOptions
from fsdp2prof.results.plan import Plan
from fsdp2prof.workflows import plan as workflow
from fsdp2prof.workflows.description import describe
from fsdp2prof.workflows.plan_description import given_of, in_the_file

MIB = 1 << 20
CLUSTER = Cluster(hardware=HardwareSpec.parse("h100"), network=NetworkSpec.parse("400gb-ib"))
BIG = PlanRequest(
    model=ModelSpec(source="llama3-70b"),
    cluster=CLUSTER,
    gpus=64,
    global_batch=128,
    policy=PolicySpec(seq_len=8192),
)


@pytest.fixture
def planning() -> Planning:
    return small_planning()


@pytest.fixture
def plan() -> Plan:
    return small_plan()


def winner_of(planning: Planning) -> Scored:
    return next(one for one in planning.all() if one.confirmed)


def test_the_winner_put_back_into_the_estimates_gives_the_same_numbers(
    planning: Planning, plan: Plan
) -> None:
    assert plan.winner is not None
    assert plan.winner.confirmed
    one = winner_of(planning).candidate
    memory = estimate_memory(SMALL.model, one.mesh, one.policy, hardware=NODE.hardware)
    step = estimate_step(SMALL.model, one.mesh, one.policy, NODE)
    assert plan.winner.reserved_bytes == memory.peak.reserved_bytes
    outside = memory.outside_allocator_bytes
    device = NODE.hardware.memory_bytes
    assert plan.winner.total_low_bytes == device - present(memory.headroom_high_bytes)
    assert plan.winner.total_bytes == device - present(memory.headroom_bytes)
    # Held against what a plan may take, the estimate says the same in the same words.
    left = room_on(
        HardwareSpec(name=f"{NODE.hardware.name} with 10% left free", memory_mib=SMALL.limit_bytes / MIB),
        memory.peak,
        outside,
        memory.unknowns,
    )
    assert left is not None
    assert plan.winner.fit == left.fit == "fits"
    assert plan.verdict[1].endswith(fit_sentence(left, *prediction_errors(memory.unknowns)))
    assert plan.winner.step_ns == step.step_ns
    assert plan.winner.tokens_per_s_per_gpu == pytest.approx(step.tokens_per_s_per_gpu)


def test_what_may_not_fit_wins_only_where_nothing_surely_does(planning: Planning, plan: Plan) -> None:
    assert plan.winner is not None
    limit, sure = SMALL.limit_bytes, winner_of(planning)
    depends = replace(sure, total_low_bytes=limit, total_bytes=limit + 1, step_ns=sure.step_ns // 2)
    never = replace(depends, total_low_bytes=limit + 1)
    assert planning.winner(ranked(SMALL, [never, depends, sure])) is sure
    assert planning.winner(ranked(SMALL, [never, depends])) is None
    assert planning.perhaps(ranked(SMALL, [never, depends])) is depends
    assert planning.perhaps([never]) is None
    assert (room(sure, SMALL).fit, room(depends, SMALL).fit, room(never, SMALL).fit) == (
        "fits",
        "depends",
        "does_not_fit",
    )
    assert fit_sentence(room(depends, SMALL), 0).startswith(
        f"Whether it fits on {NODE.hardware.name} with 10%"
    )


def test_the_commands_to_paste_are_the_winner(plan: Plan, capfd: pytest.CaptureFixture[str]) -> None:
    assert plan.winner is not None
    command = next(recipe.text for recipe in plan.recipes if recipe.tool == "estimate memory")
    ended = call(capfd, *shlex.split(command.replace("\\\n", " "))[1:], "--format", "json")
    assert ended.code == 0
    estimate = json.loads(ended.out)
    assert estimate["peak"]["reserved_bytes"] == plan.winner.reserved_bytes
    assert estimate["policy"] == json.loads(json.dumps(plan.winner.policy))


def test_the_winner_is_the_fastest_that_fits(planning: Planning, plan: Plan) -> None:
    assert plan.winner is not None
    limit = SMALL.limit_bytes
    fitting = [one for one in planning.all() if one.total_bytes <= limit]
    assert any(one.candidate.mesh.pp > 1 for one in fitting)
    assert plan.winner.step_ns == min(one.step_ns for one in fitting)
    assert sum(family.configurations for family in plan.families) == plan.search.configurations
    assert [family.best.name for family in plan.families if family.why == "the winner"] == [plan.winner.name]
    assert plan.search.error.configurations == len(planning.correction.known)


def test_the_search_is_near_the_engine(planning: Planning) -> None:
    """The bound that docs/plan.md states, on a small model whose kernels are all launches."""
    assert planning.fast is not None
    for one in planning.correction.known.values():
        assert one.fast.reserved_bytes == pytest.approx(one.reserved_bytes, rel=0.35)
        assert one.fast.step_ns == pytest.approx(one.step_ns, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (2, {}),
        (8, {}),
        (1, {"grad_accum": 2}),
        (1, {"grad_accum": 3, "reshard": "never"}),
        (1, {"grad_accum": 2, "sync": "each"}),
        (2, {"reduce_dtype": "bfloat16"}),
        (2, {"offload": True}),
    ],
)
def test_the_search_is_near_the_engine_where_kernels_are_long(batch: int, options: dict[str, Any]) -> None:
    policy = PolicySpec(seq_len=2048, batch_size=batch, ac="full", **options)
    request = PlanRequest(
        model=ModelSpec(source="llama3-8b", layers=8),
        cluster=CLUSTER,
        gpus=8,
        global_batch=64,
        policy=PolicySpec(seq_len=2048),
        fixed_policy={"ac": "full"},
    )
    model = build_model(request.model, seq_len=2048)
    wanted = probes(request, [(1, 1)], model)
    measured = ENGINE([(measure, probe) for probe in wanted])
    fast = FastModel(
        request, {(1, 1, str(p.policy.ac)): m for p, m in zip(wanted, measured, strict=True)}, model
    )
    one = Candidate(MeshSpec(dp_shard=8), policy)
    check = Check(model=request.model, candidate=one, cluster=CLUSTER)
    score = fast.score(one)
    assert score.step_ns == pytest.approx(check_step(check).step_ns, rel=0.05)
    assert score.reserved_bytes == pytest.approx(check_memory(check).reserved_bytes, rel=0.1)


def profile_of(planning: Planning) -> BlockProfile:
    """Of blocks on one tensor-parallel rank, nothing recomputed."""
    (made,) = ENGINE([(measure, probes(SMALL, [(1, 1)], planning.model())[0])])
    assert isinstance(made, BlockProfile)
    return made


def test_head_and_loss_lie_outside_of_the_blocks(planning: Planning) -> None:
    """A head of 50,257 x 768: a product forward, and two backward; all else is the blocks' own."""
    profile = profile_of(planning)
    tokens = profile.batch_size * profile.seq_len
    products = [work for work in profile.ends.works if work.kind == "matmul"]
    assert [sorted(work.shape[1:]) for work in products] == [sorted((tokens, 768, 50_257))] * 3
    assert profile.model_flops_ends == 3 * 2 * tokens * 768 * 50_257


def test_a_step_without_long_kernels_takes_as_long_as_the_host(planning: Planning) -> None:
    """Every block's launches forward and backward, those outside, and the update's: the device waits."""
    assert planning.fast is not None
    profile, blocks = profile_of(planning), 4
    host = sum(stretch.host_ns for stretch in (profile.kinds[0].forward, profile.kinds[0].backward))
    score = planning.fast.score(Candidate(MeshSpec(dp_shard=2), SMALL.policy))
    assert score.host_ns > 0
    assert score.step_ns == blocks * host + profile.ends.host_ns + profile.update_host_ns


@pytest.mark.parametrize("objective", ["tokens", "memory"])
def test_the_best_in_another_precision_is_that_of_all_configurations(
    planning: Planning, objective: Any
) -> None:
    """What is not scored in it could not have been the best."""
    assert planning.search is not None
    request = replace(SMALL, objective=objective)
    made = other_precisions(request, planning.search, frozenset())
    assert [(one.option, one.value) for one in made] == [
        ("reduce_dtype", "bfloat16"),
        ("orig_dtype", "bfloat16"),
    ]
    for one in made:
        changes: dict[str, Any] = {one.option: one.value}
        every = [replace(c, policy=replace(c.policy, **changes)) for c in planning.search.scores]
        scores = [planning.correction.apply(c, planning.search.fast.score(c)) for c in every]
        best = ranked(request, scores)[0]
        assert (one.best.step_ns, one.best.total_bytes) == (best.step_ns, best.total_bytes)
        assert one.configurations <= len(every)
    fixed = replace(SMALL, fixed_policy={"reduce_dtype": "bfloat16"})
    assert [one.option for one in other_precisions(fixed, planning.search, frozenset())] == ["orig_dtype"]


def test_another_precision_is_said_and_never_wins(plan: Plan) -> None:
    assert plan.winner is not None
    assert (plan.winner.policy.reduce_dtype, plan.winner.policy.orig_dtype) == ("float32", "float32")
    by_option = {one.option: one for one in plan.precisions}
    half = by_option["orig_dtype"]
    assert half.best.policy.orig_dtype == "bfloat16"
    assert half.take == "--fix orig_dtype=bfloat16"
    assert parse_fixed(half.take.removeprefix("--fix "))[1] == {"orig_dtype": "bfloat16"}
    assert {"reduce_dtype=bfloat16", "orig_dtype=bfloat16"} <= {change.name for change in plan.changes}
    assert all(one.policy.orig_dtype == "float32" for one in plan.pareto)


def test_shards_of_half_the_bytes_take_half_the_states(planning: Planning) -> None:
    """Parameters, two states of AdamW and gradients: 4 x 2 bytes less for each of a rank's elements."""
    assert planning.fast is not None
    mesh = MeshSpec(dp_shard=4)
    whole, half = (
        planning.fast.score(Candidate(mesh, replace(SMALL.policy, orig_dtype=dtype))).reserved_bytes
        for dtype in ("float32", "bfloat16")
    )
    model = planning.model().module
    shard = sum(-(-p.shape[0] // 4) * p[0].numel() for p in model.parameters())
    assert whole - half == pytest.approx(4 * 2 * shard, rel=0.02)


def test_every_configuration_uses_all_gpus_and_the_whole_batch() -> None:
    model = build_model(BIG.model, seq_len=8192)
    found = list(meshes(BIG, model))
    assert len(set(found)) == len(found)
    assert {mesh.world_size for mesh in found} == {64}
    assert {mesh.tp for mesh in found} == {1, 2, 4, 8}
    for mesh in found[::7]:
        made = list(candidates(BIG, model, mesh))
        assert len(set(made)) == len(made)
        for one in made:
            data = mesh.dp_replicate * mesh.dp_shard
            assert one.policy.batch_size * one.policy.grad_accum * data == 128


def test_what_is_fixed_is_not_searched() -> None:
    mesh, policy = parse_fixed("tp=8, ac=every:2, batch-size=2")
    request = replace(BIG, fixed_mesh=mesh, fixed_policy=policy)
    model = build_model(BIG.model, seq_len=8192)
    made = [one for mesh in meshes(request, model) for one in candidates(request, model, mesh)]
    assert made
    assert {(one.mesh.tp, str(one.policy.ac), one.policy.batch_size) for one in made} == {(8, "every:2", 2)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "'tp' is not NAME=VALUE"),
        ("np=8", "no 'np' to fix"),
        ("ac=some", "ac: unknown value 'some'"),
        ("tp=0", "tp=0 must be a positive integer"),
    ],
)
def test_a_wrong_fix_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        parse_fixed(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--model llama3-70c --gpus 8 --global-batch 8", "did you mean llama3-70b"),
        ("--model gpt2 --gpus 8 --global-batch 7 --fix dp_shard=8", "no mesh of 8 GPUs"),
        ("--model gpt2 --gpus 8 --global-batch 8 --fix tp=3", "tp=3 does not divide"),
        ("--model gpt2 --gpus 8", "needs --global-batch"),
        ("--model gpt2 --gpus 8 --global-batch 8 --reserve all", "write for example 10%"),
        ("--model gpt2 --gpus 8 --global-batch 8 --tokens many", "is not a number of tokens"),
        ("--model gpt2 --gpus 8 --global-batch 8 --seq-len 4096", "1024 learned positions"),
        ("--model gpt2 --gpus 8 --max seq-len --min gpus --global-batch 8", "give one of them"),
        ("--model gpt2 --gpus 8 --global-batch 7 --fix tp=1,cp=1,pp=1", "is a multiple of 8"),
        ("--model gpt2 --gpus 8 --global-batch 8 --price nan", "price must be a number above 0"),
        ("--model gpt2 --gpus 8 --global-batch 8 --budget -2", "budget must be a number above 0"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    given: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    length = [] if "--seq-len" in given else ["--seq-len", "64"]
    ended = call(capfd, "plan", "--hardware", "h100", *length, *given.split())
    assert ended.code in (1, 2)
    assert message in ended.err
    assert ended.err.count("\n") <= 3
    assert "Traceback" not in ended.err


def test_a_batch_that_no_mesh_divides_is_refused(planning: Planning) -> None:
    request = replace(SMALL, fixed_policy={"batch_size": 3})
    with pytest.raises(
        ModelError, match=r"a global batch of 8 cannot be divided on any mesh with batch_size"
    ):
        Planning(request=request, engine=ENGINE, fast=planning.fast).find()


def random_scores(count: int) -> list[Scored]:
    chance = random.Random(7)
    made = []
    for index in range(count):
        size, step = chance.randrange(50), chance.randrange(50)
        score = Score(
            reserved_bytes=size, outside_bytes=0, step_ns=step, compute_ns=0, recompute_ns=0,
            exposed_fsdp_ns=0, exposed_parallel_ns=0, host_ns=0, bubble_ns=0, model_flops=0,
        )  # fmt: skip
        candidate = Candidate(MeshSpec(dp_shard=index + 1), PolicySpec())
        made.append(Correction().apply(candidate, score))
    return made


def test_what_the_engine_says_of_one_leaves_the_differences_to_others() -> None:
    """The engine: 2,000 ns where the search had 1,000, of them 100 exposed where it had 300.

    Another one of 1,200 ns with 350 exposed is then 2,400 ns with 100 + 2 x (350 - 300) = 200 exposed, and
    not with 700: kernels take 2 x (850 - 700) = 300 ns more, as the search has it.
    """
    first, other = random_scores(2)
    fast = replace(first.fast, step_ns=1000, exposed_fsdp_ns=300, reserved_bytes=10)
    correction = Correction()
    known = replace(first, fast=fast, reserved_bytes=10, step_ns=2000, exposed_ns=100, confirmed=True)
    correction.learn(known)
    made = correction.apply(other.candidate, replace(fast, step_ns=1200, exposed_fsdp_ns=350))
    assert (made.step_ns, made.exposed_ns, made.bubble_ns, made.host_ns) == (2400, 200, 0, 0)
    assert (made.step_ns - made.exposed_ns) - (known.step_ns - known.exposed_ns) == 300


def test_the_best_that_the_engine_ran_wins_over_a_promise(planning: Planning) -> None:
    assert planning.fast is not None
    assert planning.search is not None
    correction = Correction()
    search = Search(SMALL, planning.fast, correction)
    search.scores = planning.search.scores
    promised, *others = ranked(SMALL, search.all())
    slower = next(one for one in others if one.step_ns > 1.02 * promised.step_ns)
    correction.learn(replace(slower, confirmed=True))
    stopped = Planning(request=SMALL, engine=ENGINE, fast=planning.fast, search=search, correction=correction)
    made = stopped.plan()
    assert made.winner is not None
    assert made.winner.name == name_of(slower.candidate)
    assert made.verdict[-1].startswith("Perhaps faster, ")
    assert made.verdict[-1].endswith("less time by the search, which the engine did not confirm.")
    assert made.equal_frac < 0.02


def test_nothing_on_the_pareto_front_is_beaten_and_everything_else_is() -> None:
    found = random_scores(120)
    front = pareto_front(found)
    for one in found:
        beaten = any(
            other.total_bytes <= one.total_bytes
            and other.step_ns <= one.step_ns
            and (other.total_bytes, other.step_ns) != (one.total_bytes, one.step_ns)
            for other in found
        )
        on_front = any((o.total_bytes, o.step_ns) == (one.total_bytes, one.step_ns) for o in front)
        assert on_front is not beaten


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp_shard=4", "pp=2,dp_shard=2"])
def test_many_micro_batches_take_what_all_of_them_simulated_take(
    mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = MeshSpec.parse(mesh)
    policy = replace(SMALL.policy, grad_accum=6, sync="last", reshard="never")
    full = estimate_step(SMALL.model, spec, policy, NODE)
    whole = step_figures(SMALL.model, spec, policy, NODE)
    assert (whole.step_ns, whole.bubble_ns) == (full.step_ns, full.bubble_ns)
    monkeypatch.setattr(steps, "_MOST_WHOLE", {False: 3, True: 3})
    short = step_figures(SMALL.model, spec, policy, NODE)
    assert short.step_ns == pytest.approx(full.step_ns, rel=0.005)


@pytest.mark.parametrize("sync", ["last", pytest.param("each", marks=pytest.mark.slow)])
def test_micro_batches_in_the_middle_change_no_peak(sync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = replace(SMALL.policy, grad_accum=5, sync=sync)
    model, mesh = replace(SMALL.model, layers=1), MeshSpec(dp_shard=4)
    fewer = estimate_memory(model, mesh, policy)
    monkeypatch.setattr(micro_batches, "CAPTURED_MICRO_BATCHES", 5)
    every = estimate_memory(model, mesh, policy)
    assert fewer.peak.reserved_bytes == every.peak.reserved_bytes
    assert fewer.peak.categories == every.peak.categories
    assert any("3 of 5 micro-batches executed" in note for note in fewer.assumptions)


def test_gradients_kept_unsharded_are_added_up(planning: Planning) -> None:
    """The first micro-batch's bf16 gradients become fp32 (6 bytes an element), which the reduction reads (2
    more); each further one reads bf16 gradients and the sum, and writes it: 10 bytes."""
    assert planning.fast is not None
    mesh, fast = MeshSpec(dp_shard=1), planning.fast

    def compute(sync: Any, grad_accum: int) -> int:
        policy = replace(SMALL.policy, sync=sync, grad_accum=grad_accum, reshard="never")
        return fast.score(Candidate(mesh, policy)).compute_ns

    blocks = dict(build_model(SMALL.model, seq_len=64, orig_dtype="float32").module.layers.named_children())  # type: ignore[union-attr]
    elements = sum(parameter.numel() for parameter in blocks["0"].parameters())

    def moved(each: int) -> int:
        return kernel_ns(Work("copy", "bfloat16", each * elements), SMALL.cluster.hardware)

    added = 2 * moved(10) + moved(6) + moved(2)
    assert compute("last", 3) - compute("each", 3) == pytest.approx(len(blocks) * added, abs=4)


def test_an_interrupt_leaves_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(calls: Sequence[Call]) -> list[Any]:
        if calls[0][0] is measure:
            return ENGINE(calls)
        raise KeyboardInterrupt

    monkeypatch.setattr(workflow, "_Engine", lambda keeps: interrupted)
    made = workflow.plan(SMALL)
    assert not made.search.complete
    assert made.winner is not None
    assert not made.winner.confirmed


def test_a_second_plan_executes_nothing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(workflow, "run_one", lambda call: ENGINE([call])[0])
    monkeypatch.setattr(workflow, "_in_processes", lambda calls: [function(item) for function, item in calls])
    first = workflow.plan(SMALL)
    monkeypatch.setattr(workflow, "_in_processes", lambda calls: [1 / 0 for _ in calls])
    assert workflow.plan(SMALL) == first
    with pytest.raises(ZeroDivisionError):
        workflow.plan(SMALL, use_cache=False)


def test_the_fewest_gpus_and_the_largest_batch() -> None:
    fewest = answer(SMALL, "min gpus", engine=ENGINE)
    assert fewest.answer is not None
    assert fewest.answer.value == 1
    assert fewest.winner is not None
    assert fewest.winner.mesh.world_size == 1


def test_the_longest_sequence_of_a_model_with_so_many_positions() -> None:
    """It is the model's own 1,024 and not a limit of memory; asked with a sequence that is too long."""
    request = replace(
        SMALL,
        model=replace(SMALL.model, layers=1),
        policy=PolicySpec(seq_len=4096),
        fixed_policy={"ac": "full", "reshard": "default"},
        fixed_mesh={"dp_shard": 4},
        global_batch=4,
        tokens=10**9,
    )
    longest = answer(request, "max seq-len", engine=ENGINE)
    assert longest.answer is not None
    assert longest.answer.value == longest.given.seq_len == 1024
    assert "Memory is not the limit: gpt2 has 1024 learned positions" in longest.answer.sentence
    assert "1,000,000,000 tokens take" in longest.answer.sentence


def test_the_smallest_memory_is_told_as_such(planning: Planning) -> None:
    request = replace(SMALL, objective="memory")
    assert planning.fast is not None
    assert planning.search is not None
    search = Search(request, planning.fast, Correction())
    search.scores = planning.search.scores
    made = Planning(request=request, engine=ENGINE, search=search, fast=planning.fast).plan()
    assert made.winner is not None
    assert made.winner.total_bytes == min(family.best.total_bytes for family in made.families)
    assert made.verdict[-1].startswith("Next smallest, ")
    assert made.verdict[-1].endswith("more memory.")


def test_a_budget_is_told_what_it_trains(planning: Planning) -> None:
    request = replace(SMALL, tokens=10**9, budget_gpu_hours=1.0, price_per_gpu_hour=2.0)
    other = Planning(request=request, engine=ENGINE, search=planning.search, fast=planning.fast)
    made = other.plan()
    assert made.winner is not None
    assert made.answer is not None
    hours = made.winner.gpu_hours_per_billion_tokens
    assert made.answer.value == round(1e9 / hours)
    assert made.winner.cost_per_billion_tokens == pytest.approx(2 * hours)


def test_a_configuration_without_a_profile_is_no_answer(planning: Planning) -> None:
    assert isinstance(planning.fast, FastModel)
    with pytest.raises(KeyError):
        planning.fast.score(Candidate(MeshSpec(tp=2), PolicySpec()))


@pytest.mark.slow
def test_refining_tries_what_the_search_does_not_see_and_precision_never_wins(planning: Planning) -> None:
    other = Planning(
        request=SMALL,
        engine=ENGINE,
        search=planning.search,
        fast=planning.fast,
        correction=planning.correction,
    )
    before = other.plan().winner
    other.refine()
    made = other.plan()
    tried = {scored.candidate.policy.forward_prefetch for scored, _ in other.refined}
    assert tried >= {0, 1, 2}
    assert made.winner is not None
    assert before is not None
    assert made.winner.confirmed
    assert made.winner.step_ns <= before.step_ns
    assert (made.winner.policy.reduce_dtype, made.winner.policy.compile) == ("float32", False)
    changed = {change.name: change.best for change in made.changes}
    assert changed["compile=True"].confirmed


class Prefetching:
    """An engine to which a depth of two in forward is the best, and one in backward fits nowhere."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def __call__(self, calls: Sequence[Call]) -> list[Any]:
        return [self._one(function, item.candidate.policy) for function, item in calls]

    def _one(self, function: Any, policy: PolicySpec) -> Any:
        self.ran.append(f"{function.__name__} {policy.forward_prefetch} {policy.backward_prefetch}")
        if function is check_memory:
            return EngineMemory(
                reserved_bytes=1, total_low_bytes=1, total_bytes=1, depends_on=(), error_bytes=0
            )
        if policy.backward_prefetch:
            return ModelError("refused")
        step_ns = 900 if policy.forward_prefetch == 2 else 1100
        return StepFigures(step_ns=step_ns, exposed_ns=0, bubble_ns=0, idle_ns=0, model_flops=1)


def prefetched(planning: Planning, **parts: Any) -> tuple[Planning, Prefetching]:
    """A plan whose winner, on four shards, takes 1000 ns."""
    assert planning.search is not None
    engine = Prefetching()
    candidate = next(c for c in planning.search.scores if c.mesh == MeshSpec(dp_shard=4))
    best = replace(
        winner_of(planning),
        candidate=candidate,
        fast=planning.search.scores[candidate],
        step_ns=1000,
        **parts,
    )
    correction = Correction()
    correction.learn(best)
    search = Search(SMALL, planning.search.fast, correction)
    search.scores = {candidate: best.fast}
    made = Planning(request=SMALL, engine=engine, fast=planning.fast, search=search, correction=correction)
    made.prefetch()
    return made, engine


def test_prefetching_that_the_host_or_unlike_blocks_leave_room_for_is_tried(planning: Planning) -> None:
    made, engine = prefetched(planning, host_ns=100, exposed_ns=0)
    assert engine.ran[:3] == ["check_step 1 0", "check_step 2 0", "check_step 0 2"]
    assert "check_memory 1 0" not in engine.ran  # is not faster
    best = made.plan()
    assert best.winner is not None
    assert (best.winner.policy.forward_prefetch, best.winner.step_ns) == (2, 900)
    assert best.assumptions[-1].endswith("was tried by the engine on the winner")


def test_prefetching_is_not_tried_where_it_begins_nothing_earlier(planning: Planning) -> None:
    made, engine = prefetched(planning, host_ns=0, exposed_ns=500)
    assert engine.ran == []
    assert "was not tried: the host runs ahead" in made.plan().assumptions[-1]
    (one,) = made.correction.known.values()
    assert not prefetching_can_matter(one, kinds=1)
    assert prefetching_can_matter(one, kinds=2)
    pipeline = replace(one.candidate, mesh=MeshSpec(pp=2, dp_shard=2))
    assert prefetches(pipeline, SMALL) == []
    assert prefetches(one.candidate, replace(SMALL, fixed_policy={"forward_prefetch": 0})) == []


def test_a_pipeline_may_win_without_being_fixed_and_comes_in_every_schedule() -> None:
    model = build_model(SMALL.model, seq_len=SMALL.policy.seq_len, orig_dtype=SMALL.policy.orig_dtype)
    mesh = MeshSpec(pp=2, dp_shard=2)
    schedules = {str(one.policy.pp_schedule) for one in candidates(SMALL, model, mesh)}
    assert schedules == {"1f1b", "interleaved:2", "zb1p", "zb1p:2", "zbv"}


def scored(planning: Planning, **parts: Any) -> Scored:
    """The winner with other times, as the engine might have said."""
    fast = replace(winner_of(planning).fast, compute_ns=100, recompute_ns=20, exposed_parallel_ns=0)
    return replace(winner_of(planning), fast=fast, **parts)


def test_reasons_add_up_to_the_difference(planning: Planning) -> None:
    """Of 1000 ns: 150 more exposed, 50 less bubble; 10 % less busy time, a fifth of which is recomputed."""
    winner = scored(planning, step_ns=1000, exposed_ns=0, bubble_ns=100, host_ns=0)
    loser = scored(planning, step_ns=1010, exposed_ns=150, bubble_ns=50, host_ns=0)
    other = replace(loser, candidate=replace(loser.candidate, mesh=MeshSpec(dp_shard=2)))
    assert sum(time_parts(loser).values()) == pytest.approx(1010)
    assert why_it_lost(other, winner, SMALL) == (
        "1.0% slower: +15.0% exposed communication in the node, "
        "-7.2% kernels, -5.0% pipeline bubble, -1.8% recomputed activations"
    )


def test_the_simplest_is_about_as_fast_and_has_fewer_kinds_of_parallelism(planning: Planning) -> None:
    def one(mesh: str, step_ns: int, total_bytes: int = 1) -> Scored:
        made = scored(planning, step_ns=step_ns, total_bytes=total_bytes, confirmed=False)
        return replace(made, candidate=replace(made.candidate, mesh=MeshSpec.parse(mesh)))

    best, hybrid = one("pp=2,dp_shard=1,tp=2", 1000), one("dp_replicate=2,dp_shard=2", 1030)
    plain, slow = one("dp_shard=4", 1045), one("dp_shard=2,dp_replicate=2", 1060)
    tensor, large = one("dp_shard=2,tp=2", 1001), one("dp_shard=4", 1001, total_bytes=1 << 60)
    assert simplest([best, tensor, hybrid, plain, slow, large], best, SMALL) is plain
    assert simplest([best, tensor, slow], best, SMALL) is tensor
    assert simplest([plain, hybrid], plain, SMALL) is None


def test_a_difference_within_the_searchs_error_is_called_equal(planning: Planning) -> None:
    winner = scored(planning, step_ns=1000, exposed_ns=0, confirmed=True)
    loser = replace(winner, step_ns=1042, exposed_ns=42, confirmed=False)
    loser = replace(loser, candidate=replace(loser.candidate, mesh=MeshSpec(dp_shard=2)))
    assert why_it_lost(loser, winner, SMALL, 0.06).startswith("equal within the search's error of 6.0%, 4.2%")
    assert why_it_lost(loser, winner, SMALL, 0.03).startswith("4.2% slower: ")
    engine = replace(loser, confirmed=True)
    assert why_it_lost(engine, winner, SMALL, 0.06).startswith("4.2% slower: ")


def test_the_parts_of_every_reason_add_up(plan: Plan) -> None:
    told = [family.why for family in (*plan.families, *plan.changes) if "slower:" in family.why]
    assert told
    for why in told:
        whole, _, parts = why.partition("% slower: ")
        assert sum(float(part.split("%")[0]) for part in parts.split(", ")) == pytest.approx(
            float(whole), abs=0.06
        )


def test_a_plan_of_a_trainers_file_keeps_its_batch_and_prints_the_change(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text(
        """
        [model]
        name = "llama3"
        flavor = "8B"
        [training]
        local_batch_size = 2
        seq_len = 512
        [parallelism]
        tensor_parallel_degree = 2
        [activation_checkpoint]
        mode = "full"
        """
    )
    described = describe(trainer_files=[file], given={"world_size": 8}, policy={})
    given = given_of(described)
    assert (given.model.source, given.gpus, given.global_batch) == ("llama3-8b", 8, 8)
    assert given.policy.seq_len == 512
    without_mesh = describe(given={"model": "llama3-8b", "world_size": 16}, policy={"pp_schedule": "zbv"})
    assert "--pp-schedule" in given_of(without_mesh).notes[0], "pipelines are searched, too"
    other = without_mesh.changed({"mesh": {"dp_shard": 4}, "policy": {"pp_schedule": "1f1b"}})
    assert other.spec().mesh.world_size == 4, "another mesh has a size of its own"
    assert (given.policy.ac, given.policy.optimizer_impl) == ("none", "fused")
    assert plan.winner is not None
    changed = {**plan.winner.policy, "batch_size": 4, "ac": "op", "reshard": "default"}
    policy = type(plan.winner.policy)(changed)
    mesh = replace(plan.winner.mesh, dp_shard=8, dp_replicate=1, tp=1, cp=1, pp=1, ep=1)
    made = replace(plan, winner=replace(plan.winner, mesh=mesh, policy=policy))
    change = in_the_file(made, described, given.notes, []).recipes[0]
    assert change.tool == "change to train.toml"
    lines = change.text.splitlines()
    assert "parallelism.tensor_parallel_degree = 1  # was 2" in lines
    assert "training.local_batch_size = 4  # was 2" in lines
    assert any(line.startswith("# ac = op") for line in lines)


@pytest.mark.parametrize(("mesh", "runs"), [("dp_shard=4", True), ("pp=2,dp_shard=2", False)])
def test_a_recipe_is_given_only_for_a_tool_that_runs_the_mesh(
    planning: Planning, mesh: str, runs: bool
) -> None:
    candidate = replace(winner_of(planning).candidate, mesh=MeshSpec.parse(mesh))
    assert ("accelerate" in {recipe.tool for recipe in recipes(SMALL, candidate)}) is runs


@pytest.mark.parametrize("brief", [True, False])
def test_a_narrow_terminal_shows_the_configuration_of_every_row(plan: Plan, brief: bool) -> None:
    text = str(RENDERERS["text"].render(build(plan), RenderOptions(width=80, brief=brief)))
    assert max(map(len, text.splitlines())) <= 80
    table = text[text.index("\nThe best of each family") :].split("\n\n")[0]
    rows = [line for line in table.splitlines() if any(line.startswith(one.name) for one in plan.families)]
    words = set(table.split())
    assert len(rows) == len(plan.families) or (brief and len(rows) >= 3)
    for family in plan.families[: len(rows)]:
        assert words >= set(family.best.name.split())


@pytest.mark.parametrize("width", [80, 110])
def test_the_full_tables_show_why_and_what_to_add(plan: Plan, width: int) -> None:
    text = str(RENDERERS["text"].render(build(plan), RenderOptions(width=width)))
    families, precisions = (
        set(text[text.rindex(f"\n{title}") :].split("\n\n")[0].split())
        for title in ("The best of each family", "The best in another precision")
    )
    for family in plan.families[:8]:
        assert families >= {"why", *family.why.split()}
    for one in plan.precisions:
        assert precisions >= {"why", *one.why.split(), *one.take.split()}


def test_a_sentence_links_to_the_row_of_the_configuration_that_it_names() -> None:
    plan = small_plan()
    document = build(plan)
    (table,) = next(one for one in document.sections if one.anchor == "families").blocks
    assert isinstance(table, Table)
    at = [column.name for column in table.columns].index("configuration")
    assert len(document.verdict) == 3
    for line in document.verdict:
        (link,) = document.places()[line]
        section, name, row = link.target.split("-")
        assert (section, name, link.label) == ("families", "families", "the best of each family")
        found = table.rows[int(row)][at]
        named = [row[at] for row in table.rows if str(row[at]) in line]
        assert found in named or (not named and found == present(plan.winner).name)


def test_a_cost_has_its_currency(plan: Plan) -> None:
    named = build(replace(plan, given=replace(plan.given, currency="EUR")))
    assert "EUR a billion tokens" in [figure.label for figure in named.numbers]
    headers = [column.label for table in named.tables().values() for column in table.columns]
    assert any(header.startswith("EUR per") for header in headers)
    unnamed = build(replace(plan, given=replace(plan.given, currency=None)))
    assert "(currency of --price) a billion tokens" in [figure.label for figure in unnamed.numbers]


def test_a_plan_is_one_screen_that_names_the_configurations() -> None:
    plan = small_plan()
    for width in (80, 100):
        text = RENDERERS["text"].render(build(plan), RenderOptions(width=width, brief=True))
        assert isinstance(text, str)
        assert len(text.splitlines()) <= 40
        best = plan.families[0].best.name
        assert all(part in text for part in best.replace(",", "").split())
        assert "not shown at this width" not in text
