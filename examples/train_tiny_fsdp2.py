"""Train a tiny transformer with FSDP2: CUDA and NCCL where there is a GPU, else CPU and gloo.

torchrun --nproc-per-node 2 examples/train_tiny_fsdp2.py

Ranks share a GPU where there are fewer GPUs than ranks.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class TinyTransformer(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, vocab: int, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_mesh(device_type: str, replicas: int) -> DeviceMesh:
    """All ranks shard; with several replicas (HSDP) gradients are all-reduced between them."""
    world_size = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("dp_shard",))
    shape = replicas, world_size // replicas
    return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def share_gpus() -> None:
    """Let ranks share a GPU: NCCL refuses those of one host, so each looks like a host of its own."""
    if "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ:  # NCCL 2.30 allows it by that
        os.environ.setdefault("NCCL_HOSTID", f"rank-{os.environ['RANK']}")
        os.environ.setdefault("NCCL_NET", "Socket")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--growth", type=int, default=1, help="the batch of each step, over the last one's")
    parser.add_argument("--checkpoint", action="store_true", help="checkpoint the blocks' activations")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--compile", metavar="MODE", help="compile the blocks, for example default")
    parser.add_argument("--replicas", type=int, default=1, help="more than one: HSDP")
    parser.add_argument("--backend", help="nccl on GPUs and gloo on a CPU, unless given")
    args = parser.parse_args()

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
            share_gpus()
    dist.init_process_group(args.backend or ("nccl" if device_type == "cuda" else "gloo"))
    rank = dist.get_rank()
    mesh = make_mesh(device_type, args.replicas)

    torch.manual_seed(0)
    model = TinyTransformer(args.vocab, args.dim, args.layers, args.heads).to(device_type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for index, layer in enumerate(model.layers):
        if args.checkpoint:
            layer = model.layers[index] = checkpoint_wrapper(layer)
        if args.compile:
            layer.compile(mode=args.compile)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    torch.manual_seed(rank)
    for step in range(args.steps):
        batch = args.batch * args.growth**step
        for _ in range(args.accumulate):
            tokens = torch.randint(args.vocab, (batch, args.length + 1), device=device_type)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            (loss / args.accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)

    dist.destroy_process_group()
    # gloo's threads may outlive the group by a moment and abort an interpreter that is already ending.
    time.sleep(0.2)


if __name__ == "__main__":
    main()
