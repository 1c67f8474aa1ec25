"""Two gloo ranks train under FSDP2; an execution trace of each is written."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from _common import BATCH, LENGTH, VOCAB, Tower
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ExecutionTraceObserver

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=1)
arguments = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
model = Tower()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1))
observer = ExecutionTraceObserver()
observer.register_callback(str(arguments.folder / f"et_rank{dist.get_rank()}.json"))
for step in range(2 + arguments.steps):
    if step == 2:
        observer.start()
    logits = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
observer.stop()
observer.unregister_callback()
dist.destroy_process_group()
