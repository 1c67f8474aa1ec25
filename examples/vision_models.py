"""Factories of models that take images, for ``fsdp2prof estimate`` and ``check parity``.

    fsdp2prof estimate memory --model vision_models:vit_l16 --mesh dp_shard=8 --batch-size 64
    fsdp2prof estimate comm --model vision_models:dit_xl2 --mesh dp_replicate=2,dp_shard=8 --batch-size 32
    fsdp2prof estimate memory --model vision_models:llava_7b --mesh dp_shard=8 --seq-len 2048 --ac full \
        --wrap EncoderBlock,DecoderBlock --trainable '^(projector|decoder|norm|head)'

run where this file lies. A factory returns the module, its loss and what makes a batch; it runs on the meta
device, so that nothing is allocated. Shapes: B images, N patches, S tokens, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Scaled dot-product attention of several heads, with one projection for all three inputs."""

    def __init__(self, dim: int, heads: int, *, bias: bool = True, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.proj = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, dim))
        return out


class EncoderBlock(nn.Module):
    """A block of a vision transformer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return out


class VisionTransformer(nn.Module):
    """Patches of an image through blocks; classes of the first token, or the features of all patches."""

    def __init__(self, image: int, patch: int, dim: int, layers: int, heads: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, dim))
        self.blocks = nn.ModuleList(EncoderBlock(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes) if classes else None

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, classes), or (B, N, D) without any."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x[:, 1:] if self.head is None else self.head(x[:, 0])


class DiffusionBlock(nn.Module):
    """A block of a diffusion transformer, modulated by its condition (adaLN)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.attention = Attention(dim, heads)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.modulation = nn.Linear(dim, 6 * dim)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """(B, N, D) and (B, D) -> (B, N, D)."""
        parts = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        hidden = self.norm2(x) * (1 + scale2) + shift2
        out: Tensor = x + gate2 * self.fc2(F.gelu(self.fc1(hidden), approximate="tanh"))
        return out


class DiffusionTransformer(nn.Module):
    """Noise in a latent image, predicted from the image, the time step and a class."""

    def __init__(self, latent: int, patch: int, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, dim, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, (latent // patch) ** 2, dim), requires_grad=False)
        self.time1, self.time2 = nn.Linear(256, dim), nn.Linear(dim, dim)
        self.classes = nn.Embedding(1001, dim)
        self.blocks = nn.ModuleList(DiffusionBlock(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.modulation = nn.Linear(dim, 2 * dim)
        self.head = nn.Linear(dim, patch * patch * 8)

    def forward(self, latents: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        """(B, 4, H, W), (B, 256) and (B,) -> (B, N, 8 values a latent pixel of a patch)."""
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        condition = self.time2(F.silu(self.time1(times))) + self.classes(labels)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(F.silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        out: Tensor = self.head(self.norm(x) * (1 + scale) + shift)
        return out


class DecoderBlock(nn.Module):
    """A block of a language model: causal attention and SwiGLU."""

    def __init__(self, dim: int, heads: int, ffn_dim: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(dim), Attention(dim, heads, bias=False, causal=True)
        self.norm2 = nn.RMSNorm(dim)
        self.w1, self.w3 = nn.Linear(dim, ffn_dim, bias=False), nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        x = x + self.attention(self.norm1(x))
        hidden = self.norm2(x)
        out: Tensor = x + self.w2(F.silu(self.w1(hidden)) * self.w3(hidden))
        return out


class VisionLanguageModel(nn.Module):
    """Features of an image, projected, stand before the tokens of a text."""

    def __init__(self, tower: nn.Module, tower_dim: int, dim: int, layers: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.tower = tower
        self.projector = nn.Sequential(nn.Linear(tower_dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.embedding = nn.Embedding(32_064, dim)
        self.decoder = nn.ModuleList(DecoderBlock(dim, heads, ffn) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, 32_064, bias=False)

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        """(B, 3, H, W) and (B, S) -> logits (B, S, V) of the text."""
        features = self.projector(self.tower(images))
        x = torch.cat([features, self.embedding(tokens)], dim=1)
        for block in self.decoder:
            x = block(x)
        out: Tensor = self.head(self.norm(x[:, features.shape[1] :]))
        return out


def vit_l16(layers: int = 24) -> tuple[nn.Module, Any, Any]:
    """ViT-L/16 over 224 x 224 images; the sequence length does not matter."""

    def batch(batch_size: int, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        images = torch.randn(batch_size, 3, 224, 224, device=device)
        return images, torch.randint(1000, (batch_size,), device=device)

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(module(batch[0]).float(), batch[1])

    return VisionTransformer(224, 16, 1024, layers, 16, 1000), loss, batch


def dit_xl2(layers: int = 28) -> tuple[nn.Module, Any, Any]:
    """DiT-XL/2 over 32 x 32 latents; the sequence length does not matter."""

    def batch(batch_size: int, seq_len: int, device: torch.device) -> tuple[Tensor, ...]:
        latents = torch.randn(batch_size, 4, 32, 32, device=device)
        times = torch.randn(batch_size, 256, device=device)
        labels = torch.randint(1000, (batch_size,), device=device)
        return latents, times, labels, torch.randn(batch_size, 256, 32, device=device)

    def loss(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        *inputs, noise = batch
        return F.mse_loss(module(*inputs).float(), noise)

    return DiffusionTransformer(32, 2, 1152, layers, 16), loss, batch


def llava_7b(layers: int = 32) -> tuple[nn.Module, Any, Any]:
    """LLaVA 1.5 7B's sizes: one image of 336 x 336 a sample, 576 tokens of it before those of the text."""

    def batch(batch_size: int, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        images = torch.randn(batch_size, 3, 336, 336, device=device)
        tokens = torch.randint(32_000, (batch_size, seq_len + 1), device=device)
        return images, tokens[:, :-1], tokens[:, 1:]

    def loss(module: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, tokens, targets = batch
        return F.cross_entropy(module(images, tokens).flatten(0, 1).float(), targets.flatten())

    tower = VisionTransformer(336, 14, 1024, 24, 16, 0)
    return VisionLanguageModel(tower, 1024, 4096, layers, 32, 11_008), loss, batch
