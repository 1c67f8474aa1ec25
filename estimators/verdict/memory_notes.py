"""A memory estimate's assumptions, and the memory that it cannot count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp2prof.estimators.allocator.cuda_kernels import BLAS_WORKSPACE_BYTES
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.simulate.micro_batches import CAPTURED_MICRO_BATCHES, captured_policy
from fsdp2prof.estimators.techniques.registry import notes_of
from fsdp2prof.results.estimate import OutsideAllocator, OutsidePart
from fsdp2prof.units import format_bytes

_CONTEXT = OutsidePart(
    name="CUDA context and kernels",
    low=400 << 20,
    high=900 << 20,
    source="no vendor's figure: FSDP2 runs whose own out-of-memory reports leave 1.1 GiB on an A100 for "
    "context, kernels and one communicator (ccl-bench), and 1.06 GB on an H100 (NVIDIA/nccl#1685)",
)
_COMMUNICATOR = OutsidePart(
    name="communicator",
    low=50 << 20,
    high=400 << 20,
    source="NCCL's buffers of 10 MiB and 2 MiB a channel (NVIDIA/nccl#1685), for 4 to 32 channels of a ring",
)


_ATTENTION = {
    "flash": "attention runs as flash attention",
    "flash3": "attention runs as FlashAttention-3, which keeps what flash attention keeps",
    "efficient": "attention runs as the memory-efficient kernel, whose saved tensors are flash attention's",
    "cudnn": "attention runs as cuDNN's, whose saved tensors and fp32 dQ are flash attention's; "
    "further memory of its closed kernels is unknown",
    "math": "attention runs as separate operators and keeps its probabilities (B, H, S, S)",
}
_NORM = {
    "composed": "as separate operators in fp32",
    "fused": "as one kernel, which keeps its input and one number a row",
}


def outside_allocator_bytes(mesh: MeshSpec, policy: PolicySpec) -> OutsideAllocator:
    """Range of device memory that no allocator counts: CUDA context and kernels, NCCL's buffers.

    Each communicator takes memory by its number of channels and peers.
    """
    sizes = [mesh.fsdp_size, mesh.dp_replicate, mesh.tp, mesh.cp, mesh.pp, mesh.ep]
    sizes += [mesh.expert_fsdp_size] if mesh.ep > 1 else []
    communicators = sum(size > 1 for size in sizes) + policy.separate_reduce_scatter_group
    parts = [_CONTEXT]
    if communicators:
        name = "one communicator" if communicators == 1 else f"{communicators} communicators"
        low, high = communicators * _COMMUNICATOR.low, communicators * _COMMUNICATOR.high
        parts.append(replace(_COMMUNICATOR, name=name, low=low, high=high))
    low, high = (sum(getattr(part, end) for part in parts) for end in ("low", "high"))
    return OutsideAllocator(low=low, high=high, parts=parts)


def assumptions(how: Sequence[str], mesh: MeshSpec, policy: PolicySpec) -> list[str]:
    """Everything the numbers rest on, one sentence each."""
    workspace = format_bytes(BLAS_WORKSPACE_BYTES)
    notes = [
        *how,
        "rank 0, which holds a full shard of every parameter; materialized from meta, without a checkpoint",
        f"reserved: the caching allocator with {policy.allocator or 'expandable'} segments, "
        "replayed over two steps, the second with optimizer state",
        f"{_ATTENTION[policy.attention]}; a cuBLAS workspace of {workspace} each for forward and backward",
        "tensors are freed when the training drops them; none is in a reference cycle",
        "CUDA context, kernels and NCCL buffers are outside the allocator and given as a range",
    ]
    if captured_policy(mesh, policy) != policy:
        notes.append(
            f"{CAPTURED_MICRO_BATCHES} of {policy.grad_accum} micro-batches executed: those between the "
            "first and the last allocate the same"
        )
    if not policy.rules.reduce_scatter_input_on_default_stream:
        notes.append(
            f"torch {policy.rules.version}: the reduce-scatter's input is made on its own stream, "
            "as until 2.4"
        )
    if policy.norm is not None:
        notes.append(f"RMSNorm {_NORM[policy.norm]}")
    if policy.mlp == "fused":
        notes.append("SiLU and product of SwiGLU as one kernel, which keeps its two factors")
    if policy.reshard_root or (policy.reshard_root is None and policy.reshard == "always"):
        notes.append(
            "the root reshards after forward as configured (torch 2.8 and newer)"
            if policy.rules.root_obeys_reshard
            else "the root stays gathered regardless of its setting, as in torch before 2.8"
        )
    return [*notes, *notes_of("memory", mesh, policy)]
