"""A Hugging Face decoder cut by hand into two pipeline stages of two ranks each, their storages counted.

``python pipeline_transformers.py --micro-batches M --config FILE --output FOLDER`` under torchrun writes each
rank's recording there. Nothing of the estimate is used.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2prof.storage_tracker import StorageTracker

SEQ_LEN, STEPS = 256, 3


class Stage(nn.Module):
    """Half of a decoder: tokens or hidden states come in, hidden states or logits go out."""

    def __init__(self, model: Any, index: int) -> None:
        super().__init__()
        half = len(model.model.layers) // 2
        layers = list(model.model.layers)
        model.model.layers = nn.ModuleList(layers[half:] if index else layers[:half])
        model.config.num_hidden_layers = half
        if index:
            model.model.embed_tokens = None
        else:
            model.model.norm = model.lm_head = nn.Identity()
        self.model, self.index = model, index

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out = self.model(inputs_embeds=given) if self.index else self.model(given)
        logits: torch.Tensor = out.logits
        return logits


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    index = mesh["pp"].get_local_rank()
    config = AutoConfig.for_model(**json.loads(args.config.read_text()), use_cache=False)
    made: Any = AutoModelForCausalLM
    with torch.device("meta"):
        part = Stage(made.from_config(config, attn_implementation="sdpa"), index).train()
    how: Any = {
        "mesh": mesh["dp_shard"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "reshard_after_forward": False,
    }
    for layer in part.model.model.layers:
        fully_shard(layer, **how)
    fully_shard(part, **how)
    tracker = StorageTracker()
    with tracker:
        tracker.mark_step(0)
        part.to_empty(device="cpu")
        stage = PipelineStage(part, index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = Schedule1F1B(stage, args.micro_batches, loss_fn=loss, scale_grads=False)
        optimizer = torch.optim.AdamW(part.parameters(), foreach=False)
        for step in range(1, STEPS + 1):
            tracker.mark_step(step)
            optimizer.zero_grad()
            tokens = torch.randint(config.vocab_size, (args.micro_batches, SEQ_LEN))
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
