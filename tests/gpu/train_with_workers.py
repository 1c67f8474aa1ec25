"""A training whose loader forks two workers in every epoch: before, in and after the recorded steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = TensorDataset(torch.arange(8 * 64.0).view(8, 64))
    for epoch in range(8):
        for (batch,) in DataLoader(rows, batch_size=4, num_workers=2, multiprocessing_context="fork"):
            loss = model(batch.cuda()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(epoch, loss.item().hex(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
