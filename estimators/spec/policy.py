"""How a run that has not happened trains: FSDP2 policy, precision, checkpointing, optimizer, batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from fsdp2prof import units
from fsdp2prof.errors import ModelError
from fsdp2prof.estimators.spec.model import MOST_LAYERS
from fsdp2prof.estimators.spec.optimizers import IMPLEMENTATIONS, OPTIMIZERS, OptimizerImpl, OptimizerKind
from fsdp2prof.estimators.spec.option import (
    Counted,
    Dtype,
    Flag,
    Integer,
    Names,
    Regex,
    Text,
    Words,
    option,
    options_of,
    plain,
    read_options,
)

__all__ = [
    "ActivationCheckpointing",
    "Allocator",
    "Chunked",
    "Every",
    "Float8",
    "Loss",
    "PolicySpec",
    "Reshard",
    "Sync",
    "dtype_bytes",
]

ReshardRule = Literal["default", "torchtitan", "always", "never"]
Reshard = ReshardRule | int
"""``default``: fully_shard's own (the root keeps its parameters, others reshard). ``torchtitan``: the last
block keeps them too. An integer reshards to that many ranks."""

Sync = Literal["last", "each"]
Allocator = Literal["expandable", "classic"]
Float8 = Literal["tensorwise", "rowwise"]


@dataclass(frozen=True, slots=True)
class Every(Counted):
    """Every K-th block is checkpointed."""

    word: ClassVar[str] = "every"


@dataclass(frozen=True, slots=True)
class Chunked(Counted):
    """Head and cross-entropy over K pieces of the sequence, recomputed in backward."""

    word: ClassVar[str] = "chunked"


CheckpointingMode = Literal["none", "full", "op"]
ActivationCheckpointing = CheckpointingMode | Every
"""``op`` is selective by operator."""
LossMode = Literal["full"]
Loss = LossMode | Chunked
"""``full``: over all logits at once."""


_MOST_TOKENS = 1 << 28
"""Of a rank's micro-batch: its logits have 2**46 elements then, and sizes still fit 64 bits."""
_MOST_REPEATS = 4096
"""Micro-batches of a step: each is executed."""


def dtype_bytes(name: str) -> int:
    """Bytes of one element of a torch dtype name. Raises ``ModelError`` for an unknown one."""
    size = units.dtype_bytes(name)
    if size is None:
        raise ModelError(f"unknown dtype {name!r}; known: {', '.join(units.DTYPE_BYTES)}")
    return size


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpec:
    """Everything about training that is neither the model nor the mesh.

    Every field takes what a person writes (``ac="every:2"``, ``param_dtype="bf16"``) and holds the typed
    value. Raises ``ModelError`` with one line if a value is unknown or contradicts another.
    """

    batch_size: int = option(1, Integer(1, _MOST_TOKENS), "Sequences per rank and micro-batch.")
    seq_len: int = option(
        4096, Integer(1, _MOST_TOKENS), "Tokens of a sequence, before context parallelism divides it."
    )
    grad_accum: int = option(1, Integer(1, _MOST_REPEATS), "Micro-batches per optimizer step.")
    sync: Sync = option(
        "last",
        Words(words=get_args(Sync)),
        "Reduce gradients after the last micro-batch only, or after each.",
    )
    wrap: tuple[str, ...] = option(
        ("block",),
        Names("block, root, class names or module names"),
        "What is sharded besides the root: block, a class, a module (* matches one name); a+b in one call; "
        "root alone is nothing else.",
    )
    reshard: Reshard = option(
        "default",
        Words(words=get_args(ReshardRule), number="a number of ranks"),
        "After forward: fully_shard's own rule (not the root), torchtitan's (nor the last block), all, none, "
        "or to K ranks.",
    )
    reshard_root: bool | None = option(
        None, Flag(unset=True, off="--keep-root"), "Overrides --reshard for the root."
    )
    param_dtype: str | None = option(
        "bfloat16", Dtype(none=True), "Dtype of the all-gather and of compute; none is the original."
    )
    reduce_dtype: str | None = option(
        "float32", Dtype(none=True), "Dtype of gradient reduction; none is the gradient's own."
    )
    orig_dtype: str = option("float32", Dtype(), "Dtype of the shards, gradients and optimizer state.")
    offload: bool = option(
        False, Flag(), "CPUOffloadPolicy: shards, gradients and optimizer state in pinned host memory."
    )
    trainable: str | None = option(
        None, Regex(), "Searched in parameter names; parameters without a match are frozen."
    )
    ac: ActivationCheckpointing = option(
        "none",
        Words(words=get_args(CheckpointingMode), counted=Every),
        "Activation checkpointing: of every block, selective by operator, or of every K-th block.",
    )
    optimizer: str = option(
        "adamw",
        Words(words=(*OPTIMIZERS, "none")),
        "The optimizer; none trains nothing, forward and backward only.",
    )
    optimizer_impl: OptimizerImpl = option(
        "foreach", Words(words=tuple(IMPLEMENTATIONS)), "How the optimizer goes over its parameters."
    )
    clip_grad: bool = option(True, Flag(), "Clip the global gradient norm each step (foreach).")
    loss: Loss = option(
        "full", Words(words=get_args(LossMode), counted=Chunked), "Over all logits at once, or in K pieces."
    )
    loss_parallel: bool = option(
        True, Flag(), "Under tensor parallelism keep the logits sharded over the vocabulary."
    )
    forward_prefetch: int = option(0, Integer(0, MOST_LAYERS), "Blocks prefetched explicitly in forward.")
    backward_prefetch: int = option(
        0, Integer(0, MOST_LAYERS), "Blocks prefetched explicitly in backward; 0 is FSDP's own single one."
    )
    separate_reduce_scatter_group: bool = option(
        False, Flag(), "A communicator of its own for reduce-scatter."
    )
    reduce_scatter_buffers: int = option(1, Integer(1, MOST_LAYERS), "Reduce-scatter inputs kept in flight.")
    compile: bool = option(False, Flag(), "torch.compile of each block.")
    float8: Float8 | None = option(
        None,
        Words(words=get_args(Float8), none=True),
        "float8 training of the linear layers inside blocks.",
    )
    fp8_all_gather: bool = option(
        False, Flag(), "Gather the weights of linear layers inside blocks as float8."
    )
    allocator: Allocator = option(
        "expandable",
        Words(words=get_args(Allocator)),
        "The CUDA caching allocator's segments.",
        memory_only=True,
    )
    pp_stage: int = option(
        0,
        Integer(0, MOST_LAYERS),
        "Pipeline stage to estimate; the first holds the embedding, the last norm and head.",
    )
    extra_model: str | None = option(
        None, Text("MODEL"), "A second, frozen model run forward without gradients beside the first."
    )

    def __post_init__(self) -> None:
        read_options(self)
        if self.batch_size * self.seq_len > _MOST_TOKENS:
            raise ModelError(
                f"{self.batch_size} sequences of {self.seq_len} tokens are more than {_MOST_TOKENS} tokens"
            )
        if self.fp8_all_gather and self.float8 != "tensorwise":
            raise ModelError(
                "fp8_all_gather needs float8=tensorwise: only its weights are gathered as float8"
            )
        refusal = self.optimizer_kind and self.optimizer_kind.refusal(self.optimizer_impl)
        if refusal:
            raise ModelError(f"optimizer_impl: {refusal}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PolicySpec:
        """Build from plain values (a configuration file, the command line).

        Raises ``ModelError`` for an unknown key.
        """
        known = options_of(cls)
        unknown = sorted(map(str, set(values) - set(known)))
        if unknown:
            raise ModelError(f"policy: unknown option {unknown[0]!r}; there are {', '.join(sorted(known))}")
        return cls(**values)

    def to_mapping(self) -> dict[str, Any]:
        """The plain values :meth:`from_mapping` builds an equal policy from."""
        return plain(self)

    @property
    def optimizer_kind(self) -> OptimizerKind | None:
        """The row of the table of optimizers, ``None`` where nothing is trained."""
        return OPTIMIZERS.get(self.optimizer)

    @property
    def ac_every(self) -> int | None:
        """K if every K-th block is checkpointed, else ``None``."""
        return self.ac.count if isinstance(self.ac, Every) else None

    @property
    def loss_chunks(self) -> int | None:
        """K if the loss is computed in K pieces, else ``None``."""
        return self.loss.count if isinstance(self.loss, Chunked) else None

    @property
    def compute_dtype(self) -> str:
        """Dtype of unsharded parameters and of activations."""
        return self.param_dtype or self.orig_dtype

    @property
    def gradient_dtype(self) -> str:
        """Dtype of the reduce-scatter."""
        return self.reduce_dtype or self.compute_dtype
