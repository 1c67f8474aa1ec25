"""Two pipeline stages of two ranks each, under one of torch's own schedules, their storages counted.

``python pipeline.py --micro-batches M --schedule zb1p --output FOLDER`` under torchrun writes each rank's
recording there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from fsdp2prof.estimators.config.catalog import BUILTIN_MODELS, TransformerConfig
from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.pipeline import Interleaved
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.training import build_optimizer, shard
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.techniques.pipeline import stage_of
from fsdp2prof.estimators.techniques.pipeline_order import stages_of_rank
from fsdp2prof.storage_tracker import StorageTracker

SEQ_LEN, VOCAB, STEPS = 256, 1000, 3
MESH, SPEC = MeshSpec(pp=2, dp_shard=2), ModelSpec(source="small-gpt")
SMALL = TransformerConfig(
    name="small-gpt",
    family="gpt",
    dim=128,
    layers=8,
    heads=4,
    kv_heads=4,
    head_dim=32,
    ffn_dim=512,
    vocab_size=VOCAB,
    context=SEQ_LEN,
    tied=True,
)
BUILTIN_MODELS[SMALL.name] = SMALL


def policy(
    stage: int, micro_batches: int, schedule: str = "1f1b", trainable: str | None = None
) -> PolicySpec:
    kind, _, count = schedule.partition(":")
    return PolicySpec(
        pp_schedule=Interleaved(int(count)) if kind == "interleaved" else schedule,  # type: ignore[arg-type]
        trainable=trainable,
        seq_len=SEQ_LEN,
        reshard="never",
        grad_accum=micro_batches,
        pp_stage=stage,
        clip_grad=False,
        optimizer_impl="for-loop",
    )


def alone(schedule: Callable[..., Any]) -> Callable[..., Any]:
    return lambda stages, micro_batches, **options: schedule(stages[0], micro_batches, **options)


SCHEDULES: dict[str, Callable[..., Any]] = {
    "1f1b": alone(Schedule1F1B),
    "gpipe": alone(ScheduleGPipe),
    "zb1p": ScheduleInterleavedZeroBubble,
    "interleaved:2": ScheduleInterleaved1F1B,
    "interleaved:4": ScheduleInterleaved1F1B,
    "zbv": ScheduleZBVZeroBubble,
}


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b")
    parser.add_argument("--trainable")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    index = mesh["pp"].get_local_rank()
    how = policy(index, args.micro_batches, args.schedule, args.trainable)
    own = stages_of_rank(how.pp_schedule, 2, index)
    count = 2 * len(own)
    models = []
    for number in own:  # each a model of its own, as one stage of a rank in a longer pipeline
        alone = policy(number, args.micro_batches, trainable=args.trainable)
        model = stage_of(build_model(SPEC, seq_len=SEQ_LEN), MeshSpec(pp=count, dp_shard=2), alone)
        shard(model, alone, mesh["dp_shard"], None)
        models.append(model)
    tracker = StorageTracker()
    with tracker:
        tracker.mark_step(0)
        for model in models:
            model.module.to_empty(device="cpu")
        stages = [
            PipelineStage(model.module, number, count, torch.device("cpu"), group=mesh["pp"].get_group())
            for number, model in zip(own, models, strict=True)
        ]
        schedule = SCHEDULES[args.schedule](stages, args.micro_batches, loss_fn=loss, scale_grads=False)
        optimizers = [build_optimizer(model, how) for model in models]
        for step in range(1, STEPS + 1):
            tracker.mark_step(step)
            for optimizer in optimizers:
                assert optimizer is not None
                optimizer.zero_grad()
            tokens = torch.randint(VOCAB, (args.micro_batches, SEQ_LEN))
            targets = {"target": tokens} if count - 1 in own else {}
            schedule.step(*([tokens] if 0 in own else []), **targets, return_outputs=False)
            for optimizer in optimizers:
                assert optimizer is not None
                optimizer.step()
    torch.save(tracker.recording(), args.output / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
    time.sleep(0.2)


if __name__ == "__main__":
    main()
