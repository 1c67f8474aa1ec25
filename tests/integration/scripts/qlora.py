"""QLoRA with FSDP2 and torchao's NF4Tensor, written as people write it; its collectives are counted.

``python qlora.py OUTPUT`` under torchrun has rank 0 write the collectives of the second step, and the bytes
of its shards.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from preferences import LORA, VOCAB, Decoder, sharded
from support.interception import Interception
from torch import Tensor, nn

_NF4: Any = importlib.import_module("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
RANKS, BATCH, SEQ_LEN = 2, 2, 8
PARTS = ("quantized_data", "quantized_scalers", "quantization_factor")


class Packed(nn.Module):
    """A frozen linear layer in 4 bits, perhaps with a low-rank map beside it."""

    def __init__(self, base: nn.Linear, *, adapted: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(_NF4.to_nf4(base.weight.detach().bfloat16()), requires_grad=False)
        self.adapters = nn.ModuleList()
        if adapted:
            self.adapters.append(nn.Linear(base.in_features, LORA, bias=False))
            self.adapters.append(nn.Linear(LORA, base.out_features, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _NF4.linear_nf4(x, self.weight)
        for_adapters = x
        for adapter in self.adapters:
            for_adapters = adapter(for_adapters)
        return out + for_adapters if self.adapters else out


def base() -> nn.Module:
    return Decoder(256, 3)


def build() -> Any:
    module: Any = base().bfloat16().requires_grad_(False)
    for layer in module.layers:
        layer.up, layer.down = Packed(layer.up, adapted=True), Packed(layer.down, adapted=False)
    return sharded(module)


def shard_bytes(module: nn.Module) -> int:
    total = 0
    for parameter in module.parameters():
        shard: Any = parameter.to_local()  # type: ignore[attr-defined]
        parts = [getattr(shard, name) for name in PARTS] if hasattr(shard, PARTS[0]) else [shard]
        total += sum(part.numel() * part.element_size() for part in parts)
    return total


def main(output: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = build()
    mode = Interception()
    for _ in range(2):
        mode.counts.clear()
        tokens = torch.randint(VOCAB, (BATCH, SEQ_LEN + 1))
        with mode:
            mode.phase = "forward"
            loss: Any = F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            mode.phase = "backward"
            loss.backward()
        assert loss.isfinite()
        module.zero_grad()
    if dist.get_rank() == 0:
        counts = [[*key, count] for key, count in mode.counts.items()]
        output.write_text(json.dumps({"counts": counts, "shard_bytes": shard_bytes(module)}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
