"""A real FSDP2 training loop over a model: sharding, optimizer, micro-batches, clipping, steps.

Nothing here knows that its tensors are fake: it is the loop a careful user writes, driven by a policy.

Experts on a mesh of their own: how they are placed, clipped, and reached by tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.compiler.graphs import Graphs
from fsdp2prof.estimators.config.optimizers import OptimizerFactory
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.fake_world import Direction, HostMemory
from fsdp2prof.estimators.execution.pipeline_stage import PipelineRank
from fsdp2prof.estimators.execution.second_models import MODEL_ROOT, SecondModel
from fsdp2prof.estimators.models.experts import ExpertExchange
from fsdp2prof.estimators.models.model import Batch, Model
from fsdp2prof.estimators.sharding.groups import freeze, shard_dim
from fsdp2prof.estimators.sharding.wrapping import ROOT, WrapUnit, wrap_units
from fsdp2prof.estimators.techniques.float8.weight import compute_scales
from fsdp2prof.estimators.techniques.pipeline import stage_views
from fsdp2prof.estimators.techniques.recomputation import checkpoint_blocks, recomputation
from fsdp2prof.estimators.torch_rules import fsdp_method_refusal, installed_root_obeys_reshard
from fsdp2prof.labels import root_label


def shard(
    model: Model,
    policy: PolicySpec,
    mesh: DeviceMesh,
    tensor_parallel: DeviceMesh | None,
    experts: DeviceMesh | None = None,
    *,
    graphs: Graphs | None = None,
) -> tuple[Any, ...]:
    """Parallelize, freeze, checkpoint and shard a model on meta, in that order; returns its roots.

    It has several if it is several stages of a pipeline, each of which is sharded on its own.

    With ``graphs`` its blocks run compiled, store their graphs there, and are checkpointed as the compiler
    does it. Raises ``ModelError`` for a model without a tensor-parallel plan if one is needed, and for
    features that the installed torch lacks.
    """
    units = wrap_units(model, policy)
    if tensor_parallel is not None:
        if model.tensor_parallel is None:
            raise ModelError(f"{model.name} {model.no_tensor_parallel}: leave tp=1")
        model.tensor_parallel.apply(
            model.module, tensor_parallel, policy.loss_parallel, policy.sequence_parallel
        )
    freeze(model, policy)  # torch's SequenceParallel makes new parameters, which train
    if model.running_towers:
        checkpoint_blocks(model.module, model.running_towers, policy)
    placement = expert_placement(model, policy, mesh, experts)
    if graphs is not None:
        from fsdp2prof.estimators.compiler.blocks import compile_blocks  # imports the compiler

        compile_blocks(model.module, recomputation(model.module, model.blocks, policy), graphs, policy.rules)
    else:
        checkpoint_blocks(model.module, model.blocks, policy)
    if units[-1].reshard_after_forward and not installed_root_obeys_reshard():
        raise ModelError(
            f"torch {torch.__version__} keeps the root gathered: to execute one that reshards it, "
            "a newer torch must be installed"
        )
    offload = CPUOffloadPolicy(pin_memory=False) if policy.offload else OffloadPolicy()
    roots = stage_views(model)

    def modules_of(fqns: Sequence[str]) -> list[list[nn.Module]]:
        if fqns == ROOT:
            return [[root] for root in roots]
        return [[model.module.get_submodule(fqn) for fqn in fqns]]  # through wrappers of checkpointed blocks

    def first_of(fqns: Sequence[str]) -> Any:
        return modules_of(fqns)[0][0]

    for unit in units:
        for modules in modules_of(unit.fqns):
            try:
                fully_shard(
                    modules[0] if len(modules) == 1 else modules,
                    mesh=mesh,
                    mp_policy=_mixed_precision(unit),
                    offload_policy=offload,
                    reshard_after_forward=unit.reshard_after_forward,
                    shard_placement_fn=placement,
                )
            except NotImplementedError as error:
                raise ModelError(f"torch {torch.__version__} cannot shard {model.name}: {error}") from error
    for unit in units:
        first = first_of(unit.fqns)
        if unit.forward_prefetch:
            first.set_modules_to_forward_prefetch(list(map(first_of, unit.forward_prefetch)))
        if unit.backward_prefetch:
            first.set_modules_to_backward_prefetch(list(map(first_of, unit.backward_prefetch)))
        if not unit.unshard_in_backward:
            for sharded, *_ in modules_of(unit.fqns):
                _tell(sharded, "set_unshard_in_backward", False)
    for root in roots:
        if policy.separate_reduce_scatter_group:
            _tell(root, "set_separate_reduce_scatter_group", True)
        if policy.reduce_scatter_buffers > 1:
            _tell(root, "set_reduce_scatter_max_input_buffers", policy.reduce_scatter_buffers)
    return roots


def _tell(root: nn.Module, method: str, value: int) -> None:
    refusal = fsdp_method_refusal(method)
    if refusal is not None:
        raise ModelError(f"{refusal}: leave the option out")
    getattr(root, method)(value)


def build_optimizer(model: Model, policy: PolicySpec) -> torch.optim.Optimizer | None:
    """Build the policy's optimizer over the trainable parameters; ``None`` if it trains nothing.

    Parameters on several meshes are separate parameter groups: one operator cannot process several meshes.
    """
    kind = policy.optimizer_kind
    if kind is None:
        return None
    groups = [
        {"params": [parameter for parameter in part if parameter.requires_grad]} for part in by_mesh(model)
    ]
    return kind.build(groups if len(groups) > 1 else groups[0]["params"], policy.optimizer_impl)


def materialize(module: nn.Module, device: torch.device, host: HostMemory) -> None:
    """Give a sharded module on meta its memory: parameters on the host if offloaded, buffers never."""
    with host():
        module.to_empty(device=device)
    if host.offloads:
        for submodule in module.modules():
            for name, buffer in submodule.named_buffers(recurse=False):
                setattr(submodule, name, torch.empty_like(buffer))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingLoop:
    """Everything a training step needs."""

    model: Model
    seconds: Sequence[SecondModel]
    """Models that run forward without gradients before each micro-batch, on the same batch."""
    policy: PolicySpec
    optimizer: torch.optim.Optimizer | None
    host: HostMemory
    device: torch.device
    """Where the batches are made."""
    loss_is_parallel: bool
    """The logits are sharded over the vocabulary."""
    stage: PipelineRank | None = None
    """Schedule of the micro-batches if the model is a stage of a pipeline."""
    held: list[Tensor] = field(default_factory=list)
    """Logits of the last micro-batch, where the script keeps them."""

    def forward_backward(self) -> None:
        """Drop the old gradients and run every micro-batch forward and backward."""
        policy, root = self.policy, self.model.module
        root.zero_grad()
        if self.stage is not None:
            with loss_parallel() if self.loss_is_parallel else nullcontext():
                self.stage.forward_backward()
            return
        for micro_batch in range(policy.grad_accum):
            if policy.grad_accum > 1 and policy.sync == "last":
                assert isinstance(root, FSDPModule)
                root.set_requires_gradient_sync(micro_batch == policy.grad_accum - 1)
            batch = self.model.make_batch(policy.sequences, policy.seq_len, self.device)
            batch = self._scored(batch)
            with ExitStack() as stack:
                if self.loss_is_parallel:
                    stack.enter_context(loss_parallel())
                if policy.roots > 1:
                    stack.enter_context(record_function(root_label(MODEL_ROOT)))
                if policy.offload_activations:
                    stack.enter_context(activations_on_host(root, self.host))
                loss = self.model.loss(root, batch, policy.loss)
                loss.backward()  # type: ignore[no-untyped-call]

    def _scored(self, batch: Batch) -> Batch:
        """Run the models that run only forward, and pass a reference's result for the batch to the loss."""
        how, in_parallel = self.policy.loss, self.loss_is_parallel
        scores = [(one.role, one.score(batch, how, in_parallel=in_parallel)) for one in self.seconds]
        reference = next((score for role, score in scores if role != "reward"), None)
        return replace(batch, reference=reference, keeps_logits=self.policy.keep_logits, kept=self.held)

    def update(self) -> None:
        """Clip the gradients and update the parameters, where they live."""
        if self.optimizer is None:
            return
        with self.host():
            if self.policy.clip_grad:
                clip_gradients(self.model)
            own_code = isinstance(self.policy.optimizer_kind, OptimizerFactory)
            with nullcontext() if own_code else _on_local_shards(self.optimizer):
                if self.policy.offload_optimizer:
                    _move_state(self.optimizer, self.host, "host_to_device")
                self.optimizer.step()
                if self.policy.offload_optimizer:
                    _move_state(self.optimizer, self.host, "device_to_host")
            if self.policy.fp8_all_gather:
                compute_scales(self.model.module.parameters())


def _move_state(optimizer: torch.optim.Optimizer, host: HostMemory, direction: Direction) -> None:
    """Copy what the optimizer keeps for each parameter, one tensor after the other; counters stay."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if not isinstance(value, Tensor) or not value.ndim:
                continue
            moved = host.copy(_local(value), direction)
            if isinstance(value, DTensor):
                value._local_tensor = moved
            else:
                state[name] = moved


_SMALL_BYTES = 1024
"""Saved tensors below this stay on the device (torchtune's, TRL's and prime-rl's ``min_offload_size``)."""


@contextmanager
def activations_on_host(root: nn.Module, host: HostMemory) -> Iterator[None]:
    """Copy to the host what the root's forward saves, parameters apart, and back as backward asks for it.

    As by ``OffloadActivations`` of torchtune and prime-rl, without streams of its own. What a loss outside of
    that forward saves stays, as the logits do there.
    """

    def pack(tensor: Tensor) -> tuple[Tensor, bool]:
        if isinstance(tensor, nn.Parameter) or tensor.numel() * tensor.element_size() < _SMALL_BYTES:
            return tensor, False
        with torch.no_grad():
            return host.copy(tensor.detach(), "device_to_host"), True

    def unpack(packed: tuple[Tensor, bool]) -> Tensor:
        tensor, is_on_host = packed
        if not is_on_host:
            return tensor
        with torch.no_grad():
            return host.copy(tensor, "host_to_device")

    forward, own = root.forward, root.__dict__.get("forward")

    def offloading(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    root.forward = offloading
    try:
        yield
    finally:
        if own is None:
            del root.forward  # the class's shows again
        else:
            root.forward = own


@contextmanager
def _on_local_shards(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let an element-wise optimizer update this rank's shards instead of DTensors.

    The operators on the shards and the state are the same; DTensor would work out the sharding of every
    operator's result again, which takes longer than the rest of the update.
    """
    local_of: dict[Tensor, Tensor] = {}
    sharded_of: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = _local(parameter)
            local_of[parameter], sharded_of[local] = local, parameter
            if local is not parameter and parameter.grad is not None:
                local.grad = _local(parameter.grad)
    _rename(optimizer, local_of)
    try:
        yield
    finally:
        _rename(optimizer, sharded_of)
        for parameter, local in local_of.items():
            if local is not parameter:
                local.grad = None


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _rename(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, Tensor]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [names[parameter] for parameter in group["params"]]
    states = {
        names[parameter]: {key: _local(value) for key, value in state.items()}
        for parameter, state in optimizer.state.items()
    }
    optimizer.state.clear()
    optimizer.state.update(states)


def _mixed_precision(unit: WrapUnit) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=_dtype(unit.param_dtype),
        reduce_dtype=_dtype(unit.reduce_dtype),
        output_dtype=_dtype(unit.output_dtype),
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def expert_placement(
    model: Model, policy: PolicySpec, mesh: DeviceMesh, experts: DeviceMesh | None
) -> Callable[[nn.Parameter], Any] | None:
    """The function that gives ``fully_shard`` the dimension and mesh of each parameter; ``None`` if all
    are default.

    ``mesh`` is that of the other parameters, ``experts`` the mesh dp_replicate, efsdp, ep.
    """
    shards = mesh.size(mesh.ndim - 1) if experts is None else experts["efsdp"].size()
    modules = [model.module.get_submodule(fqn) for fqn in model.experts]
    dims = {
        parameter: shard_dim(parameter.shape, shards, policy, apart=experts is not None)
        for module in modules
        for parameter in module.parameters(recurse=False)
    }
    info = None if experts is None else _mesh_info(experts)
    if info is None and not any(dims.values()):
        return None

    def place(parameter: nn.Parameter) -> Any:
        if parameter not in dims:
            return None
        if info is None:
            return Shard(dims[parameter])
        from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult

        return ShardPlacementResult(placement=Shard(dims[parameter]), mesh_info=info)

    return place


def _mesh_info(experts: DeviceMesh) -> Any:
    """FSDP's description of the ranks that share an expert."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    if experts["dp_replicate"].size() == 1:
        return FSDPMeshInfo(mesh=experts["efsdp"], shard_mesh_dim=0)
    return HSDPMeshInfo(mesh=experts["dp_replicate", "efsdp"], shard_mesh_dim=1, replicate_mesh_dim=0)


def exchange_tokens(
    model: Model,
    policy: PolicySpec,
    experts: DeviceMesh | None,
    tensor_parallel: DeviceMesh | None = None,
) -> None:
    """Let the blocks of a model reach the experts on other ranks."""
    if experts is None or not model.experts:
        return
    assert model.reach_experts is not None
    group = experts["ep"].get_group()
    exchange = ExpertExchange(group, group.size(), policy.imbalance)
    model.reach_experts(model.module, model.experts, exchange, tensor_parallel)


def by_mesh(model: Model) -> list[list[nn.Parameter]]:
    """The parameters by the mesh that they are sharded over; those of experts on a separate mesh last.

    Tensor parallelism may leave some parameters whole: these have only the mesh of FSDP.
    """
    experts = {
        parameter
        for fqn in (model.experts if model.expert_ranks > 1 else ())
        for parameter in model.module.get_submodule(fqn).parameters(recurse=False)
    }
    parts: dict[object, list[nn.Parameter]] = {}
    for parameter in model.module.parameters():
        own = parameter.device_mesh if isinstance(parameter, DTensor) else None
        parts.setdefault("experts" if parameter in experts else own, []).append(parameter)
    return sorted(parts.values(), key=lambda part: part[0] in experts)


def clip_gradients(model: Model) -> None:
    """Clip the global gradient norm to 1: one norm a mesh, that of experts reduced over their own ranks."""
    parts = [[one for one in part if one.requires_grad] for part in by_mesh(model)]
    trains_experts = model.expert_ranks > 1 and bool(model.experts) and bool(parts[-1])
    parts = [part for part in parts if part]
    if len(parts) == 1 and not trains_experts:
        torch.nn.utils.clip_grad_norm_(parts[0], 1.0, foreach=True)
        return
    squares = [_norm(part).square() for part in parts]
    if trains_experts:
        exchange = model.module.get_submodule(model.experts[0]).exchange
        assert isinstance(exchange, ExpertExchange)
        dist.all_reduce(squares[-1], group=exchange.group)
    total = torch.stack(squares).sum().sqrt()
    for part in parts:
        torch.nn.utils.clip_grads_with_norm_(part, 1.0, total, foreach=True)


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
