"""Llama, Qwen, DeepSeek and their like as real modules: RMSNorm, rotary attention, SwiGLU or experts.

The computations are those the families are trained with, because a memory estimate runs them: RMSNorm in
fp32 as separate operators, Llama's rotary embedding in complex fp32, scaled dot-product attention over
repeated K/V heads, logits cast to fp32 for the cross-entropy. Shapes: B batch, S sequence, D model dim,
H heads, G key/value heads, E head dim, F feed-forward dim, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from fsdp2prof.estimators.config.catalog import LatentShape, TransformerConfig
from fsdp2prof.estimators.models.experts import MixtureOfExperts
from fsdp2prof.estimators.models.feed_forward import FeedForward
from fsdp2prof.estimators.models.local_tensors import as_local
from fsdp2prof.fake_tensors import FusedRMSNorm


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32."""

    fused = False
    """Run as one kernel would, on fake tensors: the same result on real ones, by separate operators."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (..., dim) and return its dtype."""
        if self.fused and is_fake(x):
            normed_at_once: Tensor = FusedRMSNorm.apply(x, self.weight)  # type: ignore[no-untyped-call]
            return normed_at_once
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.type_as(x) * self.weight


def rotate_complex(x_bshe: Tensor, rotary: Tensor) -> Tensor:
    """Apply rotary positions as complex multiplications in fp32; ``rotary`` is (S, E/2) complex64."""
    pairs = torch.view_as_complex(x_bshe.float().reshape(*x_bshe.shape[:-1], -1, 2))
    turned = torch.view_as_real(pairs * rotary.view(1, rotary.shape[0], 1, rotary.shape[1])).flatten(3)
    return turned.type_as(x_bshe)


def rotate_half(x_bshe: Tensor, rotary: Tensor) -> Tensor:
    """Apply rotary positions by halves in the input's dtype; ``rotary`` is cos and sin, (2, S, E)."""
    cos, sin = rotary[0].unsqueeze(0).unsqueeze(2), rotary[1].unsqueeze(0).unsqueeze(2)
    low, high = x_bshe.chunk(2, dim=-1)
    return x_bshe * cos + torch.cat((-high, low), dim=-1) * sin


def repeat_heads(x_bsge: Tensor, times: int) -> Tensor:
    """Repeat each key/value head for its group of queries: (B, S, G, E) -> (B, S, G*times, E)."""
    if times == 1:
        return x_bsge
    batch, seq, groups, width = x_bsge.shape
    spread = x_bsge.unsqueeze(3).expand(batch, seq, groups, times, width)
    return spread.reshape(batch, seq, groups * times, width)


class Attention(nn.Module):
    """Causal grouped-query attention. Head counts come from the projections, so they may be sharded."""

    repeats_kv = False
    """Copy keys and values to every query head, instead of letting the kernel read them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.repeats = config.heads // config.kv_heads
        self.rotate = rotate_complex if config.family == "llama" else rotate_half
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, q, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, kv, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, kv, bias=config.qkv_bias)
        self.wo = nn.Linear(q, config.dim, bias=config.sinks)
        self.sinks = nn.Parameter(torch.empty(config.heads)) if config.sinks else None
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x_bsd: Tensor, rotary: Tensor) -> Tensor:
        """Attend within each sequence."""
        batch, seq, _ = x_bsd.shape
        xq = self.wq(x_bsd).view(batch, seq, -1, self.head_dim)
        xk = self.wk(x_bsd).view(batch, seq, -1, self.head_dim)
        xv = self.wv(x_bsd).view(batch, seq, -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            xq, xk = self.q_norm(xq), self.k_norm(xk)
        xq, xk = self.rotate(xq, rotary), self.rotate(xk, rotary)
        repeats = self.repeats if self.repeats_kv else 1
        keys, values = repeat_heads(xk, repeats), repeat_heads(xv, repeats)
        out = F.scaled_dot_product_attention(
            xq.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            is_causal=True,
            enable_gqa=repeats != self.repeats,
        )
        if self.sinks is not None:  # takes its part of the softmax: here a gate a head
            out = out * torch.sigmoid(-as_local(self.sinks)).view(1, -1, 1, 1)
        projected: Tensor = self.wo(out.transpose(1, 2).contiguous().view(batch, seq, -1))
        return projected


class LatentAttention(nn.Module):
    """Causal multi-head latent attention: keys and values are projected from a compressed vector.

    Values are narrower than queries and keys, which flash attention does not take: on a GPU the efficient
    kernel runs, and so it does on tensors without data.
    """

    def __init__(self, config: TransformerConfig, shape: LatentShape) -> None:
        super().__init__()
        self.shape = shape
        width = config.heads * (shape.nope_dim + shape.rope_dim)
        self.wq = nn.Linear(config.dim, width, bias=False) if not shape.q_rank else None
        self.wq_a = nn.Linear(config.dim, shape.q_rank, bias=False) if shape.q_rank else None
        self.q_norm = RMSNorm(shape.q_rank, config.norm_eps) if shape.q_rank else None
        self.wq_b = nn.Linear(shape.q_rank, width, bias=False) if shape.q_rank else None
        self.wkv_a = nn.Linear(config.dim, shape.kv_rank + shape.rope_dim, bias=False)
        self.kv_norm = RMSNorm(shape.kv_rank, config.norm_eps)
        kv_width = config.heads * (shape.nope_dim + shape.value_dim)
        self.wkv_b = nn.Linear(shape.kv_rank, kv_width, bias=False)
        self.wo = nn.Linear(config.heads * shape.value_dim, config.dim, bias=False)

    def forward(self, x_bsd: Tensor, rotary: Tensor) -> Tensor:
        """Attend within each sequence."""
        batch, seq, _ = x_bsd.shape
        nope, rope, value = self.shape.nope_dim, self.shape.rope_dim, self.shape.value_dim
        if self.wq is not None:
            queries = self.wq(x_bsd)
        else:
            assert self.wq_a is not None and self.q_norm is not None and self.wq_b is not None  # noqa: PT018
            queries = self.wq_b(self.q_norm(self.wq_a(x_bsd)))
        q_nope, q_rope = queries.view(batch, seq, -1, nope + rope).split([nope, rope], dim=-1)
        xq = torch.cat([q_nope, rotate_complex(q_rope, rotary)], dim=-1)
        latent, k_rope = self.wkv_a(x_bsd).split([self.shape.kv_rank, rope], dim=-1)
        k_rope = rotate_complex(k_rope.unsqueeze(2), rotary)
        keys_values = self.wkv_b(self.kv_norm(latent)).view(batch, seq, -1, nope + value)
        k_nope, xv = keys_values.split([nope, value], dim=-1)
        xk = torch.cat([k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)], dim=-1)
        queries, keys, values = (heads.transpose(1, 2) for heads in (xq, xk, xv))
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        projected: Tensor = self.wo(out.transpose(1, 2).contiguous().view(batch, seq, -1))
        return projected


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward with residuals: the unit FSDP wraps."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.attention = (
            Attention(config) if config.latent is None else LatentAttention(config, config.latent)
        )
        self.feed_forward: nn.Module
        if config.experts is not None and config.experts.is_in(layer):
            self.feed_forward = MixtureOfExperts(config, config.experts)
        else:
            self.feed_forward = FeedForward(config.dim, config.ffn_dim)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x_bsd: Tensor, rotary: Tensor) -> Tensor:
        """Run one layer."""
        hidden = x_bsd + self.attention(self.attention_norm(x_bsd), rotary)
        out: Tensor = hidden + self.feed_forward(self.ffn_norm(hidden))
        return out


class LlamaTransformer(nn.Module):
    """Embedding, blocks, norm and head. Build it under ``torch.device("meta")``."""

    rotary: Tensor
    """Rotary positions: (S, E/2) complex64 for ``llama``, cos and sin (2, S, E) fp32 otherwise."""

    def __init__(self, config: TransformerConfig, seq_len: int) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(TransformerBlock(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie_weights()
        pairs = (config.head_dim if config.latent is None else config.latent.rope_dim) // 2
        if config.family == "llama":
            table = torch.empty(seq_len, pairs, dtype=torch.complex64)
        else:
            table = torch.empty(2, seq_len, 2 * pairs, dtype=torch.float32)
        self.register_buffer("rotary", table, persistent=False)

    def tie_weights(self) -> None:
        """Share the head's weight with the embedding if the model ties them; again after ``to_empty``."""
        if self.config.tied:
            self.output.weight = self.tok_embeddings.weight

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, by transformers' name for it."""
        return self.output

    def forward(self, tokens_bs: Tensor) -> Tensor:
        """Return logits (B, S, V)."""
        hidden = self.tok_embeddings(tokens_bs)
        rotary = self.rotary
        if self.config.family != "llama":
            rotary = rotary.to(hidden.dtype)
        for layer in self.layers.children():
            hidden = layer(hidden, rotary)
        hidden = self.norm(hidden)  # nothing holds the last block's output while the head runs
        logits: Tensor = self.output(hidden)
        return logits
