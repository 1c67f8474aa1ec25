"""Claims about FSDP2 that circulate in guides, recomputed with the estimators of this package.

python examples/folklore.py              # claim, our number, why
python examples/folklore.py --markdown   # the table of docs/folklore.md

Bytes are decimal (1 GB = 10^9 bytes), as in the claims. Nothing is executed or downloaded; no GPU is needed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from fsdp2prof.estimators.communication import estimate_built, estimate_comm
from fsdp2prof.estimators.models.build import build_model
from fsdp2prof.estimators.models.catalog import builtin_config
from fsdp2prof.estimators.models.foreign import build_factory
from fsdp2prof.estimators.models.model import Model
from fsdp2prof.estimators.optimizer_state import ModelStates, model_states
from fsdp2prof.estimators.sharding import ParameterGroup, ShardedParameter, parameter_groups
from fsdp2prof.estimators.spec.mesh import MeshSpec
from fsdp2prof.estimators.spec.model import ModelSpec
from fsdp2prof.estimators.spec.policy import PolicySpec

GB = 10**9
MB = 10**6


@dataclass(frozen=True)
class Row:
    """One claim and what is true."""

    claim: str
    ours: str
    why: str
    numbers: dict[str, float]
    """The numbers in ``ours``, unrounded, for the test that pins them."""


def policy(**changes: object) -> PolicySpec:
    """Every module reshards, bf16 compute, fp32 reduction; only FSDP's own collectives are counted."""
    return PolicySpec(**{"reshard": "always", "clip_grad": False, **changes})  # type: ignore[arg-type]


def wire_gb(model: Model, ranks: int, **changes: object) -> float:
    """Bytes one rank sends per step, in GB."""
    estimate = estimate_built(model, MeshSpec(dp_shard=ranks), policy(**changes))
    return sum(total.wire_bytes for total in estimate.per_step.values()) / GB


def builtin(name: str) -> Model:
    """A built-in model on the meta device."""
    return build_model(ModelSpec(source=name), seq_len=1024)


def groups_of(model: Model, ranks: int) -> tuple[ParameterGroup, ...]:
    """Its FSDP parameter groups, one per block and the root."""
    return parameter_groups(model, MeshSpec(dp_shard=ranks), policy())


def states_of(name: str, ranks: int) -> ModelStates:
    """fp32 shards and AdamW state of one rank."""
    return model_states(groups_of(builtin(name), ranks), policy())


def thirty_billion() -> nn.Module:
    """Thirty layers of 10^9 parameters."""
    return nn.Sequential(*(nn.Linear(31_250, 32_000, bias=False) for _ in range(30)))


def traffic_of_a_step() -> Row:
    """All-gather in forward, all-gather in backward, reduce-scatter."""
    model, ranks = builtin("llama3-8b"), 8
    once = model.config.parameters * 2 * (ranks - 1) / ranks / GB
    one_dtype = wire_gb(model, ranks, reduce_dtype="bf16") / once
    mixed = wire_gb(model, ranks) / once
    return Row(
        "traffic per step = 2 x model x (W-1)/W",
        f"{one_dtype:.2f} x in one dtype, {mixed:.2f} x with fp32 reduction (Llama 3 8B, W=8)",
        "backward gathers the parameters again; a reduce-scatter in fp32 weighs two bf16 ones",
        {"one_dtype": one_dtype, "mixed": mixed},
    )


def thirty_billion_on_eight() -> Row:
    """A round 30B model."""
    model = build_factory(f"{Path(__file__).stem}:thirty_billion", "bfloat16")
    bf16 = wire_gb(model, 8, orig_dtype="bf16", reduce_dtype="bf16")
    fp32 = wire_gb(model, 8, orig_dtype="bf16")
    return Row(
        "30B in bf16 (60 GB), W=8: 105 GB per step",
        f"{bf16:.1f} GB; {fp32:.1f} GB with fp32 reduce-scatter",
        "105 GB are one all-gather and one bf16 reduce-scatter: the backward all-gather is missing",
        {"bf16": bf16, "fp32": fp32},
    )


def qwen_traffic() -> Row:
    """Layers, bytes of one, bytes of a step."""
    model = builtin("qwen2-7b")
    block = next(group for group in groups_of(model, 8) if group.fqn == "layers.0")
    layer = sum(parameter.numel for parameter in block.parameters) * 2 / MB
    fp32, bf16 = wire_gb(model, 8), wire_gb(model, 8, reduce_dtype="bf16")
    return Row(
        "Qwen2-7B: 32 layers, ~100 MB a layer, 11.2 GB per step",
        f"{len(model.blocks)} layers, {layer:.0f} MB each; {fp32:.1f} GB (fp32 reduce), {bf16:.1f} GB (bf16)",
        "a layer has 233 M parameters, and embedding and head, 1.09 G, move too",
        {"layers": len(model.blocks), "layer_mb": layer, "fp32": fp32, "bf16": bf16},
    )


def qwen_peak() -> Row:
    """States and logits alone."""
    states = states_of("qwen2-7b", 8).total_bytes / GB
    config = builtin_config("qwen2-7b")
    logits = 2 * 4096 * config.vocab_size * 4 / GB
    return Row(
        "Qwen2-7B on 8 GPUs peaks at 18 GB",
        f"{states:.1f} GB of states + {logits:.1f} GB of fp32 logits and their gradient",
        f"{states + logits:.1f} GB with one sequence of 4096 tokens, before any layer's activations",
        {"states": states, "logits": logits},
    )


def llama_on_one_node() -> Row:
    """States alone."""
    states = states_of("llama3-70b", 8)
    kept = (states.parameter_bytes + states.optimizer_bytes) / GB
    total = states.total_bytes / GB
    return Row(
        "Llama-70B on 8 x 80 GB: 45 GB a GPU",
        f"{kept:.1f} GB of parameters and AdamW state, {total:.1f} GB with gradients: out of memory",
        "12 or 16 bytes for each of 70.6 G parameters, over 8 ranks; offload, or more ranks",
        {"kept": kept, "total": total},
    )


def offloaded_175b() -> Row:
    """Where the states go, and what stays on the device."""
    model = builtin("gpt3-175b")
    groups = groups_of(model, 16)
    host = model_states(groups, policy()).total_bytes / GB
    block = next(group for group in groups if group.fqn == "layers.0")
    root = next(group for group in groups if group.fqn == "")
    gathered = [2 * sum(p.padded_numel for p in group.parameters) / GB for group in (block, root)]
    device = 2 * gathered[0] + gathered[1]
    return Row(
        "175B on 16 GPUs with offload: 45.23 GB by formula",
        f"{host:.1f} GB of host memory a rank; {device:.1f} GB of gathered parameters on the device",
        "in backward two blocks are gathered at once, and the root; the formula mixes up its units",
        {"host": host, "device": device},
    )


def overlap() -> Row:
    """Forward of twelve layers, each gathered while the one before computes."""
    compute, gather, gathered, now = 100, 50, 0, 0
    for _ in range(12):
        gathered += gather
        now = max(now, gathered) + compute
    return Row(
        "12 layers, 100 ms compute + 50 ms comm: 1800 -> 1300 ms with overlap",
        f"{now} ms",
        "only the first all-gather has nothing to hide behind: 50 + 12 x 100",
        {"ms": now},
    )


def sharded(rows: int, columns: int, ranks: int) -> ShardedParameter:
    """A matrix sharded over ranks."""
    return ShardedParameter(
        fqn="weight",
        shape=(rows, columns),
        dtype="float32",
        requires_grad=True,
        shards=ranks,
        gather_dtype="float32",
        position=0,
    )


def uneven_shards() -> Row:
    """Linear(4, 3) has a 3 x 4 weight."""
    weight = sharded(3, 4, 4)
    rows = [weight.shard_rows(rank) for rank in range(4)]
    return Row(
        "local shard = global / world size",
        f"Linear(4, 3) on 4 ranks: {', '.join(map(str, rows))} rows, gathered as {weight.padded_numel // 4}",
        "dimension 0 is cut in pieces of ceil(d0/W) rows: the last ranks get short or empty shards",
        {f"rank{rank}": count for rank, count in enumerate(rows)} | {"padded": weight.padded_numel // 4},
    )


def local_gradients() -> Row:
    """Which rows each rank's gradient is of."""
    weight = sharded(8, 8, 4)
    starts = [sum(weight.shard_rows(before) for before in range(rank)) for rank in range(4)]
    return Row(
        "all ranks' local gradients must be equal after the sync",
        f"an 8-row gradient on 4 ranks: local parts start at rows {', '.join(map(str, starts))}",
        "they are different shards of one gradient; compare full_tensor()",
        {f"rank{rank}": start for rank, start in enumerate(starts)},
    )


def bucket() -> Row:
    """One all-gather is one wrapped module."""
    estimate = estimate_comm(ModelSpec(source="llama3-8b"), MeshSpec(dp_shard=8), policy())
    sizes = {row.fqn: row.payload_bytes / MB for row in estimate.groups if row.op == "all_gather"}
    return Row(
        "the bucket size is 25 MB",
        f"Llama 3 8B: {sizes['layers.0']:.0f} MB a block, {sizes['']:.0f} MB for embedding and head",
        "25 MB is DDP's; FSDP2 gathers what was wrapped, in one all-gather each",
        {"block": sizes["layers.0"], "root": sizes[""]},
    )


def context_parallel() -> Row:
    """Over how many ranks gradients are summed."""
    right, wrong = MeshSpec(dp_shard=4, cp=2), MeshSpec(dp_shard=4)
    summed = [mesh.fsdp_size for mesh in (right, wrong)]
    return Row(
        "context parallelism: fully_shard on dp only",
        f"dp 4 x cp 2: gradients are summed over {summed[0]} ranks ({right.fsdp_dim}), not {summed[1]}",
        "ranks of one cp group see different tokens: shard on dp x cp flattened, or they drift apart",
        {"right": summed[0], "wrong": summed[1]},
    )


def growth() -> Row:
    """(W-1)/W."""
    model = builtin("llama3-8b")
    sent = {ranks: wire_gb(model, ranks) for ranks in (16, 512)}
    more = sent[512] / sent[16] - 1
    return Row(
        "communication grows with W, so more than 16 GPUs need a hybrid mesh",
        f"Llama 3 8B: {sent[16]:.1f} GB at 16 ranks, {sent[512]:.1f} GB at 512: {more:.1%} more",
        "(W-1)/W goes to 1; what decides are latency and the network between nodes",
        {"16": sent[16], "512": sent[512]},
    )


CHECKS = (
    traffic_of_a_step,
    thirty_billion_on_eight,
    qwen_traffic,
    qwen_peak,
    llama_on_one_node,
    offloaded_175b,
    overlap,
    uneven_shards,
    local_gradients,
    bucket,
    context_parallel,
    growth,
)


def markdown(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| claim | what the estimators say | why |", "|---|---|---|"]
    return "\n".join(lines + [f"| {row.claim} | {row.ours} | {row.why} |" for row in rows])


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows = [check() for check in CHECKS]
    if "--markdown" in sys.argv:
        print(markdown(rows))
        return
    table = Table("claim", "what the estimators say", "why", box=box.SIMPLE_HEAD, show_lines=True)
    for row in rows:
        table.add_row(row.claim, row.ours, row.why)
    Console().print(table)


if __name__ == "__main__":
    main()
