"""A training job that exists on paper: a fake process group of any size, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # up to torch 2.10 it says what c10d's operators return
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources, init_device_mesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.spec.mesh import MeshSpec

__all__ = [
    "expert_mesh",
    "fake_process_group",
    "forget_meshes",
    "fsdp_mesh",
    "stand_in_device",
    "tensor_parallel_mesh",
]


@contextmanager
def fake_process_group(mesh: MeshSpec, *, rank: int = 0) -> Iterator[DeviceMesh]:
    """Be a rank of ``mesh`` (pipeline stages left out) and give its device mesh: dp_replicate, fsdp, tp.

    Collectives return at once and move nothing. Raises ``ModelError`` if a real process group exists.
    """
    if dist.is_initialized():
        raise ModelError(
            "an estimate needs a process without torch.distributed: run it before init_process_group"
        )
    shape = (mesh.dp_replicate, mesh.fsdp_size, mesh.tp)
    world_size = mesh.dp_replicate * mesh.fsdp_size * mesh.tp
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with _events():
            yield init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", mesh.fsdp_dim, "tp"))
    finally:
        dist.destroy_process_group()
        forget_meshes()


def forget_meshes() -> None:
    """Forget the meshes of a process group that is gone, and what DTensor worked out on them.

    Up to torch 2.9 the next world's meshes get its groups; later, a redistribution on an equal mesh may be
    given the shapes of the world before.
    """
    _redistribute._gen_transform_infos.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
    if hasattr(_mesh_resources, "child_to_root_mapping"):
        _mesh_resources.child_to_root_mapping.clear()
        _mesh_resources.root_to_flatten_mapping.clear()
        _mesh_resources.flatten_name_to_root_dims.clear()
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh ``fully_shard`` gets: one dimension, or two with replicas (HSDP)."""
    assert mesh.mesh_dim_names is not None
    replicate, shard, _ = mesh.mesh_dim_names
    return mesh[shard] if mesh[replicate].size() == 1 else mesh[replicate, shard]


def tensor_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The part of the mesh ``parallelize_module`` gets, ``None`` without tensor parallelism."""
    return mesh["tp"] if mesh["tp"].size() > 1 else None


def expert_mesh(mesh: MeshSpec) -> DeviceMesh | None:
    """Mesh of the experts over the same ranks: dp_replicate, efsdp, ep; ``None`` if they have none."""
    if mesh.ep == 1:
        return None
    shape = (mesh.dp_replicate, mesh.expert_fsdp_size, mesh.ep)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "efsdp", "ep"))


@contextmanager
def _events() -> Iterator[None]:
    """Let the stand-in device's streams give events as a GPU's do, and be what waits for them.

    torch 2.7 insists on the event of an all-reduce; an event of an all-gather is waited for on the current
    stream of whatever accelerator there is.
    """
    record_event, current_stream = torch.cpu.Stream.record_event, torch.accelerator.current_stream
    torch.cpu.Stream.record_event = lambda stream: torch.cpu.Event()  # type: ignore[assignment, method-assign]
    torch.accelerator.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cpu.Stream.record_event = record_event  # type: ignore[method-assign]
        torch.accelerator.current_stream = current_stream


def stand_in_device() -> torch.device:
    """The device that stands for the GPU: FSDP2 treats it alike, and its flash attention needs no GPU."""
    return torch.device("cpu")
