"""Known mistakes in how FSDP2 is set up, and what looks like one and is none, from manifests made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from support.results import trace_analysis
from support.sharded_groups import sharded_group

from fsdp2prof.analyzers.sharding import check
from fsdp2prof.analyzers.sharding.check import check_run, check_structure
from fsdp2prof.analyzers.sharding.mistakes import find_mistakes
from fsdp2prof.analyzers.sharding.run_evidence import OwnCollectives, RunEvidence, own_collectives_of
from fsdp2prof.manifest import (
    OptimizerInfo,
    ParamGroupInfo,
    ProcessGroupInfo,
    RankManifest,
    RootInfo,
    RunInfo,
    StepInfo,
    UnshardedInfo,
)
from fsdp2prof.results.finding import Finding
from fsdp2prof.run_directory import RunDirectory


def found(
    groups: Sequence[ParamGroupInfo],
    *,
    unsharded: Sequence[UnshardedInfo] = (),
    wrappers: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    own: OwnCollectives | None = OwnCollectives([[]]),  # noqa: B008
    inputs: Sequence[list[str | None]] = ([], []),
    process_groups: Sequence[ProcessGroupInfo] = (),
) -> dict[str, list[Finding]]:
    """Findings by name, of two ranks that say the same."""
    manifests = {
        rank: RankManifest(
            rank=rank,
            world_size=2,
            param_groups=list(groups),
            unsharded=list(unsharded),
            environment=environment or {},
            inputs=[inputs[rank]],
            process_groups=list(process_groups),
        )
        for rank in range(2)
    }
    info = RunInfo(world_size=4 if process_groups else 2, wrappers=list(wrappers))
    findings = find_mistakes(RunEvidence(info, manifests, lambda: own))
    return {name: [one for one in findings if one.id == name] for name in {one.id for one in findings}}


def alone(root: int) -> ParamGroupInfo:
    """The only group of a root: four parameters of one shape."""
    group = sharded_group("", [4, 4], ranks=2, rows=2, device_type="cpu", process_group="1")
    (first,) = group.parameters
    group.parameters = [msgspec.structs.replace(first, fqn=f"{n}.weight") for n in range(4)]
    group.root = group.comm_context = root
    return group


def stray() -> UnshardedInfo:
    return UnshardedInfo(
        kind="optimizer",
        fqn="AdamW[0]",
        root=-1,
        shape=[4],
        dtype="float32",
        nbytes=16,
        requires_grad=True,
        has_gradient=True,
    )


@pytest.mark.parametrize(("distinct", "missing"), [(16, 16), (32, 0), (None, None)])
def test_parameters_that_no_loss_uses_are_named(distinct: int | None, missing: int | None) -> None:
    """Four parameters of 16 elements over two ranks: 32 elements a rank, in two reductions."""
    group = msgspec.structs.replace(alone(0), reductions=2, reduced_numel=32, distinct_numel=distinct)
    one = found([group]).get("parameters_without_gradient")
    assert (None if one is None else one[0].evidence["elements"]) == (2 * missing if missing else None)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_teacher_need_not_share_the_students_streams(frozen: bool) -> None:
    teacher = msgspec.structs.replace(alone(1), requires_grad=not frozen)
    assert ("streams_not_shared" in found([alone(0), teacher])) is not frozen


def test_blocks_without_a_root_are_not_models_wrapped_at_their_root_alone() -> None:
    """Three blocks wrapped and nothing around them: the optimizer holds what is left over."""
    blocks = found([alone(root) for root in range(3)], unsharded=[stray()])
    assert set(blocks) == {"unreduced_parameters", "streams_not_shared"}
    assert [one.severity for one in blocks["unreduced_parameters"]] == ["high"]
    models = found([alone(root) for root in range(2)])
    assert len(models["root_only"]) == 2


def test_gradients_that_another_wrapper_may_reduce_are_to_be_looked_at() -> None:
    (one,) = found([alone(0)], unsharded=[stray()], wrappers=["DistributedDataParallel"])[
        "unreduced_parameters"
    ]
    assert one.severity == "medium"
    assert "unless DistributedDataParallel reduces them" in one.message


def test_variables_of_nccl_are_named_without_a_gpu() -> None:
    (one,) = found([alone(0)], environment={"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO"})["nccl_overridden"]
    assert (one.severity, one.evidence["variables"]) == ("info", {"NCCL_ALGO": "Ring"})
    assert "nccl_overridden" not in found([alone(0)], environment={"NCCL_DEBUG": "INFO"})


@pytest.mark.parametrize(
    ("steps", "exchanges", "severity"),
    [
        ([[4], [4, 1]], False, None),  # one for each gradient, beside a metric's
        ([[9], [9]], False, None),  # one for both together
        ([[4, 5], [4, 5, 1]], False, None),
        ([[1], [1]], False, "high"),  # the metric's alone
        ([[4, 5], []], False, "high"),  # one step without
        ([[1], [1]], True, "info"),  # experts of each rank need none
        ([[6, 3], [6, 3]], False, "medium"),  # as much in sum, cut in another way
        (None, False, "medium"),  # no trace
    ],
)
def test_gradients_that_the_script_reduces_itself(
    steps: list[list[int]] | None, exchanges: bool, severity: str | None
) -> None:
    """Parameters of 4 and 5 elements in ignored_params."""
    left_out = [msgspec.structs.replace(stray(), kind="parameter", fqn=f"p{n}", shape=[n]) for n in (4, 5)]
    if steps == [[4], [4, 1]]:
        left_out = left_out[:1]
    own = None if steps is None else OwnCollectives(steps, exchanges)
    named = found([alone(0)], unsharded=left_out, own=own).get("unreduced_parameters", [])
    assert [one.severity for one in named] == ([] if severity is None else [severity])


def test_a_frozen_base_in_fp32_is_named_only_if_it_computes_in_half_precision() -> None:
    base, adapter = (
        sharded_group(name, [rows, 4], ranks=2, rows=rows // 2) for name, rows in (("a", 90), ("b", 10))
    )
    base.parameters = [msgspec.structs.replace(base.parameters[0], requires_grad=False)]
    assert "frozen_in_fp32" not in found([base, adapter])
    base.param_dtype = "bfloat16"
    assert "frozen_in_fp32" in found([base, adapter])


def test_bytes_of_a_group_that_tensor_parallelism_cut_are_of_its_part() -> None:
    """Four parameters of 4 x 4, of which two ranks of tensor parallelism hold two columns each."""
    group = alone(0)
    group.parameters = [
        msgspec.structs.replace(one, local_shape=[2, 2], padded_local_shape=[2, 2], tensor_parallel="x")
        for one in group.parameters
    ]
    (root_only,) = found([group])["root_only"]
    assert root_only.evidence["gathered_bytes"] == 4 * (4 * 2) * 4


@pytest.mark.parametrize(("units", "columns", "named"), [(39, 8, True), (15, 8, False), (39, 70_000, False)])
def test_many_tiny_units_are_named(units: int, columns: int, named: bool) -> None:
    """Units of 8 x 8 or 8 x 70,000 floats (2.1 MiB); fifteen are as few as a small model has blocks."""
    groups = [sharded_group(f"layers.{i}", [8, columns], ranks=2, rows=4) for i in range(units)]
    root = sharded_group("", [8, 8], ranks=2, rows=4)
    fine = found([root, *groups]).get("wrapping_too_fine", [])
    assert [(one.severity, one.evidence["units"]) for one in fine] == ([("low", 39)] if named else [])


@pytest.mark.parametrize(("steps", "said"), [(0, "no rank finished its first step"), (2, "older version")])
def test_a_run_that_ended_before_its_first_step_is_not_called_an_old_one(steps: int, said: str) -> None:
    """What no group shards is seen after a step: without one nobody can say."""
    taken = [StepInfo(step=i, start_ns=0, duration_ns=1) for i in range(steps)]
    manifests = {
        rank: RankManifest(rank=rank, world_size=2, param_groups=[alone(0)], unsharded=None, steps=taken)
        for rank in range(2)
    }
    run = RunDirectory(path=Path("run"), info=RunInfo(state="crashed", world_size=2), ranks=())
    (row,) = [one for one in check_run(run, manifests).checks if one.name == "unsharded"]
    assert row.state == "unknown"
    assert said in row.said


@pytest.mark.parametrize(("rows", "named"), [(200_000, True), (2_000, False)])
def test_a_root_that_outweighs_all_units_is_named_with_its_modules(rows: int, named: bool) -> None:
    """An embedding of 200,000 x 8 floats (6.1 MiB) over blocks of 4.9 MiB together; or one of 62 KiB."""
    root = sharded_group("", [rows, 8], ranks=2, rows=rows // 2)
    root.parameters = [msgspec.structs.replace(root.parameters[0], fqn="embedding.weight")]
    blocks = [sharded_group(f"layers.{i}", [80_000, 8], ranks=2, rows=40_000) for i in range(2)]
    told = found([root, *blocks]).get("root_holds_most", [])
    assert [one.change for one in told] == (
        ["Apply fully_shard to embedding before the root."] if named else []
    )


@pytest.mark.parametrize(
    ("rows", "wrapped", "named"),
    [(80_000, 3, ["layers.3"]), (8, 3, []), (80_000, 0, [])],
    ids=["a block like the others", "a small module", "no block is wrapped"],
)
def test_a_block_that_is_not_wrapped_as_its_siblings_are(rows: int, wrapped: int, named: list[str]) -> None:
    root = sharded_group("", [rows, 8], ranks=2, rows=rows // 2)
    root.parameters = [
        msgspec.structs.replace(root.parameters[0], fqn=name)
        for name in ("head.weight", *(f"layers.{i}.up.weight" for i in range(wrapped, 4)))
    ]
    blocks = [sharded_group(f"layers.{i}", [80_000, 8], ranks=2, rows=40_000) for i in range(wrapped)]
    told = found([root, *blocks]).get("blocks_not_wrapped", [])
    assert [one.evidence["blocks"] for one in told] == ([named] if named else [])


def test_the_last_layer_of_a_sequential_may_stay_in_the_root() -> None:
    layers = [sharded_group(str(index), [8, 8], ranks=2, rows=4) for index in range(3)]
    root = sharded_group("", [8, 8], ranks=2, rows=4)
    root.parameters = [msgspec.structs.replace(root.parameters[0], fqn="3.weight")]
    assert "blocks_not_wrapped" not in found([root, *layers])


@pytest.mark.parametrize(
    ("syncs", "reshards", "named"), [(0, 2, True), (1, 2, False), (None, 2, False), (0, 0, False)]
)
def test_gradients_that_no_backward_reduces_are_named(syncs: int | None, reshards: int, named: bool) -> None:
    """A root without backward in the captured steps, as a critic that is only asked, is left alone."""
    manifest = RankManifest(
        param_groups=[alone(0)],
        roots=[RootInfo(root=0, micro_batches=2, gradient_syncs=syncs, reshards=reshards)],
    )
    told = find_mistakes(RunEvidence(RunInfo(world_size=1), {0: manifest}))
    assert ("gradients_never_reduced" in {one.id for one in told}) is named


@pytest.mark.parametrize(
    ("syncs", "unreduced", "named"), [(1, 1, True), (1, 0, False), (0, 2, False), (1, None, False)]
)
def test_gradients_that_an_earlier_backward_reduces_are_named(
    syncs: int, unreduced: int | None, named: bool
) -> None:
    roots = [RootInfo(root=0, micro_batches=4, gradient_syncs=syncs, unreduced=unreduced, reshards=4)]
    manifest = RankManifest(param_groups=[alone(0)], roots=roots)
    told = find_mistakes(RunEvidence(RunInfo(world_size=1), {0: manifest}))
    assert ("gradients_reduced_too_early" in {one.id for one in told}) is named


def test_a_run_that_crashed_in_its_first_forward_names_the_error() -> None:
    evidence = RunEvidence(RunInfo(world_size=1), {0: RankManifest(error="AttributeError: no bias")})
    (found,) = check_structure(evidence)[1]
    assert found.message == "No rank described a parameter group: they ended with AttributeError: no bias."


def test_a_run_without_any_rank_fails() -> None:
    run = RunDirectory(path=Path("run"), info=RunInfo(state="complete"), ranks=())
    checked = check_run(run, {})
    assert not checked.passed
    assert [one.id for one in checked.findings] == ["nothing_sharded"]


@pytest.mark.parametrize(
    ("count", "begins"),
    [(1, "1 parameter is sharded over 1 rank"), (2, "2 parameters are sharded over 1 rank")],
)
def test_a_verdict_counts_parameters(count: int, begins: str) -> None:
    group = alone(0)
    group.parameters = group.parameters[:count]
    evidence = RunEvidence(RunInfo(world_size=1), {0: RankManifest(world_size=1, param_groups=[group])})
    (said,) = check._verdict(evidence, [], [], [])
    assert said.startswith(begins)


def test_all_reduces_of_the_script_are_counted_by_step() -> None:
    """Two of two float32 in the first step of rank 0; those of layers and other ranks are left out."""
    analysis = trace_analysis()
    first = analysis.ranks[0].steps[0].step
    one = replace(
        analysis.groups[0], op="all_reduce", rank=0, step=first, dtype="float32", count=2, payload_bytes=16
    )
    rows = [replace(one, fqn=None), one, replace(one, fqn=None, rank=1)]
    found = own_collectives_of(replace(analysis, groups=rows))
    assert not found.exchanges
    assert found.all_reduces == [[2, 2], *[[]] * (len(analysis.ranks[0].steps) - 1)]
    exchanged = [*rows, replace(one, fqn=None, op="all_to_all")]
    assert own_collectives_of(replace(analysis, groups=exchanged)).exchanges


@pytest.mark.parametrize(
    ("variable", "named"),
    [({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, True), ({"CUDA_LAUNCH_BLOCKING": "1"}, False)],
)
def test_debugging_of_collectives_is_named_on_a_cpu_too(variable: dict[str, str], named: bool) -> None:
    assert ("debugging_variables" in found([alone(0)], environment=variable)) is named


def test_parameters_that_an_optimizer_lost_to_fully_shard_are_named_as_they_are_now() -> None:
    """Its groups were made before fully_shard: it holds a parameter of no module, and lacks its successor."""
    group = alone(0)
    group.parameters[0] = msgspec.structs.replace(group.parameters[0], optimized=False)
    dead = msgspec.structs.replace(stray(), has_gradient=False)
    (one,) = found([group], unsharded=[dead])["optimizer_before_fully_shard"]
    assert "are in no optimizer and never change (0.weight)" in one.message


@pytest.mark.parametrize(
    ("inputs", "group", "named"),
    [
        ((["a", "b"], ["a", "b"]), None, True),
        ((["a", "b"], ["a", "c"]), None, False),
        ((["a", "a"], ["a", "a"]), None, False),  # one batch, again and again
        ((["a", None], ["a", None]), None, False),
        ((["a", "b"], ["a", "b"]), "tp", False),
    ],
)
def test_ranks_that_read_the_same_data_are_named(
    inputs: tuple[list[str | None], list[str | None]], group: str | None, named: bool
) -> None:
    """FSDP shards over group 1, alone or beside another parallelism."""
    groups = [
        ProcessGroupInfo(name=name, desc="", backend="gloo", ranks=[0, 1]) for name in ("1", group) if name
    ]
    assert ("same_inputs" in found([alone(0)], inputs=inputs, process_groups=groups)) is named


def test_ranks_that_fsdp_does_not_average_over_may_read_the_same_data() -> None:
    """All ranks are of one tensor-parallel group; each is FSDP's only one."""
    assert "same_inputs" not in found([alone(0)], inputs=(["a", "b"], ["a", "b"]))


@pytest.mark.parametrize(
    ("rates", "traced", "named"),
    [
        (([1e-3, 0.1], [1e-3, 0.1]), (4, 4), False),
        (([1e-3, 0.1], [0.1, 1e-3]), (4, 4), False),  # optimizers have no order
        (([1e-3, 0.1], [1e-3, 0.2]), (4, 4), True),
        (([1e-3, 0.1], [1e-3, 0.2]), (4, 5), False),  # a schedule between the two steps
        (([1e-3, None], [1e-3, 0.2]), (4, 4), False),
        (([1e-3], [1e-3, 0.2]), (4, 4), False),
    ],
)
def test_ranks_with_learning_rates_of_their_own_are_named(
    rates: tuple[list[float | None], list[float | None]], traced: tuple[int, int], named: bool
) -> None:
    """Only of ranks that were described after the same steps."""
    manifests = {
        rank: RankManifest(
            rank=rank,
            param_groups=[alone(0)],
            process_groups=[ProcessGroupInfo(name="1", desc="", backend="gloo", ranks=[0, 1])],
            optimizers=[
                OptimizerInfo(
                    class_name="SGD", state_bytes=0, param_groups=2, parameters=1, learning_rates=rates[rank]
                )
            ],
            steps=[StepInfo(step=traced[rank], start_ns=0, duration_ns=1, kind="traced")],
        )
        for rank in range(2)
    }
    findings = find_mistakes(RunEvidence(RunInfo(world_size=2), manifests))
    said = [one.message for one in findings if one.id == "learning_rates_differ"]
    assert len(said) == named
    assert not named or "0.1 on rank 0, 0.2 on rank 1" in said[0]
