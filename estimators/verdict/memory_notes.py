"""What a memory estimate refuses, what it assumes, and what it cannot count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.allocator.cuda_kernels import BLAS_WORKSPACE_BYTES
from fsdp2prof.estimators.config.choices import values_of
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.pipeline import schedule_rule
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.pipeline_stage import micro_batches_in_flight, micro_batches_under_way
from fsdp2prof.estimators.simulate.micro_batches import CAPTURED_MICRO_BATCHES, captured_policy
from fsdp2prof.results.estimate import OutsideAllocator, OutsidePart
from fsdp2prof.units import format_bytes, plural

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
_FLOAT8 = (
    "float8: linear layers inside blocks run as torchao's Float8Linear, whose sizes are multiples of 16",
    "mxfp8: linear layers inside blocks run as torchao's MXFP8Linear with its CUDA kernels, whose sizes are "
    "multiples of 32",
)
_NORM = {
    "composed": "as separate operators in fp32",
    "fused": "as one kernel, which keeps its input and one number a row",
}


def check_modelled(mesh: MeshSpec, policy: PolicySpec) -> None:
    """Raise ``ModelError`` for what cannot be executed."""
    if policy.float8 == "mxfp8" and mesh.tp > 1:
        raise ModelError("float8: mxfp8 under tensor parallelism is not modelled: leave tp=1")
    if policy.fp8_all_gather and any(isinstance(value, int) for value in values_of(policy.reshard)):
        raise ModelError("reshard to a number of ranks is not supported by FSDP2 with float8 all-gather")


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


def compile_notes(policy: PolicySpec, why_guessed: str | None) -> list[str]:
    """How the memory of compiled blocks was found, and why it was guessed if it was."""
    if not policy.compile:
        return []
    if why_guessed is None:
        return [
            "compile: each block's graph traced whole and cut by AOTAutograd's partitioner, that of the "
            "installed torch; kernels fused, and results kept out of memory, after inductor's rules"
        ]
    notes = [
        f"compile, guessed: {why_guessed}; pointwise work between two FSDP labels of a block is left out of "
        "the eager execution instead, which is approximate"
    ]
    if policy.ac == "none":
        notes.append("compile without checkpointing: the compiler saves less than eager does: an upper bound")
    return notes


def assumptions(how: Sequence[str], mesh: MeshSpec, policy: PolicySpec) -> list[str]:
    """Everything the numbers rest on, one sentence each."""
    workspace = format_bytes(BLAS_WORKSPACE_BYTES)
    notes = [
        *how,
        "rank 0, which holds a full shard of every parameter; materialized from meta, nothing is loaded",
        f"reserved: the caching allocator with {policy.allocator or 'expandable'} segments, "
        "replayed over two steps, the second with optimizer state",
        f"{_ATTENTION[policy.attention]}; a cuBLAS workspace of {workspace} each for forward and backward",
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
    if policy.recomputes_attention:
        notes.append("operator-selective checkpointing recomputes attention, too")
    if policy.keep_logits is not None:
        notes.append(
            "the script holds the logits "
            + ("in fp32 " if policy.keep_logits == "fp32" else "")
            + "through backward and until the next forward has made others"
        )
    if policy.ac_saves is not None:
        notes.append(f"operator-selective checkpointing also saves {', '.join(policy.ac_saves)}")
    if policy.ac_recomputes is not None:
        notes.append(
            f"products of the shapes of {', '.join(policy.ac_recomputes)} are recomputed and not counted"
        )
    if policy.norm is not None:
        notes.append(f"RMSNorm {_NORM[policy.norm]}")
    if policy.reshard_root or (policy.reshard_root is None and policy.reshard == "always"):
        notes.append(
            "the root reshards after forward as configured (torch 2.8 and newer)"
            if policy.rules.root_obeys_reshard
            else "the root stays gathered regardless of its setting, as in torch before 2.8"
        )
    if policy.float8 is not None:
        notes.append(_FLOAT8[policy.float8 == "mxfp8"])
        if mesh.tp > 1:
            notes.append(
                "float8 under tensor parallelism: activations are gathered first and cast then, where "
                "torchao's Float8ColwiseParallel casts first and gathers bytes"
            )
        if policy.fp8_all_gather:
            notes.append(
                "float8 all-gather: shards cast before it, with scales computed for all weights after the "
                "optimizer's step (precompute_float8_dynamic_scale_for_fsdp)"
            )
    if policy.loss == "fused":
        notes.append("fused loss: chunked as by Liger's kernel; gradients of head and input are held")
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
    if policy.async_tp:
        notes.append("asynchronous tensor parallelism: memory as without it, its symmetric buffers left out")
    if mesh.pp > 1:
        notes.append(
            f"pipeline stage {policy.pp_stage} of {mesh.pp} under {_schedule(mesh, policy)}: "
            f"{micro_batches_in_flight(mesh, policy)} of {policy.grad_accum} micro-batches in flight; "
            "receive buffers per micro-batch and neighbour, made in the first step and kept, as "
            "torch.distributed.pipelining does; what was sent last is kept till the next; "
            "gradients accumulate unsharded and are reduced after the last backward"
        )
    if policy.offload:
        notes.append(
            "offload: host bytes are those of the tensors; pinned memory is rounded up to powers of two"
        )
    return [*notes, *extra_model_notes(policy)]


def extra_model_notes(policy: PolicySpec) -> list[str]:
    """What is assumed of models that run forward only, one sentence each."""
    notes = [
        f"{extra.source} ({extra.role}) runs forward only, without gradients, before each micro-batch; "
        "sharded as the trained model is"
        for extra in policy.other_models
    ]
    if policy.runs_itself_before:
        notes.append(
            "the trained model runs forward without gradients before each micro-batch"
            + ("" if policy.lora is None else ", its adapters left out")
        )
    if policy.loss == "dpo":
        notes.append(
            "dpo: a micro-batch is 2 x batch_size sequences, chosen and rejected in one forward"
            + (
                ""
                if policy.extra_model is not None
                else "; the reference's log-probabilities are known before"
            )
        )
    return notes


def _schedule(mesh: MeshSpec, policy: PolicySpec) -> str:
    rule, stages = schedule_rule(policy.pp_schedule), policy.stages_per_rank
    made = rule.title if stages == 1 else f"{rule.title}, {stages} stages a rank run as one"
    if not rule.splits_backward:
        return made
    later = micro_batches_under_way(mesh, policy).weights
    return f"{made}, the weights' part of {plural(later, 'backward')} deferred at most"
