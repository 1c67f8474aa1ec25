"""The known models by name: published architectures, buildable without weights or downloads.

This registry knows shapes only: those of ``models.yaml`` are built in, those of ``hugging_face.yaml`` and of
Hugging Face's cache are built by transformers. :mod:`fsdp2prof.estimators.models.llama` and
:mod:`fsdp2prof.estimators.models.builtin` hold the built-in modules and import torch.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.documents import packaged


class _Series(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    shared: dict[str, Any]
    models: dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertShape:
    """Shape of a mixture of experts, which replaces the feed-forward in a block."""

    count: int
    top_k: int
    """Experts that a token goes to."""
    ffn_dim: int
    """Of one routed expert."""
    shared_ffn_dim: int = 0
    """Of the experts that every token passes, together."""
    first: int = 0
    """Blocks before it are dense."""
    every: int = 1
    """From there on the last of so many blocks has experts, the others are dense."""
    sigmoid: bool = False
    """Scores by sigmoid instead of softmax."""
    normalised: bool = False
    """A token's scores are divided by their sum."""
    weighs_inputs: bool = False
    """Scores scale the experts' inputs instead of their outputs."""
    bias: bool = False
    """Router and experts have biases."""

    def is_in(self, layer: int) -> bool:
        """Whether a block has experts."""
        return layer >= self.first and (layer - self.first + 1) % self.every == 0

    def parameters(self, dim: int) -> int:
        """Of router, routed and shared experts."""
        biases = self.count * (2 * self.ffn_dim + dim + 1) if self.bias else 0
        return dim * (3 * self.count * self.ffn_dim + self.count + 3 * self.shared_ffn_dim) + biases


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape:
    """Shape of multi-head latent attention: keys and values from a compressed vector."""

    q_rank: int
    """Of the compressed queries; 0 projects them at once."""
    kv_rank: int
    nope_dim: int
    """Of a head's queries and keys without positions."""
    rope_dim: int
    """Of those with, which all heads' keys share."""
    value_dim: int

    def parameters(self, dim: int, heads: int) -> int:
        """Of all projections and norms."""
        queries = heads * (self.nope_dim + self.rope_dim)
        q = dim * self.q_rank + self.q_rank * (queries + 1) if self.q_rank else dim * queries
        kv = dim * (self.kv_rank + self.rope_dim) + self.kv_rank
        return q + kv + self.kv_rank * heads * (self.nope_dim + self.value_dim) + heads * self.value_dim * dim


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig:
    """Shape of a decoder-only transformer."""

    name: str
    family: Literal["llama", "qwen", "gpt"]
    """``llama``: complex rotary; ``qwen``: half-rotation rotary; ``gpt``: learned positions, LayerNorm."""
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    context: int
    """Longest sequence it was published with; the size of learned position embeddings."""
    tied: bool = False
    """Head and token embedding share one parameter."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each head's queries and keys."""
    experts: ExpertShape | None = None
    latent: LatentShape | None = None
    sinks: bool = False
    """Attention has a learned sink a head, and a bias on its output."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def parameters(self) -> int:
        """Trainable parameters, tied ones counted once, calculated from the shape."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        embedding = self.vocab_size * self.dim
        if self.family == "gpt":
            attention = self.dim * 3 * q + 3 * q + q * self.dim + self.dim
            ffn = 2 * self.dim * self.ffn_dim + self.ffn_dim + self.dim
            layer = attention + ffn + 4 * self.dim
            return embedding + self.context * self.dim + self.layers * layer + 2 * self.dim
        attention = 2 * self.dim * q + 2 * self.dim * kv
        attention += (q + 2 * kv if self.qkv_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        attention += self.dim + self.heads if self.sinks else 0
        if self.latent is not None:
            attention = self.latent.parameters(self.dim, self.heads)
        sparse = self.sparse_layers
        ffn = (self.layers - sparse) * 3 * self.dim * self.ffn_dim
        ffn += sparse * self.experts.parameters(self.dim) if self.experts is not None else 0
        layers = self.layers * (attention + 2 * self.dim) + ffn
        return embedding * (1 if self.tied else 2) + layers + self.dim

    @property
    def sparse_layers(self) -> int:
        """Blocks with experts."""
        return 0 if self.experts is None else sum(map(self.experts.is_in, range(self.layers)))


def _builtin_models() -> dict[str, TransformerConfig]:
    """Read ``models.yaml``; heads divide ``dim`` evenly unless ``head_dim`` is given."""
    found = {}
    for series in packaged("fsdp2prof.estimators.config", "models.yaml", dict[str, _Series]).values():
        for name, own in series.models.items():
            shape = {"name": name, **series.shared, **own}
            shape.setdefault("head_dim", shape["dim"] // shape["heads"])
            found[name] = msgspec.convert(shape, TransformerConfig)
    return found


BUILTIN_MODELS = _builtin_models()
"""Built-in models by name."""


_OF_HUGGING_FACE = {
    "llama-2-": "llama2-",
    "meta-llama-3-": "llama3-",
    "llama-3-": "llama3-",
    "meta-llama-3.1-": "llama3.1-",
    "llama-3.1-": "llama3.1-",
    "llama-3.2-": "llama3.2-",
    "llama-3.3-": "llama3.1-",
    "llama-4-scout-17b-16e": "llama4-scout",
    "llama-4-maverick-17b-128e": "llama4-maverick",
    "deepseek-r1-distill-llama-": "llama3.1-",
    "deepseek-r1-distill-qwen-": "qwen2.5-",
    "deepseek-v3.1": "deepseek-v3-671b",
    "deepseek-v3": "deepseek-v3-671b",
    "deepseek-r1": "deepseek-v3-671b",
    "qwen2.5-math-": "qwen2.5-",
    "qwen2.5-coder-": "qwen2.5-",
    "qwen2.5-0.5b": "qwen2-0.5b",
    "qwen2.5-1.5b": "qwen2-1.5b",
    "qwq-32b": "qwen2.5-32b",
    "llama-3.1-nemotron-70b": "llama3.1-70b",
    "hermes-3-llama-3.1-": "llama3.1-",
    "vicuna-": "llama2-",
    "mistral-7b-instruct-v0.3": "mistral-7b-v0.3",
    "mathstral-7b": "mistral-7b-v0.3",
    "zephyr-7b": "mistral-7b",
    "phi-3-mini-4k": "phi-3-mini",
    "phi-3-mini-128k": "phi-3-mini",
    "phi-3.5-mini": "phi-3-mini",
    "phi-3-medium-4k": "phi-3-medium",
    "phi-3-medium-128k": "phi-3-medium",
    "phi-4-reasoning": "phi-4",
    "olmo-3-1025-": "olmo-3-",
    "olmo-3-1125-": "olmo-3-",
    "smollm-": "smollm2-",
    "yi-1.5-": "yi-",
    "deepseek-v2-lite": "deepseek-v3-16b",
    "deepseek-coder-v2-lite": "deepseek-v3-16b",
}
"""How names on Hugging Face begin -> how the built-in model of the same shape is named; the longest wins."""
_VARIANT = re.compile(
    r"-(?:instruct|base|chat|hf|it|pt|thinking|original|python|preview|1m|fp8|bf16|distill|sft|dpo|alpha|beta|"
    r"\d{4}|v[01]\.\d|merge|dequantized|intermediate-step-\d+k-\dt)$"
)
"""The text after the size in the name of a model of the same shape."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def named_on_hugging_face(name: str) -> str | None:
    """The built-in model of the shape of a Hugging Face id (``meta-llama/Llama-3.1-8B``), if there is one."""
    return _same_shape(name, BUILTIN_MODELS)


def _same_shape(name: str, known: Collection[str]) -> str | None:
    """The known model of which a Hugging Face id names a variant."""
    short = name.rstrip("/").rpartition("/")[2].lower()
    while True:
        for begins in sorted(_OF_HUGGING_FACE, key=len, reverse=True):
            if short not in known and short.startswith(begins):
                own = _OF_HUGGING_FACE[begins] + short[len(begins) :]
                short = own if own in known else short
        if short in known:
            return short
        if (shorter := _VARIANT.sub("", short)) == short:
            return None
        short = shorter


@lru_cache
def _published() -> dict[str, dict[str, Any]]:
    """The configurations of ``hugging_face.yaml``, by name."""
    all_series = packaged("fsdp2prof.estimators.config", "hugging_face.yaml", dict[str, _Series])
    return {
        name: series.shared | own for series in all_series.values() for name, own in series.models.items()
    }


def published_models() -> Collection[str]:
    """Names of the models whose configuration is known and that transformers builds."""
    return _published().keys()


def configuration_of(name: str) -> dict[str, Any] | Path | None:
    """The ``config.json`` of a model that is not built in: its values, or a file of Hugging Face's cache."""
    if name in BUILTIN_MODELS or named_on_hugging_face(name) is not None:
        return None
    known = _same_shape(name, published_models())
    return _cached(name) if known is None else {**_published()[known], "_name_or_path": name}


def _cached(name: str) -> Path | None:
    """The newest ``config.json`` of a Hugging Face id among the files that were downloaded before."""
    if not _HUB_ID.fullmatch(name):
        return None
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    try:
        found = [(one.stat().st_mtime, one) for one in folder.glob("snapshots/*/config.json")]
    except OSError:
        return None
    return max(found)[1] if found else None


def builtin_config(name: str) -> TransformerConfig:
    """Look up a built-in model. Raises ``ModelError`` naming the closest ones."""
    if name in BUILTIN_MODELS:
        return BUILTIN_MODELS[name]
    if (known := named_on_hugging_face(name)) is not None:
        return BUILTIN_MODELS[known]
    if "/" in name:
        raise ModelError(
            f"{name!r} is not a known model, nor a folder, nor in the Hugging Face cache of this machine: "
            "give --model its config.json, or a known name (fsdp2prof inspect models)"
        )
    close = difflib.get_close_matches(name.lower(), [*BUILTIN_MODELS, *published_models()], n=3, cutoff=0.4)
    hint = (
        f"did you mean {', '.join(close)}?"
        if close
        else "fsdp2prof inspect models lists those that are known"
    )
    raise ModelError(
        f"unknown model {name!r}: {hint} (a config.json or package.module:factory is accepted too)"
    )
