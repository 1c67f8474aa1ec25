"""Which rank this process is."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch.distributed as dist

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_WORLD_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True, slots=True)
class Identity:
    """A rank among its peers."""

    rank: int
    local_rank: int
    world_size: int


def identify() -> Identity:
    """Query the default process group, otherwise the environment of torchrun, Slurm, Open MPI or MPICH."""
    rank, world_size = _from_environment(_RANK, 0), _from_environment(_WORLD_SIZE, 1)
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    return Identity(rank, _from_environment(_LOCAL_RANK, 0), world_size)


def _from_environment(names: tuple[str, ...], default: int) -> int:
    return next((int(value) for name in names if (value := os.environ.get(name, "")).isdigit()), default)
