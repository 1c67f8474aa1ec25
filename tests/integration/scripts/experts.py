"""FSDP2 with expert parallelism over four ranks, written as people write it; its collectives are counted.

The feed-forward is a mixture of its own: real scores and top-k, a push that gives every expert as many
tokens, real split sizes, one product an expert. ``python experts.py OUTPUT [TP]`` under torchrun has rank 0
write the counts of the second step. With tensor parallelism the ranks that share a sequence route a part of
its tokens each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.interception import Interception
from support.rotary import fill_rotary

from fsdp2prof.estimators.config.catalog import ExpertShape, TransformerConfig
from fsdp2prof.estimators.models.builtin import build_builtin

RANKS, EP, BATCH, SEQ_LEN = 4, 2, 2, 16
EXPERTS = ExpertShape(count=8, top_k=2, ffn_dim=24, first=1, normalised=True)
CONFIG = TransformerConfig(
    name="tiny-experts",
    family="llama",
    dim=32,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn_dim=72,
    vocab_size=98,
    context=64,
    experts=EXPERTS,
)


class Experts(nn.Module):
    """This rank's experts."""

    def __init__(self, dim: int, count: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(count, ffn, dim) * 0.1)
        self.w2 = nn.Parameter(torch.randn(count, dim, ffn) * 0.1)
        self.w3 = nn.Parameter(torch.randn(count, ffn, dim) * 0.1)

    def forward(self, rows: Tensor, of_expert: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for expert in range(self.w1.shape[0]):
            places = (of_expert == expert).nonzero().squeeze(1)
            chosen = rows[places]
            hidden = F.silu(chosen @ self.w1[expert].t()) * (chosen @ self.w3[expert].t())
            out = out.index_add(0, places, hidden @ self.w2[expert].t())
        return out


class Router(nn.Module):
    """The gate, where the estimate has it too."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, count, bias=False)


class Mixture(nn.Module):
    """Top-k routing over experts on other ranks."""

    def __init__(self, dim: int, group: dist.ProcessGroup, tp: DeviceMesh) -> None:
        super().__init__()
        self.group, self.local, self.tp = group, EXPERTS.count // EP, tp
        self.router = Router(dim, EXPERTS.count)
        self.experts = Experts(dim, self.local, EXPERTS.ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            x = x.to_local(grad_placements=[Partial()])
        flat, gate = x.reshape(-1, x.shape[-1]), self.router.gate.weight
        if isinstance(gate, DTensor):
            gate = gate.to_local(grad_placements=[Partial()])
        out = torch.zeros_like(flat)
        share = len(flat) // self.tp.size()
        mine = slice(self.tp.get_local_rank() * share, (self.tp.get_local_rank() + 1) * share)
        scores = F.softmax((flat @ gate.t()).float(), dim=1)[mine]
        flat = flat[mine]
        turns = torch.arange(flat.shape[0] * EXPERTS.top_k).view(-1, EXPERTS.top_k) % EXPERTS.count
        forced = torch.zeros_like(scores).scatter(1, turns, 10.0)
        _, chosen = torch.topk(scores.detach() + forced, EXPERTS.top_k, dim=1)
        weights = scores.gather(1, chosen).flatten()
        order = torch.argsort(chosen.flatten(), stable=True)
        rows = flat[order // EXPERTS.top_k]
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS.count)
        theirs = all_to_all_single(counts, None, None, self.group) + 0
        sent = counts.view(EP, -1).sum(1).tolist()
        received = theirs.view(EP, -1).sum(1).tolist()
        arrived = all_to_all_single_autograd(rows, received, sent, self.group)
        of_expert = torch.arange(self.local).repeat(EP).repeat_interleave(theirs)
        done = self.experts(arrived, of_expert)
        back = all_to_all_single_autograd(done, sent, received, self.group)
        back = back * weights[order].unsqueeze(1).to(back.dtype)
        return out.index_add(0, order // EXPERTS.top_k + mine.start, back).view(x.shape)


def divide(module: Any, tp: DeviceMesh) -> None:
    """Megatron's tensor parallelism with norms and residuals divided by sequence."""
    whole, part = (Replicate(),), (Shard(1),)
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(module, tp, ends)
    for layer in module.layers:
        for norm in (layer.attention_norm, layer.ffn_norm):
            parallelize_module(norm, tp, SequenceParallel())
        enters = PrepareModuleInput(input_layouts=(*part, None), desired_input_layouts=(*whole, None))
        parallelize_module(layer.attention, tp, enters)
        parallelize_module(layer.attention, tp, {name: ColwiseParallel() for name in ("wq", "wk", "wv")})
        parallelize_module(layer.attention, tp, {"wo": RowwiseParallel(output_layouts=Shard(1))})
        enters = PrepareModuleInput(input_layouts=part, desired_input_layouts=whole)
        parallelize_module(layer.feed_forward, tp, enters)
        if isinstance(layer.feed_forward, Mixture):
            gate = layer.feed_forward.router.gate
            gate.weight = nn.Parameter(distribute_tensor(gate.weight, tp, whole))
            leaves = PrepareModuleOutput(output_layouts=(Partial(),), desired_output_layouts=part)
            parallelize_module(layer.feed_forward, tp, leaves)
        else:
            parallelize_module(layer.feed_forward, tp, {name: ColwiseParallel() for name in ("w1", "w3")})
            parallelize_module(layer.feed_forward, tp, {"w2": RowwiseParallel(output_layouts=Shard(1))})


def build(dense: DeviceMesh, experts: DeviceMesh) -> Any:
    module: Any = build_builtin(CONFIG, SEQ_LEN, "float32").module
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.05)
    fill_rotary(module)
    info = FSDPMeshInfo(mesh=experts["efsdp"], shard_mesh_dim=0)
    apart: set[nn.Parameter] = set()
    for layer in range(EXPERTS.first, CONFIG.layers):
        mixture = Mixture(CONFIG.dim, experts["ep"].get_group(), dense["tp"])
        module.layers[layer].feed_forward = mixture
        apart.update(mixture.experts.parameters())

    def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(placement=Shard(0), mesh_info=info) if parameter in apart else None

    if dense["tp"].size() > 1:
        divide(module, dense["tp"])
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*module.layers, module):
        fully_shard(part, mesh=dense["dp_shard"], mp_policy=precision, shard_placement_fn=place)
    return module


def main(output: Path, tp: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (RANKS // tp, tp), mesh_dim_names=("dp_shard", "tp"))
    module = build(mesh, init_device_mesh("cpu", (RANKS // EP, EP), mesh_dim_names=("efsdp", "ep")))
    mode = Interception()
    for _ in range(2):
        mode.counts.clear()
        tokens = torch.randint(CONFIG.vocab_size, (BATCH, SEQ_LEN + 1))
        with mode:
            mode.phase = "forward"
            logits = module(tokens[:, :-1])
            loss: Any = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            mode.phase = "backward"
            loss.backward()
        assert loss.isfinite()
        module.zero_grad()
    if dist.get_rank() == 0:
        output.write_text(json.dumps([[*key, count] for key, count in mode.counts.items()]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
