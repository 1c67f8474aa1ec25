"""The training that the overhead benchmarks time: four layers under FSDP2, on GPUs or on gloo ranks."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Training", "begin", "quartiles"]


@dataclass(frozen=True)
class Training:
    """A training that has begun."""

    step: Callable[[], None]
    """One step; on a GPU it ends when the device has caught up."""
    device: str
    rank: int
    end: Callable[[], None]


def begin(width_on_cpu: int, backend: str | None = None) -> Training:
    """Join the process group and build the model; it is 2,048 wide on a GPU."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(backend or ("nccl" if cuda else "gloo"))
    torch.manual_seed(0)
    dim = 2048 if cuda else width_on_cpu
    layers = [nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True) for _ in range(4)]
    model = nn.Sequential(*layers).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(4, 64, dim, device=device)

    def step() -> None:
        model(data).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()

    def end() -> None:
        dist.destroy_process_group()
        time.sleep(0.2)

    return Training(step=step, device=device, rank=dist.get_rank(), end=end)


def quartiles(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return what a quarter, half and three quarters of some ratios are below."""
    low, median, high = statistics.quantiles(ratios, n=4)
    return low, median, high
