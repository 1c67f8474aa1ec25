"""Built-in configuration -> :class:`Model`: module on meta, token batches, loss.

GPT-2 and GPT-3 as real modules: LayerNorm, fused QKV, learned positions, GELU, tied head, no dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.catalog import TransformerConfig
from fsdp2prof.estimators.models.builtin_plan import outline_of
from fsdp2prof.estimators.models.llama import LlamaTransformer
from fsdp2prof.estimators.models.losses import head_of, loss_of_model
from fsdp2prof.estimators.models.model import Batch, Model


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
        hidden = self.norm(hidden)  # nothing holds the last block's output while the head runs
        logits: Tensor = self.output(hidden)
        return logits


_RANDOM = {
    *(getattr(Tensor, name) for name in ("normal_", "uniform_", "random_", "bernoulli_", "exponential_")),
    nn.init.normal_,
    nn.init.uniform_,
    nn.init.kaiming_uniform_,
}


class _NoData(TorchFunctionMode):
    """Leave tensors unchanged where they would be filled at random: on meta there is nothing to fill.

    torch's meta kernels of these are Python and import the compiler, which takes seconds. ``torch.tensor``
    gives an empty tensor of its shape, since fake tensors do not know one that it makes on meta.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        if func is torch.tensor and "device" not in kwargs:
            return torch.empty_like(func(*args, **kwargs, device="cpu"), device="meta")
        return func(*args, **kwargs)


@contextmanager
def meta_construction(orig_dtype: str) -> Iterator[None]:
    """Construct modules on the meta device with floating-point parameters of ``orig_dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, orig_dtype))
    try:
        with torch.device("meta"), _NoData():
            yield
    finally:
        torch.set_default_dtype(before)


def build_builtin(config: TransformerConfig, seq_len: int, orig_dtype: str) -> Model:
    """Build a built-in model. Raises ``ModelError`` for more positions than the model has."""
    if config.family == "gpt" and seq_len > config.context:
        raise ModelError(
            f"{config.name} has {config.context} learned positions: seq_len {seq_len} is too long"
        )
    with meta_construction(orig_dtype):
        module = GptTransformer(config) if config.family == "gpt" else LlamaTransformer(config, seq_len)
    return replace(
        outline_of(config),
        module=module,
        make_batch=partial(token_batch, config.vocab_size),
        loss=partial(loss_of_model, head_of(module)),
    )


def token_batch(vocab_size: int, batch_size: int, seq_len: int, device: torch.device) -> Batch:
    """Random token ids and next tokens, both (B, S) int64."""
    tokens = torch.randint(vocab_size, (batch_size, seq_len), device=device)
    targets = torch.randint(vocab_size, (batch_size, seq_len), device=device)
    return Batch(args=(tokens,), targets=targets)
