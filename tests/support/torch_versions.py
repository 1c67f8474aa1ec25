"""What some of the supported versions of torch cannot do, so that tests do not ask it of them."""

from __future__ import annotations

import torch

__all__ = [
    "FROZEN_PARAMETERS_MAY_DIFFER_IN_DTYPE",
    "REPLICAS_TRAIN_ON_CPU",
    "TENSOR_PARALLEL_SHARDS_UNEVENLY",
]

_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

FROZEN_PARAMETERS_MAY_DIFFER_IN_DTYPE = _VERSION >= (2, 9)
"""FSDP2 of torch 2.7 wants one original dtype of all parameters of a group, not of those that are trained."""

REPLICAS_TRAIN_ON_CPU = _VERSION >= (2, 8)
"""FSDP2 of torch 2.7 asserts a GPU's event after the all-reduce of HSDP."""

TENSOR_PARALLEL_SHARDS_UNEVENLY = _VERSION >= (2, 8)
"""``fully_shard`` of torch 2.7 refuses a parameter whose tensor-parallel part the ranks do not divide."""
