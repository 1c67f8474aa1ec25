"""Train a tiny model with FSDP2 in which rank 1 sleeps before one step, as a stuck data loader does."""

from __future__ import annotations

import argparse
import os
import runpy
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

_EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_tiny_fsdp2.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--backend", required=True)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        if int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
            runpy.run_path(str(_EXAMPLE))["share_gpus"]()
    dist.init_process_group(args.backend)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(12):
        if step == 8 and dist.get_rank() == 1:
            time.sleep(args.seconds)
        model(torch.rand(8, 64, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads may outlive the group by a moment


if __name__ == "__main__":
    main()
