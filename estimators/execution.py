"""Run a training job that has not happened: real FSDP2, autograd and optimizer on fake tensors.

Two steps are run, the second with optimizer state. Every storage is counted with its stream and host phase
by the recorder's own :class:`~fsdp2prof.storage_tracker.StorageTracker`, so what comes out is the same
:class:`~fsdp2prof.tables.MemoryRecording` that a run leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fsdp2prof.estimators.cuda_kernels import as_on_cuda
from fsdp2prof.estimators.fake_world import (
    fake_process_group,
    fake_tensors,
    fsdp_mesh,
    stand_in_device,
    tensor_parallel_mesh,
)
from fsdp2prof.estimators.mesh import MeshSpec
from fsdp2prof.estimators.model import Model, ModelSpec
from fsdp2prof.estimators.policy import PolicySpec
from fsdp2prof.estimators.training import build_optimizer, shard, train_step
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


def execute(spec: ModelSpec, mesh: MeshSpec, policy: PolicySpec, *, steps: int = 2) -> Execution:
    """Build, shard and train the model for ``steps`` steps as rank 0 of ``mesh``.

    Raises ``ModelError`` for a model, mesh or policy that cannot be run.
    """
    device = stand_in_device()
    with ExitStack() as stack:
        device_mesh = stack.enter_context(fake_process_group(mesh))
        mode = stack.enter_context(fake_tensors())
        model = spec.build(seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
        shard(model, policy, fsdp_mesh(device_mesh), tensor_parallel_mesh(device_mesh))
        tracker = StorageTracker(fake_mode=mode)
        with tracker:
            tracker.mark_step(0)
            model.module.to_empty(device=device)
            optimizer = build_optimizer(model.module, policy)
            for step in range(1, steps + 1):
                tracker.mark_step(step)
                train_step(model, policy, optimizer, device)
            tensors = list(_known_tensors(model.module, optimizer, tracker))
            counters = [] if policy.optimizer_impl == "fused" else _step_counters(optimizer, tracker)
        return Execution(model=model, recording=as_on_cuda(tracker.recording(), counters), tensors=tensors)


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
            owners.update((name, unit) for name, _ in module.named_parameters(prefix=unit))
    return owners


def _step_counters(optimizer: Optimizer | None, tracker: StorageTracker) -> list[int]:
    states = () if optimizer is None else optimizer.state.values()
    return [tracker.address(state["step"]) for state in states if isinstance(state.get("step"), Tensor)]


def _info(category: str, fqn: str, name: str, tensor: Tensor, tracker: StorageTracker) -> TensorInfo:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    nbytes = local.untyped_storage().nbytes()
    return TensorInfo(category=category, fqn=fqn, name=name, address=tracker.address(local), nbytes=nbytes)
