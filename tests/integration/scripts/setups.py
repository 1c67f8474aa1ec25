"""Set-ups that ``check`` judges: right ones that look unusual, and mistakes that train without an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from _common import DIM, VOCAB, Block, Tower, batch, shard_mesh, train_one_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

Made = tuple[Callable[[], torch.Tensor], list[torch.optim.Optimizer]]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def adam(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def sharded(model: Any, **options: Any) -> Made:
    """Blocks, then the root; one optimizer of everything that trains."""
    options.setdefault("mesh", shard_mesh())
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return loss_of(model), [adam(one for one in model.parameters() if one.requires_grad)]


def loss_of(model: Any) -> Callable[[], torch.Tensor]:
    return lambda: model(batch()).float().pow(2).mean()


def tied() -> Made:
    """Embedding and head share their weight, in one group."""
    model: Any = Tower()
    model.head.weight = model.embedding.weight
    for layer in model.layers:
        fully_shard(layer, mesh=shard_mesh())
    fully_shard([model.embedding, model.head], mesh=shard_mesh())
    fully_shard(model, mesh=shard_mesh())
    return loss_of(model), [adam(model.parameters())]


class Adapter(nn.Module):
    """A frozen linear layer with a trained product of two small matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.b(self.a(x))


class EncoderAndDecoder(nn.Module):
    """A frozen encoder in bfloat16, whose output a decoder with adapters reads."""

    layers: Any

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2)).requires_grad_(False).bfloat16()
        self.embedding = nn.Embedding(VOCAB, DIM).requires_grad_(False)
        self.layers = nn.ModuleList(Block() for _ in range(2)).requires_grad_(False)
        for layer in self.layers:
            layer.up = Adapter(layer.up)
            layer.down = Adapter(layer.down)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        seen = x.bfloat16()
        with torch.no_grad():
            for one in self.encoder:
                seen = one(seen)
        x = x + seen.float()
        for layer in self.layers:
            x = layer(x)
        return x


def frozen_encoder() -> Made:
    model: Any = EncoderAndDecoder()
    for one in model.encoder:
        fully_shard(one, mesh=shard_mesh())
    return sharded(model)


def hybrid() -> Made:
    """Replicas of shards."""
    return sharded(Tower(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))


def tensor_parallel() -> Made:
    """Every block over two ranks of tensor parallelism, then over two of FSDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = Tower()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return sharded(model, mesh=mesh["dp"])


def norms_in_float32() -> Made:
    """Blocks in bfloat16; their norms are units of their own in float32."""
    model: Any = Tower()
    for layer in model.layers:
        fully_shard(layer.norm, mesh=shard_mesh(), mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        before = layer.norm.forward
        layer.norm.forward = lambda x, before=before: before(x.float()).to(x.dtype)
    return sharded(model, mp_policy=BF16)


class Float8Linear(nn.Linear):
    """Products of values rounded to eight bits, with a scale as a buffer; the weight stays as it is."""

    scale: torch.Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.register_buffer("scale", torch.ones((), dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = (self.weight / self.scale).to(torch.float8_e4m3fn).to(x.dtype) * self.scale.to(x.dtype)
        weight = self.weight + (rounded - self.weight).detach()
        return nn.functional.linear(x, weight)


def float8() -> Made:
    model: Any = Tower()
    for layer in model.layers:
        layer.up, layer.down = Float8Linear(DIM, 2 * DIM), Float8Linear(2 * DIM, DIM)
    return sharded(model, mp_policy=BF16)


def two_parameter_groups() -> Made:
    """Matrices decay and vectors do not; the optimizer is made after sharding."""
    model: Any = Tower()
    loss, _ = sharded(model)
    matrices = [one for one in model.parameters() if one.ndim > 1]
    vectors = [one for one in model.parameters() if one.ndim < 2]
    return loss, [adam([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])]


def pipeline() -> Made:
    """Two stages of torch's pipeline schedules, each sharded over two ranks."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    last = mesh.get_local_rank("pp") == 1
    part: Any = nn.Sequential(Block(), Block(), Block())
    for layer in part:
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(part, mesh=mesh["dp_shard"])
    stage = PipelineStage(part, int(last), 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=lambda x, y: (x - y).pow(2).mean())

    def run() -> torch.Tensor:
        x = torch.randn(4, DIM)
        if last:
            schedule.step(target=x)
        else:
            schedule.step(x)
        return torch.zeros((), requires_grad=True)  # the schedule ran backward itself

    return run, [adam(part.parameters())]


# Mistakes.


def head_in_no_optimizer() -> Made:
    """Mistake: the optimizer gets the blocks alone."""
    model: Any = Tower()
    loss, _ = sharded(model)
    return loss, [adam(model.layers.parameters())]


def optimizer_of_copies() -> Made:
    """Mistake: made before fully_shard."""
    model: Any = Tower()
    optimizer = adam(model.parameters())
    return sharded(model)[0], [optimizer]


def no_sync_left_on() -> Made:
    """Mistake: gradients are never reduced."""
    model: Any = Tower()
    loss, optimizers = sharded(model)
    model.set_requires_gradient_sync(False)
    return loss, optimizers


def sync_too_early() -> Made:
    """Mistake: the first of two micro-batches reduces gradients, the last does not."""
    model: Any = Tower()
    loss, optimizers = sharded(model)

    def accumulated() -> torch.Tensor:
        model.set_requires_gradient_sync(True)
        torch.autograd.backward(loss())
        model.set_requires_gradient_sync(False)
        return loss()

    return accumulated, optimizers


def large_root() -> Made:
    """Mistake: an embedding and a head that outweigh the blocks are left in the root."""
    model: Any = Tower()
    model.embedding, model.head = nn.Embedding(30_000, DIM), nn.Linear(DIM, 30_000, bias=False)
    return sharded(model)


def sharded_over_one() -> Made:
    """Mistake: the dimensions of the mesh are exchanged, so that every rank holds everything."""
    world = dist.get_world_size()
    return sharded(
        Tower(), mesh=init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    )


def context_forgotten() -> Made:
    """Mistake: sharded over dp, while cp replicas see other tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    return sharded(Tower(), mesh=mesh["dp"])


def half_precision() -> Made:
    """Mistake: the states of the optimizer are in bfloat16."""
    return sharded(Tower().bfloat16())


WAYS = {
    one.__name__: one
    for one in (
        tied,
        frozen_encoder,
        hybrid,
        tensor_parallel,
        norms_in_float32,
        float8,
        two_parameter_groups,
        pipeline,
        head_in_no_optimizer,
        optimizer_of_copies,
        no_sync_left_on,
        sync_too_early,
        large_root,
        sharded_over_one,
        context_forgotten,
        half_precision,
    )
}


if __name__ == "__main__":
    train_one_of(WAYS)
