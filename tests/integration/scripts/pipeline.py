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
    ScheduleInterleavedZeroBubble,
)

from fsdp2prof.estimators.config.mesh import MeshSpec
from fsdp2prof.estimators.config.model import ModelSpec
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.execution.training import build_optimizer, shard
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.catalog import BUILTIN_MODELS, TransformerConfig
from fsdp2prof.estimators.techniques.pipeline import stage_of
from fsdp2prof.storage_tracker import StorageTracker

SEQ_LEN, VOCAB, STEPS = 256, 1000, 3
MESH, SPEC = MeshSpec(pp=2, dp_shard=2), ModelSpec(source="small-gpt")
SMALL = TransformerConfig(
    name="small-gpt",
    family="gpt",
    dim=128,
    layers=4,
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
    stage: int, micro_batches: int, schedule: Any = "1f1b", trainable: str | None = None
) -> PolicySpec:
    return PolicySpec(
        pp_schedule=schedule,
        trainable=trainable,
        seq_len=SEQ_LEN,
        reshard="never",
        grad_accum=micro_batches,
        pp_stage=stage,
        clip_grad=False,
        optimizer_impl="for-loop",
    )


def zero_bubble(stage: PipelineStage, micro_batches: int, **options: Any) -> Any:
    return ScheduleInterleavedZeroBubble([stage], micro_batches, **options)


SCHEDULES: dict[str, Callable[..., Any]] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "zb1p": zero_bubble,
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
    model = stage_of(build_model(SPEC, seq_len=SEQ_LEN), MESH, how)
    shard(model, how, mesh["dp_shard"], None)
    tracker = StorageTracker()
    with tracker:
        tracker.mark_step(0)
        model.module.to_empty(device="cpu")
        stage = PipelineStage(model.module, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = SCHEDULES[args.schedule](stage, args.micro_batches, loss_fn=loss, scale_grads=False)
        optimizer = build_optimizer(model, how)
        assert optimizer is not None
        for step in range(1, STEPS + 1):
            tracker.mark_step(step)
            optimizer.zero_grad()
            tokens = torch.randint(VOCAB, (args.micro_batches, SEQ_LEN))
            if index == 0:
                schedule.step(tokens, return_outputs=False)
            else:
                schedule.step(target=tokens, return_outputs=False)
            optimizer.step()
    torch.save(tracker.recording(), args.output / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
    time.sleep(0.2)


if __name__ == "__main__":
    main()
