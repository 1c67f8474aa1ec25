"""What some of the supported versions of torch cannot do, so that tests do not ask it of them."""

from __future__ import annotations

import torch

__all__ = [
    "FROZEN_PARAMETERS_MAY_DIFFER_IN_DTYPE",
    "GROUPED_PRODUCTS",
    "GROUPS_QUERIES_ON_CPU",
    "LOSSES_IN_PIECES",
    "MEASURED_ON_A_GPU",
    "REPLICAS_TRAIN_ON_CPU",
    "SCHEDULES_ARE_AS_TODAY",
    "TENSOR_PARALLEL_SHARDS_UNEVENLY",
]

_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

FROZEN_PARAMETERS_MAY_DIFFER_IN_DTYPE = _VERSION >= (2, 9)
"""FSDP2 of torch 2.7 wants one original dtype of all parameters of a group, not of those that are trained."""

REPLICAS_TRAIN_ON_CPU = _VERSION >= (2, 8)
"""FSDP2 of torch 2.7 asserts a GPU's event after the all-reduce of HSDP."""

TENSOR_PARALLEL_SHARDS_UNEVENLY = _VERSION >= (2, 8)
"""``fully_shard`` of torch 2.7 refuses a parameter whose tensor-parallel part the ranks do not divide."""

LOSSES_IN_PIECES = _VERSION >= (2, 8)
"""Losses in pieces keep the head gathered by ``set_reshard_after_forward``, which torch 2.7 lacks; its
tensor parallelism cannot cut their inputs either."""

GROUPS_QUERIES_ON_CPU = _VERSION >= (2, 8)
"""On a CPU, torch 2.7 runs grouped-query attention as single operators, so that no attention is counted."""

GROUPED_PRODUCTS = _VERSION >= (2, 8)
"""Experts of torch 2.7 are not one grouped product, whose kernel is named."""

SCHEDULES_ARE_AS_TODAY = _VERSION >= (2, 10)
"""Before, stages held gradients and reduced them in another order, and the norm's reduction differed."""

MEASURED_ON_A_GPU = _VERSION >= (2, 11)
"""What ``tests/data/gpu`` holds was measured with torch 2.11."""
