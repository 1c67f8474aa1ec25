"""Claims about FSDP2 that circulate in guides, recomputed with the estimators of this package.

python examples/folklore.py              # claim, our number, why
python examples/folklore.py --markdown   # the table of docs/folklore.md

Bytes are decimal (1 GB = 10^9 bytes), as in the claims. Nothing is executed or downloaded; no GPU is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import fsdp2prof
from fsdp2prof import MeshSpec, ModelSpec, PolicySpec

GB = 10**9
MB = 10**6

QWEN2_VOCABULARY = 152_064
"""From Qwen2-7B's config.json."""


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
    chosen = {"reshard": "always", "clip_grad": False, "seq_len": 1024, **changes}
    return PolicySpec(**chosen)  # type: ignore[arg-type]


def traffic(model: str, ranks: int, **changes: object) -> fsdp2prof.CommEstimate:
    """What one rank sends in a step; every block and the root is a group."""
    return fsdp2prof.estimate_comm(ModelSpec(source=model), MeshSpec(dp_shard=ranks), policy(**changes))


def wire_gb(model: str, ranks: int, **changes: object) -> float:
    """Bytes one rank sends per step, in GB."""
    return sum(total.wire_bytes for total in traffic(model, ranks, **changes).per_step.values()) / GB


def gathered_bytes(estimate: fsdp2prof.CommEstimate, fqn: str) -> int:
    """Bytes of one all-gather of a module."""
    rows = [row for row in estimate.groups if row.op == "all_gather" and row.fqn == fqn]
    return rows[0].payload_bytes // rows[0].count


def states_gb(model: str, ranks: int, *, gradients: bool = True) -> float:
    """Parameters, AdamW's state and perhaps gradients of one rank, all in fp32, in GB."""
    saved = fsdp2prof.estimate_checkpoint(ModelSpec(source=model), MeshSpec(dp_shard=ranks), policy())
    return (saved.full_bytes + gradients * saved.parameter_bytes) / ranks / GB


def own(factory: Callable[[], nn.Module]) -> str:
    """Name of a model of this file."""
    return f"{Path(__file__).stem}:{factory.__name__}"


def thirty_billion() -> nn.Module:
    """Thirty layers of 10^9 parameters."""
    return nn.Sequential(*(nn.Linear(31_250, 32_000, bias=False) for _ in range(30)))


def three_rows() -> nn.Module:
    """A layer with a 3 x 4 weight."""
    return nn.Sequential(nn.Linear(4, 3, bias=False))


def traffic_of_a_step() -> Row:
    """All-gather in forward, all-gather in backward, reduce-scatter."""
    model, ranks = "llama3-8b", 8
    once = traffic(model, ranks).model.parameters * 2 * (ranks - 1) / ranks / GB
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
    model = own(thirty_billion)
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
    model = "qwen2-7b"
    estimate = traffic(model, 8)
    layers, layer = estimate.model.blocks, gathered_bytes(estimate, "layers.0") / MB
    fp32, bf16 = wire_gb(model, 8), wire_gb(model, 8, reduce_dtype="bf16")
    return Row(
        "Qwen2-7B: 32 layers, ~100 MB a layer, 11.2 GB per step",
        f"{layers} layers, {layer:.0f} MB each; {fp32:.1f} GB (fp32 reduce), {bf16:.1f} GB (bf16)",
        "a layer has 233 M parameters, and embedding and head, 1.09 G, move too",
        {"layers": layers, "layer_mb": layer, "fp32": fp32, "bf16": bf16},
    )


def qwen_peak() -> Row:
    """States and logits alone."""
    states = states_gb("qwen2-7b", 8)
    logits = 2 * 4096 * QWEN2_VOCABULARY * 4 / GB
    return Row(
        "Qwen2-7B on 8 GPUs peaks at 18 GB",
        f"{states:.1f} GB of states + {logits:.1f} GB of fp32 logits and their gradient",
        f"{states + logits:.1f} GB with one sequence of 4096 tokens, before any layer's activations",
        {"states": states, "logits": logits},
    )


def llama_on_one_node() -> Row:
    """States alone."""
    kept, total = states_gb("llama3-70b", 8, gradients=False), states_gb("llama3-70b", 8)
    return Row(
        "Llama-70B on 8 x 80 GB: 45 GB a GPU",
        f"{kept:.1f} GB of parameters and AdamW state, {total:.1f} GB with gradients: out of memory",
        "12 or 16 bytes for each of 70.6 G parameters, over 8 ranks; offload, or more ranks",
        {"kept": kept, "total": total},
    )


def offloaded_175b() -> Row:
    """Where the states go, and what stays on the device."""
    host = states_gb("gpt3-175b", 16)
    estimate = traffic("gpt3-175b", 16)
    block, root = (gathered_bytes(estimate, fqn) / GB for fqn in ("layers.0", ""))
    device = 2 * block + root
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
        "only the first all-gather cannot overlap: 50 + 12 x 100",
        {"ms": now},
    )


def uneven_shards() -> Row:
    """Linear(4, 3) has a 3 x 4 weight; FSDP2 shards as ``torch.chunk`` cuts."""
    cut = [len(shard) for shard in torch.empty(3, 4).chunk(4)]
    rows = cut + [0] * (4 - len(cut))
    padded = gathered_bytes(traffic(own(three_rows), 4, param_dtype=None, wrap=("root",)), "") // (4 * 4)
    return Row(
        "local shard = global / world size",
        f"Linear(4, 3) on 4 ranks: {', '.join(map(str, rows))} rows, gathered as {padded}",
        "dimension 0 is cut into chunks of ceil(d0/W) rows: the last ranks get short or empty shards",
        {f"rank{rank}": count for rank, count in enumerate(rows)} | {"padded": padded},
    )


def local_gradients() -> Row:
    """Which rows each rank's gradient is of."""
    starts = [int(shard[0]) for shard in torch.arange(8).chunk(4)]
    return Row(
        "all ranks' local gradients must be equal after the sync",
        f"an 8-row gradient on 4 ranks: local parts start at rows {', '.join(map(str, starts))}",
        "they are different shards of one gradient; compare full_tensor()",
        {f"rank{rank}": start for rank, start in enumerate(starts)},
    )


def bucket() -> Row:
    """One all-gather is one wrapped module."""
    estimate = traffic("llama3-8b", 8)
    block, root = (gathered_bytes(estimate, fqn) / MB for fqn in ("layers.0", ""))
    return Row(
        "the bucket size is 25 MB",
        f"Llama 3 8B: {block:.0f} MB a block, {root:.0f} MB for embedding and head",
        "25 MB is DDP's; FSDP2 gathers what was wrapped, in one all-gather each",
        {"block": block, "root": root},
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
    sent = {ranks: wire_gb("llama3-8b", ranks) for ranks in (16, 512)}
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
