"""A predicted step kept as a run: analysing its file says what the estimate says, whatever the schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp2prof.estimators.config.cluster import Cluster
from fsdp2prof.estimators.config.hardware import HardwareSpec, NetworkSpec
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.step import predict_step
from fsdp2prof.workflows.analyze import analyze_trace
from fsdp2prof.workflows.job.job_files import open_job
from fsdp2prof.workflows.ranks.one_rank import references
from fsdp2prof.workflows.saved_estimates import save_step_run

LLAMA, SPARSE = "llama3-8b", "mixtral-8x7b"
H100 = Cluster(hardware=HardwareSpec.parse("h100"), network=NetworkSpec.parse("400gb-ib"))

SCHEDULES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "prefetch and checkpoints": (LLAMA, "dp_shard=8", {"forward_prefetch": 2, "ac": "full"}),
    "replicas, reduced after the last": (
        LLAMA,
        "dp_replicate=2,dp_shard=4",
        {"grad_accum": 5, "sync": "last"},
    ),
    "tensor parallel, compiled, asynchronous": (
        LLAMA,
        "dp_shard=2,tp=4",
        {"compile": True, "async_tp": True},
    ),
    "never resharded": (LLAMA, "dp_shard=8", {"reshard": "never", "clip_grad": False}),
    "resharded to four": (LLAMA, "dp_shard=8", {"reshard": 4, "backward_prefetch": 2}),
    "offloaded": (LLAMA, "dp_shard=8", {"offload": True}),
    "context parallel": (LLAMA, "dp_shard=2,cp=4", {}),
    "float8": (LLAMA, "dp_shard=16", {"compile": True, "float8": "tensorwise"}),
    "experts": (SPARSE, "dp_shard=8,ep=4", {}),
    "a reference model": (LLAMA, "dp_shard=8", {"extra_model": "self"}),
    "a group of its own for reduce-scatters": (LLAMA, "dp_shard=8", {"separate_reduce_scatter_group": True}),
}
DEFAULT = ("prefetch and checkpoints", "tensor parallel, compiled, asynchronous")


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULES]
)
def test_the_saved_run_of_a_schedule_says_what_the_estimate_says(name: str, tmp_path: Path) -> None:
    source, mesh, options = SCHEDULES[name]
    policy = PolicySpec.from_mapping({"seq_len": 64, "wrap": "block", **options})
    model = ModelSpec(source=source, layers=2)
    made = predict_step(model, MeshSpec.parse(mesh), policy, H100)
    save_step_run(tmp_path / "run", made)
    known = references(hardware=H100.hardware)
    again = analyze_trace(open_job(tmp_path / "run"), references=known)
    own = made.estimate.trace
    assert again.ranks[0].steps == own.ranks[0].steps
    assert again.ranks[0].steps[0].breakdown_ns == made.estimate.breakdown_ns
    assert again.by_layer == made.estimate.by_layer
    assert again.groups == own.groups
    assert again.prefetch == own.prefetch
    assert again.kernels == own.kernels
    assert again.operators == own.operators
