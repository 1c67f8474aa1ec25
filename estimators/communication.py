"""Bytes and counts of every collective of a training step that has not happened.

Only tensor parallelism that no formula describes is executed for it, on tensors without data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from fsdp2prof.estimators.communication_summary import summarise
from fsdp2prof.estimators.config.choices import ChunkedBackward, dtype_bytes
from fsdp2prof.estimators.config.extra_models import ExtraModel
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.description import mesh_as_given, model_as_built, policy_as_given
from fsdp2prof.estimators.execution.forward_flow import Flow, flow_of
from fsdp2prof.estimators.execution.second_models import policy_of_others, with_role
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.losses import head_of
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.sharding.groups import ParameterGroup, freeze, parameter_groups
from fsdp2prof.estimators.sharding.wrapping import reshard_rule
from fsdp2prof.estimators.simulate.program import Program
from fsdp2prof.estimators.techniques.pipeline_order import gathered_at, order_of
from fsdp2prof.estimators.techniques.registry import check_parallelism, notes_of, part_of
from fsdp2prof.estimators.techniques.weight_sync import WeightSyncSpec, weight_sync
from fsdp2prof.estimators.timeline.capture import capture_stitched
from fsdp2prof.estimators.timeline.costs import add_executed
from fsdp2prof.estimators.traffic import (
    Ledger,
    add_parallel_traffic,
    counted_by_execution,
)
from fsdp2prof.results.estimate import CommEstimate
from fsdp2prof.schedule import Axis, Event, ScheduledGroup, steady_step

_POST_FORWARD_DIM = "dim_1"
"""torch's name for the inner dimension of the unnamed mesh of an integer ``reshard_after_forward``."""


def estimate_comm(
    model: ModelSpec, mesh: MeshSpec, policy: PolicySpec, sync: WeightSyncSpec | None = None
) -> CommEstimate:
    """Estimate one rank's collectives in a steady training step, exactly for FSDP and HSDP.

    ``sync`` are inference engines that are given the weights.
    Raises ``ModelError`` for a model, mesh or policy that cannot be built or is not modelled.
    """
    built = _build(model, policy)
    check_parallelism(built, mesh, policy)
    executed = None
    if counted_by_execution(built, mesh, policy):
        executed = capture_stitched(model, mesh, replace(policy, seq_len=policy.seq_len // mesh.cp), built)
    return estimate_built(built, mesh, policy, sync, executed=executed)


def estimate_built(
    built: Model,
    mesh: MeshSpec,
    policy: PolicySpec,
    sync: WeightSyncSpec | None = None,
    *,
    executed: Program | None = None,
) -> CommEstimate:
    """:func:`estimate_comm` of a model that is built already; it is frozen and cut to its stage in place.

    ``executed`` is its step, where tensor parallelism is not known by formula.
    """
    check_parallelism(built, mesh, policy)
    built = part_of(built, mesh, policy)
    freeze(built, policy)
    groups = parameter_groups(built, mesh, policy)
    flow = _flow(groups, built, mesh, policy)
    groups = tuple(_without_gradients(group, flow) for group in groups)
    ledger = Ledger()
    scheduled = _scheduled(groups, flow, mesh)
    if isinstance(policy.loss, ChunkedBackward):
        scheduled = _head_apart(scheduled, groups, built, policy, ledger)
    ledger.add_events(
        steady_step(
            scheduled,
            micro_batches=policy.grad_accum if mesh.pp == 1 else policy.pp_runs,
            sync=policy.sync if mesh.pp == 1 else "each",
            forwards=2 if policy.runs_itself_before else 1,
        )
    )
    rule = reshard_rule(built, policy)
    ledger.add_events(_gathered_again(scheduled, built, mesh, policy))
    notes = [*_notes(policy, flow), *built.all_notes, *([] if rule is None else [rule])]
    notes += add_parallel_traffic(ledger, built, groups, mesh, policy)
    if executed is not None:
        plan = built.tensor_parallel
        what = "expert parallelism" if mesh.tp == 1 or plan is None else plan.note(policy.sequence_parallel)
        notes.append(f"{what}; counted by executing a step")
        add_executed(ledger, executed)
    notes += notes_of("communication", mesh, policy)
    for root, extra in enumerate(policy.other_models, start=1):
        _add_second_model(ledger, extra, root, mesh, policy)
    if policy.other_models:
        notes.append(
            "what the forward of a frozen model keeps gathered (its root) is gathered in the first step only"
        )
    _add_step_end(ledger, groups, mesh, policy, clips=executed is None)
    estimate = summarise(
        ledger.to_rows(),
        model=model_as_built(built, built.parameters),
        mesh=mesh_as_given(mesh),
        policy=policy_as_given(policy),
        assumptions=notes,
    )
    return (
        estimate if sync is None else replace(estimate, weight_sync=weight_sync(groups, mesh, policy, sync))
    )


def _add_second_model(
    ledger: Ledger, extra: ExtraModel, root: int, mesh: MeshSpec, policy: PolicySpec
) -> None:
    """Add the collectives of a model that runs forward only."""
    frozen = policy_of_others(policy)
    built = with_role(_build(ModelSpec(source=extra.source), frozen), extra, mesh.tp)
    check_parallelism(built, mesh, frozen)
    model = part_of(built, mesh, frozen)
    model.module.requires_grad_(False)
    groups = parameter_groups(model, mesh, frozen)
    scheduled = scheduled_groups(groups, model, mesh, frozen, root=root)
    ledger.add_events(steady_step(scheduled, micro_batches=policy.grad_accum, trains=False))
    trained = Ledger()
    add_parallel_traffic(trained, model, groups, mesh, frozen)
    ledger.add_forward_of(trained, root)


def scheduled_groups(
    groups: Sequence[ParameterGroup], model: Model, mesh: MeshSpec, policy: PolicySpec, root: int = 0
) -> list[ScheduledGroup]:
    """Describe parameter groups for the schedule, in post-forward order."""
    return _scheduled(groups, _flow(groups, model, mesh, policy), mesh, root)


def _flow(groups: Sequence[ParameterGroup], model: Model, mesh: MeshSpec, policy: PolicySpec) -> Flow:
    """The modules that backward reaches: all, unless some are frozen or may be unused.

    A pipeline's schedule ends the backward of every group itself.
    """
    fqns = sorted((group.fqn for group in groups), key=lambda fqn: fqn == "")  # the root ends last
    trained = {parameter.requires_grad for group in groups for parameter in group.parameters}
    if mesh.pp == 1 and (len(trained) > 1 or (policy.images and any(trained))):
        return flow_of(model, fqns, policy)
    return Flow(has_backward=dict.fromkeys(fqns, True))


def _without_gradients(group: ParameterGroup, flow: Flow) -> ParameterGroup:
    """A group whose parameters that get no gradient count as frozen: nothing of them is reduced."""
    return replace(
        group,
        parameters=tuple(
            replace(parameter, requires_grad=False) if parameter.fqn in flow.without_gradient else parameter
            for parameter in group.parameters
        ),
    )


def _scheduled(
    groups: Sequence[ParameterGroup], flow: Flow, mesh: MeshSpec, root: int = 0
) -> list[ScheduledGroup]:
    shard = Axis(size=mesh.fsdp_size, mesh_dim=mesh.fsdp_dim)
    replicate = Axis(size=mesh.dp_replicate, mesh_dim="dp_replicate")
    expert_shard = Axis(size=mesh.expert_fsdp_size, mesh_dim="efsdp")
    traffic = [
        ScheduledGroup(
            root=root,
            fqn=group.fqn,
            gather_bytes=sum(p.padded_numel * dtype_bytes(p.gather_dtype) for p in group.parameters),
            gather_dtype=_one_dtype(p.gather_dtype for p in group.parameters),
            reduce_bytes=dtype_bytes(group.gradient_dtype)
            * sum(p.padded_numel for p in group.parameters if p.requires_grad),
            reduce_dtype=group.gradient_dtype,
            reshard=group.reshard_after_forward,
            has_backward=flow.has_backward.get(group.fqn, False),
            shard=expert_shard if group.is_expert else shard,
            reduce=expert_shard if group.is_expert else shard,
            replicate=replicate,
            post_forward=Axis(size=int(group.reshard_after_forward), mesh_dim=_POST_FORWARD_DIM),
            forward_prefetch=group.forward_prefetch,
            backward_prefetch=group.backward_prefetch,
            unshard_in_backward=group.unshard_in_backward,
        )
        for group in groups
    ]
    return [group for fqn in flow.has_backward for group in traffic if group.fqn == fqn]


def _gathered_again(
    scheduled: Sequence[ScheduledGroup], model: Model, mesh: MeshSpec, policy: PolicySpec
) -> Iterator[Event]:
    """Yield gathers of stages that the schedule of a pipeline resharded for others, after the first."""
    if len(model.stages) < 2 or not policy.rules.pipelines_gather_stages:
        return
    order = order_of(policy.pp_schedule, mesh.pp, policy.pipelined)[policy.pp_stage]
    counts = Counter(stage for _, fetched in gathered_at(order) for stage in fetched)
    start, block_of = 0, {fqn: at for at, fqn in enumerate(model.blocks)}
    for stage, part in zip(sorted(counts), model.stages, strict=True):
        held = range(start, start + part.blocks)
        start += part.blocks
        for group in scheduled:
            block = next((at for fqn, at in block_of.items() if f"{group.fqn}.".startswith(f"{fqn}.")), None)
            is_held = part.is_first or part.is_last if block is None else block in held
            if is_held:
                yield from [Event("all_gather", group, "forward")] * ((counts[stage] - 1) * policy.pp_runs)


def _head_apart(
    scheduled: list[ScheduledGroup],
    groups: Sequence[ParameterGroup],
    built: Model,
    policy: PolicySpec,
    ledger: Ledger,
) -> list[ScheduledGroup]:
    """Groups where ``loss=chunked-backward`` gathers and reduces the head after the model's forward.

    A head that shares a unit, as in torchtitan's ``norm+output``, is gathered for the norm, for the
    chunks, and for the norm's backward; its own gradients are reduced before the others of its unit. After
    the chunks of a separate head, FSDP's end of a backward reshards all parameters that forward had kept,
    and reduces the gradients that earlier micro-batches accumulated.
    """
    name = f"{head_of(built.module)}.weight"
    weight = built.module.get_parameter(name)
    head = next(fqn for fqn, parameter in built.module.named_parameters() if parameter is weight)
    own = next(group for group in groups if any(p.fqn == head for p in group.parameters))
    waits = policy.sync == "last" and policy.grad_accum > 1
    if len(own.parameters) == 1:
        others = [group for group in scheduled if waits and group.fqn != own.fqn]
        ledger.add_events(_reductions(others))
        return [replace(group, reshard=group.fqn != own.fqn) for group in scheduled]
    at = next(index for index, group in enumerate(scheduled) if group.fqn == own.fqn)
    unit = scheduled[at]
    size = dtype_bytes(unit.reduce_dtype) * next(p.padded_numel for p in own.parameters if p.fqn == head)
    first = replace(unit, reduce_bytes=unit.reduce_bytes if waits else size)
    ledger.add_events(_reductions([first] * (policy.grad_accum if policy.sync == "each" else 1)))
    ledger.add_events([Event("all_gather", unit, "forward")] * policy.grad_accum)
    later = unit.reduce_bytes - (size if head == name else 0)  # a tied head's is the embedding's, too
    scheduled[at] = replace(unit, reshard=True, reduce_bytes=later)
    return scheduled


def _reductions(groups: Iterable[ScheduledGroup]) -> Iterator[Event]:
    for group in groups:
        if group.reduce_bytes:
            yield Event("reduce_scatter", group, "backward")
            yield Event("all_reduce", group, "backward")


def _build(model: ModelSpec, policy: PolicySpec) -> Model:
    return build_model(model, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)


def _one_dtype(dtypes: Iterable[str]) -> str:
    """FSDP gathers mixed dtypes as raw bytes."""
    distinct = set(dtypes)
    return distinct.pop() if len(distinct) == 1 else "uint8"


def _add_step_end(
    ledger: Ledger, groups: Sequence[ParameterGroup], mesh: MeshSpec, policy: PolicySpec, *, clips: bool
) -> None:
    """Add the reductions of clipping and float8 scales; ``clips=False`` if clipping is counted already."""
    shard = Axis(size=mesh.fsdp_size, mesh_dim=mesh.fsdp_dim)
    parameters = [parameter for group in groups for parameter in group.parameters]
    apart = [p for group in groups if group.is_expert for p in group.parameters if p.requires_grad]
    reductions: list[tuple[Axis, str, int]] = []
    if clips and policy.clip_grad and policy.optimizer != "none":
        every = policy.rules.clipping_reduces_every_norm
        experts = Axis(size=mesh.expert_fsdp_size, mesh_dim="efsdp")
        trained = sum(parameter.requires_grad for parameter in parameters) - len(apart)
        axes = (shard, Axis(size=mesh.tp, mesh_dim="tp"))
        reductions += [(axis, policy.orig_dtype, trained if every else 1) for axis in axes]
        if apart:
            reductions.append((experts, policy.orig_dtype, len(apart) if every else 1))
            reductions.append((Axis(size=mesh.ep, mesh_dim="ep"), policy.orig_dtype, 1))
    if policy.fp8_all_gather:
        scaled = sum(parameter.gather_dtype == "float8_e4m3fn" for parameter in parameters)
        reductions.append((shard, "float32", scaled))
    for axis, dtype, elements in reductions:
        ledger.add(
            root=0,
            fqn=None,
            phase="optimizer",
            op="all_reduce",
            axis=axis,
            dtype=dtype,
            payload_bytes=elements * dtype_bytes(dtype),
        )


def _notes(policy: PolicySpec, flow: Flow) -> list[str]:
    unused = sorted(flow.without_gradient)
    notes = [
        "bytes of a steady step of one rank; payload: all-gather its whole output, reduce-scatter its whole "
        "input, all-reduce the tensor; wire: payload x (n-1)/n, all-reduce twice that",
        "every module runs once per forward, and every trainable parameter gets a gradient"
        + (f" but {len(unused)} whose results nothing uses ({unused[0]} first)" if unused else ""),
    ]
    if policy.clip_grad and policy.optimizer != "none":
        notes.append(
            "gradient clipping all-reduces the stacked norms of all trained parameters once a step"
            if policy.rules.clipping_reduces_every_norm
            else "gradient clipping all-reduces the total norm once a step, as torch does before 2.10"
        )
    return notes
