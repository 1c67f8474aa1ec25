"""Models, batches and ways to shard them, right and wrong, for the parity check."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCAB, DIM = 13, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 8)
        self.down = nn.Linear(8, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Rows that no number of ranks divides, a tied head, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def loss(module: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def model() -> tuple[nn.Module, Any]:
    return Tower(), loss


def batch(index: int, rank: int, world_size: int) -> Tensor:
    return torch.randint(VOCAB, (2, 7))


def other_batch_on_rank_1(index: int, rank: int, world_size: int) -> Tensor:
    return (
        torch.randint(VOCAB, (2, 7))
        if os.environ.get("RANK") != "1"
        else torch.zeros(2, 7, dtype=torch.int64)
    )


def other_weights_on_rank_1() -> tuple[nn.Module, Any]:
    made = Tower()
    if os.environ.get("RANK") == "1":
        nn.init.zeros_(made.head.weight)
    return made, loss


def _data(mesh: DeviceMesh) -> DeviceMesh:
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "tp")
    return mesh[names] if len(names) > 1 else mesh[names[0]]


def _shard(module: Any, mesh: DeviceMesh, **options: Any) -> None:
    for layer in module.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)


def in_bf16(module: Any, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    _shard(module, _data(mesh), mp_policy=policy)


def tensor_parallel(module: Any, mesh: DeviceMesh) -> None:
    for layer in module.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    _shard(module, _data(mesh))


def parameter_left_out(module: Any, mesh: DeviceMesh) -> None:
    _shard(module, _data(mesh), ignored_params={module.layers[2].up.weight})


def wrong_divide_factor(module: Any, mesh: DeviceMesh) -> None:
    _shard(module, _data(mesh))
    for part in (*module.layers, module):
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)


def missing_sync(module: Any, mesh: DeviceMesh) -> None:
    _shard(module, _data(mesh))
    module.set_requires_gradient_sync(False)


def wrong_dimension(module: Any, mesh: DeviceMesh) -> None:
    _shard(module, mesh["dp_shard"])


EXPERTS, TOP_K = 4, 2


class Experts(nn.Module):
    """Two-layer experts, stacked; of those that a rank has, the one that each row names."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, DIM) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, 8) * 0.3)

    def forward(self, rows: Tensor, of_expert: Tensor) -> Tensor:
        up, down = self.up[of_expert], self.down[of_expert]
        hidden = torch.relu(torch.einsum("rhd,rd->rh", up, rows))
        return torch.einsum("rdh,rh->rd", down, hidden).clone()


class Mixture(nn.Module):
    """Top-k experts of a token; ``group`` holds a part of them on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.gate = nn.Linear(DIM, EXPERTS)
        self.experts = Experts()
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = torch.topk(self.gate(flat).softmax(1), TOP_K, dim=1)
        order = torch.argsort(chosen.flatten(), stable=True)
        rows, ids = flat[order // TOP_K], chosen.flatten()[order]
        done = self.experts(rows, ids) if self.group is None else self._exchanged(rows, ids)
        done = done * weights.flatten()[order].unsqueeze(1)
        return x + torch.zeros_like(flat).index_add(0, order // TOP_K, done).view(x.shape)

    def _exchanged(self, rows: Tensor, ids: Tensor) -> Tensor:
        local = EXPERTS // self.group.size()
        sent = torch.bincount(ids // local, minlength=self.group.size())
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received, sent, group=self.group)
        there, back = received.tolist(), sent.tolist()
        arrived = all_to_all_single_autograd(rows, there, back, self.group)
        asked = torch.empty(sum(there), dtype=ids.dtype)
        torch.distributed.all_to_all_single(asked, ids, there, back, group=self.group)
        return all_to_all_single_autograd(self.experts(arrived, asked % local), back, there, self.group)


class SparseTower(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Mixture(), Mixture()])


def sparse_model() -> tuple[nn.Module, Any]:
    return SparseTower(), loss


def expert_parallel(module: Any, mesh: DeviceMesh, experts: DeviceMesh) -> None:
    deal_out(module, experts, divide_factor=mesh.size())
    _shard(module, _data(mesh))


def experts_of_too_few(module: Any, mesh: DeviceMesh, experts: DeviceMesh) -> None:
    """The mean over the ranks that share an expert, of gradients that all ranks gave it."""
    deal_out(module, experts, divide_factor=None)
    _shard(module, _data(mesh))


def deal_out(module: Any, experts: DeviceMesh, divide_factor: float | None) -> None:
    group = experts["ep"].get_group()
    for layer in module.layers:
        if not isinstance(layer, Mixture):
            continue
        layer.group, local = group, EXPERTS // group.size()
        held: Any = layer.experts
        for name, whole in list(held.named_parameters()):
            own = whole.detach()[group.rank() * local : (group.rank() + 1) * local].clone()
            held.register_parameter(name, nn.Parameter(own))
        fully_shard(held, mesh=experts["efsdp"])
        if divide_factor is not None:
            held.set_force_sum_reduction_for_comms(True)
            held.set_gradient_divide_factor(divide_factor)


def that_fails(module: Any, mesh: DeviceMesh) -> None:
    raise ValueError("no such\nlayer")
