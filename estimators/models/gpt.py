"""GPT-2 and GPT-3 as real modules: LayerNorm, fused QKV, learned positions, GELU, tied head, no dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2prof.estimators.models.catalog import TransformerConfig

__all__ = ["GptBlock", "GptTransformer"]


class GptBlock(nn.Module):
    """Pre-norm attention and MLP with biases."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)
        self.mlp_norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.up = nn.Linear(config.dim, config.ffn_dim)
        self.down = nn.Linear(config.ffn_dim, config.dim)

    def forward(self, x_bsd: Tensor) -> Tensor:
        """Run one layer."""
        batch, seq, dim = x_bsd.shape
        qkv = self.qkv(self.attention_norm(x_bsd)).split(dim, dim=2)
        xq, xk, xv = (part.view(batch, seq, self.heads, -1).transpose(1, 2) for part in qkv)
        out = F.scaled_dot_product_attention(xq, xk, xv, is_causal=True)
        hidden = x_bsd + self.proj(out.transpose(1, 2).contiguous().view(batch, seq, dim))
        mlp = self.down(F.gelu(self.up(self.mlp_norm(hidden)), approximate="tanh"))
        result: Tensor = hidden + mlp
        return result


class GptTransformer(nn.Module):
    """Token and position embeddings, blocks, final norm, head tied to the token embedding."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.pos_embeddings: nn.Module | None = nn.Embedding(config.context, config.dim)
        self.layers = nn.ModuleList(GptBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share the head's weight with the embedding; again after ``to_empty``, which unties them."""
        self.output.weight = self.tok_embeddings.weight

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, by transformers' name for it."""
        return self.output

    def forward(self, tokens_bs: Tensor) -> Tensor:
        """Return logits (B, S, V)."""
        hidden = self.tok_embeddings(tokens_bs)
        if self.pos_embeddings is not None:
            positions = torch.arange(tokens_bs.shape[1], device=tokens_bs.device)
            hidden = hidden + self.pos_embeddings(positions)
        for layer in self.layers.children():
            hidden = layer(hidden)
        logits: Tensor = self.output(self.norm(hidden))
        return logits
