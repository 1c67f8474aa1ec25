"""Run a training job that has not happened: real FSDP2, autograd and optimizer on fake tensors.

Two steps are run, the second with optimizer state. Every storage is counted with its stream and host phase
by the recorder's own :class:`~fsdp2prof.storage_tracker.StorageTracker`, so what comes out is the same
:class:`~fsdp2prof.tables.MemoryRecording` that a run leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fsdp2prof.analyzers.memory_usage import allocated_totals
from fsdp2prof.estimators.cuda_kernels import as_on_cuda
from fsdp2prof.estimators.fake_world import (
    fake_process_group,
    fake_tensors,
    fsdp_mesh,
    stand_in_device,
    tensor_parallel_mesh,
)
from fsdp2prof.estimators.host_offload import host_memory
from fsdp2prof.estimators.mesh import MeshSpec
from fsdp2prof.estimators.model import Model, ModelSpec
from fsdp2prof.estimators.policy import PolicySpec
from fsdp2prof.estimators.training import TrainingLoop, build_optimizer, materialize, shard
from fsdp2prof.manifest import TensorInfo
from fsdp2prof.storage_tracker import StorageTracker
from fsdp2prof.tables import MemoryRecording

__all__ = ["Execution", "execute"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """What a fake run leaves behind."""

    model: Model
    """The sharded model, of fake tensors."""
    recording: MemoryRecording
    """Every storage of rank 0. Step 0 is the construction, then the training steps from 1."""
    tensors: list[TensorInfo]
    """Storages of known role at the end, by their address in the recording."""
    host_bytes: int
    """Most bytes on the host at once: what the policy offloads."""


def execute(spec: ModelSpec, mesh: MeshSpec, policy: PolicySpec, *, steps: int = 2) -> Execution:
    """Build, shard and train the model for ``steps`` steps as rank 0 of ``mesh``.

    Raises ``ModelError`` for a model, mesh or policy that cannot be run.
    """
    device = stand_in_device()
    with ExitStack() as stack:
        device_mesh = stack.enter_context(fake_process_group(mesh))
        mode = stack.enter_context(fake_tensors())
        model = _sharded(spec, policy, device_mesh)
        extra = None
        if policy.extra_model is not None:
            frozen = replace(policy, ac="none", trainable=None)
            extra = _sharded(ModelSpec(source=policy.extra_model), frozen, device_mesh)
            extra.module.requires_grad_(False)
        host = stack.enter_context(host_memory(offloads=policy.offload))
        tracker = StorageTracker(fake_mode=mode)
        with tracker:
            tracker.mark_step(0)
            with host():
                on_host = torch.empty(1)
            for built in filter(None, (model, extra)):
                materialize(built.module, device, host)
            loop = TrainingLoop(
                model=model,
                extra=extra,
                policy=policy,
                optimizer=build_optimizer(model.module, policy),
                device=device,
                host=host,
                loss_is_parallel=mesh.tp > 1 and policy.loss_parallel,
            )
            for step in range(1, steps + 1):
                tracker.mark_step(step)
                loop.step()
            tensors = list(_known_tensors(model.module, loop.optimizer, tracker))
            counters = [] if policy.optimizer_impl == "fused" else _step_counters(loop.optimizer, tracker)
            mark = tracker.address(on_host)
        on_device, host_bytes = _without_host(tracker.recording(), counters, mark)
        return Execution(model=model, recording=as_on_cuda(on_device), tensors=tensors, host_bytes=host_bytes)


def _sharded(spec: ModelSpec, policy: PolicySpec, mesh: DeviceMesh) -> Model:
    model = spec.build(seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
    with unset_fake_temporarily():  # a mesh is a real tensor
        shard(model, policy, fsdp_mesh(mesh), tensor_parallel_mesh(mesh))
    return model


def _without_host(recording: MemoryRecording, counters: list[int], mark: int) -> tuple[MemoryRecording, int]:
    """Split off what lies on the host: step counters, and the stream of the storage at ``mark``."""
    allocations = recording.allocations
    stream = int(allocations.stream[allocations.address == mark][0])
    offloaded = (allocations.stream == stream) & (stream != 0)
    host_bytes = int(allocated_totals(allocations.take(offloaded), recording.events).max())
    on_device = ~offloaded & ~np.isin(allocations.address, [*counters, mark])
    return replace(recording, allocations=allocations.take(on_device)), host_bytes


def _known_tensors(
    root: nn.Module, optimizer: Optimizer | None, tracker: StorageTracker
) -> Iterator[TensorInfo]:
    """Yield the storages of sharded parameters, their gradients and the optimizer's state."""
    owners = _owners(root)
    for name, parameter in root.named_parameters():
        fqn = owners[name]
        yield _info("sharded_parameter", fqn, name, parameter, tracker)
        if parameter.grad is not None:
            yield _info("sharded_gradient", fqn, name, parameter.grad, tracker)
        for key, state in (optimizer.state[parameter] if optimizer is not None else {}).items():
            if isinstance(state, Tensor):
                yield _info("optimizer_state", fqn, f"{name}.{key}", state, tracker)


def _owners(root: nn.Module) -> dict[str, str]:
    """Map each parameter's name to the FSDP module that shards it, as FSDP's labels name it."""
    owners: dict[str, str] = {}
    for unit, module in root.named_modules():  # outer modules first
        if isinstance(module, FSDPModule):
            below = root.get_submodule(unit).named_parameters(prefix=unit)
            owners.update((name, unit) for name, _ in below)
    return owners


def _step_counters(optimizer: Optimizer | None, tracker: StorageTracker) -> list[int]:
    states = () if optimizer is None else optimizer.state.values()
    return [tracker.address(state["step"]) for state in states if isinstance(state.get("step"), Tensor)]


def _info(category: str, fqn: str, name: str, tensor: Tensor, tracker: StorageTracker) -> TensorInfo:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    nbytes = local.untyped_storage().nbytes()
    return TensorInfo(category=category, fqn=fqn, name=name, address=tracker.address(local), nbytes=nbytes)
