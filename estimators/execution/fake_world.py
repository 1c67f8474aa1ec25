"""A training job that exists on paper: a fake process group of any size, in this process.

``CPUOffloadPolicy`` when the device's stand-in is the CPU itself: which storages are the host's.

FSDP2 copies shards to the device before each all-gather and reduced gradients back. Where device and host are
the same those copies do nothing, so here they are made, and what lies on the host is allocated on a stream of
its own that tells it apart.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor, _redistribute
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import checkpoint

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.mesh import MeshSpec

if tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 10):  # later versions know it by themselves
    import torch.distributed._tools.fake_collectives  # what c10d's operators return; imports the compiler


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
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    sys.excepthook = hook  # each group wraps it in one that names a rank of the fake world
    try:
        with _events(), _labels_outside_of_checkpointing():
            yield init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", mesh.fsdp_dim, "tp"))
    finally:
        dist.destroy_process_group()
        forget_meshes()


def forget_meshes() -> None:
    """Forget the meshes of a process group that no longer exists, and DTensor's cached results on them.

    Up to torch 2.9 the next world's meshes get its groups; later, a redistribution on an equal mesh may be
    given the shapes of the previous world.
    """
    _expert_meshes.clear()
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


_expert_meshes: dict[MeshSpec, DeviceMesh] = {}
"""Made in the process group that exists: all models on a mesh share their communicators."""


def expert_mesh(mesh: MeshSpec) -> DeviceMesh | None:
    """Mesh of the experts over the same ranks: dp_replicate, efsdp, ep; ``None`` if they have none."""
    if mesh.ep == 1:
        return None
    if mesh not in _expert_meshes:
        shape = (mesh.dp_replicate, mesh.expert_fsdp_size, mesh.ep)
        names = ("dp_replicate", "efsdp", "ep")
        _expert_meshes[mesh] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return _expert_meshes[mesh]


@contextmanager
def _events() -> Iterator[None]:
    """Let the stand-in device's streams create events like a GPU's, and let them be waited for.

    torch 2.7 requires the event of an all-reduce; an event of an all-gather is waited for on the current
    stream of the accelerator present.
    """
    record_event, current_stream = torch.cpu.Stream.record_event, torch.accelerator.current_stream
    torch.cpu.Stream.record_event = lambda stream: torch.cpu.Event()  # type: ignore[assignment, method-assign]
    torch.accelerator.current_stream = torch.cpu.current_stream  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cpu.Stream.record_event = record_event  # type: ignore[method-assign]
        torch.accelerator.current_stream = current_stream


@contextmanager
def _labels_outside_of_checkpointing() -> Iterator[None]:
    """Let selective checkpointing pass labels over, which some versions compare with those of the forward.

    FSDP enters others when a block is run again than it did at first. Run-time support, not a rule of a run.
    """
    ignored = getattr(checkpoint, "SAC_IGNORED_OPS", None)
    profiler = torch.ops.profiler
    labels = {profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction}
    added = labels - ignored if isinstance(ignored, set) else set()
    if isinstance(ignored, set):
        ignored |= added
    try:
        yield
    finally:
        if isinstance(ignored, set):
            ignored -= added


def stand_in_device() -> torch.device:
    """The device that stands for the GPU: FSDP2 treats it the same, and its flash attention needs no GPU."""
    return torch.device("cpu")


Direction: TypeAlias = Literal["host_to_device", "device_to_host"]


class HostMemory:
    """Where sharded parameters, gradients and optimizer state live: on the host, or on the device.

    ``offloads`` is FSDP's own offload of all of them; ``is_used`` also includes that of optimizer state or
    activations alone.
    """

    def __init__(self, *, offloads: bool, is_used: bool | None = None) -> None:
        self.offloads = offloads
        self.is_used = offloads if is_used is None else is_used
        self.stream = torch.cpu.Stream()
        """Its operators run on the host."""
        self.copying: Direction | None = None
        """Between host and device, by the operator that runs now."""
        self.copies_on: object | None = None
        """The stream that such a copy is queued on; none for the current one."""

    def __call__(self) -> AbstractContextManager[None]:
        """Allocate on the host, where offloaded, what is allocated inside."""
        return torch.cpu.stream(self.stream) if self.offloads else nullcontext()

    def always(self) -> AbstractContextManager[None]:
        """Allocate on the host what is allocated inside, if anything is there."""
        return torch.cpu.stream(self.stream) if self.is_used else nullcontext()

    def copy(self, tensor: Tensor, direction: Direction) -> Tensor:
        """Return a copy between host and device of a tensor, queued on the current stream."""
        self.copying, self.copies_on = direction, torch.cpu.current_stream()
        try:
            with self.always() if direction == "device_to_host" else nullcontext():
                return tensor.clone()
        finally:
            self.copying = self.copies_on = None


@contextmanager
def host_memory(*, offloads: bool, is_used: bool) -> Iterator[HostMemory]:
    """Make FSDP's copies between host and device real while inside, if it ``offloads``."""
    host = HostMemory(offloads=offloads, is_used=is_used)
    if not offloads:
        yield host
        return
    inputs = FSDPParam.all_gather_inputs

    def copied_inputs(parameter: FSDPParam) -> list[Tensor]:
        if parameter.sharded_state != ShardedState.SHARDED:
            return inputs.fget(parameter)  # type: ignore[attr-defined, no-any-return]
        data = host.copy(parameter._sharded_param_data, "host_to_device")
        return [data.to(parameter.param_dtype or parameter.orig_dtype)]

    to = Tensor.to

    def copied_to_host(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and isinstance(args[0], torch.device) and "non_blocking" in kwargs:
            return host.copy(tensor, "device_to_host")  # FSDP's of a reduced gradient
        return to(tensor, *args, **kwargs)

    FSDPParam.all_gather_inputs = property(copied_inputs)  # type: ignore[assignment, method-assign]
    Tensor.to = copied_to_host  # type: ignore[assignment, method-assign]
    try:
        yield host
    finally:
        FSDPParam.all_gather_inputs = inputs  # type: ignore[method-assign]
        del Tensor.to  # what it inherits shows again
