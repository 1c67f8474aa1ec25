"""Differences of FSDP2, and of the modules around it, between versions of torch.

Each rule is one field, read in the source of the versions on both sides of the change; no other module
checks for a version. An estimate is for the given version, by default the installed one.
"""

from __future__ import annotations

import re
from functools import cache
from inspect import getsource, signature

import msgspec

from fsdp2prof.errors import ModelError

_OLDEST, _NEWEST = (2, 4), (2, 13)
"""Versions whose source was read."""


class TorchRules(msgspec.Struct, frozen=True, kw_only=True):
    """The behaviour of one version of torch."""

    version: str
    """``2.13``."""
    reduce_scatter_input_on_default_stream: bool
    """From 2.5 on the reduce-scatter's input is made on the compute stream and held until the next group's;
    before, on the reduce-scatter's own stream, whose pool keeps it, and dropped at once.
    Source: ``_fsdp_collectives.foreach_reduce`` of 2.4.0 and 2.5.0; pytorch #129721."""
    all_reduce_input_is_held: bool
    """From 2.6 on what HSDP's all-reduce reduces is held until the end of backward, also where gradients are
    a copy of it in another dtype; before, it is dropped as soon as that copy is made.
    Source: ``_fsdp_collectives.foreach_reduce`` of 2.5.1 and 2.6.0; pytorch #140044."""
    root_obeys_reshard: bool
    """From 2.8 on the root reshards when set to; before, it stays gathered regardless.
    Source: ``FSDPState._lazy_init`` of 2.7.0 and 2.8.0."""
    collectives_record_streams: bool
    """Before 2.8 NCCL's asynchronous collectives (tensor parallelism's, not FSDP2's own) call
    ``record_stream`` on their tensors unless ``TORCH_NCCL_AVOID_RECORD_STREAMS=1``.
    Source: pytorch #111431, #148590, #150352 (taken out of 2.7), #150398."""
    rms_norm_is_fused: bool
    """From 2.9 on ``nn.RMSNorm`` runs as one kernel on CUDA, which keeps its input and one number a row.
    Source: ``aten::_fused_rms_norm``, which 2.8 does not have."""
    partitioner_knows_parameters: bool
    """From 2.8 on AOTAutograd's partitioner knows that saving a parameter is free; before, it saves what
    was made of one where that is smaller: weights cast to float8, where nothing is checkpointed.
    Source: ``min_cut_rematerialization_partition`` of 2.7.0 and 2.8.0."""
    clipping_reduces_every_norm: bool
    """From 2.10 on ``clip_grad_norm_`` all-reduces the norms of all parameters; before, their total."""
    pipelines_gather_stages: bool
    """From 2.10 on a pipeline schedule of several stages a rank gathers the next three stages it works on and
    reshards the others; before, a stage stays gathered from its first forward to its last backward.
    Source: ``_add_unshard_reshard`` of schedules.py, which all these schedules use; pytorch #165467."""
    prefers_cudnn_attention: bool
    """From 2.11 on ``scaled_dot_product_attention`` chooses cuDNN first on compute capability 9.0 and 10.0.
    Source: ``check_prefer_cudnn_attention`` of sdp_utils.cpp, which asks for a cuDNN above 9.15; the wheels
    have one from 2.11 on (transformers #48163). Seen on an H100 with torch 2.11.0."""


def torch_rules(version: str | None = None) -> TorchRules:
    """The rules of a version of torch, by default the installed one.

    Raises ``ModelError`` for a version whose source was not read.
    """
    if version is None:
        return _rules(min(_parsed(_installed()) or _NEWEST, _NEWEST))
    parsed = _parsed(version)
    if parsed is None or not _OLDEST <= parsed <= _NEWEST:
        oldest, newest = (".".join(map(str, end)) for end in (_OLDEST, _NEWEST))
        raise ModelError(f"torch: {version!r} is not supported; versions from {oldest} to {newest} are")
    return _rules(parsed)


@cache
def _rules(version: tuple[int, int]) -> TorchRules:
    return TorchRules(
        version=".".join(map(str, version)),
        reduce_scatter_input_on_default_stream=version >= (2, 5),
        all_reduce_input_is_held=version >= (2, 6),
        root_obeys_reshard=version >= (2, 8),
        collectives_record_streams=version < (2, 8),
        rms_norm_is_fused=version >= (2, 9),
        partitioner_knows_parameters=version >= (2, 8),
        clipping_reduces_every_norm=version >= (2, 10),
        pipelines_gather_stages=version >= (2, 10),
        prefers_cudnn_attention=version >= (2, 11),
    )


def _parsed(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d{1,3})\.(\d{1,3})(?![\d])", version)
    return None if match is None else (int(match[1]), int(match[2]))


@cache
def _installed() -> str:
    from importlib import metadata  # which takes longer than all else here

    return metadata.version("torch")  # without importing it


@cache
def installed_root_obeys_reshard() -> bool:
    """Whether the installed torch's root can be set to reshard.

    Where it obeys, ``reshard_after_forward`` has a default of its own for "the root does not, others do".
    """
    from torch.distributed.fsdp import fully_shard

    return signature(fully_shard).parameters["reshard_after_forward"].default is None


def expert_mesh_refusal() -> str | None:
    """The reason parameters of one module cannot be sharded over separate meshes; ``None`` if they can."""
    import torch
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    if hasattr(_fsdp_common, "ShardPlacementResult"):
        return None
    return f"torch {torch.__version__} shards all parameters of a module over one mesh"


def packed_parameters_refusal() -> str | None:
    """Why parameters of bytes cannot be gathered as such under mixed precision, ``None`` if they can."""
    import torch
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    if "is_floating_point" in getsource(FSDPParam.init_dtype_attrs):
        return None
    return f"torch {torch.__version__} would cast bytes to the dtype of compute"


def fsdp_method_refusal(name: str) -> str | None:
    """Reason why an ``FSDPModule`` lacks a setter, ``None`` if it has the method."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    if hasattr(FSDPModule, name):
        return None
    return f"torch {torch.__version__} has no FSDPModule.{name}"
