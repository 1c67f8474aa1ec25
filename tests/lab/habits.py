"""What scripts do around a step that costs more than they know: ``trainer.py habit=NAME habit_size=N``."""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from lab.trainer import Trainer

__all__ = ["AFTER_UPDATE", "AT_START", "BEFORE_UPDATE"]


def reduce_gradients(trainer: Trainer, size: int) -> None:
    """All-reduce every gradient once more, as a script does that was written for DDP."""
    for parameter in list(trainer.model.parameters())[:size]:
        if isinstance(parameter.grad, DTensor):
            dist.all_reduce(parameter.grad.to_local().clone())


def gradient_norms(trainer: Trainer, size: int) -> None:
    """Log the norm of every gradient: a reduction and an ``.item()`` each."""
    for parameter in list(trainer.model.parameters())[:size]:
        if isinstance(parameter.grad, DTensor):
            parameter.grad.norm().full_tensor().item()


def gather_objects(trainer: Trainer, size: int) -> None:
    """Collect metrics as Python objects from all ranks."""
    for _ in range(size):
        dist.all_gather_object([None] * dist.get_world_size(), {"rank": dist.get_rank(), "loss": 0.5})


def tokenize(trainer: Trainer, size: int) -> None:
    """Split text in the training loop."""
    text = "a b c d " * 1000
    for _ in range(size):
        [hash(word) % 1000 for word in text.split()]


def to_lists(trainer: Trainer, size: int) -> None:
    """Write large outputs as text."""
    str(torch.zeros(size).tolist())


def log_on_rank_0(trainer: Trainer, size: int) -> None:
    """Report to a remote service from the first rank alone."""
    if dist.get_rank() == 0:
        time.sleep(size / 1000)


def save_shards(trainer: Trainer, size: int) -> None:
    """Save a sharded checkpoint in every step."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({f"model{i}": trainer.model.state_dict() for i in range(size)}, checkpoint_id=str(folder[0]))


def discarded_forward(trainer: Trainer, size: int) -> None:
    """Run forward for a metric of the training batch."""
    tokens = torch.randint(trainer.s.vocab, (trainer.s.batch, trainer.s.length), device=trainer.device)
    with torch.no_grad():
        for _ in range(size):
            trainer.model(tokens)


def average_weights(trainer: Trainer, size: int) -> None:
    """Keep an average of the weights, a parameter at a time."""
    if not trainer.average:
        trainer.average = [one.detach().clone() for one in trainer.model.parameters()]
    for _ in range(size):
        for mean, one in zip(trainer.average, trainer.model.parameters(), strict=True):
            mean.mul_(0.99).add_(one.detach(), alpha=0.01)


def snapshot(trainer: Trainer, size: int) -> None:
    """Copy the model's state in case it turns out to be the best."""
    for _ in range(size):
        trainer.best = copy.deepcopy(trainer.model.state_dict())


def anomalies(trainer: Trainer, size: int) -> None:
    """Look for the origin of a NaN, and forget to stop."""
    torch.autograd.set_detect_anomaly(size > 0)


def one_core(trainer: Trainer, size: int) -> None:
    """Bind every rank to the same processor."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def many_threads(trainer: Trainer, size: int) -> None:
    """Give every rank more threads than there are processors."""
    torch.set_num_threads(size)


def gradient_hooks(trainer: Trainer, size: int) -> None:
    """Watch the norm of every gradient from a hook of its parameter."""
    norms: dict[int, float] = {}

    def watch(parameter: torch.Tensor) -> None:
        if isinstance(parameter.grad, DTensor):
            norms[id(parameter)] = parameter.grad.norm().full_tensor().item()

    for parameter in list(trainer.model.parameters())[:size]:
        parameter.register_post_accumulate_grad_hook(watch)


def new_iterator(trainer: Trainer, size: int) -> None:
    """Take one batch of a loader that starts its workers for it."""
    next(iter(DataLoader(TensorDataset(torch.zeros(64, 8)), batch_size=4, num_workers=size)))


def empty_cache(trainer: Trainer, size: int) -> None:
    """Give the allocator's memory back to the driver."""
    torch.cuda.empty_cache()


def pageable(trainer: Trainer, size: int) -> None:
    """Copy inputs from memory that is not pinned."""
    torch.ones(size << 18).to(trainer.device)


def weights_to_host(trainer: Trainer, size: int) -> None:
    """Look at every weight on the host."""
    for parameter in list(trainer.model.parameters())[:size]:
        if isinstance(parameter, DTensor):
            parameter.to_local().detach().cpu().abs().max()


def nan_checks(trainer: Trainer, size: int) -> None:
    """Look for NaNs in the output of every module."""

    def check(module: torch.nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.isnan().any().item():
            trainer.best = module

    for module in list(trainer.model.modules())[1:size]:
        module.register_forward_hook(check)


Habit = Callable[["Trainer", int], None]
AT_START: dict[str, Habit] = {
    "anomalies": anomalies,
    "one-core": one_core,
    "many-threads": many_threads,
    "gradient-hooks": gradient_hooks,
    "nan-checks": nan_checks,
}
BEFORE_UPDATE: dict[str, Habit] = {"reduce-gradients": reduce_gradients, "gradient-norms": gradient_norms}
AFTER_UPDATE: dict[str, Habit] = {
    "gather-objects": gather_objects,
    "average-weights": average_weights,
    "snapshot": snapshot,
    "new-iterator": new_iterator,
    "empty-cache": empty_cache,
    "pageable": pageable,
    "weights-to-host": weights_to_host,
    "tokenize": tokenize,
    "to-lists": to_lists,
    "log-on-rank-0": log_on_rank_0,
    "save-shards": save_shards,
    "discarded-forward": discarded_forward,
}
