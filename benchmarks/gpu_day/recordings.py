"""Real FSDP2 runs, recorded: trace, memory and manifests of every rank."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.gpu_day.backend import EXAMPLE, Backend, torchrun
from benchmarks.gpu_day.day import Day, Failed, Job, Outcome, Skipped
from benchmarks.gpu_day.packing import pack

_LIMIT_S = 60.0
_ONE_AT_A_TIME = Lock()
"""On the GPU; what was recorded is analysed beside the next one."""
_GPU_SIZE = ("--dim", "512", "--heads", "8", "--vocab", "8192", "--length", "256")
"""Of the model; on a CPU the example's own, smaller one."""
_SHORT = ("--wait", "1", "--warmup", "1", "--active", "2", "--memory-steps", "1")
_UNTIL_THE_END = ("--wait", "0", "--warmup", "1", "--active", "1", "--memory-steps", "40")


@dataclass(frozen=True, slots=True)
class _Variant:
    """One recorded run of the example."""

    name: str
    ranks: int
    arguments: tuple[str, ...] = ()
    schedule: tuple[str, ...] = _SHORT
    out_of_memory: bool = False
    """It is meant to end so."""
    micro_batches: int = 1
    allocator: str | None = None
    """``PYTORCH_CUDA_ALLOC_CONF``."""
    gpu_only: bool = False
    memory: bool = True
    """Whether this allocator lets torch record its history."""


_VARIANTS = (
    _Variant("plain", 2),
    _Variant("checkpointing", 2, ("--checkpoint",)),
    _Variant("hsdp", 4, ("--replicas", "2")),
    _Variant("accumulation", 2, ("--accumulate", "3"), micro_batches=3),
    _Variant("compiled", 2, ("--compile", "default"), gpu_only=True),
    _Variant("cuda-graphs", 2, ("--compile", "reduce-overhead"), gpu_only=True),
    _Variant("expandable-segments", 2, allocator="expandable_segments:True", gpu_only=True),
    _Variant("malloc-async", 2, allocator="backend:cudaMallocAsync", gpu_only=True, memory=False),
    _Variant("out-of-memory", 2, ("--growth", "2", "--steps", "40"), _UNTIL_THE_END, out_of_memory=True),
)


def run(day: Day, backend: Backend) -> list[Outcome]:
    """Record every variant; what each is, is in ``recordings.json``."""
    jobs = [Job(one.name, partial(_record, day, backend, one)) for one in _VARIANTS]
    return day.perform("recordings", jobs, workers=3 if day.machine.has_gpu else 1)


def _record(day: Day, backend: Backend, variant: _Variant) -> tuple[str, dict[str, Any]]:
    ranks = variant.ranks
    if variant.out_of_memory and not day.machine.has_gpu:
        raise Skipped("no CUDA device: a CPU has no allocator that runs out of memory")
    if variant.gpu_only and not day.machine.has_gpu:
        raise Skipped(
            "no CUDA device: compiled code on a CPU hides its memory, and has neither graphs nor allocators"
        )
    if backend.most_ranks is not None and ranks > backend.most_ranks:
        if variant.name == "hsdp":
            raise Skipped(f"needs {ranks} ranks: {backend.why}")
        ranks = backend.most_ranks
    size = _GPU_SIZE if day.machine.has_gpu else ()
    training = [*torchrun(ranks), EXAMPLE, *size, *variant.arguments, "--backend", backend.name]
    folder = day.folder / "recordings" / variant.name
    record = [sys.executable, "-m", "fsdp2prof", "record", "-f", "-o", folder, *variant.schedule, "--"]
    try:
        with _ONE_AT_A_TIME:
            day.run(
                f"record-{variant.name}",
                [*record, *training],
                limit_s=_LIMIT_S,
                environment=backend.environment | _allocator(variant),
                may_fail=variant.out_of_memory,
            )
        analysis = _analyze(day, variant.name, folder)
    finally:
        pack(folder)
    row = {
        "name": variant.name,
        "ranks": ranks,
        "backend": backend.name,
        "device": "cuda" if day.machine.has_gpu else "cpu",
        "out_of_memory": variant.out_of_memory,
        "memory": variant.memory,
        "longest_pause_s": _longest_pause_s(folder),
        "command": " ".join(training[training.index(EXAMPLE) :]),
    }
    return _check(analysis, variant, ranks, on_gpu=day.machine.has_gpu), row


def _analyze(day: Day, name: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "fsdp2prof", "analyze", "run", folder, "--format", "json"]
    analysis: dict[str, Any] = json.loads(day.run(f"analyze-{name}", command, limit_s=_LIMIT_S))
    return analysis


def _allocator(variant: _Variant) -> dict[str, str]:
    return {"PYTORCH_CUDA_ALLOC_CONF": variant.allocator} if variant.allocator else {}


def _longest_pause_s(folder: Path) -> float:
    """The longest that a rank stood still while it stopped a recording and wrote its file."""
    manifests = [json.loads(path.read_text()) for path in folder.glob("rank-*/manifest.json")]
    pauses = [pause["duration_ns"] for one in manifests for pause in one.get("pauses", [])]
    return float(round(max(pauses, default=0) / 1e9, 2))


def _check(analysis: dict[str, Any], variant: _Variant, ranks_ran: int, *, on_gpu: bool) -> str:
    """Say in one line what was recorded. Raises ``Failed`` if it is not what was meant."""
    ranks: Sequence[dict[str, Any]] = analysis["memory"]["ranks"] if analysis["memory"] else ()
    if bool(ranks) != variant.memory:
        raise Failed(
            "memory was recorded, of an allocator without history" if ranks else "no memory was recorded"
        )
    if variant.out_of_memory:
        ends = [rank["oom"] for rank in ranks if rank["oom"]]
        if not ends:
            raise Failed("no rank ran out of memory")
        return f"out of memory at {ends[0]['allocated_bytes'] / 2**30:.1f} GiB allocated"
    attribution = analysis["trace"]["attribution"]
    collectives, attributed = attribution["collectives"], attribution["attributed"]
    if ranks_ran > 1 and not collectives:
        raise Failed(f"{ranks_ran} ranks ran and no collective is in the trace")
    if attributed < collectives:
        raise Failed(f"{collectives - attributed} of {collectives} collectives are on no layer")
    if on_gpu and not any(rank["device_type"] == "cuda" for rank in analysis["trace"]["ranks"]):
        raise Failed("the trace has no work of the GPU")
    if ranks_ran > 1:
        _check_gathers(analysis["trace"]["by_layer"], variant)
    lost = {
        step["step"] for rank in analysis["trace"]["ranks"] for step in rank.get("incomplete_steps") or ()
    }
    if lost:
        raise Failed(f"the profiler lost records of the device in steps {', '.join(map(str, sorted(lost)))}")
    seen = (
        f"{attributed} of {collectives} collectives on a layer" if collectives else "one rank, no collectives"
    )
    if not ranks:
        return f"{seen}, no memory, as meant"
    peak = max(rank["peak"]["allocated_bytes"] for rank in ranks)
    return f"{seen}, peak {peak / 2**20:.1f} MiB"


def _check_gathers(rows: Sequence[dict[str, Any]], variant: _Variant) -> None:
    """Every block is gathered once a micro-batch in forward. Raises ``Failed`` if it was not."""
    gathers = {
        row["fqn"]: row["count"]
        for row in rows
        if (row["op"], row["phase"]) == ("all_gather", "forward") and row["fqn"].startswith("layers.")
    }
    if set(gathers.values()) != {variant.micro_batches}:
        raise Failed(
            f"all-gathers a step of the blocks in forward: {gathers}; {variant.micro_batches} were due"
        )
