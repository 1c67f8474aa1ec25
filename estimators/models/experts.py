"""A mixture of experts as it is trained: router, reordering, grouped products, expert parallelism.

Tokens choose their ``k`` experts and none is dropped. Rows are gathered in the order of their experts,
exchanged with the ranks that hold the experts, multiplied in one grouped product a projection, brought back,
and added to the tokens they came from, as torchtitan's ``MoE`` with ``ExpertParallel`` does. Which rows go
where is data, so here a rank sends every other the same number, and receives ``imbalance`` times as many.
Shapes: T tokens, D model dim, X experts, R rows (T k, or what was received), F the experts' hidden dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)

from fsdp2prof.estimators.config.catalog import ExpertShape, TransformerConfig
from fsdp2prof.estimators.models.feed_forward import FeedForward, swiglu
from fsdp2prof.estimators.models.local_tensors import as_local

ALIGNMENT = 8
"""Rows to whose multiple each expert's are padded, as the grouped product needs in bf16."""
_ACTIVATION_LIMIT = 7.0
_ACTIVATION_SLOPE = 1.702
"""Of gpt-oss's gated activation."""


def has_grouped_products() -> bool:
    """Whether this torch has the grouped matrix product on every device."""
    return hasattr(F, "grouped_mm") or hasattr(torch, "_grouped_mm")


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """How tokens reach experts on other ranks."""

    group: ProcessGroup
    ranks: int
    imbalance: float
    """Rows that the rank receives, as a multiple of the rows it sends."""

    def received(self, rows: int) -> list[int]:
        """Rows from each rank where the rank itself sends ``rows`` to all together."""
        size, longer = divmod(ceil(rows * self.imbalance), self.ranks)
        return [size + (rank < longer) for rank in range(self.ranks)]

    def sent(self, rows: int) -> list[int]:
        """Rows to each rank."""
        size, longer = divmod(rows, self.ranks)
        return [size + (rank < longer) for rank in range(self.ranks)]


class Router(nn.Module):
    """Scores of the experts in fp32, and each token's best ``k``."""

    expert_bias: Tensor

    def __init__(self, config: TransformerConfig, shape: ExpertShape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Linear(config.dim, shape.count, bias=shape.bias)
        self.register_buffer("expert_bias", torch.zeros(shape.count, dtype=torch.float32))

    def forward(self, x_td: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores (T, k) fp32 and the experts (T, k) int64."""
        scores = self.gate(x_td).float()
        scores = torch.sigmoid(scores) if self.shape.sigmoid else F.softmax(scores, dim=1)
        _, selected = torch.topk(scores + self.expert_bias, self.shape.top_k, dim=1)
        top = scores.gather(1, selected)
        if self.shape.normalised:
            top = top / (top.sum(-1, keepdim=True) + 1e-20)
        return top, selected


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayer:
    """One projection of the experts on plain tensors, of all (X first) or of one."""

    weight: Tensor
    bias: Tensor | None
    adapter: tuple[Tensor, Tensor, float] | None
    """A (X, r, in), B (X, out, r) and their scale."""

    def of(self, expert: int) -> ExpertLayer:
        """That of one expert."""
        return ExpertLayer(
            weight=self.weight[expert],
            bias=None if self.bias is None else self.bias[expert],
            adapter=None
            if self.adapter is None
            else (self.adapter[0][expert], self.adapter[1][expert], self.adapter[2]),
        )

    def apart(self, x: Tensor) -> Tensor:
        """Transform rows of one expert."""
        out = F.linear(x, self.weight, self.bias)
        if self.adapter is None:
            return out
        a, b, scale = self.adapter
        return out + F.linear(F.linear(x, a), b) * scale

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Transform rows of all experts, up to ``offsets`` of each."""
        out = _grouped_product(x, self.weight, offsets)
        if self.bias is not None:
            rows = torch.arange(x.shape[0], device=x.device)
            of_row = torch.searchsorted(offsets, rows, right=True).clamp(max=len(self.bias) - 1)
            out = out + self.bias[of_row]
        if self.adapter is None:
            return out
        a, b, scale = self.adapter
        return out + _grouped_product(_grouped_product(x, a, offsets), b, offsets) * scale


def _grouped_product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    grouped = F.grouped_mm if hasattr(F, "grouped_mm") else torch._grouped_mm
    out: Tensor = grouped(x, weight.transpose(-2, -1), offs=offsets)
    return out


class GroupedExperts(nn.Module):
    """The routed experts' projections, stacked: those of this rank under expert parallelism."""

    b1: nn.Parameter | None
    b2: nn.Parameter | None
    b3: nn.Parameter | None
    exchange: ExpertExchange | None = None
    """How tokens of other ranks reach them."""
    fused = False
    """Run SiLU and the product as one kernel would."""
    ranks = 1
    """Tensor-parallel ranks that sum their results: each holds a part of every expert."""
    left_out = False
    """Transform as without adapters."""
    scale: float
    """Of adapters."""

    def __init__(self, config: TransformerConfig, shape: ExpertShape) -> None:
        super().__init__()
        count, dim, ffn = shape.count, config.dim, shape.ffn_dim
        self.w1 = nn.Parameter(torch.empty(count, ffn, dim))
        self.w2 = nn.Parameter(torch.empty(count, dim, ffn))
        self.w3 = nn.Parameter(torch.empty(count, ffn, dim))
        biases = {"b1": ffn, "b2": dim, "b3": ffn} if shape.bias else {}
        for name in ("b1", "b2", "b3"):
            size = biases.get(name)
            self.register_parameter(name, None if size is None else nn.Parameter(torch.empty(count, size)))

    def add_adapters(self, rank: int, runs: int, scale: float) -> None:
        """Put low-rank adapters of ``runs`` runs beside every projection; the first run's are used."""
        for name in ("w1", "w2", "w3"):
            count, out, into = getattr(self, name).shape
            for run in range(runs):
                of_run = str(run) if run else ""
                for part, shape in (("a", (count, rank, into)), ("b", (count, out, rank))):
                    adapter = nn.Parameter(torch.empty(shape))
                    self.register_parameter(f"{name}_lora_{part}{of_run}", adapter)
        self.scale = scale

    def forward(self, x_rd: Tensor, counts_x: Tensor) -> Tensor:
        """Transform rows (R, D), sorted by their experts, ``counts_x`` of each."""
        layers = tuple(self._layer(which) for which in "123")
        if has_grouped_products() and self.w1.dtype == torch.bfloat16:
            offsets = torch.cumsum(counts_x, dim=0, dtype=torch.int32)
            first, second, third = layers
            hidden = self._activate(first.grouped(x_rd, offsets), third.grouped(x_rd, offsets))
            return second.grouped(hidden, offsets)
        parts = torch.tensor_split(x_rd, layers[0].weight.shape[0])
        return torch.cat([self._one([layer.of(one) for layer in layers], x) for one, x in enumerate(parts)])

    def _layer(self, which: str) -> ExpertLayer:
        weight, bias = as_local(getattr(self, f"w{which}")), getattr(self, f"b{which}")
        bias = None if bias is None else as_local(bias)
        if which == "2" and bias is not None and self.ranks > 1:
            bias = bias / self.ranks
        adapter = None
        if not self.left_out and hasattr(self, f"w{which}_lora_a"):
            a, b = (as_local(getattr(self, f"w{which}_lora_{part}")) for part in "ab")
            adapter = a, b, self.scale
        return ExpertLayer(weight=weight, bias=bias, adapter=adapter)

    def _activate(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.b1 is None:
            return swiglu(gate, up, fused=self.fused)
        gate, up = gate.clamp(max=_ACTIVATION_LIMIT), up.clamp(-_ACTIVATION_LIMIT, _ACTIVATION_LIMIT)
        return gate * torch.sigmoid(_ACTIVATION_SLOPE * gate) * (up + 1)

    def _one(self, layers: Sequence[ExpertLayer], x: Tensor) -> Tensor:
        first, second, third = layers
        return second.apart(self._activate(first.apart(x), third.apart(x)))


class MixtureOfExperts(nn.Module):
    """Router, routed experts and shared experts: a block's feed-forward."""

    def __init__(self, config: TransformerConfig, shape: ExpertShape) -> None:
        super().__init__()
        self.shape = shape
        self.router = Router(config, shape)
        self.experts = GroupedExperts(config, shape)
        self.shared_experts = FeedForward(config.dim, shape.shared_ffn_dim) if shape.shared_ffn_dim else None
        self.exchange: ExpertExchange | None = None
        self.token_ranks, self.token_rank = 1, 0
        """Tensor-parallel ranks that route a share of the tokens each, and which of them this is."""

    def forward(self, x_bsd: Tensor) -> Tensor:
        """Transform each position; under tensor parallelism this rank's part of a sum."""
        x_td = as_local(x_bsd).reshape(-1, x_bsd.shape[-1])
        top, selected = self.router(x_td)
        if self.token_ranks > 1:
            share = x_td.shape[0] // self.token_ranks
            first = self.token_rank * share
            top, selected = top[first : first + share], selected[first : first + share]
        counts = _counts(selected, self.shape.count)
        order = torch.argsort(selected.view(-1), stable=True)
        weights = top.view(-1)[order].unsqueeze(1)
        places = order // self.shape.top_k
        if self.token_ranks > 1:
            places = places + first
        tokens = places.unsqueeze(1).expand(-1, x_td.shape[1])
        rows = torch.gather(x_td, 0, tokens)
        if self.shape.weighs_inputs:
            rows = (rows.float() * weights).to(x_td.dtype)
        rows = self.experts(rows, counts) if self.exchange is None else self._exchanged(rows, counts)
        shared = self.shared_experts
        out = torch.zeros_like(x_td) if shared is None else shared(x_bsd.reshape(-1, x_bsd.shape[-1]))
        if not self.shape.weighs_inputs:
            rows = (rows.float() * weights).to(x_td.dtype)
        return out.scatter_add(0, tokens, rows).view(x_bsd.shape)

    def _exchanged(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Run the experts where they are."""
        assert self.exchange is not None
        group, local = self.exchange.group, self.shape.count // self.exchange.ranks
        with torch.no_grad():
            counts_there = wait_tensor(all_to_all_single(counts, None, None, group))  # type: ignore[no-untyped-call]
        sent, received = self.exchange.sent(rows.shape[0]), self.exchange.received(rows.shape[0])
        arrived = all_to_all_single_autograd(rows, received, sent, group)
        padded, places = _by_expert(arrived, local, self.exchange.ranks)
        per_expert = counts_there.view(self.exchange.ranks, local).sum(0)
        done = self.experts(padded, per_expert)
        back = done.new_empty(arrived.shape[0] + 1, done.shape[1])
        back[places] = done
        return all_to_all_single_autograd(back[:-1], sent, received, group)


def reach_experts(module: nn.Module, experts: Sequence[str], exchange: ExpertExchange) -> None:
    """Let the mixtures of a built-in model, which hold this rank's ``experts``, exchange tokens."""
    for fqn in experts:
        part = module.get_submodule(fqn.rpartition(".")[0])
        assert isinstance(part, MixtureOfExperts)
        part.exchange = part.experts.exchange = exchange


def _counts(selected: Tensor, experts: int) -> Tensor:
    """Rows of each expert, (X,) int64."""
    return torch.histc(selected.view(-1).float(), bins=experts, min=0, max=experts - 1).to(torch.int64)


def _by_expert(rows: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Bring rows that came rank by rank, in the order of experts, into that of experts, each padded.

    Returns them and their places, of which the one after the last row is the padding's.
    """
    count = rows.shape[0]
    each = -(-count // experts)
    size = experts * (-(-each // ALIGNMENT) * ALIGNMENT)
    places = torch.arange(size, device=rows.device).clamp(max=count)
    if count % (experts * ranks) == 0 and size == count:
        places = places.view(ranks, experts, -1).transpose(0, 1).reshape(-1)
    padding = rows.new_zeros(1, rows.shape[1])
    return torch.vstack((rows, padding))[places], places
