"""Which process group several ranks can have here."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace

from benchmarks.gpu_day.day import Day, Failed, Skipped

EXAMPLE = "examples/train_tiny_fsdp2.py"
_PROBE_S = 60.0
_SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
"""Lets ranks share a GPU, from NCCL 2.30 on."""
_SHARING_NCCL = (2, 30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """A process group that was seen to work."""

    name: str
    most_ranks: int | None
    """``None``: any number."""
    environment: dict[str, str] = field(default_factory=dict)
    why: str
    """How it was chosen."""


ALONE = Backend(name="nccl", most_ranks=1, why="one rank alone")


def torchrun(ranks: int) -> list[str]:
    """The beginning of a command line of a local torchrun."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", str(ranks)),
    ]


def choose_backend(day: Day) -> Backend:
    """Try two ranks with NCCL, then with gloo on CUDA tensors; one rank alone where neither works.

    Each try has a time limit: ranks that cannot talk to each other hang.
    """
    devices = len(day.machine.devices)
    if not devices:
        return Backend(name="gloo", most_ranks=None, why="gloo on CPU tensors: no CUDA device")
    nccl = f"NCCL {day.machine.nccl}"
    if devices > 1:
        candidates = [Backend(name="nccl", most_ranks=devices, why=f"{nccl}; {devices} GPUs")]
    else:
        ways: list[tuple[str, dict[str, str]]] = [("NCCL_HOSTID", {})]  # which the example sets
        if _version(day.machine.nccl) >= _SHARING_NCCL:
            ways.append(("NCCL_MULTI_RANK_GPU_ENABLE=1", _SHARED_GPU))
        candidates = [
            Backend(name="nccl", most_ranks=None, environment=way, why=f"{nccl}; ranks share a GPU by {name}")
            for name, way in ways
        ]
    candidates.append(Backend(name="gloo", most_ranks=None, why="gloo on CUDA tensors"))
    refused = []
    for number, backend in enumerate(candidates):
        command = [*torchrun(2), EXAMPLE, "--steps", "2", "--backend", backend.name]
        log = f"backend-{number}-{backend.name}"
        try:
            day.run(log, command, limit_s=_PROBE_S, environment=backend.environment)
        except (Failed, Skipped) as failure:
            refused.append(f"not {backend.why}: {failure}")
            continue
        return Backend(
            name=backend.name,
            most_ranks=backend.most_ranks,
            environment=backend.environment,
            why="; ".join([backend.why, *refused]),
        )
    return replace(ALONE, why="; ".join([ALONE.why, *refused]))


def _version(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2])) if text else ()
