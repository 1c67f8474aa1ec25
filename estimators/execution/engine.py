"""Run a training job that has not happened: real FSDP2, autograd and optimizer on fake tensors.

Two steps are run, the second with optimizer state. Every storage is counted with its stream and host phase
by the recorder's own :class:`~fsdp2prof.storage_tracker.StorageTracker`, so what comes out is the same
:class:`~fsdp2prof.tables.MemoryRecording` that a run leaves behind.

Which block the storages belong to that are made outside of the blocks' own work.

Parameters are materialized, gradients clipped and parameters updated for the whole model at once, with no
label of a module around. What an operator makes there belongs to the block its inputs belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.compiler.graphs import Graphs
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.optimizers import IMPLEMENTATIONS
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.fake_world import (
    expert_mesh,
    fake_process_group,
    fsdp_mesh,
    host_memory,
    stand_in_device,
    tensor_parallel_mesh,
)
from fsdp2prof.estimators.execution.pipeline_stage import PipelineRank
from fsdp2prof.estimators.execution.ring_memory import memory_of_a_ring
from fsdp2prof.estimators.execution.second_models import (
    MODEL_ROOT,
    SecondModel,
    naming_the_culprit,
    policy_of_others,
    with_role,
)
from fsdp2prof.estimators.execution.training import (
    TrainingLoop,
    build_optimizer,
    exchange_tokens,
    materialize,
    shard,
)
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.documents import documents_apart
from fsdp2prof.estimators.models.experts import GroupedExperts
from fsdp2prof.estimators.models.feed_forward import FeedForward
from fsdp2prof.estimators.models.llama import Attention, RMSNorm
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.techniques.float8.layers import convert_linear_layers
from fsdp2prof.estimators.techniques.float8.weight import Float8Shard, with_memory
from fsdp2prof.estimators.techniques.pipeline_order import fewest_micro_batches, order_of
from fsdp2prof.estimators.techniques.quantized import PackedLinear
from fsdp2prof.estimators.techniques.registry import part_of
from fsdp2prof.fake_tensors import fake_tensors
from fsdp2prof.labels import qualified_fqn
from fsdp2prof.manifest import TensorInfo
from fsdp2prof.storage_tracker import StorageTracker
from fsdp2prof.tables.allocations import MemoryRecording


def attention_kernel(policy: PolicySpec) -> AbstractContextManager[object]:
    """Run ``scaled_dot_product_attention`` as separate operators if the policy says math.

    Otherwise it runs as the host's flash attention, whose results have the same sizes; packed documents
    one by one if the kernel separates them.
    """
    if policy.documents is not None and policy.attention == "math":
        raise ModelError("documents: attention=math computes all pairs: use only one of them")
    if policy.attention == "math":
        return sdpa_kernel(SDPBackend.MATH)
    return documents_apart(policy.documents)


def choose_kernels(model: Model, policy: PolicySpec) -> None:
    """Run attention, RMSNorm and SwiGLU of the built-in models as the policy says.

    Raises ``ModelError`` for a model without any.
    """
    modules = list(model.module.modules())
    for attention in (one for one in modules if isinstance(one, Attention)):
        attention.repeats_kv = policy.repeat_kv
    norms = [one for one in modules if isinstance(one, RMSNorm)]
    feed_forward = [one for one in modules if isinstance(one, FeedForward)]
    experts = [one for one in modules if isinstance(one, GroupedExperts) and one.b1 is None]
    for option, parts, title in (
        ("norm", norms, "RMSNorm"),
        ("mlp", [*feed_forward, *experts], "SwiGLU"),
    ):
        chosen = getattr(policy, option)
        if chosen is None:
            continue
        if not parts:
            raise ModelError(
                f"{option}: {model.name} has no {title} of the built-in models: leave the option out"
            )
        for module in parts:
            module.fused = chosen == "fused"


class BlockProvenance:
    """Follows storages from the parameters and buffers of a model's blocks through operators."""

    def __init__(self, module: nn.Module, blocks: tuple[str, ...], tracker: StorageTracker) -> None:
        self._module = module
        self._prefixes = {f"{fqn}.": index for index, fqn in enumerate(blocks)}
        self._tracker = tracker
        self._owner: WeakKeyDictionary[UntypedStorage, int] = WeakKeyDictionary()
        self.block_of: dict[int, int] = {}
        """Address in the tracker's recording -> index of the block."""

    @contextmanager
    def following(self, optimizer: Optimizer | None = None) -> Iterator[None]:
        """Follow parameters, their gradients, the optimizer's state and buffers inside the context."""
        self._owner.clear()
        for name, parameter in chain(self._module.named_parameters(), self._module.named_buffers()):
            block = next((index for prefix, index in self._prefixes.items() if name.startswith(prefix)), None)
            if block is not None:
                state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
                for tensor in (parameter, parameter.grad, *state.values()):
                    if isinstance(tensor, Tensor):
                        self._owner[_storage(tensor)] = block
        with _Follow(self._see):
            yield

    def _see(self, inputs: Any, outputs: Any) -> None:
        given = {_storage(tensor) for tensor in _tensors(inputs)}
        results = list(_tensors(outputs))
        rows = [list(_tensors(item)) for item in inputs if isinstance(item, (list, tuple))]
        parallel = [row for row in rows if isinstance(outputs, (list, tuple)) and len(row) == len(results)]
        for index, tensor in enumerate(results):
            storage = _storage(tensor)
            if storage in given:
                continue
            sources = [_storage(row[index]) for row in parallel] or given
            owners = {self._owner[source] for source in sources if source in self._owner}
            address = self._tracker.address(tensor)
            if len(owners) == 1 and address >= 0:
                self._owner[storage] = self.block_of[address] = owners.pop()


class _Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operator's inputs and outputs."""

    def __init__(self, see: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types or Float8Shard in types:
            return NotImplemented  # unfolds into operators on local tensors
        result = func(*args, **(kwargs or {}))
        self._see((*args, *(kwargs or {}).values()), result)
        return result


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, (list, tuple)):
        for value in item:
            yield from _tensors(value)


def _storage(tensor: Tensor) -> UntypedStorage:
    """The storage itself, one Python object for life: its address is another storage's after its death."""
    return with_memory(tensor).untyped_storage()


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """The output of a fake run."""

    name: str
    """The model's."""
    parameters: int
    blocks: tuple[str, ...]
    recording: MemoryRecording
    """Every storage of rank 0. Step 0 is the construction, then the training steps from 1."""
    tensors: list[TensorInfo]
    """Storages of known role at the end, by their address in the recording."""
    host: frozenset[int]
    """Addresses of the storages that lie on the host: offloaded ones, and the optimizer's step counters."""
    block_of: dict[int, int]
    """Address -> block of storages that were made for one block outside its own work."""


class FakeRank:
    """A rank of a simulated world: its models, sharded on meta, and the context they run with."""

    def __init__(
        self,
        stack: ExitStack,
        spec: ModelSpec,
        sizes: MeshSpec,
        policy: PolicySpec,
        graphs: Graphs | None,
        rank: int,
    ) -> None:
        self._sizes, self._policy = sizes, policy
        self.mesh = stack.enter_context(fake_process_group(sizes, rank=rank))
        one_kernel = policy.rules.rms_norm_is_fused and not policy.compile
        self.mode = stack.enter_context(
            fake_tensors(follow_values=policy.follows_values, fused_rms_norm=one_kernel)
        )
        stack.enter_context(attention_kernel(policy))
        if sizes.cp > 1 and not policy.compile:
            stack.enter_context(memory_of_a_ring(sizes.cp))
        self.model = sharded_model(spec, sizes, policy, self.mesh, graphs=graphs)
        self.seconds = second_models(self.model, spec, sizes, policy, self.mesh)
        self.others = [second for second in self.seconds if not second.is_itself]
        self.host = stack.enter_context(host_memory(offloads=policy.offload, is_used=policy.uses_host))

    def loop(self, following: Callable[[], AbstractContextManager[object]] = nullcontext) -> TrainingLoop:
        """Give the models their memory and return the training; ``following`` is around the trained one's."""
        device = stand_in_device()
        with following():
            for root in self.model.roots:
                materialize(root, device, self.host)
        for other in self.others:
            materialize(other.model.module, device, self.host)
        with following():
            optimizer = build_optimizer(self.model, self._policy)
        return TrainingLoop(
            model=self.model,
            seconds=self.seconds,
            policy=self._policy,
            optimizer=optimizer,
            host=self.host,
            device=device,
            loss_is_parallel=self.model.divides_logits(self._sizes.tp, self._policy.loss_parallel),
            stage=PipelineRank(self.model, self._sizes, self._policy) if self._sizes.pp > 1 else None,
        )


@contextmanager
def fake_rank(
    spec: ModelSpec, mesh: MeshSpec, policy: PolicySpec, *, graphs: Graphs | None = None, rank: int = 0
) -> Iterator[FakeRank]:
    """Be ``rank`` of ``mesh``, where every tensor is fake; blocks are compiled into ``graphs`` where given.

    Raises ``ModelError`` for models that cannot be built or sharded.
    """
    with ExitStack() as stack:
        yield FakeRank(stack, spec, mesh, policy, graphs, rank)


def execute(
    spec: ModelSpec,
    mesh: MeshSpec,
    policy: PolicySpec,
    *,
    steps: int = 2,
    graphs: Graphs | None = None,
    watched: Callable[[DeviceMesh], AbstractContextManager[object]] | None = None,
) -> Execution:
    """Build, shard and train the model for ``steps`` steps as rank 0 of ``mesh``.

    With ``graphs`` the blocks run as ``torch.compile`` of each would. The last step runs inside of what
    ``watched`` returns. Raises ``ModelError`` for a model, mesh or policy that cannot be run, and
    ``CannotCompile``, one of these, for a block that cannot be traced.
    """
    if policy.keep_logits is not None and mesh.pp > 1:
        raise ModelError("keep_logits: a pipeline's last stage holds its outputs as torch's schedule does")
    with fake_rank(spec, mesh, policy, graphs=graphs) as rank:
        model, host = rank.model, rank.host
        tracker = StorageTracker(fake_mode=rank.mode)
        provenance = BlockProvenance(model.module, model.blocks, tracker)
        with tracker:
            tracker.mark_step(0)
            with host.always():
                on_host = torch.empty(1)
            loop = rank.loop(provenance.following)
            if loop.stage is not None:
                few = fewest_micro_batches(
                    policy.pp_schedule, mesh.pp, policy.pp_stage, policy.pipelined, in_memory=True
                )
                loop.stage.take_order(order_of(policy.pp_schedule, mesh.pp, few)[policy.pp_stage])
            for step in range(1, steps + 1):
                tracker.mark_step(step)
                with watched(rank.mesh) if watched is not None and step == steps else nullcontext():
                    with naming_the_culprit(spec):
                        loop.forward_backward()
                    with provenance.following(loop.optimizer):
                        loop.update()
            tensors = list(_known_tensors(model.module, loop.optimizer, tracker, MODEL_ROOT, policy.roots))
            for other in rank.others:
                _reshard(other.model.module)
                assert other.root is not None
                tensors += _known_tensors(other.model.module, None, tracker, other.root, policy.roots)
            if loop.stage is not None:
                tensors += _receive_buffers(loop.stage, tracker)
            counts_on_host = IMPLEMENTATIONS[policy.optimizer_impl].counts_on_host
            counters = _step_counters(loop.optimizer, tracker) if counts_on_host else []
            mark = tracker.address(on_host)
        recording = tracker.recording()
        return Execution(
            name=model.name,
            parameters=model.parameters,
            blocks=model.blocks,
            recording=recording,
            tensors=tensors,
            host=frozenset([*counters, *_same_stream(recording, mark)]),
            block_of=provenance.block_of,
        )


def sharded_model(
    spec: ModelSpec,
    mesh: MeshSpec,
    policy: PolicySpec,
    device_mesh: DeviceMesh,
    *,
    graphs: Graphs | None = None,
) -> Model:
    """Build a model on meta and shard it as rank 0 of ``device_mesh``, its blocks compiled or not."""
    built = build_model(spec, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
    return _sharded(built, mesh, policy, device_mesh, graphs)


def _sharded(
    built: Model, mesh: MeshSpec, policy: PolicySpec, device_mesh: DeviceMesh, graphs: Graphs | None = None
) -> Model:
    model = part_of(built, mesh, policy)
    chosen = [option for option in ("norm", "mlp") if getattr(policy, option) is not None]
    composed: dict[str, Any] = dict.fromkeys(chosen, "composed")
    choose_kernels(model, policy if graphs is None else replace(policy, **composed))
    if policy.float8 is not None:
        model = convert_linear_layers(model, policy.float8, gathered=policy.fp8_all_gather)
    with unset_fake_temporarily():  # a mesh is a real tensor
        experts = expert_mesh(mesh)
        meshes = fsdp_mesh(device_mesh), tensor_parallel_mesh(device_mesh), experts
        model = replace(model, roots=shard(model, policy, *meshes, graphs=graphs))
        exchange_tokens(model, policy, experts, tensor_parallel_mesh(device_mesh))
    return model


def second_models(
    model: Model, spec: ModelSpec, mesh: MeshSpec, policy: PolicySpec, device_mesh: DeviceMesh
) -> tuple[SecondModel, ...]:
    """The frozen models of a policy in the order in which they run, sharded; may include the trained one.

    Raises ``ModelError`` for one that cannot be built or sharded.
    """
    frozen = policy_of_others(policy)
    made: list[SecondModel] = []
    for root, extra in enumerate(policy.other_models, start=MODEL_ROOT + 1):
        source = ModelSpec(source=extra.source)
        built = build_model(source, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
        second = _sharded(with_role(built, extra, mesh.tp), mesh, frozen, device_mesh)
        second.module.requires_grad_(False)
        made.append(SecondModel(model=second, role=extra.role, root=root, spec=source))
    if policy.runs_itself_before:
        own = MODEL_ROOT if policy.roots > 1 else None
        made.append(SecondModel(model=model, role="self", root=own, spec=spec))
    return tuple(made)


def _same_stream(recording: MemoryRecording, mark: int) -> list[int]:
    """Addresses on the stream of the storage at ``mark``; only that one on the default stream."""
    allocations = recording.allocations
    stream = allocations.stream[allocations.address == mark][0]
    rows = allocations.stream == stream if stream else allocations.address == mark
    return [int(address) for address in allocations.address[rows]]


def _known_tensors(
    module: nn.Module, optimizer: Optimizer | None, tracker: StorageTracker, root: int, roots: int
) -> Iterator[TensorInfo]:
    """Yield the storages of sharded parameters, their gradients and the optimizer's state."""
    owners = _owners(module)
    for name, parameter in module.named_parameters():
        fqn = qualified_fqn(owners[parameter], root, roots)
        yield _info("sharded_parameter", fqn, name, parameter, tracker)
        if parameter.grad is not None:
            yield _info("sharded_gradient", fqn, name, parameter.grad, tracker)
        for key, state in (optimizer.state[parameter] if optimizer is not None else {}).items():
            if isinstance(state, Tensor):
                yield _info("optimizer_state", fqn, f"{name}.{key}", state, tracker)
    units = ["", *(unit for unit, part in module.named_modules() if isinstance(part, FSDPModule))]
    for name, part in module.named_modules():
        for key, buffer in part.named_buffers(recurse=False) if isinstance(part, PackedLinear) else ():
            owner = max((unit for unit in units if f"{name}.".startswith(f"{unit}.") or not unit), key=len)
            fqn = qualified_fqn(owner, root, roots)
            yield _info("unsharded_parameter", fqn, f"{name}.{key}", buffer, tracker)


def _reshard(root: nn.Module) -> None:
    """Show the sharded parameters of modules that a forward without backward leaves gathered."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _receive_buffers(stage: PipelineRank, tracker: StorageTracker) -> Iterator[TensorInfo]:
    """Yield the buffers in which a stage receives its neighbours' activations and gradients."""
    for name, buffers in (("received", stage.activations), ("received_gradient", stage.gradients)):
        for at, buffer in enumerate(buffers.values()):
            yield _info("activation", "", f"{name}.{at}", buffer, tracker)


def _owners(root: nn.Module) -> dict[nn.Parameter, str]:
    """Map each parameter to the FSDP module that shards it, as FSDP's labels name it."""
    owners: dict[nn.Parameter, str] = dict.fromkeys(root.parameters(), "")
    for unit, module in root.named_modules():  # outer modules first
        if isinstance(module, FSDPModule):
            owners.update(dict.fromkeys(root.get_submodule(unit).parameters(), unit))
    return owners


def _step_counters(optimizer: Optimizer | None, tracker: StorageTracker) -> list[int]:
    states = () if optimizer is None else optimizer.state.values()
    return [tracker.address(state["step"]) for state in states if isinstance(state.get("step"), Tensor)]


def _info(category: str, fqn: str, name: str, tensor: Tensor, tracker: StorageTracker) -> TensorInfo:
    local = with_memory(tensor)
    nbytes = local.untyped_storage().nbytes()
    return TensorInfo(category=category, fqn=fqn, name=name, address=tracker.address(local), nbytes=nbytes)
