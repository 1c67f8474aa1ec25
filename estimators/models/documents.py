"""Documents packed into a sequence, each attending to itself alone, and what keeps them apart.

K documents of a sequence of S tokens have S/K each. The *mask* is transformers' own, of every pair of tokens,
which it makes of positions that begin again; attention copies it into its dtype and keeps it for backward.
Kernels of *varlen* (FlashAttention) and *flex* attention know where documents begin, and hold what attention
over whole sequences holds: both run each document as a sequence of its own, which computes the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.choices import Documents, FlexDocuments, MaskedDocuments
from fsdp2prof.estimators.config.policy import PolicySpec
from fsdp2prof.estimators.models.model import Batch, Model

_FLEX_BLOCK = 128
"""Tokens of a side of a block mask's blocks."""
_ATTENTION = "fsdp2prof_documents"
EAGER = "its eager attention runs"
"""In the note on a model of transformers that has no SDPA."""
_SUPPORT = {
    "mask": ("_supports_sdpa", "SDPA"),
    "varlen": ("_supports_flash_attn", "FlashAttention"),
    "flex": ("_supports_flex_attn", "flex attention"),
}
_NOT_BY_DOCUMENT = ("mamba", "linear_attention", "conv")
"""Layers with a state that continues from token to token, by their type or class."""


def with_documents(model: Model, policy: PolicySpec) -> Model:
    """A model whose sequences are packed as the policy says; the model itself where they are not.

    Raises ``ModelError`` for documents that the sequence does not hold, and for a model that is not known to
    keep them apart in this way.
    """
    documents = policy.documents
    if documents is None:
        return model
    if policy.seq_len % documents.count:
        raise ModelError(f"documents: {documents.count} of equal length do not fill {policy.seq_len} tokens")
    if policy.images:
        raise ModelError("documents: sequences with images are not modelled packed")
    if model.config is not None:
        if isinstance(documents, MaskedDocuments):
            raise ModelError("documents: built-in models have no mask of documents: take flex or varlen")
        batch = partial(_packed, model.make_batch, documents, False)
    else:
        _let_transformers(model, documents)
        batch = partial(_packed, model.make_batch, documents, True)
    return replace(model, make_batch=batch, notes=(*model.notes, _note(documents, policy.seq_len)))


def with_fused_attention(model: Model, policy: PolicySpec) -> Model:
    """A model of transformers without SDPA that runs the fused attention that the policy states.

    Trainers run such models (gpt-oss) by kernels that know their sinks; without a statement transformers'
    eager attention runs, and the model itself is returned.
    """
    module: Any = model.module
    config = getattr(module, "config", None)
    if not policy.attention_is_stated or getattr(config, "_attn_implementation", None) != "eager":
        return model
    fused = getattr(module, "_supports_flash_attn", False) or getattr(module, "_supports_flex_attn", False)
    if policy.attention == "math" or not fused:
        return model
    _register(module)
    notes = tuple(note for note in model.notes if EAGER not in note)
    said = f"attention={policy.attention}: {type(module).__name__} by a fused kernel, windows computed whole"
    return replace(model, notes=(*notes, said))


def documents_apart(documents: Documents | None) -> AbstractContextManager[object]:
    """Run causal attention over whole sequences document by document, if no mask separates these."""
    if documents is None or isinstance(documents, MaskedDocuments):
        return nullcontext()
    return _by_document(documents)


def _note(documents: Documents, seq_len: int) -> str:
    each = f"{documents.count} documents of {seq_len // documents.count} tokens in each sequence"
    if isinstance(documents, MaskedDocuments):
        return (
            f"{each}, kept apart by transformers' mask of every pair of tokens: flash attention takes none, "
            "and all pairs are computed"
        )
    if isinstance(documents, FlexDocuments):
        return f"{each}, kept apart by flex attention's block mask, created for each micro-batch"
    return f"{each}, kept apart by FlashAttention's kernel of variable lengths"


def _let_transformers(model: Model, documents: Documents) -> None:
    """Have a model of transformers keep documents apart. Raises ``ModelError`` if it does not know how."""
    module: Any = model.module
    if not hasattr(module, "set_attn_implementation"):
        raise ModelError(
            f"documents: it is unknown how {model.name} separates them: pack them in its own factory"
        )
    name, (support, kernel) = type(module).__name__, _SUPPORT[documents.word]
    if not getattr(module, support, False):
        raise ModelError(f"documents: {name} does not support {kernel}, which documents={documents} needs")
    kinds = {str(kind) for kind in getattr(module.config.get_text_config(), "layer_types", None) or ()} | {
        type(part).__name__.lower() for part in module.modules()
    }
    for one in _NOT_BY_DOCUMENT:
        if found := sorted(kind for kind in kinds if one in kind and not kind.startswith("conv1d")):
            raise ModelError(
                f"documents: {name} has layers ({found[0]}) whose state continues from one document to the "
                "next: separating them is not modelled"
            )
    if isinstance(documents, MaskedDocuments):
        return
    _register(module)


def _register(module: Any) -> None:
    """Let a model of transformers run :func:`_attention`."""
    utilities = importlib.import_module("transformers.modeling_utils")
    utilities.AttentionInterface.register(_ATTENTION, _attention)
    module.set_attn_implementation(_ATTENTION)


def _packed(
    make: Callable[[int, int, torch.device], Batch],
    documents: Documents,
    has_positions: bool,
    batch_size: int,
    seq_len: int,
    device: torch.device,
) -> Batch:
    """A batch whose positions, where the model takes any, begin again with each document."""
    batch = make(batch_size, seq_len, device)
    if has_positions:
        positions = torch.arange(seq_len, device=device) % (seq_len // documents.count)
        batch = replace(batch, named={**batch.named, "position_ids": positions.repeat(batch_size, 1)})
    if isinstance(documents, FlexDocuments):
        batch = replace(batch, beside=_block_mask(batch_size, seq_len, device))
    return batch


def _block_mask(batch_size: int, seq_len: int, device: torch.device) -> tuple[Tensor, ...]:
    """The tensors of a ``BlockMask``: for rows and for columns, partial and full blocks, each counted and
    listed.

    Source: ``torch.nn.attention.flex_attention.BlockMask``.
    """
    blocks = -(-seq_len // _FLEX_BLOCK)
    counts, lists = (batch_size, 1, blocks), (batch_size, 1, blocks, blocks)
    return tuple(
        torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(4) for shape in (counts, lists)
    )


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention as transformers calls it; the kernel knows windows and documents, no mask is made.

    ``query`` (B, H, S, E), keys and values with their own heads, ``s_aux`` the sinks of the query's heads.
    FlashAttention takes values as wide as keys: narrower ones are padded.
    """
    del module, attention_mask, others
    width = value.shape[-1]
    wide = F.pad(value, [0, key.shape[-1] - width]) if width < key.shape[-1] else value
    out = F.scaled_dot_product_attention(
        query,
        key,
        wide,
        dropout_p=dropout,
        is_causal=True,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    if s_aux is not None:
        out = _Sinks.apply(out, s_aux)  # type: ignore[no-untyped-call]
    return out[..., :width].transpose(1, 2).contiguous(), None


class _Sinks(torch.autograd.Function):
    """Sinks as a kernel has them: they hold nothing, and get a gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, sinks: Tensor) -> Tensor:
        """Pass the kernel's result on."""
        ctx.like = sinks.shape, sinks.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result's gradient and one of the sinks."""
        shape, dtype = ctx.like
        return gradients[0], gradients[0].new_zeros(shape, dtype=dtype)


@contextmanager
def _by_document(documents: Documents) -> Iterator[None]:
    """Cut causal attention over whole sequences into documents, also where backward recomputes it."""
    own = F.scaled_dot_product_attention
    copies = not isinstance(documents, FlexDocuments)

    def attend(query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Tensor:
        cut: list[Any] = [_cut(tensor, documents.count, copies) for tensor in (query, key, value)]
        if not named.get("is_causal") or any(tensor is None for tensor in cut):
            return own(query, key, value, *others, **named)
        out: Tensor = own(*cut, *others, **named).transpose(1, 2)
        return out.reshape(query.shape[0], -1, *out.shape[2:]).transpose(1, 2)

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


def _cut(tensor: Tensor, count: int, copies: bool) -> Tensor | None:
    """(B, H, S, E) as (B x documents, H, S / documents, E).

    A tensor of tokens that do not lie one after another is copied first, as transformers does before
    FlashAttention's kernel. Flex attention's takes it as it is: there, without ``copies``, it stays whole.
    """
    by_token = tensor.transpose(1, 2)
    if not copies and not by_token.is_contiguous():
        return None
    shape = (tensor.shape[0] * count, tensor.shape[2] // count, *by_token.shape[2:])
    return by_token.reshape(shape).transpose(1, 2)
