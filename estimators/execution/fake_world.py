"""A training job that exists on paper: fake tensors and a fake process group of any size, in this process."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # up to torch 2.10 it says what c10d's operators return
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources, init_device_mesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.spec.mesh import MeshSpec

__all__ = [
    "expert_mesh",
    "fake_process_group",
    "fake_tensors",
    "fsdp_mesh",
    "stand_in_device",
    "tensor_parallel_mesh",
]

_ADVISERS = ("torch.distributed.tensor._redistribute", "transformers")
"""Loggers whose warnings are for people who train."""


@contextmanager
def fake_process_group(mesh: MeshSpec) -> Iterator[DeviceMesh]:
    """Be rank 0 of ``mesh`` (pipeline stages left out) and give its device mesh: dp_replicate, fsdp, tp.

    Collectives return at once and move nothing. Raises ``ModelError`` if a real process group exists.
    """
    if dist.is_initialized():
        raise ModelError(
            "an estimate needs a process without torch.distributed: run it before init_process_group"
        )
    shape = (mesh.dp_replicate, mesh.fsdp_size, mesh.tp)
    world_size = mesh.dp_replicate * mesh.fsdp_size * mesh.tp
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with _events():
            yield init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", mesh.fsdp_dim, "tp"))
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Forget the meshes of a process group that is gone: up to torch 2.9 the next one's get its groups."""
    if hasattr(_mesh_resources, "child_to_root_mapping"):
        _mesh_resources.child_to_root_mapping.clear()
        _mesh_resources.root_to_flatten_mapping.clear()
        _mesh_resources.flatten_name_to_root_dims.clear()
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
        _redistribute._gen_transform_infos.cache_clear()


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
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Make every tensor created inside a fake one: shapes and lifetimes are real, the data is not there.

    DTensor works out its results' shapes with fake tensors of the *global* shape and borrows the active fake
    mode for them; here it uses one of its own, so that they are not counted as this rank's memory. Where a
    program reads a tensor's value it gets 1. The garbage collector rests meanwhile: what a cycle keeps alive
    does not depend on when it runs. Warnings are for people who train, and are not shown.
    """
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_apart(propagator: ShardingPropagator, op_schema: Any) -> Any:
        with unset_fake_temporarily():
            return propagate(propagator, op_schema)

    with ExitStack() as stack:
        stack.callback(setattr, ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate)
        ShardingPropagator._propagate_tensor_meta_non_cached = propagate_apart  # type: ignore[assignment, method-assign]
        if gc.isenabled():
            stack.callback(gc.enable)
            gc.disable()
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name in _ADVISERS:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        mode = stack.enter_context(FakeTensorMode())
        stack.enter_context(_OneForEveryValue())  # type: ignore[no-untyped-call]
        yield mode


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


class _OneForEveryValue(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers ``tensor.item()`` where there is no data: 1, in the tensor's type."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 1.0 if args[0].is_floating_point() else args[0].dtype is torch.bool or 1


def stand_in_device() -> torch.device:
    """The device that stands for the GPU: FSDP2 treats it alike, and its flash attention needs no GPU."""
    return torch.device("cpu")
