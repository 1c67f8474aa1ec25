"""Trains with DistributedDataParallel or FSDP1."""

from __future__ import annotations

import argparse

import torch
from _common import Tower, batch, process_group, train
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wrapper", choices=("ddp", "fsdp1"))
    args = parser.parse_args()
    with process_group() as device:
        model = Tower().to(device)
        wrapped: nn.Module
        if args.wrapper == "ddp":
            wrapped = DistributedDataParallel(model)
        else:
            wrapped = FullyShardedDataParallel(model, device_id=torch.device(device))
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        train(optimizer, 2, lambda: wrapped(batch()).pow(2).mean())
        print("loss", wrapped(batch()).pow(2).mean().item())


if __name__ == "__main__":
    main()
