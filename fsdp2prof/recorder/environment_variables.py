"""Environment variables that change how a training runs, for the launcher and the ranks alike."""

from __future__ import annotations

import os
from collections.abc import Mapping

_PREFIXES = (
    "NCCL_",
    "RCCL_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_",
    "CUBLAS",
    "HIP_",
    "ROCR_",
    "GLOO_",
    "TORCHINDUCTOR_",
    "UCX_",
    "FI_",
)
_NAMES = frozenset(
    {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "NVIDIA_VISIBLE_DEVICES", "LD_PRELOAD", "OMP_PROC_BIND"}
)
_OF_ONE_RUN = frozenset({"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"})
"""Paths that differ from run to run and change nothing."""


def relevant_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that change how a training runs, sorted by name."""
    kept = (name for name in environment if name.startswith(_PREFIXES) or name in _NAMES)
    names = sorted(name for name in kept if name not in _OF_ONE_RUN)
    return {name: environment[name] for name in names}
