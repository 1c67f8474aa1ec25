"""FSDP's own structures, as the manifest tells them: parameter groups, meshes, process groups, tensors.

What ``torch.compile`` has run in this process, and when it is about to run.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from fsdp2prof.manifest import (
    MeshInfo,
    OptimizerInfo,
    ParameterInfo,
    ParamGroupInfo,
    ProcessGroupInfo,
    TensorInfo,
)
from fsdp2prof.recorder.guard import guard
from fsdp2prof.recorder.model.members import named_modules, named_parameters
from fsdp2prof.recorder.model.ownership import state_dtypes, unsharded_tensors
from fsdp2prof.recorder.model.roots import Root, param_groups
from fsdp2prof.storage_tracker import has_compiled


def describe_param_groups(roots: Iterable[Root]) -> list[ParamGroupInfo]:
    """Describe every parameter group of every root, in module order. Lazy initialization must be over."""
    groups: list[ParamGroupInfo] = []
    contexts: dict[int, int] = {}
    for root in roots:
        module = root.module
        names = () if module is None else (name for name, _ in named_parameters(module))
        positions = {name: position for position, name in enumerate(names)}
        groups += [
            _param_group(root, state, index, group, positions, contexts)
            for state in root.states
            for index, group in enumerate(param_groups(state))
        ]
    add_forward_order(groups, roots)
    return groups


def add_forward_order(groups: Sequence[ParamGroupInfo], roots: Iterable[Root]) -> None:
    """Say of each described group where its forwards ended among those of its root."""
    for root in roots:
        own = [group for group in groups if group.root == root.index]
        for number, group in enumerate(own):
            group.forward_positions = [at for at, which in enumerate(root.forward_order) if which == number]
            group.only_inputs = root.only_inputs.get(number, False)


def describe_norms(roots: Iterable[Root]) -> list[str]:
    """Name the classes of normalizations in the models, with the modules that define them."""
    models = [root.module for root in roots if root.module is not None]
    kinds = {type(module) for model in models for _, module in named_modules(model)}
    classes = {kind for kind in kinds if kind.__name__.endswith("Norm")}
    return sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in classes)


def describe_process_groups(groups: Iterable[ParamGroupInfo]) -> list[ProcessGroupInfo]:
    """Describe every process group this rank is in, naming the mesh dimension it spans where one does."""
    mesh_dims: dict[str, str] = {}
    for group in groups:
        for name, dim in zip(group.mesh.dim_groups, group.mesh.dim_names or [], strict=False):
            mesh_dims.setdefault(name, dim)
    return [
        ProcessGroupInfo(
            name=process_group.group_name,
            desc=getattr(process_group, "group_desc", ""),
            backend=str(dist.get_backend(process_group)),
            ranks=dist.get_process_group_ranks(process_group),
            mesh_dim=mesh_dims.get(process_group.group_name),
        )
        for process_group in dist.distributed_c10d._world.pg_map
        if isinstance(process_group, dist.ProcessGroup)
    ]


def describe_optimizers(optimizers: Iterable[Optimizer]) -> list[OptimizerInfo]:
    """Describe optimizers and count the bytes of their state on this rank."""
    return [
        OptimizerInfo(
            class_name=type(optimizer).__qualname__,
            state_bytes=sum(_local(tensor).nbytes for _, _, tensor in _optimizer_state(optimizer)),
            param_groups=len(optimizer.param_groups),
            parameters=sum(len(group["params"]) for group in optimizer.param_groups),
            defaults={name: repr(value) for name, value in optimizer.defaults.items()},
            state_dtypes=state_dtypes(tensor for _, _, tensor in _optimizer_state(optimizer)),
            learning_rates=[_learning_rate(group.get("lr")) for group in optimizer.param_groups],
        )
        for optimizer in optimizers
    ]


def _learning_rate(rate: object) -> float | None:
    """Return a learning rate as a number; None of a tensor that is not a plain one on the CPU."""
    if type(rate) is torch.Tensor and rate.device.type == "cpu" and rate.numel() == 1:
        rate = rate.item()
    return float(rate) if isinstance(rate, (int, float)) and math.isfinite(rate) else None


def describe_tensors(
    roots: Iterable[Root], optimizers: Iterable[Optimizer], address: Callable[[torch.Tensor], int]
) -> list[TensorInfo]:
    """List the storages of parameters (gathered too), gradients, optimizer state and buffers alive now.

    ``address`` gives that of a tensor's storage in the memory recording.
    """
    tensors: list[TensorInfo] = []
    owners: dict[int, tuple[int, str, str]] = {}
    for root in roots:
        for state in root.states:
            for group in param_groups(state):
                for parameter in group.fsdp_params:
                    owner = root.index, group._module_fqn or "", parameter._param_fqn or ""
                    owners[id(parameter.sharded_param)] = owner
                    # Not resharded yet: a root after a forward without backward (frozen, or evaluated).
                    gathered = parameter.all_gather_outputs
                    tensors += [_tensor("unsharded_parameter", owner, one, address) for one in gathered]
                    data = parameter._sharded_param_data
                    tensors.append(_tensor("sharded_parameter", owner, data, address))
                    if (gradient := parameter.sharded_param.grad) is not None:
                        tensors.append(_tensor("sharded_gradient", owner, gradient, address))
    for optimizer in optimizers:
        for parameter, key, tensor in _optimizer_state(optimizer):
            index, fqn, name = owners.get(id(parameter), (0, "", "not sharded"))
            tensors.append(_tensor("optimizer_state", (index, fqn, f"{name}.{key}"), tensor, address))
    for root in roots:
        tensors += _whole_tensors(root, address)
    return [tensor for tensor in tensors if tensor.nbytes]


def _whole_tensors(root: Root, address: Callable[[torch.Tensor], int]) -> Iterable[TensorInfo]:
    """List the tensors that a root holds whole: its buffers, parameters that FSDP does not shard, and
    their gradients."""
    modules = {group._module_fqn or "" for state in root.states for group in param_groups(state)}
    wrapped = {name for fqn in modules for name in fqn.split(", ")}
    for kind, name, tensor in unsharded_tensors(root):
        around = (name.rsplit(".", cut)[0] for cut in range(1, name.count(".") + 1))
        owner = root.index, next((fqn for fqn in around if fqn in wrapped), ""), name
        if tensor.layout == torch.strided:
            yield _tensor("buffer" if kind == "buffer" else "unsharded_parameter", owner, tensor, address)
        if tensor.grad is not None and tensor.grad.layout == torch.strided:
            yield _tensor("unsharded_gradient", owner, tensor.grad, address)


def _param_group(
    root: Root, state: Any, index: int, group: Any, positions: dict[str, int], contexts: dict[int, int]
) -> ParamGroupInfo:
    mesh_info = group.mesh_info
    after_forward = group.post_forward_mesh_info
    policy = group.mp_policy
    reshard: bool | int = after_forward is not None
    post_forward_group = None
    if after_forward is not None and after_forward != mesh_info:
        reshard = int(after_forward.shard_mesh_size)
        post_forward_group = after_forward.shard_process_group.group_name
    shard_group = getattr(mesh_info, "shard_process_group", None)
    reduce_scatter_group = getattr(mesh_info, "reduce_scatter_process_group", None) or shard_group
    return ParamGroupInfo(
        root=root.index,
        fqn=group._module_fqn or "",
        index=index,
        group_count=len(param_groups(state)),
        mesh=_mesh(mesh_info.mesh),
        shard_group=_group_name(shard_group),
        reduce_scatter_group=_group_name(reduce_scatter_group),
        all_reduce_group=_group_name(getattr(mesh_info, "replicate_process_group", None)),
        post_forward_group=post_forward_group,
        shard_world_size=getattr(mesh_info, "shard_mesh_size", 1),
        replicate_world_size=getattr(mesh_info, "replicate_mesh_size", 1),
        param_dtype=_dtype(policy.param_dtype),
        reduce_dtype=_dtype(policy.reduce_dtype),
        output_dtype=_dtype(policy.output_dtype),
        reshard_after_forward=reshard,
        offload=isinstance(group.offload_policy, CPUOffloadPolicy),
        offload_pin_memory=getattr(group.offload_policy, "pin_memory", False),
        unshard_async_op=group.unshard_async_op,
        requires_grad=any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params),
        parameters=[_parameter(parameter, mesh_info, positions) for parameter in group.fsdp_params],
        forward_prefetch=_prefetched(state._states_to_forward_prefetch),
        backward_prefetch=_prefetched(state._states_to_backward_prefetch),
        unshard_in_backward=getattr(group, "unshard_in_backward", True),
        reshard_after_backward=group.reshard_after_backward,
        reduce_scatter_max_input_buffers=getattr(group, "reduce_scatter_max_input_buffers", 1),
        all_gather_comm=_custom(getattr(group, "_all_gather_comm", None)),
        reduce_scatter_comm=_custom(getattr(group, "_reduce_scatter_comm", None)),
        cast_forward_inputs=policy.cast_forward_inputs,
        gradient_divide_factor=getattr(group, "gradient_divide_factor", None),
        comm_context=contexts.setdefault(id(group.comm_ctx), root.index),
    )


def _parameter(parameter: Any, mesh_info: Any, positions: dict[str, int]) -> ParameterInfo:
    name = parameter._param_fqn or parameter._module_info.param_name
    if parameter.all_gather_outputs:
        world_size = getattr(mesh_info, "shard_mesh_size", 1)
        dtypes = [_dtype(output.dtype) or "" for output in parameter.all_gather_outputs]
        numels = [output.numel() // world_size for output in parameter.all_gather_outputs]
    else:
        dtypes = [_dtype(parameter.param_dtype or parameter.orig_dtype) or ""]
        numels = [parameter.padded_sharded_param_size.numel()]
    return ParameterInfo(
        fqn=name,
        global_shape=list(parameter.sharded_param.shape),
        local_shape=list(parameter.sharded_size),
        padded_local_shape=list(parameter.padded_sharded_param_size),
        dtype=_dtype(parameter.orig_dtype) or "",
        placement=f"Shard({parameter.fsdp_placement.dim})",
        requires_grad=parameter.sharded_param.requires_grad,
        all_gather_dtypes=dtypes,
        all_gather_numels=numels,
        address=_data_pointer(parameter._sharded_param_data),
        tensor_parallel=_other_placements(parameter) if parameter.is_dtensor else None,
        position=positions.get(name, -1),
    )


def _data_pointer(tensor: torch.Tensor) -> int | None:
    return None if isinstance(tensor, FakeTensor) else tensor.untyped_storage().data_ptr()


def _custom(comm: Any) -> str | None:
    name = type(comm).__name__
    return None if comm is None or name.startswith("Default") else name


def _other_placements(parameter: Any) -> str:
    """Placements of a parameter that was a DTensor before ``fully_shard``: ``tp: Shard(dim=0)``."""
    names = parameter._spmd_mesh.mesh_dim_names or tuple(map(str, range(parameter._spmd_mesh.ndim)))
    return ", ".join(
        f"{name}: {placement}" for name, placement in zip(names, parameter._spmd_placements, strict=True)
    )


def _mesh(mesh: Any) -> MeshInfo:
    return MeshInfo(
        device_type=mesh.device_type,
        shape=list(mesh.shape),
        dim_names=list(mesh.mesh_dim_names) if mesh.mesh_dim_names else None,
        dim_groups=[mesh.get_group(dim).group_name for dim in range(mesh.ndim)],
    )


def _prefetched(states: list[Any]) -> list[str]:
    return list(dict.fromkeys(group._module_fqn or "" for state in states for group in param_groups(state)))


def _optimizer_state(optimizer: Optimizer) -> Iterable[tuple[Any, str, torch.Tensor]]:
    """Parameter, key and tensor of an optimizer's state; LBFGS keeps lists of them under one key.

    A script's own may keep them in its groups, a list with a tensor for each parameter.
    """
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    yield parameter, str(key), tensor
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params" and isinstance(value, (list, tuple)) and len(value) == len(group["params"]):
                for parameter, tensor in zip(group["params"], value, strict=True):
                    if isinstance(tensor, torch.Tensor):
                        yield parameter, str(key), tensor


def _tensor(
    category: str,
    owner: tuple[int, str, str],
    tensor: torch.Tensor,
    address: Callable[[torch.Tensor], int],
) -> TensorInfo:
    root, fqn, name = owner
    local = _local(tensor)
    return TensorInfo(
        category=category,
        root=root,
        fqn=fqn,
        name=name,
        address=address(local),
        nbytes=local.untyped_storage().nbytes(),
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _group_name(process_group: Any) -> str | None:
    return None if process_group is None else str(process_group.group_name)


def _dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


_ENTRY = "_is_skip_guard_eval_unsafe_stance"
"""Of ``torch._dynamo.eval_frame``: called where compiled code is entered, before dynamo saves the thread's
dispatch keys. Dynamo restores them for the compiled code: a mode left later would still be among them."""


def compiled_modules(roots: Iterable[Root]) -> list[str] | None:
    """Name the compiled modules under the roots; a root itself is the empty string.

    None if ``torch.compile`` has made no graph since the process began; empty if no graph belongs to a
    module under a root.
    """
    if not has_compiled():
        return None
    frames: Any = sys.modules["torch._dynamo.eval_frame"]
    wrapped = {id(item._orig_mod) for item in gc.get_objects() if type(item) is frames.OptimizedModule}
    return [
        name
        for root in roots
        if root.module is not None
        for name, module in named_modules(root.module)
        if id(module) in wrapped or module._compiled_call_impl is not None
    ]


def may_run_unseen() -> bool:
    """Whether something was given to ``torch.compile`` that :func:`watch_entry` would not see."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if hasattr(frames, _ENTRY):
        return False
    # Wrappers that only disable dynamo are also found here; they have no backend.
    return any(callable(backend) for backend in getattr(frames, "cached_backends", {}).values())


def watch_entry(on_entry: Callable[[], None]) -> Callable[[], None] | None:
    """Call ``on_entry`` each time compiled code is about to run, or to be compiled.

    Returns a function that ends this; None where this torch has no place to see it.
    """
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    original = getattr(frames, _ENTRY, None)
    if original is None:
        return None

    def enter() -> None:
        caller: FrameType | None = sys._getframe()
        while caller is not None and caller.f_code.co_filename != frames.__file__:
            caller = caller.f_back
        known = {} if caller is None else caller.f_locals
        callback = known.get("callback", getattr(known.get("self"), "callback", None))
        if callable(callback):  # None where dynamo is being disabled, as by our own hooks
            on_entry()

    ours = guard.around("memory", original, enter, in_dynamo=True)
    setattr(frames, _ENTRY, ours)

    def end() -> None:
        if getattr(frames, _ENTRY) is ours:
            setattr(frames, _ENTRY, original)

    return end
