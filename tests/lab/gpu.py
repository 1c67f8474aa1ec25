"""Cases that train on a GPU: one rank of a world of eight without peers, so that host and device are real."""

from __future__ import annotations

from typing import Any

from lab.case import Case, Training

__all__ = ["GPU_TRAININGS"]

_SIZE: dict[str, Any] = {
    "group": "fake",
    "layers": 6,
    "dim": 2048,
    "heads": 16,
    "vocab": 16384,
    "batch": 8,
    "length": 1024,
    "precision": "mixed",
}
"""A step of it takes an H100 some 50 ms, and its host less."""


def _fault(
    name: str, fault: str, causes: str, remedy: str, switches: dict[str, Any], *, excused: str = ""
) -> Case:
    return Case(
        name=f"gpu/{name}/much",
        fault=fault,
        size="much",
        causes=frozenset(causes.split()),
        remedy=remedy,
        excused=frozenset(excused.split()),
        training=Training(ranks=1, switches=_SIZE | switches, mended=_SIZE),
    )


def _healthy(name: str, kind: str, **switches: Any) -> Case:
    return Case(
        name=f"gpu/healthy/{name}",
        fault=kind,
        size="healthy",
        training=Training(ranks=1, switches=_SIZE | switches),
    )


GPU_TRAININGS: list[Case] = [
    _healthy("plain", "transformer"),
    _fault(
        "nan-checks",
        "NaNs looked for in every module's output",
        "host_sync",
        "item|device|out of the step|every few steps",
        {"habit": "nan-checks", "habit_size": 999},
    ),
    _fault(
        "loader",
        "slow data loader",
        "data_loader",
        "worker|prefetch|loader",
        {"loader": "slow", "loader_ms": 60},
    ),
    _fault(
        "weights-to-host",
        "weights looked at on the host",
        "host_sync",
        "cpu|device|out of the step|every few steps",
        {"habit": "weights-to-host", "habit_size": 999},
    ),
    _fault("foreach", "optimizer per tensor", "optimizer_per_tensor", "foreach|fused", {"foreach": False}),
    _fault(
        "evaluation",
        "evaluation every step",
        "forward_without_backward",
        "evaluat|less often|backward",
        {"evaluations": 2},
    ),
    _fault(
        "fp32",
        "trained in fp32 without TF32",
        "fp32_matmul products_in_fp32",
        "tf32|bf16|precision",
        {"precision": "fp32"},
    ),
    _fault(
        "pageable",
        "inputs copied from pageable memory",
        "host_sync pageable_copies",
        "pin",
        {"habit": "pageable", "habit_size": 400},
    ),
    _fault(
        "empty-cache",
        "the allocator's memory given back in every step",
        "allocator allocator_retries host_sync device_allocations",
        "empty_cache|expandable|allocat",
        {"habit": "empty-cache", "habit_size": 1},
    ),
    _fault(
        "tiny",
        "tiny units on a small model",
        "wrapping_too_fine host_bound",
        "larger|together|coarser|graph|compile|batch",
        {"wrap": "leaves", "layers": 24, "dim": 256, "heads": 4, "batch": 2, "length": 256},
        excused="host_bound",
    ),
    _fault("logging", "a slow logger", "host_pause", "log|out of the step|less often", {"log_ms": 80}),
    _fault(
        "save",
        "checkpoint saved in the step",
        "checkpoint_in_step",
        "async|less often|save",
        {"saves": 1, "save_mib": 100},
    ),
    _healthy("checkpoint", "activation checkpointing", checkpoint=True),
    _healthy("accumulation", "three micro-batches", micro_batches=2),
    _fault(
        "clip",
        "gradient norm from full tensors",
        "all_gather_outside_fsdp host_sync",
        "clip_grad_norm_|full_tensor",
        {"clip_by_full_tensors": True},
    ),
    _fault(
        "average-weights",
        "an average of weights, one parameter at a time",
        "work_outside_training host_bound",
        "_foreach",
        {"habit": "average-weights", "habit_size": 12},
    ),
    _fault(
        "anomalies",
        "anomaly detection left on",
        "anomaly_detection",
        "set_detect_anomaly",
        {"habit": "anomalies", "habit_size": 1},
    ),
    _fault(
        "garbage",
        "garbage collection in the step",
        "garbage_collection host_pause",
        "collect|gc",
        {"garbage": 400_000},
    ),
    _fault(
        "recompile",
        "recompilation",
        "recompilation",
        "dynamic|compile|shape",
        {"recompiles": True},
    ),
]
"""In the order of what they teach: time may run out."""
