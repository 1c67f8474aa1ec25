"""A training of this process, recorded by a session of its own: two traced steps, then two of memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp2prof.manifest import RecordOptions
from fsdp2prof.recorder.identity import Identity
from fsdp2prof.recorder.rank.session import RankSession
from fsdp2prof.recorder.settings import Settings

__all__ = ["MEMORY_STEPS", "STEPS", "TRACED_STEPS", "Act", "nothing", "record"]

STEPS = 7
TRACED_STEPS = [1, 2]
MEMORY_STEPS = [3, 4]
Act = Callable[[int], None]


def nothing(step: int) -> None:
    """Beside the training."""


def train(model: nn.Module, act: Act) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        act(step)
        loss = model(torch.randn(2, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    fully_shard(model[0])
    return fully_shard(model)


LOSSES: list[float] = []


def record(run: Path, act: Act) -> RankSession:
    """Record two steps of trace and two of memory; losses are those of the training alone."""
    LOSSES[:] = LOSSES or train(sharded(), nothing)
    options = RecordOptions(wait=0, warmup=1, active=2, memory_steps=2)
    session = RankSession(Settings(run=str(run), options=options), Identity(0, 0, 1), automatic=True)
    session.begin()
    model = sharded()
    session.watch(model)
    assert train(model, act) == LOSSES
    session.end()
    return session
