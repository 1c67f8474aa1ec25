"""A small FSDP2 training whose faults are switches: ``torchrun trainer.py NAME=VALUE ...``.

On gloo ranks; with ``group=fake`` one rank of a world without peers, on a GPU where there is one.
"""

from __future__ import annotations

import ast
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, Dataset

IGNORED = -100
"""Label of a position that the loss ignores."""


@dataclass(kw_only=True)
class Switches:
    """The default is a healthy training; times are milliseconds a step on the rank that has the fault."""

    group: str = "gloo"
    """``gloo``, on the CPU; ``fake``: this process alone, whose collectives move nothing."""
    world_size: int = 8
    """Of a ``fake`` group."""
    steps: int = 14
    layers: int = 4
    dim: int = 128
    heads: int = 4
    vocab: int = 512
    batch: int = 4
    length: int = 64
    micro_batches: int = 1
    model: str = "transformer"
    """``transformer``, ``mlp``, ``conv``, ``lstm`` or ``cells``, which run once for each element."""
    attention: str = "fused"
    """``fused``, ``masked`` (the causal mask as a matrix) or ``heads``: one product after the other."""
    labels: str = "all"
    """``all``; ``ignored``: an eighth of positions has one; ``selected``: the head runs for those alone."""
    adapters: int = 0
    """Parameters that FSDP ignores, and whose gradients the script reduces."""
    backwards: int = 1
    """Through each forward."""
    optimizer: str = "adamw"
    """``adamw``, ``sgd``, ``lbfgs`` or ``own``, written in the script."""
    wrap: str = "blocks"
    """``blocks``; ``whole``: the root alone; ``leaves``: every module with parameters; ``parts``: the blocks,
    the embedding and the head."""
    precision: str = "fp32"
    """``fp32``, ``bf16`` (reductions too), ``mixed`` (bf16, fp32 reductions)."""
    replicas: int = 1
    root_reshards: bool = False
    keep_last: bool = False
    """The last block is not resharded after forward."""
    never_reshard: bool = False
    checkpoint: bool = False
    clip: bool = False
    clip_by_full_tensors: bool = False
    foreach: bool = True
    wide_layer: int = 0
    """How many times as wide as the others the feed-forward of the middle block is; 0: as wide."""
    no_sync: bool = True
    """Gradients are reduced in the last micro-batch alone."""

    loader: str = "none"
    """``none``; ``slow``: a ``DataLoader`` without workers; ``workers``: one with two."""
    loader_ms: float = 0.0
    loader_rank: int = -1
    """The one rank whose loader is slow; -1: all."""
    prepare_ms: float = 0.0
    """The batch is made by a function of the script, without a ``DataLoader``."""
    slow_rank: int = -1
    slow_products: int = 0
    """Additional matrix products in each block's forward of the slow rank."""
    sleep_rank: int = -1
    sleep_ms: float = 0.0
    """The host of one rank does something else before its backward."""
    spinning_threads: int = 0
    """Python threads that hold the interpreter's lock."""
    lengths: str = "even"
    """``even``; ``uneven``: each rank and step has a random length; ``together``: each step."""
    full_tensors: int = 0
    """How many parameters are gathered whole each step, again and again from the first."""
    state_dict: bool = False
    barriers: int = 0
    metric_reduces: int = 0
    metric_elements: int = 1
    evaluations: int = 0
    """Forwards without a backward each step."""
    garbage: int = 0
    """Cyclic objects that each step leaves to an explicit collection."""
    log_ms: float = 0.0
    """A slow logger, called with the loss's value in each step."""
    items: int = 0
    """``.item()`` calls in each micro-batch."""
    recompiles: bool = False
    compiled: bool = False
    saves: int = 0
    """Every how many steps the model is saved; 0: never."""
    save_mib: int = 0
    """What a save writes besides."""
    leak_kib: int = 0
    """What each step appends to a list that nothing empties."""
    habit: str = ""
    """One of ``habits.py``, and how much of it."""
    habit_size: int = 0
    longer_rank: int = -1
    """The rank whose sequences are always three times as long."""
    optimizer_first: bool = False
    """The optimizer is made before the model is wrapped."""
    keep_gradients: bool = False
    """``zero_grad(set_to_none=False)``."""


def parse(arguments: Iterable[str]) -> Switches:
    """Read ``NAME=VALUE`` arguments."""
    switches = Switches()
    known = {one.name for one in fields(Switches)}
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name not in known:
            sys.exit(f"{name}: not a switch")
        text = isinstance(getattr(switches, name), str)
        setattr(switches, name, value if text else ast.literal_eval(value))
    return switches


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, dim: int, heads: int, wide: int, products: int, attention: str) -> None:
        super().__init__()
        self.heads, self.attention = heads, attention
        self.products = products
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim * wide)
        self.down = nn.Linear(4 * dim * wide, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if self.attention == "heads":
            attended = by_heads(query, key, value)
        elif self.attention == "masked":
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, dim))
        for _ in range(self.products):
            torch.mm(self.more, self.more)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    more = torch.ones(512, 512)
    """Operand of a slow rank's additional products."""


def by_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention as a paper writes it, each head of each sequence for itself."""
    mask = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
    attended = []
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            scores = query[batch, head] @ key[batch, head].T / query.shape[-1] ** 0.5
            attended.append(scores.masked_fill(mask, -torch.inf).softmax(-1) @ value[batch, head])
    return torch.stack(attended).view_as(query)


class Transformer(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, s: Switches) -> None:
        super().__init__()
        slow = s.slow_rank == dist.get_rank()
        self.selects = s.labels == "selected"
        self.embedding = nn.Embedding(s.vocab, s.dim)
        self.layers = nn.ModuleList(
            Block(
                s.dim,
                s.heads,
                s.wide_layer or 1 if i == s.layers // 2 else 1,
                s.slow_products * slow,
                s.attention,
            )
            for i in range(s.layers)
        )
        self.adapters = nn.ParameterList(nn.Parameter(torch.zeros(s.dim)) for _ in range(s.adapters))
        self.norm = nn.LayerNorm(s.dim)
        self.head = nn.Linear(s.dim, s.vocab, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for adapter in self.adapters:
            x = x + adapter
        for layer in self.layers:
            x = layer(x)
        if labels is not None and self.selects:
            x, labels = x[labels != IGNORED], labels[labels != IGNORED]
        logits: Tensor = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


class Features(nn.Module):
    """Models that are no transformer: features of an embedded sequence through equal layers, then a head."""

    def __init__(self, s: Switches) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocab, s.dim)
        self.layers = nn.ModuleList(self.layer(s) for _ in range(s.layers))
        self.head = nn.Linear(s.dim, s.vocab)

    def layer(self, s: Switches) -> nn.Module:
        if s.model == "mlp":
            return nn.Sequential(nn.Linear(s.dim, 4 * s.dim), nn.GELU(), nn.Linear(4 * s.dim, s.dim))
        if s.model == "conv":
            return nn.Sequential(nn.Conv1d(s.dim, s.dim, 3, padding=1), nn.BatchNorm1d(s.dim), nn.ReLU())
        return nn.GRUCell(s.dim, s.dim) if s.model == "cells" else nn.LSTM(s.dim, s.dim, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            if isinstance(layer, nn.LSTM):
                x = layer(x)[0]
            elif isinstance(layer, nn.GRUCell):
                x = along(layer, x)
            elif isinstance(layer, nn.Sequential) and isinstance(layer[0], nn.Conv1d):
                x = layer(x.transpose(1, 2)).transpose(1, 2)
            else:
                x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits


def along(cell: nn.Module, x: Tensor) -> Tensor:
    """Run a cell once for each element of sequences."""
    state = torch.zeros_like(x[:, 0])
    states = []
    for element in x.unbind(1):
        state = cell(element, state)
        states.append(state)
    return torch.stack(states, 1)


class Tokens(Dataset[Tensor]):
    """Random tokens; a whole batch takes ``delay_ms`` to read."""

    def __init__(self, s: Switches, delay_ms: float) -> None:
        self.s = s
        self.delay_s = delay_ms / 1000 / (s.batch * s.micro_batches)

    def __len__(self) -> int:
        return self.s.batch * self.s.micro_batches * self.s.steps

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.delay_s)
        return torch.randint(self.s.vocab, (self.s.length + 1,))


def device_of(s: Switches) -> str:
    """Where the model lives."""
    return "cuda" if s.group == "fake" and torch.cuda.is_available() else "cpu"


def wrap(model: nn.Module, s: Switches) -> nn.Module:
    """Apply ``fully_shard`` as the switches say."""
    world = dist.get_world_size()
    device = device_of(s)
    mesh: DeviceMesh
    if s.replicas == 1:
        mesh = init_device_mesh(device, (world,), mesh_dim_names=("dp_shard",))
    else:
        shape = s.replicas, world // s.replicas
        mesh = init_device_mesh(device, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    policies = {
        "fp32": MixedPrecisionPolicy(),
        "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    common: dict[str, Any] = {"mesh": mesh, "mp_policy": policies[s.precision]}
    if s.never_reshard:
        common["reshard_after_forward"] = False
    layers: nn.ModuleList = model.layers  # type: ignore[assignment]
    if s.wrap == "leaves":
        leaves = [one for one in layers.modules() if [*one.parameters(recurse=False)]]
        for leaf in leaves:
            fully_shard(leaf, **common)
    if s.wrap in ("blocks", "parts"):
        for index, layer in enumerate(layers):
            last = s.keep_last and index == len(layers) - 1
            if s.checkpoint:
                layer = layers[index] = checkpoint_wrapper(layer)
            if s.compiled or s.recompiles:
                layer.compile(backend="eager", dynamic=False)
            fully_shard(layer, **(common | ({"reshard_after_forward": False} if last else {})))
    if s.wrap == "parts":
        for name in ("embedding", "head"):
            fully_shard(getattr(model, name), **common)
    ignored = {"ignored_params": set(model.adapters)} if s.adapters else {}  # type: ignore[arg-type]
    fully_shard(model, **(common | ignored | ({"reshard_after_forward": True} if s.root_reshards else {})))
    return model


class Own(torch.optim.Optimizer):
    """Adam as a paper writes it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update one parameter after the other."""
        for one in (one for group in self.param_groups for one in group["params"]):
            state = self.state[one]
            mean = state.setdefault("mean", torch.zeros_like(one))
            square = state.setdefault("square", torch.zeros_like(one))
            mean.mul_(0.9).add_(one.grad, alpha=0.1)
            square.mul_(0.99).addcmul_(one.grad, one.grad, value=0.01)
            one.addcdiv_(mean, square.sqrt().add_(1e-8), value=-3e-4)


class Orthogonal(torch.optim.Optimizer):
    """Muon: momentum made orthogonal by Newton and Schulz's iteration, of whole matrices."""

    def __init__(self, params: Any, shared: bool) -> None:
        super().__init__(params, {})
        self.shared = shared

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Compute each update on every rank, or on one of them."""
        rank, load = dist.get_rank(), [0] * dist.get_world_size()
        params = [one for group in self.param_groups for one in group["params"]]
        updates = []
        for one in params:
            momentum = self.state[one].setdefault("momentum", torch.zeros_like(one))
            updates.append(momentum.mul_(0.9).add_(one.grad).full_tensor())
        owner = [0] * len(updates)
        for at in sorted(range(len(updates)), key=lambda one: -updates[one].numel()):
            update = updates[at]
            owner[at] = load.index(min(load))
            load[owner[at]] += update.numel() * min(update.shape)
            if update.dim() == 2 and (not self.shared or owner[at] == rank):
                updates[at] = orthogonal(update)
        for at, (one, update) in enumerate(zip(params, updates, strict=True)):
            if self.shared:
                dist.broadcast(update, src=owner[at])
            whole = distribute_tensor(update, one.device_mesh, one.placements, src_data_rank=None)
            one.add_(whole, alpha=-0.01)


def orthogonal(matrix: Tensor) -> Tensor:
    """Make a matrix nearly orthogonal."""
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if len(x) > x.shape[1] else x
    for _ in range(5):
        products = x @ x.T
        x = 3.4445 * x + (-4.775 * products + 2.0315 * products @ products) @ x
    return (x.T if x.shape != matrix.shape else x).contiguous()


def make_optimizer(model: nn.Module, s: Switches) -> torch.optim.Optimizer:
    """Build the optimizer."""
    if s.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=s.foreach)
    if s.optimizer == "own":
        return Own(model.parameters(), {})
    if s.optimizer in ("muon", "muon_shared"):
        return Orthogonal(model.parameters(), s.optimizer == "muon_shared")
    if s.optimizer == "lbfgs":
        return torch.optim.LBFGS(model.parameters(), max_iter=3)
    parameters = list(model.parameters())
    whole = [one for one in parameters if not isinstance(one, DTensor)]
    sharded = [one for one in parameters if isinstance(one, DTensor)]
    groups = [{"params": one} for one in (sharded, whole) if one]  # torch updates no mixture at once
    return torch.optim.AdamW(groups, lr=3e-4, foreach=s.foreach)


def batches(s: Switches) -> Iterator[Tensor]:
    """One tensor of tokens a step: all micro-batches."""
    rank = dist.get_rank()
    delay = s.loader_ms if s.loader_rank in (-1, rank) else 0.0
    size = s.batch * s.micro_batches
    if s.loader != "none":
        workers = 2 if s.loader == "workers" else 0
        yield from DataLoader(Tokens(s, delay), batch_size=size, num_workers=workers)
        return
    for _ in range(s.steps):
        yield prepare(s, size)


def prepare(s: Switches, size: int) -> Tensor:
    """Make a batch in the training's own loop."""
    time.sleep(s.prepare_ms / 1000)
    length = s.length
    if s.lengths == "uneven":
        length = int(torch.randint(8, 2 * s.length - 8, ()).item())
    if s.lengths == "together":
        shared = torch.randint(s.length // 2, s.length + 1, ())
        dist.broadcast(shared, 0)
        length = int(shared.item())
    if s.longer_rank == dist.get_rank():
        length *= 3
    return torch.randint(s.vocab, (size, length + 1))


def loss_of(model: nn.Module, tokens: Tensor, labels: str) -> Tensor:
    if labels != "all":
        targets = tokens[:, 1:].clone()
        targets[:, : -(targets.shape[1] // 8)] = IGNORED
        loss: Tensor = model(tokens[:, :-1], targets)
        return loss
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def spin() -> None:
    """Hold the interpreter's lock as pure Python does."""
    count = 0
    while True:
        count += 1


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


class Trainer:
    """The loop, and what the switches add to its steps."""

    def __init__(self, s: Switches) -> None:
        self.s = s
        torch.manual_seed(0)
        self.device = device_of(s)
        model = (Transformer(s) if s.model == "transformer" else Features(s)).to(self.device)
        first = make_optimizer(model, s) if s.optimizer_first else None
        self.model = wrap(model, s)
        self.optimizer = first or make_optimizer(self.model, s)
        self.do("AT_START")
        self.leaked: list[Tensor] = []
        self.average: list[Tensor] = []
        self.best: object = None
        torch.manual_seed(1 + dist.get_rank())

    def run(self) -> None:
        for step, batch in enumerate(batches(self.s)):
            tokens = batch.to(self.device)
            if self.s.recompiles:
                tokens = tokens[:, : self.s.length - step]
            if self.s.optimizer == "lbfgs":
                self.optimizer.step(partial(self.closure, tokens))
                continue
            loss = self.accumulate(tokens)
            self.before_update()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=not self.s.keep_gradients)
            self.after_update(step, tokens, loss)

    def do(self, when: str) -> None:
        if self.s.habit:
            from lab import habits

            if habit := getattr(habits, when).get(self.s.habit):
                habit(self, self.s.habit_size)

    def closure(self, tokens: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, tokens, self.s.labels)
        loss.backward()
        return float(loss.detach())

    def accumulate(self, tokens: Tensor) -> Tensor:
        micro_batches = tokens.chunk(self.s.micro_batches)
        for index, part in enumerate(micro_batches):
            if self.s.no_sync and self.s.micro_batches > 1:
                last = index == len(micro_batches) - 1
                self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            loss = loss_of(self.model, part, self.s.labels) / len(micro_batches)
            for _ in range(self.s.items):
                loss.detach().item()
            if self.s.sleep_rank == dist.get_rank():
                time.sleep(self.s.sleep_ms / 1000)
            for left in reversed(range(self.s.backwards)):
                loss.backward(retain_graph=left > 0)
        return loss.detach()

    def before_update(self) -> None:
        s = self.s
        self.do("BEFORE_UPDATE")
        for adapter in self.model.adapters if s.adapters else ():  # type: ignore[union-attr]
            dist.all_reduce(adapter.grad)
            adapter.grad.div_(dist.get_world_size())
        if s.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if s.clip_by_full_tensors:
            gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
            norms = [one.full_tensor().norm() for one in gradients if isinstance(one, DTensor)]
            scale = 1.0 / max(1.0, torch.stack(norms).norm().item())
            for gradient in gradients:
                gradient.mul_(scale)

    def after_update(self, step: int, tokens: Tensor, loss: Tensor) -> None:
        s = self.s
        self.do("AFTER_UPDATE")
        parameters = [one for one in self.model.parameters() if isinstance(one, DTensor)]
        for index in range(s.full_tensors):
            parameters[index % len(parameters)].full_tensor()
        if s.state_dict:
            get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        for _ in range(s.barriers):
            dist.barrier()
        for _ in range(s.metric_reduces):
            dist.all_reduce(torch.zeros(s.metric_elements, device=self.device))
        for _ in range(s.evaluations):
            evaluate(self.model, tokens)
        if s.garbage:
            _ = [Cycle() for _ in range(s.garbage)]
            gc.collect()
        if s.log_ms:
            log(loss.item(), s.log_ms)
        if s.saves and step % s.saves == 0:
            save(self.model, s.save_mib)
        if s.leak_kib:
            self.leaked.append(torch.zeros(s.leak_kib * 256))


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor) -> None:
    """Evaluate on the batch once more."""
    model(tokens[:, :-1])


def log(value: float, takes_ms: float) -> None:
    """Report a value as a client of a remote service does."""
    time.sleep(takes_ms / 1000)
    print(f"loss {value:.3f}", flush=True)


def save(model: nn.Module, mib: int) -> None:
    """Save the whole model and as much besides."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        with tempfile.TemporaryFile() as file:
            torch.save({"model": state, "more": torch.ones(mib << 18)}, file)
            file.flush()
            os.fsync(file.fileno())


def join(s: Switches) -> None:
    """Make the process group."""
    if s.group == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=s.world_size, store=FakeStore())
    else:
        dist.init_process_group(s.group)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))  # tests, for the package of this folder
    switches = parse(sys.argv[1:])
    join(switches)
    for _ in range(switches.spinning_threads):
        threading.Thread(target=spin, daemon=True).start()
    Trainer(switches).run()
    dist.destroy_process_group()
    # gloo's threads may outlive the group by a moment and abort an interpreter that is already ending.
    time.sleep(0.2)


if __name__ == "__main__":
    main()
