"""Pipelines: the stage that a rank builds, its schedule, and the number of micro-batches in flight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import TYPE_CHECKING

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.pipeline import has_ends, schedule_rule
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Model, StagePart
from fsdp2prof.estimators.techniques.pipeline_order import (
    InFlight,
    enough_micro_batches,
    in_flight,
    order_of,
    rank_of_stage,
    stages_of_rank,
)
from fsdp2prof.estimators.techniques.technique import About, Technique
from fsdp2prof.units import plural

if TYPE_CHECKING:
    from torch import nn


def blocks_of_stages(layers: int, mesh: MeshSpec, policy: PolicySpec) -> list[range]:
    """Blocks of every stage: as even as possible, the first stages one longer.

    Embedding, and last norm with head, count as ``policy.pp_end_layers`` blocks each, as in torchtitan's
    ``generate_llm_fqn_per_model_part``. Raises ``ModelError`` for ends that count more than a stage.
    """
    stages, ends = mesh.pp * policy.stages_per_rank, policy.pp_end_layers
    size, longer = divmod(layers + 2 * ends, stages)
    if size < max(1, ends):
        of_rank = "" if policy.stages_per_rank == 1 else f" x {policy.stages_per_rank}"
        beside = f" and ends that count as {ends} each" if ends else ""
        raise ModelError(f"mesh: pp={mesh.pp}{of_rank} stages for {layers} layers{beside}")
    found, start = [], 0
    for stage in range(stages):
        count = size + (stage < longer) - ends * ((stage == 0) + (stage == stages - 1))
        found.append(range(start, start + count))
        start += count
    return found


def blocks_of_ranks(layers: int, mesh: MeshSpec, policy: PolicySpec) -> list[tuple[int, ...]]:
    """Blocks of every rank, those of all of its stages. Raises as :func:`blocks_of_stages`."""
    held: list[tuple[int, ...]] = [()] * mesh.pp
    for stage, blocks in enumerate(blocks_of_stages(layers, mesh, policy)):
        held[rank_of_stage(policy.pp_schedule, mesh.pp, stage)] += tuple(blocks)
    return held


def stage_of(model: Model, mesh: MeshSpec, policy: PolicySpec) -> Model:
    """The part of a model that ``policy.pp_stage`` holds; the model itself without a pipeline.

    The module is cut in place and runs from the hidden states (B, S, D) of the stage before, if there is one,
    to those for the stage after.
    """
    if mesh.pp == 1 or model.width is None:
        return model
    from fsdp2prof.estimators.models.builtin_plan import BuiltinPlan
    from fsdp2prof.estimators.models.transformers_plan import TransformersPlan

    of_stages = blocks_of_stages(len(model.blocks), mesh, policy)
    of_ranks = blocks_of_ranks(len(model.blocks), mesh, policy)
    kept = of_ranks[policy.pp_stage]
    is_first, is_last = has_ends(policy.pp_schedule, mesh.pp, policy.pp_stage)
    blocks = tuple(model.blocks[at] for at in kept)
    absent = _cut(model, model.module, kept, is_first=is_first, is_last=is_last)
    if model.decoder is not None:
        absent |= set(model.blocks) - set(blocks)
    own = stages_of_rank(policy.pp_schedule, mesh.pp, policy.pp_stage)
    plan = model.tensor_parallel
    if isinstance(plan, (BuiltinPlan, TransformersPlan)):
        plan = replace(plan, absent=absent)
    counts = [len(held) for held in of_ranks]
    held = ", ".join(map(str, counts))
    uneven = f"the ranks of the pipeline hold {held} blocks, and the longest stage limits the pipeline"
    return replace(
        model,
        notes=model.notes if len(set(counts)) == 1 else (*model.notes, uneven),
        blocks=blocks,
        experts=tuple(fqn for fqn in model.experts if fqn.startswith(tuple(f"{one}." for one in blocks))),
        tensor_parallel=plan,
        stages=tuple(
            StagePart(blocks=len(of_stages[stage]), is_first=stage == 0, is_last=stage == len(of_stages) - 1)
            for stage in own
        ),
    )


def stage_views(model: Model) -> tuple[nn.Module, ...]:
    """The stages of a rank as modules that share the model's parts; the model's own module if it has one.

    Each holds its blocks under the names that the model has for them, and the model's ends if they are its.
    """
    from fsdp2prof.estimators.models.decoder import view_of

    if len(model.stages) < 2:
        return (model.module,)
    views, start = [], 0
    for stage in model.stages:
        kept = tuple(range(start, start + stage.blocks))
        start += stage.blocks
        view = view_of(model.module, model.blocks)
        _cut(model, view, kept, is_first=stage.is_first, is_last=stage.is_last)
        views.append(view)
    return tuple(views)


def _cut(
    model: Model, module: nn.Module, kept: tuple[int, ...], *, is_first: bool, is_last: bool
) -> frozenset[str]:
    """Leave the ``kept`` blocks of a module, and its ends if included; return the ends that are absent."""
    from fsdp2prof.estimators.models.decoder import cut_decoder

    if model.decoder is None:
        return _cut_builtin(model, module, kept, is_first=is_first, is_last=is_last)
    absent = model.decoder.absent(is_first=is_first, is_last=is_last)
    cut_decoder(module, absent, model.blocks, kept)
    return absent


def _cut_builtin(
    model: Model, module: nn.Module, kept: tuple[int, ...], *, is_first: bool, is_last: bool
) -> frozenset[str]:
    from torch import nn

    assert model.config is not None
    layers = list(module.layers.named_children())  # type: ignore[union-attr]
    module.layers = nn.ModuleDict(dict(layers[at] for at in kept))
    absent: set[str] = set()
    if not is_first:
        absent.add("tok_embeddings")
        if model.config.family == "gpt":
            module.pos_embeddings = None  # type: ignore[assignment]
    if not is_last:
        absent |= {"norm", "output"}
    for name in absent:
        module.register_module(name, nn.Identity())
    return frozenset(absent)


def micro_batches_in_flight(mesh: MeshSpec, policy: PolicySpec) -> int:
    """Most micro-batches whose forward has run and whose backward has not."""
    return micro_batches_under_way(mesh, policy).forwards


def micro_batches_under_way(mesh: MeshSpec, policy: PolicySpec) -> InFlight:
    """Most micro-batches that wait for their backward, for the weights' part of it, and for either.

    Several stages of a rank count as parts of one, rounded up to whole micro-batches.
    """
    schedule, stages, micro_batches = policy.pp_schedule, policy.stages_per_rank, policy.pipelined
    if schedule_rule(schedule).forwards_first:
        return InFlight(micro_batches, 0, micro_batches)
    enough = enough_micro_batches(schedule, mesh.pp, micro_batches)
    most = in_flight(order_of(schedule, mesh.pp, enough)[policy.pp_stage])
    return InFlight(*(min(-(-count // stages), micro_batches) for count in astuple(most)))


class Pipeline(Technique):
    """The ranks of ``pp`` (``pp_stage``, ``pp_schedule``)."""

    def check(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> None:
        """Refuse a model that cannot be cut, and options that a schedule does not accept."""
        if not 0 <= policy.pp_stage < mesh.pp:
            raise ModelError(f"pp_stage: {policy.pp_stage} is not one of the {mesh.pp} pipeline stages")
        schedule, layers = policy.pp_schedule, len(model.blocks)
        if mesh.pp == 1:
            for option, is_there in (
                ("pp_schedule", schedule != "1f1b"),
                ("pp_end_layers", policy.pp_end_layers),
                ("pp_runs", policy.pp_runs > 1),
            ):
                if is_there:
                    raise ModelError(f"{option}: this mesh has no pipeline; add pp to it")
            return
        if policy.grad_accum % policy.pp_runs:
            raise ModelError(
                f"pp_runs: {policy.pp_runs} does not divide the step's {policy.grad_accum} micro-batches"
            )
        if model.width is None:
            raise ModelError(f"mesh: pp={mesh.pp}: {model.name} {model.no_pipeline}")
        if policy.reshard != "never":
            raise ModelError(
                "with pp use reshard=never: stages keep parameters gathered between micro-batches"
            )
        if policy.sync != "last":
            raise ModelError("with pp use sync=last: the schedule reduces gradients after its last backward")
        if policy.splits_backward and policy.ac == "op":
            raise ModelError(
                f"pp_schedule: {schedule} runs a backward in two parts, and torch's selective "
                "checkpointing allows one backward: use ac=none (or full, recomputed for each part)"
            )
        if policy.splits_backward and policy.compile:
            raise ModelError(
                f"pp_schedule: {schedule} runs a backward in two parts, and compiled blocks have one: "
                "torch refuses it; leave compile out"
            )
        if not all(blocks_of_ranks(layers, mesh, policy)):
            raise ModelError(
                f"mesh: pp={mesh.pp}: a rank of the pipeline would have no block of {model.name}"
            )
        order_of(schedule, mesh.pp, enough_micro_batches(schedule, mesh.pp, policy.pipelined))

    def change_model(self, model: Model, mesh: MeshSpec, policy: PolicySpec) -> Model:
        """Leave the stage of this rank."""
        return stage_of(model, mesh, policy)

    def notes(self, about: About, mesh: MeshSpec, policy: PolicySpec) -> Iterator[str]:
        """The memory of the schedule, and the bubble that is added."""
        if about == "memory" and mesh.pp > 1:
            yield (
                f"pipeline stage {policy.pp_stage} of {mesh.pp} under {_schedule(mesh, policy)}: "
                f"{micro_batches_in_flight(mesh, policy)} of {policy.pipelined} micro-batches in flight; "
                "receive buffers per micro-batch and neighbour, made in the first step and kept, as "
                "torch.distributed.pipelining does; what was sent last is kept till the next; "
                "a stage's gradients accumulate unsharded and are reduced after its last backward"
            )
        elif about == "step" and mesh.pp > 1:
            yield (
                f"pipeline rank {policy.pp_stage} represents all {mesh.pp}; {_bubble(mesh, policy)}, and "
                "transfers between stages are hidden"
            )


def _schedule(mesh: MeshSpec, policy: PolicySpec) -> str:
    rule, stages = schedule_rule(policy.pp_schedule), policy.stages_per_rank
    made = rule.title if stages == 1 else f"{rule.title}, {stages} stages a rank"
    if not rule.splits_backward:
        return made
    later = micro_batches_under_way(mesh, policy).weights
    return f"{made}, the weights' part of {plural(later, 'backward')} deferred at most"


def _bubble(mesh: MeshSpec, policy: PolicySpec) -> str:
    title = schedule_rule(policy.pp_schedule).title
    runs = "" if policy.pp_runs == 1 else f" in each of {policy.pp_runs} runs"
    if policy.pp_schedule in ("1f1b", "gpipe"):
        return f"{title}'s bubble is {mesh.pp - 1} micro-batches{runs}"
    stages = policy.stages_per_rank
    return f"the bubble is that of torch's own order of {title}, {plural(stages, 'stage')} a rank{runs}"
