"""One rank of a large FSDP2 world, alone: real tensors, allocator and streams, no communication.

    python tests/gpu/train_fake_world.py --config run.yaml

The file is what `fsdp2prof estimate memory --config` reads (model, mesh, policy), so that the two can be set
side by side: the same modules, `fully_shard` calls and loop, once on fake tensors and once on a GPU (or,
without one, on the CPU). Prints one JSON line per step with the allocator's own peaks.
"""

import argparse
import json
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2prof.estimators.config.inputs import load_config, make_spec
from fsdp2prof.estimators.execution.fake_world import HostMemory
from fsdp2prof.estimators.execution.training import TrainingLoop, build_optimizer, shard
from fsdp2prof.estimators.models.build import build_model

PEAKS = ("requested_bytes", "allocated_bytes", "active_bytes", "reserved_bytes")


def make_mesh(device_type, mesh):
    if mesh.dp_replicate == 1:
        return init_device_mesh(device_type, (mesh.dp_shard,), mesh_dim_names=("dp_shard",))
    shape = mesh.dp_replicate, mesh.dp_shard
    return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def peaks_of_step():
    """The allocator's peaks since its last reset, and how it works; empty on a CPU."""
    if not torch.cuda.is_available():
        return {}
    statistics = torch.cuda.memory_stats()
    segments = torch.cuda.memory_snapshot()
    return {
        **{name: statistics[f"{name}.all.peak"] for name in PEAKS},
        "retries": statistics["num_alloc_retries"],
        "expandable": any(segment.get("is_expandable", False) for segment in segments),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    spec = make_spec(load_config(arguments.config))
    mesh, policy = spec.mesh, spec.policy
    assert mesh.world_size == mesh.dp_replicate * mesh.dp_shard, "only dp_replicate and dp_shard"
    assert not any([policy.offload, policy.compile, policy.extra_model]), "not in this loop"
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("fake", rank=0, world_size=mesh.world_size, store=FakeStore())
    model = build_model(spec.model, seq_len=policy.seq_len, orig_dtype=policy.orig_dtype)
    shard(model, policy, make_mesh(device.type, mesh), None)
    model.module.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.module.parameters():
            cast(DTensor, parameter).to_local().normal_(std=0.02)
    loop = TrainingLoop(
        model=model,
        seconds=(),
        policy=policy,
        optimizer=build_optimizer(model, policy),
        host=HostMemory(offloads=False),
        device=device,
        loss_is_parallel=False,
    )
    for step in range(arguments.steps):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        loop.forward_backward()
        loop.update()
        print(json.dumps({"step": step, **peaks_of_step()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
