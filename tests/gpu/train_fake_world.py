"""One rank of a large FSDP2 world on one GPU: real allocator and streams, no communication.

Prints one JSON line per step with the allocator's own peaks.
"""

import argparse
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocabulary, dim, layers):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    arguments = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=arguments.world_size, store=FakeStore())
    torch.cuda.set_device(0)
    mesh = init_device_mesh("cuda", (arguments.world_size,), mesh_dim_names=("dp_shard",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Model(32768, arguments.dim, arguments.layers)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(arguments.steps):
        torch.cuda.reset_peak_memory_stats()
        tokens = torch.randint(0, 32768, (4, 512), device="cuda")
        loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        statistics = torch.cuda.memory_stats()
        peaks = {
            "step": step,
            "requested_bytes": statistics["requested_bytes.all.peak"],
            "reserved_bytes": statistics["reserved_bytes.all.peak"],
        }
        print(json.dumps(peaks), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
