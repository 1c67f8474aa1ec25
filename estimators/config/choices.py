"""The values that a policy's options accept: words, and the classes of words with a number."""

from __future__ import annotations

from typing import Any, Literal

from fsdp2prof import units
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.config.option import ByUnit, Counted

ReshardRule = Literal["default", "torchtitan", "always", "never"]
Reshard = ReshardRule | int
"""``default``: fully_shard's default (the root keeps its parameters, others reshard). ``torchtitan``:
units after the last block (``norm+output``) keep them, or the last block if there are none. An integer
reshards to that many ranks."""

Prefetch = int | tuple[str, ...]
"""A number of blocks, or units by name in order."""

ExpertShards = Literal["auto", "experts", "hidden"]
KeptLogits = Literal["own", "fp32"]
Allocator = Literal["expandable", "classic"]
Attention = Literal["flash", "flash3", "cudnn", "efficient", "math"]
"""``flash`` is FlashAttention-2; ``flash3`` is FlashAttention-3, which runs only on Hopper."""
Norm = Literal["composed", "fused"]
Mlp = Literal["composed", "fused"]
Float8 = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]


class Every(Counted, word="every"):
    """Every K-th block is checkpointed."""


class InPieces(Counted):
    """Head and cross-entropy without all logits at once."""


class Chunked(InPieces, word="chunked"):
    """Over K chunks of the sequence, each recomputed in backward."""


class ChunkedKept(InPieces, word="chunked-kept"):
    """Over K chunks of the sequence, whose logits are kept for backward: torchtune's
    LinearCrossEntropyLoss."""


class ChunkedBackward(InPieces, word="chunked-backward"):
    """Over K chunks of the tokens, each with its backward at once: torchtitan's ChunkedLossWrapper."""


class ChunkedTokens(InPieces, word="chunked-tokens"):
    """Over chunks of K tokens, each recomputed in backward: TRL's chunked_nll."""


class ChunkedVocabulary(InPieces, word="chunked-vocab"):
    """Over chunks of K entries of the vocabulary, all tokens at once: prime-rl's head until March 2026."""


class ChunkedBlocks(InPieces, word="chunked-blocks"):
    """Over blocks of K tokens by K entries of the vocabulary: prime-rl's fused head."""


class MaskedDocuments(Counted, word="mask"):
    """K documents of equal length per sequence, separated by a mask of every pair of tokens."""


class VarlenDocuments(Counted, word="varlen"):
    """The same by FlashAttention's kernel of variable lengths."""


class FlexDocuments(Counted, word="flex"):
    """The same by flex attention's block mask."""


Documents = MaskedDocuments | VarlenDocuments | FlexDocuments
CheckpointingMode = Literal["none", "full", "children", "op"]
ActivationCheckpointing = CheckpointingMode | Every
"""``children``: each child module of a block on its own; ``op`` is selective by operator."""
ExpertDispatch = Literal["all-to-all", "once"]
LossMode = Literal["full", "native", "in-place", "compiled", "fused", "logprobs", "dpo"]
PIECES = (Chunked, ChunkedKept, ChunkedBackward, ChunkedTokens, ChunkedVocabulary, ChunkedBlocks)
Loss = LossMode | InPieces
"""``full``: over all logits at once, in fp32; ``native``: in the dtype that they have."""
SELECTION = ("attention_is_saved", "ac_saves", "ac_recomputes")
"""Options that refine ``ac="op"``; they have no effect with other values."""


def base_of(value: Any) -> Any:
    """The value of an option for units without a value of their own."""
    return value.base if isinstance(value, ByUnit) else value


def values_of(value: Any) -> tuple[Any, ...]:
    """Every value of an option, of whichever unit."""
    return (value.base, *(own for _, own in value.units)) if isinstance(value, ByUnit) else (value,)


def dtype_bytes(name: str) -> int:
    """Bytes of one element of a torch dtype name. Raises ``ModelError`` for an unknown one."""
    size = units.dtype_bytes(name)
    if size is None:
        raise ModelError(f"unknown dtype {name!r}; known: {', '.join(units.DTYPE_BYTES)}")
    return size
