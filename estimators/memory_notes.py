"""What a memory estimate refuses, what it assumes, and what it cannot count."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.allocator.cuda_kernels import BLAS_WORKSPACE_BYTES
from fsdp2prof.estimators.execution.pipeline_stage import micro_batches_in_flight
from fsdp2prof.estimators.spec.mesh import MeshSpec
from fsdp2prof.estimators.spec.policy import PolicySpec
from fsdp2prof.estimators.torch_rules import root_obeys_reshard
from fsdp2prof.results import OutsideAllocator
from fsdp2prof.units import format_bytes

__all__ = ["assumptions", "check_modelled", "outside_allocator_bytes"]

_CONTEXT_BYTES = (400 << 20, 900 << 20)
_COMMUNICATOR_BYTES = (50 << 20, 400 << 20)


def check_modelled(mesh: MeshSpec, policy: PolicySpec) -> None:
    """Raise ``ModelError`` for what cannot be executed."""
    if mesh.pp > 1 and policy.extra_model is not None:
        raise ModelError("a second model (extra_model) beside a pipeline is not modelled: leave pp at 1")
    if policy.float8 is not None and not policy.compile:
        raise ModelError(
            "float8 without compile: the casts that eager float8 keeps are not modelled; add compile"
        )


def outside_allocator_bytes(mesh: MeshSpec, policy: PolicySpec) -> OutsideAllocator:
    """Range of device memory that no allocator counts: CUDA context and kernels, NCCL buffers.

    The context with its loaded kernels takes 400 to 900 MiB; each communicator 50 to 400 MiB, by its number
    of channels and peers.
    """
    sizes = [mesh.fsdp_size, mesh.dp_replicate, mesh.tp, mesh.cp, mesh.pp, mesh.ep]
    sizes += [mesh.expert_fsdp_size] if mesh.ep > 1 else []
    communicators = sum(size > 1 for size in sizes) + policy.separate_reduce_scatter_group
    low, high = (
        context + communicators * each
        for context, each in zip(_CONTEXT_BYTES, _COMMUNICATOR_BYTES, strict=True)
    )
    return OutsideAllocator(low=low, high=high)


def assumptions(how: Sequence[str], mesh: MeshSpec, policy: PolicySpec) -> list[str]:
    """Everything the numbers rest on, one sentence each."""
    workspace = format_bytes(BLAS_WORKSPACE_BYTES)
    notes = [
        *how,
        "rank 0, which holds a full shard of every parameter; materialized from meta, nothing is loaded",
        f"reserved: the caching allocator with {policy.allocator} segments, replayed over two steps, "
        "the second with optimizer state",
        f"attention runs as flash attention; a cuBLAS workspace of {workspace} each for forward and backward",
        "CUDA context, kernels and NCCL buffers are outside the allocator and given as a range",
    ]
    if policy.reshard_root or (policy.reshard_root is None and policy.reshard == "always"):
        notes.append(
            "the root reshards after forward as told, which torch does from 2.8 on"
            if root_obeys_reshard()
            else "the root stays gathered whatever it is told, as torch keeps it before 2.8"
        )
    if policy.compile:
        notes.append(
            "compile: pointwise work between two FSDP labels of a block is fused away, which is approximate: "
            "published runs with op-selective checkpointing were met within 1%, others differ more"
        )
        if policy.ac == "none":
            notes.append(
                "compile without checkpointing: the compiler saves less than eager does: an upper bound"
            )
    if policy.float8 is not None:
        notes.append(
            "float8: memory as of the same compiled bf16 run; published pairs differ by less than 1%"
        )
    if mesh.tp > 1:
        notes.append("tensor parallelism executed with sequence-parallel norms and residuals")
    if mesh.ep > 1:
        notes.append(
            f"expert parallelism executed: tokens spread evenly, and this rank's experts receive "
            f"{policy.imbalance:g} times the mean; none is dropped"
        )
    if mesh.cp > 1:
        notes.append(
            f"context parallelism as analysed: each rank runs its {policy.seq_len // mesh.cp} of "
            f"{policy.seq_len} tokens; the ring's K and V in flight are not counted"
        )
    if mesh.pp > 1:
        notes.append(
            f"pipeline stage {policy.pp_stage} of {mesh.pp} under 1F1B: "
            f"{micro_batches_in_flight(mesh, policy)} of {policy.grad_accum} micro-batches in flight; "
            "receive buffers per micro-batch and neighbour, made in the first step and kept, as "
            "torch.distributed.pipelining does; what was sent last is kept till the next; "
            "gradients accumulate unsharded and are reduced after the last backward"
        )
    if policy.offload:
        notes.append(
            "offload: host bytes are those of the tensors; pinned memory is rounded up to powers of two"
        )
    if policy.extra_model is not None:
        notes.append(f"{policy.extra_model} runs forward only, without gradients, before each micro-batch")
    return notes
