"""Preference tuning with FSDP2, written as people write it: a policy, a reference and a reward model.

``python preferences.py OUTPUT`` under torchrun has rank 0 write the collectives that the second step of
each case made. ``dpo``: pairs through policy and reference, and a reward model over the pairs.
``adapters``: the reference is the policy itself, its adapters left out.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.interception import Interception

RANKS, PAIRS, SEQ_LEN, VOCAB, LORA = 2, 2, 8, 50, 4


class Block(nn.Module):
    """A residual layer of two linear maps."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.silu(self.up(x)))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, dim: int, layers: int, outputs: int = VOCAB) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, outputs, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


class Adapted(nn.Module):
    """A frozen linear layer and a low-rank map beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, LORA, bias=False)
        self.b = nn.Linear(LORA, base.out_features, bias=False)
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x)
        return out + self.b(self.a(x)) if self.on else out


def policy() -> nn.Module:
    return Decoder(16, 3)


def reference() -> nn.Module:
    return Decoder(24, 2)


def reward() -> nn.Module:
    return Decoder(12, 2, outputs=1)


def sharded(module: nn.Module, *, apart: bool = False) -> Any:
    mesh = init_device_mesh("cpu", (RANKS,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parts: list[Any] = [*module.layers]  # type: ignore[misc]
    if apart:
        parts += [module.tok_embeddings, [module.norm, module.output]]
    for part in [*parts, module]:
        fully_shard(part, mesh=mesh, mp_policy=precision)
    return module


def with_adapters(module: Any) -> Any:
    module.requires_grad_(False)
    for layer in module.layers:
        layer.up = Adapted(layer.up)
    return module


def log_probabilities(module: Any, tokens: Tensor) -> Tensor:
    logits = module(tokens[:, :-1]).float()
    return F.log_softmax(logits, -1).gather(2, tokens[:, 1:, None]).squeeze(2).sum(1)


def preference_loss(taken: Tensor, before: Tensor) -> Tensor:
    chosen, rejected = (taken - before).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def dpo_step(trained: Any, others: tuple[Any, ...], tokens: Tensor) -> Tensor:
    second, judge = others
    with torch.no_grad():
        judge(tokens[:, :-1])
        before = log_probabilities(second, tokens)
    return preference_loss(log_probabilities(trained, tokens), before)


def adapters_step(trained: Any, tokens: Tensor) -> Tensor:
    adapted = [part for part in trained.modules() if isinstance(part, Adapted)]
    with torch.no_grad():
        for part in adapted:
            part.on = False
        before = log_probabilities(trained, tokens)
        for part in adapted:
            part.on = True
    return preference_loss(log_probabilities(trained, tokens), before)


def counted(case: str) -> list[list[Any]]:
    """The collectives of the second step."""
    torch.manual_seed(0)
    others: tuple[Any, ...] = ()
    if case == "dpo":
        trained = sharded(policy())
        others = (sharded(reference().requires_grad_(False)), sharded(reward().requires_grad_(False)))
    else:
        trained = sharded(with_adapters(policy()), apart=True)
    mode = Interception()
    for _ in range(2):
        mode.counts.clear()
        tokens = torch.randint(VOCAB, (2 * PAIRS, SEQ_LEN + 1))
        with mode:
            mode.phase = "forward"
            loss: Any = dpo_step(trained, others, tokens) if others else adapters_step(trained, tokens)
            mode.phase = "backward"
            loss.backward()
        assert loss.isfinite()
        trained.zero_grad()
    return [[*key, count] for key, count in mode.counts.items()]


def main(output: Path) -> None:
    dist.init_process_group("gloo")
    counts = {case: counted(case) for case in ("dpo", "adapters")}
    if dist.get_rank() == 0:
        output.write_text(json.dumps(counts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
