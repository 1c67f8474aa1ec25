"""Run a training job that has not happened: real FSDP2, autograd and optimizer on fake tensors.

Two steps are run, the second with optimizer state. Every storage is counted with its stream and host phase
by the recorder's own :class:`~fsdp2prof.storage_tracker.StorageTracker`, so what comes out is the same
:class:`~fsdp2prof.tables.MemoryRecording` that a run leaves behind.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from fsdp2prof.estimators.fake_world import (
    fake_process_group,
    fake_tensors,
    fsdp_mesh,
    stand_in_device,
    tensor_parallel_mesh,
)
from fsdp2prof.estimators.mesh import MeshSpec
from fsdp2prof.estimators.model import ModelSpec
from fsdp2prof.estimators.policy import PolicySpec
from fsdp2prof.estimators.training import build_optimizer, shard, train_step
from fsdp2prof.storage_tracker import StorageTracker
from fsdp2prof.tables import MemoryRecording

__all__ = ["Execution", "execute"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """What a fake run leaves behind."""

    recording: MemoryRecording
    """Every storage of rank 0. Step 0 is the construction, then the training steps from 1."""


def execute(spec: ModelSpec, mesh: MeshSpec, policy: PolicySpec, *, steps: int = 2) -> Execution:
    """Build, shard and train the model for ``steps`` steps as rank 0 of ``mesh``.

    Raises ``ModelError`` for a model, mesh or policy that cannot be run.
    """
    device = stand_in_device()
    with ExitStack() as stack:
        device_mesh = stack.enter_context(fake_process_group(mesh))
        mode = stack.enter_context(fake_tensors())
        model = spec.build(seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
        root = shard(model, policy, fsdp_mesh(device_mesh), tensor_parallel_mesh(device_mesh))
        tracker = stack.enter_context(StorageTracker(fake_mode=mode, stacks=False))
        tracker.mark_step(0)
        root.to_empty(device=device)
        optimizer = build_optimizer(root, policy)
        for step in range(1, steps + 1):
            tracker.mark_step(step)
            train_step(model, policy, optimizer, device)
        tracker.stop()
        return Execution(recording=tracker.recording())
